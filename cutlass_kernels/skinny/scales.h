// What kernels for a B with scales and the family's traits have in common.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk::scaled {

inline constexpr int kChunkBytes = 4096;  // of B that a warp multiplies at a time

// How many neighbours along K share a scale at least: 16 in NVFP4.
constexpr int smallest_block(Type type) { return type == Type::kE2M1 ? 16 : 32; }

// Whether each number of B is multiplied and rounded, as if B had been dequantized, and not sums: where blocks of K are
// shorter than two of mma.sync's, or numbers are added.
constexpr bool rounds_numbers(Scales const& scales) { return scales.has_offset || scales.rows < 32; }

}  // namespace jax_streamk::scaled
