// The activation functions, of four accumulators at a time.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_kernels/epilogue/epilogue.h"

namespace jax_streamk::sm90 {

CUTLASS_DEVICE float4 activated_inline(Activation activation, float4 x) {
  with_activation<true>(activation, [&](auto const& function) {
    activate_two(function, x.x, x.y);
    activate_two(function, x.z, x.w);
  });
  return x;
}

// Seven functions in line, unrolled for each accumulator, took half of the time to compile a kernel. More values at
// once, or pointers to functions, would spill registers around the call.
static __noinline__ __device__ float4 activated_by_call(Activation activation, float4 x) {
  return activated_inline(activation, x);
}

// kInlines: even so a call would spill.
template <bool kInlines>
CUTLASS_DEVICE float4 activated(Activation activation, float4 x) {
  if constexpr (kInlines) return activated_inline(activation, x);
  return activated_by_call(activation, x);
}

}  // namespace jax_streamk::sm90
