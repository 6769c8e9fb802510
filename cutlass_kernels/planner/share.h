// What decomposition.h gives to workers, in numbers: those of the busiest one.
#pragma once

#include <cmath>

#include "cutlass_kernels/planner/kernel_traits.h"

namespace jax_streamk {

// Counts are doubles that hold integers: products of them overflow 64 bits for problems that no kernel runs.
inline double floor_div(double x, double y) { return std::floor(x / y); }
inline double ceil_div(double x, double y) { return std::ceil(x / y); }
inline double remainder_of(double x, double y) { return x - floor_div(x, y) * y; }

inline bool streams(Schedule const& s) { return s.kind == ScheduleKind::kStreamK && s.max_sms != 1; }
inline double splits_of(Schedule const& s) { return s.kind == ScheduleKind::kSplitK ? s.splits : 1; }

// The MAC-iteration space of a problem on a kernel, and who works on it.
struct Grid {
  double wave_tiles = 0, tiles = 0;  // output tiles of one batch, of all
  double k_tiles = 0;                // MAC iterations of each
  double workers = 0;                // clusters, or threads, that work at once
};

struct Share {
  double busy;        // workers with work
  double pieces;      // of the busiest worker
  double iterations;  // of the busiest worker
  double peers;       // of a shared tile, at most; 1 where none is shared
  double slices = 1;  // that a separate reduction adds
  double launches = 1;
  double cut_tiles = 0;  // of all tiles, the share that Stream-K cuts, whose workers are at different k
};

// `separate`: a second kernel adds the slices.
Share share_of(Schedule const&, Grid const&, KernelInfo const&, KernelTraits const&, GemmProblem const&, bool separate);

}  // namespace jax_streamk
