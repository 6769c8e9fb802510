// What a family's kernels have in common, and what each can do by its KernelInfo alone. Whoever checks, plans or
// explains asks here and never which family a kernel is of; so a build without a kernel can plan with it.
#pragma once

#include <optional>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

enum class MathUnit { kThreads, kMma, kMmaFewRows, kWgmma };
enum class LoadPath { kThreads, kVectors, kStreaming, kTma };
// Who adds up a shared tile: the last worker to arrive; the last along K, each waiting for the one before it, where
// workers take the tiles of a run backwards (CUTLASS 2.x); or the first CTA of a cluster, in distributed shared memory.
enum class FixUp { kLastToArrive, kTurnstile, kCluster };

// Which fields of a LaunchPolicy, besides the order of tiles, a kernel obeys.
struct PolicyFields {
  bool hint_a = false, hint_b = false;  // evict_first_a, evict_first_b
  bool stages_and_clusters = false;     // held_back, idle_clusters, cluster_order
  bool extents = false;                 // extend_a, extend_b
};

struct FamilyTraits {
  // Of one launch, without copies and separate reduction, of a problem that passed the checks that families share.
  Status (*can_launch)(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
  // Empty where only a kernel of this build knows.
  std::optional<int64_t> (*workspace_bytes)(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
  // The grid of output tiles and MAC iterations, and which worker does which.
  Decomposition (*decomposition)(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
  PolicyFields (*obeys)(KernelInfo const&);

  int32_t oldest_arch = 80, newest_arch = INT32_MAX;  // compute capabilities, as in Device: 0 is a CPU
  char const* worker = "SM";  // who takes pieces of work: "thread", "SM", or "CTA" (a cluster counts as one)
  MathUnit math_unit = MathUnit::kMma;
  LoadPath load_path = LoadPath::kVectors;
  FixUp fix_up = FixUp::kLastToArrive;
  bool cta_per_piece = false;     // a launch has a CTA for each piece of work, not for each worker
  bool nests_batches = false;     // the batch may be nested
  bool slices_by_launch = false;  // slices of a separate split-K may need launches of their own

  bool is_host() const { return newest_arch == 0; }
  // TMA needs aligned operands, so others are copied before (passes/repack.h).
  bool loads_by_tma() const { return load_path == LoadPath::kTma; }
  bool adds_in_cluster() const { return fix_up == FixUp::kCluster; }
};

// Each beside its family's kernels.
namespace host {
extern FamilyTraits const kTraits;
}
namespace sm80 {
extern FamilyTraits const kTraits;
}
namespace sm90 {
extern FamilyTraits const kTraits;
}
namespace skinny {
extern FamilyTraits const kTraits;
}

FamilyTraits const& traits_of(Family);
inline FamilyTraits const& traits_of(KernelInfo const& info) { return traits_of(info.family); }

}  // namespace jax_streamk
