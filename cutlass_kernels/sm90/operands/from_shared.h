// A and B from shared memory: wgmma reads both through descriptors.
#pragma once

#include "cutlass_kernels/sm90/stages.h"
#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

// The first kN columns of accumulators = the sum over `count` k-tiles; `gathered`: threads wrote B. On return the
// products of the last k-tile may still be in flight; the result is its stage, which is not yet released (-1 if count
// is 0).
template <class Mainloop, int kN, class Numbers, class Accumulators>
CUTLASS_DEVICE int multiply_from_shared(FullBarrier* full, EmptyBarrier* empty, typename Mainloop::Stage& stage,
                                        Accumulators& accumulators, int32_t count, bool gathered, int warpgroup,
                                        typename Mainloop::TensorStorage& storage) {
  using A = typename Mainloop::Layout::A;
  using B = typename Mainloop::Layout::ReadB;
  constexpr int kWarpgroups = Mainloop::kWarpgroups, kSteps = Mainloop::Layout::kTileK * A::kSize / 32;
  uint32_t const a = A::low_word(cute::cast_smem_ptr_to_uint(storage.a)) +
                     (kWarpgroups == 1 ? 0 : warpgroup * A::block_offset(1)),
                 b = B::low_word(cute::cast_smem_ptr_to_uint(Mainloop::Layout::b_of(storage)));
  int32_t accumulate = 0;
  int unreleased = -1;
  CUTLASS_PRAGMA_NO_UNROLL
  for (; count > 0; --count, ++stage) {
    int const s = stage.index();
    full[s].wait(stage.phase());
    if (Mainloop::OperandB::kGathers && gathered) cutlass::arch::fence_view_async_shared();
    uint32_t const a_of_stage = a + s * (A::kBytes / 16), b_of_stage = b + s * (B::kBytes / 16);
    fence(accumulators);
    arrive_at_wgmma();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTLASS_PRAGMA_UNROLL
      for (int mma = 0; mma < Accumulators::kMmas; ++mma)
        WgmmaInstruction<kN, typename Accumulators::Value>::template from_shared<Numbers, A::kAlongK, B::kAlongK>(
            accumulators.values + mma * Accumulators::kValuesPerMma,
            A::descriptor(a_of_stage, A::step_offset(k) + A::block_offset(mma * kWarpgroups)),
            B::descriptor(b_of_stage, B::step_offset(k)), accumulate);
      accumulate = 1;
    }
    commit_wgmma();
    wait_for_wgmma<1>();
    fence(accumulators);
    if (unreleased >= 0) Mainloop::release(empty[unreleased]);
    unreleased = s;
  }
  return unreleased;
}

}  // namespace jax_streamk::sm90
