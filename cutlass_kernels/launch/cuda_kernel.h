// What the CUDA families share: copies before a GEMM, its launch, and a separate reduction after it.
#pragma once

#include "cutlass_kernels/core/cuda.h"
#include "cutlass_kernels/launch/kernel.h"

// A name for the registration of each row of table.txt in a translation unit.
#define JAX_STREAMK_ROW_ON(line) row_##line
#define JAX_STREAMK_ROW(line) JAX_STREAMK_ROW_ON(line)

namespace jax_streamk {

class CudaKernel : public Kernel {
 public:
  using Kernel::Kernel;

  Status run(GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&, Buffers const&,
             Queue const&) const final;
  Status resources(Resources&) const final;

 protected:
  // Launches the GEMM alone. Of several slices it is data-parallel, needs no workspace, and writes slice s of batch b
  // at s * problem.batch + b batch strides of D. With launch.overlap it may start while the kernel before finishes.
  virtual Status launch(Launch const&, LaunchPolicy const&, Device const&, Buffers const&, cudaStream_t) const = 0;
  // The __global__ function.
  virtual void const* entry_point() const = 0;

  // Raises the kernel's shared-memory limit on the current device, without which launches with over 48 KiB fail.
  Status allow_shared_memory() const;
};

}  // namespace jax_streamk
