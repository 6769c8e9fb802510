// What the CUDA families share: copies before a GEMM, its launch, and a separate reduction after it.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/core/slices.h"

// A name for the registration of each row of table.txt in a translation unit.
#define JAX_STREAMK_ROW_ON(line) row_##line
#define JAX_STREAMK_ROW(line) JAX_STREAMK_ROW_ON(line)

namespace jax_streamk {

Status from_cuda(cudaError_t error, std::string const& what);

// Bytes from `p`, in GPU memory, to the end of its allocation; 0 if the driver does not report it.
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
  // The same three functions for one GEMM launch, without copies and separate reduction. A launch of several slices
  // is data-parallel, needs no workspace, and writes slice s of batch b at s * p.batch + b batch strides of D;
  // can_launch() then gets slices.as_batch(p). `after_copy`: a copy was launched just before, and the GEMM may start
  // while the copy finishes.
  virtual Status can_launch(GemmProblem const&, Schedule const&, Device const&) const = 0;
  virtual int64_t launch_workspace_bytes(GemmProblem const&, Schedule const&, Device const&) const = 0;
  virtual Status launch(GemmProblem const& p, Slices const&, Schedule const&, LaunchPolicy const&, Device const&,
                        Buffers const&, bool after_copy, cudaStream_t) const = 0;
  // The __global__ function.
  virtual void const* entry_point() const = 0;

  // Raises the kernel's shared-memory limit on the current device, without which launches with over 48 KiB fail.
  Status allow_shared_memory() const;
};

}  // namespace jax_streamk
