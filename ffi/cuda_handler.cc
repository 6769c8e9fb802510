// The handler for platform "CUDA". Execution allocates nothing, waits for nothing and does not query the stream, so XLA
// may record it into a command buffer.
#include <cuda_runtime_api.h>

#include "cutlass_kernels/core/cuda_kernel.h"
#include "ffi/gemm_call.h"

namespace jax_streamk {

namespace ffi = xla::ffi;

namespace {

Status check_device(GemmCall const& call) {
  int device = 0, major = 0, minor = 0, sms = 0;
  Status status = from_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (status.ok())
    status = from_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  if (status.ok())
    status = from_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
  if (status.ok()) status = from_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SM count");
  if (!status.ok()) return status;
  int const arch = 10 * major + minor;
  if (arch == call.device.arch && sms == call.device.sms) return {};
  return Status::precondition("the plan of " + call.kernel->info.name + " is for sm_" +
                              std::to_string(call.device.arch) + " with " + std::to_string(call.device.sms) +
                              " SMs, but this device is sm_" + std::to_string(arch) + " with " + std::to_string(sms) +
                              " SMs: lower the program for this device");
}

ffi::Error execute(GemmAttributes attributes, cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b,
                   ffi::RemainingArgs others, ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  GemmCall const call(attributes);
  auto buffers = check_buffers(call, a, b, others, d, workspace);
  if (buffers.has_error()) return buffers.error();
  if (Status status = check_device(call); !status.ok()) return to_error(status);
  return to_error(call.kernel->run(call.problem, call.schedule, call.policy, call.device, *buffers, stream, nullptr));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_cuda_instantiate, instantiate,
                              ffi::Ffi::BindInstantiate().Attrs<GemmAttributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_cuda_execute, execute,
                              ffi::Ffi::Bind()
                                  .Attrs<GemmAttributes>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_streamk
