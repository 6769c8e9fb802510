// What a launch needs of its LaunchPolicy: the cut of the work, the order of tiles, stages held back, TMA extents.
// policy_choice.h chooses policies.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Ok, or why a launch of a kernel that can run the problem cannot follow the policy.
Status check_policy(KernelInfo const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&);

// How the clusters of an sm90 kernel share the work, and the order of its tiles, in cluster tiles of the kernel's own
// GEMM, for a problem whose operands need no copies.
Decomposition sm90_decomposition(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
TileOrder sm90_order(KernelInfo const&, GemmProblem const&, Raster, int32_t swizzle);

// Stages that a CTA's loads leave empty for its n-th piece of work: too many loads in flight slow memory down. No more
// in the last wave than before: a load waits for the stage that far ahead, which earlier loads must have waited for.
struct HeldBack {
  int32_t first = 0;  // of a CTA's first piece of work
  int32_t whole_waves = 0, in_whole = 0, in_last = 0;

  static HeldBack of(Decomposition const& cut, int32_t in_whole, int32_t in_last) {
    int32_t const waves = cut.tiles * cut.splits / cut.workers;
    return {waves > 0 ? in_whole : in_last, waves, in_whole, in_last};
  }

  // Without branches, and with `first`: else ptxas reads parameters by LDC before the first load, for half a
  // microsecond.
  JSK_HOST_DEVICE int32_t stages(int32_t ordinal) const {
    return in_last + ((ordinal - whole_waves) >> 31 & (in_whole - in_last));
  }
};

// TMA extents. TMA takes two or three times as long for rows beyond an operand's extent. So its descriptor may include
// what follows the operand in its allocation: products of that are in no element of D.

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

}  // namespace jax_streamk
