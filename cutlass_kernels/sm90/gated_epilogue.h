// The epilogue of a gated product: activation(sum + bias) * (second sum + second bias).
//
// A tile of the kernel's own result D^T is 64 rows of the gate's product above the 64 rows of the other product that
// belong to the same columns of D. One warpgroup has both, in two instructions, so that a thread has both sums of each
// of its elements.
#pragma once

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/sm90/activated.h"
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
  using Values = typename Store::Accumulators;
  using Bias = Biases<true, Element, Values, false>;
  static_assert(Bias::kEarly);

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
  static CUresult set_up(Params& params, OwnShape const& shape, GemmProblem const& p, Buffers const& buffers) {
    params.gate = params.up = {p, buffers};
    if (p.epilogue.has_bias)
      params.up.bias = p.epilogue.is_stacked() ? params.gate.bias + p.n : static_cast<Element const*>(buffers.up_bias);
    return Store::set_up(params.d, shape, p, buffers.d);
  }

  static bool has_residual(Params const&) { return false; }
  static bool has_early_bias(Params const& params) { return params.gate.bias != nullptr; }
  static CUTLASS_DEVICE void prefetch(Params const&, OwnShape const&, TileAt const&) {}

  CUTLASS_DEVICE GatedEpilogue(Params const& params, TensorStorage& storage, int thread, uint32_t barrier)
      : Store(params.d, storage, thread, barrier), params_(params), thread_(thread) {}

  // The biases of the tile that the consumers multiply next; zeros unless `early`.
  CUTLASS_DEVICE auto biases(bool early, OwnShape const& shape, TileAt const& tile) const {
    BothBiases biases;
    if (early) {
      wait_for_primary();
      Places<Values, 1> const places(tile.m * kGatedRows, tile.n * kTileN, thread_);
      biases.gate.load(params_.gate, tile.batch, shape.m, shape.n, places, 0);
      biases.up.load(params_.up, tile.batch, shape.m, shape.n, places, 0);
    }
    return biases;
  }

  template <class Tile>
  CUTLASS_DEVICE void store(OwnShape const&, Tile const& tile, BothBiases const& biases,
                            Accumulators<2, kTileN> const& accumulators) {
    Values values;
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      auto const gate = [&](int j) { return accumulators(i + j) + biases.gate.of(i + j); };
      auto const up = [&](int j) { return accumulators(kValues + i + j) + biases.up.of(i + j); };
      float4 const x = activated<false>(params_.gate.activation, make_float4(gate(0), gate(1), gate(2), gate(3)));
      values(i) = x.x * up(0), values(i + 1) = x.y * up(1), values(i + 2) = x.z * up(2), values(i + 3) = x.w * up(3);
    }
    this->store_converted(tile, values);
  }

 private:
  Params const& params_;
  int const thread_;
};

}  // namespace jax_streamk::sm90
