// How the CTAs of a cluster send each other sums.
#pragma once

#include <cstdint>

#include "cutlass_kernels/skinny/instructions.cuh"

namespace jax_streamk::scaled {

#if __CUDA_ARCH__ >= 900
// skinny::cluster_arrive(), but what was stored before need not be visible.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Which cluster of the grid this is, and which of its CTAs.
__device__ inline int32_t cluster_index() {
  int32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ inline int32_t cluster_rank() {
  int32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Makes a barrier that opens once, when `bytes` have been sent to this CTA. Call it in one thread.
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  auto const at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ inline void wait_for_bytes(uint64_t* barrier) {
  auto const at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t is_open = 0;
  while (is_open == 0) {
    asm volatile(
        "{\n.reg .pred is_open;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_open, [%1], 0;\n"
        "selp.u32 %0, 1, 0, is_open;\n}\n"
        : "=r"(is_open)
        : "r"(at)
        : "memory");
  }
}
// Stores a value in CTA `rank` of the cluster, and counts its bytes there. `to` and `barrier` are this CTA's.
__device__ inline void send(uint32_t rank, float2* to, float2 value, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   skinny::address_of(rank, to)),
               "f"(value.x), "f"(value.y), "r"(skinny::address_of(rank, barrier))
               : "memory");
}
#else
__device__ inline void cluster_arrive_relaxed() {}
__device__ inline int32_t cluster_index() { return 0; }
__device__ inline int32_t cluster_rank() { return 0; }
__device__ inline void expect_bytes(uint64_t*, uint32_t) {}
__device__ inline void wait_for_bytes(uint64_t*) {}
__device__ inline void send(uint32_t, float2*, float2, uint64_t*) {}
#endif

}  // namespace jax_streamk::scaled
