// Programmatic dependent launch: a kernel that starts while the one before it ends (CUDA Programming Guide,
// "Programmatic Dependent Launch and Synchronization").
#pragma once

namespace jax_streamk {

// Whether this build is for any architecture from compute capability 9.0 on.
#ifdef JAX_STREAMK_HOPPER
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

// A kernel that was launched to overlap with this one may start once every CTA of this one has come here or ended.
__device__ inline void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Some thread of every CTA of a kernel that overlaps with the one before comes here, and what reads what that one
// writes comes after it: this waits until the one before has ended. So no such kernel ends sooner.
__device__ inline void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jax_streamk
