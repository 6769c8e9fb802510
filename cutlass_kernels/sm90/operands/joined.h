// A of a joined product: rows of two or three matrices, each of whole tiles but the last.
#pragma once

#include "cutlass_kernels/sm90/operands/tile.h"

namespace jax_streamk::sm90 {

template <class Stage>
struct JoinedA : LoadedA<Stage> {
  static constexpr int kTileM = Stage::kTileM;
  using Load = TileLoad<typename Stage::A, kTileM, Stage::kTileK, 1>;

  struct Params {
    cute::TmaDescriptor matrices[3];
    int32_t second_tile, third_tile;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    int32_t const third = x.third_row != 0 ? x.third_row : x.m;
    params.second_tile = x.second_row / kTileM, params.third_tile = (third + kTileM - 1) / kTileM;
    int32_t const ends[] = {x.second_row, third, x.m};
    void const* const matrices[] = {x.a.data, x.up, x.third};
    for (int i = 0; i < (x.third_row != 0 ? 3 : 2); ++i) {
      int32_t const rows = ends[i] - (i > 0 ? ends[i - 1] : 0);
      int64_t const ld = Stage::kAIsMMajor ? rows : x.a.ld;
      CUresult const result =
          Load::encode(params.matrices[i], {matrices[i], ld, ld * (Stage::kAIsMMajor ? x.k : rows)}, rows, x.k, 1);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) {
    cute::prefetch_tma_descriptor(&params.matrices[0]);
    cute::prefetch_tma_descriptor(&params.matrices[1]);
  }

  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      bool const second = tile.m >= params.second_tile, third = tile.m >= params.third_tile;
      cute::TmaDescriptor const& map = params.matrices[second + third];
      int32_t const m = (tile.m - (third ? params.third_tile : second ? params.second_tile : 0)) * kTileM;
      Load::load(map, map, barrier, hint, 0, 0, m, k_tile * Stage::kTileK, 0, storage.a + stage * Stage::A::kElements);
    };
  }
};

}  // namespace jax_streamk::sm90
