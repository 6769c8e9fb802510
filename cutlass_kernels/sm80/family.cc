#include "cutlass_kernels/sm80/family.h"

#include <algorithm>
#include <string>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/core/gpu.h"
#include "cutlass_kernels/sm80/stream_k_of_cutlass.h"

namespace jax_streamk::sm80 {
namespace {

// CUTLASS's swizzle counts in ints: MAC iterations, and CTAs, up to eight per tile in cohorts.
constexpr int64_t kMaxCount = int64_t{1} << 30;
constexpr int64_t kMaxExtent = 2 * kMaxCount - 1024;

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t tiles_of(KernelInfo const& info, GemmProblem const& p) {
  return ceil_div(p.m, info.tile_m) * ceil_div(p.n, info.tile_n);
}

// Ok if the device has what a kernel of the family needs.
Status supports(KernelInfo const& info, Device const& device) {
  int64_t const most = shared_memory_per_sm(device) - kReservedSharedMemory;
  if (info.shared_memory <= most) return {};
  return Status::invalid(info.name + ": it needs " + std::to_string(info.shared_memory) +
                         " bytes of shared memory per CTA, and sm_" + std::to_string(device.arch) + " has " +
                         std::to_string(most));
}

Status can_launch(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  auto const refuse = [&](std::string const& why) { return Status::invalid(info.name + ": " + why); };
  if (Status status = supports(info, device); !status.ok()) return status;
  int64_t const extent = std::max({p.m, p.n, p.k});
  if (info.ragged != Ragged::kNone)
    return extent <= kMaxExtent ? Status{} : refuse("extents must be at most " + std::to_string(kMaxExtent));
  bool const split = shares_tiles(s);
  if (split && p.batch > 1)
    return refuse("one launch splits one GEMM, and the batch is " + std::to_string(p.batch) +
                  "; a batch runs data-parallel, or as SplitK with reduction \"separate\"");
  int64_t const tiles = tiles_of(info, p), iterations = tiles * ceil_div(p.k, info.tile_k);
  if (tiles >= kMaxCount / 8 || extent >= kMaxExtent) return refuse("too large: " + std::to_string(tiles) + " tiles");
  if (tiles * p.batch >= kMaxCount)
    return refuse("too large: " + std::to_string(tiles * p.batch) + " tiles over the batch");
  if (split && iterations >= kMaxCount)
    return refuse("too large to split: " + std::to_string(iterations) + " MAC iterations");
  return {};
}

// Of shared tiles CUTLASS tells, by which kernels of this build answer.
std::optional<int64_t> workspace_bytes(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const&) {
  if (shares_tiles(s)) return std::nullopt;
  return counter_bytes(info, p);
}

// For Stream-K CUTLASS's own cost model decides how many tiles are cut among how many workers. This describes it
// exactly, with two exceptions: if the number of workers is a multiple of the cut tiles, the swizzle aligns them to
// tiles, which moves boundaries by a few iterations; and CTAs of whole tiles run on whichever SM is free.
Decomposition decomposition(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  // Of equal groups, like the estimate.
  GemmProblem const q = dense(p, p.ragged == Ragged::kK ? info.tile_k : info.tile_m);
  auto const tiles = static_cast<int32_t>(tiles_of(info, q) * q.batch),
             k_tiles = static_cast<int32_t>(ceil_div(q.k, info.tile_k));
  if (s.kind != ScheduleKind::kStreamK) return Decomposition::make(s.kind, tiles, k_tiles, device.sms, s.splits);
  Decomposition cut = Decomposition::make(ScheduleKind::kDataParallel, tiles, k_tiles, device.sms, 1);
  if (!shares_tiles(s)) return cut;
  int32_t const sms = s.max_sms > 0 ? std::min(s.max_sms, device.sms) : device.sms;
  SharedTiles const shared = stream_k_of_cutlass(tiles, k_tiles, sms, occupancy(info, device));
  if (shared.tiles == 0) return cut;
  cut.kind = s.kind;
  cut.stream_k_tiles = shared.tiles;
  cut.stream_k_workers = shared.workers;
  cut.runs = EvenRuns::of(shared.tiles * k_tiles, shared.workers);
  cut.workers = shared.tiles == tiles ? shared.workers : std::max(shared.workers, sms);
  return cut;
}

PolicyFields obeys(KernelInfo const&) { return {}; }

}  // namespace

int32_t occupancy(KernelInfo const& info, Device const& device) {
  int64_t const by_registers = 65536 / (256 * info.threads);
  int64_t const by_shared_memory = shared_memory_per_sm(device) / (info.shared_memory + kReservedSharedMemory);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(by_registers, by_shared_memory)));
}

bool shares_tiles(Schedule const& s) {
  switch (s.kind) {
    case ScheduleKind::kDataParallel: return false;
    case ScheduleKind::kSplitK: return s.splits > 1;
    case ScheduleKind::kStreamK: return s.max_sms != 1;
  }
  return false;
}

FamilyTraits const kTraits = [] {
  FamilyTraits traits{can_launch, workspace_bytes, decomposition, obeys};
  traits.fix_up = FixUp::kTurnstile;
  traits.slices_by_launch = true;
  return traits;
}();

}  // namespace jax_streamk::sm80
