// The stages of shared memory between the warps that load and the warpgroups that multiply, and their barriers.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"

namespace jax_streamk::sm90 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // the stage is loaded, or B in it is transposed
using EmptyBarrier = cutlass::arch::ClusterBarrier;            // all warpgroups that read the stage have done so

// A place in the ring of stages. The phase of its barriers flips when the place passes the last stage.
template <int kStages>
class StageState {
 public:
  CUTLASS_DEVICE explicit StageState(uint32_t phase = 0) : phase_(phase) {}

  CUTLASS_DEVICE int index() const { return index_; }
  CUTLASS_DEVICE uint32_t phase() const { return phase_; }
  CUTLASS_DEVICE void operator++() {
    if (++index_ == kStages) index_ = 0, phase_ ^= 1;
  }
  CUTLASS_DEVICE void advance(uint32_t stages) {
    uint32_t const at = index_ + stages;
    phase_ ^= at / kStages % 2;
    index_ = static_cast<int>(at % kStages);
  }

 private:
  int index_ = 0;
  uint32_t phase_;
};

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
