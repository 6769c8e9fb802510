// The handler for platform "CUDA". Execution allocates nothing, waits for nothing and does not query the stream, so XLA
// may record it into a command buffer.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cutlass_kernels/core/cuda.h"
#include "ffi/chain_call.h"

namespace jax_streamk {

namespace ffi = xla::ffi;

namespace {

// The GPUs of this process, by their ordinals; empty if CUDA does not tell.
std::vector<Device> gpus() {
  int count = 0;
  if (!from_cuda(cudaGetDeviceCount(&count), "").ok()) return {};
  std::vector<Device> all;
  for (int i = 0; i < count; ++i) {
    int major = 0, minor = 0, sms = 0;
    if (!from_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i), "").ok() ||
        !from_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i), "").ok() ||
        !from_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, i), "").ok())
      return {};
    all.push_back({10 * major + minor, sms});
  }
  return all;
}

Status find_device(Device& here) {
  static std::vector<Device> const all = gpus();
  int ordinal = 0;
  if (Status status = from_cuda(cudaGetDevice(&ordinal), "cudaGetDevice"); !status.ok()) return status;
  if (static_cast<size_t>(ordinal) >= all.size())
    return Status::internal("CUDA does not tell what GPU " + std::to_string(ordinal) + " is");
  here = all[ordinal];
  return {};
}

Status check_device(GemmCall const& call) {
  Device here;
  if (Status status = find_device(here); !status.ok()) return status;
  if (here.arch == call.device.arch && here.sms == call.device.sms) return {};
  return Status::precondition("the plan of " + call.kernel->info.name + " is for sm_" +
                              std::to_string(call.device.arch) + " with " + std::to_string(call.device.sms) +
                              " SMs, but this device is sm_" + std::to_string(here.arch) + " with " +
                              std::to_string(here.sms) + " SMs: lower the program for this device");
}

ffi::Error execute(GemmCall call, cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs others,
                   ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  auto buffers = check_buffers(call, a, b, others, d, workspace);
  if (buffers.has_error()) return buffers.error();
  if (Status status = check_device(call); !status.ok()) return to_error(status);
  return to_error(call.kernel->run(call.problem, call.schedule, call.policy, call.device, *buffers, {stream}));
}

ffi::Error execute_chain(ffi::Dictionary attributes, cudaStream_t stream, ffi::RemainingArgs arguments,
                         ffi::RemainingRets results) {
  return run_chain(attributes, arguments, results,
                   {[&](GemmCall const& call, Buffers const& buffers, Overlap const& overlap) {
                      if (Status status = check_device(call); !status.ok()) return status;
                      return call.kernel->run(call.problem, call.schedule, call.policy, call.device, buffers,
                                              {stream, nullptr, overlap});
                    },
                    [&](RowProgram const& p, void* const* operands, RowOverlap overlap) {
                      Device here;
                      if (Status status = find_device(here); !status.ok()) return status;
                      return launch_rows(p, operands, stream, here.arch >= 90 ? overlap : RowOverlap{});
                    }});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_cuda_instantiate, instantiate, ffi::Ffi::BindInstantiate().Attrs<GemmCall>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_cuda_execute, execute,
                              ffi::Ffi::Bind()
                                  .Attrs<GemmCall>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_cuda_chain_instantiate, instantiate_chain,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jax_streamk_cuda_chain_execute, execute_chain,
    ffi::Ffi::Bind().Attrs().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_streamk
