// What is decided of a launch besides its kernel and its schedule: the LaunchPolicy of gemm.h. launch_policy_of() is a
// pure function, whose answer a plan prints and a custom call carries; a launch only does what it says.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// The policy for a kernel that can run the problem, in this order of tiles.
LaunchPolicy launch_policy_of(KernelInfo const&, GemmProblem const&, Schedule const&, Raster, int32_t swizzle,
                              Device const&);

// Ok, or why a launch of a kernel that can run the problem cannot do what the policy says.
Status check_policy(KernelInfo const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&);

// How the clusters of an sm90 kernel share the work, and how its tiles are numbered: both in cluster tiles of the
// kernel's own GEMM, for a problem whose operands need no copies.
Decomposition sm90_decomposition(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
TileOrder sm90_order(KernelInfo const&, GemmProblem const&, Raster, int32_t swizzle);

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

// Whether its loads should be evict-first: if a tile alone reads a part, or all its readers run at once or shortly one
// after another and do not drift apart along K, unless it is much smaller than the other operand or the product is
// long.
bool goes_first(TileOrder const&, Decomposition const&, OperandUse const&);

// Stages held back. Memory is slower when more of an operand that streams past is under way than it serves well.

// How many stages a CTA's loads leave empty for its n-th piece of work. No more in the last wave than before: a load
// waits for the stage that far ahead, which the loads before it must have waited for.
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

// For clusters of `ctas` that take pieces of work in turn: each CTA fills
// max(ceil(min(under_way / CTAs, kMostBytes) / stage_bytes), kFewestStages) of its `stages`, where a stage holds
// stage_bytes of the operand. under_way = 0: all stages.
HeldBack held_back(Decomposition const& cut, int32_t ctas, int32_t stages, int64_t stage_bytes, int64_t under_way);

// TMA extents. TMA takes two or three times as long for what lies beyond an operand's extent. So its descriptor may
// include what follows the operand in its allocation: the products of that are in no element of D.

// An operand, M or N rows by K, as the tiles of a kernel read it.
struct TiledOperand {
  bool contiguous;        // along M or N, not along K
  int64_t extent;         // rows
  int64_t tile, cluster;  // rows of a tile, tiles of a cluster

  // The end of its last tile. Where it is contiguous, of the last cluster's tiles, which wait for each other.
  int64_t tiled_extent() const {
    int64_t const step = contiguous ? tile * cluster : tile;
    return (extent + step - 1) / step * step;
  }
};

// Whether describing it up to there is faster, beside another operand of `others` rows.
bool gains_by_extension(TiledOperand const&, int64_t others);

}  // namespace jax_streamk
