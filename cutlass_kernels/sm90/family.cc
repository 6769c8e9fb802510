#include "cutlass_kernels/sm90/family.h"

#include <algorithm>
#include <string>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/policy.h"
#include "cutlass_kernels/scaled/scales.h"

namespace jax_streamk::sm90 {
namespace {

constexpr int32_t kMostPeers = 0xffff;  // of a tile: its arrival word counts them in 16 bits

int32_t ceil_div(int64_t x, int64_t y) { return static_cast<int32_t>((x + y - 1) / y); }

// How clusters share the work, of a problem whose operands need no copies.
Decomposition decomposition(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  bool const stream_k = s.kind == ScheduleKind::kStreamK && s.max_sms != 1;
  int32_t const sms = stream_k && s.max_sms > 0 && s.max_sms < device.sms ? s.max_sms : device.sms;
  int32_t const clusters = active_clusters(sms * ctas_of_sm(info), ctas_of_cluster(info));
  GemmProblem const q = dense(p);
  DenseTiles const tiles(own_order(info, q, Raster::kAlongM, 1), static_cast<int32_t>(q.batch),
                         ceil_div(q.k, info.tile_k));
  return Decomposition::make(s.kind == ScheduleKind::kStreamK && !stream_k ? ScheduleKind::kDataParallel : s.kind,
                             tiles, lists_clusters(info) ? std::min(clusters, kMostListed) : clusters, s.splits);
}

Status can_launch(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  if (info.scales_sums) {
    if (Status status = scaled::can_scale_sums(info, p); !status.ok()) return status;
  } else if (p.b.scales.any()) {
    if (Status status = scaled::can_scale(info, p, info.tile_k, true); !status.ok()) return status;
  }
  if (decomposition(info, p, s, device).kind == ScheduleKind::kSplitK && s.splits > kMostPeers)
    return Status::invalid(info.name + " has at most " + std::to_string(kMostPeers) + " splits");
  return {};
}

std::optional<int64_t> workspace_bytes(KernelInfo const& info, GemmProblem const& p, Schedule const& s,
                                       Device const& device) {
  return Workspace::of(info, p, s, device).bytes();
}

PolicyFields obeys(KernelInfo const& info) {
  bool const ragged = info.ragged != Ragged::kNone;
  return {true, true, !ragged, !ragged && !info.gated && !info.joined};
}

// Of a ragged kernel whose CTAs share long tiles (long_tiles.h), for any sizes of groups: how many tiles can be long.
// All of them have at most two parts for each CTA.
int64_t most_long_tiles(int64_t groups, int64_t tiles, int64_t k_tiles, int32_t ctas) {
  bool const may_be = k_tiles >= LongParts::kFewest * LongParts::kLeast && LongParts::kFewest * tiles <= 2 * ctas;
  return may_be ? std::min<int64_t>(groups * tiles, ctas) : 0;
}

}  // namespace

Workspace Workspace::of(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  Workspace out;
  int64_t const partial = int64_t{info.tile_m} * info.tile_n * static_cast<int64_t>(sizeof(float));
  if (info.ragged != Ragged::kNone) {
    out.counter = counter_bytes(info, p);
    if (cuts_long_tiles(info)) {
      int64_t const tiles = int64_t{ceil_div(p.m, info.tile_m)} * ceil_div(p.n, info.tile_n);
      int64_t const longs = most_long_tiles(p.batch, tiles, ceil_div(p.k, info.tile_k), device.sms);
      out.arrivals = align_workspace(longs * static_cast<int64_t>(sizeof(uint32_t)));
      if (longs > 0) out.partials = int64_t{2} * device.sms * partial;
    }
    out.zeroed = out.counter + out.arrivals;
    return out;
  }
  Decomposition const cut = decomposition(info, p, s, device);
  int64_t const shared = int64_t{cut.shared_tiles()} * ctas_of_cluster(info);
  if (shared == 0) return {};
  bool const atomic = s.reduction == Reduction::kAtomic;
  out.arrivals = align_workspace(shared * static_cast<int64_t>(sizeof(uint32_t)));
  out.partials = (atomic ? shared : int64_t{cut.slots()} * ctas_of_cluster(info)) * partial;
  out.zeroed = atomic ? out.bytes() : out.arrivals;
  return out;
}

FamilyTraits const kTraits = [] {
  FamilyTraits traits{can_launch, workspace_bytes, decomposition, obeys};
  traits.oldest_arch = traits.newest_arch = 90;
  traits.worker = "CTA";
  traits.math_unit = MathUnit::kWgmma;
  traits.load_path = LoadPath::kTma;
  return traits;
}();

}  // namespace jax_streamk::sm90
