#include "cutlass_kernels/planner/planner.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <tuple>

#include "cutlass_kernels/core/registry.h"
#include "cutlass_kernels/planner/launch_policy.h"

namespace jax_streamk {
namespace {

constexpr int32_t kMostSplits = 128;

// Numbers of splits worth trying: small ones, powers of two, and those that fill a wave.
std::vector<int32_t> split_counts(GemmProblem const& p, Device const& device) {
  std::vector<bool> worth(kMostSplits + 1);
  for (int32_t const splits : {32, 64, 128}) worth[splits] = true;
  for (int32_t tiles = 1; tiles <= device.sms / 16; ++tiles) worth[std::min(device.sms / tiles, kMostSplits)] = true;
  std::vector<int32_t> counts;
  for (int32_t splits = 2; splits <= std::min<int64_t>(kMostSplits, p.k); ++splits)
    if (splits <= 16 || worth[splits]) counts.push_back(splits);
  return counts;
}

// Schedules by kind. The first of a kind shows whether a kernel has it, which hardly depends on the arguments.
std::vector<std::vector<Schedule>> kinds_of(std::optional<Schedule> const& wanted, GemmProblem const& p,
                                            Device const& device) {
  if (wanted) return {{*wanted}};
  Schedule stream_k;
  stream_k.kind = ScheduleKind::kStreamK;
  std::vector<std::vector<Schedule>> kinds{{Schedule{}}, {stream_k}};
  for (Reduction const reduction : {Reduction::kOrdered, Reduction::kSeparate}) {
    if (reduction == Reduction::kSeparate && device.arch == 0) continue;
    kinds.emplace_back();
    for (int32_t const splits : split_counts(p, device))
      kinds.back().push_back({ScheduleKind::kSplitK, splits, reduction});
  }
  return kinds;
}

// How much of K tensor cores may sum for a float32 result, which would lose digits that XLA's has. XLA sums products of
// vectors and small results in float32 or in many slices, and splits no K of what fills the machine with its largest
// tiles: its sums are as long.
int64_t longest_sum(GemmProblem const& p, Device const& device) {
  constexpr double kSmallResult = 1 << 14, kLargestTile = 128 * 256;
  if (p.d.format != Type::kF32 || p.math == Math::kTF32x3 || device.arch == 0) return INT64_MAX;
  double const results = static_cast<double>(p.m) * p.n;
  if (p.batch * results >= kLargestTile * device.sms) return INT64_MAX;
  if (p.math == Math::kTF32) return 1024;
  return std::min(p.m, p.n) == 1 || results < kSmallResult ? 16 : promotion_k_of(p.a.format);
}

// Whether tensor cores sum no more than that.
bool is_exact(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  KernelInfo const& info = kernel.info;
  int64_t const k_tiles = (p.k + info.tile_k - 1) / info.tile_k;
  int64_t const splits = s.kind == ScheduleKind::kSplitK ? std::max(s.splits, 1) : 1;
  int64_t const run = std::min((k_tiles + splits - 1) / splits * info.tile_k, p.k);
  return std::min<int64_t>(run, info.promotion_k > 0 ? info.promotion_k : run) <= longest_sum(p, device);
}

// The most telling refusal: of a kernel that runs the problem data-parallel, with many k-tiles.
std::string closest_refusal(std::vector<Kernel const*> const& kernels, GemmProblem const& p, Schedule const& s,
                            Device const& device) {
  auto const rank = [&](Kernel const* kernel) {
    return std::tuple(!can_run(*kernel, p, {}, device), kernel->info.a.align, kernel->info.tile_k);
  };
  auto const closest =
      std::min_element(kernels.begin(), kernels.end(), [&](auto* x, auto* y) { return rank(x) < rank(y); });
  return closest == kernels.end() ? "" : may_serve(**closest, p, s, device).message;
}

}  // namespace

Status may_serve(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  Status const status = check(kernel, p, s, device);
  if (!status.ok() || is_exact(kernel, p, s, device)) return status;
  return Status::invalid(kernel.info.name + " would sum more than " + std::to_string(longest_sum(p, device)) +
                         " of K in tensor cores, which truncate digits of a float32 result");
}

Choice choose(std::vector<Kernel const*> const& kernels, GemmProblem const& p, std::optional<Schedule> const& wanted,
              Device const& device, Machine const& machine, size_t listed) {
  auto const kinds = kinds_of(wanted, p, device);
  int32_t const width = width_of(kinds[0][0], device);
  std::vector<Estimator> estimators;
  estimators.reserve(kernels.size());
  for (Kernel const* kernel : kernels) estimators.emplace_back(kernel->info, p, width, machine);
  // Kernels that may be cheap come first, so that the others need no more than a look.
  std::vector<size_t> promising(kernels.size());
  std::iota(promising.begin(), promising.end(), 0);
  std::sort(promising.begin(), promising.end(),
            [&](size_t i, size_t j) { return estimators[i].least() < estimators[j].least(); });

  // Tiles of the same extents, clusters and type have the same orders: those of partials have their own.
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, Type>, Order> orders;
  auto const order_of = [&](Type type_d, Estimator const& estimator) -> Order const& {
    Tiling const& tiling = estimator.tiling();
    auto const [at, is_new] = orders.try_emplace({tiling.rows, tiling.columns, tiling.ctas_m, tiling.ctas_n, type_d});
    if (is_new && device.arch != 0) at->second = estimator.best_order();
    return at->second;
  };

  // The best so far, each of another kernel or kind; equal costs are ranked by kernel, then by kind.
  struct Ranked {
    double microseconds;
    size_t kernel, kind;
    Candidate candidate;
    bool operator<(Ranked const& other) const {
      return std::tie(microseconds, kernel, kind) < std::tie(other.microseconds, other.kernel, other.kind);
    }
  };
  std::vector<Ranked> best;
  for (size_t const i : promising) {
    auto const limit = [&] {
      return best.size() < listed ? std::numeric_limits<double>::infinity() : best.back().microseconds;
    };
    if (estimators[i].least() > limit()) break;
    Kernel const& kernel = *kernels[i];
    Order const* order = nullptr;
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      if (kinds[kind].empty() || !can_run(kernel, p, kinds[kind][0], device)) continue;
      if (order == nullptr) order = &order_of(kernel.info.d.format.type, estimators[i]);
      std::optional<Candidate> cheapest;
      for (Schedule s : kinds[kind]) {
        if (s.kind == ScheduleKind::kSplitK && int64_t{s.splits - 1} * kernel.info.tile_k >= p.k) break;
        double const below = cheapest ? std::min(limit(), cheapest->cost.microseconds) : limit();
        Cost const cost = estimators[i].cost(s, order->wave, below);
        if (cost.microseconds > below || (cheapest && cost.microseconds == below)) continue;
        // The kernel has the last word on these very arguments.
        if (is_exact(kernel, p, s, device) && can_run(kernel, p, s, device)) cheapest = Candidate{&kernel, s, {}, cost};
      }
      if (!cheapest) continue;
      cheapest->policy.raster = order->raster, cheapest->policy.swizzle = order->swizzle;
      Ranked const ranked{cheapest->cost.microseconds, i, kind, *cheapest};
      best.insert(std::upper_bound(best.begin(), best.end(), ranked), ranked);
      if (best.size() > listed) best.pop_back();
    }
  }

  Choice choice;
  for (Ranked const& ranked : best) {
    Candidate found = ranked.candidate;
    found.policy =
        launch_policy_of(found.kernel->info, p, found.schedule, found.policy.raster, found.policy.swizzle, device);
    choice.candidates.push_back(found);
  }
  if (best.empty()) {
    std::vector<Kernel const*> considered;
    std::sort(promising.begin(), promising.end());  // equals are ranked as they were given
    for (size_t const i : promising) considered.push_back(kernels[i]);
    choice.refusal = closest_refusal(considered, p, kinds[0][0], device);
  } else {
    Candidate const& chosen = choice.candidates[0];
    choice.workspace_bytes = chosen.kernel->workspace_bytes(p, chosen.schedule, device);
  }
  return choice;
}

}  // namespace jax_streamk
