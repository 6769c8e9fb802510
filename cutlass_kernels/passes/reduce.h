// The second kernel of a separate split-K: adds the slices' partial sums and runs the epilogue.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// D = epilogue(sum over slices of partials). `partials` has slices x batch x m rows of the accumulator type with
// leading dimension `ld`, a multiple of 16 bytes.
Status launch_reduction(GemmProblem const&, Device const&, int32_t slices, int64_t ld, void const* partials,
                        Buffers const&, cudaStream_t);

}  // namespace jax_streamk
