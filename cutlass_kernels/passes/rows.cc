#include "cutlass_kernels/passes/rows.h"

#include <Eigen/Core>
#include <algorithm>
#include <string>

namespace jax_streamk {
namespace {

bool is_number(int value) { return value >= kNumbers; }

bool is_reduction(RowOp op) { return op == RowOp::reduce_sum || op == RowOp::reduce_max; }

bool is_kept(Type type) { return type == Type::kF32 || type == Type::kBF16 || type == Type::kF16; }

// function(T()) for the type of that name.
template <class Function>
auto with_type(Type type, Function const& function) {
  switch (type) {
    case Type::kBF16: return function(Eigen::bfloat16());
    case Type::kF16: return function(Eigen::half());
    default: return function(float());
  }
}

}  // namespace

int64_t RowProgram::span(int operand) const {
  RowOperand const& x = operands[operand];
  return x.first + (rows - 1) * x.row_stride + int64_t{columns - 1} * x.column_stride + 1;
}

namespace {

Status refuse(std::string const& why) { return Status::invalid("a program of rows " + why); }

Status check(RowProgram const& p, Device const& device) {
  if (int64_t const most = most_row_bytes(device.arch); p.shared_bytes() > most)
    return refuse("of " + std::to_string(p.columns) + " columns needs " + std::to_string(p.shared_bytes()) +
                  " bytes of shared memory: at most " + std::to_string(most));
  for (RowOperand const* x = p.operands; x < p.operands + p.operand_count; ++x) {
    bool const is_dense = (x->row_stride >= p.columns && x->column_stride == 1) || x->row_stride == 0 ||
                          (x->row_stride == 1 && x->column_stride == 0);
    if (!is_dense || !is_kept(x->type)) return refuse("has an operand of another type or layout");
  }
  auto const are_within = [](int count, int most) { return 0 <= count && count <= most; };
  auto const is_value = [&](int x) { return is_number(x) ? x - kNumbers < p.numbers : 0 <= x && x < p.values; };
  auto const is_source = [&](int x) { return x < 0 ? -x <= p.constant_count : is_value(x); };
  auto const is_operand = [&](int x) { return 0 <= x && x < p.operand_count; };
  for (RowStep const* step = p.steps; step < p.steps + p.step_count; ++step) {
    if (!are_within(step->op, kRowOps - 1) || !is_kept(Type(step->type))) return refuse("has an unknown step");
    auto const op = RowOp(step->op);
    int const reads = row_reads(op);
    bool is_sound = op == RowOp::load ? is_operand(step->a) : is_source(step->a);
    is_sound &= reads < 2 || is_source(step->b);
    is_sound &= op == RowOp::store ? is_operand(step->out) : is_value(step->out);
    // A row does not fit one number.
    if (is_sound && op == RowOp::load) is_sound = p.operands[step->a].column_stride == 0 || !is_number(step->out);
    if (is_sound && op == RowOp::store) is_sound = p.operands[step->out].row_stride != 0;
    if (is_sound && is_reduction(op))
      is_sound = is_number(step->out) && 0 <= step->a && !is_number(step->a);
    else if (is_sound && reads > 0 && op != RowOp::store && is_number(step->out))
      is_sound = (step->a < 0 || is_number(step->a)) && (reads < 2 || step->b < 0 || is_number(step->b));
    if (!is_sound) return refuse("has a step of values or operands that it has not");
  }
  return {};
}

}  // namespace

Status make(RowProgram& p, RowNumbers const& from, Device const& device) {
  auto const is_within = [](int64_t x, int64_t most) { return 0 <= x && x <= most; };
  if (!is_within(from.rows - 1, INT32_MAX - 1) || !is_within(from.columns - 1, INT32_MAX - 1))
    return refuse("has no rows or columns, or too many");
  if (from.steps.size() > 5 * RowProgram::kMostSteps || from.operands.size() > 4 * RowProgram::kMostOperands ||
      from.constants.size() > RowProgram::kMostConstants || !is_within(from.values, kNumbers) ||
      !is_within(from.numbers, INT8_MAX - kNumbers))
    return refuse("has " + std::to_string(from.steps.size() / 5) + " steps, " +
                  std::to_string(from.operands.size() / 4) + " arrays and " + std::to_string(from.constants.size()) +
                  " numbers: at most " + std::to_string(RowProgram::kMostSteps) + ", " +
                  std::to_string(RowProgram::kMostOperands) + " and " + std::to_string(RowProgram::kMostConstants));
  p.rows = from.rows, p.columns = static_cast<int32_t>(from.columns);
  p.values = static_cast<int32_t>(from.values), p.numbers = static_cast<int32_t>(from.numbers);
  p.step_count = static_cast<int32_t>(from.steps.size() / 5);
  p.operand_count = static_cast<int32_t>(from.operands.size() / 4);
  p.constant_count = static_cast<int32_t>(from.constants.size());
  for (int i = 0; i < p.step_count; ++i) {
    int32_t const* const x = &from.steps[5 * i];
    if (std::any_of(x, x + 5, [](int32_t x) { return x != static_cast<int8_t>(x); }))
      return refuse("has unknown steps");
    auto const byte = [&](int at) { return static_cast<int8_t>(x[at]); };
    p.steps[i] = {byte(0), byte(1), byte(2), byte(3), byte(4)};
  }
  bool const reduces =
      std::any_of(p.steps, p.steps + p.step_count, [](RowStep x) { return is_reduction(RowOp(x.op)); });
  p.columns_of_cta = reduces ? p.columns : std::min(p.columns, int32_t{RowProgram::kMostColumns});
  p.threads = 128;
  while (p.threads < 512 && 2 * RowProgram::kAtOnce * p.threads < p.columns_of_cta) p.threads *= 2;
  int32_t const at_once = p.threads * RowProgram::kAtOnce;
  p.elements = (p.columns_of_cta + at_once - 1) / at_once * RowProgram::kAtOnce;
  for (int i = 0; i < p.operand_count; ++i) {
    int64_t const* const x = &from.operands[4 * i];
    if (!is_within(x[0], INT32_MAX) || !is_within(x[1], INT32_MAX) || !is_within(x[2], 1) || !is_within(x[3], INT8_MAX))
      return refuse("has unknown operands");
    p.operands[i] = {x[0], x[1], static_cast<int32_t>(x[2]), static_cast<Type>(x[3])};
  }
  std::copy(from.constants.begin(), from.constants.end(), p.constants);
  return check(p, device);
}

void run_row(RowProgram const& p, void* const* operands, int64_t row, float* values) {
  struct Source {
    float const* from;
    int64_t stride;
  };
  auto const place = [&](int value) {
    return is_number(value) ? values + int64_t{p.values} * p.columns + value - kNumbers
                            : values + int64_t{value} * p.columns;
  };
  auto const source = [&](int value) {
    return value < 0 ? Source{p.constants - value - 1, 0} : Source{place(value), is_number(value) ? 0 : 1};
  };
  for (RowStep const* step = p.steps; step < p.steps + p.step_count; ++step) {
    auto const op = RowOp(step->op);
    int64_t const count = is_number(step->out) ? 1 : p.columns;
    if (op == RowOp::load) {
      RowOperand const& x = p.operands[step->a];
      with_type(x.type, [&](auto zero) {
        auto const* from = static_cast<decltype(zero) const*>(operands[step->a]) + x.first + row * x.row_stride;
        float* const to = place(step->out);
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i * x.column_stride]);
      });
    } else if (op == RowOp::store) {
      RowOperand const& x = p.operands[step->out];
      Source const a = source(step->a);
      with_type(x.type, [&](auto zero) {
        using T = decltype(zero);
        auto* const to = static_cast<T*>(operands[step->out]) + x.first + row * x.row_stride;
        int64_t const stored = x.column_stride == 0 ? 1 : p.columns;
        for (int64_t i = 0; i < stored; ++i) to[i] = static_cast<T>(a.from[i * a.stride]);
      });
    } else {
      Source const a = source(step->a), b = row_reads(op) > 1 ? source(step->b) : a;
      float* const to = place(step->out);
      if (is_reduction(op)) {
        // Added in turns, which loses less than one long sum does.
        constexpr int kTurns = 64;
        float parts[kTurns];
        std::fill(std::begin(parts), std::end(parts), row_neutral(op));
        for (int64_t i = 0; i < p.columns; ++i) parts[i % kTurns] = row_combined(op, parts[i % kTurns], a.from[i]);
        for (int left = kTurns / 2; left > 0; left /= 2)
          for (int i = 0; i < left; ++i) parts[i] = row_combined(op, parts[i], parts[i + left]);
        *to = parts[0];
      } else {
        for (int64_t i = 0; i < count; ++i) to[i] = row_value(op, a.from[i * a.stride], b.from[i * b.stride]);
      }
      with_type(Type(step->type), [&](auto zero) {
        using T = decltype(zero);
        if constexpr (!std::is_same_v<T, float>)
          for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<T>(to[i]));
      });
    }
  }
}

}  // namespace jax_streamk
