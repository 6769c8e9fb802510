// How threads share the sum over the slices of a separate split-K.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_streamk {

// At most so many threads share an output: of t of them each adds every t-th slice.
inline constexpr int32_t kMostRuns = 32;

// Of these, so many are lanes of one warp, and as many warps of a block as that takes share the others.
constexpr int32_t lane_runs(int32_t runs) { return runs <= 4 ? runs : 2; }

// Threads of a block.
constexpr int32_t reducers(int32_t runs) { return std::max(runs / lane_runs(runs) * 32, 128); }

// So many that each has few slices, which it asks for at once: four; six if the threads are lanes of one warp; eight if
// there are also enough threads (benchmarks/results/reduction_h200_2026-11-24.md). More only of those that share with
// as many as there may be.
inline int32_t reduction_runs(double vectors, int32_t slices) {
  int32_t runs = 1;
  while (runs < kMostRuns && runs * (runs > 4 ? 4 : vectors * runs < 24000 ? 6 : 8) < slices) runs *= 2;
  return runs;
}

}  // namespace jax_streamk
