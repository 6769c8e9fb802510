// A consumer warpgroup: multiplies its tiles, fixes up those that it shares, and stores them.
#pragma once

#include "cutlass_kernels/sm90/partials.h"
#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
CUTLASS_DEVICE void GemmKernel<Mainloop, Epilogue, Scheduler, kWarpSchedule>::consume(Params const& params,
                                                                                      SharedStorage& shared,
                                                                                      int warpgroup) {
  Scheduler const scheduler(params.scheduler, shared.table);
  constexpr int kStep = kPingpong ? kConsumers : 1;
  wait_for_barriers();  // first, because without a cluster the producer waits for all consumers
  auto tile = first_tile(params, scheduler, warpgroup);
  Stage stage;
  if (kPingpong && warpgroup > 0) stage.advance(scheduler.k_tiles_between(tile, 0));
  int const thread = threadIdx.x % kWarpgroup + (kPingpong ? 0 : warpgroup * kWarpgroup);
  uint32_t const other = 1 - warpgroup;
  // In a pingpong CTA with one tile, the second consumer stores a tile outside D: TMA drops it, and the first
  // consumer then finds the epilogue in the instruction cache.
  bool const warms_up = kPingpong && !tile.is_valid();
  if (warms_up && scheduler.is_idle()) return;
  if (warms_up) tile.m = kRowOutside / TileShape::kM;
  Epilogue epilogue(params.epilogue, shared.epilogue, thread, kStored + (kPingpong ? 0 : warpgroup));
  // Ends a tile's store. Returns whether this warpgroup is done.
  auto const end_store = [&] {
    if (kPingpong || tile.last) epilogue.finish();
    if (kPingpong && !tile.last) give_turn(kStores + other);
    return tile.last || warms_up;
  };
  while (warms_up || tile.is_valid()) {
    Accumulators accumulators;
    if constexpr (kAccumulators <= kMostUnset || kRagged) {
      leave_unset(accumulators);
    } else {
      accumulators.clear();
    }
    auto const at = Scheduler::coordinate(tile);
    bool const is_zero = scheduler.is_outside(tile);
    auto biases = epilogue.biases(params.has_early_bias && !is_zero, params.shape, at);

    if (kPingpong && tile.ordinal > 0) wait_for_turn(kMultiplies + warpgroup);
    auto sums = Mainloop::sums_of(params.mainloop, params.loads, params.scheduler.decomposition.k_tiles, shared.sums,
                                  tile, thread, kScaling);
    int const unreleased =
        Mainloop::multiply(filled(shared), shared.empty, stage, accumulators, sums, params.promotes, tile.k_count,
                           Scheduler::columns(tile), gathers(params), warpgroup, shared.mainloop);
    if constexpr (kRagged) {
      if (!warms_up) scheduler.look_ahead(tile);
    }
    if (kPingpong && !tile.last && !warms_up) give_turn(kMultiplies + other);
    Mainloop::finish(shared.empty, accumulators, sums, unreleased);
    if constexpr (kRagged && Mainloop::kBytes) {
      if (scheduler.has_no_products(tile)) accumulators.clear();  // scales need not be finite
    }

    if constexpr (kPingpong) {
      stage.advance(scheduler.k_tiles_between(tile, tile.ordinal + 1));
      // The only tile of a CTA also waits for the warm-up.
      if (tile.ordinal > 0 || tile.last) wait_for_turn(kStores + warpgroup);
    }
    // Lets a separate reduction start. Before a CTA's last epilogue it would only wait for SMs that are still in use.
    if (tile.last) let_dependents_start();
    if (!kPingpong && tile.ordinal > 0) epilogue.wait_for_boxes();
    if (kPingpong && kAccumulators < 192 && tile.ordinal == 0 && tile.last) epilogue.spread(shared.mainloop);
    if (!kHasStraightStore || !(params.straight || is_zero) || scheduler.is_part(tile)) {
      if (scheduler.fixup(TileThreads<kConsumersPerTile>(kPingpong ? 0 : warpgroup), tile, accumulators))
        epilogue.store(params.shape, at, biases, accumulators);
      if (end_store()) return;
    } else {
      // The common case is last, so that its code follows the main loop in line. Hence end_store() twice.
      if constexpr (!Epilogue::kGated) epilogue.store_converted(at, accumulators);
      if (end_store()) return;
    }
    tile = scheduler.tile(tile.ordinal + kStep);
  }
  if (!kPingpong) epilogue.finish();
}

}  // namespace jax_streamk::sm90
