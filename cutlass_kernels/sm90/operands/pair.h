// A of a gated product: half of a tile's rows come from each of two matrices, both from the tile's half of D's columns
// (gated_epilogue.h).
#pragma once

#include "cutlass_kernels/sm90/operands/tile.h"

namespace jax_streamk::sm90 {

// In shared memory the gate's rows come before the other's.
template <class Stage>
struct PairA : LoadedA<Stage> {
  static constexpr int kHalfM = Stage::kTileM / 2;
  using Load = TileLoad<typename Stage::A, kHalfM, Stage::kTileK, 1>;
  static constexpr int kUp = Stage::A::block_offset(1) * 16 / Stage::A::kSize;  // where the other's rows begin
  static_assert(kHalfM == 64);

  struct Params {
    cute::TmaDescriptor gate, up;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    if (CUresult const result = Load::encode(params.gate, x.a, x.m, x.k, x.batch); result != CUDA_SUCCESS)
      return result;
    return Load::encode(params.up, {x.up, x.a.ld, x.a.batch_stride}, x.m, x.k, x.batch);
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) {
    cute::prefetch_tma_descriptor(&params.gate);
    cute::prefetch_tma_descriptor(&params.up);
  }

  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      auto* const to = storage.a + stage * Stage::A::kElements;
      int32_t const m = tile.m * kHalfM, k = k_tile * Stage::kTileK;
      Load::load(params.gate, params.gate, barrier, hint, 0, 0, m, k, tile.batch, to);
      Load::load(params.up, params.up, barrier, hint, 0, 0, m, k, tile.batch, to + kUp);
    };
  }
};

}  // namespace jax_streamk::sm90
