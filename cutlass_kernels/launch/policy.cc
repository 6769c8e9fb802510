#include "cutlass_kernels/launch/policy.h"

#include <algorithm>
#include <string>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {
namespace {

int32_t ceil_div(int64_t x, int64_t y) { return static_cast<int32_t>((x + y - 1) / y); }

}  // namespace

TileOrder own_order(KernelInfo const& info, GemmProblem const& p, Raster raster, int32_t swizzle) {
  bool const along_m = (raster == Raster::kAlongM) != info.swap_ab;
  GemmProblem const q = dense(p);
  return {ceil_div(info.swap_ab ? q.n : q.m, int64_t{info.tile_m} * info.cluster_m),
          ceil_div(info.swap_ab ? q.m : q.n, int64_t{info.tile_n} * info.cluster_n),
          along_m ? Raster::kAlongM : Raster::kAlongN, swizzle};
}

Status check_policy(KernelInfo const& info, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                    Device const& device) {
  auto const refuse = [&](std::string const& why) { return Status::invalid(cannot_run(info, p) + why); };
  if (policy.swizzle < 1) return refuse("swizzle must be at least 1");
  int64_t const n = dense(p).n, rows = info.swap_ab ? n : p.m, columns = info.swap_ab ? p.m : n;
  int64_t const tiles =
      std::max<int64_t>(ceil_div(rows, info.tile_m) + info.cluster_m, ceil_div(columns, info.tile_n) + info.cluster_n);
  if (tiles * policy.swizzle >= INT32_MAX) return refuse("swizzle=" + std::to_string(policy.swizzle) + " is too wide");
  PolicyFields const obeys = traits_of(info).obeys(info);
  bool const listed = policy.cluster_order != ClusterOrder::kAsLaunched, extends = policy.extend_a || policy.extend_b;
  bool const holds = policy.held_back != 0 || policy.held_back_last != 0 || policy.idle_clusters != 0 || listed;
  if ((policy.evict_first_a && !obeys.hint_a) || (policy.evict_first_b && !obeys.hint_b) ||
      (!obeys.stages_and_clusters && (holds || extends)))
    return refuse(std::string("of launch choices it has the order of tiles") + (obeys.hint_a && obeys.hint_b
                                                                                    ? " and L2 hints"
                                                                                : obeys.hint_a ? " and an L2 hint for A"
                                                                                : obeys.hint_b ? " and an L2 hint for B"
                                                                                               : " only"));
  if (!obeys.stages_and_clusters) return {};

  Launch const launch(info, dense(p), s);
  Decomposition const cut = traits_of(info).decomposition(info, launch.as_batch(), launch.schedule, device);
  int64_t const most_held = cut.kind == ScheduleKind::kStreamK ? 0 : std::max<int64_t>(info.stages - kFewestStages, 0);
  if (policy.held_back_last < 0 || policy.held_back < policy.held_back_last || policy.held_back > most_held)
    return refuse("it cannot hold back " + std::to_string(policy.held_back) + " stages, " +
                  std::to_string(policy.held_back_last) + " in the last wave: at most " + std::to_string(most_held) +
                  ", and no more in the last wave than before");
  int32_t const most_idle = may_have_idle(info, cut) ? kApart / ctas_of_cluster(info) : 0;
  bool const fits = !lists_clusters(info) || policy.idle_clusters <= kMostListed - cut.workers;
  if (policy.idle_clusters < 0 || policy.idle_clusters > most_idle || (policy.idle_clusters > 0 && !fits))
    return refuse("it cannot have " + std::to_string(policy.idle_clusters) + " idle clusters");
  if (extends && !obeys.extents) return refuse("it reads no operand beyond its extents");
  bool const known =
      policy.cluster_order >= ClusterOrder{} && static_cast<int32_t>(policy.cluster_order) < kCount<ClusterOrder>;
  if (!known || (listed && !lists_clusters(info))) return refuse("it does not number clusters in such an order");
  return {};
}

}  // namespace jax_streamk
