// Programmatic dependent launch: a kernel starts while the previous one finishes (CUDA Programming Guide, "Programmatic
// Dependent Launch and Synchronization").
#pragma once

namespace jax_streamk {

// Whether this build includes compute capability 9.0 or newer.
#ifdef JAX_STREAMK_HOPPER
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

// The next kernel, if launched to overlap, may start once every CTA has called this or ended.
__device__ inline void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the previous kernel has ended. Call it before reading what that kernel wrote, and in a thread of every
// CTA, so that this kernel cannot end before it.
__device__ inline void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jax_streamk
