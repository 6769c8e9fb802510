// How many CTAs and clusters of them run at once on a GPU, and where.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_streamk {

// Of sm90 kernels with one consumer warpgroup an SM has so many CTAs; those of all others fill it.
inline constexpr int32_t kSingles = 4;

// A cluster stays on one GPC. Of 132 SMs of an H200 in GPCs of unequal size, clusters of two take all, larger ones 120
// (cudaOccupancyMaxActiveClusters): a persistent grid of more would begin its last clusters when the first have ended.
inline int32_t active_clusters(int32_t sms, int32_t ctas) { return std::max((ctas > 2 ? sms * 10 / 11 : sms) / ctas, 1); }

// Numbers the clusters of a launch so that those which share a GPC follow one another: what its CTAs ask for at the same time L2 serves once,
// unless it is multicast. Measured on H100 and H200, whose eight GPCs have 8 to 18 SMs (benchmarks/results/placement_h200_2026-11-25.md):
//
// - CTAs without clusters fill one GPC after the other, and stay in order. Clusters go to all GPCs in turn, until the smallest is full, and
//   then to the others.
// - Which GPC a turn begins with depends on the launches before. So the later clusters of a GPC have the place in their turns that the earlier
//   ones have in theirs, or the one before: they are numbered between the earlier ones of both places.
// - Pairs first go to eight SMs that no larger cluster reaches. These come last.
inline void number_by_gpc(int32_t clusters, int32_t ctas, uint8_t* numbers) {
  constexpr int32_t kGpcs = 8, kSmallest = 8, kApart = 8;  // GPCs; SMs of the smallest, and of those that come last
  int32_t const apart = ctas == 2 ? kApart / ctas : 0, turns = ctas == 1 ? 0 : kSmallest / ctas, all = turns * kGpcs;
  int32_t next = 0;
  auto const add = [&](int32_t cluster) {
    if (cluster < clusters) numbers[cluster] = static_cast<uint8_t>(next++);
  };
  for (int32_t gpc = 0; gpc < kGpcs; ++gpc) {
    for (int32_t turn = 0; turn < turns; ++turn) add(apart + turn * kGpcs + gpc);
    for (int32_t turn = 0; turn < turns && gpc < kGpcs - 1; ++turn) add(apart + all + turn * (kGpcs - 1) + gpc);
  }
  for (int32_t cluster = apart + all + turns * (kGpcs - 1); cluster < clusters; ++cluster) add(cluster);
  for (int32_t cluster = 0; cluster < apart; ++cluster) add(cluster);
}

}  // namespace jax_streamk
