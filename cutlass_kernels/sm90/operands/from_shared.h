// A and B from shared memory: wgmma reads both through descriptors.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_kernels/sm90/stages.h"

namespace jax_streamk::sm90 {

// accumulators = the sum over `count` k-tiles; `gathered`: threads wrote B. On return the products of the last k-tile
// may still be in flight; the result is its stage, which is not yet released (-1 if count is 0).
template <class Mainloop, class Mma, class Accumulators>
CUTLASS_DEVICE int multiply_from_shared(FullBarrier* full, EmptyBarrier* empty, typename Mainloop::Stage& stage,
                                        Accumulators& accumulators, int32_t count, bool gathered, int warpgroup,
                                        typename Mainloop::TensorStorage& storage) {
  using namespace cute;
  constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;
  Mma mma;
  // Descriptors are equal in all threads of a warpgroup.
  auto const part = mma.get_slice(size(mma) == kWarpgroup ? 0 : warpgroup * kWarpgroup);
  auto const a = part.make_fragment_A(
      part.partition_A(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Mainloop::SmemLayoutA{})));
  // B's descriptors follow the layout of the tile in shared memory, which may be wider than what is multiplied.
  auto const loaded = typename Mainloop::LoadedMma{}.get_slice(0);
  auto const b = loaded.make_fragment_B(
      loaded.partition_B(make_tensor(make_smem_ptr(storage.smem_B.data()), typename Mainloop::SmemLayoutB{})));
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  int unreleased = -1;
  CUTLASS_PRAGMA_NO_UNROLL
  for (; count > 0; --count, ++stage) {
    int const s = stage.index();
    full[s].wait(stage.phase());
    if (Mainloop::OperandB::kGathers && gathered) cutlass::arch::fence_view_async_shared();
    warpgroup_fence_operand(accumulators);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
      cute::gemm(mma, a(_, _, k, s), b(_, _, k, s), accumulators);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    warpgroup_fence_operand(accumulators);
    if (unreleased >= 0) Mainloop::release(empty[unreleased]);
    unreleased = s;
  }
  return unreleased;
}

}  // namespace jax_streamk::sm90
