// The handler for platform "cpu".
#include "ffi/gemm_call.h"
#include "ffi/pool_executor.h"

namespace jax_streamk {

namespace ffi = xla::ffi;

namespace {

ffi::Error execute(GemmAttributes attributes, ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                   ffi::RemainingArgs others, ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  GemmCall const call(attributes);
  auto buffers = check_buffers(call, a, b, others, d, workspace);
  if (buffers.has_error()) return buffers.error();
  PoolExecutor executor(pool);
  return to_error(
      call.kernel->run(call.problem, call.schedule, call.policy, call.device, *buffers, nullptr, &executor));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_host_instantiate, instantiate,
                              ffi::Ffi::BindInstantiate().Attrs<GemmAttributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_host_execute, execute,
                              ffi::Ffi::Bind()
                                  .Attrs<GemmAttributes>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace jax_streamk
