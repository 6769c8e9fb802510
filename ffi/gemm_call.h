// What a custom call carries, as attributes that lowering wrote and as the arguments of a kernel.
//
// Both stages decode the attributes. Keeping the result as FFI state would need a type that is registered before the
// handlers, and jaxlib runs deferred registrations in the opposite order.
#pragma once

#include <string_view>
#include <vector>

#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/core/gemm_fields.h"
#include "xla/ffi/api/ffi.h"

namespace jax_streamk {

// The call as the FFI decodes it: a member for each attribute, with name and type from gemm_fields.h.
struct GemmAttributes {
  std::string_view kernel;
#define JAX_STREAMK_OF_PROBLEM(name, place) decltype(GemmProblem::place) name;
#define JAX_STREAMK_OF_SCHEDULE(name, place) decltype(Schedule::place) name;
#define JAX_STREAMK_OF_POLICY(name, place) decltype(LaunchPolicy::place) name;
#define JAX_STREAMK_OF_DEVICE(name, place) decltype(Device::place) name;
  JAX_STREAMK_CALL_FIELDS(JAX_STREAMK_OF_PROBLEM, JAX_STREAMK_OF_SCHEDULE, JAX_STREAMK_OF_POLICY, JAX_STREAMK_OF_DEVICE)
#undef JAX_STREAMK_OF_PROBLEM
#undef JAX_STREAMK_OF_SCHEDULE
#undef JAX_STREAMK_OF_POLICY
#undef JAX_STREAMK_OF_DEVICE
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

// A decoded call as numbers: one for each field of problem, schedule, policy and device, in the order of their lists.
std::vector<double> numbers_of(GemmCall const& call);

xla::ffi::Error to_error(Status const& status);

// The instantiate stage of both platforms: checks all that does not depend on the device and the buffers.
xla::ffi::Error instantiate(GemmAttributes attributes);

// Checks the buffers of one execution against the call and returns their addresses. `others` are the call's operands
// after A and B, in the order of their roles.
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

#define JAX_STREAMK_ATTRIBUTE(name, place) , StructMember<decltype(jax_streamk::GemmAttributes::name)>(#name)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_streamk::GemmAttributes,
                                      StructMember<std::string_view>("kernel")  //
                                      JAX_STREAMK_CALL_FIELDS(JAX_STREAMK_ATTRIBUTE, JAX_STREAMK_ATTRIBUTE,
                                                              JAX_STREAMK_ATTRIBUTE, JAX_STREAMK_ATTRIBUTE),
                                      StructMember<int64_t>("workspace_bytes"));
#undef JAX_STREAMK_ATTRIBUTE
