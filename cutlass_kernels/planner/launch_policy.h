// What is decided of a launch besides its kernel and its schedule: the LaunchPolicy of gemm.h. launch_policy_of() is a
// pure function, whose answer a plan prints and a custom call carries; a launch only does what it says.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// For a kernel that can run the problem, in this order of tiles.
LaunchPolicy launch_policy_of(KernelInfo const&, GemmProblem const&, Schedule const&, Raster, int32_t swizzle,
                              Device const&);

// Ok, or why a launch of a kernel that can run the problem cannot do what the policy says.
Status check_policy(KernelInfo const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&);

// Of sm90 kernels and problems without copies: how clusters share the work, and in which order tiles are numbered, both
// of the kernel's own GEMM and in cluster tiles.
Decomposition sm90_decomposition(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
TileOrder sm90_order(KernelInfo const&, GemmProblem const&, Raster, int32_t swizzle);

// L2 hints. Operands that stream past push everything else out of L2, instructions included, which at the end of a
// short kernel are then waited for.

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

// Stages held back: of an operand that streams past only so much should be on its way from memory at once.

// Stages of each CTA that its loads leave empty, by the ordinal of its piece of work. In the last wave, where fewer
// CTAs load, no more than before, for loads wait for stages that far ahead.
struct HeldBack {
  int32_t first = 0;  // of a CTA's first piece of work
  int32_t whole_waves = 0, in_whole = 0, in_last = 0;

  static HeldBack of(Decomposition const& cut, int32_t in_whole, int32_t in_last) {
    int32_t const waves = cut.tiles * cut.splits / cut.workers;
    return {waves > 0 ? in_whole : in_last, waves, in_whole, in_last};
  }

  // Where this compares, or there is no `first`, ptxas reads parameters before the first load in a way (LDC) that takes
  // half a microsecond the first time.
  JSK_HOST_DEVICE int32_t stages(int32_t ordinal) const {
    return in_last + ((ordinal - whole_waves) >> 31 & (in_whole - in_last));
  }
};

// For pieces of work that clusters of `ctas` take in turn, each CTA with `stages` that hold so many bytes of the
// operand, where all together should have about `under_way` bytes of it under way, in whole stages, three at least; 0:
// as many as the stages hold.
HeldBack held_back(Decomposition const& cut, int32_t ctas, int32_t stages, int64_t stage_bytes, int64_t under_way);

// TMA extents: TMA takes two or three times as long for what is beyond an operand's extent. What follows an operand in
// its allocation may be read as if it were its own, and multiplied into what D does not have.

// An operand of rows (columns) of M or N by K, as the tiles of a kernel read it.
struct TiledOperand {
  bool contiguous;        // along its rows, not along K
  int64_t extent;         // rows
  int64_t tile, cluster;  // rows of a tile, tiles of a cluster

  // Up to where tiles read it: the end of its last tile, or of the last cluster's.
  int64_t tiled_extent() const {
    int64_t const step = contiguous ? tile * cluster : tile;
    return (extent + step - 1) / step * step;
  }
};

// Whether reading it so far is faster, beside another operand of so many rows.
bool gains_by_extension(TiledOperand const&, int64_t others);

}  // namespace jax_streamk
