// A and B of a ragged product whose groups cut K: each tile sums a run of K (RowRun in ragged.h).
#pragma once

#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/ragged.h"

namespace jax_streamk::sm90 {

// How an OperandTile is loaded whose rows are K: those of the run, in boxes as in any M-major or N-major tile.
template <class Operand>
struct RunLoad {
  using Element = typename Operand::Element;
  static_assert(!Operand::kAlongK);

  static CUresult encode(cute::TmaDescriptor& map, MainloopArguments::Matrices const& x, int32_t extent) {
    return RowRun::encode<Element>(map, x.data, extent, x.ld, Operand::kRowElements, Operand::kRows,
                                   Operand::kRowBytes);
  }

  // `tile`: along m or n.
  static CUTLASS_DEVICE void load(cute::TmaDescriptor const& map, uint64_t& barrier, uint64_t hint, RowRun const& run,
                                  int32_t tile, int32_t k_tile, Element* to) {
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < Operand::kBoxes; ++box)
      run.load(map, barrier, hint, to + box * Operand::kBoxElements,
               tile * Operand::kAlongRows + box * Operand::kRowElements, k_tile * Operand::kRows);
  }
};

template <class Stage>
struct RunA : LoadedA<Stage> {
  using Load = RunLoad<typename Stage::A>;
  struct Params {
    cute::TmaDescriptor run_a;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) { return Load::encode(params.run_a, x.a, x.m); }
  static CUTLASS_DEVICE void prefetch(Params const& params) { cute::prefetch_tma_descriptor(&params.run_a); }
  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      Load::load(params.run_a, barrier, hint, RowRun(tile.run), tile.m, k_tile,
                 storage.a + stage * Stage::A::kElements);
    };
  }
};

template <class Stage>
struct RunB {
  using Load = RunLoad<typename Stage::B>;
  static_assert(Stage::kLaidOutN == Stage::kTileN && Stage::kClusterM * Stage::kClusterN == 1);
  static constexpr bool kGathers = false, kTransposes = false;
  struct Params {
    cute::TmaDescriptor run_b;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) { return Load::encode(params.run_b, x.b, x.n); }
  static CUTLASS_DEVICE void prefetch(Params const& params) { cute::prefetch_tma_descriptor(&params.run_b); }
  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&](uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      Load::load(params.run_b, barrier, hint, RowRun(tile.run), tile.n, k_tile,
                 storage.b + stage * Stage::B::kElements);
    };
  }
};

}  // namespace jax_streamk::sm90
