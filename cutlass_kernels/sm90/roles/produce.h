// The warps that are not consumers: one loads, one prefetches the residual or takes tiles, and others do as operands
// need. kWhole: CTAs share no tile.
#pragma once

#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
template <bool kWhole>
CUTLASS_DEVICE void GemmKernel<Mainloop, Epilogue, Scheduler, kWarpSchedule>::produce(Params const& params,
                                                                                      SharedStorage& shared, int warp) {
  if (!kRagged && warp == kPrefetcher && cute::elect_one_sync()) Mainloop::prefetch_tma_descriptors(params.mainloop);
  if (!kSingle && warp > kProducer) {
    if constexpr (kClusterSize > 1) cute::cluster_wait();
    if (!kRagged && warp == 1) prefetch_residual(params, shared);
    if constexpr (kRagged) {
      if (warp == 1 && cute::elect_one_sync()) Scheduler::take_tiles(params.scheduler, shared.table);
    }
    if constexpr (OperandB::kGathers) {
      if (warp >= 2 && gathers(params)) gather(params, shared);
    }
    return;
  }
  Scheduler const scheduler(params.scheduler, shared.table);
  Stage stage(1);  // all stages are empty
  auto tile = [&] {
    if constexpr (kWhole && Scheduler::kHasList) return scheduler.listed();
    return scheduler.template tile<kWhole>(0);
  }();
  Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, tile);
  // Branch on the tile before waiting: otherwise ptxas would read its coordinates after the wait.
  if (!tile.is_valid()) {
    if constexpr (kClusterSize == 1) cutlass::arch::NamedBarrier::arrive(kWaiting, kReady);
    return;
  }
  int32_t held_back = params.loads.held_back.first;
  if (!kRagged && (params.loads.early_a || params.loads.early_b)) {
    wait_for_barriers();
    if (!cute::elect_one_sync()) return wait_for_primary();
    int32_t const count =
        Mainloop::load_early(params.mainloop, params.loads, tile, shared.full, stage, shared.mainloop);
    wait_for_primary();
    Mainloop::load_late(params.mainloop, params.loads, tile, count, shared.full, stage, shared.mainloop);
    tile.k_begin += count, tile.k_count -= count;
  } else {
    wait_for_primary();
    wait_for_barriers();
    if (!cute::elect_one_sync()) return;
  }
  while (true) {
#ifdef JAX_STREAMK_RECORD
    record_work(tile.m, tile.n, tile.batch, tile.k_begin, tile.k_begin + tile.k_count);
#endif
    if (kRagged || tile.k_count > 0) {
      Mainloop::load(params.mainloop, params.loads, tile, held_back, gathers(params), shared.full, shared.empty, stage,
                     shared.mainloop, [&] {
                       if constexpr (kRagged) shared.table.is_wanted.arrive();
                     });
    }
    tile = scheduler.template tile<kWhole>(tile.ordinal + 1);
    if (!tile.is_valid()) break;
    held_back = params.loads.held_back.stages(tile.ordinal);
    Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, tile);
  }
  // Consumers of other CTAs still arrive at this CTA's barriers: its shared memory must outlive that.
  if constexpr (kClusterSize > 1) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kStages; ++i, ++stage) shared.empty[stage.index()].wait(stage.phase());
  }
}

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
CUTLASS_DEVICE void GemmKernel<Mainloop, Epilogue, Scheduler, kWarpSchedule>::prefetch_residual(
    Params const& params, SharedStorage const& shared) {
  if (!params.has_residual) return;
  wait_for_primary();
  Scheduler const scheduler(params.scheduler, shared.table);
  for (auto tile = scheduler.tile(0); tile.is_valid(); tile = scheduler.tile(tile.ordinal + 1))
    Epilogue::prefetch(params.epilogue, params.shape, Scheduler::coordinate(tile));
}

}  // namespace jax_streamk::sm90
