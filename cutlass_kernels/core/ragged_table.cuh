// The tiles of a ragged product, which every CTA works out from the group sizes that only the device knows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cutlass/cutlass.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Rows [begin, end) of a matrix.
struct Run {
  int32_t begin = 0, end = 0;

  CUTLASS_DEVICE int32_t rows() const { return end - begin; }
};

// In shared memory. With kRows the groups cut rows of the result, at most kTileRows to a tile, else K; every tile sums
// all of its K. Segments are the groups and, with kRows, the rows before the first and after the last.
template <bool kRows, int kTileRows, int kTileK>
struct RaggedTable {
  struct Params {
    int32_t const* group_sizes = nullptr;
    int32_t groups = 0, leading = 0;  // leading: whether the sizes begin with that of rows in no group
    int32_t extent = 0;               // of the dimension that groups cut
    // Along the result's other dimension (kRows), or of a group's result.
    int32_t tiles = 0, panel = 0;
    TileOrder order;
    uint32_t* taken = nullptr;  // how many tiles CTAs took after their first; null if they take them in turns

    // `across`: tiles along the dimension of the result that is not ragged, each of `tile` elements. `ctas`: that run
    // at once. `counter`: counter_bytes() of zeros.
    void set_up(GemmProblem const& p, Buffers const& buffers, TileOrder const& of_group, int32_t across, int32_t tile,
                int32_t ctas, void* counter) {
      group_sizes = static_cast<int32_t const*>(buffers.group_sizes);
      groups = static_cast<int32_t>(p.batch), leading = p.leading_rows;
      extent = static_cast<int32_t>(kRows ? p.m : p.k);
      order = of_group;
      tiles = kRows ? across : order.tiles_per_batch();
      // A wave of panels reads as many rows as columns.
      panel = std::max(1, static_cast<int32_t>(std::sqrt(static_cast<double>(ctas) * tile / kTileRows)));
      taken = static_cast<uint32_t*>(counter);
    }

    // An upper bound of the number of tiles.
    int64_t most_tiles() const {
      return kRows ? (extent / kTileRows + groups + 2) * int64_t{tiles} : int64_t{groups} * tiles;
    }
  };

  struct Tile {
    int32_t m = 0, n = 0, batch = 0;  // in tiles; with kRows m is along the other dimension, and n is 0
    Run run;                          // of the tile's rows of D, or the group's K
    int32_t columns = kTileRows;      // of a swapped kernel's own D: rows of a tile of this run, if it is not the last
  };

  int32_t begins[kMostGroups + 1];                    // of each group, then the end of the last
  int32_t tiles_before[kRows ? kMostGroups + 2 : 1];  // tiles of the result's rows before each segment's
  int32_t row_tiles;                                  // of all segments
  int32_t by_length[kRows ? 1 : kMostGroups];         // groups, those with the longest K first

  // Called by one warp, before any thread asks for tiles. Each lane has `each` sizes that follow one another.
  CUTLASS_DEVICE void fill(Params const& params) {
    int32_t const lane = threadIdx.x % 32, leading = params.leading, count = params.groups + leading,
                  each = (count + 31) / 32, first = lane * each, last = min(first + each, count);
    // Where runs end, by the index of their sizes; at first the sizes.
    int32_t* const ends = begins + 1 - leading;
#pragma unroll
    for (int turn = 0; turn <= kMostGroups / 32; ++turn) {
      int32_t const i = turn * 32 + lane;
      // Numbers that no groups can have must not make loads or stores leave the operands.
      if (i < count) ends[i] = min(max(__ldg(params.group_sizes + i), 0), params.extent);
    }
    if (lane == 0 && leading == 0) begins[0] = 0;
    __syncwarp();
    auto const plus = [&](int32_t x, int32_t y) {
      return static_cast<int32_t>(min(static_cast<uint32_t>(x) + y, static_cast<uint32_t>(params.extent)));
    };
    int32_t sum = 0;
    for (int32_t i = first; i < last; ++i) sum = plus(sum, ends[i]);
    int32_t end = sum_before(sum, plus);
    int32_t tiles = 0;
    for (int32_t i = first; i < last; ++i) {
      int32_t const begin = end;
      ends[i] = end = plus(begin, ends[i]);
      if (i >= leading) tiles += tiles_of(end - begin);
    }
    __syncwarp();
    if constexpr (!kRows) return;
    int32_t before = sum_before(tiles, [](int32_t x, int32_t y) { return x + y; });
    for (int32_t i = first; i < last; ++i) {
      int32_t const group = i - leading;
      if (group < 0) continue;
      tiles_before[group] = before;
      before += tiles_of(begins[group + 1] - begins[group]);
    }
    if (last < count || first >= count) return;
    // The lane with the last group goes on with the rows in none.
    tiles_before[params.groups] = before;
    tiles_before[params.groups + 1] = before += tiles_of(begins[0]);
    row_tiles = before + tiles_of(params.extent - begins[params.groups]);
  }

  // Without kRows, called by all threads after fill: with the longest tiles first, none of them is left when others are
  // done.
  CUTLASS_DEVICE void sort(Params const& params) {
    static_assert(!kRows);
    for (int32_t group = threadIdx.x; group < params.groups; group += blockDim.x) {
      int32_t const length = begins[group + 1] - begins[group];
      int32_t longer = 0, begin = begins[0];
      for (int32_t other = 0; other < params.groups; ++other) {
        int32_t const end = begins[other + 1], of_other = end - begin;
        longer += of_other > length || (of_other == length && other < group);
        begin = end;
      }
      by_length[longer] = group;
    }
    __syncthreads();
  }

  // Without kRows, of a tile of the group that is `rank`-th by length. One of no K has a k-tile of zeros.
  CUTLASS_DEVICE int32_t k_tiles(int32_t rank) const {
    int32_t const group = by_length[rank];
    return k_tiles(Run{begins[group], begins[group + 1]});
  }
  CUTLASS_DEVICE static int32_t k_tiles(Run const& run) { return max((run.rows() + kTileK - 1) / kTileK, 1); }

  CUTLASS_DEVICE int32_t all_tiles(Params const& params) const {
    return (kRows ? row_tiles : params.groups) * params.tiles;
  }

  // Of an index below all_tiles().
  CUTLASS_DEVICE Tile at(Params const& params, int32_t index) const {
    Tile tile;
    if constexpr (kRows) {
      int32_t const segment = segment_of(params, quotient(index, params.tiles)),
                    within = index - tiles_before[segment] * params.tiles;
      tile.run = rows_of(params, segment);
      tile.m = within, tile.columns = tile.run.rows();
      if (int32_t const rows = tiles_of(tile.run.rows()); rows > 1) {
        // Panels of about the same width, and tiles of equally many rows: CTAs that read the same matrix stay together.
        int32_t const panels = quotient(rows + params.panel - 1, params.panel),
                      width = quotient(rows + panels - 1, panels),
                      first = quotient(within, width * params.tiles) * width, in_panel = within - first * params.tiles,
                      last_width = min(width, rows - first);
        tile.m = quotient(in_panel, last_width);
        tile.columns = quotient(tile.run.rows() + rows - 1, rows);
        tile.run.begin += (first + in_panel - tile.m * last_width) * tile.columns;
        tile.run.end = min(tile.run.end, tile.run.begin + tile.columns);
      }
      tile.batch = segment;
    } else {
      auto const place = params.order.coordinate(index);
      tile.m = place.m, tile.n = place.n, tile.batch = by_length[place.batch];
      tile.run = {begins[tile.batch], begins[tile.batch + 1]};
    }
    return tile;
  }

  // Whether a tile's rows are in no group.
  CUTLASS_DEVICE static bool is_outside(Params const& params, Tile const& tile) {
    return kRows && tile.batch >= params.groups;
  }

  // The sum of a number over the lanes before this one.
  template <class Plus>
  CUTLASS_DEVICE static int32_t sum_before(int32_t own, Plus const& plus) {
    int32_t const lane = threadIdx.x % 32;
    int32_t sum = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      int32_t const other = __shfl_up_sync(~0u, sum, by);
      if (lane >= by) sum = plus(sum, other);
    }
    int32_t const before = __shfl_up_sync(~0u, sum, 1);
    return lane == 0 ? 0 : before;
  }

 private:
  CUTLASS_DEVICE static int32_t tiles_of(int32_t rows) { return (rows + kTileRows - 1) / kTileRows; }

  CUTLASS_DEVICE Run rows_of(Params const& params, int32_t segment) const {
    if (segment < params.groups) return {begins[segment], begins[segment + 1]};
    if (segment == params.groups) return {0, begins[0]};
    return {begins[params.groups], params.extent};
  }

  // The last segment that begins at or before a row of tiles, and so is not empty.
  CUTLASS_DEVICE int32_t segment_of(Params const& params, int32_t row_tile) const {
    int32_t low = 0, high = params.groups + 2;
    while (high - low > 1) {
      int32_t const middle = (low + high) / 2;
      if (tiles_before[middle] <= row_tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace jax_streamk
