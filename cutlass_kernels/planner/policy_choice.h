// The rules by which the planner chooses a LaunchPolicy, with the thresholds of a Machine. Kernels need none of this.
#pragma once

#include "cutlass_kernels/launch/policy.h"
#include "cutlass_kernels/planner/machine.h"

namespace jax_streamk {

// The policy for a kernel that can run the problem, in this order of tiles.
LaunchPolicy choose_policy(KernelInfo const&, GemmProblem const&, Schedule const&, Raster, int32_t swizzle,
                           Device const&, Machine const&);

// L2 hints. An operand that streams past pushes everything else out of L2, also the instructions at a kernel's end,
// which a short kernel then waits for.

// An operand as tiles read it: those of a line along M or N read the same part of it.
struct OperandUse {
  Raster line;
  bool by_all_batches;    // all batches read the same one
  bool again;             // a tile reads it more than once
  int64_t bytes, others;  // of it and of the other operand, in any unit
  int32_t element_bytes;
  int32_t slices;        // of K, whose sums a second kernel adds; 1: none
  double multiply_adds;  // of the whole product
};

// Whether loads of an operand should be evict-first: if a single tile reads each part, or if all its readers run at
// once or shortly after one another. Not if they drift apart along K, if it is much smaller than the other operand, or
// if the product is long.
bool goes_first(TileOrder const&, Decomposition const&, OperandUse const&, Machine const&);

// Stages held back. Memory is slower if more loads of a streaming operand are in flight than it serves well.

// For clusters of `ctas` that take pieces of work in turn: each CTA fills
// max(ceil(min(under_way / CTAs, under_way_bytes_cta) / stage_bytes), 3) of its `stages`, where a stage holds
// stage_bytes of the operand. under_way = 0: all stages.
HeldBack held_back(Decomposition const& cut, int32_t ctas, int32_t sms, int32_t stages, int64_t stage_bytes,
                   int64_t under_way, Machine const&);

// Whether describing an operand up to the end of its last tile is faster, beside another operand of `others` rows.
bool gains_by_extension(TiledOperand const&, int64_t others, Machine const&);

}  // namespace jax_streamk
