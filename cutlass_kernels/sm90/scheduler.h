// The tile scheduler: which tile and which MAC iterations a CTA does next (decomposition.h), and the fix-up of tiles
// that several CTAs share.
//
// In CUTLASS's Stream-K scheduler each peer of a tile waits for the previous one. Here every peer draws a ticket when
// its accumulators are ready. All but the last store their partials and leave; the last adds them in the order of K. It
// waits only for peers that are already storing, never for a CTA that may not have started.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/planner/clusters.h"

namespace jax_streamk::sm90 {

// kShares: CTAs may share tiles. kList: the parameters list each cluster's worker number, so that neighbours in the
// decomposition are on one GPC, and its first tile if none is shared, which is the shortest path to the first load.
template <class TileShape, class ClusterShape, bool kShares, bool kList>
class Scheduler {
 public:
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  static constexpr int kClusterSize = kClusterM * kClusterN;
  static constexpr int kMaxPeers = 0xffff;  // of a tile: its arrival word counts them in 16 bits
  static constexpr bool kMayShare = kShares, kHasList = kList, kRagged = false;
  static constexpr bool kHasIdle = has_idle(kClusterSize);
  static constexpr int kListed = kMostListed;
  static constexpr uint32_t kNone = ~0u;
  static constexpr int kTileValues = cute::size<0>(TileShape{}) * cute::size<1>(TileShape{});

  // The decomposition is in cluster tiles: CTAs of a cluster multicast operands, so they do the same MAC iterations.
  struct Params {
    Decomposition decomposition;
    TileOrder order;
    bool atomic = false;
    uint32_t* arrivals = nullptr;  // [shared cluster tile][CTA of the cluster]; zero before the launch
    // [slot, or shared cluster tile if atomic][CTA of the cluster][kTileValues]; zero before the launch if atomic
    float* partials = nullptr;
    Idle idle;
    // 8 bits each for a cluster's first tile (m, n, batch) and its worker number; kNone if it is idle.
    uint32_t list[kHasList ? kListed : 1];

    // Returns how many clusters to launch.
    int32_t place(LaunchPolicy const& policy, int32_t sms) {
      idle = {first_idle(decomposition.workers, kClusterSize, sms), policy.idle_clusters};
      int32_t const clusters = decomposition.workers + idle.count;
      if constexpr (kHasList) {
        uint8_t numbers[kListed];
        number_clusters(policy.cluster_order, clusters, idle.count, kClusterSize, numbers);
        std::fill_n(list, kListed, kNone);
        for (int32_t cluster = idle.count; cluster < clusters; ++cluster) {
          auto const at = order.coordinate(numbers[cluster]);
          list[cluster] = at.m | at.n << 8 | at.batch << 16 | static_cast<uint32_t>(numbers[cluster]) << 24;
        }
      }
      return clusters;
    }
  };

  // Small, because consumers keep it in registers beside their accumulators; fixup() asks the decomposition again.
  struct Tile {
    int32_t m = 0, n = 0, batch = 0;  // in tiles of a CTA
    int32_t k_begin = 0;              // in k-tiles
    int32_t k_count = 0;              // 0: no more work
    int32_t ordinal = 0;              // among the tiles of this CTA
    bool last = false;                // whether it is this CTA's last, as far as Work::last says

    CUTLASS_DEVICE bool is_valid() const { return k_count > 0; }
  };

  // What ragged.h needs.
  struct Table {};
  CUTLASS_DEVICE Scheduler(Params const& params, Table const&) : params_(params) {}
  CUTLASS_DEVICE static auto coordinate(Tile const& tile) {
    return cute::make_coord(tile.m, tile.n, cute::_0{}, tile.batch);
  }
  CUTLASS_DEVICE static int32_t k_tiles_between(Tile const& tile, int32_t) { return tile.k_count; }
  CUTLASS_DEVICE static bool is_outside(Tile const&) { return false; }
  CUTLASS_DEVICE static int32_t columns(Tile const&) { return cute::size<1>(TileShape{}); }

  // Whether CTAs may share tiles.
  CUTLASS_HOST_DEVICE static bool shares(Params const& params) {
    return kShares && params.decomposition.kind != ScheduleKind::kDataParallel;
  }

  // Whether this CTA has no work at all.
  CUTLASS_DEVICE bool is_idle() const {
    if constexpr (!kHasIdle) return false;
    if constexpr (kHasList) return params_.list[cluster()] == kNone;
    return static_cast<uint32_t>(cluster() - params_.idle.first) < static_cast<uint32_t>(params_.idle.count);
  }

  // The first tile of this CTA, from the list; only if no tile is shared.
  CUTLASS_DEVICE Tile listed() const {
    Decomposition const& decomposition = params_.decomposition;
    uint32_t const at = params_.list[cluster()];
    Tile tile;
    tile.m = static_cast<int32_t>(at & 0xff) * kClusterM + static_cast<int32_t>(blockIdx.x % kClusterM);
    tile.n = static_cast<int32_t>(at >> 8 & 0xff) * kClusterN + static_cast<int32_t>(blockIdx.y);
    tile.batch = static_cast<int32_t>(at >> 16 & 0xff);
    tile.k_count = at == kNone ? 0 : decomposition.k_tiles;
    tile.last = static_cast<int32_t>(at >> 24) + decomposition.workers >= decomposition.tiles;
    return tile;
  }

  // The `ordinal`-th tile of this CTA. kWhole: no tile is shared.
  template <bool kWhole = false>
  CUTLASS_DEVICE Tile tile(int32_t ordinal) const {
    Tile tile;
    Work work;
    Decomposition const& decomposition = params_.decomposition;
    if (kShares && !kWhole ? decomposition.work(worker(params_), ordinal, work)
                           : decomposition.whole_tile(worker(params_), ordinal, work)) {
      auto const at = params_.order.coordinate(work.tile);
      tile.m = at.m * kClusterM + static_cast<int32_t>(blockIdx.x % kClusterM);
      tile.n = at.n * kClusterN + static_cast<int32_t>(blockIdx.y);
      tile.batch = at.batch;
      tile.k_begin = work.k_begin;
      tile.k_count = work.k_count;
      tile.ordinal = ordinal;
      tile.last = work.last;
    }
    return tile;
  }

  // Called by all consumer threads of a CTA with their accumulators of `tile`. Returns true to the one peer that runs
  // the epilogue; its accumulators then hold the whole sum.
  template <class Accumulators>
  CUTLASS_DEVICE static bool fixup(Params const& params, Tile const& tile, Accumulators& accumulators,
                                   uint32_t warp_groups, uint32_t warp_group) {
    if (!shares(params)) return true;
    Decomposition const& decomposition = params.decomposition;
    Work work;
    decomposition.work(worker(params), tile.ordinal, work);
    if (work.peers == 1) return true;
    constexpr int kValues = cute::size(Accumulators{});
    uint32_t const threads = warp_groups * cutlass::NumThreadsPerWarpGroup;
    uint32_t const thread =
        warp_group * cutlass::NumThreadsPerWarpGroup + threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    uint32_t const cta = blockIdx.x % kClusterM + blockIdx.y * kClusterM;
    // Partials are in register order, coalesced: value v of all threads, then value v + 1.
    auto const partial = [&](int32_t slot) {
      return params.partials + (static_cast<int64_t>(slot) * kClusterSize + cta) * kTileValues + thread;
    };
    uint32_t* const arrival = params.arrivals + work.tile * kClusterSize + cta;
    bool last = false;
    if (thread == 0) last = (draw_ticket(arrival) & kTickets) + 1 == static_cast<uint32_t>(work.peers);
    if (!any(last, threads)) {
      float* const to = partial(params.atomic ? work.tile : decomposition.slot(work.tile, work.peer));
      if (params.atomic) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) atomicAdd(to + v * threads, accumulators(v));
      } else {
#pragma unroll
        for (int v = 0; v < kValues; ++v) __stcg(to + v * threads, accumulators(v));
      }
      sync(threads);
      if (thread == 0) announce_partial(arrival);
      return false;
    }

    if (thread == 0)
      while (partials_announced(arrival) + 1 != static_cast<uint32_t>(work.peers)) {
      }
    sync(threads);
    if (params.atomic || work.peers == 2) {
      // One partial needs no order: a + b = b + a.
      float const* const from = partial(params.atomic ? work.tile : decomposition.slot(work.tile, 1 - work.peer));
#pragma unroll
      for (int v = 0; v < kValues; ++v) accumulators(v) += __ldcg(from + v * threads);
      return true;
    }
    // Several partials are added in the order of K, whichever peer is last. Its own goes through memory too, as there
    // are no registers for a second tile.
    float* const own = partial(decomposition.slot(work.tile, work.peer));
#pragma unroll
    for (int v = 0; v < kValues; ++v) __stcg(own + v * threads, accumulators(v));
    cute::clear(accumulators);
    for (int32_t peer = 0; peer < work.peers; ++peer) {
      float const* const from = partial(decomposition.slot(work.tile, peer));
#pragma unroll
      for (int v = 0; v < kValues; ++v) accumulators(v) += __ldcg(from + v * threads);
    }
    return true;
  }

 private:
  // An arrival word counts tickets drawn in its low half and partials stored in its high half.
  static constexpr uint32_t kTickets = 0xffff, kPartial = 0x10000;

  CUTLASS_DEVICE static uint32_t draw_ticket(uint32_t* arrival) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(arrival) : "memory");
    return before;
  }

  // Called by thread 0, between two barriers of the consumers: releases what they all stored before, and acquires what
  // they read after.
  CUTLASS_DEVICE static void announce_partial(uint32_t* arrival) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(arrival), "n"(kPartial) : "memory");
  }
  CUTLASS_DEVICE static uint32_t partials_announced(uint32_t* arrival) {
    uint32_t now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(now) : "l"(arrival) : "memory");
    return now / kPartial;
  }

  CUTLASS_DEVICE static void sync(uint32_t threads) {
    cutlass::arch::NamedBarrier::sync(threads, cutlass::arch::ReservedNamedBarriers::StreamkBarrier0);
  }

  // Whether `value` is true in any consumer thread. Called by all of them.
  CUTLASS_DEVICE static bool any(bool value, uint32_t threads) {
    uint32_t result;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.u32 in, %1, 0;\n"
        "barrier.cta.red.or.pred out, %2, %3, in;\n"
        "selp.u32 %0, 1, 0, out;\n"
        "}\n"
        : "=r"(result)
        : "r"(static_cast<uint32_t>(value)),
          "r"(static_cast<uint32_t>(cutlass::arch::ReservedNamedBarriers::StreamkBarrier0)), "r"(threads)
        : "memory");
    return result != 0;
  }

  CUTLASS_DEVICE static int32_t cluster() { return blockIdx.x / kClusterM; }
  static constexpr int32_t kNobody = 1 << 30;  // a worker number beyond those of every decomposition
  CUTLASS_DEVICE static int32_t worker(Params const& params) {
    int32_t at = cluster();
    asm volatile("" : "+r"(at));  // opaque, or the result would stay in a register during the main loop
    if constexpr (kHasList) return params.list[at] >> 24;
    if constexpr (!kHasIdle) return at;
    return at < params.idle.first ? at : at < params.idle.first + params.idle.count ? kNobody : at - params.idle.count;
  }

  Params const& params_;
};

}  // namespace jax_streamk::sm90
