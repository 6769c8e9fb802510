// A of a gated product: half of a tile's rows come from each of two matrices, both from the tile's half of D's columns
// (gated_epilogue.h).
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// In shared memory: rows of 128 bytes along M or along K, the gate's before the other's.
template <class Stage>
struct PairA : LoadedA<Stage> {
  using Element = typename Stage::ElementA;
  static constexpr int kTileM = Stage::kTileM, kTileK = Stage::kTileK, kHalfM = kTileM / 2,
                       kRowElements = Stage::A::kRowElements;
  static_assert(!Stage::kAIsMMajor || kHalfM == kRowElements);

  struct Params {
    cute::TmaDescriptor gate, up;
  };

  template <class AllParams>
  static CUresult set_up(AllParams& params, MainloopArguments const& x) {
    if (CUresult const result = encode(params.gate, x, x.a.data); result != CUDA_SUCCESS) return result;
    return encode(params.up, x, x.up);
  }
  template <class AllParams>
  static CUTLASS_DEVICE void prefetch(AllParams const& params) {
    cute::prefetch_tma_descriptor(&params.gate);
    cute::prefetch_tma_descriptor(&params.up);
  }

  template <class AllParams, class Tile, class Place>
  static CUTLASS_DEVICE auto loader(AllParams const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      load(params, barrier, hint, tile, k_tile * kTileK, storage.a + stage * kTileM * kTileK);
    };
  }

 private:
  static CUresult encode(cute::TmaDescriptor& map, MainloopArguments const& x, void const* a) {
    constexpr bool kAlongM = Stage::kAIsMMajor;
    return encode_tensor_map<Element>(map, a, kAlongM ? x.m : x.k, kAlongM ? x.k : x.m, x.batch, x.a.ld,
                                      x.a.batch_stride, kRowElements, kAlongM ? kTileK : kHalfM, Stage::A::kRowBytes);
  }

  template <class AllParams, class Tile, class To>
  static CUTLASS_DEVICE void load(AllParams const& params, uint64_t& barrier, uint64_t hint, Tile const& tile,
                                  int32_t k, To* to) {
    int32_t const m = tile.m * kHalfM;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      cute::TmaDescriptor const* const map = half == 0 ? &params.gate : &params.up;
      if constexpr (Stage::kAIsMMajor) {
        cute::SM90_TMA_LOAD_3D::copy(map, &barrier, hint, to + half * kHalfM * kTileK, m, k, tile.batch);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kTileK; at += kRowElements)
          cute::SM90_TMA_LOAD_3D::copy(map, &barrier, hint, to + at * kTileM + half * kHalfM * kRowElements, k + at, m,
                                       tile.batch);
      }
    }
  }
};

}  // namespace jax_streamk::sm90
