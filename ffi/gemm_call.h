// What a custom call carries, as the arguments of a kernel.
//
// Both stages decode the attributes. Keeping the result as FFI state would need a type that is registered before the
// handlers, and jaxlib runs deferred registrations in the opposite order.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "cutlass_kernels/launch/kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_streamk {

struct GemmCall {
  std::string_view name;
  Kernel const* kernel = nullptr;  // null: this build has no kernel of that name
  GemmProblem problem;
  Schedule schedule;
  LaunchPolicy policy;
  Device device;
  int64_t workspace_bytes = 0;
};

// A decoded call as numbers: one for each field of problem, schedule, policy and device, in the order of their lists.
std::vector<double> numbers_of(GemmCall const& call);

xla::ffi::Error to_error(Status const& status);

xla::ffi::DataType data_type(Type type);

// The instantiate stage of both platforms: checks all that does not depend on the device and the buffers.
xla::ffi::Error instantiate(GemmCall call);

// A buffer, or a part of a workspace, which holds elements of any type.
struct Place {
  void* data = nullptr;
  xla::ffi::DataType type = xla::ffi::DataType::INVALID;  // of a workspace
  int64_t count = 0;                                      // elements; bytes of a workspace

  Place() = default;
  Place(void* data, int64_t bytes) : data(data), count(bytes) {}
  explicit Place(xla::ffi::AnyBuffer x)
      : data(x.untyped_data()), type(x.element_type()), count(static_cast<int64_t>(x.element_count())) {}
};

// Checks the places of one execution against the call and returns their addresses: A, B, D, and the call's other
// operands in the order of their roles.
xla::ffi::ErrorOr<Buffers> check_places(GemmCall const& call, std::vector<Place> const& places, Place workspace);

xla::ffi::ErrorOr<Buffers> check_buffers(GemmCall const& call, xla::ffi::AnyBuffer a, xla::ffi::AnyBuffer b,
                                         xla::ffi::RemainingArgs others, xla::ffi::Result<xla::ffi::AnyBuffer> d,
                                         xla::ffi::Result<xla::ffi::AnyBuffer> workspace);

}  // namespace jax_streamk

namespace xla::ffi {

// A call from the attributes that lowering wrote, with the names and types of gemm_fields.h.
template <>
struct AttrsBinding<jax_streamk::GemmCall> {
  using Attrs = jax_streamk::GemmCall;
};
template <>
struct AttrDecoding<jax_streamk::GemmCall> {
  using Type = jax_streamk::GemmCall;
  static std::optional<Type> Decode(XLA_FFI_AttrType type, void* attributes, DiagnosticEngine& diagnostic);
};

}  // namespace xla::ffi
