// The tile scheduler of the sm90 family: the kernel asks it which tile and which MAC iterations come next (decomposition.h answers)
// and hands it the accumulators of a shared tile to fix up.
//
// CUTLASS's own Stream-K scheduler folds the partials of a tile one after another, each peer waiting for the one before it. Here
// every peer draws a ticket when its accumulators are ready. All but the last store their partials at once and leave; the last
// adds them in the order of K. It waits only for peers that are storing already, never for a CTA that may not have started.
#pragma once

#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass_kernels/decomposition.h"

namespace jax_streamk::sm90 {

// kShares: whether CTAs may share tiles. Where none do, the code that finds the first tile is short: all that a kernel runs before its
// first load is read from memory first.
template <class TileShape, class ClusterShape, bool kShares>
class Scheduler {
 public:
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  static constexpr int kClusterSize = kClusterM * kClusterN;
  static constexpr int kMaxPeers = 0xffff;  // of a tile: what an arrival word can count
  static constexpr int kTileValues = cute::size<0>(TileShape{}) * cute::size<1>(TileShape{});

  // Tiles here are cluster tiles: the CTAs of a cluster share operands by multicast, so they do the same MAC iterations.
  struct Params {
    Decomposition decomposition;
    TileOrder order;
    bool atomic = false;
    uint32_t* arrivals = nullptr;  // [shared cluster tile][CTA of the cluster]; zero before the launch
    float* partials = nullptr;  // [slot, or shared cluster tile if atomic][CTA of the cluster][kTileValues]; zero if atomic
  };

  // Consumers keep this in registers beside their accumulators, so it holds no more than the kernel asks for; fixup() asks the
  // decomposition again.
  struct Tile {
    int32_t m = 0, n = 0, batch = 0;  // of the CTA, in tiles of its own
    int32_t k_begin = 0;
    int32_t k_count = 0;  // 0: there is no more work
    int32_t ordinal = 0;
    bool last = false;

    CUTLASS_DEVICE bool is_valid() const { return k_count > 0; }
  };

  CUTLASS_DEVICE explicit Scheduler(Params const& params) : params_(params) {}

  // Whether CTAs may share tiles.
  CUTLASS_DEVICE static bool shares(Params const& params) {
    return kShares && params.decomposition.kind != ScheduleKind::kDataParallel;
  }

  // The `ordinal`-th of this CTA; kWhole: where none are shared.
  template <bool kWhole = false>
  CUTLASS_DEVICE Tile tile(int32_t ordinal) const {
    Tile tile;
    Work work;
    Decomposition const& decomposition = params_.decomposition;
    if (kShares && !kWhole ? decomposition.work(worker(), ordinal, work) : decomposition.whole_tile(worker(), ordinal, work)) {
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

  // Called by all consumer threads with their accumulators of `tile`'s run of iterations. Of the CTAs that share the tile it answers one
  // that it is to run the epilogue; that one's accumulators hold the whole sum.
  template <class Accumulators>
  CUTLASS_DEVICE static bool fixup(Params const& params, Tile const& tile, Accumulators& accumulators,
                                   uint32_t warp_groups, uint32_t warp_group) {
    if (!shares(params)) return true;
    Decomposition const& decomposition = params.decomposition;
    Work work;
    decomposition.work(worker(), tile.ordinal, work);
    if (work.peers == 1) return true;
    constexpr int kValues = cute::size(Accumulators{});
    uint32_t const threads = warp_groups * cutlass::NumThreadsPerWarpGroup;
    uint32_t const thread = warp_group * cutlass::NumThreadsPerWarpGroup + threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    uint32_t const cta = blockIdx.x % kClusterM + blockIdx.y * kClusterM;
    // Partials keep the order of the registers: value v of a thread lies beside value v of its neighbour.
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
      // a + b is b + a: one partial needs no order.
      float const* const from = partial(params.atomic ? work.tile : decomposition.slot(work.tile, 1 - work.peer));
#pragma unroll
      for (int v = 0; v < kValues; ++v) accumulators(v) += __ldcg(from + v * threads);
      return true;
    }
    // More partials are added in the order of K, whoever came last. Its own goes through memory too: there are no registers for
    // a second tile.
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

  // Thread 0 releases what all consumers stored before the barrier that precedes this, and acquires it for those that come after.
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

  // Whether `value` holds for any of the consumer threads, which all call this.
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
        : "r"(static_cast<uint32_t>(value)), "r"(static_cast<uint32_t>(cutlass::arch::ReservedNamedBarriers::StreamkBarrier0)),
          "r"(threads)
        : "memory");
    return result != 0;
  }

  CUTLASS_DEVICE static int32_t worker() { return blockIdx.x / kClusterM; }

  Params const& params_;
};

}  // namespace jax_streamk::sm90
