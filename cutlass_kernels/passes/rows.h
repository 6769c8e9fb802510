// What lies between the products of a chain: a short program on each row of a matrix, such as a norm. A step computes a
// value from others, in float32, and rounds it to a type. A value is a row of `columns` elements, or one number for
// each row.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// In each, with the semantics of the operation of that name in lax: X(name, number of values that it reads). `load`
// and `store` move a row of an operand; `round` is convert_element_type.
// clang-format off
#define JAX_STREAMK_ROW_OPS(X) \
  X(load, 0) X(store, 1) X(round, 1) X(add, 2) X(sub, 2) X(mul, 2) X(div, 2) X(max, 2) X(min, 2) X(neg, 1) \
  X(abs, 1) X(exp, 1) X(log, 1) X(tanh, 1) X(logistic, 1) X(rsqrt, 1) X(sqrt, 1) X(erf, 1) X(reduce_sum, 1) \
  X(reduce_max, 1)
// clang-format on

enum class RowOp : int8_t {
#define JAX_STREAMK_ROW_OP(name, reads) name,
  JAX_STREAMK_ROW_OPS(JAX_STREAMK_ROW_OP)
#undef JAX_STREAMK_ROW_OP
};

#define JAX_STREAMK_ROW_OP(name, reads) +1
inline constexpr int kRowOps = JAX_STREAMK_ROW_OPS(JAX_STREAMK_ROW_OP);
#undef JAX_STREAMK_ROW_OP
JSK_HOST_DEVICE constexpr int row_reads(RowOp op) {
  switch (op) {
#define JAX_STREAMK_ROW_OP(name, reads) \
  case RowOp::name: return reads;
    JAX_STREAMK_ROW_OPS(JAX_STREAMK_ROW_OP)
#undef JAX_STREAMK_ROW_OP
  }
  return 0;
}

// out = op(a, b), rounded to `type`. Values are numbered; those from kNumbers on have one number for each row, and
// negative ones are constants: -1 is the first. In the place of `a` a load has an operand, and so a store of `out`.
struct alignas(8) RowStep {
  int8_t op, type, out, a, b;
};
inline constexpr int kNumbers = 64;

// How an operand lies in memory, in elements: where its first row begins, and how far the next row and column are. A
// vector that all rows share has a row stride of 0, and one with a number for each row a column stride of 0.
struct RowOperand {
  int64_t first = 0, row_stride = 0;
  int32_t column_stride = 0;
  Type type = Type::kF32;
};

// Trivially copyable: the parameter of a kernel.
struct RowProgram {
  static constexpr int kMostSteps = 64, kMostOperands = 12, kMostConstants = 16;
  static constexpr int kMostColumns = 1024;  // of a CTA that sums nothing
  static constexpr int kAtOnce = 8;          // elements that a thread computes at once

  int64_t rows = 0;
  int32_t columns = 0;
  int32_t values = 0, numbers = 0;  // of each kind of value, how many it keeps at a time
  // On a GPU: columns and threads of a CTA, which keeps every value in shared memory; a thread has its own elements, a
  // multiple of kAtOnce.
  int32_t columns_of_cta = 0, threads = 0, elements = 0;
  int32_t step_count = 0, operand_count = 0, constant_count = 0;
  RowStep steps[kMostSteps];
  RowOperand operands[kMostOperands];
  float constants[kMostConstants];

  // Elements from an operand's start to the end of the last one that is moved.
  int64_t span(int operand) const;

  // On a GPU.
  int64_t shared_bytes() const { return 4 * ((int64_t{values} * elements + numbers) * threads + 32); }
};
// Of shared memory that a program may have: what a CTA may on a GPU of this compute capability, and on Hopper
// elsewhere.
constexpr int64_t most_row_bytes(int32_t arch) {
  return (arch == 80 || arch == 87 ? 163 : arch == 0 || (arch >= 90 && arch < 120) ? 227 : 99) << 10;
}

// A program as numbers: five of each step, and four of each operand, where its first row begins, its row stride, its
// column stride and its type.
struct RowNumbers {
  int64_t rows = 0, columns = 0, values = 0, numbers = 0;
  std::vector<int32_t> steps;
  std::vector<int64_t> operands;
  std::vector<float> constants;
};
// Ok, or InvalidArgument: a program that the device may not run.
Status make(RowProgram&, RowNumbers const&, Device const&);

// Row `row` of a program on a CPU; `values` has room for values * columns + numbers.
void run_row(RowProgram const&, void* const* operands, int64_t row, float* values);

// How a program overlaps its neighbours on a stream. `before`: it may start while the kernel before it runs. `after`:
// the next kernel may start at once, while the one before this may still write; else once that has ended.
struct RowOverlap {
  bool before = false, after = false;
};
// All rows on a GPU, on `stream` (a cudaStream_t).
Status launch_rows(RowProgram const&, void* const* operands, void* stream, RowOverlap overlap);

// A value of a step that computes elements one by one.
JSK_HOST_DEVICE float row_value(RowOp op, float a, float b) {
  switch (op) {
    case RowOp::add: return a + b;
    case RowOp::sub: return a - b;
    case RowOp::mul: return a * b;
    case RowOp::div: return a / b;
    case RowOp::max: return a > b || a != a ? a : b;
    case RowOp::min: return a < b || a != a ? a : b;
    case RowOp::neg: return -a;
    case RowOp::abs: return fabsf(a);
    case RowOp::exp: return expf(a);
    case RowOp::log: return logf(a);
    case RowOp::tanh: return tanhf(a);
    case RowOp::logistic: return 1.0f / (1.0f + expf(-a));
    case RowOp::rsqrt: return 1.0f / sqrtf(a);
    case RowOp::sqrt: return sqrtf(a);
    case RowOp::erf: return erff(a);
    default: return a;
  }
}

// Of a sum or a maximum: what it is of nothing, and of two parts.
JSK_HOST_DEVICE float row_neutral(RowOp op) { return op == RowOp::reduce_sum ? 0.0f : -INFINITY; }
JSK_HOST_DEVICE float row_combined(RowOp op, float a, float b) {
  return row_value(op == RowOp::reduce_sum ? RowOp::add : RowOp::max, a, b);
}

}  // namespace jax_streamk
