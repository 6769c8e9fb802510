#include "ffi/gemm_call.h"

#include <string>

namespace jax_streamk {

namespace ffi = xla::ffi;

GemmCall::GemmCall(GemmAttributes const& attributes)
    : kernel(find_kernel(attributes.kernel)), workspace_bytes(attributes.workspace_bytes) {
#define JAX_STREAMK_OF_PROBLEM(name, place) problem.place = attributes.name;
#define JAX_STREAMK_OF_SCHEDULE(name, place) schedule.place = attributes.name;
#define JAX_STREAMK_OF_DEVICE(name, place) device.place = attributes.name;
  JAX_STREAMK_PROBLEM_FIELDS(JAX_STREAMK_OF_PROBLEM, JAX_STREAMK_OF_PROBLEM)
  JAX_STREAMK_SCHEDULE_FIELDS(JAX_STREAMK_OF_SCHEDULE, JAX_STREAMK_OF_SCHEDULE)
  JAX_STREAMK_DEVICE_FIELDS(JAX_STREAMK_OF_DEVICE, JAX_STREAMK_OF_DEVICE)
#undef JAX_STREAMK_OF_PROBLEM
#undef JAX_STREAMK_OF_SCHEDULE
#undef JAX_STREAMK_OF_DEVICE
}

std::vector<double> numbers_of(GemmCall const& call) {
  std::vector<double> numbers;
#define JAX_STREAMK_OF_PROBLEM(name, place) numbers.push_back(static_cast<double>(call.problem.place));
#define JAX_STREAMK_OF_SCHEDULE(name, place) numbers.push_back(static_cast<double>(call.schedule.place));
#define JAX_STREAMK_OF_DEVICE(name, place) numbers.push_back(static_cast<double>(call.device.place));
  JAX_STREAMK_PROBLEM_FIELDS(JAX_STREAMK_OF_PROBLEM, JAX_STREAMK_OF_PROBLEM)
  JAX_STREAMK_SCHEDULE_FIELDS(JAX_STREAMK_OF_SCHEDULE, JAX_STREAMK_OF_SCHEDULE)
  JAX_STREAMK_DEVICE_FIELDS(JAX_STREAMK_OF_DEVICE, JAX_STREAMK_OF_DEVICE)
#undef JAX_STREAMK_OF_PROBLEM
#undef JAX_STREAMK_OF_SCHEDULE
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

ffi::Error instantiate(GemmAttributes attributes) {
  GemmCall const call(attributes);
  std::string const name(attributes.kernel);
  if (call.kernel == nullptr)
    return to_error(Status::precondition(
        "this build has no kernel " + name +
        "; the program was lowered by another build of jax_streamk: install the same one here, or lower it again"));
  if (Status status = check(*call.kernel, call.problem, call.schedule, call.device); !status.ok())
    return to_error(status);
  int64_t const needed = call.kernel->workspace_bytes(call.problem, call.schedule, call.device);
  if (needed <= call.workspace_bytes) return ffi::Error::Success();
  return to_error(Status::precondition(name + " needs " + std::to_string(needed) +
                                       " bytes of workspace and was given " + std::to_string(call.workspace_bytes) +
                                       "; the program was lowered by another version of jax_streamk: lower it again"));
}

namespace {

ffi::DataType data_type(Type type) {
  switch (type) {
    case Type::kF64: return ffi::DataType::F64;
    case Type::kF32: return ffi::DataType::F32;
    case Type::kBF16: return ffi::DataType::BF16;
    case Type::kF16: return ffi::DataType::F16;
    case Type::kS8: return ffi::DataType::S8;
    case Type::kS32: return ffi::DataType::S32;
  }
  return ffi::DataType::INVALID;
}

// Whether a buffer holds elements of the type up to the last one that the strides reach. In floating point: strides are
// not bounded, and their products may not fit an integer.
bool holds(ffi::AnyBuffer buffer, Type type, int64_t batch, int64_t batch_stride, int64_t rows, int64_t ld,
           int64_t columns) {
  if (buffer.element_type() != data_type(type) || batch_stride < 0 || ld < 0) return false;
  double const last =
      static_cast<double>(batch - 1) * batch_stride + static_cast<double>(rows - 1) * ld + (columns - 1);
  return last < static_cast<double>(buffer.element_count());
}

}  // namespace

ffi::ErrorOr<Buffers> check_buffers(GemmCall const& call, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs others,
                                    ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  GemmProblem const& p = call.problem;
  bool const row_a = p.major_a == Major::kRow, row_b = p.major_b == Major::kRow;
  auto const refuse_operand = [&](char const* operand) {
    return ffi::Unexpected(to_error(Status::invalid(call.kernel->info.name + " was given a buffer for " + operand +
                                                    " of another type, or smaller, than its plan says")));
  };
  if (!holds(a, p.type_a, p.batch, p.batch_stride_a, row_a ? p.m : p.k, p.lda, row_a ? p.k : p.m))
    return refuse_operand("A");
  if (!holds(b, p.type_b, p.batch, p.batch_stride_b, row_b ? p.k : p.n, p.ldb, row_b ? p.n : p.k))
    return refuse_operand("B");
  if (!holds(*d, p.type_d, p.batch, p.batch_stride_d, p.m, p.ldd, p.n)) return refuse_operand("D");
  Epilogue const& epilogue = p.epilogue;
  if (size_t const expected = epilogue.has_bias + epilogue.has_residual; others.size() != expected)
    return ffi::Unexpected(
        to_error(Status::invalid(call.kernel->info.name + " was given " + std::to_string(2 + others.size()) +
                                 " operands; its plan says " + std::to_string(2 + expected))));
  Buffers buffers{a.untyped_data(), b.untyped_data(), d->untyped_data(), workspace->untyped_data()};
  if (epilogue.has_bias) {
    auto const bias = *others.get<ffi::AnyBuffer>(0);
    if (!holds(bias, p.type_d, p.batch, epilogue.batch_stride_bias, 1, 0, p.n)) return refuse_operand("the bias");
    buffers.bias = bias.untyped_data();
  }
  if (epilogue.has_residual) {
    auto const residual = *others.get<ffi::AnyBuffer>(epilogue.has_bias);
    if (!holds(residual, p.type_d, p.batch, p.batch_stride_d, p.m, p.ldd, p.n)) return refuse_operand("the residual");
    buffers.residual = residual.untyped_data();
  }
  if (workspace->element_count() < static_cast<size_t>(call.workspace_bytes))
    return ffi::Unexpected(to_error(Status::precondition(
        call.kernel->info.name + " was given a workspace of " + std::to_string(workspace->element_count()) +
        " bytes; its plan says " + std::to_string(call.workspace_bytes))));
  // TMA and 16-byte vector accesses of the operands, whole cache lines of the workspace; XLA aligns every buffer as
  // far.
  if (reinterpret_cast<uintptr_t>(buffers.workspace) % 64 != 0)
    return ffi::Unexpected(to_error(
        Status::precondition(call.kernel->info.name + " was given a workspace that is not aligned to 64 bytes")));
  for (void const* address :
       {buffers.a, buffers.b, static_cast<void const*>(buffers.d), buffers.bias, buffers.residual})
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
      return ffi::Unexpected(to_error(
          Status::precondition(call.kernel->info.name + " was given a buffer that is not aligned to 16 bytes")));
  return buffers;
}

}  // namespace jax_streamk
