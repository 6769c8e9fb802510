// Errors and allocations of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

Status from_cuda(cudaError_t error, std::string const& what);

// Bytes from `p`, in GPU memory, to the end of its allocation; 0 if the driver does not report it.
int64_t bytes_left(void const* p);

}  // namespace jax_streamk
