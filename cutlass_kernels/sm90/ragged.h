// Ragged products: which CTA has which tile, and tensor maps of a run of rows.
#pragma once

#include <cuda_runtime.h>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/core/ragged_table.cuh"
#include "cutlass_kernels/sm90/extents.h"
#include "cutlass_kernels/sm90/long_tiles.h"
#include "cutlass_kernels/sm90/partials.h"
#include "cutlass_kernels/sm90/stages.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// A run of rows of a matrix, seen by TMA: rows at and after its end are not stored, and read as zeros, although the
// matrix has them. Instead of a tensor map for each run, one map has kMost rows and two more dimensions. A box of row i
// of the run [begin, end) is at row kMost - (end - begin) + i, so that the run ends where the map does. The address is
// then off by kMost - end rows. The third coordinate adds `end` rows; the fourth is kMost times 2^34 bytes less a row,
// which is kMost rows less, modulo 2^64. Triton's ragged descriptors (tools/ragged_tma.py) work likewise.
struct RowRun : Run {
  static constexpr int32_t kMost = 1 << 30;

  CUTLASS_DEVICE explicit RowRun(Run const& run) : Run(run) {}
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

// A tile, and the run that its rows or its K belong to.
struct RunAt : TileAt {
  RowRun run;
};

// The tile scheduler of a ragged product. A counter hands whole tiles to CTAs as they finish others, so that those that
// read the same matrix do so at about the same time; or they take turns (counter_bytes). kMayCut: parts of long tiles
// come before whole tiles.
template <class TileShape, bool kRows, bool kMayCut>
class RaggedScheduler {
  static constexpr int kTileM = TileShape::kM, kTileN = TileShape::kN, kTileK = TileShape::kK;

 public:
  static constexpr int kClusterM = 1, kClusterN = 1;
  static constexpr bool kMayShare = false, kHasList = false, kRagged = true;

  using Tiles = RaggedTable<kRows, kRows ? kTileN : kTileM, kTileK>;
  using Long = LongTiles<Tiles>;

  struct Params : Tiles::Params {
    Decomposition decomposition;   // of equal groups, for what the host asks
    uint32_t* arrivals = nullptr;  // [long tile]; zero before the launch; null if no tile can be long
    float* partials = nullptr;     // [part of a long tile][value of a tile]
  };

  struct Table : Tiles {
    struct None {};
    std::conditional_t<kMayCut, Long, None> longs;
    // The tiles that this CTA took. No barrier says that a place is free again: since every tile fills a stage, those
    // in use are at most the stages and 3.
    static constexpr int kTaken = 16;
    int32_t indices[kTaken];
    FullBarrier is_taken[kTaken], is_wanted;
  };

  struct Tile : Tiles::Tile {
    int32_t k_begin = 0, k_count = 0, ordinal = 0;
    bool last = false;
    int32_t from = 0;  // the row of A that the tile's first row is

    CUTLASS_DEVICE bool is_valid() const { return k_count > 0; }
  };

  CUTLASS_DEVICE RaggedScheduler(Params const& params, Table const& table) : params_(params), table_(table) {}

  // Called by one warp, before all others ask for tiles.
  CUTLASS_DEVICE static void fill(Params const& params, Table& table) {
    int32_t const lane = threadIdx.x % 32;
    if (lane < Table::kTaken) table.is_taken[lane].init(1);
    if (lane == 0) table.is_wanted.init(1);
    table.fill(params);
  }

  // Called by all threads after that.
  CUTLASS_DEVICE static void sort(Params const& params, Table& table) {
    if constexpr (!kRows) table.sort(params);
    if constexpr (kMayCut) {
      if (params.arrivals == nullptr) return;
      if (threadIdx.x < 32) table.longs.fill(params, table);
      __syncthreads();
    }
  }

  CUTLASS_HOST_DEVICE static bool shares(Params const&) { return false; }
  CUTLASS_DEVICE bool is_idle() const { return static_cast<int32_t>(blockIdx.x) >= all_tiles(); }

  template <bool kWhole = false>
  CUTLASS_DEVICE Tile tile(int32_t ordinal) const {
    return tile_at(index_of(ordinal), ordinal);
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

  CUTLASS_DEVICE static auto coordinate(Tile const& tile) {
    return RunAt{{tile.m, tile.n, tile.batch}, RowRun(tile.run)};
  }

  // The k-tiles that the other consumer of a pingpong kernel multiplies before this one's next tile: those of
  // `ordinal`.
  CUTLASS_DEVICE int32_t k_tiles_between(Tile const&, int32_t ordinal) const {
    int32_t const index = index_of(ordinal);
    if constexpr (!kRows) return tile_at(index, ordinal).k_count;
    if (index >= all_tiles()) return 0;
    return index < table_.tiles_before[params_.groups] * params_.tiles ? params_.decomposition.k_tiles : 1;
  }

  // Of the kernel's own result, to multiply.
  CUTLASS_DEVICE static int32_t columns(Tile const& tile) { return tile.columns; }

  // Whether a tile's rows are in no group.
  CUTLASS_DEVICE bool is_outside(Tile const& tile) const { return Table::is_outside(params_, tile); }

  // Whether a tile's sums are 0: no group has its rows, or its group has no K.
  CUTLASS_DEVICE bool has_no_products(Tile const& tile) const {
    if constexpr (kRows) return is_outside(tile);
    return tile.run.rows() == 0;
  }

  CUTLASS_DEVICE bool is_part(Tile const& tile) const { return may_have_parts() && index_of(tile.ordinal) < parts(); }

  // As fix_up(), of a tile's consumers.
  template <class Threads, class Accumulators>
  CUTLASS_DEVICE bool fixup(Threads const& threads, Tile const& tile, Accumulators& accumulators) const {
    if constexpr (kMayCut) {
      int32_t const index = index_of(tile.ordinal);
      if (!may_have_parts() || index >= parts()) return true;
      auto const part = table_.longs.part(params_, table_, index);
      float* const first = params_.partials + int64_t{index - part.number * params_.tiles} * (kTileM * kTileN);
      auto const slot = [&](int32_t peer) { return first + int64_t{peer * params_.tiles} * (kTileM * kTileN); };
      return fix_up(threads, {part.number, part.of, params_.arrivals + part.tile}, slot, accumulators);
    }
    return true;
  }

 private:
  CUTLASS_DEVICE Tile tile_at(int32_t index, int32_t ordinal) const {
    Tile tile;
    if (index >= all_tiles()) return tile;
    if constexpr (kRows) {
      static_cast<typename Tiles::Tile&>(tile) = table_.at(params_, index);
      tile.k_count = params_.decomposition.k_tiles;
      tile.from = tile.run.begin;
      // Beyond the operands, so that TMA reads zeros.
      if (is_outside(tile)) tile.batch = params_.groups, tile.from = params_.extent, tile.k_count = 1;
    } else if (!may_have_parts() || index >= parts()) {
      static_cast<typename Tiles::Tile&>(tile) = table_.at(params_, index - more_than_tiles());
      tile.k_count = Tiles::k_tiles(tile.run);
    } else if constexpr (kMayCut) {
      auto const part = table_.longs.part(params_, table_, index);
      static_cast<typename Tiles::Tile&>(tile) = table_.at(params_, part.tile);
      tile.k_begin = part.k_begin, tile.k_count = part.k_count;
    }
    tile.ordinal = ordinal;
    return tile;
  }

  CUTLASS_DEVICE bool may_have_parts() const { return kMayCut && params_.arrivals != nullptr; }

  // The indices of parts come before those of whole tiles.
  CUTLASS_DEVICE int32_t parts() const {
    if constexpr (kMayCut) return table_.longs.units();
    return 0;
  }

  // By how much indices of whole tiles exceed those of the table.
  CUTLASS_DEVICE int32_t more_than_tiles() const {
    if constexpr (kMayCut)
      if (may_have_parts()) return parts() - table_.longs.ranks * params_.tiles;
    return 0;
  }

  CUTLASS_DEVICE static int32_t in_turns(int32_t ordinal) { return blockIdx.x + ordinal * gridDim.x; }

  CUTLASS_DEVICE int32_t index_of(int32_t ordinal) const {
    if (ordinal == 0 || params_.taken == nullptr || is_idle()) return in_turns(ordinal);
    int32_t const taken = ordinal - 1;
    table_.is_taken[taken % Table::kTaken].wait(taken / Table::kTaken % 2);
    return const_cast<int32_t const volatile&>(table_.indices[taken % Table::kTaken]);
  }

  CUTLASS_DEVICE int32_t all_tiles() const { return table_.all_tiles(params_) + more_than_tiles(); }

  Params const& params_;
  Table const& table_;
};

}  // namespace jax_streamk::sm90
