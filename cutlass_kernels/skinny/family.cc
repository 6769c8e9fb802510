#include "cutlass_kernels/skinny/family.h"

#include <algorithm>
#include <string>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/scaled/scales.h"

namespace jax_streamk::skinny {
namespace {

constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1024;  // so that the ends of tiles fit 32 bits

// A worker per piece of work. (CTAs are numbered differently: the peers of a tile are neighbours, a cluster.)
Decomposition decomposition(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const&) {
  auto const along = [](int64_t extent, int32_t tile) { return static_cast<int32_t>((extent + tile - 1) / tile); };
  int64_t const n = dense(p).n;
  int32_t const tiles = along(info.swap_ab ? n : p.m, info.tile_m) * along(info.swap_ab ? p.m : n, info.tile_n) *
                        static_cast<int32_t>(p.batch);
  int32_t const splits = s.kind == ScheduleKind::kSplitK ? s.splits : 1;
  return Decomposition::make(splits > 1 ? s.kind : ScheduleKind::kDataParallel, tiles, along(p.k, info.tile_k),
                             tiles * splits, splits);
}

Status can_launch(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  if (std::max({p.m, p.n, p.k}) >= kMaxExtent) return Status::invalid(info.name + ": too large");
  if (p.b.scales.any()) {
    int64_t const chunk = scaled::kChunkBytes * 8 / p.b.format.bits() / info.tile_m;  // of K, of a warp
    if (Status status = scaled::can_scale(info, p, chunk, scaled::rounds_numbers(p.b.scales, p.k)); !status.ok())
      return status;
  }
  if (decomposition(info, p, s, device).splits == 1) return {};
  if (device.arch < 90)
    return Status::invalid(info.name +
                           " splits K among the CTAs of a cluster, which needs compute capability 9.0 or newer");
  if (s.splits > kMaxSplits)
    return Status::invalid(info.name + " has at most " + std::to_string(kMaxSplits) + " splits, the CTAs of a cluster");
  return {};
}

std::optional<int64_t> workspace_bytes(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&) {
  return 0;
}

// Loads of B may have a hint, or with few columns those of A: neighbouring tiles of an unaligned B share cache lines. B
// with scales always leaves L2 first.
PolicyFields obeys(KernelInfo const& info) { return {!info.swap_ab, info.swap_ab && info.b.align > 1 && !info.scaled}; }

}  // namespace

FamilyTraits const kTraits = [] {
  FamilyTraits traits{can_launch, workspace_bytes, decomposition, obeys};
  traits.math_unit = MathUnit::kMmaFewRows;
  traits.load_path = LoadPath::kStreaming;
  traits.fix_up = FixUp::kCluster;
  traits.cta_per_piece = traits.nests_batches = true;
  return traits;
}();

}  // namespace jax_streamk::skinny
