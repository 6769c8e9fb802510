// A and B of a ragged product whose groups cut K: each tile sums a run of K (RowRun in ragged.h).
#pragma once

#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/ragged.h"

namespace jax_streamk::sm90 {

// Rows of the run of K, kTile elements of each from the tile-th on. Boxes are as in an M-major or N-major tile.
template <class Stage, int kTile, class Element>
CUTLASS_DEVICE void load_run(cute::TmaDescriptor const& map, uint64_t& barrier, uint64_t hint, RowRun const& run,
                             int32_t tile, int32_t k_tile, Element* to, int stage) {
  static_assert(Stage::kAIsMMajor && Stage::kBIsNMajor && Stage::kClusterM * Stage::kClusterN == 1 &&
                kTile % Stage::B::kRowElements == 0);
  CUTLASS_PRAGMA_UNROLL
  for (int at = 0; at < kTile; at += Stage::B::kRowElements)
    run.load(map, barrier, hint, to + (stage * kTile + at) * Stage::kTileK, tile * kTile + at, k_tile * Stage::kTileK);
}

template <class Stage>
struct RunA : LoadedA<Stage> {
  struct Params {
    cute::TmaDescriptor run_a;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    return RowRun::encode<typename Stage::ElementA>(params.run_a, x.a.data, x.m, x.a.ld, Stage::B::kRowElements,
                                                    Stage::kTileK, Stage::B::kRowBytes);
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) { cute::prefetch_tma_descriptor(&params.run_a); }
  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      load_run<Stage, Stage::kTileM>(params.run_a, barrier, hint, RowRun(tile.run), tile.m, k_tile, storage.a, stage);
    };
  }
};

template <class Stage>
struct RunB {
  static constexpr bool kGathers = false, kTransposes = false;
  struct Params {
    cute::TmaDescriptor run_b;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    return RowRun::encode<typename Stage::ElementB>(params.run_b, x.b.data, x.n, x.b.ld, Stage::B::kRowElements,
                                                    Stage::kTileK, Stage::B::kRowBytes);
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) { cute::prefetch_tma_descriptor(&params.run_b); }
  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      load_run<Stage, Stage::kTileN>(params.run_b, barrier, hint, RowRun(tile.run), tile.n, k_tile, storage.b, stage);
    };
  }
};

}  // namespace jax_streamk::sm90
