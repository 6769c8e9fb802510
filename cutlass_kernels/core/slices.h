// Split-K with a second kernel that adds the slices (Reduction::kSeparate).
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

inline bool is_separate(Schedule const& s) {
  return s.kind == ScheduleKind::kSplitK && s.splits > 1 && s.reduction == Reduction::kSeparate;
}

// The schedule of each slice of a separate split-K.
inline Schedule data_parallel(Schedule s) {
  s.kind = ScheduleKind::kDataParallel;
  return s;
}

// The slices of K in a separate split-K: all of length `extent` except the last, which may be shorter.
// Each slice is a product of its own.
struct Slices {
  int32_t count = 1;
  int64_t extent = 0;
  bool rounded = false;  // whether their sum is rounded, to 16 bits

  // Slices of whole k-tiles: the longest that `splits` requires, and as few as that length requires.
  static Slices of(int64_t k, int32_t tile_k, int32_t splits) {
    int64_t const k_tiles = (k + tile_k - 1) / tile_k, of_slice = (k_tiles + splits - 1) / splits;
    return {static_cast<int32_t>((k_tiles + of_slice - 1) / of_slice), of_slice * tile_k};
  }
  // The problem with the slices as batch, slice s of batch b at s * p.batch + b: as many tiles and MAC iterations.
  GemmProblem as_batch(GemmProblem p) const {
    p.batch *= count;
    p.k = extent;
    return p;
  }
};

}  // namespace jax_streamk
