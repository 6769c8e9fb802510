// The instructions that skinny kernels use.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jax_streamk::skinny {

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// mma.sync: d (16 x 8) += a (16 x K) b (K x 8). K is eight words; a word is two 16-bit elements along K, or an f32.
// With g = lane / 4 and t = lane % 4, a thread has
//   a: word t of rows g and g + 8, then word t + 4 of both;  b: words t and t + 4 of column g;
//   d: columns 2t and 2t + 1 of row g, then of row g + 8.
// For f64 K is four, and words t and t + 4 are the halves of element t.
template <class T>
__device__ inline void multiply_words(Accumulator<T> (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1);

#define JSK_MULTIPLY_WORDS(T, instruction)                                                                   \
  template <>                                                                                                \
  __device__ inline void multiply_words<T>(float (&d)[4], uint32_t const(&a)[4], uint32_t b0, uint32_t b1) { \
    asm("mma.sync.aligned." instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"   \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                     \
  }
JSK_MULTIPLY_WORDS(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
JSK_MULTIPLY_WORDS(__half, "m16n8k16.row.col.f32.f16.f16.f32")
JSK_MULTIPLY_WORDS(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef JSK_MULTIPLY_WORDS

template <>
__device__ inline void multiply_words<double>(double (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  auto const whole = [](uint32_t low, uint32_t high) {
    return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
  };
  double const upper = whole(a[0], a[2]), lower = whole(a[1], a[3]), b = whole(b0, b1);
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64.rn {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(upper), "d"(lower), "d"(b));
#else
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[0]), "+d"(d[1])
      : "d"(upper), "d"(b));
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[2]), "+d"(d[3])
      : "d"(lower), "d"(b));
#endif
}

// The L2 policy for data that is read once.
__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies the first `bytes` of 16 to shared memory and zeroes the rest. The thread waits for its copies by group.
__device__ inline void copy_async(uint4* to, void const* from, int bytes) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
}
__device__ inline void copy_async(uint4* to, void const* from, int bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}
// The same for 8 bytes.
__device__ inline void copy_async(uint2* to, void const* from, int bytes) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
}
// The same for 4 bytes.
__device__ inline void copy_async(uint32_t* to, void const* from, int bytes) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the newest kPending groups.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A barrier for all threads of a cluster, which see each other's shared memory: what a thread stored before it arrived
// is visible to the threads that have waited.
#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in CTA `rank` of the cluster that corresponds to `from` in this CTA, and the value there.
__device__ inline uint32_t address_of(uint32_t rank, void const* from) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(rank));
  return remote;
}
__device__ inline float2 load_of(uint32_t rank, float2 const* from) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address_of(rank, from))
               : "memory");
  return value;
}
__device__ inline double2 load_of(uint32_t rank, double2 const* from) {
  double2 value;
  asm volatile("ld.shared::cluster.v2.f64 {%0, %1}, [%2];"
               : "=d"(value.x), "=d"(value.y)
               : "r"(address_of(rank, from))
               : "memory");
  return value;
}
#else
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
template <class Pair>
__device__ inline Pair load_of(uint32_t, Pair const*) {
  return {};
}
#endif

}  // namespace jax_streamk::skinny
