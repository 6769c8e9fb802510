#include "ffi/record.h"

#include <memory>
#include <string>

#include "cutlass_kernels/core/cuda.h"

namespace jax_streamk {
namespace {

constexpr uint32_t kCapacity = 1 << 20;

struct CudaFree {
  void operator()(void* p) const { cudaFree(p); }
};
template <class T>
using GpuArray = std::unique_ptr<T[], CudaFree>;

template <class T>
Status allocate(GpuArray<T>& out, size_t count) {
  void* p = nullptr;
  Status const status = from_cuda(cudaMalloc(&p, count * sizeof(T)), "allocating records");
  out.reset(static_cast<T*>(p));
  return status;
}

Status set_in_all_units(WorkRecords const& to) {
  Status status;
  for (SetWorkRecords const set : recording_units())
    if (status.ok()) status = from_cuda(set(to), "setting where CTAs record");
  return status;
}

}  // namespace

Status record_launch(Kernel const& kernel, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                     Device const& device, Buffers const& buffers, std::vector<WorkRecord>& records) {
  GpuArray<uint32_t> counter;
  GpuArray<WorkRecord> found;
  Status status = allocate(counter, 1);
  if (status.ok()) status = allocate(found, kCapacity);
  if (status.ok()) status = from_cuda(cudaMemset(counter.get(), 0, sizeof(uint32_t)), "cudaMemset");
  if (status.ok()) status = set_in_all_units({counter.get(), found.get(), kCapacity});
  if (!status.ok()) return status;
  status = kernel.run(p, s, policy, device, buffers, {});
  if (status.ok()) status = from_cuda(cudaDeviceSynchronize(), kernel.info.name);
  uint32_t count = 0;
  if (status.ok())
    status = from_cuda(cudaMemcpy(&count, counter.get(), sizeof(count), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (status.ok() && count > kCapacity)
    status = Status::invalid(kernel.info.name + ": " + std::to_string(count) + " units of work are too many to record");
  if (status.ok()) {
    records.resize(count);
    status = from_cuda(cudaMemcpy(records.data(), found.get(), count * sizeof(WorkRecord), cudaMemcpyDeviceToHost),
                       "cudaMemcpy");
  }
  Status const reset = set_in_all_units({});  // other launches record nothing
  return status.ok() ? reset : status;
}

}  // namespace jax_streamk
