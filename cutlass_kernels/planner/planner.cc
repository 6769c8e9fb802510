#include "cutlass_kernels/planner/planner.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <tuple>

#include "cutlass_kernels/planner/policy_choice.h"
#include "cutlass_kernels/planner/sum_order.h"

namespace jax_streamk {
namespace {

constexpr int32_t kMostSplits = 128;

// Numbers of splits to try: small ones, powers of two, and those that fill a wave.
std::vector<int32_t> split_counts(GemmProblem const& p, Device const& device) {
  // Those whose runs are the same for k-tiles of any length, if K has many.
  if (p.invariant != Invariant::kNone) return {2, 3, 4, 6, 8, 12, 16, 32};
  std::vector<bool> worth(kMostSplits + 1);
  for (int32_t const splits : {32, 64, 128}) worth[splits] = true;
  for (int32_t tiles = 1; tiles <= device.sms / 16; ++tiles) worth[std::min(device.sms / tiles, kMostSplits)] = true;
  std::vector<int32_t> counts;
  for (int32_t splits = 2; splits <= std::min<int64_t>(kMostSplits, p.k); ++splits)
    if (splits <= 16 || worth[splits]) counts.push_back(splits);
  return counts;
}

// Schedules to try, by kind. Whether a kernel has a kind is asked of the first one.
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

// The longest run of K that tensor cores, which truncate, may sum for a float32 result as accurate as XLA's. XLA sums
// vectors and small results in float32 or many slices. It splits the K of TF32 at most until its largest tiles fill the
// GPU once: of 512 x 512 x 1000000 positive numbers our error in 66 slices was a quarter of its.
int64_t longest_sum(GemmProblem const& p, Device const& device) {
  constexpr double kSmallResult = 1 << 14, kLargestTile = 128 * 256;
  // XLA's products of eight bits are no more exact.
  if (p.d.format != Type::kF32 || p.math == Math::kTF32x3 || p.a.format.bits() == 8 || device.arch == 0)
    return INT64_MAX;
  // Whatever the number of rows or columns.
  if (p.invariant != Invariant::kNone)
    return p.math == Math::kTF32 ? std::max(int64_t{1024}, (p.k / 64 + 63) / 64 * 64) : promotion_k_of(p.a.format);
  double const results = static_cast<double>(p.m) * p.n;
  double const slices = kLargestTile * device.sms / (p.batch * results);
  if (slices <= 1) return INT64_MAX;
  if (p.math == Math::kTF32) return std::max(int64_t{1024}, (p.k / static_cast<int64_t>(slices) + 63) / 64 * 64);
  return std::min(p.m, p.n) == 1 || results < kSmallResult ? 16 : promotion_k_of(p.a.format);
}

// Whether no sum is longer.
bool is_exact(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  KernelInfo const& info = kernel.info;
  int64_t const k_tiles = (p.k + info.tile_k - 1) / info.tile_k;
  int64_t const splits = s.kind == ScheduleKind::kSplitK ? std::max(s.splits, 1) : 1;
  int64_t const run = std::min((k_tiles + splits - 1) / splits * info.tile_k, p.k);
  return std::min<int64_t>(run, info.promotion_k > 0 ? info.promotion_k : run) <= longest_sum(p, device);
}

// The refusal of a kernel that runs the problem data-parallel, preferably of its D, with narrow alignment and small
// tile_k.
std::string closest_refusal(std::vector<Kernel const*> const& kernels, GemmProblem const& p, Schedule const& s,
                            Device const& device) {
  auto const rank = [&](Kernel const* kernel) {
    KernelInfo const& info = kernel->info;
    return std::tuple(!can_run(*kernel, p, {}, device), info.d.format != p.d.format, info.a.align, info.tile_k);
  };
  auto const closest =
      std::min_element(kernels.begin(), kernels.end(), [&](auto* x, auto* y) { return rank(x) < rank(y); });
  return closest == kernels.end() ? "" : may_serve(**closest, p, s, device).message;
}

// The search of choose(): kernels in the order of their least cost, until that exceeds the costs already found.
class Search {
 public:
  Search(std::vector<Kernel const*> const& kernels, GemmProblem const& p, std::optional<Schedule> const& wanted,
         Device const& device, Machine const& machine, size_t listed, std::string order)
      : kernels_(kernels),
        p_(p),
        device_(device),
        machine_(machine),
        listed_(listed),
        sum_order_(std::move(order)),
        wanted_(wanted.has_value()),
        kinds_(kinds_of(wanted, p, device)) {
    int32_t const width = width_of(kinds_[0][0], device);
    estimators_.reserve(kernels.size());
    for (Kernel const* kernel : kernels) estimators_.emplace_back(kernel->info, p, width, machine);
    promising_.resize(kernels.size());
    std::iota(promising_.begin(), promising_.end(), 0);
    std::sort(promising_.begin(), promising_.end(),
              [&](size_t i, size_t j) { return estimators_[i].least() < estimators_[j].least(); });
  }

  void run() {
    bool const reads_few = !wanted_ && p_.invariant == Invariant::kNone && reads_few_columns();
    for (size_t const i : promising_) {
      if (estimators_[i].least() > limit()) break;
      if (reads_few && estimators_[i].is_slow_with_few_columns()) continue;
      for (size_t kind = 0; kind < kinds_.size(); ++kind)
        if (!kinds_[kind].empty() && can_run(*kernels_[i], p_, kinds_[kind][0], device_)) try_kind(i, kind);
    }
  }

  // The least cost in each sum order.
  std::map<std::string, double> costs_by_sum_order() {
    std::map<std::string, double> costs;
    for (size_t i = 0; i < kernels_.size(); ++i) {
      for (std::vector<Schedule> const& kind : kinds_) {
        if (kind.empty() || !can_run(*kernels_[i], p_, kind[0], device_)) continue;
        for (Schedule const& s : kind) {
          if (s.kind == ScheduleKind::kSplitK && int64_t{s.splits - 1} * kernels_[i]->info.tile_k >= p_.k) break;
          std::string const order = sum_order(kernels_[i]->info, p_, s);
          if (order.empty() || !is_exact(*kernels_[i], p_, s, device_) || !can_run(*kernels_[i], p_, s, device_))
            continue;
          double const cost = estimators_[i].cost(s, order_of(i).wave).microseconds;
          double& least = costs.try_emplace(order, cost).first->second;
          least = std::min(least, cost);
        }
      }
    }
    return costs;
  }

  // Lowest cost first.
  std::vector<Candidate> candidates() const {
    std::vector<Candidate> found;
    for (Ranked const& ranked : best_) {
      Candidate x = ranked.candidate;
      x.policy = choose_policy(x.kernel->info, p_, x.schedule, x.policy.raster, x.policy.swizzle, device_, machine_);
      found.push_back(x);
    }
    return found;
  }

  std::string refusal() const { return closest_refusal(kernels_, p_, kinds_[0][0], device_); }

 private:
  // Equal costs are ranked by kernel, then by kind.
  struct Ranked {
    double microseconds;
    size_t kernel, kind;
    Candidate candidate;
    bool operator<(Ranked const& other) const {
      return std::tie(microseconds, kernel, kind) < std::tie(other.microseconds, other.kernel, other.kind);
    }
  };

  // Whether a kernel reads the few columns of B as they are. A copy of its rows has a warp for each k, and was
  // measured to take 1 to 3 us longer than its launch. In TF32 kernels for more columns took 1.02 to 2.7 times as long.
  bool reads_few_columns() const {
    for (size_t i = 0; i < kernels_.size(); ++i)
      if (estimators_[i].traits().words_of_b && p_.n <= kernels_[i]->info.tile_n &&
          can_run(*kernels_[i], p_, {}, device_))
        return true;
    return false;
  }

  // What costs more is not listed.
  double limit() const {
    return best_.size() < listed_ ? std::numeric_limits<double>::infinity() : best_.back().microseconds;
  }

  // Adds a kernel's cheapest schedule of a kind to the best, if it is cheap enough.
  void try_kind(size_t i, size_t kind) {
    Order const& order = order_of(i);
    auto cheapest = cheapest_of(i, kind, order.wave);
    if (!cheapest) return;
    cheapest->policy.raster = order.raster, cheapest->policy.swizzle = order.swizzle;
    Ranked const ranked{cheapest->cost.microseconds, i, kind, *cheapest};
    best_.insert(std::upper_bound(best_.begin(), best_.end(), ranked), ranked);
    if (best_.size() > listed_) best_.pop_back();
  }

  std::optional<Candidate> cheapest_of(size_t i, size_t kind, Wave const& wave) const {
    Kernel const& kernel = *kernels_[i];
    std::optional<Candidate> cheapest;
    for (Schedule const& s : kinds_[kind]) {
      if (s.kind == ScheduleKind::kSplitK && int64_t{s.splits - 1} * kernel.info.tile_k >= p_.k) break;
      double const below = cheapest ? std::min(limit(), cheapest->cost.microseconds) : limit();
      Cost const cost = estimators_[i].cost(s, wave, below);
      if (cost.microseconds > below || (cheapest && cost.microseconds == below)) continue;
      if (!sum_order_.empty() && sum_order(kernel.info, p_, s) != sum_order_) continue;
      // can_run() again: a kernel may refuse these arguments.
      if (is_exact(kernel, p_, s, device_) && can_run(kernel, p_, s, device_))
        cheapest = Candidate{&kernel, s, {}, cost};
    }
    return cheapest;
  }

  // Kernels with equal tiles, clusters and type of D have equal orders.
  Order const& order_of(size_t i) {
    Tiling const& tiling = estimators_[i].tiling();
    Type const type_d = kernels_[i]->info.d.format.type;
    auto const [at, is_new] = orders_.try_emplace({tiling.rows, tiling.columns, tiling.ctas_m, tiling.ctas_n, type_d});
    if (is_new && device_.arch != 0) at->second = estimators_[i].best_order();
    return at->second;
  }

  std::vector<Kernel const*> const& kernels_;
  GemmProblem const& p_;
  Device const& device_;
  Machine const& machine_;
  size_t listed_;
  std::string sum_order_;  // the only one, unless it is empty
  bool wanted_;            // a schedule was given
  std::vector<std::vector<Schedule>> kinds_;
  std::vector<Estimator> estimators_;  // of each kernel
  std::vector<size_t> promising_;      // kernels, lowest possible cost first
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, Type>, Order> orders_;
  std::vector<Ranked> best_;
};

}  // namespace

Status may_serve(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  Status const status = check(kernel, p, s, device);
  if (!status.ok() || is_exact(kernel, p, s, device)) return status;
  return Status::invalid(kernel.info.name + " would sum more than " + std::to_string(longest_sum(p, device)) +
                         " of K in tensor cores, which truncate digits of a float32 result");
}

Choice choose(std::vector<Kernel const*> const& kernels, GemmProblem const& p, std::optional<Schedule> const& wanted,
              Device const& device, Machine const& machine, size_t listed, std::string const& order) {
  Search search(kernels, p, wanted, device, machine, listed, order);
  search.run();
  Choice choice;
  choice.candidates = search.candidates();
  if (choice.candidates.empty()) {
    choice.refusal = search.refusal();
  } else {
    Candidate const& chosen = choice.candidates[0];
    choice.workspace_bytes = chosen.kernel->workspace_bytes(p, chosen.schedule, device);
  }
  return choice;
}

std::map<std::string, double> costs_by_sum_order(std::vector<Kernel const*> const& kernels, GemmProblem const& p,
                                                 std::optional<Schedule> const& wanted, Device const& device,
                                                 Machine const& machine) {
  return Search(kernels, p, wanted, device, machine, 0, "").costs_by_sum_order();
}

}  // namespace jax_streamk
