// wgmma of every width. CUTLASS's header of all widths takes a compiler 20 seconds per translation unit; this needs
// one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace jax_streamk::sm90 {

// The instruction 64 x kN x 32 bytes with sums of Value: float32 here, int32 in integers.h. A specialization per width
// has
//   from_shared<Numbers, along K or not: A, B>(sums, descriptor of A, descriptor of B, accumulate): both in shared
//   memory; Numbers is what is multiplied, an element type or an Fp8 pair
//   from_registers<Numbers>(sums, words of A, descriptor of B, accumulate): A in registers, a K-major B
template <int kN, class Value = float>
struct WgmmaInstruction;

// The types of A and of B, each float8_e4m3fn or float8_e5m2.
template <bool kAIsE5M2, bool kBIsE5M2>
struct Fp8 {};

#define JAX_STREAMK_SUMS(first) "+f"(sums[first]), "+f"(sums[first + 1]), "+f"(sums[first + 2]), "+f"(sums[first + 3])
#define JAX_STREAMK_WGMMA_TEXT(n, types, list, operands, accumulate)                                          \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types " {" list \
  "}, " operands ";\n}\n"
// Of types whose matrices must be K-major, both in shared memory or A in registers.
#define JAX_STREAMK_WGMMA_SHARED(types, n, list, x0, x1, x2, x3, x4, x5, ...)     \
  asm volatile(JAX_STREAMK_WGMMA_TEXT(n, types, list, x0 ", " x1 ", p, 1, 1", x2) \
               : __VA_ARGS__                                                      \
               : "l"(a), "l"(b), "r"(accumulate))
#define JAX_STREAMK_WGMMA_REGISTERS(types, n, list, x0, x1, x2, x3, x4, x5, ...)                               \
  asm volatile(JAX_STREAMK_WGMMA_TEXT(n, types, list, "{" x0 ", " x1 ", " x2 ", " x3 "}, " x4 ", p, 1, 1", x5) \
               : __VA_ARGS__                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define JAX_STREAMK_WGMMA_ALONG_K(from, ...)                         \
  if constexpr (std::is_same_v<Numbers, cutlass::tfloat32_t>) {      \
    from("k8.f32.tf32.tf32", __VA_ARGS__);                           \
  } else if constexpr (std::is_same_v<Numbers, Fp8<false, false>>) { \
    from("k32.f32.e4m3.e4m3", __VA_ARGS__);                          \
  } else if constexpr (std::is_same_v<Numbers, Fp8<false, true>>) {  \
    from("k32.f32.e4m3.e5m2", __VA_ARGS__);                          \
  } else if constexpr (std::is_same_v<Numbers, Fp8<true, false>>) {  \
    from("k32.f32.e5m2.e4m3", __VA_ARGS__);                          \
  } else {                                                           \
    static_assert(std::is_same_v<Numbers, Fp8<true, true>>);         \
    from("k32.f32.e5m2.e5m2", __VA_ARGS__);                          \
  }
// The width, the operand numbers of its sums, the eight numbers after these, and the sums. CMake writes one per width.
#define JAX_STREAMK_WGMMA(n, list, x0, x1, x2, x3, x4, x5, x6, x7, ...)                                            \
  template <>                                                                                                      \
  struct WgmmaInstruction<n> {                                                                                     \
    template <class Numbers, bool kAAlongK, bool kBAlongK>                                                         \
    CUTLASS_DEVICE static void from_shared(float* sums, uint64_t a, uint64_t b, int32_t accumulate) {              \
      constexpr int kA = !kAAlongK, kB = !kBAlongK;                                                                \
      if constexpr (std::is_same_v<Numbers, cutlass::bfloat16_t>) {                                                \
        asm volatile(JAX_STREAMK_WGMMA_TEXT(n, "k16.f32.bf16.bf16", list, x0 ", " x1 ", p, 1, 1, " x3 ", " x4, x2) \
                     : __VA_ARGS__                                                                                 \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(kA), "n"(kB));                                         \
      } else if constexpr (std::is_same_v<Numbers, cutlass::half_t>) {                                             \
        asm volatile(JAX_STREAMK_WGMMA_TEXT(n, "k16.f32.f16.f16", list, x0 ", " x1 ", p, 1, 1, " x3 ", " x4, x2)   \
                     : __VA_ARGS__                                                                                 \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(kA), "n"(kB));                                         \
      } else {                                                                                                     \
        static_assert(kA == 0 && kB == 0);                                                                         \
        JAX_STREAMK_WGMMA_ALONG_K(JAX_STREAMK_WGMMA_SHARED, n, list, x0, x1, x2, x3, x4, x5, __VA_ARGS__)          \
      }                                                                                                            \
    }                                                                                                              \
    template <class Numbers>                                                                                       \
    CUTLASS_DEVICE static void from_registers(float* sums, uint32_t const* a, uint64_t b, int32_t accumulate) {    \
      JAX_STREAMK_WGMMA_ALONG_K(JAX_STREAMK_WGMMA_REGISTERS, n, list, x0, x1, x2, x3, x4, x5, __VA_ARGS__)         \
    }                                                                                                              \
  };
#include "wgmma_widths.h"
#undef JAX_STREAMK_WGMMA
#undef JAX_STREAMK_WGMMA_ALONG_K
#undef JAX_STREAMK_WGMMA_REGISTERS
#undef JAX_STREAMK_WGMMA_SHARED
#undef JAX_STREAMK_WGMMA_TEXT
#undef JAX_STREAMK_SUMS

// Before the first of a group of instructions; after its last; and until at most kNewest groups are in flight.
CUTLASS_DEVICE void arrive_at_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CUTLASS_DEVICE void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kNewest>
CUTLASS_DEVICE void wait_for_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across: instructions in flight change them.
template <class Accumulators>
CUTLASS_DEVICE void fence(Accumulators& accumulators) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Accumulators::kValues; ++i) {
    if constexpr (std::is_same_v<typename Accumulators::Value, float>) {
      asm volatile("" : "+f"(accumulators(i))::"memory");
    } else {
      asm volatile("" : "+r"(accumulators(i))::"memory");
    }
  }
}

}  // namespace jax_streamk::sm90
