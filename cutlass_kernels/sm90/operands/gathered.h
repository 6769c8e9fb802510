// B of a ragged product whose rows, which are the problem's A's, lie anywhere: threads copy them, and TMA loads only A.
// The kernel also runs products whose rows lie in order, by TMA (TileB).
#pragma once

#include "cutlass_kernels/sm90/operands/tile.h"

namespace jax_streamk::sm90 {

template <class Stage>
struct GatheredB : TileB<Stage, true> {
  static constexpr int kTileN = Stage::kTileN, kTileK = Stage::kTileK, kRowBytes = Stage::B::kRowBytes,
                       kRowElements = Stage::B::kRowElements;
  static constexpr bool kGathers = true;
  // They copy 8 rows of 128 bytes at once, a warp 4 of these.
  static constexpr int kThreads = 64, kRowsAtOnce = kThreads * 16 / kRowBytes;
  static_assert(!Stage::kBIsNMajor && sizeof(typename Stage::ElementB) == 2 && Stage::kLaidOutN == kTileN &&
                Stage::kClusterM * Stage::kClusterN == 1 && kRowsAtOnce == 8 && kTileN % kRowsAtOnce == 0);

  struct Params : TileB<Stage, true>::Params {
    char const* rows;
    int32_t const* indices;
    uint32_t row_pieces;  // 16-byte pieces from a row to the next
    int32_t k, last_row, last_index;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    params.rows = static_cast<char const*>(x.b.data), params.indices = x.indices;
    params.row_pieces = static_cast<uint32_t>(x.b.ld * sizeof(typename Stage::ElementB) / 16);
    params.k = x.k;
    params.last_row = x.n - 1, params.last_index = x.columns - 1;
    return TileB<Stage, true>::set_up(params, x);
  }

  // A tile's indices: those of a warp's rows, 32 in each register.
  struct Indices {
    int32_t of_lane[(kTileN / 2 + 31) / 32];
  };

  // Called by kThreads threads.
  template <class Tile>
  static CUTLASS_DEVICE Indices indices_of(Params const& params, Tile const& tile) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 2;
    Indices indices;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i * 32 < kTileN / 2; ++i) {
      int32_t const own = i * 32 + lane, row = own / 4 * kRowsAtOnce + warp * 4 + own % 4;
      indices.of_lane[i] = __ldg(params.indices + min(tile.from + row, params.last_index));
    }
    return indices;
  }

  // Called by kThreads threads, for the same tiles as the producer's: copies B's rows into stages as these become
  // empty. Every thread arrives once at the stage's full barrier when its copies are done. Rows beyond the tile's last
  // are copied up to the next multiple of 32 or not at all, since nothing stores their products. Calls `near_the_end`
  // once, kIndicesAhead k-tiles before the tile's end.
  template <class Tile, class StageState, class NearTheEnd>
  static CUTLASS_DEVICE void gather(Params const& params, Tile const& tile, bool is_outside, Indices const& indices,
                                    FullBarrier* full, EmptyBarrier* empty, StageState& stage,
                                    typename Stage::Storage& storage, NearTheEnd const& near_the_end) {
    // Boxes of 64 columns along K; the swizzle puts 16-byte piece p of row r at p ^ r % 8.
    constexpr int kBoxes = Stage::B::kBoxes, kBoxElements = Stage::B::kBoxElements;
    static_assert(kRowBytes == 128);
    constexpr int kTurns = kTileN / kRowsAtOnce, kTurnsOf32 = 32 / kRowsAtOnce;
    int const lane = threadIdx.x % 32, row = threadIdx.x % kThreads / 8, piece = lane % 8;
    uint32_t pieces[kTurns];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      int32_t const index = __shfl_sync(~0u, indices.of_lane[i / 8], i % 8 * 4 + lane / 8);
      pieces[i] = static_cast<uint32_t>(min(max(index, 0), params.last_row)) * params.row_pieces + piece;
    }
    char const* from = params.rows;
    uint32_t const to = cute::cast_smem_ptr_to_uint(storage.b) + row * kRowBytes + (piece ^ row) * 16;
    int32_t k_left = is_outside ? 0 : params.k - piece * 8, left = tile.k_count;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      int const s = stage.index();
      empty[s].wait(stage.phase());
      uint32_t const to_stage = to + s * Stage::kBytesB;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTurns; ++i) {
        if (i > 0 && i % kTurnsOf32 == 0 && tile.columns <= i * kRowsAtOnce) break;
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < kBoxes; ++box)
          copy_or_clear(to_stage + i * kRowsAtOnce * kRowBytes + box * kBoxElements * 2,
                        from + uint64_t{pieces[i]} * 16 + box * kRowBytes, k_left > box * kRowElements);
      }
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t const*>(&full[s]));
      if (left == min(tile.k_count, kIndicesAhead)) near_the_end();
      from += kTileK * sizeof(typename Stage::ElementB), k_left -= kTileK, ++stage;
    } while (--left > 0);
  }

 private:
  // How many k-tiles before a tile's end the next one's indices are asked for: by then the counter has answered, and
  // memory has time to.
  static constexpr int32_t kIndicesAhead = 3;

  // Copies 16 bytes, or clears them.
  static CUTLASS_DEVICE void copy_or_clear(uint32_t to, char const* from, bool copies) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}\n" ::"r"(to),
                 "l"(from), "r"(static_cast<int>(copies)));
  }
};

}  // namespace jax_streamk::sm90
