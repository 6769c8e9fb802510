// Split-K for the long ones of groups that cut K: which of their tiles several CTAs share.
//
// CTAs take tiles as they finish others, the longest first. That balances them unless a tile is much longer than a
// CTA's share of all work. Such a tile has parts (LongParts), which CTAs take like tiles. Those of a group are in the
// order of K, so that CTAs at work together read the same rows; with Stream-K's equal runs each reads rows of its own,
// which took several times as long.
#pragma once

#include <algorithm>

#include "cutlass/cutlass.h"
#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk::sm90 {

// In shared memory. The long tiles are those of the first ranks; a group's rank is its place by length.
template <class Tiles>
struct LongTiles {
  struct Part {
    int32_t tile;              // its index in the table
    int32_t number, of;        // along K
    int32_t k_begin, k_count;  // in k-tiles
  };

  int32_t units_before[kMostGroups + 1];  // parts of the tiles of all lower ranks
  int32_t ranks;                          // that are long

  // Called by one warp, after Tiles::sort().
  CUTLASS_DEVICE void fill(typename Tiles::Params const& params, Tiles const& table) {
    int32_t const lane = threadIdx.x % 32, each = (params.groups + 31) / 32, first = min(lane * each, params.groups),
                  last = min(first + each, params.groups);
    auto const plus = [](int32_t x, int32_t y) { return x + y; };
    int32_t sum = 0;
    for (int32_t rank = first; rank < last; ++rank) sum += table.k_tiles(rank);
    int32_t const all = __shfl_sync(~0u, Tiles::sum_before(sum, plus) + sum, 31);
    float const share = static_cast<float>(all) * static_cast<float>(params.tiles) / static_cast<float>(gridDim.x);
    auto const of_rank = [&](int32_t rank) {
      int32_t const parts = LongParts::of(static_cast<float>(table.k_tiles(rank)), share);
      return parts > 1 ? parts * params.tiles : 0;
    };
    if (of_rank(0) == 0) {
      if (lane == 0) ranks = 0, units_before[0] = 0;
      return;
    }
    int32_t units = 0, longs = 0;
    for (int32_t rank = first; rank < last; ++rank) units += of_rank(rank), longs += of_rank(rank) > 0;
    int32_t before = Tiles::sum_before(units, plus);
    longs += Tiles::sum_before(longs, plus);
    for (int32_t rank = first; rank < last; ++rank) units_before[rank] = before, before += of_rank(rank);
    if (lane == 31) ranks = longs, units_before[params.groups] = before;
  }

  CUTLASS_DEVICE int32_t units() const { return units_before[ranks]; }

  // Of an index below units().
  CUTLASS_DEVICE Part part(typename Tiles::Params const& params, Tiles const& table, int32_t unit) const {
    int32_t rank = 0, end = ranks;
    while (end - rank > 1) {
      int32_t const middle = (rank + end) / 2;
      (units_before[middle] <= unit ? rank : end) = middle;
    }
    int32_t const first = units_before[rank], of = quotient(units_before[rank + 1] - first, params.tiles),
                  number = quotient(unit - first, params.tiles), k_tiles = table.k_tiles(rank),
                  base = quotient(k_tiles, of);
    EvenRuns const runs{base, k_tiles - base * of};
    int32_t const k_begin = runs.begin(number);
    return {rank * params.tiles + unit - first - number * params.tiles, number, of, k_begin,
            runs.begin(number + 1) - k_begin};
  }
};

}  // namespace jax_streamk::sm90
