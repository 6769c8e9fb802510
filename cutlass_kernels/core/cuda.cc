#include "cutlass_kernels/core/cuda.h"

#include <cuda.h>

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

}  // namespace jax_streamk
