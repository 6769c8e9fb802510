#include "cutlass_kernels/launch/cuda_kernel.h"

#include <cuda_runtime_api.h>

#include <set>
#include <utility>

#include "cutlass_kernels/passes/copy.h"
#include "cutlass_kernels/passes/reduce.h"

namespace jax_streamk {

Status CudaKernel::run(GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy, Device const& device,
                       Buffers const& buffers, Queue const& queue) const {
  auto const stream = static_cast<cudaStream_t>(queue.stream);
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  Launch launch(info, p, s);
  if (device.arch >= 90) launch.overlap = launch.copies.any() ? Overlap{true} : queue.overlap;
  Buffers own = buffers;
  if (Status status = launch_copies(p, launch.copies, info.swap_ab, own, stream); !status.ok()) return status;
  if (!launch.separate) return this->launch(launch, policy, device, own, stream);
  launch.slices.rounded = size_of(p.d.format) < size_of(launch.problem.d.format);
  own.d = own.workspace;
  Status const status = this->launch(launch, policy, device, own, stream);
  if (!status.ok()) return status;
  return launch_reduction(p, device, launch.slices.count, launch.problem.d.ld, own.d, buffers, stream);
}

Status CudaKernel::resources(Resources& out) const {
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  cudaFuncAttributes attributes;
  Status status = from_cuda(cudaFuncGetAttributes(&attributes, entry_point()), info.name + ": cudaFuncGetAttributes");
  if (!status.ok()) return status;
  out.registers = attributes.numRegs;
  return from_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&out.ctas_per_sm, entry_point(), info.threads,
                                                                 static_cast<size_t>(info.shared_memory)),
                   info.name + ": occupancy");
}

Status CudaKernel::allow_shared_memory() const {
  if (info.shared_memory <= 48 * 1024) return {};
  int gpu = 0;
  if (Status status = from_cuda(cudaGetDevice(&gpu), "cudaGetDevice"); !status.ok()) return status;
  // Once per GPU is enough; by thread, since a lock would cost as much as asking the driver again.
  thread_local std::set<std::pair<CudaKernel const*, int>> allowed;
  if (allowed.count({this, gpu}) != 0) return {};
  Status const status = from_cuda(cudaFuncSetAttribute(entry_point(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(info.shared_memory)),
                                  info.name + ": raising its shared memory limit");
  if (status.ok()) allowed.emplace(this, gpu);
  return status;
}

}  // namespace jax_streamk
