// Ragged products: the tiles of groups whose sizes only the device knows, and tensor maps of a run of rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/sm90/stages.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// A run of rows of a matrix, seen by TMA: rows at and after its end are not stored, and read as zeros, although the
// matrix has them. Instead of a tensor map for each run, one map has kMost rows and two more dimensions. A box of row i
// of the run [begin, end) is at row kMost - (end - begin) + i, so that the run ends where the map does. The address is
// then off by kMost - end rows. The third coordinate adds `end` rows; the fourth is kMost times 2^34 bytes less a row,
// which is kMost rows less, modulo 2^64. Triton's ragged descriptors (tools/ragged_tma.py) work likewise.
struct RowRun {
  static constexpr int32_t kMost = 1 << 30;
  int32_t begin = 0, end = 0;

  CUTLASS_DEVICE int32_t rows() const { return end - begin; }
  CUTLASS_DEVICE int32_t row(int32_t i) const { return kMost - rows() + i; }

  template <class Element>
  static CUresult encode(cute::TmaDescriptor& map, void const* matrix, int64_t columns, int64_t ld,
                         uint32_t box_columns, uint32_t box_rows, uint32_t row_bytes) {
    uint64_t const row = ld * sizeof(Element), any = INT32_MAX;
    return encode_tensor_map<Element, 4>(map, matrix, {uint64_t(columns), kMost, any, any},
                                         {row, row, (uint64_t{1} << 34) - row}, {box_columns, box_rows, 1, 1},
                                         row_bytes);
  }
  CUTLASS_DEVICE void load(cute::TmaDescriptor const& map, uint64_t& barrier, uint64_t hint, void* to, int32_t column,
                           int32_t i) const {
    cute::SM90_TMA_LOAD_4D::copy(&map, &barrier, hint, to, column, row(i), end, int32_t{kMost});
  }
  CUTLASS_DEVICE void store(cute::TmaDescriptor const& map, void const* from, int32_t column, int32_t i) const {
    cute::SM90_TMA_STORE_4D::copy(&map, from, column, row(i), end, int32_t{kMost});
  }
};

inline constexpr int32_t kMostGroups = 512;

// The tile scheduler of a ragged product, data-parallel. With kRows the groups cut rows of the result, at most
// kTileRows to a tile, else K. A counter hands whole tiles to CTAs as they finish others, so that those that read the
// same matrix do so at about the same time; or they take turns (counter_bytes).
template <bool kRows, int kTileRows, int kTileK>
class RaggedScheduler {
 public:
  static constexpr int kClusterM = 1, kClusterN = 1;
  static constexpr bool kMayShare = false, kHasList = false, kRagged = true;

  struct Params {
    Decomposition decomposition;  // of equal groups, for what the host asks
    int32_t const* group_sizes = nullptr;
    int32_t groups = 0, leading = 0;  // leading: whether the sizes begin with that of rows in no group
    int32_t extent = 0;               // of the dimension that groups cut
    // Along the result's other dimension (kRows), or of a group's result.
    int32_t tiles = 0, panel = 0;
    TileOrder order;
    uint32_t* taken = nullptr;  // how many tiles CTAs took after their first; null if they take them in turns

    // `across`: tiles along the dimension of the result that is not ragged, each of `tile` elements.
    void set_up(GemmProblem const& p, Buffers const& buffers, TileOrder const& of_group, int32_t across, int32_t tile,
                int32_t sms) {
      group_sizes = static_cast<int32_t const*>(buffers.group_sizes);
      groups = static_cast<int32_t>(p.batch), leading = p.leading_rows;
      extent = static_cast<int32_t>(kRows ? p.m : p.k);
      order = of_group;
      tiles = kRows ? across : order.tiles_per_batch();
      // A wave of panels reads as many rows as columns.
      panel = std::max(1, static_cast<int32_t>(std::sqrt(static_cast<double>(sms) * tile / kTileRows)));
    }

    // An upper bound of the number of tiles.
    int64_t most_tiles() const {
      return kRows ? (extent / kTileRows + groups + 2) * int64_t{tiles} : int64_t{groups} * tiles;
    }
  };

  // In shared memory. Segments are the groups and, with kRows, the rows before the first and after the last.
  struct Table {
    int32_t begins[kMostGroups + 1];                    // of each group, then the end of the last
    int32_t tiles_before[kRows ? kMostGroups + 2 : 1];  // tiles of the result's rows before each segment's
    int32_t row_tiles;                                  // of all segments
    int32_t by_length[kRows ? 1 : kMostGroups];         // groups, those with the longest K first
    // The tiles that this CTA took. No barrier says that a place is free again: since every tile fills a stage, those
    // in use are at most the stages and 3.
    static constexpr int kTaken = 16;
    int32_t indices[kTaken];
    FullBarrier is_taken[kTaken], is_wanted;
  };

  struct Tile {
    int32_t m = 0, n = 0, batch = 0;  // in tiles; n is 0 with kRows
    int32_t k_begin = 0, k_count = 0, ordinal = 0;
    bool last = false;
    RowRun run;        // of the tile's rows of D, or the group's K
    int32_t from = 0;  // the row of A that the tile's first row is
    int32_t columns = kTileRows;

    CUTLASS_DEVICE bool is_valid() const { return k_count > 0; }
  };

  CUTLASS_DEVICE RaggedScheduler(Params const& params, Table const& table) : params_(params), table_(table) {}

  // Called by one warp, before all others ask for tiles. Each lane has `each` sizes that follow one another.
  CUTLASS_DEVICE static void fill(Params const& params, Table& table) {
    int32_t const lane = threadIdx.x % 32, leading = params.leading, count = params.groups + leading,
                  each = (count + 31) / 32, first = lane * each, last = min(first + each, count);
    if (lane < Table::kTaken) table.is_taken[lane].init(1);
    if (lane == 0) table.is_wanted.init(1);
    // Where runs end, by the index of their sizes; at first the sizes.
    int32_t* const ends = table.begins + 1 - leading;
#pragma unroll
    for (int turn = 0; turn <= kMostGroups / 32; ++turn) {
      int32_t const i = turn * 32 + lane;
      // Numbers that no groups can have must not make loads or stores leave the operands.
      if (i < count) ends[i] = min(max(__ldg(params.group_sizes + i), 0), params.extent);
    }
    if (lane == 0 && leading == 0) table.begins[0] = 0;
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
      if (i >= leading) tiles += row_tiles(end - begin);
    }
    __syncwarp();
    if constexpr (!kRows) return;
    int32_t before = sum_before(tiles, [](int32_t x, int32_t y) { return x + y; });
    for (int32_t i = first; i < last; ++i) {
      int32_t const group = i - leading;
      if (group < 0) continue;
      table.tiles_before[group] = before;
      before += row_tiles(table.begins[group + 1] - table.begins[group]);
    }
    if (last < count || first >= count) return;
    // The lane with the last group goes on with the rows in none.
    table.tiles_before[params.groups] = before;
    table.tiles_before[params.groups + 1] = before += row_tiles(table.begins[0]);
    table.row_tiles = before + row_tiles(params.extent - table.begins[params.groups]);
  }

  // Called by all threads after fill: with the longest tiles first, none of them is left when others are done.
  CUTLASS_DEVICE static void sort(Params const& params, Table& table) {
    if constexpr (kRows) return;
    for (int32_t group = threadIdx.x; group < params.groups; group += blockDim.x) {
      int32_t const length = table.begins[group + 1] - table.begins[group];
      int32_t longer = 0, begin = table.begins[0];
      for (int32_t other = 0; other < params.groups; ++other) {
        int32_t const end = table.begins[other + 1], of_other = end - begin;
        longer += of_other > length || (of_other == length && other < group);
        begin = end;
      }
      table.by_length[longer] = group;
    }
    __syncthreads();
  }

  CUTLASS_HOST_DEVICE static bool shares(Params const&) { return false; }
  CUTLASS_DEVICE bool is_idle() const { return static_cast<int32_t>(blockIdx.x) >= all_tiles(); }

  template <bool kWhole = false>
  CUTLASS_DEVICE Tile tile(int32_t ordinal) const {
    return at(index_of(ordinal), ordinal);
  }

  // The role of one thread: takes the CTA's next tile when the producer is near the end of one. Otherwise the producer
  // would wait a microsecond for the counter, loading nothing.
  CUTLASS_DEVICE static void take_tiles(Params const& params, Table& table) {
    RaggedScheduler const scheduler(params, table);
    if (params.taken == nullptr || scheduler.is_idle()) return;
    for (int32_t taken = 0;; ++taken) {
      table.is_wanted.wait(taken % 2);
      auto const index = static_cast<int32_t>(gridDim.x + atomicAdd(params.taken, 1u));
      // Volatile, since CUTLASS's barriers do not tell the compiler that memory changes.
      const_cast<int32_t volatile&>(table.indices[taken % Table::kTaken]) = index;
      table.is_taken[taken % Table::kTaken].arrive();
      if (index >= scheduler.all_tiles()) return;
    }
  }

  // Called by consumers once they have multiplied the tile.
  CUTLASS_DEVICE void look_ahead(Tile& tile) const { tile.last = index_of(tile.ordinal + 1) >= all_tiles(); }

  CUTLASS_DEVICE Tile at(int32_t index, int32_t ordinal) const {
    Tile tile;
    if (index >= all_tiles()) return tile;
    tile.ordinal = ordinal;
    if constexpr (kRows) {
      int32_t const segment = segment_of(quotient(index, params_.tiles)),
                    within = index - table_.tiles_before[segment] * params_.tiles;
      tile.run = rows_of(params_, table_, segment);
      tile.m = within, tile.columns = tile.run.rows();
      if (int32_t const rows = row_tiles(tile.run.rows()); rows > 1) {
        // Panels of about the same width, and tiles of equally many rows: CTAs that read the same matrix stay together.
        int32_t const panels = quotient(rows + params_.panel - 1, params_.panel),
                      width = quotient(rows + panels - 1, panels),
                      first = quotient(within, width * params_.tiles) * width,
                      in_panel = within - first * params_.tiles, last_width = min(width, rows - first);
        tile.m = quotient(in_panel, last_width);
        tile.columns = quotient(tile.run.rows() + rows - 1, rows);
        tile.run.begin += (first + in_panel - tile.m * last_width) * tile.columns;
        tile.run.end = min(tile.run.end, tile.run.begin + tile.columns);
      }
      tile.k_count = params_.decomposition.k_tiles;
      tile.batch = segment, tile.from = tile.run.begin;
      // Beyond the operands, so that TMA reads zeros.
      if (is_outside(tile)) tile.batch = params_.groups, tile.from = params_.extent, tile.k_count = 1;
    } else {
      auto const place = params_.order.coordinate(index);
      tile.m = place.m, tile.n = place.n, tile.batch = table_.by_length[place.batch];
      tile.run = {table_.begins[tile.batch], table_.begins[tile.batch + 1]};
      tile.k_count = max((tile.run.rows() + kTileK - 1) / kTileK, 1);
    }
    return tile;
  }

  CUTLASS_DEVICE static auto coordinate(Tile const& tile) {
    return cute::make_tuple(tile.m, tile.n, cute::_0{}, tile.batch, tile.run);
  }

  // The k-tiles that the other consumer of a pingpong kernel multiplies before this one's next tile: those of
  // `ordinal`.
  CUTLASS_DEVICE int32_t k_tiles_between(Tile const&, int32_t ordinal) const {
    int32_t const index = index_of(ordinal);
    if constexpr (!kRows) return at(index, ordinal).k_count;
    if (index >= all_tiles()) return 0;
    return index < table_.tiles_before[params_.groups] * params_.tiles ? params_.decomposition.k_tiles : 1;
  }

  // Of the kernel's own result, to multiply.
  CUTLASS_DEVICE static int32_t columns(Tile const& tile) { return tile.columns; }

  // Whether a tile's rows are in no group.
  CUTLASS_DEVICE bool is_outside(Tile const& tile) const { return kRows && tile.batch >= params_.groups; }

  template <class Accumulators>
  CUTLASS_DEVICE static bool fixup(Params const&, Tile const&, Accumulators&, uint32_t, uint32_t) {
    return true;
  }

 private:
  CUTLASS_DEVICE static int32_t in_turns(int32_t ordinal) { return blockIdx.x + ordinal * gridDim.x; }

  CUTLASS_DEVICE int32_t index_of(int32_t ordinal) const {
    if (ordinal == 0 || params_.taken == nullptr || is_idle()) return in_turns(ordinal);
    int32_t const taken = ordinal - 1;
    table_.is_taken[taken % Table::kTaken].wait(taken / Table::kTaken % 2);
    return const_cast<int32_t const volatile&>(table_.indices[taken % Table::kTaken]);
  }

  CUTLASS_DEVICE int32_t all_tiles() const { return (kRows ? table_.row_tiles : params_.groups) * params_.tiles; }

  CUTLASS_DEVICE static int32_t row_tiles(int32_t rows) { return (rows + kTileRows - 1) / kTileRows; }

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

  CUTLASS_DEVICE static RowRun rows_of(Params const& params, Table const& table, int32_t segment) {
    if (segment < params.groups) return {table.begins[segment], table.begins[segment + 1]};
    if (segment == params.groups) return {0, table.begins[0]};
    return {table.begins[params.groups], params.extent};
  }

  // The last segment that begins at or before a row of tiles, and so is not empty.
  CUTLASS_DEVICE int32_t segment_of(int32_t row_tile) const {
    int32_t low = 0, high = params_.groups + 2;
    while (high - low > 1) {
      int32_t const middle = (low + high) / 2;
      if (table_.tiles_before[middle] <= row_tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  Params const& params_;
  Table const& table_;
};

}  // namespace jax_streamk::sm90
