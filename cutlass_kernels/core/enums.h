// The enumerations that kernels, calls and Python share, each stated once: its type, its names, and what Python says of
// it follow from these lists. types.def has the element types, gemm_fields.h the roles.
//
// VALUE(enumerator, name)
#pragma once

#include <cstdint>

#define JAX_STREAMK_FAMILIES(VALUE) \
  VALUE(kHost, "host")              \
  VALUE(kSm80, "sm80")              \
  VALUE(kSm90, "sm90")              \
  VALUE(kSkinny, "skinny")
// kRow: the last index is contiguous (A is m x k, B is k x n, D is m x n and always kRow).
#define JAX_STREAMK_MAJORS(VALUE) VALUE(kRow, "row") VALUE(kColumn, "column")
// How two f32 numbers are multiplied. Other types have kNative only.
#define JAX_STREAMK_MATHS(VALUE) VALUE(kNative, "native") VALUE(kTF32, "tf32") VALUE(kTF32x3, "tf32x3")
#define JAX_STREAMK_REDUCTIONS(VALUE) \
  VALUE(kOrdered, "ordered")          \
  VALUE(kAtomic, "atomic")            \
  VALUE(kSeparate, "separate")
// As in jax.nn: kGelu is exact, kGeluTanh its approximation.
#define JAX_STREAMK_ACTIVATIONS(VALUE) \
  VALUE(kNone, "none")                 \
  VALUE(kRelu, "relu")                 \
  VALUE(kGelu, "gelu")                 \
  VALUE(kGeluTanh, "gelu_tanh")        \
  VALUE(kSilu, "silu")                 \
  VALUE(kSigmoid, "sigmoid")           \
  VALUE(kTanh, "tanh")
#define JAX_STREAMK_RAGGED(VALUE) VALUE(kNone, "none") VALUE(kM, "m") VALUE(kK, "k")
#define JAX_STREAMK_INVARIANTS(VALUE) VALUE(kNone, "none") VALUE(kM, "m") VALUE(kN, "n")
#define JAX_STREAMK_SCHEDULE_KINDS(VALUE) \
  VALUE(kDataParallel, "data_parallel")   \
  VALUE(kSplitK, "split_k")               \
  VALUE(kStreamK, "stream_k")
#define JAX_STREAMK_RASTERS(VALUE) VALUE(kAlongM, "along_m") VALUE(kAlongN, "along_n")
// How a launch's clusters are numbered as workers: in launch order, so that neighbours share a GPC, or so that the
// first ones are spread over all GPCs (launch/clusters.h).
#define JAX_STREAMK_CLUSTER_ORDERS(VALUE) \
  VALUE(kAsLaunched, "as_launched")       \
  VALUE(kByGpc, "by_gpc")                 \
  VALUE(kSpread, "spread")
// What a CTA's warps do. kCooperative: two consumer warpgroups share a tile, or three share one of 192 rows. kPingpong:
// two have a tile each, and one runs its epilogue while the other multiplies. kSingle: one consumer, and several such
// CTAs on an SM. kMultistage, kPipelined: all load, by cp.async or through registers, and multiply. kStreaming: each
// warp loads for itself. kThreads: threads of a CPU.
#define JAX_STREAMK_WARP_SCHEDULES(VALUE) \
  VALUE(kThreads, "threads")              \
  VALUE(kCooperative, "cooperative")      \
  VALUE(kPingpong, "pingpong")            \
  VALUE(kSingle, "single")                \
  VALUE(kMultistage, "multistage")        \
  VALUE(kPipelined, "pipelined")          \
  VALUE(kStreaming, "streaming")

// ENUM(type, its values, Python's docstring)
#define JAX_STREAMK_ENUMS(ENUM)                                                                              \
  ENUM(Family, JAX_STREAMK_FAMILIES, "Which template a kernel comes from.")                                  \
  ENUM(Major, JAX_STREAMK_MAJORS, "row: the last index is contiguous.")                                      \
  ENUM(Math, JAX_STREAMK_MATHS, "What a product of two f32 numbers is.")                                     \
  ENUM(Reduction, JAX_STREAMK_REDUCTIONS, "How the partials of a shared tile become one.")                   \
  ENUM(Activation, JAX_STREAMK_ACTIVATIONS, "What the epilogue applies last.")                               \
  ENUM(Ragged, JAX_STREAMK_RAGGED, "Which dimension the groups of a product cut into runs of any size.")     \
  ENUM(Invariant, JAX_STREAMK_INVARIANTS, "The extent that the bits of an element of D must not depend on.") \
  ENUM(ScheduleKind, JAX_STREAMK_SCHEDULE_KINDS, "How the MAC-iteration space is cut.")                      \
  ENUM(Raster, JAX_STREAMK_RASTERS, "Along which dimension consecutive tiles lie.")                          \
  ENUM(ClusterOrder, JAX_STREAMK_CLUSTER_ORDERS, "Which worker each cluster of a launch is.")                \
  ENUM(WarpSchedule, JAX_STREAMK_WARP_SCHEDULES, "What the warps of a CTA do.")

namespace jax_streamk {

// The type of an element in memory.
enum class Type : int32_t {
#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) type,
#include "cutlass_kernels/core/types.def"
};

#define JAX_STREAMK_VALUE(value, name) value,
#define JAX_STREAMK_ENUM(type, values, doc) enum class type : int32_t { values(JAX_STREAMK_VALUE) };
JAX_STREAMK_ENUMS(JAX_STREAMK_ENUM)
#undef JAX_STREAMK_ENUM
#undef JAX_STREAMK_VALUE

char const* name_of(Type);
#define JAX_STREAMK_ENUM(type, values, doc) char const* name_of(type);
JAX_STREAMK_ENUMS(JAX_STREAMK_ENUM)
#undef JAX_STREAMK_ENUM

// How many values an enumeration has: they are 0, 1, ...
template <class Enum>
inline constexpr int32_t kCount = 0;
#define JAX_STREAMK_VALUE(value, name) +1
#define JAX_STREAMK_ENUM(type, values, doc) \
  template <>                               \
  inline constexpr int32_t kCount<type> = 0 values(JAX_STREAMK_VALUE);
JAX_STREAMK_ENUMS(JAX_STREAMK_ENUM)
#undef JAX_STREAMK_ENUM
#undef JAX_STREAMK_VALUE

}  // namespace jax_streamk
