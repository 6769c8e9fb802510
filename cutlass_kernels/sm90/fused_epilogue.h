// The epilogue on accumulators: activation(alpha * sum + beta * residual + bias), in registers.
#pragma once

#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/sm90/epilogue_operands.h"

namespace jax_streamk::sm90 {

// Two passes over the accumulators of a tile: alpha, residual and a late bias in turns; then an early bias and the
// activation, kAtOnce accumulators at a time, with store(begin, end) for each kAtOnce that are done. If kAtOnce is a
// whole tile, nothing is stored. For the other arguments see Biases.
template <int kAtOnce, bool kSwap, bool kThree, class Element, class Accumulators, class Places, class Store>
CUTLASS_DEVICE void apply_epilogue(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                                   Places const& places, Biases<kSwap, Element, Accumulators, kThree>& biases,
                                   Accumulators& accumulators, Store const& store) {
  using Bias = Biases<kSwap, Element, Accumulators, kThree>;
  constexpr int kValues = Bias::kValues, kTurn = Bias::kTurn;
  auto const store_some = [&](int begin, int end) CUTLASS_LAMBDA_FUNC_INLINE {
    if (kAtOnce < kValues) store(begin, end);
  };
  bool const has_residual = params.residual != nullptr;

  // Whether accumulators are outside D along n. The branch saves work, and keeps ptxas from overlapping more turns than
  // there are registers for; up to 64 accumulators leave enough registers.
  int32_t const tile_n = places.n - threadIdx.x % 4 * 2;
  auto const outside = [&](int begin, int end) CUTLASS_LAMBDA_FUNC_INLINE {
    bool const of_one_mma = begin / Bias::kValuesPerMma == (end - 1) / Bias::kValuesPerMma;
    int32_t const first_n = Places::along_n(begin);
    return kValues > 64 && tile_n + (of_one_mma ? first_n : 0) >= n;
  };
  auto const each_pair = [&](int begin, int end, auto const& function) CUTLASS_LAMBDA_FUNC_INLINE {
    if (outside(begin, end)) return;
#pragma unroll
    for (int i = begin; i < end; i += 2) function(i, i + 1);
  };

  // First pass. The next turn's loads are issued once a turn has used its own.
  Residuals<kSwap, Element, Accumulators, kTurn> residuals;
  auto const load_operands = [&](int begin) CUTLASS_LAMBDA_FUNC_INLINE {
    if (!Bias::kEarly) biases.load(params, batch, m, n, places, begin);
    if (has_residual) residuals.load(params, batch, m, n, places, begin);
  };
  float alpha = params.alpha;
  auto const add_operands = [&](int i) CUTLASS_LAMBDA_FUNC_INLINE {
    accumulators(i) = alpha * accumulators(i) + (Bias::kEarly ? 0 : biases.of(i));
    if (has_residual) accumulators(i) += params.beta * residuals.of(i);
  };
  if (has_residual || (!Bias::kEarly && params.bias != nullptr)) {
    load_operands(0);
#pragma unroll
    for (int begin = 0; begin < kValues; begin += kTurn) {
      if (has_residual) residuals.exchange(begin);
      each_pair(begin, cute::min(begin + kTurn, kValues),
                [&](int i, int j) CUTLASS_LAMBDA_FUNC_INLINE { add_operands(i), add_operands(j); });
      if (begin + kTurn < kValues) load_operands(begin + kTurn);
    }
    bool const has_early_bias = Bias::kEarly && params.bias != nullptr;
    if (params.activation == Activation::kNone && !has_early_bias) return store_some(0, kValues);
    alpha = 1;
  }

  // Second pass. Each activation has one piece of code for the whole tile: every jump to cold instructions is a cache
  // miss.
  auto const with_early_bias = [&](int i) CUTLASS_LAMBDA_FUNC_INLINE {
    return alpha * accumulators(i) + (Bias::kEarly ? biases.of(i) : 0);
  };
  constexpr int kStep = kValues >= 160 ? 4 : cute::min(kTurn / 2, 16);  // activations also need registers
  constexpr bool kSharesReciprocal = kValues < 128;                     // and so does sharing a reciprocal
  with_activation<kSharesReciprocal>(params.activation, [&](auto const& function) CUTLASS_LAMBDA_FUNC_INLINE {
    auto const activate_pair = [&](int i, int j) CUTLASS_LAMBDA_FUNC_INLINE {
      float x = with_early_bias(i), y = with_early_bias(j);
      activate_two(function, x, y);
      accumulators(i) = x, accumulators(j) = y;
    };
#pragma unroll
    for (int first = 0; first < kValues; first += kAtOnce) {
      int const last = cute::min(first + kAtOnce, kValues);
#pragma unroll
      for (int begin = first; begin < last; begin += kStep)
        each_pair(begin, cute::min(begin + kStep, last), activate_pair);
      store_some(first, last);
    }
  });
}

}  // namespace jax_streamk::sm90
