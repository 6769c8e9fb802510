// Which warps of a CTA load, multiply and store, and when: one warp produces stages of operands by TMA, one to three
// warpgroups consume them; in some kernels two warps copy or transpose B in between. CUTLASS's collectives do the work,
// under our own tile scheduler.
//
// A short product mostly waits for its first load, and every instruction and parameter needed before that load comes
// from memory too. So two warps initialize the barriers while another finds out what to load; all else comes later.
#pragma once

#include <cstddef>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/launch/clusters.h"
#include "cutlass_kernels/sm90/mainloop.h"
#include "cutlass_kernels/sm90/stages.h"

namespace jax_streamk::sm90 {

template <class Mainloop, class Epilogue, class Scheduler, WarpSchedule kWarpSchedule>
struct GemmKernel {
  static constexpr bool kPingpong = kWarpSchedule == WarpSchedule::kPingpong,
                        kSingle = kWarpSchedule == WarpSchedule::kSingle;
  static constexpr int kStages = Mainloop::kStages;
  using TiledMma = typename Mainloop::TiledMma;
  using TileShape = typename Mainloop::TileShape;
  static constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kConsumers = kSingle ? 1 : kPingpong ? 2 : cute::size(TiledMma{}) / kWarpgroup;
  static constexpr int kConsumersPerTile = kPingpong ? 1 : kConsumers;
  static constexpr int kThreads = kSingle ? kWarpgroup + 32 : kWarpgroup * (1 + kConsumers),
                       kCtasPerSm = kSingle ? kSingles : 1;
  static constexpr int kClusterM = Scheduler::kClusterM, kClusterN = Scheduler::kClusterN,
                       kClusterSize = kClusterM * kClusterN;
  using Stage = typename Mainloop::Stage;
  static constexpr bool kRagged = Scheduler::kRagged;

  // In the order of use: each additional cache line of parameters that is read before the first load or product delays
  // it by 0.1 to 0.2 us.
  struct Params {
    bool straight;  // data-parallel, no epilogue, TMA stores D: accumulators are only converted and stored
    bool shares, has_early_bias, has_residual;  // cached from Scheduler and Epilogue
    bool promotes;                              // whether a main loop that can promote sums does so
    bool gathers;                               // whether one that can gather rows of B does so
    Loads loads;
    typename Scheduler::Params scheduler;
    cute::Shape<int, int, int, int> shape;  // m, n, k, batch of the kernel's own result
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
  };

  static constexpr bool kTransposes = Mainloop::kTransposes;
  struct Transposed {
    FullBarrier stages[kStages];
  };
  struct NotTransposed {};

  struct SharedStorage {
    typename Mainloop::TensorStorage mainloop;
    typename Epilogue::TensorStorage epilogue;
    FullBarrier full[kStages];
    EmptyBarrier empty[kStages];
    std::conditional_t<kTransposes, Transposed, NotTransposed> transposed;
    typename Scheduler::Table table;
  };

  static_assert(sizeof(SharedStorage) <= 227 << 10);

  static CUTLASS_DEVICE void run(Params const& params, SharedStorage& shared) {
    if constexpr (kRagged) static_assert(!kSingle && kStages + 3 <= Scheduler::Table::kTaken);
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == kInitializers || warp == kInitializers + 1) {
      if (cute::elect_one_sync()) initialize_barriers(shared, warp - kInitializers, gathers(params));
      __syncwarp();
      if constexpr (kClusterSize == 1 && !kSingle && !kTransposes)
        cutlass::arch::NamedBarrier::arrive(kWaiting, kReady);
    }
    if constexpr (kClusterSize > 1) cute::cluster_arrive_relaxed();
    if constexpr (kRagged) {
      if (warp == 0) {
        wait_for_primary();
        Scheduler::fill(params.scheduler, shared.table);
      }
      if (warp == kPrefetcher && cute::elect_one_sync()) Mainloop::prefetch_tma_descriptors(params.mainloop);
      __syncthreads();
      Scheduler::sort(params.scheduler, shared.table);
    }
    // ptxas moves code that a branch skips behind the branch. The producer comes first here, so that its code is in
    // line from the kernel's entry to its first load.
    if constexpr (kSingle) {
      if (warp < kProducer) return consume(params, shared, 0);
    } else {
      if (warp >= 4) {
        if constexpr (kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
        return consume(params, shared, warp / 4 - 1);
      }
    }
    // setmaxnreg is for a whole warpgroup. Idle CTAs execute it too, since their consumers wait for the registers.
    if constexpr (kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if constexpr (kTransposes) {
      if (warp >= kInitializers) return transpose(params, shared, warp - kInitializers);
    }
    if (Scheduler::kMayShare && params.shares) return produce<false>(params, shared, warp);
    produce<true>(params, shared, warp);
  }

 private:
  // Warp numbers: the one that loads, the first of two that initialize barriers, the one that prefetches tensor maps.
  // For wgmma, a consumer must be four warps starting at a multiple of four.
  static constexpr int kProducer = kSingle ? 4 : 0, kInitializers = kSingle ? 0 : 2, kPrefetcher = kSingle ? 4 : 1;

  // Accumulator registers of a consumer thread.
  static constexpr int kAccumulators =
      cute::size<0>(TileShape{}) * cute::size<1>(TileShape{}) / (kWarpgroup * kConsumersPerTile);

  // Whether consumers need more registers than the launch gives every thread. setmaxnreg takes time, so it is used only
  // if ptxas would spill without it.
  static constexpr bool kMovesRegisters =
      !kSingle && (!kPingpong || kAccumulators > (kRagged ? 48 : 72) || Mainloop::kAFromRegisters ||
                   (Mainloop::kPromotes && kAccumulators >= 32));
  static constexpr bool kLargeTile = kAccumulators >= 208;  // consumers need all registers that the producer can spare
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kLargeTile ? 240 : Mainloop::kMayGather ? 224 : 232;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kLargeTile ? 24 : Mainloop::kMayGather ? 56 : 40;

  static CUTLASS_DEVICE bool gathers(Params const& params) { return Mainloop::kMayGather && params.gathers; }

  // Named barriers. kMultiplies + w and kStores + w: consumer w of a pingpong kernel may multiply, or may store.
  // kStored: the threads of a warpgroup that store together.
  static constexpr uint32_t kReady = 0, kMultiplies = 1, kStores = kMultiplies + kConsumers,
                            kStored = kPingpong ? kStores + kConsumers : 1;

  // One warp initializes the full barriers, another the empty ones. The pointer to them is computed: with two pointers
  // ptxas would select between them for every stage.
  static CUTLASS_DEVICE void initialize_barriers(SharedStorage& shared, int kind, bool gathers) {
    // A stage is read by a tile's consumers in every CTA of the row and column that multicast into it.
    constexpr uint32_t kReaders = kConsumersPerTile * (kClusterM + kClusterN - 1);
    static_assert(sizeof(FullBarrier) == sizeof(EmptyBarrier) &&
                  offsetof(SharedStorage, empty) == offsetof(SharedStorage, full) + sizeof(shared.full));
    EmptyBarrier const* const barriers = static_cast<EmptyBarrier const*>(shared.full) + kind * kStages;
    uint32_t const loaders = gathers ? 1 + Mainloop::kGatherThreads : 1;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStages; ++i) barriers[i].init(kind == 0 ? loaders : kReaders);
    if constexpr (kTransposes) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = kind; i < kStages; i += 2) shared.transposed.stages[i].init(Mainloop::kTransposers);
    }
    cutlass::arch::fence_barrier_init();
  }

  // Waits until the barriers of this CTA, and of its cluster, are initialized. All consumers, the producer and warps
  // that transpose wait; initializers that are none of these only arrive.
  static constexpr uint32_t kWaiting = kConsumers * kWarpgroup + (kSingle ? 32 : 96);
  static CUTLASS_DEVICE void wait_for_barriers() {
    if constexpr (kClusterSize > 1) {
      cute::cluster_wait();
    } else {
      cutlass::arch::NamedBarrier::sync(kWaiting, kReady);
    }
  }

  // The role of the warps that are not consumers. kWhole: CTAs share no tile.
  template <bool kWhole>
  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& shared, int warp) {
    if (!kRagged && warp == kPrefetcher && cute::elect_one_sync()) Mainloop::prefetch_tma_descriptors(params.mainloop);
    if (!kSingle && warp > kProducer) {
      if constexpr (kClusterSize > 1) cute::cluster_wait();
      if (!kRagged && warp == 1) prefetch_residual(params, shared);
      if constexpr (kRagged) {
        if (warp == 1 && cute::elect_one_sync()) Scheduler::take_tiles(params.scheduler, shared.table);
      }
      if constexpr (Mainloop::kMayGather) {
        if (warp >= 2 && gathers(params)) gather(params, shared);
      }
      return;
    }
    Scheduler const scheduler(params.scheduler, shared.table);
    Stage stage(0, 1, 0);  // all stages are empty
    auto tile = [&] {
      if constexpr (kWhole && Scheduler::kHasList) return scheduler.listed();
      return scheduler.template tile<kWhole>(0);
    }();
    Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, tile);
    // Branch on the tile before waiting: otherwise ptxas would read its coordinates after the wait.
    if (!tile.is_valid()) {
      if constexpr (kClusterSize == 1) cutlass::arch::NamedBarrier::arrive(kWaiting, kReady);
      return;
    }
    wait_for_primary();
    wait_for_barriers();
    if (!cute::elect_one_sync()) return;
    int32_t held_back = params.loads.held_back.first;
    while (true) {
#ifdef JAX_STREAMK_RECORD
      record_work(tile.m, tile.n, tile.batch, tile.k_begin, tile.k_begin + tile.k_count);
#endif
      Mainloop::load(params.mainloop, params.loads, params.shape, tile, held_back, gathers(params), shared.full,
                     shared.empty, stage, shared.mainloop, [&] {
                       if constexpr (kRagged) shared.table.is_wanted.arrive();
                     });
      tile = scheduler.template tile<kWhole>(tile.ordinal + 1);
      if (!tile.is_valid()) break;
      held_back = params.loads.held_back.stages(tile.ordinal);
      Mainloop::locate(params.loads, params.scheduler.decomposition.k_tiles, tile);
    }
    // Consumers of other CTAs still arrive at this CTA's barriers: its shared memory must outlive that.
    if constexpr (kClusterSize > 1) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kStages; ++i, ++stage) shared.empty[stage.index()].wait(stage.phase());
    }
  }

  // The role of warps 2 and 3 of a product that gathers rows of B: they load these for the producer's tiles.
  static CUTLASS_DEVICE void gather(Params const& params, SharedStorage& shared) {
    static_assert(Mainloop::kGatherThreads == 64 && kRagged && kClusterSize == 1 && !kSingle);
    Scheduler const scheduler(params.scheduler, shared.table);
    auto tile = scheduler.tile(0);
    if (!tile.is_valid()) return;
    wait_for_primary();
    auto indices = Mainloop::indices_of(params.mainloop, tile);
    Stage stage(0, 1, 0);  // all stages are empty
    do {
      auto next = tile;
      auto next_indices = indices;
      Mainloop::gather(params.mainloop, tile, scheduler.is_outside(tile), indices, shared.full, shared.empty, stage,
                       shared.mainloop, [&] {
                         next = scheduler.tile(tile.ordinal + 1);
                         if (next.is_valid()) next_indices = Mainloop::indices_of(params.mainloop, next);
                       });
      tile = next, indices = next_indices;
    } while (tile.is_valid());
    cute::cp_async_wait<0>();
  }

  // The role of warps 2 and 3 where B is transposed: they do so in the stages that the producer loads.
  static CUTLASS_DEVICE void transpose(Params const& params, SharedStorage& shared, int warp) {
    static_assert(Mainloop::kTransposers == 2 && !kSingle);
    Scheduler const scheduler(params.scheduler, shared.table);
    BlockTransposer const transposer;
    Stage stage;
    auto tile = scheduler.tile(0);
    wait_for_barriers();
    for (; tile.is_valid(); tile = scheduler.tile(tile.ordinal + 1))
      Mainloop::transpose(shared.full, shared.transposed.stages, stage, tile.k_count, warp, transposer,
                          shared.mainloop);
  }

  // What consumers wait for.
  static CUTLASS_DEVICE FullBarrier* filled(SharedStorage& shared) {
    if constexpr (kTransposes) {
      return shared.transposed.stages;
    } else {
      return shared.full;
    }
  }

  static CUTLASS_DEVICE void prefetch_residual(Params const& params, SharedStorage const& shared) {
    if (!params.has_residual) return;
    wait_for_primary();
    Scheduler const scheduler(params.scheduler, shared.table);
    for (auto tile = scheduler.tile(0); tile.is_valid(); tile = scheduler.tile(tile.ordinal + 1))
      Epilogue::prefetch(params.epilogue, params.shape, tile.m, tile.n, tile.batch);
  }

  // Whether there is separate code for a straight product. With more accumulators, or A in registers, it would spill.
  static constexpr bool kHasStraightStore =
      !Epilogue::kGated && kAccumulators < (Mainloop::kAFromRegisters ? 128 : 160);

  // The first wgmma of a tile ignores its accumulators, so declaring them as written saves zeroing them. With more than
  // kMostUnset of them ptxas would spill.
  static constexpr int kRows = cute::size<0>(TileShape{}) / kConsumersPerTile;
  static constexpr int kMostUnset = kConsumers == 3 ? 0 : kRows == 64 ? 112 : 96;
  template <class Accumulators>
  static CUTLASS_DEVICE void leave_unset(Accumulators& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accumulators); ++i) asm volatile("" : "=f"(accumulators(i)));
  }

  // A consumer's first tile, found with as few parameters as possible.
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

  // Consumers of a pingpong kernel take turns at the tensor cores and at the store, in the order of their tiles.
  static CUTLASS_DEVICE void wait_for_turn(uint32_t barrier) {
    cutlass::arch::NamedBarrier::sync(kConsumers * kWarpgroup, barrier);
  }
  static CUTLASS_DEVICE void give_turn(uint32_t barrier) {
    cutlass::arch::NamedBarrier::arrive(kConsumers * kWarpgroup, barrier);
  }

  // A row of D that is outside every result.
  static constexpr int32_t kRowOutside = 1 << 24;

  // The role of a consumer warpgroup: multiplies its tiles, fixes up those that it shares, and stores them.
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& shared, int warpgroup) {
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
    if (warms_up) tile.m = kRowOutside / static_cast<int32_t>(cute::size<0>(TileShape{}));
    TiledMma tiled_mma;
    Epilogue epilogue(params.epilogue, shared.epilogue, thread, kStored + (kPingpong ? 0 : warpgroup));
    // Ends a tile's store. Returns whether this warpgroup is done.
    auto const end_store = [&] {
      if (kPingpong || tile.last) epilogue.finish();
      if (kPingpong && !tile.last) give_turn(kStores + other);
      return tile.last || warms_up;
    };
    while (warms_up || tile.is_valid()) {
      auto accumulators = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(TileShape{}));
      if constexpr (kAccumulators <= kMostUnset || kRagged) leave_unset(accumulators);
      auto const at = Scheduler::coordinate(tile);
      bool const is_zero = scheduler.is_outside(tile);
      auto biases = epilogue.template biases<decltype(accumulators)>(params.has_early_bias && !is_zero, params.shape,
                                                                     at, tiled_mma);

      if (kPingpong && tile.ordinal > 0) wait_for_turn(kMultiplies + warpgroup);
      auto sums = Mainloop::make_sums(accumulators);
      int const unreleased =
          Mainloop::multiply(filled(shared), shared.empty, stage, accumulators, sums, params.promotes, tile.k_count,
                             Scheduler::columns(tile), gathers(params), warpgroup, shared.mainloop);
      if constexpr (kRagged) {
        if (!warms_up) scheduler.look_ahead(tile);
      }
      if (kPingpong && !tile.last && !warms_up) give_turn(kMultiplies + other);
      Mainloop::finish(shared.empty, accumulators, sums, unreleased);

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
          epilogue.store(params.shape, at, biases, accumulators, tiled_mma);
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
};

template <class Operands, class Row>
class Sm90Kernel;
// Its Gemm.
template <class Operands, class Row>
struct Of : Sm90Kernel<Operands, Row>::Gemm {};

// ptxas (13.0) generates other code for kernels without "cutlass" in their names. All were measured with it.
template <class Operands, class Row>
__global__ __launch_bounds__(Of<Operands, Row>::kThreads, Of<Operands, Row>::kCtasPerSm) void sm90_cutlass_gemm(
    __grid_constant__ typename Of<Operands, Row>::Params const params) {
  extern __shared__ __align__(1024) char memory[];
  Of<Operands, Row>::run(params, *reinterpret_cast<typename Of<Operands, Row>::SharedStorage*>(memory));
}

// The cluster size is a compile-time constant: otherwise the kernel would read it from another line of constant memory.
template <class Operands, class Row>
__global__ __cluster_dims__(Row::kClusterM, Row::kClusterN, 1)
    __launch_bounds__(Of<Operands, Row>::kThreads, Of<Operands, Row>::kCtasPerSm) void sm90_cutlass_gemm_in_clusters(
        __grid_constant__ typename Of<Operands, Row>::Params const params) {
  extern __shared__ __align__(1024) char memory[];
  Of<Operands, Row>::run(params, *reinterpret_cast<typename Of<Operands, Row>::SharedStorage*>(memory));
}

template <class Operands, class Row>
auto entry_of() {
  if constexpr (Of<Operands, Row>::kClusterSize > 1) {
    return &sm90_cutlass_gemm_in_clusters<Operands, Row>;
  } else {
    // Not a launch with clusters of one CTA: these are placed on SMs so that neighbours share fewer of their loads.
    return &sm90_cutlass_gemm<Operands, Row>;
  }
}

}  // namespace jax_streamk::sm90
