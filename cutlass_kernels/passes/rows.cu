#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cutlass_kernels/core/cuda.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/passes/known_rows.cuh"
#include "cutlass_kernels/passes/rows.h"

namespace jax_streamk {
namespace {

struct Pointers {
  void* of[RowProgram::kMostOperands];
};

constexpr int kAtOnce = RowProgram::kAtOnce;

// Whether a value has an element for each column.
constexpr bool is_row(int value) { return 0 <= value && value < kNumbers; }

// function(T(), conversion of float32 to T) for the type of that name.
template <class Function>
__device__ void with_type(Type type, Function const& function) {
  switch (type) {
    case Type::kBF16: return function(__nv_bfloat16(), [](float x) { return __float2bfloat16_rn(x); });
    case Type::kF16: return function(__half(), [](float x) { return __float2half_rn(x); });
    default: return function(float(), [](float x) { return x; });
  }
}

__device__ float rounded(float x, Type type) {
  with_type(type, [&](auto, auto const& converted) { x = static_cast<float>(converted(x)); });
  return x;
}

// Any operation. Not in line: instructions come from memory as data does, and these are thousands.
__device__ __noinline__ float any_value(RowOp op, Type type, float a, float b) {
  return rounded(row_value(op, a, b), type);
}

// Whether an operation is few instructions; then x = op(x, y), rounded to `type`, of each element.
__device__ bool compute(RowOp op, Type type, float (&x)[kAtOnce], float const (&y)[kAtOnce]) {
  switch (op) {
#define JAX_STREAMK_SHORT_OP(name)                                                                 \
  case RowOp::name:                                                                                \
    _Pragma("unroll") for (int i = 0; i < kAtOnce; ++i) x[i] = row_value(RowOp::name, x[i], y[i]); \
    break;
    JAX_STREAMK_SHORT_OP(round)
    JAX_STREAMK_SHORT_OP(add)
    JAX_STREAMK_SHORT_OP(sub)
    JAX_STREAMK_SHORT_OP(mul)
    JAX_STREAMK_SHORT_OP(max)
    JAX_STREAMK_SHORT_OP(neg)
#undef JAX_STREAMK_SHORT_OP
    default: return false;
  }
  if (type == Type::kF32) return true;
  with_type(type, [&](auto, auto const& converted) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = static_cast<float>(converted(x[i]));
  });
  return true;
}

__device__ float combined_in_warp(RowOp op, float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = row_combined(op, x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// A CTA has a row, or some of its columns. A thread has every kThreads-th element of each value, so that only
// reductions exchange any. What is added in which order depends on the number of columns alone.
//
// Steps cost instructions, not time in memory: a thread does kAtOnce elements between two branches, at constant
// distances, and those beyond its last one, too.
template <int kThreads>
__global__ __launch_bounds__(kThreads) void run_rows(__grid_constant__ RowProgram const p,
                                                     __grid_constant__ Pointers const pointers, bool lets_start_first) {
  extern __shared__ float shared[];
  using Elements = float[kAtOnce];
  int const thread = threadIdx.x, first_column = blockIdx.y * p.columns_of_cta + thread,
            columns = min(p.columns_of_cta, p.columns - static_cast<int>(blockIdx.y) * p.columns_of_cta),
            count = (columns - thread + kThreads - 1) / kThreads, elements = p.elements;
  int64_t const row = blockIdx.x;
  float* const exchanged = shared;
  float* const own = shared + 32 + thread;  // element i of value v is own[(v * elements + i) * kThreads]
  float* const numbers = own + p.values * elements * kThreads;
  auto const row_at = [&](int value, int first) { return own + (value * elements + first) * kThreads; };
  auto const number_at = [&](int value) { return numbers + (value - kNumbers) * kThreads; };
  auto const number = [&](int value) { return value < 0 ? p.constants[-value - 1] : *number_at(value); };
  auto const fetch = [&](Elements& x, int value, int first) {
    if (is_row(value)) {
      float const* const from = row_at(value, first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = from[i * kThreads];
    } else {
      float const same = number(value);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = same;
    }
  };
  auto const in_memory = [&](RowOperand const& x, int first) {
    return x.first + row * x.row_stride + static_cast<int64_t>(first_column + first * kThreads) * x.column_stride;
  };
  if (lets_start_first) let_dependents_start();
  // Operands from memory are on their way while the kernel before ends.
#pragma unroll 1
  for (int s = 0; s < p.step_count; ++s) {
    RowStep const step = p.steps[s];
    if (RowOp(step.op) != RowOp::load) continue;
    RowOperand const& x = p.operands[step.a];
    int const size = x.type == Type::kF32 ? 4 : 2;
    if (thread * size % 128 != 0) continue;
#pragma unroll 1
    for (int i = 0; i < (is_row(step.out) ? count : 1); ++i)
      prefetch_to_l2(static_cast<char const*>(pointers.of[step.a]) + in_memory(x, i) * size);
  }
  wait_for_primary();
  if (!lets_start_first) let_dependents_start();
#pragma unroll 1
  for (int s = 0; s < p.step_count; ++s) {
    RowStep const step = p.steps[s];
    auto const op = RowOp(step.op);
    auto const type = Type(step.type);
    if (op == RowOp::reduce_sum || op == RowOp::reduce_max) {
      float sum = row_neutral(op);
#pragma unroll 1
      for (int first = 0; first < count; first += kAtOnce) {
        Elements x;
        fetch(x, step.a, first);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (first + i < count) sum = row_combined(op, sum, x[i]);
      }
      sum = combined_in_warp(op, sum);
      __syncthreads();  // the sums before have been read
      if (thread % 32 == 0) exchanged[thread / 32] = sum;
      __syncthreads();
      sum = combined_in_warp(op, thread % 32 < kThreads / 32 ? exchanged[thread % 32] : row_neutral(op));
      *number_at(step.out) = rounded(sum, type);
    } else if (op == RowOp::load) {
      // Not through the read-only cache: the kernel before may still write when this one starts.
      RowOperand const& x = p.operands[step.a];
      with_type(x.type, [&](auto zero, auto const&) {
        auto const* const from = static_cast<decltype(zero) const*>(pointers.of[step.a]) + in_memory(x, 0);
        if (!is_row(step.out)) {
          *number_at(step.out) = static_cast<float>(__ldcg(from));
          return;
        }
#pragma unroll 1
        for (int first = 0; first < count; first += kAtOnce) {
          decltype(zero) loaded[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            if (first + i < count) loaded[i] = __ldcg(from + (first + i) * kThreads * x.column_stride);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) row_at(step.out, first)[i * kThreads] = static_cast<float>(loaded[i]);
        }
      });
    } else if (op == RowOp::store) {
      RowOperand const& x = p.operands[step.out];
      with_type(x.type, [&](auto zero, auto const& converted) {
        auto* const to = static_cast<decltype(zero)*>(pointers.of[step.out]) + in_memory(x, 0);
        if (x.column_stride == 0) {
          if (first_column == 0) *to = converted(number(step.a));
          return;
        }
#pragma unroll 1
        for (int first = 0; first < count; first += kAtOnce) {
          Elements y;
          fetch(y, step.a, first);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            if (first + i < count) to[(first + i) * kThreads] = converted(y[i]);
        }
      });
    } else if (int const b = row_reads(op) > 1 ? step.b : step.a; is_row(step.out)) {
#pragma unroll 1
      for (int first = 0; first < count; first += kAtOnce) {
        Elements x, y;
        fetch(x, step.a, first);
        fetch(y, b, first);
        float* const to = row_at(step.out, first);
        if (compute(op, type, x, y)) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) to[i * kThreads] = x[i];
        } else {
          auto const element = [&](int value, int i) {
            return is_row(value) ? row_at(value, first)[i * kThreads] : number(value);
          };
#pragma unroll 1
          for (int i = 0; i < kAtOnce; ++i) to[i * kThreads] = any_value(op, type, element(step.a, i), element(b, i));
        }
      }
    } else {
      *number_at(step.out) = any_value(op, type, number(step.a), number(b));
    }
  }
}

auto kernel_of(int32_t threads) {
  return threads == 128 ? run_rows<128> : threads == 256 ? run_rows<256> : run_rows<512>;
}

template <class Function, size_t... kAt>
__device__ void for_each(std::index_sequence<kAt...>, Function const& function) {
  (function(std::integral_constant<size_t, kAt>()), ...);
}

// A program that is compiled, with kElements of a row in a thread's registers.
template <class Known, class Half, int kElements>
__global__ __launch_bounds__(1024) void run_known(__grid_constant__ RowProgram const p,
                                                  __grid_constant__ Pointers const pointers, bool lets_start_first) {
  __shared__ float exchanged[2][32];
  int const thread = threadIdx.x, threads = blockDim.x, columns = p.columns;
  int64_t const row = blockIdx.x;
  float values[2][kElements], numbers[2];
  if (lets_start_first) let_dependents_start();
  wait_for_primary();
  if (!lets_start_first) let_dependents_start();
  auto const run = [&](auto at) {
    constexpr RowStep kStep = Known::steps[decltype(at)::value];
    constexpr auto kOp = RowOp(kStep.op);
    constexpr bool kRounds = Type(kStep.type) == Type::kBF16;
    auto const value = [&](auto which, int i) {
      constexpr int kValue = decltype(which)::value;
      if constexpr (is_row(kValue)) return values[kValue][i];
      if constexpr (kValue >= kNumbers) return numbers[kValue - kNumbers];
      if constexpr (kValue < 0) return p.constants[-kValue - 1];
    };
    auto const rounded = [](float x) {
      if constexpr (kRounds) return static_cast<float>(static_cast<Half>(x));
      return x;
    };
    using A = std::integral_constant<int, kStep.a>;
    using B = std::integral_constant<int, (row_reads(kOp) > 1 ? kStep.b : kStep.a)>;
    if constexpr (kOp == RowOp::load) {
      RowOperand const& x = p.operands[kStep.a];
      with_type(x.type, [&](auto zero, auto const&) {
        auto const* const from = static_cast<decltype(zero) const*>(pointers.of[kStep.a]) + x.first +
                                 row * x.row_stride + thread * x.column_stride;
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          values[kStep.out][i] =
              thread + i * threads < columns ? static_cast<float>(__ldcg(from + i * threads * x.column_stride)) : 0.0f;
      });
    } else if constexpr (kOp == RowOp::store) {
      RowOperand const& x = p.operands[kStep.out];
      auto* const to = static_cast<Half*>(pointers.of[kStep.out]) + x.first + row * x.row_stride + thread;
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (thread + i * threads < columns) to[i * threads] = static_cast<Half>(values[kStep.a][i]);
    } else if constexpr (kOp == RowOp::reduce_sum) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (thread + i * threads < columns) sum += values[kStep.a][i];
      sum = combined_in_warp(kOp, sum);
      float* const places = exchanged[kStep.out - kNumbers];
      if (thread % 32 == 0) places[thread / 32] = sum;
      __syncthreads();
      numbers[kStep.out - kNumbers] = combined_in_warp(kOp, thread % 32 < threads / 32 ? places[thread % 32] : 0.0f);
    } else if constexpr (is_row(kStep.out)) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) values[kStep.out][i] = rounded(row_value(kOp, value(A(), i), value(B(), i)));
    } else {
      numbers[kStep.out - kNumbers] = rounded(row_value(kOp, value(A(), 0), value(B(), 0)));
    }
  };
  for_each(std::make_index_sequence<Known::steps.size()>(), run);
}

constexpr int kOfThread = 16;  // elements at most

using Launched = void (*)(RowProgram, Pointers, bool);

// The one of some compiled programs that a program is; null if none.
template <class Half, class... Known>
Launched one_of(RowProgram const& p, Type half, int elements) {
  Launched found = nullptr;
  ((is_known<Known>(p, half) && (found = elements <= 4   ? run_known<Known, Half, 4>
                                         : elements <= 8 ? run_known<Known, Half, 8>
                                                         : run_known<Known, Half, kOfThread>)),
   ...);
  return found;
}
template <class Half>
Launched known_of(RowProgram const& p, Type half, int elements) {
  return one_of<Half, RmsNorm, RmsNormInF32, LayerNorm, SiluGate>(p, half, elements);
}

}  // namespace

Status launch_rows(RowProgram const& p, void* const* operands, void* stream, RowOverlap overlap) {
  auto const bytes = static_cast<int>(p.shared_bytes());
  Launched kernel = nullptr;
  int32_t threads = std::min((p.columns + 127) / 128 * 32, 1024);
  if (int32_t const elements = (p.columns + threads - 1) / threads; elements <= kOfThread) {
    kernel = known_of<__nv_bfloat16>(p, Type::kBF16, elements);
    if (kernel == nullptr) kernel = known_of<__half>(p, Type::kF16, elements);
  }
  bool const is_known = kernel != nullptr;
  if (!is_known) kernel = kernel_of(p.threads), threads = p.threads;
  if (!is_known && bytes > 48 << 10) {
    Status const status = from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                                    "raising the shared memory limit of programs of rows");
    if (!status.ok()) return status;
  }
  Pointers pointers{};
  for (int i = 0; i < p.operand_count; ++i) pointers.of[i] = operands[i];
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(p.rows), is_known ? 1 : (p.columns + p.columns_of_cta - 1) / p.columns_of_cta);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = is_known ? 0 : bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = kHopper && overlap.before;
  return from_cuda(cudaLaunchKernelEx(&config, kernel, p, pointers, overlap.after), "launching a program of rows");
}

}  // namespace jax_streamk
