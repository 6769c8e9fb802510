// How threads share the sum over the slices of a separate split-K.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_streamk {

// Threads that share an output, each with a run of slices, at most.
inline constexpr int32_t kMostRuns = 32;

// Of these, those that are lanes of one warp. As many warps of a block as that takes share the others.
constexpr int32_t lane_runs(int32_t runs) { return runs <= 4 ? runs : 2; }

// Threads of a block.
constexpr int32_t reducers(int32_t runs) { return std::max(runs / lane_runs(runs) * 32, 128); }

// So many that each asks for all its slices at once, as measured (benchmarks/results/reduction_h200_2026-11-24.md): four, six if they are lanes of
// one warp, eight where there are threads enough without.
inline int32_t reduction_runs(double vectors, int32_t slices) {
  int32_t runs = 1;
  while (runs < kMostRuns && runs * (runs > 4 ? 4 : vectors * runs < 24000 ? 6 : 8) < slices) runs *= 2;
  return runs;
}

}  // namespace jax_streamk
