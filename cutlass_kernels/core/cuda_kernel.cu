#include <cuda.h>
#include <cuda_runtime.h>

#include <set>
#include <utility>

#include "cutlass_kernels/core/cuda_kernel.h"
#include "cutlass_kernels/passes/copy.h"
#include "cutlass_kernels/passes/reduce.h"
#include "cutlass_kernels/passes/repack.h"

namespace jax_streamk {

Status from_cuda(cudaError_t error, std::string const& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears the error, which the next launch would report
  return Status::internal(what + ": " + cudaGetErrorString(error));
}

int64_t bytes_left(void const* p) {
  using Range = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);
  static Range const range = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 3020, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault, &result);
#endif
    return from_cuda(error, "").ok() && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Range>(found)
                                                                              : nullptr;
  }();
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  auto const at = reinterpret_cast<CUdeviceptr>(p);
  if (range == nullptr || range(&begin, &bytes, at) != CUDA_SUCCESS) return 0;
  return static_cast<int64_t>(begin + bytes - at);
}

namespace {

// The GEMM of a separate split-K. It writes partial sums, slices x batches x m x (n rounded up to 16 bytes), and leaves
// the epilogue to the reduction.
GemmProblem into_partials(GemmProblem p) {
  p.d.format = accumulator_of(p.a.format);
  p.epilogue = {};
  int64_t const vector = 16 / size_of(p.d.format);
  p.d.ld = (p.n + vector - 1) / vector * vector;
  p.d.batch_stride = p.m * p.d.ld;
  return p;
}

int64_t partial_bytes(GemmProblem const& partials, int32_t slices) {
  return align_workspace(slices * partials.batch * partials.d.batch_stride * size_of(partials.d.format));
}

}  // namespace

Status CudaKernel::can_implement(GemmProblem const& p, Schedule const& s, Device const& device) const {
  Repack const repacked = repack_of(info, p);
  GemmProblem const& q = repacked.problem;
  if (!can_copy(p, repacked))
    return Status::invalid(info.name + ": the operands to copy have 2^31 or more pieces of 1 KiB of a row");
  if (!is_separate(s)) return can_launch(q, s, device);
  GemmProblem const partials = into_partials(q);
  if (partials.batch * partials.d.batch_stride >= INT32_MAX)
    return Status::invalid(info.name +
                           ": D has too many elements for a separate reduction, which takes fewer than 2^31");
  return can_launch(Slices::of(q.k, info.tile_k, s.splits).as_batch(partials), data_parallel(s), device);
}

int64_t CudaKernel::workspace_bytes(GemmProblem const& p, Schedule const& s, Device const& device) const {
  Repack const repacked = repack_of(info, p);
  if (!is_separate(s)) return repacked.bytes() + launch_workspace_bytes(repacked.problem, s, device);
  GemmProblem const& q = repacked.problem;
  return repacked.bytes() + partial_bytes(into_partials(q), Slices::of(q.k, info.tile_k, s.splits).count);
}

Status CudaKernel::run(GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy, Device const& device,
                       Buffers const& buffers, void* stream_, Executor*) const {
  auto const stream = static_cast<cudaStream_t>(stream_);
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  Repack const repacked = repack_of(info, p);
  GemmProblem const& q = repacked.problem;
  Buffers aligned = buffers;
  if (Status status = launch_copies(p, repacked, info.swap_ab, aligned, stream); !status.ok()) return status;
  bool const after_copy = repacked.a || repacked.b;
  if (!is_separate(s)) return launch(q, {1, q.k}, s, policy, device, aligned, after_copy, stream);
  GemmProblem const partials = into_partials(q);
  Slices slices = Slices::of(q.k, info.tile_k, s.splits);
  slices.rounded = size_of(p.d.format) < size_of(partials.d.format);
  aligned.d = aligned.workspace;
  Status const status = launch(partials, slices, data_parallel(s), policy, device, aligned, after_copy, stream);
  return status.ok() ? launch_reduction(p, device, slices.count, partials.d.ld, aligned.d, buffers, stream) : status;
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
