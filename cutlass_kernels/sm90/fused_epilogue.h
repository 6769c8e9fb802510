// The epilogue on accumulators: activation(alpha * sum + beta * residual + bias), in registers.
#pragma once

#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/sm90/activated.h"
#include "cutlass_kernels/sm90/epilogue_operands.h"

namespace jax_streamk::sm90 {

// Two passes over the accumulators of a tile: alpha, residual and a late bias in turns; then an early bias and the
// activation, kAtOnce accumulators at a time, with store(begin, end) for each kAtOnce that are done. If kAtOnce is a
// whole tile, nothing is stored. kInlines: as activated() has it. For the other arguments see
// Biases.
template <int kAtOnce, bool kInlines, bool kSwap, bool kThree, class Element, class Accumulators, class Places,
          class Store>
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
      int const end = cute::min(begin + kTurn, kValues);
      if (!outside(begin, end)) {
#pragma unroll
        for (int i = begin; i < end; ++i) add_operands(i);
      }
      if (begin + kTurn < kValues) load_operands(begin + kTurn);
    }
    bool const has_early_bias = Bias::kEarly && params.bias != nullptr;
    if (params.activation == Activation::kNone && !has_early_bias) return store_some(0, kValues);
    alpha = 1;
  }

  // Second pass.
  auto const with_early_bias = [&](int i) CUTLASS_LAMBDA_FUNC_INLINE {
    return alpha * accumulators(i) + (Bias::kEarly ? biases.of(i) : 0);
  };
  constexpr int kStep = kValues >= 160 ? 4 : cute::min(kTurn / 2, 16);  // activations also need registers
  auto const finish = [&](auto const& activate) CUTLASS_LAMBDA_FUNC_INLINE {
#pragma unroll
    for (int first = 0; first < kValues; first += kAtOnce) {
      int const last = cute::min(first + kAtOnce, kValues);
#pragma unroll
      for (int begin = first; begin < last; begin += kStep) {
        int const end = cute::min(begin + kStep, last);
        if (outside(begin, end)) continue;
#pragma unroll
        for (int i = begin; i < end; i += 4) {
          float4 const x = activate(
              make_float4(with_early_bias(i), with_early_bias(i + 1), with_early_bias(i + 2), with_early_bias(i + 3)));
          accumulators(i) = x.x, accumulators(i + 1) = x.y, accumulators(i + 2) = x.z, accumulators(i + 3) = x.w;
        }
      }
      store_some(first, last);
    }
  };
  if (params.activation == Activation::kNone) {
    finish([](float4 x) CUTLASS_LAMBDA_FUNC_INLINE { return x; });
  } else {
    finish([&](float4 x) CUTLASS_LAMBDA_FUNC_INLINE { return activated<kInlines>(params.activation, x); });
  }
}

}  // namespace jax_streamk::sm90
