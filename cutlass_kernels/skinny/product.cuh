// The product of a chunk: mma.sync with B^T as its first operand, 16 columns of B by 8 rows of A.
//
// Which k an instruction calls "word t" does not matter as long as A and B agree, and likewise for columns. So a thread
// keeps the vectors that it loaded, and a layout type says which of their words one instruction takes.
#pragma once

#include "cutlass_kernels/core/tf32.cuh"
#include "cutlass_kernels/skinny/layout.cuh"

namespace jax_streamk::skinny {

__device__ inline uint32_t word(uint4 const& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ inline uint32_t word(uint2 const& v, int i) { return i == 0 ? v.x : v.y; }

// KernelInfo::promotion_k: for a float32 result the sum of every instruction is promoted.
template <class T, Math kMath, class D>
inline constexpr int kPromotion = !std::is_same_v<D, float> ? 0
                                  : sizeof(T) == 2          ? 16
                                                            : 8;

// sums += the products of two words of K, by 16 columns of B and 8 rows of A.
template <class T, Math kMath, class D>
__device__ inline void multiply_add(Accumulator<T> (&sums)[4], uint32_t const (&b)[4], uint32_t a0, uint32_t a1) {
  auto const promote = [&](auto const& multiply) {
    if constexpr (kPromotion<T, kMath, D> > 0) {
      float products[4] = {};
      multiply(products);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += products[i];
    } else {
      multiply(sums);
    }
  };
  if constexpr (kMath == Math::kNative) {
    promote([&](auto& to) { multiply_words<T>(to, b, a0, a1); });
  } else {
    // f32 = large + small, both TF32. small x small is below the rounding error of the rest.
    uint32_t const words[6] = {b[0], b[1], b[2], b[3], a0, a1};
    uint32_t large[6], small[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      large[i] = to_tf32(__uint_as_float(words[i]));
      if constexpr (kMath == Math::kTF32x3) small[i] = to_tf32(__uint_as_float(words[i]) - __uint_as_float(large[i]));
    }
    uint32_t const large_b[4] = {large[0], large[1], large[2], large[3]};
    promote([&](auto& to) {
      if constexpr (kMath == Math::kTF32x3) {
        uint32_t const small_b[4] = {small[0], small[1], small[2], small[3]};
        multiply_words<T>(to, small_b, large[4], large[5]);
        multiply_words<T>(to, large_b, small[4], small[5]);
      }
      multiply_words<T>(to, large_b, large[4], large[5]);
    });
  }
}

// Converts four rows of K, each a word of two neighbouring 16-bit columns, to mma.sync's words of two neighbouring k:
// rows 0 and 1 of either column, then rows 2 and 3.
__device__ inline void pair_rows(uint32_t (&w)[4], uint32_t row0, uint32_t row1, uint32_t row2, uint32_t row3) {
  w[0] = __byte_perm(row0, row1, 0x5410), w[1] = __byte_perm(row0, row1, 0x7632);
  w[2] = __byte_perm(row2, row3, 0x5410), w[3] = __byte_perm(row2, row3, 0x7632);
}

// The layouts of an aligned B: words(b, step, j, w) takes from a thread's eight vectors what one instruction
// multiplies. `step`, 0 or 1, is a half of the chunk's K. The instruction's rows g and g + 8 are the thread's columns
// 2j and 2j + 1:
//   w[0], w[1]: the first word of K of columns 2j and 2j + 1;  w[2], w[3]: the second.
struct ColumnMajorB {  // b[c] is column c
  static __device__ void words(uint4 const (&b)[8], int step, int j, uint32_t (&w)[4]) {
    w[0] = word(b[2 * j], 2 * step), w[1] = word(b[2 * j + 1], 2 * step);
    w[2] = word(b[2 * j], 2 * step + 1), w[3] = word(b[2 * j + 1], 2 * step + 1);
  }
};
struct RowMajorB16 {  // b[k] is row k, word j of it columns 2j and 2j + 1
  static __device__ void words(uint4 const (&b)[8], int step, int j, uint32_t (&w)[4]) {
    pair_rows(w, word(b[4 * step], j), word(b[4 * step + 1], j), word(b[4 * step + 2], j), word(b[4 * step + 3], j));
  }
};
struct RowMajorB32 {  // b[2k], b[2k + 1] are the two halves of row k, four columns each
  static __device__ void words(uint4 const (&b)[8], int step, int j, uint32_t (&w)[4]) {
    uint4 const& first = b[4 * step + j / 2];
    uint4 const& second = b[4 * step + 2 + j / 2];
    w[0] = word(first, 2 * j % 4), w[1] = word(first, 2 * j % 4 + 1);
    w[2] = word(second, 2 * j % 4), w[3] = word(second, 2 * j % 4 + 1);
  }
};
struct RowMajorB64 {  // b[4k + j] is columns 2j and 2j + 1 of row k; an element is two words
  static __device__ void words(uint4 const (&b)[8], int step, int j, uint32_t (&w)[4]) {
    uint4 const& v = b[4 * step + j];
    w[0] = v.x, w[2] = v.y, w[1] = v.z, w[3] = v.w;
  }
};
template <class T, Major kMajorB>
using LayoutOfB = std::conditional_t<
    kMajorB == Major::kColumn, ColumnMajorB,
    std::conditional_t<sizeof(T) == 2, RowMajorB16, std::conditional_t<sizeof(T) == 4, RowMajorB32, RowMajorB64>>>;

// The vector that begins `offset` bytes (even, below 16) into the concatenation of two others.
__device__ inline uint4 shifted(uint4 const& first, uint4 const& second, uint32_t offset) {
  uint32_t w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = offset & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = offset & 4 ? w[i + 1] : w[i];
  uint32_t const bits = (offset & 2) * 8;
  return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
          __funnelshift_r(w[3], w[4], bits)};
}

}  // namespace jax_streamk::skinny
