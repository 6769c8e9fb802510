// The epilogue of the sm90 family: accumulators go through ours in registers, then through CUTLASS's, which converts them and
// stores them by way of shared memory.
//
// Bias and residual come straight from global memory, some accumulators ahead, and an idle warp has them brought near before: as a C
// operand they would take shared memory from the main loop.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"
#include "cutlass_kernels/dependent_launch.cuh"
#include "cutlass_kernels/epilogue.cuh"

namespace jax_streamk::sm90 {

// What CUTLASS's epilogue does to accumulators: it converts them. It also carries the parameters of ours.
template <class Element>
struct Conversion : cutlass::epilogue::fusion::Sm90VisitorImpl<> {
  using Params = EpilogueParams<float, Element>;
  using Arguments = Params;

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& arguments, void*) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE Conversion() {}
  CUTLASS_HOST_DEVICE Conversion(Params const&, SharedStorage const&) {}

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    template <int kCount>
    CUTLASS_DEVICE auto visit(cutlass::Array<float, kCount> const& x, int, int, int) {
      return cutlass::NumericArrayConverter<Element, float, kCount>{}(x);
    }
  };
  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const&) {
    return Callbacks{};
  }
};

// accumulators = epilogue(accumulators). `coordinates` are where a thread's accumulators lie in the kernel's own result, of extents
// (m, n), which is D, or with swap_ab its transpose: two neighbours along n, two of a row 8 below, and so on along n.
template <bool kSwap, class Element, class Accumulators, class Coordinates>
CUTLASS_DEVICE void apply(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                          Coordinates const& coordinates, Accumulators& accumulators) {
  // A loop around turns would have to move accumulators, since registers have no index, and take longer than its code does to load. The
  // more accumulators, the fewer registers a turn has before it spills.
  constexpr int kValues = cute::size(Accumulators{}), kTurn = kValues > 160 ? 8 : kValues > 128 ? 16 : 32;
  constexpr int kVector = kSwap ? 1 : 2;  // neighbours in a row of D
  using Vector = cutlass::AlignedArray<Element, kVector>;
  // Accumulators of one wgmma are spread alike. Of a column of D are 2 of 4 in turn, or with swap_ab a wgmma's upper or lower rows.
  constexpr int kBlock = cute::size<0>(Accumulators{}), kBiases = kSwap ? kValues / kBlock * 2 : kTurn / 4;
  auto const bias_of = [](int begin, int i) { return kSwap ? (begin + i) / kBlock * 2 + i / 2 % 2 : i / 4; };
  auto const offset_m = [&](int i) { return static_cast<int32_t>(cute::get<0>(coordinates.layout()(i))); };
  auto const offset_n = [&](int i) { return static_cast<int32_t>(cute::get<1>(coordinates.layout()(i))); };
  // Opaque, or every load would compute them again.
  auto const hidden = [](auto* pointer) {
    asm("" : "+l"(pointer));
    return pointer;
  };
  auto const first = coordinates(0);
  int32_t const first_m = cute::get<0>(first), first_n = cute::get<1>(first);
  Element const* const bias = hidden(params.bias + batch * params.batch_stride_bias + (kSwap ? first_m : first_n));
  Element const* const residual = hidden(params.residual + batch * params.batch_stride_d +
                                         (kSwap ? first_n * params.ldd + first_m : first_m * params.ldd + first_n));
  bool const has_bias = params.bias != nullptr, has_residual = params.residual != nullptr;

  // As they lie in memory: unpacked they would take more registers.
  Vector bias_values[kBiases], residual_values[kTurn / kVector];
#pragma unroll
  for (Vector& values : bias_values) values.clear();
  auto const load_operands = [&](int begin) {
    if (has_bias && (!kSwap || begin == 0)) {
#pragma unroll
      for (int j = 0; j < kBiases; ++j) {
        int const i = kSwap ? j / 2 * kBlock + j % 2 * 2 : begin + j * 4;
        if (i >= kValues) break;
        int32_t const along = kSwap ? offset_m(i) : offset_n(i);
        if ((kSwap ? first_m : first_n) + along < (kSwap ? m : n)) bias_values[j] = load_vector<Vector>(bias + along);
      }
    }
    if (has_residual) {
#pragma unroll
      for (int i = 0; begin + i < kValues && i < kTurn; i += kVector) {
        int32_t const at_m = offset_m(begin + i), at_n = offset_n(begin + i);
        if (first_m + at_m < m && first_n + at_n < n)
          residual_values[i / kVector] = load_vector<Vector>(residual + (kSwap ? at_n * params.ldd + at_m : at_m * params.ldd + at_n));
      }
    }
  };

  load_operands(0);
#pragma unroll
  for (int begin = 0; begin < kValues; begin += kTurn) {
    int const count = kValues - begin < kTurn ? kValues - begin : kTurn;
    float x[kTurn];
#pragma unroll
    for (int i = 0; i < count; ++i)
      x[i] = params.alpha * accumulators(begin + i) + static_cast<float>(bias_values[bias_of(begin, i)][i % kVector]);
    if (has_residual) {
#pragma unroll
      for (int i = 0; i < count; ++i) x[i] += params.beta * static_cast<float>(residual_values[i / kVector][i % kVector]);
    }
    if (begin + kTurn < kValues) load_operands(begin + kTurn);
    activate(params.activation, x, count);
#pragma unroll
    for (int i = 0; i < count; ++i) accumulators(begin + i) = x[i];
  }
}

// Has the bias of a tile of D brought to L1, and its residual to L2, by a warp that stores nothing and waits for nothing. The tile
// begins at (row, column) of D, (rows, columns) are the extents that D and the tile share.
template <class Element>
CUTLASS_DEVICE void prefetch(EpilogueParams<float, Element> const& params, int64_t batch, int32_t row, int32_t column, int32_t rows,
                             int32_t columns, int lane) {
  constexpr int kSector = 32 / sizeof(Element), kLine = 128 / sizeof(Element);
  if (params.bias != nullptr) {
    Element const* const bias = params.bias + batch * params.batch_stride_bias + column;
    for (int32_t i = lane * kSector; i < columns; i += 32 * kSector) asm volatile("prefetch.global.L1 [%0];" ::"l"(bias + i));
  }
  if (params.residual != nullptr) {
    Element const* const residual = params.residual + batch * params.batch_stride_d + column;
    for (int32_t r = lane; r < rows; r += 32)
      for (int32_t i = 0; i < columns; i += kLine)
        prefetch_to_l2(residual + (row + r) * params.ldd + i);
  }
}

template <class Base, bool kSwap>
struct CollectiveEpilogue : Base {
  CUTLASS_DEVICE CollectiveEpilogue(typename Base::Params const& params, typename Base::TensorStorage& storage)
      : Base(params, storage), params(params.thread) {}

  // What CUTLASS's kernels call in the producer's epilogue warp, which would load C.
  CUTLASS_DEVICE bool is_producer_load_needed() const { return params.bias != nullptr || params.residual != nullptr; }

  template <class ProblemShape, class TileShape, class TileCoordinate, class TiledMma, class... Subtile>
  CUTLASS_DEVICE auto load(typename Base::LoadPipeline, typename Base::LoadPipelineState state, ProblemShape problem_shape,
                           TileShape tile_shape, TileCoordinate tile, TiledMma, int lane, typename Base::TensorStorage&, Subtile...) {
    auto const [m, n, k, l] = problem_shape;
    int32_t const begin_m = cute::get<0>(tile) * cute::get<0>(tile_shape), begin_n = cute::get<1>(tile) * cute::get<1>(tile_shape);
    int32_t const extent_m = min(m - begin_m, static_cast<int32_t>(cute::get<0>(tile_shape)));
    int32_t const extent_n = min(n - begin_n, static_cast<int32_t>(cute::get<1>(tile_shape)));
    if constexpr (kSwap) {
      prefetch(params, cute::get<3>(tile), begin_n, begin_m, extent_n, extent_m, lane);
    } else {
      prefetch(params, cute::get<3>(tile), begin_m, begin_n, extent_m, extent_n, lane);
    }
    return state;
  }
  CUTLASS_DEVICE auto load_tail(typename Base::LoadPipeline, typename Base::LoadPipelineState state) { return state; }

  template <class ProblemShape, class TileShape, class TileCoordinate, class Accumulators, class TiledMma, class... Subtile>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline load_pipeline, typename Base::LoadPipelineState load_state,
                            typename Base::StorePipeline store_pipeline, typename Base::StorePipelineState store_state,
                            ProblemShape problem_shape, TileShape tile_shape, TileCoordinate tile, Accumulators accumulators,
                            TiledMma tiled_mma, int thread, typename Base::TensorStorage& storage, Subtile... subtile) {
    let_dependents_start();  // which reduce slices or copy D
    if (!params.plain) {
      auto const [m, n, k, l] = problem_shape;
      auto const whole = cute::make_identity_tensor(cute::make_shape(m, n));
      auto const of_tile = cute::local_tile(whole, cute::take<0, 2>(tile_shape), cute::take<0, 2>(tile));
      apply<kSwap>(params, cute::get<3>(tile), m, n, tiled_mma.get_slice(thread).partition_C(of_tile), accumulators);
    }
    return Base::store(load_pipeline, load_state, store_pipeline, store_state, problem_shape, tile_shape, tile, accumulators,
                       tiled_mma, thread, storage, subtile...);
  }

  typename Base::FusionCallbacks::Params const& params;
};

}  // namespace jax_streamk::sm90
