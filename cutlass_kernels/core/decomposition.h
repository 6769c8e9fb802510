// How a Schedule cuts the MAC-iteration space of one GEMM into pieces of work.
//
// The space is tiles x k_tiles: `tiles` output tiles (over all batches), each the sum of `k_tiles` MAC iterations.
// Workers (CTAs, clusters or CPU threads) take pieces in a fixed order that depends on these numbers only. So every
// family that asks this header runs the same decomposition, and the Python function that prints it shows the same.
//
// Data-parallel gives whole tiles to workers round-robin. Split-K gives every tile `splits` near-equal runs of
// iterations. Stream-K follows Osama, Merrill, Cecka, Garland and Owens, "Stream-K: Work-centric Parallel Decomposition
// for Dense Matrix-Matrix Multiplication on the GPU" (2023), in its two-tile hybrid form: the tiles of the last,
// partial wave and of one full wave before it are cut into equal runs of iterations, one per worker; the rest is
// data-parallel.
//
// A tile that several workers share is fixed up by the last one to arrive: the others leave their partial tiles in
// slots of their own, and the last adds all of them in the order of their iterations. Nobody waits for a worker that
// has not finished its iterations, so workers need not be co-resident and cannot deadlock, and the sum does not depend
// on which worker was last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cutlass_kernels/core/enums.h"

#if defined(__CUDACC__)
#define JSK_HOST_DEVICE __host__ __device__ inline
#else
#define JSK_HOST_DEVICE inline
#endif

namespace jax_streamk {

// One contiguous run of MAC iterations [k_begin, k_begin + k_count) of one tile. It is peer number `peer` of `peers`.
struct Work {
  int32_t tile = 0;
  int32_t k_begin = 0;
  int32_t k_count = 0;
  int32_t peer = 0;
  int32_t peers = 0;
  bool last = false;  // whether it is its worker's last piece, if that is easily known
};

// Quotient of non-negative numbers. A GPU divides at the start of every tile, in warps with few registers, and 32-bit
// unsigned division is the cheapest.
JSK_HOST_DEVICE int32_t quotient(int32_t x, int32_t by) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) / static_cast<uint32_t>(by));
}

// Into how many parts along K a ragged kernel that may share tiles (sm90/long_tiles.h) cuts one of `k_tiles`, where
// `share` k-tiles are a worker's share of all work. Each has half a share and kLeast at least: less takes less time
// than adding up partial sums.
struct LongParts {
  static constexpr int32_t kLeast = 8, kFewest = 3, kMost = 16;
  JSK_HOST_DEVICE static int32_t of(float k_tiles, float share) {
    float const least = share / 2 > kLeast ? share / 2 : kLeast;
    int32_t const parts = static_cast<int32_t>(k_tiles / least < kMost ? k_tiles / least : kMost);
    return parts < kFewest ? 1 : parts;
  }
};

// Divides non-negative numbers by a number known before the launch, in one multiplication: Granlund and Montgomery,
// "Division by Invariant Integers using Multiplication" (1994). With 2^shift = 2^31 times the least power of two not
// below the divisor, the product exceeds 2^shift times the exact quotient by less than 2^31 for x < 2^31, so it never
// reaches the next integer.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int32_t by) : shift_(by > 1 ? 63 - __builtin_clz(static_cast<uint32_t>(by - 1)) : 31) {
    multiplier_ = static_cast<uint32_t>((uint64_t{1} << shift_) / static_cast<uint32_t>(by)) + 1;
  }
  JSK_HOST_DEVICE int32_t divide(int32_t x) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(x)) * multiplier_ >> shift_);
  }

 private:
  uint32_t multiplier_ = (uint32_t{1} << 31) + 1;
  int32_t shift_ = 31;
};

// Cuts `total` into near-equal runs: the first total % runs of them are one longer.
struct EvenRuns {
  int32_t base = 0, longer = 0;

  static JSK_HOST_DEVICE EvenRuns of(int32_t total, int32_t runs) { return {total / runs, total % runs}; }
  JSK_HOST_DEVICE int32_t begin(int32_t run) const { return run * base + (run < longer ? run : longer); }
  JSK_HOST_DEVICE int32_t holding(int32_t position) const {
    int32_t const in_longer = longer * (base + 1);
    return position < in_longer ? quotient(position, base + 1) : longer + quotient(position - in_longer, base);
  }
};

struct Decomposition {
  ScheduleKind kind = ScheduleKind::kDataParallel;
  int32_t tiles = 0;
  int32_t k_tiles = 0;
  int32_t workers = 1;
  int32_t splits = 1;            // split-K: runs per tile
  int32_t stream_k_tiles = 0;    // Stream-K: the number of tiles, from the first, that are cut by iterations
  int32_t stream_k_workers = 0;  // Stream-K: the number of workers that share them
  EvenRuns runs;                 // of one tile's iterations (split-K) or of all Stream-K tiles' (Stream-K)

  // Whether all numbers below fit 32 bits.
  static JSK_HOST_DEVICE bool fits(int64_t tiles, int64_t k_tiles, int64_t max_workers, int64_t splits) {
    int64_t const limit = 1 << 30;
    return tiles * (splits > 1 ? splits : 1) < limit && (2 * max_workers + 1) * k_tiles < limit;
  }

  // `max_workers` is the machine's width (SMs, clusters, threads). Stream-K becomes data-parallel with one worker, and
  // where the tiles fill whole waves.
  static JSK_HOST_DEVICE Decomposition make(ScheduleKind kind, int32_t tiles, int32_t k_tiles, int32_t max_workers,
                                            int32_t splits) {
    Decomposition d;
    d.tiles = tiles;
    d.k_tiles = k_tiles;
    d.workers = max_workers > 0 ? max_workers : 1;
    if (kind == ScheduleKind::kSplitK && splits > 1) {
      d.kind = kind;
      d.splits = splits;
      d.runs = EvenRuns::of(k_tiles, splits);
    } else if (kind == ScheduleKind::kStreamK && d.workers > 1 && tiles % d.workers != 0) {
      d.kind = kind;
      int32_t const whole_waves = tiles / d.workers;
      d.stream_k_tiles = whole_waves > 1 ? tiles - (whole_waves - 1) * d.workers : tiles;
      int32_t const iterations = d.stream_k_tiles * k_tiles;
      d.stream_k_workers = iterations < d.workers ? iterations : d.workers;
      d.runs = EvenRuns::of(iterations, d.stream_k_workers);
      if (d.stream_k_tiles == tiles) d.workers = d.stream_k_workers;
      return d;
    }
    int32_t const pieces = tiles * d.splits;
    if (pieces < d.workers) d.workers = pieces;
    return d;
  }

  // Decomposes all tiles of a source such as DenseTiles.
  template <class TileSource>
  static Decomposition make(ScheduleKind kind, TileSource const& source, int32_t max_workers, int32_t splits) {
    return make(kind, source.tiles(), source.k_tiles(), max_workers, splits);
  }

  // The `ordinal`-th piece of work of a worker; false when it has no more.
  JSK_HOST_DEVICE bool work(int32_t worker, int32_t ordinal, Work& out) const {
    if (kind == ScheduleKind::kSplitK) {
      int32_t const unit = worker + ordinal * workers;
      if (unit >= tiles * splits) return false;
      out.last = unit + workers >= tiles * splits;
      // Neighbouring workers share a run of K instead of a tile, so that they find each other's operands in L2.
      out.peer = quotient(unit, tiles);
      out.tile = unit - out.peer * tiles;
      out.peers = splits;
      out.k_begin = runs.begin(out.peer);
      out.k_count = runs.begin(out.peer + 1) - out.k_begin;
      return true;
    }
    int32_t whole = ordinal;  // index among the worker's unshared tiles
    if (worker < stream_k_workers) {
      int32_t const begin = runs.begin(worker), end = runs.begin(worker + 1);
      int32_t const first_tile = quotient(begin, k_tiles), last_tile = quotient(end - 1, k_tiles);
      if (ordinal <= last_tile - first_tile) {
        out.tile = first_tile + ordinal;
        int32_t const tile_begin = out.tile * k_tiles, tile_end = tile_begin + k_tiles;
        int32_t const from = begin > tile_begin ? begin : tile_begin;
        int32_t const to = end < tile_end ? end : tile_end;
        int32_t const first_peer = runs.holding(tile_begin);
        out.k_begin = from - tile_begin;
        out.k_count = to - from;
        out.peer = worker - first_peer;
        out.peers = runs.holding(tile_end - 1) - first_peer + 1;
        return true;
      }
      whole -= last_tile - first_tile + 1;
    }
    return whole_tile(worker, whole, out);
  }

  // Equivalent to work() if no tile is shared.
  JSK_HOST_DEVICE bool whole_tile(int32_t worker, int32_t ordinal, Work& out) const {
    out.tile = stream_k_tiles + worker + ordinal * workers;
    if (out.tile >= tiles) return false;
    out.last = out.tile + workers >= tiles;
    out.k_begin = 0;
    out.k_count = k_tiles;
    out.peer = 0;
    out.peers = 1;
    return true;
  }

  // The slot in which peer `peer` of a shared tile leaves its partial tile. Different (tile, peer) never collide: a
  // Stream-K worker shares at most its first and its last tile.
  JSK_HOST_DEVICE int32_t slot(int32_t tile, int32_t peer) const {
    if (kind == ScheduleKind::kSplitK) return tile * splits + peer;
    int32_t const tile_begin = tile * k_tiles;
    int32_t const worker = runs.holding(tile_begin) + peer;
    return 2 * worker + (runs.begin(worker) < tile_begin ? 1 : 0);
  }

  JSK_HOST_DEVICE int32_t slots() const {
    return kind == ScheduleKind::kSplitK ? tiles * splits : 2 * stream_k_workers;
  }

  // Tiles [0, shared_tiles()) may have more than one peer.
  JSK_HOST_DEVICE int32_t shared_tiles() const { return kind == ScheduleKind::kSplitK ? tiles : stream_k_tiles; }
};

// The order in which tiles are numbered. Along M, consecutive tiles step down M. Tiles are grouped into panels that are
// `swizzle` tiles wide in the other dimension; a panel is finished before the next one starts, so that a wave covers a
// squarer piece of D.
class TileOrder {
 public:
  struct Coordinate {
    int32_t m, n, batch;
  };

  TileOrder() = default;
  TileOrder(int32_t tiles_m, int32_t tiles_n, Raster raster, int32_t swizzle)
      : raster_(raster),
        fast_(at_least_1(raster == Raster::kAlongM ? tiles_m : tiles_n)),
        slow_(at_least_1(raster == Raster::kAlongM ? tiles_n : tiles_m)),
        swizzle_(at_least_1(swizzle < slow_ ? swizzle : slow_)) {
    per_batch_ = product(fast_, slow_);
    per_panel_ = product(fast_, swizzle_);
    panels_ = slow_ / swizzle_;
    last_width_ = slow_ % swizzle_;
    by_batch_ = Divisor(per_batch_);
    by_panel_ = Divisor(per_panel_);
    by_width_ = Divisor(swizzle_);
    if (last_width_ > 0) by_last_width_ = Divisor(last_width_);
  }

  int32_t tiles_m() const { return raster_ == Raster::kAlongM ? fast_ : slow_; }
  int32_t tiles_n() const { return raster_ == Raster::kAlongM ? slow_ : fast_; }
  int32_t tiles_per_batch() const { return per_batch_; }
  // An upper bound of the number of consecutive tiles that a batch's line of tiles along M, or along N, spans.
  int32_t reach(Raster line) const {
    if (line == raster_) return fast_ == 1 ? 1 : per_panel_;
    return slow_ == swizzle_ ? slow_ : per_batch_;
  }

  JSK_HOST_DEVICE Coordinate coordinate(int32_t tile) const {
    int32_t const batch = by_batch_.divide(tile), index = tile - batch * per_batch_;
    int32_t const panel = by_panel_.divide(index), within = index - panel * per_panel_;
    bool const whole = panel < panels_;
    int32_t const width = whole ? swizzle_ : last_width_;
    int32_t const f = (whole ? by_width_ : by_last_width_).divide(within), s = panel * swizzle_ + (within - f * width);
    return raster_ == Raster::kAlongM ? Coordinate{f, s, batch} : Coordinate{s, f, batch};
  }

 private:
  // Planning may ask about extents that no kernel runs: zero, and numbers that do not fit 32 bits.
  static int32_t at_least_1(int32_t x) { return x > 1 ? x : 1; }
  static int32_t product(int32_t x, int32_t y) {
    int64_t const exact = static_cast<int64_t>(x) * y, most = 1 << 30;
    return static_cast<int32_t>(exact < most ? exact : most);
  }

  Raster raster_ = Raster::kAlongM;
  int32_t fast_ = 1, slow_ = 1;  // tiles along the raster and across it
  int32_t swizzle_ = 1;
  int32_t per_batch_ = 1;
  int32_t per_panel_ = 1;  // tiles of a whole panel
  int32_t panels_ = 1;     // whole panels
  int32_t last_width_ = 0;
  Divisor by_batch_, by_panel_, by_width_, by_last_width_;
};

// The position of an output tile in its group's D, in tiles, and the k-tiles that it sums.
struct Tile {
  int32_t m, n, group;
  int32_t k_begin, k_tiles;
};

// A tile source knows a product's number of tiles, the largest number of k-tiles of any tile, and where each lies.
// Here groups are the equal products of a batch, and each tile sums all of K. Groups may also cut m, or K, into runs.
class DenseTiles {
 public:
  DenseTiles(TileOrder const& order, int32_t groups, int32_t k_tiles)
      : order_(order), groups_(groups), k_tiles_(k_tiles) {}

  int32_t tiles() const { return groups_ * order_.tiles_per_batch(); }
  int32_t k_tiles() const { return k_tiles_; }
  Tile tile(int32_t index) const {
    TileOrder::Coordinate const at = order_.coordinate(index);
    return {at.m, at.n, at.batch, 0, k_tiles_};
  }

 private:
  TileOrder order_;
  int32_t groups_, k_tiles_;
};

// The tiles of groups whose sizes, int32 data, cut one dimension of a product into consecutive runs. For the host.
//
// Whatever the sizes are, runs are disjoint and inside the extent: a size below 0 counts as 0, and runs end where the
// extent does. Along m, the rows of D before and after all groups have tiles too, which sum nothing.
class RaggedTiles {
 public:
  struct Run {
    int64_t begin, size;  // in elements
  };

  // Groups cut `extent` rows of D, and a tile has `tile` rows; every tile sums k_tiles.
  static RaggedTiles along_m(int32_t const* sizes, bool leading, int32_t groups, int64_t extent, int32_t tile,
                             int32_t tiles_n, int32_t k_tiles, Raster raster, int32_t swizzle) {
    RaggedTiles tiles(sizes, leading, groups, extent);
    tiles.k_tiles_ = k_tiles;
    int32_t first = 0;
    for (Run const& run : tiles.runs_) {
      tiles.orders_.emplace_back(ceil_div(run.size, tile), tiles_n, raster, swizzle);
      tiles.first_.push_back(first);
      first += run.size > 0 ? tiles.orders_.back().tiles_per_batch() : 0;
    }
    tiles.tiles_ = first;
    return tiles;
  }

  // Groups cut `extent` elements of K, and a MAC iteration has `tile`; each group has all tiles of `order`.
  static RaggedTiles along_k(int32_t const* sizes, bool leading, int32_t groups, int64_t extent, int32_t tile,
                             TileOrder const& order) {
    RaggedTiles tiles(sizes, leading, groups, extent);
    tiles.cuts_k_ = tile;
    tiles.orders_.push_back(order);
    tiles.k_tiles_ = ceil_div(extent, tile);
    tiles.tiles_ = groups * order.tiles_per_batch();
    return tiles;
  }

  // The most tiles along m of any group sizes, those of rows in no group included.
  static int64_t most_along_m(int64_t groups, int64_t extent, int64_t tile) {
    return extent / tile + std::min(groups + 2, extent);
  }

  int32_t tiles() const { return tiles_; }
  int32_t k_tiles() const { return k_tiles_; }
  // Its group is -1 or the number of groups for rows before or after all groups; m and k_begin count from its run.
  Tile tile(int32_t index) const {
    if (cuts_k_ > 0) {
      TileOrder::Coordinate const at = orders_[0].coordinate(index);
      return {at.m, at.n, at.batch, 0, ceil_div(run(at.batch).size, cuts_k_)};
    }
    auto const after = std::upper_bound(first_.begin(), first_.end(), index);
    auto const position = static_cast<int32_t>(after - first_.begin()) - 1;
    TileOrder::Coordinate const at = orders_[position].coordinate(index - first_[position]);
    return {at.m, at.n, position - 1, 0, k_tiles_};
  }
  Run run(int32_t group) const { return runs_[group + 1]; }

 private:
  RaggedTiles(int32_t const* sizes, bool leading, int32_t groups, int64_t extent) {
    int64_t begin = 0;
    auto const add = [&](int64_t size) {
      size = std::max<int64_t>(0, std::min(size, extent - begin));
      runs_.push_back({begin, size});
      begin += size;
    };
    add(leading ? *sizes++ : 0);
    for (int32_t group = 0; group < groups; ++group) add(sizes[group]);
    add(extent - begin);
  }

  static int32_t ceil_div(int64_t x, int64_t y) { return static_cast<int32_t>((x + y - 1) / y); }

  std::vector<Run> runs_;          // before all groups, of each group, after all groups
  std::vector<TileOrder> orders_;  // of each run; of every group along K
  std::vector<int32_t> first_;     // each run's first tile
  int32_t tiles_ = 0, k_tiles_ = 0, cuts_k_ = 0;
};

}  // namespace jax_streamk
