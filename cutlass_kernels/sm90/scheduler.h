// The tile scheduler of the sm90 family: CUTLASS's warp-specialized kernels ask it which tile and which MAC iterations come next
// (decomposition.h answers) and hand it the accumulators of a shared tile to fix up.
//
// CUTLASS's own Stream-K scheduler folds the partials of a tile one after another, each peer waiting for the one before it. Here
// every peer draws a ticket when its accumulators are ready. All but the last store their partials at once and leave; the last
// adds them in the order of K. It waits only for peers that are storing already, never for a CTA that may not have started.
#pragma once

#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass_kernels/decomposition.h"

namespace jax_streamk::sm90 {

// kShares: whether CTAs may share tiles. Where none do, the code that finds the first tile is short: all that a kernel runs before its
// first load is read from memory first.
template <bool kShares>
struct SchedulerTag {};

template <class TileShape, class ClusterShape, bool kShares>
class Scheduler {
 public:
  static constexpr bool IsDynamicPersistent = false;
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  static constexpr int kClusterSize = kClusterM * kClusterN;
  static constexpr int kMaxPeers = 0xffff;  // of a tile: what an arrival word can count
  static constexpr int kTileValues = cute::size<0>(TileShape{}) * cute::size<1>(TileShape{});

  using Pipeline = cutlass::PipelineEmpty;
  using ThrottlePipeline = cutlass::PipelineEmpty;
  struct CLCResponse {};
  struct SharedStorage {
    CUTLASS_DEVICE typename Pipeline::SharedStorage pipeline() { return {}; }
    CUTLASS_DEVICE typename ThrottlePipeline::SharedStorage throttle_pipeline() { return {}; }
    CUTLASS_DEVICE CLCResponse* data() { return nullptr; }
  };

  // Tiles here are cluster tiles: the CTAs of a cluster share operands by multicast, so they do the same MAC iterations.
  struct Params {
    Decomposition decomposition;
    TileOrder order;
    bool atomic = false;
    uint32_t* arrivals = nullptr;  // [shared cluster tile][CTA of the cluster]; zero before the launch
    float* partials = nullptr;  // [slot, or shared cluster tile if atomic][CTA of the cluster][kTileValues]; zero if atomic
  };
  using Arguments = Params;

  // Consumers keep this in registers beside their accumulators, so it holds no more than the kernels ask for; fixup() asks the
  // decomposition again.
  struct WorkTileInfo {
    int32_t M_idx = 0, N_idx = 0, L_idx = 0;
    int32_t k_begin = 0;
    int32_t k_count = 0;  // 0: there is no more work
    int32_t ordinal = 0;
    bool last = false;
    bool finishes = true;  // whether this CTA runs the epilogue of the tile; known after fixup()

    CUTLASS_DEVICE bool is_valid() const { return k_count > 0; }
    CUTLASS_DEVICE int32_t reduction_subtile_idx() const { return -1; }
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape, TileShape, ClusterShape, cutlass::KernelHardwareInfo const&,
                                        Arguments const& arguments, void* = nullptr, uint32_t = 1, uint32_t = 1) {
    return arguments;
  }

  // The family lays out the workspace itself.
  template <class ProblemShape, class ElementAccumulator>
  static size_t get_workspace_size(Arguments const&, ProblemShape, cutlass::KernelHardwareInfo const&, uint32_t, uint32_t = 1,
                                   uint32_t = 1) {
    return 0;
  }

  CUTLASS_DEVICE explicit Scheduler(Params const& params) : params_(params) {}

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) const { return get_current_work(); }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return work_at(ordinal_); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { ordinal_ += count; }
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const& info) const {
    // At the end of a short kernel, code that nobody has run before is waited for.
    return cute::make_tuple(__builtin_expect(info.last, 1) ? WorkTileInfo{} : work_at(info.ordinal + 1), true);
  }

  template <class Pipeline, class PipelineState>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const& info, Pipeline&, PipelineState) const {
    return fetch_next_work(info);
  }

  template <class ProblemShape>
  CUTLASS_DEVICE static int32_t get_work_k_tile_count(WorkTileInfo const& info, ProblemShape, TileShape) {
    return info.k_count;
  }
  CUTLASS_DEVICE static int32_t get_work_k_tile_start(WorkTileInfo const& info) { return info.k_begin; }

  // Every consumer warpgroup has work: runs of MAC iterations are never empty, and there is no separate reduction unit.
  CUTLASS_DEVICE static bool valid_warpgroup_in_work_tile(WorkTileInfo const&) { return true; }
  CUTLASS_DEVICE static bool requires_separate_reduction(Params const&) { return false; }

  CUTLASS_DEVICE static bool compute_epilogue(WorkTileInfo const& info, Params const&) { return info.finishes; }

  // Called by all consumer threads with their accumulators of `info`'s run of iterations. Afterwards exactly one of the CTAs that
  // share the tile has info.finishes set, and its accumulators hold the whole sum.
  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(Params const& params, WorkTileInfo& info, Accumulators& accumulators,
                                   uint32_t warp_groups, uint32_t warp_group) {
    info.finishes = true;
    if constexpr (kShares) fixup_shared(params, info, accumulators, warp_groups, warp_group);
  }

 private:
  template <class Accumulators>
  CUTLASS_DEVICE static void fixup_shared(Params const& params, WorkTileInfo& info, Accumulators& accumulators,
                                          uint32_t warp_groups, uint32_t warp_group) {
    Decomposition const& decomposition = params.decomposition;
    if (decomposition.kind == ScheduleKind::kDataParallel) return;
    Work work;
    decomposition.work(worker(), info.ordinal, work);
    if (work.peers == 1) return;
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
    info.finishes = any(last, threads);

    if (!info.finishes) {
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
      return;
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
      return;
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
  }

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

  CUTLASS_DEVICE WorkTileInfo work_at(int32_t ordinal) const {
    WorkTileInfo info;
    Work work;
    Decomposition const& decomposition = params_.decomposition;
    if (kShares ? decomposition.work(worker(), ordinal, work) : decomposition.whole_tile(worker(), ordinal, work)) {
      auto const at = params_.order.coordinate(work.tile);
      info.M_idx = at.m * kClusterM + static_cast<int32_t>(blockIdx.x % kClusterM);
      info.N_idx = at.n * kClusterN + static_cast<int32_t>(blockIdx.y);
      info.L_idx = at.batch;
      info.k_begin = work.k_begin;
      info.k_count = work.k_count;
      info.ordinal = ordinal;
      info.last = work.last;
    }
    return info;
  }

  CUTLASS_DEVICE static int32_t worker() { return blockIdx.x / kClusterM; }

  Params const& params_;
  int32_t ordinal_ = 0;
};

}  // namespace jax_streamk::sm90

namespace cutlass::gemm::kernel::detail {

template <bool kShares, class TileShape, class ClusterShape, uint32_t kStages>
struct TileSchedulerSelector<jax_streamk::sm90::SchedulerTag<kShares>, arch::Sm90, TileShape, ClusterShape, kStages> {
  using Scheduler = jax_streamk::sm90::Scheduler<TileShape, ClusterShape, kShares>;
};

}  // namespace cutlass::gemm::kernel::detail
