// How the threads of a separate reduction share the slices of a sum. The planner uses it too.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_streamk {

// The number of threads that share an output, "runs", each adding every `runs`-th slice: a power of two, at most 32.
inline constexpr int32_t kMostRuns = 32;

// Runs within a warp, which are added by shuffles; those of further warps are added in shared memory.
constexpr int32_t lane_runs(int32_t runs) { return runs <= 4 ? runs : 2; }

constexpr int32_t reduction_threads(int32_t runs) { return std::max(runs / lane_runs(runs) * 32, 128); }

// Enough runs that a thread can load all its slices at once: up to eight if that leaves 24,000 threads or more, else
// six, or four if runs span warps (measured on an H200). With kMostRuns a thread may load any number.
inline int32_t reduction_runs(double vectors, int32_t slices) {
  int32_t runs = 1;
  while (runs < kMostRuns && runs * (runs > 4 ? 4 : vectors * runs < 24000 ? 6 : 8) < slices) runs *= 2;
  return runs;
}

}  // namespace jax_streamk
