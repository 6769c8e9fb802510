// What one custom call carries, as lowering wrote it, and as the kernels take it.
//
// Both stages decode it anew. Keeping instantiation's result as FFI state would need a type that is registered before
// the handlers, and jaxlib registers what was deferred until a backend starts in the opposite order.
#pragma once

#include <string_view>

#include "cutlass_kernels/core/gemm.h"
#include "xla/ffi/api/ffi.h"

namespace jax_streamk {

// Flat, one attribute a member, named as here. Extents and strides are those of GemmProblem.
struct GemmAttributes {
  std::string_view kernel;
  int64_t batch, m, n, k;
  int64_t lda, ldb, ldd, batch_stride_a, batch_stride_b, batch_stride_d;
  Type type_a, type_b, type_d;
  Math math;
  Major major_a, major_b;
  Activation activation;
  bool has_bias, has_residual;
  double alpha, beta;
  int64_t batch_stride_bias;
  ScheduleKind schedule;
  int32_t splits;
  Reduction reduction;
  int32_t max_sms;
  // The LaunchPolicy.
  Raster raster;
  int32_t swizzle;
  bool evict_first_a, evict_first_b;
  int32_t held_back, held_back_last, idle_clusters;
  ClusterOrder cluster_order;
  bool extend_a, extend_b;
  // What the plan was made for; execution refuses anything else.
  int32_t arch, sms;
  int64_t workspace_bytes;
};

struct GemmCall {
  explicit GemmCall(GemmAttributes const& attributes);

  Kernel const* kernel;  // null: this build has no kernel of that name
  GemmProblem problem;
  Schedule schedule;
  LaunchPolicy policy;
  Device device;
  int64_t workspace_bytes;
};

xla::ffi::Error to_error(Status const& status);

// The instantiate stage of both platforms: everything that can be checked without the device and the buffers.
xla::ffi::Error instantiate(GemmAttributes attributes);

// Checks the buffers of one execution against the call and hands out their addresses. `others` are the bias and the
// residual, in this order, as far as the call has them.
xla::ffi::ErrorOr<Buffers> check_buffers(GemmCall const& call, xla::ffi::AnyBuffer a, xla::ffi::AnyBuffer b,
                                         xla::ffi::RemainingArgs others, xla::ffi::Result<xla::ffi::AnyBuffer> d,
                                         xla::ffi::Result<xla::ffi::AnyBuffer> workspace);

}  // namespace jax_streamk

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Type);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Math);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Major);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Activation);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::ScheduleKind);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Reduction);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Raster);
XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::ClusterOrder);

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_streamk::GemmAttributes, StructMember<std::string_view>("kernel"), StructMember<int64_t>("batch"),
    StructMember<int64_t>("m"), StructMember<int64_t>("n"), StructMember<int64_t>("k"), StructMember<int64_t>("lda"),
    StructMember<int64_t>("ldb"), StructMember<int64_t>("ldd"), StructMember<int64_t>("batch_stride_a"),
    StructMember<int64_t>("batch_stride_b"), StructMember<int64_t>("batch_stride_d"),
    StructMember<jax_streamk::Type>("type_a"), StructMember<jax_streamk::Type>("type_b"),
    StructMember<jax_streamk::Type>("type_d"), StructMember<jax_streamk::Math>("math"),
    StructMember<jax_streamk::Major>("major_a"), StructMember<jax_streamk::Major>("major_b"),
    StructMember<jax_streamk::Activation>("activation"), StructMember<bool>("has_bias"),
    StructMember<bool>("has_residual"), StructMember<double>("alpha"), StructMember<double>("beta"),
    StructMember<int64_t>("batch_stride_bias"), StructMember<jax_streamk::ScheduleKind>("schedule"),
    StructMember<int32_t>("splits"), StructMember<jax_streamk::Reduction>("reduction"),
    StructMember<int32_t>("max_sms"), StructMember<jax_streamk::Raster>("raster"), StructMember<int32_t>("swizzle"),
    StructMember<bool>("evict_first_a"), StructMember<bool>("evict_first_b"), StructMember<int32_t>("held_back"),
    StructMember<int32_t>("held_back_last"), StructMember<int32_t>("idle_clusters"),
    StructMember<jax_streamk::ClusterOrder>("cluster_order"), StructMember<bool>("extend_a"),
    StructMember<bool>("extend_b"), StructMember<int32_t>("arch"), StructMember<int32_t>("sms"),
    StructMember<int64_t>("workspace_bytes"));
