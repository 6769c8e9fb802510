// Split-K whose slices a second kernel adds (Reduction::kSeparate).
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

inline bool is_separate(Schedule const& s) {
  return s.kind == ScheduleKind::kSplitK && s.splits > 1 && s.reduction == Reduction::kSeparate;
}

// What each slice of a separate split-K runs.
inline Schedule data_parallel(Schedule s) {
  s.kind = ScheduleKind::kDataParallel;
  return s;
}

// The slices of K that a separate split-K computes each on its own: `extent` long but for the last, which K may cut
// short.
struct Slices {
  int32_t count = 1;
  int64_t extent = 0;
  bool rounded = false;  // whether their sum is, to 16 bits

  // Whole k-tiles, so that as few slices as that takes, and at most `splits` of them.
  static Slices of(int64_t k, int32_t tile_k, int32_t splits) {
    int64_t const k_tiles = (k + tile_k - 1) / tile_k, of_slice = (k_tiles + splits - 1) / splits;
    return {static_cast<int32_t>((k_tiles + of_slice - 1) / of_slice), of_slice * tile_k};
  }
  // Of which slice s of batch b is batch s * p.batch + b: as many tiles and MAC iterations.
  GemmProblem as_batch(GemmProblem p) const {
    p.batch *= count;
    p.k = extent;
    return p;
  }
};

}  // namespace jax_streamk
