// What a launch needs of its LaunchPolicy: the cut of the work, the order of tiles, stages held back, TMA extents.
// planner/policy_choice.h chooses policies.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/launch/clusters.h"

namespace jax_streamk {

// Ok, or why a launch of a kernel that can run the problem cannot follow the policy.
Status check_policy(KernelInfo const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&);

// The order of a kernel's tiles, in cluster tiles of its own GEMM (with swap_ab its m is the problem's n), for a
// problem whose operands need no copies.
TileOrder own_order(KernelInfo const&, GemmProblem const&, Raster, int32_t swizzle);

// A pipeline needs a stage that is read, one that has arrived and one that is on its way.
inline constexpr int64_t kFewestStages = 3;

inline int32_t ctas_of_cluster(KernelInfo const& info) { return info.cluster_m * info.cluster_n; }
// If CTAs share SMs, a launch has too many clusters to list.
inline bool lists_clusters(KernelInfo const& info) { return ctas_of_sm(info) == 1; }
// Idle clusters are numbered kIdle, so no work may have that number.
inline bool may_have_idle(KernelInfo const& info, Decomposition const& cut) {
  Work work;
  return has_idle(ctas_of_cluster(info)) && !cut.work(kIdle, 0, work);
}

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
