// The words of table.txt: element types with their instructions, math, and majorness.
#pragma once

#include <type_traits>

#include "cutlass/arch/mma.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/layout/matrix.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

namespace sm80 {

struct bf16 {
  using Element = cutlass::bfloat16_t;
  using Accumulator = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  static constexpr Type kType = Type::kBF16;
};
struct f16 {
  using Element = cutlass::half_t;
  using Accumulator = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  static constexpr Type kType = Type::kF16;
};
struct f32 {
  using Element = float;
  using Accumulator = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
  static constexpr Type kType = Type::kF32;
};
struct f64 {
  using Element = double;
  using Accumulator = double;
  // A type of its own, to select the specialization of cutlass::arch::Mma below.
  struct Instruction : cutlass::gemm::GemmShape<16, 8, 4> {};
  static constexpr Type kType = Type::kF64;
};

// Likewise a type of its own: for a float32 D every instruction's sum is promoted (KernelInfo::promotion_k).
template <int kK>
struct Promoted : cutlass::gemm::GemmShape<16, 8, kK> {};
template <class D>
inline constexpr bool kPromotes = std::is_same_v<D, f32>;
template <class A, class D>
using InstructionOf = std::conditional_t<kPromotes<D>, Promoted<A::Instruction::kK>, typename A::Instruction>;

struct native {
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr Math kMath = Math::kNative;
};
// OpMultiplyAdd rounds f32 operands to the nearest TF32, ties away from zero, on the way to the tensor core.
struct tf32 {
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr Math kMath = Math::kTF32;
};
// f32 = large + small, both TF32; all products but small x small are added. An infinite operand gives NaN, because its
// small part is infinity - infinity.
struct tf32x3 {
  using Operator = cutlass::arch::OpMultiplyAddFastF32;
  static constexpr Math kMath = Math::kTF32x3;
};

struct row {
  using Layout = cutlass::layout::RowMajor;
  static constexpr Major kMajor = Major::kRow;
};
struct column {
  using Layout = cutlass::layout::ColumnMajor;
  static constexpr Major kMajor = Major::kColumn;
};

}  // namespace sm80

// CUTLASS's f64 instructions.
template <int kM>
using F64Mma =
    cutlass::arch::Mma<cutlass::gemm::GemmShape<kM, 8, 4>, 32, double, cutlass::layout::RowMajor, double,
                       cutlass::layout::ColumnMajor, double, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;

}  // namespace jax_streamk

// f64 at full rate: m16n8k4 from compute capability 9.0 on, before that an m8n8k4 for each half of the rows. These use
// the same registers as m16n8k4, so Params and workspace are the same on every architecture.
template <>
struct cutlass::arch::Mma<jax_streamk::sm80::f64::Instruction, 32, double, cutlass::layout::RowMajor, double,
                          cutlass::layout::ColumnMajor, double, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>
    : jax_streamk::F64Mma<16> {
  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    jax_streamk::F64Mma<16>::operator()(d, a, b, c);
#else
    using Half = jax_streamk::F64Mma<8>;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      Half::FragmentC half = {c[2 * i], c[2 * i + 1]};
      Half{}(half, {a[i]}, b, half);
      d[2 * i] = half[0], d[2 * i + 1] = half[1];
    }
#endif
  }
};

template <int kK, class AB>
struct cutlass::arch::Mma<jax_streamk::sm80::Promoted<kK>, 32, AB, cutlass::layout::RowMajor, AB,
                          cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>
    : cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, kK>, 32, AB, cutlass::layout::RowMajor, AB,
                         cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd> {
  using Base =
      cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, kK>, 32, AB, cutlass::layout::RowMajor, AB,
                         cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;
  using typename Base::FragmentA, typename Base::FragmentB, typename Base::FragmentC;

  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
    FragmentC sum;
    sum.clear();
    Base::operator()(sum, a, b, sum);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < FragmentC::kElements; ++i) d[i] = c[i] + sum[i];
  }
};
