// Which warps of a CTA load, multiply and store, and when: one warp produces stages of operands by TMA, one to three
// warpgroups consume them; in some kernels two warps copy or transpose B in between. Each role is a file of roles/.
//
// A short product mostly waits for its first load, and every instruction and parameter needed before that load comes
// from memory too. So two warps initialize the barriers while another finds out what to load; all else comes later.
#pragma once

#include <cstddef>

#include "cute/arch/cluster_sm90.hpp"
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
  using Accumulators = typename Mainloop::Accumulators;
  using TileShape = typename Mainloop::TileShape;
  static constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kConsumers = kSingle ? 1 : kPingpong ? 2 : Mainloop::kWarpgroups;
  static constexpr int kConsumersPerTile = kPingpong ? 1 : kConsumers;
  static constexpr bool kDecodes = Mainloop::OperandA::kDecodes;
  static constexpr int kThreads = kSingle ? kWarpgroup + 32 : kWarpgroup * (1 + kConsumers + kDecodes),
                       kCtasPerSm = kSingle ? kSingles : 1;
  using OperandB = typename Mainloop::OperandB;
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
    OwnShape shape;
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
  };

  // Stages that other warps prepare once they are loaded.
  static constexpr bool kTransposes = OperandB::kTransposes, kPrepares = kTransposes || kDecodes;
  struct Prepared {
    FullBarrier stages[kStages];
  };
  struct Nothing {};
  template <class OperandA, bool kHasTables>
  struct TablesOf {
    using type = Nothing;
  };
  template <class OperandA>
  struct TablesOf<OperandA, true> {
    using type = typename OperandA::Tables;
  };

  struct SharedStorage {
    typename Mainloop::TensorStorage mainloop;
    typename Epilogue::TensorStorage epilogue;
    FullBarrier full[kStages];
    EmptyBarrier empty[kStages];
    std::conditional_t<kPrepares, Prepared, Nothing> prepared;
    typename TablesOf<typename Mainloop::OperandA, kDecodes>::type tables;
    typename Mainloop::Sums::Storage sums;
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
      if constexpr (kDecodes) {
        if (warp >= 4 * (1 + kConsumers)) return decode(params, shared);
      }
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
  static constexpr int kAccumulators = Accumulators::kValues;

  // Whether consumers need more registers than the launch gives every thread. setmaxnreg takes time, so it is used only
  // if ptxas would spill without it.
  static constexpr bool kMovesRegisters =
      !kSingle && (!kPingpong || kAccumulators > (kRagged ? 48 : 72) || Mainloop::kAFromRegisters ||
                   (Mainloop::Sums::kPromotes && kAccumulators >= 32));
  static constexpr bool kLargeTile = kAccumulators >= 208;  // consumers need all registers that the producer can spare
  static constexpr int kConsumerRegisters = kDecodes             ? (OperandB::kGathers ? 160 : 168)
                                            : kConsumers == 3    ? 160
                                            : kLargeTile         ? 240
                                            : OperandB::kGathers ? 224
                                                                 : 232;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kLargeTile ? 24 : OperandB::kGathers ? 56 : 40;

  static CUTLASS_DEVICE bool gathers(Params const& params) { return OperandB::kGathers && params.gathers; }

  // Named barriers. kMultiplies + w and kStores + w: consumer w of a pingpong kernel may multiply, or may store.
  // kStored: the threads of a warpgroup that store together. kDecoding: those that decode. kScaling: consumers
  // that share scales.
  static constexpr uint32_t kReady = 0, kMultiplies = 1, kStores = kMultiplies + kConsumers,
                            kStored = kPingpong ? kStores + kConsumers : 1, kDecoding = 7, kScaling = 5;

  // One warp initializes the full barriers, another the empty ones. The pointer to them is computed: with two pointers
  // ptxas would select between them for every stage.
  static CUTLASS_DEVICE void initialize_barriers(SharedStorage& shared, int kind, bool gathers) {
    // A stage is read by a tile's consumers in every CTA of the row and column that multicast into it.
    constexpr uint32_t kReaders = kConsumersPerTile * (kClusterM + kClusterN - 1);
    static_assert(sizeof(FullBarrier) == sizeof(EmptyBarrier) &&
                  offsetof(SharedStorage, empty) == offsetof(SharedStorage, full) + sizeof(shared.full));
    EmptyBarrier const* const barriers = static_cast<EmptyBarrier const*>(shared.full) + kind * kStages;
    uint32_t loaders = 1;
    if constexpr (OperandB::kGathers) loaders += gathers ? OperandB::kThreads : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStages; ++i) barriers[i].init(kind == 0 ? loaders : kReaders);
    if constexpr (kPrepares) {
      constexpr int kWarps = kDecodes ? 4 : 2;
      CUTLASS_PRAGMA_UNROLL
      for (int i = kind; i < kStages; i += 2) shared.prepared.stages[i].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }

  // Waits until the barriers of this CTA, and of its cluster, are initialized. All consumers, the producer and warps
  // that prepare stages wait; initializers that are none of these only arrive.
  static constexpr uint32_t kWaiting = (kConsumers + kDecodes) * kWarpgroup + (kSingle ? 32 : 96);
  static CUTLASS_DEVICE void wait_for_barriers() {
    if constexpr (kClusterSize > 1) {
      cute::cluster_wait();
    } else {
      cutlass::arch::NamedBarrier::sync(kWaiting, kReady);
    }
  }

  // The role of the warps that are not consumers (roles/produce.h). kWhole: CTAs share no tile.
  template <bool kWhole>
  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& shared, int warp);
  static CUTLASS_DEVICE void prefetch_residual(Params const& params, SharedStorage const& shared);
  // Warps 2 and 3, of a product that gathers rows of B, or transposes it (roles/gather.h, roles/transpose.h).
  static CUTLASS_DEVICE void gather(Params const& params, SharedStorage& shared);
  static CUTLASS_DEVICE void transpose(Params const& params, SharedStorage& shared, int warp);
  // The last warpgroup, where A is decoded (roles/decode.h).
  static CUTLASS_DEVICE void decode(Params const& params, SharedStorage& shared);
  // A warpgroup that multiplies and stores (roles/consume.h).
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& shared, int warpgroup);

  // What consumers wait for.
  static CUTLASS_DEVICE FullBarrier* filled(SharedStorage& shared) {
    if constexpr (kPrepares) {
      return shared.prepared.stages;
    } else {
      return shared.full;
    }
  }

  // Whether there is separate code for a straight product. With more accumulators, or A in registers, it would spill.
  static constexpr bool kHasStraightStore =
      !Epilogue::kGated && kAccumulators < (Mainloop::kAFromRegisters ? 128 : 160);

  // The first wgmma of a tile ignores its accumulators, so declaring them as written saves zeroing them. With more than
  // kMostUnset of them ptxas would spill.
  static constexpr int kRows = TileShape::kM / kConsumersPerTile;
  static constexpr int kMostUnset = kConsumers == 3 ? 0 : kRows == 64 ? 112 : 96;
  static CUTLASS_DEVICE void leave_unset(Accumulators& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators; ++i) {
      if constexpr (std::is_same_v<typename Accumulators::Value, float>) {
        asm volatile("" : "=f"(accumulators(i)));
      } else {
        asm volatile("" : "=r"(accumulators(i)));
      }
    }
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
};

template <class Operands, class Row, Type kTypeA = Operands::kTypeA, Type kTypeB = Operands::kTypeB>
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

#include "cutlass_kernels/sm90/roles/consume.h"
#include "cutlass_kernels/sm90/roles/decode.h"
#include "cutlass_kernels/sm90/roles/gather.h"
#include "cutlass_kernels/sm90/roles/produce.h"
#include "cutlass_kernels/sm90/roles/transpose.h"
