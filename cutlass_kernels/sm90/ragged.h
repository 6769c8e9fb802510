// Ragged products: the tiles of groups whose sizes only the device knows, and tensor maps of a run of rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/core/gemm.h"
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

// The tile scheduler of a ragged product, data-parallel: CTAs take whole tiles in turns. With kRows the groups cut rows
// of the result, kTileRows to a tile, else K.
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
  };

  struct Tile {
    int32_t m = 0, n = 0, batch = 0;  // in tiles; n is 0 with kRows
    int32_t k_begin = 0, k_count = 0, ordinal = 0;
    bool last = false;
    RowRun run;        // of the rows of D from the tile's first to the group's last, or the group's K
    int32_t from = 0;  // the row of A that the tile's first row is
    int32_t columns = kTileRows;

    CUTLASS_DEVICE bool is_valid() const { return k_count > 0; }
  };

  CUTLASS_DEVICE RaggedScheduler(Params const& params, Table const& table) : params_(params), table_(table) {}

  // Called by one warp, before all others ask for tiles.
  CUTLASS_DEVICE static void fill(Params const& params, Table& table) {
    constexpr int kTurns = kMostGroups / 32 + 1;
    int32_t const lane = threadIdx.x % 32, count = params.groups + params.leading;
    int32_t sizes[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      int32_t const i = turn * 32 + lane;
      // Numbers that no groups can have must not make loads or stores leave the operands.
      sizes[turn] = i < count ? min(max(__ldg(params.group_sizes + i), 0), params.extent) : 0;
    }
    int32_t end = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn * 32 >= count) break;
      int64_t const size = end_of_run(sizes[turn], end, params.extent);
      int32_t const group = turn * 32 + lane - params.leading;
      if (group >= -1 && group < params.groups) table.begins[group + 1] = static_cast<int32_t>(size);
      end = __shfl_sync(~0u, static_cast<int32_t>(size), 31);
    }
    if (lane == 0 && params.leading == 0) table.begins[0] = 0;
    __syncwarp();
    if constexpr (!kRows) return;
    int32_t before = 0;
    int32_t const segments = params.groups + 2;
    for (int32_t first = 0; first < segments; first += 32) {
      int32_t const segment = first + lane;
      RowRun const run = segment < segments ? rows_of(params, table, segment) : RowRun{};
      int32_t sum = (run.rows() + kTileRows - 1) / kTileRows;
      int32_t const own = sum;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        int32_t const other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
      }
      if (segment < segments) table.tiles_before[segment] = before + sum - own;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) table.row_tiles = before;
  }

  CUTLASS_HOST_DEVICE static bool shares(Params const&) { return false; }
  CUTLASS_DEVICE bool is_idle() const { return static_cast<int32_t>(blockIdx.x) >= all_tiles(); }

  template <bool kWhole = false>
  CUTLASS_DEVICE Tile tile(int32_t ordinal) const {
    Tile tile;
    int32_t const all = all_tiles(), index = blockIdx.x + ordinal * gridDim.x;
    if (index >= all) return tile;
    tile.ordinal = ordinal;
    tile.last = index + static_cast<int32_t>(gridDim.x) >= all;
    if constexpr (kRows) {
      int32_t const of_panel = params_.panel * params_.tiles, panel = quotient(index, of_panel),
                    within = index - panel * of_panel, first = panel * params_.panel,
                    width = min(params_.panel, table_.row_tiles - first);
      tile.m = quotient(within, width);
      int32_t const row_tile = first + within - tile.m * width, segment = segment_of(row_tile);
      tile.run = rows_of(params_, table_, segment);
      if (tile.run.rows() <= kTileRows) tile.columns = tile.run.rows();
      tile.run.begin += (row_tile - table_.tiles_before[segment]) * kTileRows;
      tile.k_count = params_.decomposition.k_tiles;
      tile.batch = segment, tile.from = tile.run.begin;
      // Beyond the operands, so that TMA reads zeros.
      if (is_outside(tile)) tile.batch = params_.groups, tile.from = params_.extent, tile.k_count = 1;
    } else {
      auto const at = params_.order.coordinate(index);
      tile.m = at.m, tile.n = at.n, tile.batch = at.batch;
      tile.run = {table_.begins[at.batch], table_.begins[at.batch + 1]};
      tile.k_count = max((tile.run.rows() + kTileK - 1) / kTileK, 1);
    }
    return tile;
  }

  CUTLASS_DEVICE static auto coordinate(Tile const& tile) {
    return cute::make_tuple(tile.m, tile.n, cute::_0{}, tile.batch, tile.run);
  }

  // The k-tiles that the other consumer of a pingpong kernel multiplies before this one's next tile: those of
  // `ordinal`.
  CUTLASS_DEVICE int32_t k_tiles_between(Tile const&, int32_t ordinal) const { return tile(ordinal).k_count; }

  // Of the kernel's own result, to multiply: all where a group has more tiles. These read the same of A at the same
  // time, once from memory for all, as long as none is faster than the others.
  CUTLASS_DEVICE static int32_t columns(Tile const& tile) { return tile.columns; }

  // Whether a tile's rows are in no group.
  CUTLASS_DEVICE bool is_outside(Tile const& tile) const { return kRows && tile.batch >= params_.groups; }

  template <class Accumulators>
  CUTLASS_DEVICE static bool fixup(Params const&, Tile const&, Accumulators&, uint32_t, uint32_t) {
    return true;
  }

 private:
  CUTLASS_DEVICE int32_t all_tiles() const { return (kRows ? table_.row_tiles : params_.groups) * params_.tiles; }

  // Where a lane's run ends: the sum of its and earlier lanes' sizes after `begin`, at most `extent`.
  CUTLASS_DEVICE static int64_t end_of_run(int32_t size, int32_t begin, int32_t extent) {
    int64_t sum = size;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      int64_t const other = __shfl_up_sync(~0u, sum, by);
      if (static_cast<int32_t>(threadIdx.x % 32) >= by) sum += other;
    }
    return min(begin + sum, int64_t{extent});
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
