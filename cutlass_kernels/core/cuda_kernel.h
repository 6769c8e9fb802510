// What the CUDA families share: launching one GEMM, and split-K with a separate reduction pass on top of it.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/core/slices.h"

// What a row of table.txt, on its line, calls its registration: several rows share a translation unit.
#define JAX_STREAMK_ROW_ON(line) row_##line
#define JAX_STREAMK_ROW(line) JAX_STREAMK_ROW_ON(line)

namespace jax_streamk {

Status from_cuda(cudaError_t error, std::string const& what);

// Bytes from `p`, of a GPU, to the end of the allocation that it lies in; 0 where the driver does not say.
int64_t bytes_left(void const* p);

class CudaKernel : public Kernel {
 public:
  using Kernel::Kernel;

  Status can_implement(GemmProblem const&, Schedule const&, Device const&) const final;
  int64_t workspace_bytes(GemmProblem const&, Schedule const&, Device const&) const final;
  Status run(GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&, Buffers const&, void* stream,
             Executor*) const final;
  Status resources(Resources&) const final;

 protected:
  // The same three for a schedule whose reduction is not separate: everything in one GEMM launch. A launch of several
  // slices is data-parallel and needs no workspace; slice s of batch b begins s * p.batch + b batch strides from the
  // beginning of D, and can_launch() is asked about slices.as_batch(p). A launch after a copy of A or B may begin while
  // that ends (dependent_launch.cuh).
  virtual Status can_launch(GemmProblem const&, Schedule const&, Device const&) const = 0;
  virtual int64_t launch_workspace_bytes(GemmProblem const&, Schedule const&, Device const&) const = 0;
  virtual Status launch(GemmProblem const& p, Slices const&, Schedule const&, LaunchPolicy const&, Device const&,
                        Buffers const&, bool after_copy, cudaStream_t) const = 0;
  // The __global__ function, for its registers and occupancy and to raise its shared memory limit.
  virtual void const* entry_point() const = 0;

  // Lets the current device give the kernel info.shared_memory bytes; a launch without it fails above 48 KiB.
  Status allow_shared_memory() const;
};

}  // namespace jax_streamk
