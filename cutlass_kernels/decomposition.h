// How a Schedule cuts the MAC-iteration space of one GEMM into pieces of work.
//
// The space is tiles x k_tiles: `tiles` output tiles (over all batches), each the sum of `k_tiles` MAC iterations. Workers
// (CTAs, clusters or CPU threads) take pieces in a fixed order that depends on nothing but these numbers, so every family that
// asks this header runs the same decomposition, and so does the Python function that prints it.
//
// Data-parallel gives whole tiles to workers round-robin. Split-K gives every tile `splits` near-equal runs of iterations.
// Stream-K follows Osama, Merrill, Cecka, Garland and Owens, "Stream-K: Work-centric Parallel Decomposition for Dense
// Matrix-Matrix Multiplication on the GPU" (2023), in its two-tile hybrid form: the tiles of the last, partial wave and of one
// full wave before it are cut into equal runs of iterations, one per worker; the rest is data-parallel.
//
// A tile that several workers share is fixed up by whichever of them arrives last: each peer leaves its partial tile in a slot
// of its own, draws a ticket, and the holder of the last ticket adds the slots in the order of their iterations. Nobody waits
// for anybody, so there is no co-residency requirement and no deadlock, and the sum does not depend on who was last.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JSK_HOST_DEVICE __host__ __device__ inline
#else
#define JSK_HOST_DEVICE inline
#endif

namespace jax_streamk {

enum class ScheduleKind : int32_t { kDataParallel, kSplitK, kStreamK };

// One contiguous run of MAC iterations [k_begin, k_begin + k_count) of one tile. It is peer number `peer` of `peers`.
struct Work {
  int64_t tile = 0;
  int32_t k_begin = 0;
  int32_t k_count = 0;
  int32_t peer = 0;
  int32_t peers = 0;
};

struct Decomposition {
  ScheduleKind kind = ScheduleKind::kDataParallel;
  int64_t tiles = 0;
  int32_t k_tiles = 0;
  int32_t workers = 1;
  int32_t splits = 1;          // split-K: runs per tile
  int64_t stream_k_tiles = 0;  // Stream-K: the first so many tiles are cut by iterations
  int32_t stream_k_workers = 1;

  // `max_workers` is the machine's width (SMs, clusters, threads). A Stream-K schedule with one worker is data-parallel.
  static JSK_HOST_DEVICE Decomposition make(ScheduleKind kind, int64_t tiles, int32_t k_tiles, int32_t max_workers,
                                            int32_t splits) {
    Decomposition d;
    d.tiles = tiles;
    d.k_tiles = k_tiles;
    d.workers = max_workers > 0 ? max_workers : 1;
    if (kind == ScheduleKind::kSplitK && splits > 1) {
      d.kind = kind;
      d.splits = splits;
    } else if (kind == ScheduleKind::kStreamK && d.workers > 1 && tiles % d.workers != 0) {
      d.kind = kind;
      int64_t const whole_waves = tiles / d.workers;
      d.stream_k_tiles = whole_waves > 1 ? tiles - (whole_waves - 1) * d.workers : tiles;
      int64_t const iterations = d.stream_k_tiles * k_tiles;
      d.stream_k_workers = static_cast<int32_t>(iterations < d.workers ? iterations : d.workers);
    }
    int64_t const pieces = d.kind == ScheduleKind::kStreamK  ? d.workers
                           : d.kind == ScheduleKind::kSplitK ? tiles * d.splits
                                                             : tiles;
    if (pieces < d.workers) d.workers = static_cast<int32_t>(pieces > 0 ? pieces : 1);
    if (d.kind == ScheduleKind::kStreamK && d.stream_k_tiles == tiles) d.workers = d.stream_k_workers;
    return d;
  }

  // First iteration of run `i` when a tile is split: the first k_tiles % splits runs are one iteration longer.
  JSK_HOST_DEVICE int32_t split_begin(int32_t i) const {
    int32_t const base = k_tiles / splits, longer = k_tiles % splits;
    return i * base + (i < longer ? i : longer);
  }

  // First iteration of a Stream-K worker's run, counted over all Stream-K tiles.
  JSK_HOST_DEVICE int64_t stream_k_begin(int32_t worker) const {
    return stream_k_tiles * k_tiles * worker / stream_k_workers;
  }

  // The worker whose run holds this iteration: the inverse of stream_k_begin.
  JSK_HOST_DEVICE int32_t stream_k_owner(int64_t iteration) const {
    return static_cast<int32_t>(((iteration + 1) * stream_k_workers - 1) / (stream_k_tiles * k_tiles));
  }

  // The `ordinal`-th piece of work of a worker; false when it has no more.
  JSK_HOST_DEVICE bool work(int32_t worker, int64_t ordinal, Work& out) const {
    if (kind == ScheduleKind::kSplitK) {
      int64_t const unit = worker + ordinal * workers;
      if (unit >= tiles * splits) return false;
      // Neighbouring workers share a run of K and not a tile, so that they reuse each other's operand panels in L2.
      out.tile = unit % tiles;
      out.peer = static_cast<int32_t>(unit / tiles);
      out.peers = splits;
      out.k_begin = split_begin(out.peer);
      out.k_count = split_begin(out.peer + 1) - out.k_begin;
      return true;
    }
    int64_t whole = ordinal;
    if (kind == ScheduleKind::kStreamK && worker < stream_k_workers) {
      int64_t const begin = stream_k_begin(worker), end = stream_k_begin(worker + 1);
      int64_t const first_tile = begin / k_tiles, last_tile = (end - 1) / k_tiles;
      if (ordinal <= last_tile - first_tile) {
        out.tile = first_tile + ordinal;
        int64_t const tile_begin = out.tile * k_tiles, tile_end = tile_begin + k_tiles;
        int64_t const from = begin > tile_begin ? begin : tile_begin;
        int64_t const to = end < tile_end ? end : tile_end;
        int32_t const first_peer = stream_k_owner(tile_begin);
        out.k_begin = static_cast<int32_t>(from - tile_begin);
        out.k_count = static_cast<int32_t>(to - from);
        out.peer = worker - first_peer;
        out.peers = stream_k_owner(tile_end - 1) - first_peer + 1;
        return true;
      }
      whole -= last_tile - first_tile + 1;
    }
    out.tile = stream_k_tiles + worker + whole * workers;
    if (out.tile >= tiles) return false;
    out.k_begin = 0;
    out.k_count = k_tiles;
    out.peer = 0;
    out.peers = 1;
    return true;
  }

  // Where peer `peer` of a shared tile leaves its partial tile. Slots of different (tile, peer) never collide.
  JSK_HOST_DEVICE int64_t slot(int64_t tile, int32_t peer) const {
    if (kind == ScheduleKind::kSplitK) return tile * splits + peer;
    int64_t const tile_begin = tile * k_tiles;
    int32_t const worker = stream_k_owner(tile_begin) + peer;
    return 2 * static_cast<int64_t>(worker) + (stream_k_begin(worker) < tile_begin ? 1 : 0);
  }

  JSK_HOST_DEVICE int64_t slots() const {
    return kind == ScheduleKind::kSplitK    ? tiles * splits
           : kind == ScheduleKind::kStreamK ? 2 * static_cast<int64_t>(stream_k_workers)
                                            : 0;
  }

  // Tiles [0, shared_tiles) may have more than one peer.
  JSK_HOST_DEVICE int64_t shared_tiles() const {
    return kind == ScheduleKind::kSplitK ? tiles : kind == ScheduleKind::kStreamK ? stream_k_tiles : 0;
  }
};

enum class Raster : int32_t { kAlongM, kAlongN };

// The order in which tiles are numbered. Along M means that consecutive tiles step down M; `swizzle` is the width, in tiles of
// the other dimension, of the panel that is finished before the next one starts, so that a wave covers a squarer piece of D.
struct TileOrder {
  int32_t tiles_m = 1;
  int32_t tiles_n = 1;
  Raster raster = Raster::kAlongM;
  int32_t swizzle = 1;

  struct Coordinate {
    int32_t m, n;
    int64_t batch;
  };

  JSK_HOST_DEVICE Coordinate coordinate(int64_t tile) const {
    int64_t const per_batch = static_cast<int64_t>(tiles_m) * tiles_n;
    int32_t const fast = raster == Raster::kAlongM ? tiles_m : tiles_n;
    int32_t const slow = raster == Raster::kAlongM ? tiles_n : tiles_m;
    int64_t const batch = tile / per_batch;
    int32_t const index = static_cast<int32_t>(tile - batch * per_batch);
    int32_t const panel = index / (fast * swizzle);
    int32_t const left = slow - panel * swizzle;
    int32_t const width = left < swizzle ? left : swizzle;
    int32_t const within = index - panel * fast * swizzle;
    int32_t const f = within / width, s = panel * swizzle + within % width;
    return raster == Raster::kAlongM ? Coordinate{f, s, batch} : Coordinate{s, f, batch};
  }
};

}  // namespace jax_streamk
