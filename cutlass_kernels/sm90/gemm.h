// The kernel of the sm90 family: which warps load, multiply and store, and when. CUTLASS's collectives do the work,
// under our own tile scheduler.
//
// Before the first load every instruction of a kernel comes from memory, and that load is what a short product waits
// for. So two warps initialize the barriers while another finds out what to load, and all else comes later.
#pragma once

#include <cstddef>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/planner/clusters.h"

namespace jax_streamk::sm90 {

// Cooperative: two consumer warpgroups share a tile, or three one of 192 rows. Pingpong: each of two has a tile of its
// own, of which it runs the epilogue while the other multiplies. Single: there is one, and a warp that loads; an SM has
// several such CTAs.
enum class WarpSchedule { kCooperative, kPingpong, kSingle };

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
struct GemmKernel {
  static constexpr bool kPingpong = kWarpSchedule == WarpSchedule::kPingpong,
                        kSingle = kWarpSchedule == WarpSchedule::kSingle;
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  using TiledMma = typename Mainloop::TiledMma;
  using TileShape = typename Mainloop::TileShape;
  static constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kConsumers = kSingle ? 1 : kPingpong ? 2 : cute::size(TiledMma{}) / kWarpgroup;
  static constexpr int kThreads = kSingle ? kWarpgroup + 32 : kWarpgroup * (1 + kConsumers),
                       kCtasOfSm = kSingle ? kSingles : 1;
  static constexpr int kClusterM = Scheduler::kClusterM, kClusterN = Scheduler::kClusterN,
                       kClusterSize = kClusterM * kClusterN;
  using Stage = cutlass::PipelineState<kStages>;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  // What is needed first comes first: the first 64 bytes at once, and every further line of parameters that is read
  // before a load or a product takes a tenth of a microsecond or two.
  struct Params {
    bool straight;  // nobody shares tiles, and their accumulators are but converted and stored by TMA
    bool shares, has_early_bias, has_residual;  // what Scheduler and Epilogue say of their parameters
    bool promotes;                              // whether the main loop promotes sums, if it can
    Loads loads;
    typename Scheduler::Params scheduler;
    cute::Shape<int, int, int, int> shape;  // m, n, k, batch of the kernel's own result
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
  };

  struct SharedStorage {
    typename Mainloop::TensorStorage mainloop;
    typename Epilogue::TensorStorage epilogue;
    Full full[kStages];
    Empty empty[kStages];
  };

  static_assert(sizeof(SharedStorage) <= 227 << 10);

  static CUTLASS_DEVICE void run(Params const& params, SharedStorage& shared) {
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == kInitializers || warp == kInitializers + 1) {
      if (cute::elect_one_sync()) {
        // A stage is read by one warpgroup, or all, of every CTA that it is multicast from.
        constexpr uint32_t kReaders = (kPingpong ? 1 : kConsumers) * (kClusterM + kClusterN - 1);
        static_assert(sizeof(Full) == sizeof(Empty) &&
                      offsetof(SharedStorage, empty) == offsetof(SharedStorage, full) + sizeof(shared.full));
        // Either kind by a warp, whose first one's address is computed, or ptxas would choose among two for every
        // stage.
        int const kind = warp - kInitializers;
        Empty const* const barriers = static_cast<Empty const*>(shared.full) + kind * kStages;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kStages; ++i) barriers[i].init(kind == 0 ? 1 : kReaders);
        cutlass::arch::fence_barrier_init();
      }
      __syncwarp();
      if constexpr (kClusterSize == 1 && !kSingle) cutlass::arch::NamedBarrier::arrive(kWaiting, kReady);
    }
    if constexpr (kClusterSize > 1) cute::cluster_arrive_relaxed();
    // ptxas places what a branch skips next to it: the loader's code, in line from the kernel's beginning to its first
    // load.
    if constexpr (kSingle) {
      if (warp < kLoader) return consume(params, shared, 0);
    } else {
      if (warp >= 4) {
        if constexpr (kTakesRegisters) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
        return consume(params, shared, warp / 4 - 1);
      }
    }
    // By all warps of a warpgroup, an idle CTA's too, whose consumers wait for registers as well.
    if constexpr (kTakesRegisters) cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (Scheduler::kMayShare && params.shares) return load_tiles<false>(params, shared, warp);
    load_tiles<true>(params, shared, warp);
  }

 private:
  // The warp that loads, the first of two that initialize barriers, and the one that prefetches descriptors. wgmma
  // wants consumers to be warps 0 to 3 of four, or the next.
  static constexpr int kLoader = kSingle ? 4 : 0, kInitializers = kSingle ? 0 : 2, kPrefetcher = kSingle ? 4 : 1;

  static constexpr int kAccumulators =
      cute::size<0>(TileShape{}) * cute::size<1>(TileShape{}) / (kWarpgroup * (kPingpong ? 1 : kConsumers));
  // So many that consumers need what the others can spare.
  static constexpr bool kFewRegisters = kAccumulators >= 208;

  // Whether consumers need more registers than a launch gives everybody, which takes time. With fewer ptxas spills
  // some.
  static constexpr bool kTakesRegisters = !kSingle && (!kPingpong || kAccumulators > 72 || Mainloop::kFromRegisters ||
                                                       (Mainloop::kPromotes && kAccumulators >= 32));
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kFewRegisters ? 240 : 232;
  static constexpr int kLoaderRegisters = kConsumers == 3 ? 32 : kFewRegisters ? 24 : 40;

  // Named barriers. A consumer of a pingpong kernel waits for its turn to multiply, and to store, at that of its
  // warpgroup. Threads of a warpgroup that stores wait for each other at the last.
  static constexpr uint32_t kReady = 0, kMultiplies = 1, kStores = kMultiplies + kConsumers,
                            kStored = kPingpong ? kStores + kConsumers : 1;

  // Until the barriers that this CTA waits at or arrives at are initialized. All consumers come here, and the warp that
  // loads; initializers that are neither arrive, as the warps of a cluster do.
  static constexpr uint32_t kWaiting = kConsumers * kWarpgroup + (kSingle ? 32 : 96);
  static CUTLASS_DEVICE void wait_for_barriers() {
    if constexpr (kClusterSize > 1) {
      cute::cluster_wait();
    } else {
      cutlass::arch::NamedBarrier::sync(kWaiting, kReady);
    }
  }

  // The warps beside the consumers' come here.
  template <bool kWhole>
  static CUTLASS_DEVICE void load_tiles(Params const& params, SharedStorage& shared, int warp) {
    if (warp == kPrefetcher && cute::elect_one_sync()) Mainloop::prefetch_tma_descriptors(params.mainloop);
    if (!kSingle && warp > kLoader) {
      // Without a residual these read nothing of a tile.
      if constexpr (kClusterSize > 1) cute::cluster_wait();
      if (warp == 1) prefetch(params);
      return;
    }
    Scheduler const scheduler(params.scheduler);
    Stage stage(0, 1, 0);  // all are empty
    auto tile = [&] {
      if constexpr (kWhole && Scheduler::kHasList) return scheduler.listed();
      return scheduler.template tile<kWhole>(0);
    }();
    Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, tile);
    // ptxas reads where a tile is only before a branch, and else when it has waited.
    if (!tile.is_valid()) {
      if constexpr (kClusterSize == 1) cutlass::arch::NamedBarrier::arrive(kWaiting, kReady);
      return;
    }
    wait_for_primary();
    wait_for_barriers();
    if (!cute::elect_one_sync()) return;
    int32_t held_back = params.loads.held_back.first;
    while (true) {
      Mainloop::load(params.mainloop, params.loads, params.shape, tile, held_back, shared.full, shared.empty, stage,
                     shared.mainloop);
      tile = scheduler.template tile<kWhole>(tile.ordinal + 1);
      if (!tile.is_valid()) break;
      held_back = params.loads.held_back.stages(tile.ordinal);
      Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, tile);
    }
    // Consumers of other CTAs arrive at this one's barriers, which must not be gone.
    if constexpr (kClusterSize > 1) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kStages; ++i, ++stage) shared.empty[stage.index()].wait(stage.phase());
    }
  }

  static CUTLASS_DEVICE void prefetch(Params const& params) {
    if (!params.has_residual) return;
    wait_for_primary();
    Scheduler const scheduler(params.scheduler);
    for (auto tile = scheduler.tile(0); tile.is_valid(); tile = scheduler.tile(tile.ordinal + 1))
      Epilogue::prefetch(params.epilogue, params.shape, tile.m, tile.n, tile.batch);
  }

  // Whether a straight product has a store of its own. ptxas has no registers for that beside more accumulators, or an
  // operand in registers.
  static constexpr bool kStraight = kAccumulators < (Mainloop::kFromRegisters ? 128 : 160);

  // A tile's first product ignores its accumulators; without this they would be set to zero all the same. Of more than
  // so many, of fewer where a warpgroup has more than 64 rows, or of three warpgroups' few registers, ptxas then spills
  // some.
  static constexpr int kRows = cute::size<0>(TileShape{}) / (kPingpong ? 1 : kConsumers);
  static constexpr int kMostUnset = kConsumers == 3 ? 0 : kRows == 64 ? 112 : 96;
  template <class Accumulators>
  static CUTLASS_DEVICE void leave_unset(Accumulators& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accumulators); ++i) asm volatile("" : "=f"(accumulators(i)));
  }

  // Of a consumer, by as few of the parameters as may be.
  static CUTLASS_DEVICE auto first_tile(Params const& params, Scheduler const& scheduler, int warpgroup) {
    if constexpr (Scheduler::kHasList) {
      if (!(Scheduler::kMayShare && params.shares)) {
        auto const tile = scheduler.listed();
        if (!kPingpong || warpgroup == 0) return tile;
        if (tile.last) return typename Scheduler::Tile{};
      }
    }
    return scheduler.tile(kPingpong ? warpgroup : 0);
  }

  // More rows than the first two tiles of all CTAs have.
  static constexpr int32_t kBeyond = 1 << 24;

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& shared, int warpgroup) {
    Scheduler const scheduler(params.scheduler);
    constexpr int kStep = kPingpong ? kConsumers : 1;
    wait_for_barriers();  // at once: the warp that loads waits for all consumers, if not in a cluster
    auto tile = first_tile(params, scheduler, warpgroup);
    Stage stage;
    if (kPingpong && warpgroup > 0) stage.advance(tile.k_count);
    int const thread = threadIdx.x % kWarpgroup + (kPingpong ? 0 : warpgroup * kWarpgroup);
    uint32_t const other = 1 - warpgroup;
    // Where its CTA has one tile, a pingpong kernel's second warpgroup stores one beyond the result while the first
    // multiplies, which then finds the code of the store near.
    bool const rehearses = kPingpong && !tile.is_valid();
    if (rehearses && Scheduler::is_idle(params.scheduler)) return;
    if (rehearses) tile.m = kBeyond / static_cast<int32_t>(cute::size<0>(TileShape{}));
    TiledMma tiled_mma;
    Epilogue epilogue(params.epilogue, shared.epilogue, thread, kStored + (kPingpong ? 0 : warpgroup));
    // After a tile's store: whether it was the last of this warpgroup.
    auto const ends = [&] {
      if (kPingpong || tile.last) epilogue.finish();
      if (kPingpong && !tile.last) cutlass::arch::NamedBarrier::arrive(kConsumers * kWarpgroup, kStores + other);
      return tile.last || rehearses;
    };
    while (rehearses || tile.is_valid()) {
      auto accumulators = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(TileShape{}));
      if constexpr (kAccumulators <= kMostUnset) leave_unset(accumulators);
      auto const at = cute::make_coord(tile.m, tile.n, cute::_0{}, tile.batch);
      auto biases =
          epilogue.template biases<decltype(accumulators)>(params.has_early_bias, params.shape, at, tiled_mma);
      if (kPingpong && tile.ordinal > 0)
        cutlass::arch::NamedBarrier::sync(kConsumers * kWarpgroup, kMultiplies + warpgroup);
      auto sums = Mainloop::promoted(accumulators);
      int const unreleased = Mainloop::multiply(shared.full, shared.empty, stage, accumulators, sums, params.promotes,
                                                tile.k_count, warpgroup, shared.mainloop);
      if (kPingpong && !tile.last && !rehearses)
        cutlass::arch::NamedBarrier::arrive(kConsumers * kWarpgroup, kMultiplies + other);
      Mainloop::finish(shared.empty, accumulators, sums, unreleased);
      if constexpr (kPingpong) {
        stage.advance(tile.k_count);
        // Of one tile alone, until it has been rehearsed.
        if (tile.ordinal > 0 || tile.last)
          cutlass::arch::NamedBarrier::sync(kConsumers * kWarpgroup, kStores + warpgroup);
      }
      // The kernel that adds slices: started before a CTA's last epilogue it would only wait, on SMs that this one
      // still uses.
      if (tile.last) let_dependents_start();
      if (!kPingpong && tile.ordinal > 0) epilogue.wait_for_boxes();
      if (kPingpong && kAccumulators < 192 && tile.ordinal == 0 && tile.last) epilogue.spread(shared.mainloop);
      if (!kStraight || !params.straight) {
        if (Scheduler::fixup(params.scheduler, tile, accumulators, kConsumers, warpgroup))
          epilogue.store(params.shape, at, biases, accumulators, tiled_mma);
        if (ends()) return;
      } else {
        // Most products end here: the code of their store follows that of the main loop, and nothing comes after it. So
        // what ends() does is there twice.
        epilogue.store_converted(at, accumulators);
        if (ends()) return;
      }
      tile = scheduler.tile(tile.ordinal + kStep);
    }
    if (!kPingpong) epilogue.finish();
  }
};

template <class Gemm>
__global__ __launch_bounds__(Gemm::kThreads,
                             Gemm::kCtasOfSm) void multiply(__grid_constant__ typename Gemm::Params const params) {
  extern __shared__ __align__(1024) char memory[];
  Gemm::run(params, *reinterpret_cast<typename Gemm::SharedStorage*>(memory));
}

// The same in clusters, whose size a kernel would else look up when it has started, in a line of constants of its own.
template <class Gemm>
__global__ __cluster_dims__(Gemm::kClusterM, Gemm::kClusterN, 1)
    __launch_bounds__(Gemm::kThreads,
                      Gemm::kCtasOfSm) void multiply_in_clusters(__grid_constant__ typename Gemm::Params const params) {
  extern __shared__ __align__(1024) char memory[];
  Gemm::run(params, *reinterpret_cast<typename Gemm::SharedStorage*>(memory));
}

template <class Gemm>
auto entry_of() {
  if constexpr (Gemm::kClusterSize > 1) {
    return &multiply_in_clusters<Gemm>;
  } else {
    // A launch with clusters of one CTA places neighbouring CTAs differently, and they share fewer of their loads.
    return &multiply<Gemm>;
  }
}

}  // namespace jax_streamk::sm90
