// A tile by TMA. A row or column of the cluster shares operands: each CTA loads a part and multicasts it.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// How kCtas load an OperandTile, of which kExtent along m or n belong to the tile: each a part of every box's rows. A
// last box that is narrower has a tensor map of its own.
template <class Operand, int kExtent, int kTileK, int kCtas>
struct TileLoad {
  using Element = typename Operand::Element;
  static constexpr bool kAlongK = Operand::kAlongK;
  static constexpr int kRowElements = Operand::kRowElements, kRows = (kAlongK ? kExtent : kTileK) / kCtas,
                       kLastColumns = kAlongK ? 0 : kExtent % kRowElements,
                       kWholeBoxes = (kAlongK ? kTileK : kExtent) / kRowElements;
  static_assert(kRows * kCtas == (kAlongK ? kExtent : kTileK));

  static CUresult encode(cute::TmaDescriptor& map, MainloopArguments::Matrices const& x, int32_t extent, int32_t k,
                         int32_t batch, int columns = kRowElements) {
    return encode_tensor_map<Element>(map, x.data, kAlongK ? k : extent, kAlongK ? extent : k, batch, x.ld,
                                      x.batch_stride, columns, kRows, Operand::kRowBytes);
  }

  // The part-th of a tile that begins at `first` along m or n, and at k, of a batch. `ctas`: a mask of those that get
  // it.
  static CUTLASS_DEVICE void load(cute::TmaDescriptor const& map, cute::TmaDescriptor const& last, uint64_t& barrier,
                                  uint64_t hint, uint32_t ctas, uint32_t part, int32_t first, int32_t k, int32_t batch,
                                  Element* to) {
    int32_t const row = (kAlongK ? first : k) + part * kRows, column = kAlongK ? k : first;
    to += part * (kRows * kRowElements);
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kWholeBoxes + (kLastColumns > 0); ++box) {
      cute::TmaDescriptor const* const own = box == kWholeBoxes ? &last : &map;
      int32_t const at = column + box * kRowElements;
      if constexpr (kCtas == 1) {
        cute::SM90_TMA_LOAD_3D::copy(own, &barrier, hint, to + box * Operand::kBoxElements, at, row, batch);
      } else {
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(own, &barrier, static_cast<uint16_t>(ctas), hint,
                                               to + box * Operand::kBoxElements, at, row, batch);
      }
    }
  }
};

template <class Stage>
struct TileA : LoadedA<Stage> {
  using Load = TileLoad<typename Stage::A, Stage::kTileM, Stage::kTileK, Stage::kClusterN>;
  struct Params {
    cute::TmaDescriptor a;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    return Load::encode(params.a, x.a, x.m, x.k, x.batch);
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) { cute::prefetch_tma_descriptor(&params.a); }

  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const& place,
                                    typename Stage::Storage& storage) {
    return [&params, &storage, row = place.row, part = place.n, m = tile.m * Stage::kTileM, batch = tile.batch](
               uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      Load::load(params.a, params.a, barrier, hint, row, part, m, k_tile * Stage::kTileK, batch,
                 storage.a + stage * Stage::A::kElements);
    };
  }
};

// kFromRow: a tile begins at any row of a ragged product's B (tile.from), which is the problem's A. TMA takes as long
// for a row of 32 bytes as for one of 128, so an N-major B has boxes of 64 columns, the last perhaps narrower.
template <class Stage, bool kFromRow = false>
struct TileB {
  using Load = TileLoad<typename Stage::B, Stage::kTileN, Stage::kTileK, Stage::kClusterM>;
  static constexpr bool kGathers = false, kTransposes = false;  // whether other threads copy or transpose B

  static constexpr bool kHasLast = Load::kLastColumns > 0;
  struct Params {
    cute::TmaDescriptor b[1 + kHasLast];  // the last box has its own
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    CUresult const result = Load::encode(params.b[0], x.b, x.n, x.k, x.batch);
    if (!kHasLast || result != CUDA_SUCCESS) return result;
    return Load::encode(params.b[kHasLast], x.b, x.n, x.k, x.batch, Load::kLastColumns);
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) {
    for (auto const& map : params.b) cute::prefetch_tma_descriptor(&map);
  }

  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const& place,
                                    typename Stage::Storage& storage) {
    int32_t n, batch;
    if constexpr (kFromRow) n = tile.from, batch = 0;
    if constexpr (!kFromRow) n = tile.n * Stage::kTileN, batch = tile.batch;
    return [&params, &storage, column = place.column, part = place.m, n, batch](
               uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      Load::load(params.b[0], params.b[kHasLast], barrier, hint, column, part, n, k_tile * Stage::kTileK, batch,
                 storage.b + stage * Stage::B::kElements);
    };
  }
};

}  // namespace jax_streamk::sm90
