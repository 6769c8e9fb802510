// Programmatic dependent launch: a kernel that starts while the one before it ends (CUDA Programming Guide, "Programmatic Dependent
// Launch and Synchronization").
#pragma once

namespace jax_streamk {

// Whether this build is for any architecture from compute capability 9.0 on.
#ifdef JAX_STREAMK_HOPPER
inline constexpr bool kHopper = true;
#else
inline constexpr bool kHopper = false;
#endif

// A kernel that was launched to overlap with this one may start once every CTA of this one has come here or ended.
__device__ inline void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Every thread of a kernel that overlaps with the one before comes here before it reads what that one writes, or ends: this waits until
// the one before has ended.
__device__ inline void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jax_streamk
