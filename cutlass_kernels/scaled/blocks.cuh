// What belongs to the blocks of a B with scales, as kernels read it.
#pragma once

#include <cstdint>

#include "cutlass_kernels/launch/cuda_kernel.h"
#include "cutlass_kernels/scaled/decode.cuh"
#include "cutlass_kernels/scaled/scales.h"

namespace jax_streamk::scaled {

// Numbers for each block, of one batch.
struct Blocks {
  Numbers scale;
  Numbers other;  // zero points, or, if it adds, offsets
  bool adds;
  uint32_t batch_stride, stride_k, stride_n;  // elements from a block to the next
  int32_t block_k;
  Divisor by_block_k, by_block_n;
  uint32_t flip;  // of integers
};

// Of the problem's B, whose scales are in its majorness.
inline Blocks blocks_of(GemmProblem const& p, Buffers const& buffers, uint32_t flip) {
  Scales const& scales = p.b.scales;
  Operand const scale = p.operand(Role::kScale);
  bool const by_row = p.b.major == Major::kRow;
  auto const block_k = static_cast<int32_t>(block_along_k(scales, p.k));
  auto const numbers = [](void const* data, Type type) { return Numbers{data, type, Format(type).bits()}; };
  return {numbers(buffers.scale, scales.scale),
          scales.has_offset ? numbers(buffers.offset, scales.offset) : numbers(buffers.zero, scales.zero),
          scales.has_offset,
          static_cast<uint32_t>(scale.batch_stride),
          static_cast<uint32_t>(by_row ? scale.ld : 1),
          static_cast<uint32_t>(by_row ? 1 : scale.ld),
          block_k,
          Divisor(block_k),
          Divisor(static_cast<int32_t>(scales.columns)),
          flip};
}

// Calls function(i, a number as it lies in memory, in the low bits) for the numbers at index(i), i < kCount.
template <int kCount, class Index, class Function>
__device__ inline void load_numbers(Numbers const& from, Index const& index, Function const& function) {
  auto const all = [&](auto word) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) function(i, __ldg(static_cast<decltype(word) const*>(from.data) + index(i)));
  };
  if (from.bits == 16) {
    all(uint16_t());
  } else if (from.bits == 32) {
    all(uint32_t());
  } else if (from.bits == 8) {
    all(uint8_t());
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      function(i, __ldg(static_cast<uint8_t const*>(from.data) + index(i) / 2) >> (index(i) % 2 * 4) & 15);
  }
}

}  // namespace jax_streamk::scaled
