// How threads share the sum over the slices of a separate split-K.
#pragma once

#include <cstdint>

namespace jax_streamk {

// Threads of a block; those that share an output, at most, which are lanes of a warp.
inline constexpr int32_t kReducers = 128, kMostRuns = 16;
static_assert(kReducers % 32 == 0 && kMostRuns <= 32);

// Runs of slices that threads add at the same time, so that all loads of a small output are under way at once: until there are some
// hundred thousand threads, which keep the memory of any GPU so far busy, and while each has two slices.
inline int32_t reduction_runs(double vectors, int32_t slices) {
  int32_t runs = 1;
  while (runs < kMostRuns && runs * 4 <= slices && vectors * runs < (1 << 17)) runs *= 2;
  return runs;
}

}  // namespace jax_streamk
