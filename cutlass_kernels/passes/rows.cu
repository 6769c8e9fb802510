#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cutlass_kernels/core/cuda.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/passes/rows.h"

namespace jax_streamk {
namespace {

struct Pointers {
  void* of[RowProgram::kMostOperands];
};

__device__ float rounded(float x, Type type) {
  if (type == Type::kBF16) return __bfloat162float(__float2bfloat16_rn(x));
  if (type == Type::kF16) return __half2float(__float2half_rn(x));
  return x;
}

// Not through the read-only cache: the kernel before may still write when this one starts.
__device__ float load(void const* from, int64_t at, Type type) {
  if (type == Type::kBF16) return __bfloat162float(__ldcg(static_cast<__nv_bfloat16 const*>(from) + at));
  if (type == Type::kF16) return __half2float(__ldcg(static_cast<__half const*>(from) + at));
  return __ldcg(static_cast<float const*>(from) + at);
}

__device__ void store(void* to, int64_t at, Type type, float x) {
  if (type == Type::kBF16) {
    static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(x);
  } else if (type == Type::kF16) {
    static_cast<__half*>(to)[at] = __float2half_rn(x);
  } else {
    static_cast<float*>(to)[at] = x;
  }
}

__device__ float combined_in_warp(RowOp op, float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = row_combined(op, x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// A CTA has a row. A thread has every blockDim.x-th element of each value, so that only reductions exchange any. What
// is added in which order depends on the number of columns alone.
__global__ __launch_bounds__(1024) void run_rows(__grid_constant__ RowProgram const p,
                                                 __grid_constant__ Pointers const pointers) {
  extern __shared__ float shared[];
  int const thread = threadIdx.x, threads = blockDim.x, warps = threads / 32;
  int const elements = (p.columns + threads - 1) / threads;
  int64_t const row = blockIdx.x;
  float* const exchanged = shared;
  float* const own = shared + 32 + thread;  // element i of value v is own[(v * elements + i) * threads]
  float* const numbers = own + p.values * elements * threads;
  // In this order: when the next kernel starts, all before this one have ended.
  wait_for_primary();
  let_dependents_start();
  auto const place = [&](int value) {
    return value >= kNumbers ? numbers + (value - kNumbers) * threads : own + value * elements * threads;
  };
  auto const of_thread = [&](int value) {
    return value >= kNumbers ? 1 : (p.columns - thread + threads - 1) / threads;
  };
#pragma unroll 1
  for (int s = 0; s < p.step_count; ++s) {
    RowStep const step = p.steps[s];
    auto const op = RowOp(step.op);
    auto const type = Type(step.type);
    if (op == RowOp::load) {
      RowOperand const& x = p.operands[step.a];
      float* const to = place(step.out);
      int const count = of_thread(step.out);
#pragma unroll 4
      for (int i = 0; i < count; ++i)
        to[i * threads] =
            load(pointers.of[step.a], row * x.row_stride + static_cast<int64_t>(thread + i * threads) * x.column_stride,
                 x.type);
      continue;
    }
    float const* const a = step.a < 0 ? p.constants - step.a - 1 : place(step.a);
    int const stride_a = step.a < 0 || step.a >= kNumbers ? 0 : threads;
    if (op == RowOp::store) {
      RowOperand const& x = p.operands[step.out];
      int const count = x.column_stride == 0 ? (thread == 0 ? 1 : 0) : of_thread(0);
      for (int i = 0; i < count; ++i)
        store(pointers.of[step.out], row * x.row_stride + thread + static_cast<int64_t>(i) * threads, x.type,
              a[i * stride_a]);
    } else if (op == RowOp::reduce_sum || op == RowOp::reduce_max) {
      float sum = row_neutral(op);
      int const count = of_thread(step.a);
      for (int i = 0; i < count; ++i) sum = row_combined(op, sum, a[i * threads]);
      sum = combined_in_warp(op, sum);
      __syncthreads();  // the sums before have been read
      if (thread % 32 == 0) exchanged[thread / 32] = sum;
      __syncthreads();
      sum = combined_in_warp(op, thread % 32 < warps ? exchanged[thread % 32] : row_neutral(op));
      *place(step.out) = rounded(sum, type);
    } else {
      float const* const b = step.b < 0 ? p.constants - step.b - 1 : place(step.b);
      int const stride_b = step.b < 0 || step.b >= kNumbers ? 0 : threads;
      float* const to = place(step.out);
      int const count = of_thread(step.out);
#pragma unroll 4
      for (int i = 0; i < count; ++i) to[i * threads] = rounded(row_value(op, a[i * stride_a], b[i * stride_b]), type);
    }
  }
}

}  // namespace

Status launch_rows(RowProgram const& p, void* const* operands, void* stream, bool overlaps) {
  auto const bytes = static_cast<int>(p.shared_bytes());
  if (bytes > 48 << 10) {
    Status const status = from_cuda(cudaFuncSetAttribute(run_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                                    "raising the shared memory limit of programs of rows");
    if (!status.ok()) return status;
  }
  Pointers pointers{};
  for (int i = 0; i < p.operand_count; ++i) pointers.of[i] = operands[i];
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.rows));
  config.blockDim = dim3(p.threads());
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = kHopper && overlaps;
  return from_cuda(cudaLaunchKernelEx(&config, run_rows, p, pointers), "launching a program of rows");
}

}  // namespace jax_streamk
