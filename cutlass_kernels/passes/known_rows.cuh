// Programs of rows that are compiled, because they are in many models: an interpreted step takes an H200 700 to 1400
// cycles of latency, whatever it computes.
//
// Steps are those that product/rows.py makes of a function. In the place of a type, bf16 stands for f16, too, and loads
// are of any type.
#pragma once

#include <array>
#include <utility>

#include "cutlass_kernels/passes/rows.h"

namespace jax_streamk {

struct KnownSteps {
  static constexpr RowStep step(RowOp op, Type type, int out, int a, int b = 0) {
    return {static_cast<int8_t>(op), static_cast<int8_t>(type), static_cast<int8_t>(out), static_cast<int8_t>(a),
            static_cast<int8_t>(b)};
  }
  static constexpr Type f32 = Type::kF32, half = Type::kBF16;
  static constexpr int n0 = kNumbers, n1 = kNumbers + 1, c0 = -1, c1 = -2;  // numbers, constants
};

// (x * rsqrt(mean(x * x) + eps)) in half precision, * weight
struct RmsNorm : KnownSteps {
  static constexpr std::array steps{
      step(RowOp::load, f32, 0, 0),      step(RowOp::mul, f32, 1, 0, 0),    step(RowOp::reduce_sum, f32, n0, 1),
      step(RowOp::div, f32, n0, n0, c0), step(RowOp::add, f32, n0, n0, c1), step(RowOp::rsqrt, f32, n0, n0),
      step(RowOp::mul, f32, 0, 0, n0),   step(RowOp::round, half, 0, 0),    step(RowOp::load, half, 1, 1),
      step(RowOp::mul, half, 1, 0, 1),   step(RowOp::store, half, 2, 1)};
};

// x * rsqrt(mean(x * x) + eps) * weight, in half precision
struct RmsNormInF32 : KnownSteps {
  static constexpr std::array steps{
      step(RowOp::load, f32, 0, 0),      step(RowOp::mul, f32, 1, 0, 0),    step(RowOp::reduce_sum, f32, n0, 1),
      step(RowOp::div, f32, n0, n0, c0), step(RowOp::add, f32, n0, n0, c1), step(RowOp::rsqrt, f32, n0, n0),
      step(RowOp::mul, f32, 0, 0, n0),   step(RowOp::load, f32, 1, 1),      step(RowOp::mul, f32, 1, 0, 1),
      step(RowOp::round, half, 1, 1),    step(RowOp::store, half, 2, 1)};
};

// ((x - mean(x)) * rsqrt(variance(x) + eps)) in half precision, * weight + bias
struct LayerNorm : KnownSteps {
  static constexpr std::array steps{
      step(RowOp::load, f32, 0, 0),      step(RowOp::reduce_sum, f32, n0, 0), step(RowOp::div, f32, n0, n0, c0),
      step(RowOp::sub, f32, 1, 0, n0),   step(RowOp::mul, f32, 1, 1, 1),      step(RowOp::reduce_sum, f32, n1, 1),
      step(RowOp::div, f32, n1, n1, c0), step(RowOp::sub, f32, 0, 0, n0),     step(RowOp::add, f32, n1, n1, c1),
      step(RowOp::rsqrt, f32, n1, n1),   step(RowOp::mul, f32, 0, 0, n1),     step(RowOp::round, half, 0, 0),
      step(RowOp::load, half, 1, 1),     step(RowOp::mul, half, 0, 0, 1),     step(RowOp::load, half, 1, 2),
      step(RowOp::add, half, 1, 0, 1),   step(RowOp::store, half, 3, 1)};
};

// silu(x) * y
struct SiluGate : KnownSteps {
  static constexpr std::array steps{step(RowOp::load, half, 0, 0),   step(RowOp::logistic, half, 1, 0),
                                    step(RowOp::mul, half, 1, 0, 1), step(RowOp::load, half, 0, 1),
                                    step(RowOp::mul, half, 0, 1, 0), step(RowOp::store, half, 2, 0)};
};

// Whether a program has these steps, with `half` in the place of bf16.
template <class Known>
bool is_known(RowProgram const& p, Type half) {
  auto const& steps = Known::steps;
  if (p.step_count != static_cast<int32_t>(steps.size())) return false;
  for (size_t i = 0; i < steps.size(); ++i) {
    RowStep const &x = p.steps[i], &y = steps[i];
    auto const op = RowOp(y.op);
    Type const type = Type(y.type) == Type::kBF16 ? half : Type(y.type);
    bool const is_alike = op == RowOp::load || Type(x.type) == type;
    bool const reads_two = row_reads(op) > 1;
    if (x.op != y.op || x.out != y.out || x.a != y.a || (reads_two && x.b != y.b) || !is_alike) return false;
  }
  return true;
}

}  // namespace jax_streamk
