// The share of the busiest worker under a schedule, as decomposition.h cuts the work.
#pragma once

#include <cmath>

#include "cutlass_kernels/planner/kernel_traits.h"

namespace jax_streamk {

// Counts are doubles that hold integers: products of large extents overflow 64 bits.
inline double floor_div(double x, double y) { return std::floor(x / y); }
inline double ceil_div(double x, double y) { return std::ceil(x / y); }
inline double remainder_of(double x, double y) { return x - floor_div(x, y) * y; }

inline bool streams(Schedule const& s) { return s.kind == ScheduleKind::kStreamK && s.max_sms != 1; }
inline double splits_of(Schedule const& s) { return s.kind == ScheduleKind::kSplitK ? s.splits : 1; }

// The MAC-iteration space of a problem on a kernel, and its workers.
struct Grid {
  double wave_tiles = 0, tiles = 0;  // output tiles of one batch, of all batches
  double k_tiles = 0;                // MAC iterations of a tile
  double longest = 0;                // MAC iterations of the longest tile, where others are shorter
  bool cuts_longest = false;         // several workers share it (sm90/long_tiles.h)
  double workers = 0;                // clusters or threads that work at once
  double in_clusters = 0;            // of these, what the splits of a streamed B with scales reach; 0: all
};

struct Share {
  double busy;        // workers with work
  double pieces;      // of the busiest worker
  double iterations;  // of the busiest worker
  double peers;       // that share a tile, at most; 1 if none is shared
  double slices = 1;  // that a separate reduction adds
  double launches = 1;
  double cut_tiles = 0;  // the share of tiles that Stream-K cuts: their workers are at different k
};

// `separate`: a second kernel adds slices.
Share share_of(Schedule const&, Grid const&, KernelInfo const&, KernelTraits const&, GemmProblem const&, bool separate);

}  // namespace jax_streamk
