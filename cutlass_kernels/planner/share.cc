#include "cutlass_kernels/planner/share.h"

#include <algorithm>

#include "cutlass_kernels/core/decomposition.h"

namespace jax_streamk {
namespace {

// Stream-K cuts the tiles of the last, partial wave and of the full wave before it.
Share stream_share(Grid const& grid) {
  double const whole_waves = std::max(floor_div(grid.tiles, grid.workers) - 1, 0.0);
  double const cut_tiles = grid.tiles - whole_waves * grid.workers, cut = cut_tiles * grid.k_tiles;
  double const run = ceil_div(cut, std::min(grid.workers, cut));
  double const peers = run >= grid.k_tiles ? 2 : ceil_div(grid.k_tiles, run) + (remainder_of(grid.k_tiles, run) != 0);
  double const pieces = whole_waves + ceil_div(run, grid.k_tiles) + (remainder_of(run, grid.k_tiles) != 0);
  double const busy = std::min(grid.workers, grid.tiles * grid.k_tiles);
  return {busy, pieces, whole_waves * grid.k_tiles + run, peers, 1, 1, cut_tiles / grid.tiles};
}

// Slices have equal lengths. sm80 kernels launch a shorter last slice after the others.
Share slices_share(Grid const& grid, double splits, KernelInfo const& kernel, bool launches_apart,
                   GemmProblem const& p) {
  double const extent = ceil_div(grid.k_tiles, splits), slices = ceil_div(grid.k_tiles, extent);
  bool const apart = launches_apart && p.k < slices * extent * kernel.tile_k;
  double const pieces =
      ceil_div(grid.tiles * (slices - apart), grid.workers) + apart * ceil_div(grid.tiles, grid.workers);
  double const launches = launches_apart ? std::min<double>(p.batch * (1 + apart), slices) : 1;
  return {std::min(grid.workers, grid.tiles * slices), pieces, pieces * extent, 1, slices, launches};
}

// A worker's share of all k-tiles, if all work at once.
double mean_of(Grid const& grid) { return grid.tiles * grid.k_tiles / grid.workers; }

// The longest tiles have `parts`, which workers take like tiles.
Share cut_share(Grid const& grid, double parts) {
  double const part = grid.longest / parts, iterations = std::max(mean_of(grid), part);
  return {std::min(grid.workers, grid.tiles * parts), ceil_div(iterations, part), iterations, parts};
}

// Clusters of four or six reach all SMs in pairs of CTAs, other large ones, or single CTAs, not (launch/clusters.h).
double workers_of(Grid const& grid, double splits) {
  bool const in_pairs = (splits == 4 || splits == 6) && grid.tiles * splits > grid.workers;
  return grid.in_clusters > 0 && splits > 2 && !in_pairs ? grid.in_clusters : grid.workers;
}

}  // namespace

Share share_of(Schedule const& s, Grid const& grid, KernelInfo const& kernel, KernelTraits const& traits,
               GemmProblem const& p, bool separate) {
  if (streams(s) && grid.workers > 1 && remainder_of(grid.tiles, grid.workers) != 0) return stream_share(grid);
  double const splits = std::min(splits_of(s), grid.k_tiles);  // data-parallel is split-K in one
  if (separate) return slices_share(grid, splits, kernel, traits.family.slices_by_launch, p);
  // The first k_tiles % splits slices of a tile have one iteration more.
  double const base = floor_div(grid.k_tiles, splits), longer = grid.k_tiles - base * splits,
               workers = workers_of(grid, splits), pieces = ceil_div(grid.tiles * splits, workers);
  double const iterations = pieces * base + ceil_div(grid.tiles * longer, workers);
  if (grid.cuts_longest) {
    int32_t const parts = LongParts::of(static_cast<float>(grid.longest), static_cast<float>(mean_of(grid)));
    if (parts > 1) return cut_share(grid, parts);
  }
  return {std::min(workers, grid.tiles * splits), pieces, std::max(iterations, grid.longest), splits};
}

}  // namespace jax_streamk
