#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cutlass_kernels/core/cuda.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/passes/rows.h"

namespace jax_streamk {
namespace {

struct Pointers {
  void* of[RowProgram::kMostOperands];
};

constexpr int kAtOnce = RowProgram::kAtOnce;

// function(T(), conversion of float32 to T) for the type of that name.
template <class Function>
__device__ void with_type(Type type, Function const& function) {
  switch (type) {
    case Type::kBF16: return function(__nv_bfloat16(), [](float x) { return __float2bfloat16_rn(x); });
    case Type::kF16: return function(__half(), [](float x) { return __float2half_rn(x); });
    default: return function(float(), [](float x) { return x; });
  }
}

// x = op(x, y), rounded to `type`, of each element.
template <int kCount>
__device__ void compute(RowOp op, Type type, float (&x)[kCount], float const (&y)[kCount]) {
  switch (op) {
#define JAX_STREAMK_ROW_OP(name, reads) \
  case RowOp::name: _Pragma("unroll") for (int i = 0; i < kCount; ++i) x[i] = row_value(RowOp::name, x[i], y[i]); break;
    JAX_STREAMK_ROW_OPS(JAX_STREAMK_ROW_OP)
#undef JAX_STREAMK_ROW_OP
  }
  if (type == Type::kF32) return;
  with_type(type, [&](auto, auto const& converted) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = static_cast<float>(converted(x[i]));
  });
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
  auto const is_row = [](int value) { return 0 <= value && value < kNumbers; };
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
      float result[1] = {combined_in_warp(op, thread % 32 < kThreads / 32 ? exchanged[thread % 32] : row_neutral(op))};
      compute(RowOp::round, type, result, result);
      *number_at(step.out) = result[0];
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
        compute(op, type, x, y);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) row_at(step.out, first)[i * kThreads] = x[i];
      }
    } else {
      float x[1] = {number(step.a)}, y[1] = {number(b)};
      compute(op, type, x, y);
      *number_at(step.out) = x[0];
    }
  }
}

auto kernel_of(int32_t threads) {
  return threads == 128 ? run_rows<128> : threads == 256 ? run_rows<256> : run_rows<512>;
}

}  // namespace

Status launch_rows(RowProgram const& p, void* const* operands, void* stream, RowOverlap overlap) {
  auto const bytes = static_cast<int>(p.shared_bytes());
  auto* const kernel = kernel_of(p.threads);
  if (bytes > 48 << 10) {
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
  config.gridDim = dim3(static_cast<unsigned>(p.rows), (p.columns + p.columns_of_cta - 1) / p.columns_of_cta);
  config.blockDim = dim3(p.threads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = kHopper && overlap.before;
  return from_cuda(cudaLaunchKernelEx(&config, kernel, p, pointers, overlap.after), "launching a program of rows");
}

}  // namespace jax_streamk
