#include "ffi/gemm_call.h"

#include <string>

namespace jax_streamk {

namespace ffi = xla::ffi;

GemmCall::GemmCall(GemmAttributes const& at)
    : kernel(find_kernel(at.kernel)),
      problem{at.batch, at.m,       at.n,       at.k,   at.type_a, at.type_b, at.type_d,
              at.math,  at.major_a, at.major_b, at.lda, at.ldb,    at.ldd,    at.batch_stride_a,
              at.batch_stride_b, at.batch_stride_d},
      schedule{at.schedule, at.splits, at.reduction, at.max_sms, at.raster, at.swizzle},
      device{at.arch, at.sms},
      workspace_bytes(at.workspace_bytes) {}

ffi::Error to_error(Status const& status) {
  std::string const message = "jax_streamk: " + status.message;
  switch (status.code) {
    case Status::Code::kOk: return ffi::Error::Success();
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
  if (Status status = check(*call.kernel, call.problem, call.schedule, call.device); !status.ok()) return to_error(status);
  int64_t const needed = call.kernel->workspace_bytes(call.problem, call.schedule, call.device);
  if (needed <= call.workspace_bytes) return ffi::Error::Success();
  return to_error(Status::precondition(name + " needs " + std::to_string(needed) + " bytes of workspace and was given " +
                                       std::to_string(call.workspace_bytes) +
                                       "; the program was lowered by another version of jax_streamk: lower it again"));
}

ffi::ErrorOr<Buffers> check_buffers(GemmCall const& call, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> d,
                                    ffi::Result<ffi::AnyBuffer> workspace) {
  if (workspace->element_count() < static_cast<size_t>(call.workspace_bytes))
    return ffi::Unexpected(to_error(Status::precondition(
        call.kernel->info.name + " was given a workspace of " + std::to_string(workspace->element_count()) +
        " bytes; its plan says " + std::to_string(call.workspace_bytes))));
  Buffers const buffers{a.untyped_data(), b.untyped_data(), d->untyped_data(), workspace->untyped_data()};
  // TMA and 16-byte vector accesses; XLA aligns every buffer further than this.
  for (void const* address : {buffers.a, buffers.b, static_cast<void const*>(buffers.d), static_cast<void const*>(buffers.workspace)})
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
      return ffi::Unexpected(to_error(Status::precondition(call.kernel->info.name + " was given a buffer that is not aligned to 16 bytes")));
  return buffers;
}

}  // namespace jax_streamk
