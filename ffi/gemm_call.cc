#include "ffi/gemm_call.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "cutlass_kernels/core/gemm_fields.h"
#include "cutlass_kernels/launch/policy.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::Type);
#define JAX_STREAMK_ENUM(type, values, doc) XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jax_streamk::type);
JAX_STREAMK_ENUMS(JAX_STREAMK_ENUM)
#undef JAX_STREAMK_ENUM

namespace jax_streamk {

namespace ffi = xla::ffi;

namespace {

constexpr char kOtherVersion[] = "; the program was lowered by another version of jax_streamk: lower it again";

// Puts an attribute where it belongs; false if it has another type.
using Set = bool (*)(GemmCall&, XLA_FFI_AttrType, void* attribute, ffi::DiagnosticEngine&);

template <typename T>
bool put(T& to, XLA_FFI_AttrType type, void* attribute, ffi::DiagnosticEngine& diagnostic) {
  std::optional<T> const value = ffi::AttrDecoding<T>::Decode(type, attribute, diagnostic);
  if (value) to = *value;
  return value.has_value();
}

// By name, which is the order of a call's attributes: one pass decodes them all.
std::map<std::string_view, Set> const& fields() {
#define JAX_STREAMK_FIELD(name, member)                                                                   \
  {#name, [](GemmCall& call, XLA_FFI_AttrType type, void* attribute, ffi::DiagnosticEngine& diagnostic) { \
     return put(call.member, type, attribute, diagnostic);                                                \
   }},
#define JAX_STREAMK_OF_PROBLEM(name, place) JAX_STREAMK_FIELD(name, problem.place)
#define JAX_STREAMK_OF_SCHEDULE(name, place) JAX_STREAMK_FIELD(name, schedule.place)
#define JAX_STREAMK_OF_POLICY(name, place) JAX_STREAMK_FIELD(name, policy.place)
#define JAX_STREAMK_OF_DEVICE(name, place) JAX_STREAMK_FIELD(name, device.place)
  static std::map<std::string_view, Set> const all = {
      JAX_STREAMK_CALL_FIELDS(JAX_STREAMK_OF_PROBLEM, JAX_STREAMK_OF_SCHEDULE, JAX_STREAMK_OF_POLICY,
                              JAX_STREAMK_OF_DEVICE)  //
      JAX_STREAMK_FIELD(kernel, name) JAX_STREAMK_FIELD(workspace_bytes, workspace_bytes)};
#undef JAX_STREAMK_OF_PROBLEM
#undef JAX_STREAMK_OF_SCHEDULE
#undef JAX_STREAMK_OF_POLICY
#undef JAX_STREAMK_OF_DEVICE
#undef JAX_STREAMK_FIELD
  return all;
}

std::optional<GemmCall> decode(XLA_FFI_Attrs const& attributes, ffi::DiagnosticEngine& diagnostic) {
  auto const& expected = fields();
  if (attributes.size != static_cast<int64_t>(expected.size()))
    return diagnostic.Emit("expected ") << expected.size() << " attributes but got " << attributes.size
                                        << kOtherVersion;
  GemmCall call;
  int64_t i = 0;
  for (auto const& [name, set] : expected) {
    std::string_view const got(attributes.names[i]->ptr, attributes.names[i]->len);
    if (got != name) return diagnostic.Emit("expected attribute ") << name << " but got " << got << kOtherVersion;
    if (!set(call, attributes.types[i], attributes.attrs[i], diagnostic)) return std::nullopt;
    ++i;
  }
  call.kernel = find_kernel(call.name);
  return call;
}

// Whether a stride reaches so far that positions of elements would not fit 64 bits: no program has such operands.
bool reaches_too_far(GemmProblem const& p) {
  constexpr double kMost = 0x1p61, kExtents = 0x1p31;
  double const extent = std::min(static_cast<double>(std::max({p.batch, p.m, p.n, p.k})), kExtents);
  auto const is_far = [&](int64_t stride) { return std::abs(static_cast<double>(stride)) * extent >= kMost; };
  for (Layout const& x : {p.a, p.b, p.d}) {
    if (is_far(x.ld) || is_far(x.batch_stride) || is_far(x.inner_stride)) return true;
  }
  return is_far(p.epilogue.batch_stride_bias) || is_far(p.epilogue.up_offset);
}

}  // namespace

std::vector<double> numbers_of(GemmCall const& call) {
  std::vector<double> numbers;
#define JAX_STREAMK_OF_PROBLEM(name, place) numbers.push_back(static_cast<double>(call.problem.place));
#define JAX_STREAMK_OF_SCHEDULE(name, place) numbers.push_back(static_cast<double>(call.schedule.place));
#define JAX_STREAMK_OF_POLICY(name, place) numbers.push_back(static_cast<double>(call.policy.place));
#define JAX_STREAMK_OF_DEVICE(name, place) numbers.push_back(static_cast<double>(call.device.place));
  JAX_STREAMK_CALL_FIELDS(JAX_STREAMK_OF_PROBLEM, JAX_STREAMK_OF_SCHEDULE, JAX_STREAMK_OF_POLICY, JAX_STREAMK_OF_DEVICE)
#undef JAX_STREAMK_OF_PROBLEM
#undef JAX_STREAMK_OF_SCHEDULE
#undef JAX_STREAMK_OF_POLICY
#undef JAX_STREAMK_OF_DEVICE
  return numbers;
}

ffi::Error to_error(Status const& status) {
  if (status.ok()) return ffi::Error::Success();
  std::string const message = "jax_streamk: " + status.message;
  switch (status.code) {
    case Status::Code::kOk: break;
    case Status::Code::kInvalidArgument: return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
    case Status::Code::kFailedPrecondition: return ffi::Error(ffi::ErrorCode::kFailedPrecondition, message);
    case Status::Code::kInternal: break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, message);
}

ffi::Error instantiate(GemmCall call) {
  std::string const name(call.name);
  if (call.kernel == nullptr)
    return to_error(Status::precondition(
        "this build has no kernel " + name +
        "; the program was lowered by another build of jax_streamk: install the same one here, or lower it again"));
  if (reaches_too_far(call.problem)) return to_error(Status::invalid(name + " was given strides beyond 2^61 elements"));
  if (Status status = check(*call.kernel, call.problem, call.schedule, call.device); !status.ok())
    return to_error(status);
  if (Status status = check_policy(call.kernel->info, call.problem, call.schedule, call.policy, call.device);
      !status.ok())
    return to_error(status);
  int64_t const needed = call.kernel->workspace_bytes(call.problem, call.schedule, call.device).value();
  if (needed <= call.workspace_bytes) return ffi::Error::Success();
  return to_error(Status::precondition(name + " needs " + std::to_string(needed) +
                                       " bytes of workspace and was given " + std::to_string(call.workspace_bytes) +
                                       kOtherVersion));
}

ffi::DataType data_type(Type type) {
  switch (type) {
#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) \
  case Type::type: return ffi::DataType::xla;
#include "cutlass_kernels/core/types.def"
  }
  return ffi::DataType::INVALID;
}

namespace {

// Whether a place may have the format's type and reaches to the last element that the strides reach.
bool holds(Place const& place, GemmProblem const& p, Role role) {
  Operand const x = p.operand(role);
  bool const is_typed = place.type != ffi::DataType::INVALID;
  if ((is_typed && place.type != data_type(x.format.type)) || x.batch_stride < 0 || x.inner_stride < 0 || x.ld < 0)
    return false;
  double const elements = static_cast<double>(place.count) * (is_typed ? 1 : 8.0 / x.format.bits());
  return p.epilogue.up_offset >= 0 && p.span(role) <= elements;
}

}  // namespace

ffi::ErrorOr<Buffers> check_places(GemmCall const& call, std::vector<Place> const& places, Place workspace) {
  GemmProblem const& p = call.problem;
  std::string const& name = call.kernel->info.name;
  auto const refuse = [](Status const& status) { return ffi::Unexpected(to_error(status)); };
  size_t const expected = std::count_if(std::begin(kRoles), std::end(kRoles), [&](Role role) { return p.has(role); });
  if (places.size() != expected)
    return refuse(Status::invalid(name + " was given " + std::to_string(places.size() - 1) +
                                  " operands; its plan says " + std::to_string(expected - 1)));
  Buffers buffers{nullptr, nullptr, nullptr, workspace.data};
  size_t next = 0;
  for (Role const role : kRoles) {
    if (!p.has(role)) continue;
    Place const& place = places[next++];
    if (!holds(place, p, role))
      return refuse(Status::invalid(name + " was given a buffer for " + name_of(role) +
                                    " of another type, or smaller, than its plan says"));
    // TMA and 16-byte vectors need this alignment; XLA gives it to every buffer.
    if (reinterpret_cast<uintptr_t>(place.data) % 16 != 0)
      return refuse(Status::precondition(name + " was given a buffer that is not aligned to 16 bytes"));
    buffers.set(role, place.data);
  }
  if (workspace.count < call.workspace_bytes)
    return refuse(Status::precondition(name + " was given a workspace of " + std::to_string(workspace.count) +
                                       " bytes; its plan says " + std::to_string(call.workspace_bytes)));
  // Whole cache lines.
  if (reinterpret_cast<uintptr_t>(buffers.workspace) % 64 != 0)
    return refuse(Status::precondition(name + " was given a workspace that is not aligned to 64 bytes"));
  return buffers;
}

ffi::ErrorOr<Buffers> check_buffers(GemmCall const& call, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs others,
                                    ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  std::vector<Place> places;
  places.reserve(3 + others.size());
  for (ffi::AnyBuffer const x : {a, b, *d}) places.emplace_back(x);
  for (size_t i = 0; i < others.size(); ++i) places.emplace_back(*others.get<ffi::AnyBuffer>(i));
  return check_places(call, places, Place(*workspace));
}

}  // namespace jax_streamk

std::optional<jax_streamk::GemmCall> xla::ffi::AttrDecoding<jax_streamk::GemmCall>::Decode(
    XLA_FFI_AttrType type, void* attributes, DiagnosticEngine& diagnostic) {
  if (type != XLA_FFI_AttrType_DICTIONARY)
    return diagnostic.Emit("Wrong attribute type: expected ") << XLA_FFI_AttrType_DICTIONARY << " but got " << type;
  return jax_streamk::decode(*static_cast<XLA_FFI_Attrs const*>(attributes), diagnostic);
}
