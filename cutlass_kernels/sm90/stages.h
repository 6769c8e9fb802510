// The stages of shared memory between the warps that load and the warpgroups that multiply, and their barriers.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"

namespace jax_streamk::sm90 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // the stage is loaded, or B in it is transposed
using EmptyBarrier = cutlass::arch::ClusterBarrier;            // all warpgroups that read the stage have done so
template <int kStages>
using StageState = cutlass::PipelineState<kStages>;

// Called by a whole warpgroup that has read a stage: arrives at the stage's empty barrier in every CTA that multicasts
// into it, those of this CTA's row and column of the cluster. Each thread arrives at one CTA at most.
template <int kClusterM, int kClusterN>
CUTLASS_DEVICE void release_stage(EmptyBarrier const& empty) {
  int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  if constexpr (kClusterM * kClusterN == 1) {
    if (thread == 0) empty.arrive();
  } else {
    int const rank = cute::block_rank_in_cluster();
    bool const shares = thread % kClusterM == rank % kClusterM || thread / kClusterM == rank / kClusterM;
    empty.arrive(thread, thread < kClusterM * kClusterN && shares);
  }
}

}  // namespace jax_streamk::sm90
