// The epilogue of the sm90 family: accumulators go through ours in registers, then through CUTLASS's, which converts them and
// stores them by way of shared memory.
//
// Every kernel runs every epilogue, and the activations written out for each accumulator of a thread would be most of its code. So
// accumulators take turns: a loop cannot index registers, but it can move a group of them past the few that it works on. Bias and
// residual come straight from global memory, one turn ahead: as a C operand they would take shared memory from the main loop.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"
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
// (m, n), which is D, or with swap_ab its transpose.
template <bool kSwap, class Element, class Accumulators, class Coordinates>
CUTLASS_DEVICE void apply(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                          Coordinates const& coordinates, Accumulators& accumulators) {
  constexpr int kValues = cute::size(Accumulators{});
  constexpr int kChunk = kValues > 128 ? 4 : 8, kGroup = kValues % 32 == 0 ? 32 : kValues;
  static_assert(kGroup % kChunk == 0);
  // Two neighbouring accumulators are neighbours along n.
  constexpr int kVector = kSwap ? 1 : 2;  // neighbours in a row of D
  using Vector = cutlass::AlignedArray<Element, kVector>;
  Element const* const bias = params.bias + batch * params.batch_stride_bias;
  Element const* const residual = params.residual + batch * params.batch_stride_d;

  // As they lie in memory: unpacked they would take more registers.
  Vector bias_values[kChunk / kVector], residual_values[kChunk / kVector];
  auto const load_operands = [&](int begin) {
    auto const first = coordinates(begin);
#pragma unroll
    for (int i = 0; i < kChunk / kVector; ++i) {
      auto const offset = coordinates.layout()(i * kVector);
      int32_t const at_m = cute::get<0>(first) + cute::get<0>(offset), at_n = cute::get<1>(first) + cute::get<1>(offset);
      int32_t const row = kSwap ? at_n : at_m, column = kSwap ? at_m : at_n;
      if (params.bias != nullptr && column < (kSwap ? m : n)) bias_values[i] = load_vector<Vector>(bias + column);
      if (params.residual != nullptr && at_m < m && at_n < n)
        residual_values[i] = load_vector<Vector>(residual + row * params.ldd + column);
    }
  };

#pragma unroll
  for (int i = 0; i < kChunk / kVector; ++i) bias_values[i].clear();
  load_operands(0);
#pragma unroll
  for (int group = 0; group < kValues; group += kGroup) {
#pragma unroll 1
    for (int begin = group; begin < group + kGroup; begin += kChunk) {
      float x[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        x[i] = params.alpha * accumulators(group + i) + static_cast<float>(bias_values[i / kVector][i % kVector]);
      if (params.residual != nullptr) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] += params.beta * static_cast<float>(residual_values[i / kVector][i % kVector]);
      }
      if (begin + kChunk < kValues) load_operands(begin + kChunk);
      activate(params.activation, x, kChunk);
#pragma unroll
      for (int i = 0; i < kGroup - kChunk; ++i) accumulators(group + i) = accumulators(group + i + kChunk);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) accumulators(group + kGroup - kChunk + i) = x[i];
    }
  }
}

template <class Base, bool kSwap>
struct CollectiveEpilogue : Base {
  CUTLASS_DEVICE CollectiveEpilogue(typename Base::Params const& params, typename Base::TensorStorage& storage)
      : Base(params, storage), params(params.thread) {}

  template <class ProblemShape, class TileShape, class TileCoordinate, class Accumulators, class TiledMma, class... Subtile>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline load_pipeline, typename Base::LoadPipelineState load_state,
                            typename Base::StorePipeline store_pipeline, typename Base::StorePipelineState store_state,
                            ProblemShape problem_shape, TileShape tile_shape, TileCoordinate tile, Accumulators accumulators,
                            TiledMma tiled_mma, int thread, typename Base::TensorStorage& storage, Subtile... subtile) {
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
