#include "cutlass_kernels/planner/launch_policy.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "cutlass_kernels/core/registry.h"
#include "cutlass_kernels/core/slices.h"
#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/planner/clusters.h"
#include "cutlass_kernels/planner/policy_choice.h"
#include "cutlass_kernels/planner/wave.h"

namespace jax_streamk {
namespace {

// A pipeline needs a stage that is read, one that has arrived and one that is on its way.
constexpr int64_t kFewestStages = 3;

int32_t ceil_div(int64_t x, int64_t y) { return static_cast<int32_t>((x + y - 1) / y); }

int32_t ctas_of_sm(KernelInfo const& info) { return info.warp_schedule == "single" ? kSingles : 1; }
int32_t ctas_of_cluster(KernelInfo const& info) { return info.cluster_m * info.cluster_n; }
// If CTAs share SMs, a launch has too many clusters to list.
bool lists_clusters(KernelInfo const& info) { return ctas_of_sm(info) == 1; }

// Whether this is a skinny kernel whose loads of B, or with few columns of A, may have a hint: neighbouring tiles of an
// unaligned B share cache lines.
bool hints_b(KernelInfo const& info) { return info.family == Family::kSkinny && info.swap_ab && info.b.align > 1; }
bool hints_a(KernelInfo const& info) { return info.family == Family::kSkinny && !info.swap_ab; }

// A launch of an sm90 kernel in terms of its own GEMM: with swap_ab its A is the problem's B.
class Sm90Launch {
 public:
  Sm90Launch(KernelInfo const& info, GemmProblem const& p, Schedule const& s, LaunchPolicy const& order,
             Device const& device)
      : info_(info), p_(repack_of(info, dense(p)).problem), device_(device) {
    bool const separate = is_separate(s);
    slices_ = separate ? Slices::of(p_.k, info.tile_k, s.splits) : Slices{1, p_.k};
    cut_ = sm90_decomposition(info, slices_.as_batch(p_), separate ? data_parallel(s) : s, device);
    order_ = sm90_order(info, p_, order.raster, order.swizzle);
    bool const swap = info.swap_ab;
    rows_ = swap ? p_.n : p_.m, columns_ = swap ? p_.m : p_.n;
    batches_a_ = p_.a.batch_stride != 0 ? p_.batch : 1, batches_b_ = p_.b.batch_stride != 0 ? p_.batch : 1;
    if (swap) std::swap(batches_a_, batches_b_);
  }

  Decomposition const& cut() const { return cut_; }

  void set_hints(LaunchPolicy& policy, Machine const& machine) const {
    bool const a = goes_first(order_, cut_, use(Raster::kAlongN, rows_, batches_a_, columns_, batches_b_), machine);
    bool const b = goes_first(order_, cut_, use(Raster::kAlongM, columns_, batches_b_, rows_, batches_a_), machine);
    policy.evict_first_a = info_.swap_ab ? b : a;
    policy.evict_first_b = info_.swap_ab ? a : b;
  }

  // A product of few columns (rows) waits for the other operand, which is read once. `streaming`: rows (columns) of it
  // that a CTA loads per stage, its share of a multicast.
  void set_held_back(LaunchPolicy& policy, Machine const& machine) const {
    bool const few_columns = order_.tiles_n() == 1 && columns_ <= machine.held_back_columns;
    bool const few_rows = order_.tiles_m() == 1 && rows_ <= machine.held_back_columns;
    // The kernel's own A streams past few columns, its B past few rows.
    int64_t const streaming = few_columns ? info_.tile_m / info_.cluster_n
                              : few_rows  ? info_.tile_n / info_.cluster_m
                                          : 0;
    Format const& format = few_columns != info_.swap_ab ? info_.a.format : info_.b.format;
    HeldBack const held = held_back(cut_, ctas_of_cluster(info_), device_.sms, info_.stages,
                                    streaming * info_.tile_k * size_of(format), device_.under_way, machine);
    policy.held_back = held.first;
    policy.held_back_last = pieces() % cut_.workers == 0 ? held.first : held.in_last;
  }

  void set_clusters(LaunchPolicy& policy, Machine const& machine) const {
    if (may_have_idle()) policy.idle_clusters = idle_clusters(cut_.workers, ctas_of_cluster(info_), device_.sms).count;
    if (!lists_clusters(info_)) return;
    // In one line of tiles all share one operand, so neighbours gain nothing from a common GPC. After many waves the
    // last one counts for little, and tiles are faster in order: neighbours read neighbouring memory.
    bool const line = order_.tiles_m() == 1 || order_.tiles_n() == 1;
    bool const spread = line && pieces() > cut_.workers && pieces() < machine.spread_waves * cut_.workers;
    policy.cluster_order = spread                        ? ClusterOrder::kSpread
                           : ctas_of_cluster(info_) == 1 ? ClusterOrder::kAsLaunched
                                                         : ClusterOrder::kByGpc;
  }

  void set_extents(LaunchPolicy& policy, Machine const& machine) const {
    bool const swap = info_.swap_ab;
    // The kernel's own A along m, and B along n.
    bool const a_along_m = swap ? info_.b.major == Major::kRow : info_.a.major == Major::kColumn;
    bool const b_along_n = swap ? info_.a.major == Major::kColumn : info_.b.major == Major::kRow;
    bool const a = gains_by_extension({a_along_m, rows_, info_.tile_m, info_.cluster_m}, columns_, machine);
    bool const b = gains_by_extension({b_along_n, columns_, info_.tile_n, info_.cluster_n}, rows_, machine);
    policy.extend_a = swap ? b : a;
    policy.extend_b = swap ? a : b;
  }

  // Idle clusters are numbered kIdle, so no work may have that number.
  bool may_have_idle() const {
    Work work;
    return has_idle(ctas_of_cluster(info_)) && !cut_.work(kIdle, 0, work);
  }

 private:
  int32_t pieces() const { return cut_.tiles * cut_.splits; }

  // For the operand whose parts lines of tiles along `line` read.
  OperandUse use(Raster line, int64_t extent, int64_t batches, int64_t other, int64_t other_batches) const {
    bool const of_own_a = line == Raster::kAlongN;
    return {line,
            batches < p_.batch,
            info_.math == Math::kTF32x3,  // which loads parts twice
            extent * batches,
            other * other_batches,
            static_cast<int32_t>(size_of(of_own_a != info_.swap_ab ? info_.a.format : info_.b.format)),
            slices_.count,
            static_cast<double>(p_.batch) * p_.m * p_.n * p_.k};
  }

  KernelInfo const& info_;
  GemmProblem p_;  // with copies
  Device device_;
  Slices slices_;
  Decomposition cut_;
  TileOrder order_;
  int64_t rows_, columns_, batches_a_, batches_b_;  // of the kernel's own operands
};

}  // namespace

Decomposition sm90_decomposition(KernelInfo const& info, GemmProblem const& p, Schedule const& s,
                                 Device const& device) {
  bool const stream_k = s.kind == ScheduleKind::kStreamK && s.max_sms != 1;
  int32_t const sms = stream_k && s.max_sms > 0 && s.max_sms < device.sms ? s.max_sms : device.sms;
  int32_t const clusters = active_clusters(sms * ctas_of_sm(info), ctas_of_cluster(info));
  GemmProblem const q = dense(p);
  DenseTiles const tiles(sm90_order(info, q, Raster::kAlongM, 1), static_cast<int32_t>(q.batch),
                         ceil_div(q.k, info.tile_k));
  return Decomposition::make(s.kind == ScheduleKind::kStreamK && !stream_k ? ScheduleKind::kDataParallel : s.kind,
                             tiles, lists_clusters(info) ? std::min(clusters, kMostListed) : clusters, s.splits);
}

TileOrder sm90_order(KernelInfo const& info, GemmProblem const& p, Raster raster, int32_t swizzle) {
  bool const along_m = (raster == Raster::kAlongM) != info.swap_ab;
  GemmProblem const q = dense(p);
  return {ceil_div(info.swap_ab ? q.n : q.m, int64_t{info.tile_m} * info.cluster_m),
          ceil_div(info.swap_ab ? q.m : q.n, int64_t{info.tile_n} * info.cluster_n),
          along_m ? Raster::kAlongM : Raster::kAlongN, swizzle};
}

LaunchPolicy choose_policy(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Raster raster,
                           int32_t swizzle, Device const& device, Machine const& machine) {
  LaunchPolicy policy;
  policy.raster = raster, policy.swizzle = swizzle;
  if (info.family == Family::kSkinny) {
    // One line of tiles reads the long operand once.
    policy.evict_first_a = hints_a(info) && p.n <= info.tile_n && (p.batch == 1 || p.a.batch_stride != 0);
    policy.evict_first_b = hints_b(info) && p.m <= info.tile_n && (p.batch == 1 || p.b.batch_stride != 0);
  } else if (info.family == Family::kSm90) {
    Sm90Launch const launch(info, p, s, policy, device);
    launch.set_hints(policy, machine);
    if (info.ragged != Ragged::kNone) return policy;
    launch.set_held_back(policy, machine);
    launch.set_clusters(policy, machine);
    if (!info.gated && !info.joined) launch.set_extents(policy, machine);
  }
  return policy;
}

Status check_policy(KernelInfo const& info, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                    Device const& device) {
  auto const refuse = [&](std::string const& why) { return Status::invalid(cannot_run(info, p) + why); };
  if (policy.swizzle < 1) return refuse("swizzle must be at least 1");
  int64_t const n = dense(p).n, rows = info.swap_ab ? n : p.m, columns = info.swap_ab ? p.m : n;
  int64_t const tiles =
      std::max<int64_t>(ceil_div(rows, info.tile_m) + info.cluster_m, ceil_div(columns, info.tile_n) + info.cluster_n);
  if (tiles * policy.swizzle >= INT32_MAX) return refuse("swizzle=" + std::to_string(policy.swizzle) + " is too wide");
  bool const listed = policy.cluster_order != ClusterOrder::kAsLaunched;
  bool const others = policy.held_back != 0 || policy.held_back_last != 0 || policy.idle_clusters != 0 || listed ||
                      policy.extend_a || policy.extend_b;
  if (info.family == Family::kSm90 && info.ragged != Ragged::kNone && others)
    return refuse("of launch choices it has the order of tiles and L2 hints");
  if (info.family != Family::kSm90) {
    bool const for_a = hints_a(info), for_b = hints_b(info);
    if ((policy.evict_first_a && !for_a) || (policy.evict_first_b && !for_b) || others)
      return refuse(std::string("of launch choices it has the order of tiles") + (for_a   ? " and an L2 hint for A"
                                                                                  : for_b ? " and an L2 hint for B"
                                                                                          : " only"));
    return {};
  }

  Sm90Launch const launch(info, p, s, policy, device);
  Decomposition const& cut = launch.cut();
  int64_t const most_held = cut.kind == ScheduleKind::kStreamK ? 0 : std::max<int64_t>(info.stages - kFewestStages, 0);
  if (policy.held_back_last < 0 || policy.held_back < policy.held_back_last || policy.held_back > most_held)
    return refuse("it cannot hold back " + std::to_string(policy.held_back) + " stages, " +
                  std::to_string(policy.held_back_last) + " in the last wave: at most " + std::to_string(most_held) +
                  ", and no more in the last wave than before");
  int32_t const most_idle = launch.may_have_idle() ? kApart / ctas_of_cluster(info) : 0;
  bool const fits = !lists_clusters(info) || policy.idle_clusters <= kMostListed - cut.workers;
  if (policy.idle_clusters < 0 || policy.idle_clusters > most_idle || (policy.idle_clusters > 0 && !fits))
    return refuse("it cannot have " + std::to_string(policy.idle_clusters) + " idle clusters");
  bool const known = policy.cluster_order >= ClusterOrder::kAsLaunched && policy.cluster_order <= ClusterOrder::kSpread;
  if ((info.gated || info.joined) && (policy.extend_a || policy.extend_b))
    return refuse("it reads no operand beyond its extents");
  if (!known || (listed && !lists_clusters(info))) return refuse("it does not number clusters in such an order");
  return {};
}

bool goes_first(TileOrder const& order, Decomposition const& cut, OperandUse const& use, Machine const& machine) {
  // What the hint keeps in L2 is a kernel's last instructions, which do not matter to a long product.
  bool const whole_tiles = cut.kind == ScheduleKind::kDataParallel && use.slices == 1;
  if (whole_tiles && use.element_bytes == 2 && use.multiply_adds >= machine.evict_first_multiply_adds) return false;
  int32_t const reach = order.reach(use.line);
  if (reach == 1 && !use.by_all_batches) return true;
  // Stream-K workers that share a tile are at different k.
  if (use.again || cut.kind == ScheduleKind::kStreamK) return false;
  bool const at_once = cut.workers == cut.tiles * cut.splits;
  if (at_once)
    return machine.evict_first_ratio * use.bytes >= use.others &&
           cut.k_tiles / cut.splits <= machine.evict_first_iterations;
  // The tiles across a panel follow each other shortly.
  return reach <= kWidestPanel && !use.by_all_batches && use.bytes >= use.others;
}

HeldBack held_back(Decomposition const& cut, int32_t ctas, int32_t sms, int32_t stages, int64_t stage_bytes,
                   int64_t under_way, Machine const& machine) {
  if (under_way == 0 || stage_bytes == 0 || cut.kind == ScheduleKind::kStreamK) return {};
  // More CTAs than SMs share SMs.
  double const of_all = cut.workers * ctas > sms ? under_way * machine.under_way_share : under_way;
  int64_t const most = static_cast<int64_t>(machine.under_way_bytes_cta);
  auto const held = [&](int32_t clusters) {
    int64_t const bytes = std::min(static_cast<int64_t>(of_all) / (std::max(clusters, 1) * ctas), most);
    int64_t const filled = std::max((bytes + stage_bytes - 1) / stage_bytes, kFewestStages);
    return static_cast<int32_t>(std::max<int64_t>(stages - filled, 0));
  };
  return HeldBack::of(cut, held(cut.workers), held(cut.tiles * cut.splits % cut.workers));
}

// In contiguous rows, what lies beyond the extent is the beginning of the next k, which L2 has or will need.
bool gains_by_extension(TiledOperand const& x, int64_t others, Machine const& machine) {
  int64_t const beyond = x.tiled_extent() - x.extent;
  bool const pays = beyond >= machine.extend_rows && beyond <= machine.extend_share * (x.extent + others);
  if (x.contiguous ? beyond == 0 : !pays) return false;
  return x.tiled_extent() <= std::numeric_limits<int32_t>::max();
}

}  // namespace jax_streamk
