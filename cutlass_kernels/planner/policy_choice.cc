#include "cutlass_kernels/planner/policy_choice.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/launch.h"
#include "cutlass_kernels/planner/wave.h"

namespace jax_streamk {
namespace {

// The choices for a kernel that loads by TMA, in terms of its own GEMM: with swap_ab its A is the problem's B.
class PolicyChoice {
 public:
  PolicyChoice(KernelInfo const& info, GemmProblem const& p, Schedule const& s, LaunchPolicy const& order,
               Device const& device)
      : info_(info), p_(dense(p)), device_(device) {
    Launch const launch(info, p_, s);
    p_ = launch.problem, slices_ = launch.slices;
    cut_ = traits_of(info).decomposition(info, launch.as_batch(), launch.schedule, device);
    order_ = own_order(info, p_, order.raster, order.swizzle);
    bool const swap = info.swap_ab;
    rows_ = swap ? p_.n : p_.m, columns_ = swap ? p_.m : p_.n;
    batches_a_ = p_.a.batch_stride != 0 ? p_.batch : 1, batches_b_ = p_.b.batch_stride != 0 ? p_.batch : 1;
    if (swap) std::swap(batches_a_, batches_b_);
  }

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
    if (may_have_idle(info_, cut_))
      policy.idle_clusters = idle_clusters(cut_.workers, ctas_of_cluster(info_), device_.sms).count;
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

LaunchPolicy choose_policy(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Raster raster,
                           int32_t swizzle, Device const& device, Machine const& machine) {
  LaunchPolicy policy;
  policy.raster = raster, policy.swizzle = swizzle;
  PolicyFields const fields = traits_of(info).obeys(info);
  if (traits_of(info).loads_by_tma()) {
    PolicyChoice const choice(info, p, s, policy, device);
    choice.set_hints(policy, machine);
    if (fields.stages_and_clusters) {
      choice.set_held_back(policy, machine);
      choice.set_clusters(policy, machine);
    }
    if (fields.extents) choice.set_extents(policy, machine);
  } else {
    // One line of tiles reads the long operand once.
    policy.evict_first_a = fields.hint_a && p.n <= info.tile_n && (p.batch == 1 || p.a.batch_stride != 0);
    policy.evict_first_b = fields.hint_b && p.m <= info.tile_n && (p.batch == 1 || p.b.batch_stride != 0);
  }
  return policy;
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
