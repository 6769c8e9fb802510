#include "cutlass_kernels/planner/under_way.h"

#include <algorithm>

namespace jax_streamk {
namespace {

// As measured (benchmarks/results/under_way_2026-11-26.md): a CTA alone on its SM is served no faster with more bytes
// under way, and fewer stages do not cover the time that one takes to come.
constexpr int64_t kMostBytes = 144 << 10, kFewestStages = 3;
// More CTAs than an H100 or H200 has SMs share these, and want five sixths of `under_way`.
constexpr int64_t kSms = 132;

}  // namespace

HeldBack held_back(Decomposition const& cut, int32_t ctas, int32_t stages, int64_t stage_bytes, int64_t under_way) {
  if (under_way == 0 || stage_bytes == 0 || cut.kind == ScheduleKind::kStreamK) return {};
  int32_t const pieces = cut.tiles * cut.splits;
  int64_t const of_all = cut.workers * ctas > kSms ? under_way * 5 / 6 : under_way;
  auto const held = [&](int32_t clusters) {
    int64_t const bytes = std::min(of_all / (std::max(clusters, 1) * ctas), kMostBytes);
    int64_t const filled = std::max((bytes + stage_bytes - 1) / stage_bytes, kFewestStages);
    return static_cast<int32_t>(std::max<int64_t>(stages - filled, 0));
  };
  int32_t const waves = pieces / cut.workers, in_whole = held(cut.workers), in_last = held(pieces % cut.workers);
  return {waves > 0 ? in_whole : in_last, waves, in_whole, in_last};
}

}  // namespace jax_streamk
