// A tile by TMA. A row or column of the cluster shares operands: each CTA loads a part and multicasts it.
#pragma once

#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

template <class Stage>
struct TileA : LoadedA<Stage> {
  struct Params {};

  template <class AllParams>
  static CUresult set_up(AllParams&, MainloopArguments<typename Stage::Base> const&) {
    return CUDA_SUCCESS;
  }
  template <class AllParams>
  static CUTLASS_DEVICE void prefetch(AllParams const& params) {
    cute::prefetch_tma_descriptor(params.tma_load_a.get_tma_descriptor());
  }

  template <class AllParams, class ProblemShape, class Tile, class Place>
  static CUTLASS_DEVICE auto loader(AllParams const& params, ProblemShape const& shape, Tile const& tile,
                                    Place const& place, typename Stage::Storage& storage) {
    using namespace cute;
    auto const part = params.tma_load_a.get_slice(place.n);
    auto const a = typename Stage::Base{}.load_init(shape, params);
    auto const from = part.partition_S(get<0>(a)(_, _, tile.m, _, tile.batch));
    auto const to =
        part.partition_D(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Stage::Base::SmemLayoutA{}));
    return [&params, from, to, row = place.row](uint64_t& barrier, cute::TMA::CacheHintSm90 hint, int32_t k_tile,
                                                int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      copy(params.tma_load_a.with(barrier, row, hint), from(_, _, _, k_tile), to(_, _, _, stage));
    };
  }
};

// An N-major B comes in boxes of 64 columns, since TMA takes as long for a row of 32 bytes as for one of 128; the last
// box may be narrower. A K-major B comes in boxes with fewer rows. kFromRow: a tile begins at any row of a ragged
// product's B (tile.from), which is the problem's A.
template <class Stage, bool kFromRow = false>
struct TileB {
  using Base = typename Stage::Base;
  using Element = typename Stage::ElementB;
  // N-major B: the columns of the tile's last box if it is narrower than the others, else 0.
  static constexpr int kLastBoxColumns =
      Stage::kBIsNMajor && Stage::kLaidOutN != Stage::kTileN ? Stage::kTileN % Stage::kRowElements : 0;
  // K-major B: by how many rows a CTA's share of the multicast B is smaller than Base's.
  static constexpr int kRowsLess = Stage::kBIsNMajor ? 0 : (Stage::kLaidOutN - Stage::kTileN) / Stage::kClusterM;
  static_assert(Stage::kBIsNMajor || kRowsLess * Stage::kClusterM == Stage::kLaidOutN - Stage::kTileN);

  static constexpr bool kGathers = false, kTransposes = false;  // whether other threads copy or transpose B

  struct LastBox {
    typename Base::Params::TMA_B tma_load_last;
  };
  struct NoLastBox {};
  using FirstParams = std::conditional_t<(kLastBoxColumns > 0), LastBox, NoLastBox>;
  struct Params {};

  template <class AllParams>
  static CUresult set_up(AllParams& params, MainloopArguments<Base> const& x) {
    auto const [along_n, along_k, batch_stride] = x.dB;
    if constexpr (kLastBoxColumns > 0) {
      params.tma_load_last = params.tma_load_b;
      return encode_tensor_map<Element>(params.tma_load_last.tma_desc_, x.ptr_B, x.n, x.k, x.batch, along_k,
                                        batch_stride, kLastBoxColumns, Stage::kTileK / Stage::kClusterM,
                                        Stage::kRowBytes);
    } else if constexpr (kRowsLess > 0) {
      return encode_tensor_map<Element>(params.tma_load_b.tma_desc_, x.ptr_B, x.k, x.n, x.batch, along_n, batch_stride,
                                        Stage::kRowElements, Stage::kTileN / Stage::kClusterM, Stage::kRowBytes);
    }
    return CUDA_SUCCESS;
  }
  template <class AllParams>
  static CUTLASS_DEVICE void prefetch(AllParams const& params) {
    cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
    if constexpr (kLastBoxColumns > 0) cute::prefetch_tma_descriptor(params.tma_load_last.get_tma_descriptor());
  }

  template <class AllParams, class ProblemShape, class Tile, class Place>
  static CUTLASS_DEVICE auto loader(AllParams const& params, ProblemShape const& shape, Tile const& tile,
                                    Place const& place, typename Stage::Storage& storage) {
    using namespace cute;
    auto const part = params.tma_load_b.get_slice(place.m);
    int const skipped = place.m * kRowsLess;  // rows of Base's B before this CTA's that no CTA loads
    auto const from = part.partition_S(columns(params, shape, tile, skipped));
    auto const to = part.partition_D(make_tensor(make_smem_ptr(storage.smem_B.data() - skipped * Stage::kRowElements),
                                                 typename Base::SmemLayoutB{}));
    return [&params, from, to, column = place.column](uint64_t& barrier, cute::TMA::CacheHintSm90 hint, int32_t k_tile,
                                                      int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      copy_boxes(params, barrier, column, hint, from(_, _, _, k_tile), to(_, _, _, stage));
    };
  }

 private:
  // Base's tile of B; its last columns may not belong to this tile.
  template <class AllParams, class ProblemShape, class Tile>
  static CUTLASS_DEVICE auto columns(AllParams const& params, ProblemShape const& shape, Tile const& tile,
                                     int skipped) {
    using namespace cute;
    auto const [first, batch] = [&] {
      if constexpr (kFromRow) return cute::make_tuple(tile.from, 0);
      if constexpr (!kFromRow) return cute::make_tuple(tile.n * Stage::kTileN, tile.batch);
    }();
    auto const from_n =
        domain_offset(make_coord(first - skipped, 0, 0), params.tma_load_b.get_tma_tensor(select<1, 2, 3>(shape)));
    return local_tile(from_n, select<1, 2>(typename Base::TileShape{}), make_coord(0, _, batch));
  }

  template <class AllParams, class From, class To>
  static CUTLASS_DEVICE void copy_boxes(AllParams const& params, uint64_t& barrier, uint32_t ctas,
                                        cute::TMA::CacheHintSm90 hint, From const& from, To to) {
    using namespace cute;
    auto const load = params.tma_load_b.with(barrier, ctas, hint);
    if constexpr (kLastBoxColumns > 0) {
      constexpr int kWholeBoxes = Stage::kTileN / Stage::kRowElements;
      CUTLASS_PRAGMA_UNROLL
      for (int box = 0; box < kWholeBoxes; ++box)
        copy(load, from(make_coord(_, box), _, _), to(make_coord(_, box), _, _));
      copy(params.tma_load_last.with(barrier, ctas, hint), from(make_coord(_, kWholeBoxes), _, _),
           to(make_coord(_, kWholeBoxes), _, _));
    } else {
      copy(load, from, to);
    }
  }
};

}  // namespace jax_streamk::sm90
