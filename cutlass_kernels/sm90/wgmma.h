// wgmma of every width as CuTe MMA atoms. CUTLASS's header of all widths takes a compiler 20 seconds per translation
// unit; this needs one.
#pragma once

#include <type_traits>

#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/numeric_types.h"

namespace jax_streamk::sm90 {

// The instruction 64 x kN x 32 bytes with float32 sums. A specialization per width has
//   from_shared<Element, kMajorA, kMajorB>(sums, descriptor of A, descriptor of B, accumulate): A and B in shared
//   memory from_registers(sums, words of A, descriptor of B, accumulate): A of TF32 in registers, a K-major B
template <int kN>
struct WgmmaInstruction;

#define JAX_STREAMK_SUMS(first) "+f"(sums[first]), "+f"(sums[first + 1]), "+f"(sums[first + 2]), "+f"(sums[first + 3])
#define JAX_STREAMK_WGMMA_TEXT(n, types, list, operands, accumulate)                                          \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types " {" list \
  "}, " operands ";\n}\n"
// The width, the operand numbers of its sums, the eight numbers after these, and the sums. CMake writes one per width.
#define JAX_STREAMK_WGMMA(n, list, x0, x1, x2, x3, x4, x5, x6, x7, ...)                                                \
  template <>                                                                                                          \
  struct WgmmaInstruction<n> {                                                                                         \
    template <class Element, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>                                     \
    CUTE_DEVICE static void from_shared(float* sums, uint64_t a, uint64_t b, int32_t accumulate) {                     \
      constexpr auto kA = static_cast<int32_t>(kMajorA), kB = static_cast<int32_t>(kMajorB);                           \
      if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {                                                    \
        asm volatile(JAX_STREAMK_WGMMA_TEXT(n, "k16.f32.bf16.bf16", list, x0 ", " x1 ", p, 1, 1, " x3 ", " x4, x2)     \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(kA), "n"(kB));                                             \
      } else if constexpr (std::is_same_v<Element, cutlass::half_t>) {                                                 \
        asm volatile(JAX_STREAMK_WGMMA_TEXT(n, "k16.f32.f16.f16", list, x0 ", " x1 ", p, 1, 1, " x3 ", " x4, x2)       \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(kA), "n"(kB));                                             \
      } else {                                                                                                         \
        static_assert(std::is_same_v<Element, cutlass::tfloat32_t> && kA == 0 && kB == 0);                             \
        asm volatile(JAX_STREAMK_WGMMA_TEXT(n, "k8.f32.tf32.tf32", list, x0 ", " x1 ", p, 1, 1", x2)                   \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
      }                                                                                                                \
    }                                                                                                                  \
    CUTE_DEVICE static void from_registers(float* sums, uint32_t const* a, uint64_t b, int32_t accumulate) {           \
      asm volatile(                                                                                                    \
          JAX_STREAMK_WGMMA_TEXT(n, "k8.f32.tf32.tf32", list, "{" x0 ", " x1 ", " x2 ", " x3 "}, " x4 ", p, 1, 1", x5) \
          : __VA_ARGS__                                                                                                \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                      \
    }                                                                                                                  \
  };
#include "wgmma_widths.h"
#undef JAX_STREAMK_WGMMA
#undef JAX_STREAMK_WGMMA_TEXT
#undef JAX_STREAMK_SUMS

// CuTe's operation: MMA_Traits below tells the layouts.
template <class Element, int kN, bool kAFromRegisters, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct Wgmma {};

// What CuTe's gemm() calls for one instruction; it finds it by the namespace of Wgmma.
template <class Element, int kN, bool kAFromRegisters, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB, class D,
          class LayoutD, class A, class LayoutA, class B, class LayoutB, class C, class LayoutC>
CUTE_HOST_DEVICE void mma_unpack(cute::MMA_Traits<Wgmma<Element, kN, kAFromRegisters, kMajorA, kMajorB>> const& traits,
                                 cute::Tensor<D, LayoutD>& d, cute::Tensor<A, LayoutA> const& a,
                                 cute::Tensor<B, LayoutB> const& b, cute::Tensor<C, LayoutC> const&) {
#ifdef __CUDA_ARCH__
  using Instruction = WgmmaInstruction<kN>;
  static_assert(cute::size(LayoutD{}) == kN / 2);
  auto const words_b = cute::recast<uint64_t>(b);
  auto const accumulate = static_cast<int32_t>(traits.accumulate_);
  if constexpr (kAFromRegisters) {
    auto const words_a = cute::recast<uint32_t>(a);
    uint32_t const four[] = {words_a(0), words_a(1), words_a(2), words_a(3)};
    Instruction::from_registers(&d(0), four, words_b(0), accumulate);
  } else {
    auto const words_a = cute::recast<uint64_t>(a);
    Instruction::template from_shared<Element, kMajorA, kMajorB>(&d(0), words_a(0), words_b(0), accumulate);
  }
#endif
}

// The MMA of one of CUTLASS's collectives with kWarpgroups, stacked along m, and one instruction of kN columns.
template <class Mma, int kWarpgroups, int kN>
struct WgmmaLike {
  using Element = typename Mma::ValTypeA;
  static constexpr bool kAFromRegisters =
      !cute::is_base_of<cute::GMMA::DescriptorIterator, typename Mma::FrgTypeA>::value;
  template <class Fragment>
  static constexpr cute::GMMA::Major major =
      std::is_same_v<Fragment, cute::GMMA::smem_desc<cute::GMMA::Major::MN>> ? cute::GMMA::Major::MN
                                                                             : cute::GMMA::Major::K;
  using Operation = Wgmma<Element, kN, kAFromRegisters, major<typename Mma::FrgTypeA>, major<typename Mma::FrgTypeB>>;
  using type =
      cute::TiledMMA<cute::MMA_Atom<Operation>, cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>>;
};

}  // namespace jax_streamk::sm90

namespace cute {

template <class Element, int kN, bool kAFromRegisters, GMMA::Major kMajorA, GMMA::Major kMajorB>
struct MMA_Traits<jax_streamk::sm90::Wgmma<Element, kN, kAFromRegisters, kMajorA, kMajorB>> {
  static constexpr int kK = 32 / sizeof(Element);
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using ValTypeD = float;
  using FrgTypeA = std::conditional_t<kAFromRegisters, Element, GMMA::smem_desc<kMajorA>>;
  using FrgTypeB = GMMA::smem_desc<kMajorB>;
  using Shape_MNK = Shape<_64, Int<kN>, Int<kK>>;
  using ThrID = Layout<_128>;
  using ALayout = std::conditional_t<kAFromRegisters, GMMA::ALayout_64x8, GMMA::ABLayout<64, kK>>;
  using BLayout = GMMA::ABLayout<kN, kK>;
  using CLayout = GMMA::CLayout_64xN<kN>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

}  // namespace cute
