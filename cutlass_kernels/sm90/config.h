// The parameters of an sm90 kernel: a row of table.txt, with one of the row's combinations of types and majornesses.
#pragma once

#include <string>

#include "cutlass/numeric_types.h"
#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <Type kType>
struct ElementOf;
template <>
struct ElementOf<Type::kBF16> {
  using type = cutlass::bfloat16_t;
  using multiplied = type;
};
template <>
struct ElementOf<Type::kF16> {
  using type = cutlass::half_t;
  using multiplied = type;
};
template <>
struct ElementOf<Type::kF32> {
  using type = float;
  using multiplied = cutlass::tfloat32_t;
};

template <>
struct ElementOf<Type::kS8> {
  using multiplied = int8_t;
};
template <>
struct ElementOf<Type::kS32> {
  using type = int32_t;
};
template <>
struct ElementOf<Type::kE4M3> {
  using multiplied = cutlass::float_e4m3_t;  // or e5m2: kernels of one stand for both
};

struct Config {
  Type type_a, type_b, type_d;
  Major major_a, major_b;
  int tile_m, tile_n, tile_k;
  int cluster_m, cluster_n;
  WarpSchedule warp_schedule;
  // Computes D^T = B^T A^T, so that the tile's n, which may be any multiple of 8, lies along the problem's m.
  bool swap_ab;
  Math math;
  int store_columns;  // columns of the kernel's own result in a box of the store (store.h)
  bool gated;         // runs gated problems (gated_epilogue.h)
  Ragged ragged;      // runs ragged problems of this kind (ragged.h)
  bool joined;        // runs joined problems

  // Whether B is numbers with scales, which are multiplied as A's type.
  constexpr bool scaled() const { return type_a != type_b; }
  constexpr int number_bits() const { return !scaled() ? 0 : type_b == Type::kS4 || type_b == Type::kE2M1 ? 4 : 8; }

  constexpr bool is_integer() const { return type_a == Type::kS8; }
  // Whether both operands have eight bits.
  constexpr bool is_bytes() const { return type_a == Type::kE4M3 || is_integer(); }

  // Consumer warpgroups that share a tile.
  constexpr int warpgroups() const { return warp_schedule != WarpSchedule::kCooperative ? 1 : tile_m == 192 ? 3 : 2; }

  // KernelInfo::promotion_k. Separate sums take as many registers as the accumulators; with more of these, or with TF32
  // operands in registers, they would spill. Three TF32 and numbers of eight bits promote every k-tile.
  constexpr int promotion_k() const {
    if (is_integer()) return 0;
    if (math == Math::kTF32x3 || is_bytes()) return tile_k;
    int const accumulators = tile_m * tile_n / (128 * warpgroups());
    bool const fits = warpgroups() < 3 && accumulators <= (type_a == Type::kF32 ? 32 : 64);
    return fits && type_d == Type::kF32 ? promotion_k_of(type_a) : 0;
  }
};

// Profilers show a __global__ function with its template arguments. So what a row stands for has names, as rows have.
template <Type, Type, Major, Major, Math>
struct OperandsOf;
#define JAX_STREAMK_SM90_OPERANDS(name, type_ab, type_d, major_a, major_b, math)               \
  struct name {                                                                                \
    static constexpr Type kTypeA = Type::type_ab, kTypeB = kTypeA, kTypeD = Type::type_d;      \
    static constexpr Major kMajorA = Major::major_a, kMajorB = Major::major_b;                 \
    static constexpr Math kMath = Math::math;                                                  \
  };                                                                                           \
  template <>                                                                                  \
  struct OperandsOf<Type::type_ab, Type::type_d, Major::major_a, Major::major_b, Math::math> { \
    using type = name;                                                                         \
  };
#define JAX_STREAMK_SM90_MAJORS(types, type_ab, type_d)                          \
  JAX_STREAMK_SM90_OPERANDS(types##_rr, type_ab, type_d, kRow, kRow, kNative)    \
  JAX_STREAMK_SM90_OPERANDS(types##_rc, type_ab, type_d, kRow, kColumn, kNative) \
  JAX_STREAMK_SM90_OPERANDS(types##_cr, type_ab, type_d, kColumn, kRow, kNative) \
  JAX_STREAMK_SM90_OPERANDS(types##_cc, type_ab, type_d, kColumn, kColumn, kNative)
JAX_STREAMK_SM90_MAJORS(bf16_bf16, kBF16, kBF16)
JAX_STREAMK_SM90_MAJORS(bf16_f32, kBF16, kF32)
JAX_STREAMK_SM90_MAJORS(f16_f16, kF16, kF16)
JAX_STREAMK_SM90_MAJORS(f16_f32, kF16, kF32)
JAX_STREAMK_SM90_OPERANDS(f32_f32_rr_tf32, kF32, kF32, kRow, kRow, kTF32)
JAX_STREAMK_SM90_OPERANDS(f32_f32_rc_tf32, kF32, kF32, kRow, kColumn, kTF32)
JAX_STREAMK_SM90_OPERANDS(f32_f32_cr_tf32, kF32, kF32, kColumn, kRow, kTF32)
JAX_STREAMK_SM90_OPERANDS(f32_f32_cc_tf32, kF32, kF32, kColumn, kColumn, kTF32)
JAX_STREAMK_SM90_OPERANDS(f32_f32_rc_tf32x3, kF32, kF32, kRow, kColumn, kTF32x3)
JAX_STREAMK_SM90_OPERANDS(fp8_bf16_rr, kE4M3, kBF16, kRow, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(fp8_bf16_rc, kE4M3, kBF16, kRow, kColumn, kNative)
JAX_STREAMK_SM90_OPERANDS(fp8_bf16_cr, kE4M3, kBF16, kColumn, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(fp8_f32_cr, kE4M3, kF32, kColumn, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(fp8_f32_rr, kE4M3, kF32, kRow, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(fp8_f32_rc, kE4M3, kF32, kRow, kColumn, kNative)
JAX_STREAMK_SM90_OPERANDS(s8_s32_rr, kS8, kS32, kRow, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(s8_s32_rc, kS8, kS32, kRow, kColumn, kNative)
JAX_STREAMK_SM90_OPERANDS(s8_bf16_rr, kS8, kBF16, kRow, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(s8_bf16_rc, kS8, kBF16, kRow, kColumn, kNative)
JAX_STREAMK_SM90_OPERANDS(s8_f32_rr, kS8, kF32, kRow, kRow, kNative)
JAX_STREAMK_SM90_OPERANDS(s8_f32_rc, kS8, kF32, kRow, kColumn, kNative)
#undef JAX_STREAMK_SM90_MAJORS
#undef JAX_STREAMK_SM90_OPERANDS

// By numbers with scales. Signed integers stand for unsigned ones, too.
template <Type, Type, Type, Major>
struct NumbersOf;
#define JAX_STREAMK_SM90_NUMBERS(name, type_a, type_b, type_d, major_b)                        \
  struct name {                                                                                \
    static constexpr Type kTypeA = Type::type_a, kTypeB = Type::type_b, kTypeD = Type::type_d; \
    static constexpr Major kMajorA = Major::kRow, kMajorB = Major::major_b;                    \
    static constexpr Math kMath = Math::kNative;                                               \
  };                                                                                           \
  template <>                                                                                  \
  struct NumbersOf<Type::type_a, Type::type_b, Type::type_d, Major::major_b> {                 \
    using type = name;                                                                         \
  };
#define JAX_STREAMK_SM90_NUMBERS_OF(a, type_a, b, type_b)                       \
  JAX_STREAMK_SM90_NUMBERS(a##_##b##_##a##_rr, type_a, type_b, type_a, kRow)    \
  JAX_STREAMK_SM90_NUMBERS(a##_##b##_##a##_rc, type_a, type_b, type_a, kColumn) \
  JAX_STREAMK_SM90_NUMBERS(a##_##b##_f32_rr, type_a, type_b, kF32, kRow)        \
  JAX_STREAMK_SM90_NUMBERS(a##_##b##_f32_rc, type_a, type_b, kF32, kColumn)
#define JAX_STREAMK_SM90_NUMBERS_BY(a, type_a)        \
  JAX_STREAMK_SM90_NUMBERS_OF(a, type_a, s4, kS4)     \
  JAX_STREAMK_SM90_NUMBERS_OF(a, type_a, s8, kS8)     \
  JAX_STREAMK_SM90_NUMBERS_OF(a, type_a, e2m1, kE2M1) \
  JAX_STREAMK_SM90_NUMBERS_OF(a, type_a, e4m3, kE4M3) \
  JAX_STREAMK_SM90_NUMBERS_OF(a, type_a, e5m2, kE5M2)
JAX_STREAMK_SM90_NUMBERS_BY(bf16, kBF16)
JAX_STREAMK_SM90_NUMBERS_BY(f16, kF16)
#undef JAX_STREAMK_SM90_NUMBERS
#undef JAX_STREAMK_SM90_NUMBERS_OF
#undef JAX_STREAMK_SM90_NUMBERS_BY

// Of a row with one of its operands. Only the kernel's own A can come through registers, as TF32 along m or n must: a
// row-major B (swapped) or a column-major A (not). Beside the latter, a row-major B is transposed.
template <class Operands, class Row>
constexpr Config config_of() {
  bool const swap_ab = Row::kSwapAB && !(Operands::kMath == Math::kTF32 && Operands::kMajorA == Major::kColumn);
  return {Operands::kTypeA, Operands::kTypeB,   Operands::kTypeD, Operands::kMajorA, Operands::kMajorB,  Row::kTileM,
          Row::kTileN,      Row::kTileK,        Row::kClusterM,   Row::kClusterN,    Row::kWarpSchedule, swap_ab,
          Operands::kMath,  Row::kStoreColumns, Row::kGated,      Row::kRagged,      Row::kJoined};
}

inline std::string name_of(Config const& c) {
  auto const letter = [](Major major) { return major == Major::kRow ? "r" : "c"; };
  auto const number = [](int x) { return std::to_string(x); };
  return std::string("sm90_") + jax_streamk::name_of(c.type_a) + "_" +
         (c.scaled() ? std::string(jax_streamk::name_of(c.type_b)) + "_" : "") + jax_streamk::name_of(c.type_d) + "_" +
         letter(c.major_a) + letter(c.major_b) + "_" + number(c.tile_m) + "x" + number(c.tile_n) + "x" +
         number(c.tile_k) + "_" + number(c.cluster_m) + "x" + number(c.cluster_n) + "_" +
         (c.warp_schedule == WarpSchedule::kCooperative ? "coop" : jax_streamk::name_of(c.warp_schedule)) +
         (c.swap_ab && c.ragged == Ragged::kNone ? "_swap" : "") + (c.gated ? "_gated" : "") +
         (c.joined ? "_joined" : "") +
         (c.ragged == Ragged::kNone ? "" : std::string("_ragged_") + jax_streamk::name_of(c.ragged)) +
         (c.math == Math::kNative ? "" : std::string("_") + jax_streamk::name_of(c.math));
}

}  // namespace jax_streamk::sm90
