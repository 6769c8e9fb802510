// Extents as divisors in kernels.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/decomposition.h"

namespace jax_streamk {

// Divides non-negative 64-bit numbers; below 2^31, which is usual, in one multiplication.
struct Extent {
  int64_t size;
  Divisor divisor;

  explicit Extent(int64_t size)
      : size(size), divisor(size >> 31 == 0 ? Divisor(static_cast<int32_t>(size)) : Divisor()) {}
  __device__ int64_t divide(int64_t x) const {
    return (x | size) >> 31 == 0 ? divisor.divide(static_cast<int32_t>(x)) : x / size;
  }
};

// For numbers that are always below 2^31.
struct ShortExtent {
  int32_t size = 1;
  Divisor divisor;

  ShortExtent() = default;
  explicit ShortExtent(int64_t size) : size(static_cast<int32_t>(size)), divisor(this->size) {}
};

}  // namespace jax_streamk
