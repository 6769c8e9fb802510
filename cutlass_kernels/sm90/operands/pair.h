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
                       kRowElements = Stage::kRowElements;
  static_assert(kHalfM == Stage::kRowBytes / sizeof(Element) && (Stage::kAIsMMajor || kTileK % kRowElements == 0));

  struct Params {
    cute::TmaDescriptor gate, up;
  };

  template <class AllParams>
  static CUresult set_up(AllParams& params, MainloopArguments<typename Stage::Base> const& x) {
    if (CUresult const result = encode(params.gate, x, x.ptr_A); result != CUDA_SUCCESS) return result;
    return encode(params.up, x, x.up);
  }
  template <class AllParams>
  static CUTLASS_DEVICE void prefetch(AllParams const& params) {
    cute::prefetch_tma_descriptor(&params.gate);
    cute::prefetch_tma_descriptor(&params.up);
  }

  template <class AllParams, class ProblemShape, class Tile, class Place>
  static CUTLASS_DEVICE auto loader(AllParams const& params, ProblemShape const&, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, cute::TMA::CacheHintSm90 hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      load(params, barrier, hint, tile, k_tile * kTileK, storage.smem_A.data() + stage * kTileM * kTileK);
    };
  }

 private:
  static CUresult encode(cute::TmaDescriptor& map, MainloopArguments<typename Stage::Base> const& x, void const* a) {
    auto const [along_m, along_k, batch_stride] = x.dA;
    if constexpr (Stage::kAIsMMajor) {
      return encode_tensor_map<Element>(map, a, x.m, x.k, x.batch, along_k, batch_stride, kHalfM, kTileK,
                                        Stage::kRowBytes);
    } else {
      return encode_tensor_map<Element>(map, a, x.k, x.m, x.batch, along_m, batch_stride, kRowElements, kHalfM,
                                        Stage::kRowBytes);
    }
  }

  template <class AllParams, class Tile, class To>
  static CUTLASS_DEVICE void load(AllParams const& params, uint64_t& barrier, cute::TMA::CacheHintSm90 hint,
                                  Tile const& tile, int32_t k, To* to) {
    using namespace cute;
    using Layout = typename Stage::Base::SmemLayoutA;
    static_assert(Layout{}(Int<kHalfM>{}, _0{}, _0{}) == kHalfM * (Stage::kAIsMMajor ? kTileK : kRowElements) &&
                  Layout{}(_0{}, _0{}, _1{}) == kTileM * kTileK);
    int32_t const m = tile.m * kHalfM;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      TmaDescriptor const* const map = half == 0 ? &params.gate : &params.up;
      if constexpr (Stage::kAIsMMajor) {
        SM90_TMA_LOAD_3D::copy(map, &barrier, static_cast<uint64_t>(hint), to + half * kHalfM * kTileK, m, k,
                               tile.batch);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kTileK; at += kRowElements)
          SM90_TMA_LOAD_3D::copy(map, &barrier, static_cast<uint64_t>(hint),
                                 to + at * kTileM + half * kHalfM * kRowElements, k + at, m, tile.batch);
      }
    }
  }
};

}  // namespace jax_streamk::sm90
