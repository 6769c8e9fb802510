// What kernels for a B with scales and the traits of their families have in common.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk::scaled {

inline constexpr int kChunkBytes = 4096;  // of B that a warp multiplies at a time

// How many neighbours along K share a scale at least: 16 in NVFP4.
constexpr int smallest_block(Type type) { return type == Type::kE2M1 ? 16 : 32; }

// How many neighbours along K share a scale, as kernels see it: if all of K does, it ends with the last k-tile.
constexpr int64_t block_along_k(Scales const& scales, int64_t k) {
  return scales.rows == k ? (k + 127) / 128 * 128 : scales.rows;
}

// Whether each number of B is multiplied and rounded, as if B had been dequantized, and not sums: where blocks of K are
// shorter than two of mma.sync's, or numbers are added.
constexpr bool rounds_numbers(Scales const& scales, int64_t k) {
  return scales.has_offset || block_along_k(scales, k) < 32;
}

// Whether a kernel that takes `chunk` of K at a time reads the blocks and types of a B with scales. `rounds`: whether
// it rounds their factors to A's type.
Status can_scale(KernelInfo const& info, GemmProblem const& p, int64_t chunk, bool rounds);

// Whether a kernel that multiplies sums of its k-tiles by scales reads the blocks and types of those of A and B.
Status can_scale_sums(KernelInfo const& info, GemmProblem const& p);

}  // namespace jax_streamk::scaled
