// What leaves L2 first. Operands that stream past push everything else out of it, instructions included, which at the
// end of a short kernel are then waited for.
#pragma once

#include "cutlass_kernels/core/decomposition.h"

namespace jax_streamk {

// An operand of a GEMM as its tiles read it: those of a line along M or N read the same of it.
struct OperandUse {
  Raster line;
  bool by_all_batches;    // several batches have the same
  bool again;             // a tile reads it more than once
  int64_t bytes, others;  // of it and of the other operand, in any unit
  int32_t element_bytes;
  int32_t slices;        // of K, whose sums a second kernel adds; 1: none
  double multiply_adds;  // of the whole product
};

// Whether its loads may go first: those who read the same are busy now, and not along so much of K that they drift
// apart, or not much later, it is not much smaller than the other, and these are not whole tiles of a long product.
// Measured in benchmarks/results/l2_h200_2026-11-22.md, plans_h200_2026-11-22.md and eviction_h200_2026-11-24.md.
bool goes_first(TileOrder const&, Decomposition const&, OperandUse const&);

}  // namespace jax_streamk
