// wgmma of eight-bit integers, of every width.
#pragma once

#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

// Numbers of WgmmaInstruction: A and B of int8, both K-major.
struct Integers {};

#define JAX_STREAMK_SUMS(first) "+r"(sums[first]), "+r"(sums[first + 1]), "+r"(sums[first + 2]), "+r"(sums[first + 3])
#define JAX_STREAMK_WGMMA_TEXT(n, list, a, b, accumulate)                                                            \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" list \
  "}, " a ", " b ", p;\n}\n"
#define JAX_STREAMK_WGMMA(n, list, x0, x1, x2, x3, x4, x5, x6, x7, ...)                                           \
  template <>                                                                                                     \
  struct WgmmaInstruction<n, int32_t> {                                                                           \
    template <class Numbers, bool kAAlongK, bool kBAlongK>                                                        \
    CUTLASS_DEVICE static void from_shared(int32_t* sums, uint64_t a, uint64_t b, int32_t accumulate) {           \
      static_assert(std::is_same_v<Numbers, Integers> && kAAlongK && kBAlongK);                                   \
      asm volatile(JAX_STREAMK_WGMMA_TEXT(n, list, x0, x1, x2) : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate));  \
    }                                                                                                             \
    template <class Numbers>                                                                                      \
    CUTLASS_DEVICE static void from_registers(int32_t* sums, uint32_t const* a, uint64_t b, int32_t accumulate) { \
      static_assert(std::is_same_v<Numbers, Integers>);                                                           \
      asm volatile(JAX_STREAMK_WGMMA_TEXT(n, list, "{" x0 ", " x1 ", " x2 ", " x3 "}", x4, x5)                    \
                   : __VA_ARGS__                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                        \
    }                                                                                                             \
  };
#include "wgmma_widths.h"
#undef JAX_STREAMK_WGMMA
#undef JAX_STREAMK_WGMMA_TEXT
#undef JAX_STREAMK_SUMS

}  // namespace jax_streamk::sm90
