// TF32: f32 with a mantissa of 10 bits.
#pragma once

#include <cstdint>

namespace jax_streamk {

// The nearest TF32 number, ties away from zero.
__device__ inline uint32_t to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

}  // namespace jax_streamk
