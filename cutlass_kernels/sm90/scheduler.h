// The tile scheduler: which tile and which MAC iterations a CTA does next (decomposition.h).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/launch/clusters.h"
#include "cutlass_kernels/sm90/extents.h"
#include "cutlass_kernels/sm90/partials.h"

namespace jax_streamk::sm90 {

// kShares: CTAs may share tiles. kList: the parameters list each cluster's worker number, so that neighbours in the
// decomposition are on one GPC, and its first tile if none is shared, which is the shortest path to the first load.
template <class TileShape, class ClusterShape, bool kShares, bool kList>
class Scheduler {
 public:
  static constexpr int kClusterM = ClusterShape::kM, kClusterN = ClusterShape::kN;
  static constexpr int kClusterSize = kClusterM * kClusterN;
  static constexpr bool kMayShare = kShares, kHasList = kList, kRagged = false;
  static constexpr bool kHasIdle = has_idle(kClusterSize);
  static constexpr int kListed = kMostListed;
  static constexpr uint32_t kNone = ~0u;
  static constexpr int kTileValues = TileShape::kM * TileShape::kN;

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
  CUTLASS_DEVICE static TileAt coordinate(Tile const& tile) { return {tile.m, tile.n, tile.batch}; }
  CUTLASS_DEVICE static int32_t k_tiles_between(Tile const& tile, int32_t) { return tile.k_count; }
  CUTLASS_DEVICE static bool is_outside(Tile const&) { return false; }
  CUTLASS_DEVICE static bool is_part(Tile const&) { return false; }
  CUTLASS_DEVICE static int32_t columns(Tile const&) { return TileShape::kN; }

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

  // As fix_up(), of a tile's consumers.
  template <class Threads, class Accumulators>
  CUTLASS_DEVICE bool fixup(Threads const& threads, Tile const& tile, Accumulators& accumulators) const {
    if (!shares(params_)) return true;
    Decomposition const& decomposition = params_.decomposition;
    Work work;
    decomposition.work(worker(params_), tile.ordinal, work);
    if (work.peers == 1) return true;
    uint32_t const cta = blockIdx.x % kClusterM + blockIdx.y * kClusterM;
    auto const slot = [&](int32_t peer) {
      int32_t const at = params_.atomic ? work.tile : decomposition.slot(work.tile, peer);
      return params_.partials + (static_cast<int64_t>(at) * kClusterSize + cta) * kTileValues;
    };
    return fix_up(threads, {work.peer, work.peers, params_.arrivals + work.tile * kClusterSize + cta, params_.atomic},
                  slot, accumulators);
  }

 private:
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
