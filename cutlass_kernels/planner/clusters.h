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

// Clusters that a launch can list: no GPU of compute capability 9.0 has more SMs.
inline constexpr int32_t kMostListed = 144;

// Clusters of a launch that get no work: so many of them, from the `first` on.
struct Idle {
  int32_t first = 0, count = 0;
};

// Whether a launch of clusters of so many CTAs may have some.
constexpr bool has_idle(int32_t ctas) { return ctas <= 2; }

// The first of them, if there are any, beside so many that work: they come first of those that share SMs with as many.
inline int32_t first_idle(int32_t working, int32_t ctas, int32_t sms) {
  int32_t const layer = std::max(sms / ctas, 1);
  return working / layer * layer;
}

// Which these are beside `working` ones. CTAs and pairs first go to the SMs apart, and so do the second CTAs of SMs.
// Where not all SMs have work, the smallest GPC and these would have up to 11 CTAs of 32 to load for, others 3, and
// takes up to a fifth longer. So clusters on the SMs apart are idle, but for as many as make all GPCs even.
inline Idle idle_clusters(int32_t working, int32_t ctas, int32_t sms) {
  if (!has_idle(ctas)) return {};
  int32_t const layer = std::max(sms / ctas, 1), full = working / layer, rest = working % layer;
  if (rest == 0 || full > 1) return {};  // where the third CTA of an SM goes is less simple
  int32_t const apart = std::clamp((rest - kGpcs * kSmallest / ctas) / kGpcs, 0, kApart / ctas);
  return {first_idle(working, ctas, sms), std::min(kApart / ctas - apart, layer - rest)};
}

constexpr uint8_t kIdle = 0xff;

// Numbers the clusters of a launch so that those which share a GPC follow one another: what its CTAs ask for at the
// same time L2 serves once, unless it is multicast. The first `idle` have no work, and get kIdle. As was measured:
//
// - CTAs without clusters fill one GPC after the other, and stay in order. Clusters go to all GPCs in turn, until the
// smallest is full, and
//   then to the others.
// - Which GPC a turn begins with depends on the launches before. So the later clusters of a GPC have the place in their
// turns that the earlier
//   ones have in theirs, or the one before: they are numbered between the earlier ones of both places.
// - Pairs first go to the SMs apart. These come last.
//
// Or, where the order is kSpread, so that the first of them are as many of each GPC: those with one piece of work more
// than others, where neighbours share nothing that other clusters do not need as well. Of kAsLaunched, as they come.
void number_clusters(ClusterOrder, int32_t clusters, int32_t idle, int32_t ctas, uint8_t* numbers);

}  // namespace jax_streamk
