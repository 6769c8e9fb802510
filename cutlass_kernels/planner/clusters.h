// How many CTAs and clusters of them run at once on a GPU, and where.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Of SMs as H100s and H200s have them: GPCs, of 8 to 18 SMs each; the SMs of the smallest, which shares its way to L2
// with eight SMs apart that no cluster of more than two reaches. Measured
// (benchmarks/results/placement_h200_2026-11-25.md and apart_h200_2026-11-25.md).
inline constexpr int32_t kGpcs = 8, kSmallest = 8, kApart = 8;

// Of sm90 kernels with one consumer warpgroup an SM has so many CTAs; those of all others fill it.
inline constexpr int32_t kSingles = 4;

// A cluster stays on one GPC. Of 132 SMs of an H200 in GPCs of unequal size, clusters of two take all, larger ones 120
// (cudaOccupancyMaxActiveClusters): a persistent grid of more would begin its last clusters when the first have ended.
inline int32_t active_clusters(int32_t sms, int32_t ctas) {
  return std::max((ctas > 2 ? sms * 10 / 11 : sms) / ctas, 1);
}

// How many clusters a launch can list: no GPU of compute capability 9.0 has more SMs.
inline constexpr int32_t kMostListed = 144;

// The clusters [first, first + count) of a launch, which get no work.
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
// the smallest GPC, which shares its way to L2 with these, would then load for up to 11 CTAs of 32 where others load
// for 3, and takes up to a fifth longer. So clusters on the SMs apart are idle, as many as make all GPCs even.
inline Idle idle_clusters(int32_t working, int32_t ctas, int32_t sms) {
  if (!has_idle(ctas)) return {};
  int32_t const layer = std::max(sms / ctas, 1), full = working / layer, rest = working % layer;
  if (rest == 0 || full > 1) return {};  // a third layer is dealt out in another way
  int32_t const apart = std::clamp((rest - kGpcs * kSmallest / ctas) / kGpcs, 0, kApart / ctas);
  return {first_idle(working, ctas, sms), std::min(kApart / ctas - apart, layer - rest)};
}

constexpr uint8_t kIdle = 0xff;

// Numbers the clusters of a launch. The first `idle` have no work, and get kIdle; the others:
//
// kAsLaunched: in order.
// kByGpc: so that neighbours share a GPC, for L2 serves once what CTAs of a GPC ask for at the same time, unless it is
//   multicast. As measured, CTAs without clusters fill one GPC after the other and stay in order. Clusters go to all
//   GPCs in turn until the smallest is full, then to the others; pairs first go to the SMs apart, and come last here.
//   With which GPC a turn begins depends on earlier launches. So a GPC's later clusters have the same place in their
//   turns as its earlier ones, or the one before: they are numbered between the earlier ones of both places.
// kSpread: so that the first ones, which have one piece of work more than others, are as many of each GPC.
void number_clusters(ClusterOrder, int32_t clusters, int32_t idle, int32_t ctas, uint8_t* numbers);

}  // namespace jax_streamk
