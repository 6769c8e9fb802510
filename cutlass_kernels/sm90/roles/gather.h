// Warps 2 and 3 of a product that gathers rows of B: they load these for the producer's tiles.
#pragma once

#include "cute/arch/copy_sm80.hpp"
#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
CUTLASS_DEVICE void GemmKernel<Mainloop, Epilogue, Scheduler, kWarpSchedule>::gather(Params const& params,
                                                                                     SharedStorage& shared) {
  static_assert(OperandB::kThreads == 64 && kRagged && kClusterSize == 1 && !kSingle);
  Scheduler const scheduler(params.scheduler, shared.table);
  auto tile = scheduler.tile(0);
  if (!tile.is_valid()) return;
  wait_for_primary();
  auto indices = OperandB::indices_of(params.mainloop, tile);
  Stage stage(1);  // all stages are empty
  do {
    auto next = tile;
    auto next_indices = indices;
    OperandB::gather(params.mainloop, tile, scheduler.is_outside(tile), indices, shared.full, shared.empty, stage,
                     shared.mainloop, [&] {
                       next = scheduler.tile(tile.ordinal + 1);
                       if (next.is_valid()) next_indices = OperandB::indices_of(params.mainloop, next);
                     });
    tile = next, indices = next_indices;
  } while (tile.is_valid());
  cute::cp_async_wait<0>();
}

}  // namespace jax_streamk::sm90
