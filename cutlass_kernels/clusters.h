// How many CTAs and clusters of them run at once on a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_streamk {

// Of sm90 kernels with one consumer warpgroup an SM has so many CTAs; those of all others fill it.
inline constexpr int32_t kSingles = 4;

// A cluster stays on one GPC. Of 132 SMs of an H200 in GPCs of unequal size, clusters of two take all, larger ones 120
// (cudaOccupancyMaxActiveClusters): a persistent grid of more would begin its last clusters when the first have ended.
inline int32_t active_clusters(int32_t sms, int32_t ctas) { return std::max((ctas > 2 ? sms * 10 / 11 : sms) / ctas, 1); }

}  // namespace jax_streamk
