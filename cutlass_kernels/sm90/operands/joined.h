// A of a joined product: rows of two or three matrices, each of whole tiles but the last.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// In shared memory: rows of 128 bytes along M or along K, of all of a tile's rows.
template <class Stage>
struct JoinedA : LoadedA<Stage> {
  using Element = typename Stage::ElementA;
  static constexpr int kTileM = Stage::kTileM, kTileK = Stage::kTileK, kRowElements = Stage::A::kRowElements;

  struct Params {
    cute::TmaDescriptor matrices[3];
    int32_t second_tile, third_tile;
  };

  template <class AllParams>
  static CUresult set_up(AllParams& params, MainloopArguments const& x) {
    int32_t const third = x.third_row != 0 ? x.third_row : x.m;
    params.second_tile = x.second_row / kTileM, params.third_tile = (third + kTileM - 1) / kTileM;
    int32_t const ends[] = {x.second_row, third, x.m};
    void const* const matrices[] = {x.a.data, x.up, x.third};
    for (int i = 0; i < (x.third_row != 0 ? 3 : 2); ++i) {
      CUresult const result = encode(params.matrices[i], matrices[i], ends[i] - (i > 0 ? ends[i - 1] : 0), x);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  }
  template <class AllParams>
  static CUTLASS_DEVICE void prefetch(AllParams const& params) {
    cute::prefetch_tma_descriptor(&params.matrices[0]);
    cute::prefetch_tma_descriptor(&params.matrices[1]);
  }

  template <class AllParams, class Tile, class Place>
  static CUTLASS_DEVICE auto loader(AllParams const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      load(params, barrier, hint, tile, k_tile * kTileK, storage.a + stage * kTileM * kTileK);
    };
  }

 private:
  static CUresult encode(cute::TmaDescriptor& map, void const* a, int64_t rows, MainloopArguments const& x) {
    if constexpr (Stage::kAIsMMajor) {
      return encode_tensor_map<Element>(map, a, rows, x.k, 1, rows, rows * x.k, kRowElements, kTileK,
                                        Stage::A::kRowBytes);
    } else {
      return encode_tensor_map<Element>(map, a, x.k, rows, 1, x.a.ld, rows * x.a.ld, kRowElements, kTileM,
                                        Stage::A::kRowBytes);
    }
  }

  template <class AllParams, class Tile, class To>
  static CUTLASS_DEVICE void load(AllParams const& params, uint64_t& barrier, uint64_t hint, Tile const& tile,
                                  int32_t k, To* to) {
    bool const second = tile.m >= params.second_tile, third = tile.m >= params.third_tile;
    cute::TmaDescriptor const* const map = &params.matrices[second + third];
    int32_t const m = (tile.m - (third ? params.third_tile : second ? params.second_tile : 0)) * kTileM;
    if constexpr (Stage::kAIsMMajor) {
      CUTLASS_PRAGMA_UNROLL
      for (int at = 0; at < kTileM; at += kRowElements)
        cute::SM90_TMA_LOAD_3D::copy(map, &barrier, hint, to + at * kTileK, m + at, k, 0);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int at = 0; at < kTileK; at += kRowElements)
        cute::SM90_TMA_LOAD_3D::copy(map, &barrier, hint, to + at * kTileM, k + at, m, 0);
    }
  }
};

}  // namespace jax_streamk::sm90
