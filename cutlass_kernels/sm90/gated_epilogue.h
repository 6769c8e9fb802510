// The epilogue of a gated product: activation(sum + bias) * (second sum + second bias).
//
// A tile of the kernel's own result D^T is 64 rows of the gate's product above the 64 rows of the other product that
// belong to the same columns of D. One warpgroup has both, in two instructions, so that a thread has both sums of each
// of its elements.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/sm90/epilogue_operands.h"
#include "cutlass_kernels/sm90/store.h"

namespace jax_streamk::sm90 {

// Rows of a tile that one of the two matrices has.
inline constexpr int kGatedRows = 64;

// The parameters are those of BoxStore.
template <class Element, int kTileN, int kColumns, bool kRun = false>
class GatedEpilogue : public BoxStore<Element, true, kGatedRows, kTileN, 1, kColumns, kRun> {
  using Store = BoxStore<Element, true, kGatedRows, kTileN, 1, kColumns, kRun>;
  using Store::kValues;

  // What a thread has of one product, or of the result.
  using Values = decltype(cute::make_tensor<float>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<kTileN / 8>>, cute::_1, cute::_1>{}));
  using Bias = Biases<true, Element, Values, false>;
  static_assert(Bias::kEarly && cute::size(Values{}) == kValues);

  struct BothBiases {
    Bias gate, up;
  };

 public:
  static constexpr bool kGated = true;
  using typename Store::TensorStorage;
  struct Params {
    EpilogueParams<float, Element> gate, up;
    cute::TmaDescriptor d;
  };

  // `shape` is that of D^T.
  template <class ProblemShape>
  static CUresult set_up(Params& params, ProblemShape const& shape, GemmProblem const& p, Buffers const& buffers) {
    params.gate = params.up = {p, buffers};
    if (p.epilogue.has_bias)
      params.up.bias = p.epilogue.is_stacked() ? params.gate.bias + p.n : static_cast<Element const*>(buffers.up_bias);
    return Store::set_up(params.d, shape, p, buffers.d);
  }

  static bool has_residual(Params const&) { return false; }
  static bool has_early_bias(Params const& params) { return params.gate.bias != nullptr; }
  template <class ProblemShape>
  static CUTLASS_DEVICE void prefetch(Params const&, ProblemShape const&, int32_t, int32_t, int32_t) {}

  CUTLASS_DEVICE GatedEpilogue(Params const& params, TensorStorage& storage, int thread, uint32_t barrier)
      : Store(params.d, storage, thread, barrier), params_(params), thread_(thread) {}

  // The biases of the tile that the consumers multiply next; zeros unless `early`.
  template <class Accumulators, class ProblemShape, class TileCoordinate, class TiledMma>
  CUTLASS_DEVICE auto biases(bool early, ProblemShape const& shape, TileCoordinate const& tile,
                             TiledMma const& tiled_mma) const {
    static_assert(cute::size(Accumulators{}) == 2 * kValues && cute::size<1>(Accumulators{}) == 2);
    BothBiases biases;
    if (early) {
      wait_for_primary();
      auto const whole = cute::make_identity_tensor(cute::take<0, 2>(shape));
      auto const tile_shape = cute::Shape<cute::Int<kGatedRows>, cute::Int<kTileN>>{};
      auto const coordinates =
          tiled_mma.get_slice(thread_).partition_C(cute::local_tile(whole, tile_shape, cute::take<0, 2>(tile)));
      auto const [m, n, k, l] = shape;
      biases.gate.load(params_.gate, cute::get<3>(tile), m, n, coordinates, 0);
      biases.up.load(params_.up, cute::get<3>(tile), m, n, coordinates, 0);
    }
    return biases;
  }

  template <class ProblemShape, class TileCoordinate, class Accumulators, class TiledMma>
  CUTLASS_DEVICE void store(ProblemShape const&, TileCoordinate const& tile, BothBiases const& biases,
                            Accumulators const& accumulators, TiledMma const&) {
    Values values;
    constexpr bool kSharesReciprocal = kValues < 64;
    with_activation<kSharesReciprocal>(params_.gate.activation, [&](auto const& function) CUTLASS_LAMBDA_FUNC_INLINE {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        float x = accumulators(i) + biases.gate.of(i), y = accumulators(i + 1) + biases.gate.of(i + 1);
        activate_two(function, x, y);
        values(i) = x * (accumulators(kValues + i) + biases.up.of(i));
        values(i + 1) = y * (accumulators(kValues + i + 1) + biases.up.of(i + 1));
      }
    });
    this->store_converted(tile, values);
  }

 private:
  Params const& params_;
  int const thread_;
};

}  // namespace jax_streamk::sm90
