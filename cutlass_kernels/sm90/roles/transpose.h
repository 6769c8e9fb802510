// Warps 2 and 3 where B is transposed: they do so in the stages that the producer loads.
#pragma once

#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
CUTLASS_DEVICE void GemmKernel<Mainloop, Epilogue, Scheduler, kWarpSchedule>::transpose(Params const& params,
                                                                                        SharedStorage& shared,
                                                                                        int warp) {
  static_assert(OperandB::kWarps == 2 && !kSingle);
  Scheduler const scheduler(params.scheduler, shared.table);
  typename OperandB::Transposer const transposer;
  Stage stage;
  auto tile = scheduler.tile(0);
  wait_for_barriers();
  for (; tile.is_valid(); tile = scheduler.tile(tile.ordinal + 1))
    OperandB::transpose(shared.full, shared.prepared.stages, stage, tile.k_count, warp, transposer, shared.mainloop);
}

}  // namespace jax_streamk::sm90
