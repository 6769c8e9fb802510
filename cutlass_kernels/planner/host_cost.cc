#include "cutlass_kernels/planner/host_cost.h"

#include <algorithm>

namespace jax_streamk {

// The busiest thread's MAC iterations, pieces and shared partial tiles.
Cost host_cost(Workload const& l, Schedule const& s) {
  Machine const& machine = l.machine;
  Grid const& grid = l.grid;
  Share const share = share_of(s, grid, l.kernel, l.traits, l.problem, false);
  auto const iteration = [&](double rows, double columns) {
    return l.problem.k / grid.k_tiles *
           (machine.host_multiply_add_us * rows * columns +
            machine.host_pack_us * (rows * (l.gathered_rows > 0 ? 2 : 1) + columns));
  };
  // Tiles at the edge cost less. The busiest thread has its part of the full tiles or of all work, whichever is more;
  // under Stream-K all its iterations may be of full tiles.
  double const rows = std::min<double>(l.kernel.tile_m, l.rows), columns = std::min<double>(l.kernel.tile_n, l.columns);
  double const average_rows = l.rows / ceil_div(l.rows, l.kernel.tile_m),
               average_columns = l.columns / ceil_div(l.columns, l.kernel.tile_n);
  bool const cut = streams(s) && share.peers > 1;
  Cost cost;
  if (cut) {
    cost.work = iteration(rows, columns) * share.iterations;
  } else {
    double const full_tiles = l.problem.batch * floor_div(l.rows, rows) * floor_div(l.columns, columns);
    double const splits = std::min(splits_of(s), grid.k_tiles), base = floor_div(grid.k_tiles, splits);
    double const of_full = ceil_div(full_tiles * splits, grid.workers) * base +
                           ceil_div(full_tiles * (grid.k_tiles - base * splits), grid.workers);
    cost.work = std::max(iteration(rows, columns) * of_full,
                         iteration(average_rows, average_columns) * grid.tiles * grid.k_tiles / share.busy);
  }
  cost.work += share.pieces * (machine.host_piece_us + machine.host_row_us * average_rows +
                               machine.host_result_us * average_rows * average_columns);
  // Each piece of a split tile is stored once and added once. A Stream-K thread shares at most two tiles.
  if (share.peers > 1)
    cost.fix_up = machine.host_partial_us * rows * columns * (cut ? 2 + share.peers : 2 * share.pieces);
  cost.work += cost.fix_up;
  cost.launches = share.busy > 1 ? machine.host_wake_us : 1;
  cost.microseconds = cost.launches + cost.work;
  cost.waves = grid.tiles * splits_of(s) / grid.workers;
  cost.iterations = share.iterations;
  cost.peers = share.peers;
  return cost;
}

}  // namespace jax_streamk
