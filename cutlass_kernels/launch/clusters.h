// How many CTAs and clusters of them run at once on a GPU, and where.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// H100 and H200 SXM: GPCs of 8 to 18 SMs; the SMs of the smallest; SMs apart, which take no cluster of more than two
// CTAs and share the smallest GPC's way to L2. Facts of the hardware,
// found with benchmarks/placement.cu.
inline constexpr int32_t kGpcs = 8, kSmallest = 8, kApart = 8;

// CTAs per SM of sm90 kernels with one consumer warpgroup. CTAs of other kernels fill an SM.
inline constexpr int32_t kSingles = 4;
inline int32_t ctas_of_sm(KernelInfo const& info) { return info.warp_schedule == WarpSchedule::kSingle ? kSingles : 1; }

// Whether CTAs share the tiles of groups that are much longer along K than others (sm90/long_tiles.h).
inline bool cuts_long_tiles(KernelInfo const& info) {
  return info.ragged == Ragged::kK && info.warp_schedule == WarpSchedule::kCooperative;
}

// A cluster stays on one GPC. On 132 SMs in GPCs of unequal size, clusters of two take all, larger ones 120
// (cudaOccupancyMaxActiveClusters): more clusters in a persistent grid would begin only when the first have ended.
inline int32_t active_clusters(int32_t sms, int32_t ctas) {
  return std::max((ctas > 2 ? sms * 10 / 11 : sms) / ctas, 1);
}

// Clusters that a launch can list: no GPU of compute capability 9.0 has more SMs.
inline constexpr int32_t kMostListed = 144;

// The clusters [first, first + count) of a launch get no work.
struct Idle {
  int32_t first = 0, count = 0;
};

// Whether a launch of clusters of `ctas` CTAs may have idle ones.
constexpr bool has_idle(int32_t ctas) { return ctas <= 2; }

// A layer of clusters is one per SM, or per pair. Idle clusters are the first ones of the last, partial layer.
inline int32_t first_idle(int32_t working, int32_t ctas, int32_t sms) {
  int32_t const layer = std::max(sms / ctas, 1);
  return working / layer * layer;
}

// The idle clusters beside `working` ones. The first CTAs or pairs of a layer go to the SMs apart. In a partial layer
// the smallest GPC's way to L2 would serve up to 11 of 32 CTAs, those of other GPCs 3, which takes up to a fifth
// longer. So clusters on the SMs apart stay idle until all GPCs are even.
inline Idle idle_clusters(int32_t working, int32_t ctas, int32_t sms) {
  if (!has_idle(ctas)) return {};
  int32_t const layer = std::max(sms / ctas, 1), full = working / layer, rest = working % layer;
  if (rest == 0 || full > 1) return {};  // a third layer is dealt out in another way
  int32_t const apart = std::clamp((rest - kGpcs * kSmallest / ctas) / kGpcs, 0, kApart / ctas);
  return {first_idle(working, ctas, sms), std::min(kApart / ctas - apart, layer - rest)};
}

constexpr uint8_t kIdle = 0xff;

// Numbers the clusters of a launch. The first `idle` have no work and get kIdle. The others:
//
// kAsLaunched: in order.
// kByGpc: neighbours share a GPC, because L2 serves once what CTAs of a GPC request together, unless it is multicast.
//   CTAs without clusters fill one GPC after the other (measured) and stay in order. Clusters go to all GPCs in turn
//   until the smallest is full, then to the others. Pairs go to the SMs apart first, which are numbered last.
//   The GPC with which a turn begins depends on earlier launches. A GPC's later clusters therefore have the same place
//   in their turns as its earlier ones, or the place before, and are numbered between those of both places.
// kSpread: the first ones, which have one piece of work more, are spread evenly over GPCs.
void number_clusters(ClusterOrder, int32_t clusters, int32_t idle, int32_t ctas, uint8_t* numbers);

}  // namespace jax_streamk
