// The main loop of the sm90 family: CUTLASS's, with a say in how long L2 keeps what is loaded, and in what a batch is.
//
// Operands that stream past push everything else out of L2, instructions included, which at the end of a short kernel are then
// waited for. What no other CTA reads again is marked to go first.
#pragma once

#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass_kernels/decomposition.h"
#include "cutlass_kernels/dependent_launch.cuh"

namespace jax_streamk::sm90 {

// Where kSlices, a batch may be a slice of K: the kernel's K is that of a slice, and what it calls batches are slices x batches. TMA reads
// zeros beyond the end of the last slice.
template <class Base, bool kSlices>
struct CollectiveMainloop : Base {
  using Hint = cute::TMA::CacheHintSm90;

  struct Arguments : Base::Arguments {
    Hint hint_a, hint_b;
    int32_t k, batch;  // all of K, and of the batches that A and B have
  };
  struct Params : Base::Params {
    Hint hint_a, hint_b;
    int32_t batch;
    Divisor by_batch;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments, void* workspace) {
    auto const whole = cute::make_shape(cute::get<0>(shape), cute::get<1>(shape), arguments.k, arguments.batch);
    return {Base::to_underlying_arguments(whole, arguments, workspace), arguments.hint_a, arguments.hint_b, arguments.batch,
            Divisor(arguments.batch)};
  }

  // Called by the producer warp for each tile: as many k-tiles as `count`, from `first` on, into the stages of the pipeline. A CTA
  // loads its part of what its cluster's rows and columns share, for all of them.
  template <class TensorA, class TensorB, class BlockCoordinate, class KTile>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline, typename Base::PipelineState stage,
                           cute::tuple<TensorA, TensorB> const& operands, BlockCoordinate const& at, KTile first, int count,
                           int, uint32_t rank, typename Base::TensorStorage& storage) {
    using namespace cute;
    if (!elect_one_sync()) return;
    wait_for_primary();
    constexpr int kClusterM = size<0>(typename Base::DispatchPolicy::ClusterShape{});
    constexpr int kClusterN = size<1>(typename Base::DispatchPolicy::ClusterShape{});
    int const cta_m = rank % kClusterM, cta_n = rank / kClusterM;
    // CTAs are numbered along m first: those of a row are kClusterM apart.
    uint16_t row = 0, column = ((1u << kClusterM) - 1) << (cta_n * kClusterM);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kClusterN; ++n) row |= 1u << (cta_m + n * kClusterM);

    auto const part_a = params.tma_load_a.get_slice(cta_n);
    auto const part_b = params.tma_load_b.get_slice(cta_m);
    auto const m = get<0>(at), n = get<1>(at);
    int32_t batch = get<3>(at), k_tile = *first;
    if constexpr (kSlices) {
      int32_t const slice = params.by_batch.divide(batch);
      batch -= slice * params.batch;
      k_tile += slice * static_cast<int32_t>(size<3>(get<0>(operands)));
    }
    auto const from_a = part_a.partition_S(get<0>(operands)(_, _, m, _, batch));
    auto const from_b = part_b.partition_S(get<1>(operands)(_, _, n, _, batch));
    auto const to_a = part_a.partition_D(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{}));
    auto const to_b = part_b.partition_D(make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{}));
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++k_tile, ++stage) {
      pipeline.producer_acquire(stage);
      auto* const barrier = pipeline.producer_get_barrier(stage);
      copy(params.tma_load_a.with(*barrier, row, params.hint_a), from_a(_, _, _, k_tile), to_a(_, _, _, stage.index()));
      copy(params.tma_load_b.with(*barrier, column, params.hint_b), from_b(_, _, _, k_tile), to_b(_, _, _, stage.index()));
    }
  }
};

}  // namespace jax_streamk::sm90
