// The last warpgroup where A is numbers with scales: it decodes them in the stages that the producer loads.
#pragma once

#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
CUTLASS_DEVICE void GemmKernel<Mainloop, Epilogue, Scheduler, kWarpSchedule>::decode(Params const& params,
                                                                                     SharedStorage& shared) {
  static_assert(Mainloop::OperandA::kThreads == kWarpgroup && !kSingle && !kPingpong);
  Scheduler const scheduler(params.scheduler, shared.table);
  wait_for_barriers();
  wait_for_primary();  // scales may be results of the kernel before
  Stage stage;
  for (auto tile = scheduler.tile(0); tile.is_valid(); tile = scheduler.tile(tile.ordinal + 1)) {
    auto at = tile;
    Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, at);
    Mainloop::OperandA::decode(params.mainloop, at, scheduler.is_outside(tile), shared.full, shared.prepared.stages,
                               stage, shared.mainloop, shared.tables, kDecoding);
  }
}

}  // namespace jax_streamk::sm90
