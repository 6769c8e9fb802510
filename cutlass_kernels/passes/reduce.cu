#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "cutlass_kernels/core/cuda.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/passes/extent.cuh"
#include "cutlass_kernels/passes/reduce.h"
#include "cutlass_kernels/passes/reduction.h"

namespace jax_streamk {
namespace {

// How vectors of 16 bytes of partials are stored to D. kAsPartials: D is contiguous like the partials and there is no
// epilogue. kWide: rows of D hold whole, aligned vectors. kAny: element by element.
enum class Result { kAsPartials, kWide, kAny };

template <typename Accumulator>
struct alignas(16) Sums {
  static constexpr int kCount = 16 / sizeof(Accumulator);
  Accumulator x[kCount] = {};

  __device__ void operator+=(Sums const& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += other.x[i];
  }
};

// Not through the read-only cache: the kernel that writes partials may still run when this one starts.
template <typename Accumulator>
__device__ Sums<Accumulator> load_partials(Sums<Accumulator> const* from) {
  uint4 const words = __ldcg(reinterpret_cast<uint4 const*>(from));
  Sums<Accumulator> sums;
  std::memcpy(&sums, &words, sizeof sums);
  return sums;
}

// D = epilogue(sum over slices of partials[slice]), with partials of slices x (rows of all batches) x ld. kRuns threads
// share a vector of a row: thread r adds slices r, r + kRuns, ..., then the runs are added, always in the same order.
//
// A small result is all latency, including that of instructions, which arrive a cache line at a time. So there is a
// kernel for each number kLoads of slices per thread, without a loop and with all loads in flight at once; only the
// last load may be absent. kLoads = 0: any number from four on.
template <typename Accumulator, typename T, Result kResult, int kRuns, int kLoads>
__global__ __launch_bounds__(reduction_threads(kRuns)) void reduce_slices(Accumulator const* partials, int vectors,
                                                                          int slices, T* d, int64_t n,
                                                                          ShortExtent vectors_per_row,
                                                                          ShortExtent rows_per_batch,
                                                                          EpilogueParams<Accumulator, T> epilogue) {
  constexpr int kLaneRuns = lane_runs(kRuns), kWarps = kRuns / kLaneRuns, kOwners = 32 / kLaneRuns;
  constexpr int kVector = Sums<Accumulator>::kCount, kAtOnce = kLoads > 0 ? kLoads : 4;
  constexpr bool kWide = kResult != Result::kAny;
  struct alignas(sizeof(T) * kVector) Out {
    T x[kVector];
  };
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = warp % kWarps * kLaneRuns + lane / kOwners;
  int const at = blockIdx.x * (reduction_threads(kRuns) / kRuns) + warp / kWarps * kOwners + lane % kOwners;
  bool const is_inside = at < vectors;
  auto const* from = reinterpret_cast<Sums<Accumulator> const*>(partials) +
                     (static_cast<int64_t>(run) * vectors + (is_inside ? at : 0));
  int64_t const stride = static_cast<int64_t>(kRuns) * vectors;
  Sums<Accumulator> next[kAtOnce];
  wait_for_primary();
  let_dependents_start();
  if (kRuns == 1 || run + (kAtOnce - 1) * kRuns < slices)
    next[kAtOnce - 1] = load_partials(from + (kAtOnce - 1) * stride);
#pragma unroll
  for (int j = 0; j < kAtOnce - 1; ++j) next[j] = load_partials(from + j * stride);

  // While the partials are in flight: the address in D, bias and residual.
  int64_t offset = static_cast<int64_t>(at) * kVector;
  int column = 0;
  Out bias{}, residual{};
  if constexpr (kResult != Result::kAsPartials) {
    int const row = vectors_per_row.divisor.divide(at), batch = rows_per_batch.divisor.divide(row);
    column = (at - row * vectors_per_row.size) * kVector;
    offset = batch * epilogue.batch_stride_d + (row - batch * rows_per_batch.size) * epilogue.ldd + column;
    auto const load = [&](T const* from) {
      if constexpr (kWide) return load_vector<Out>(from);
      Out values{};
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column + i < n) values.x[i] = from[i];
      return values;
    };
    if (is_inside && run == 0) {
      if (epilogue.bias != nullptr) bias = load(epilogue.bias + batch * epilogue.batch_stride_bias + column);
      if (epilogue.residual != nullptr) residual = load(epilogue.residual + offset);
    }
  }

  Sums<Accumulator> sum = next[0];
#pragma unroll
  for (int j = 1; j < kAtOnce; ++j) sum += next[j];
  if constexpr (kLoads == 0) {
#pragma unroll 1
    for (int left = slices - run - kAtOnce * kRuns; left > 0; left -= kAtOnce * kRuns) {
      from += kAtOnce * stride;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (j * kRuns < left) next[j] = load_partials(from + j * stride);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        // Must be a branch: otherwise ptxas adds the first before it loads the last.
        if (j * kRuns >= left) break;
        sum += next[j];
      }
    }
  }
#pragma unroll
  for (int lanes = kOwners; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum.x[i] += __shfl_xor_sync(~0u, sum.x[i], lanes);
  }
  if constexpr (kWarps > 1) {
    static_assert(reduction_threads(kRuns) == 32 * kWarps);
    __shared__ Sums<Accumulator> of_warps[kWarps][kOwners];
    if (lane < kOwners) of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int j = 1; j < kWarps; ++j) sum += of_warps[j][lane % kOwners];
  }
  if (!is_inside || run > 0) return;
  if (kResult != Result::kAsPartials && !epilogue.plain) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum.x[i] *= epilogue.alpha;
      if (epilogue.bias != nullptr) sum.x[i] += static_cast<Accumulator>(bias.x[i]);
      if (epilogue.residual != nullptr) sum.x[i] += epilogue.beta * static_cast<Accumulator>(residual.x[i]);
    }
    activate(epilogue.activation, sum.x, kVector);
  }
  Out out;
#pragma unroll
  for (int i = 0; i < kVector; ++i) out.x[i] = static_cast<T>(sum.x[i]);
  if constexpr (kWide) {
    // As one word: T's assignment would store element by element.
    std::conditional_t<sizeof out == 8, uint2, uint4> word;
    std::memcpy(&word, &out, sizeof out);
    *reinterpret_cast<decltype(word)*>(d + offset) = word;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < n) d[offset + i] = out.x[i];
  }
}

template <typename Accumulator, typename T>
using Reducer = void (*)(Accumulator const*, int, int, T*, int64_t, ShortExtent, ShortExtent,
                         EpilogueParams<Accumulator, T>);

// The kernel for `loads` slices per thread if kLoads has that number, else null.
template <typename Accumulator, typename T, Result kResult, int kRuns, int... kLoads>
Reducer<Accumulator, T> reducer_of(int32_t loads) {
  Reducer<Accumulator, T> found = nullptr;
  ((loads == kLoads && (found = reduce_slices<Accumulator, T, kResult, kRuns, kLoads>)), ...);
  return found;
}

// The kernels that reduction_runs() may ask for. With the most runs, one kernel takes any number of loads.
template <typename Accumulator, typename T, Result kResult>
Reducer<Accumulator, T> reducer_of(int32_t runs, int32_t loads) {
  switch (runs) {
    case 1: return reducer_of<Accumulator, T, kResult, 1, 2, 3, 4, 5, 6, 7, 8>(loads);
    case 2: return reducer_of<Accumulator, T, kResult, 2, 4, 5, 6, 7, 8>(loads);
    case 4: return reducer_of<Accumulator, T, kResult, 4, 4, 5, 6, 7, 8>(loads);
    case 8: return reducer_of<Accumulator, T, kResult, 8, 4>(loads);
    case 16: return reducer_of<Accumulator, T, kResult, 16, 3, 4>(loads);
    default: return reducer_of<Accumulator, T, kResult, kMostRuns, 0, 3, 4>(loads <= 4 ? loads : 0);
  }
}

template <typename Accumulator, typename T>
Status launch_typed(GemmProblem const& p, Device const& device, int32_t slices, int64_t ld, void const* partials,
                    Buffers const& buffers, cudaStream_t stream) {
  constexpr int kVector = Sums<Accumulator>::kCount;
  auto const vectors = static_cast<int32_t>(p.batch * p.m * (ld / kVector));
  bool const wide = (p.n | p.d.ld | p.d.batch_stride | p.epilogue.batch_stride_bias) % kVector == 0;
  bool const as_partials =
      p.epilogue.is_plain() && ld == p.n && ld == p.d.ld && (p.batch == 1 || p.d.batch_stride == p.m * ld);
  int32_t const runs = reduction_runs(vectors, slices);
  int32_t const loads = (slices + runs - 1) / runs, threads = reduction_threads(runs);
  auto* const kernel = as_partials ? reducer_of<Accumulator, T, Result::kAsPartials>(runs, loads)
                       : wide      ? reducer_of<Accumulator, T, Result::kWide>(runs, loads)
                                   : reducer_of<Accumulator, T, Result::kAny>(runs, loads);
  if (kernel == nullptr) return Status::internal("no reduction for " + std::to_string(loads) + " slices of a thread");
  int32_t const owners = threads / runs, blocks = (vectors + owners - 1) / owners;
  // Starts while the kernel that writes the partials finishes.
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = kHopper && device.arch >= 90;
  cudaError_t const error = cudaLaunchKernelEx(&config, kernel, static_cast<Accumulator const*>(partials), vectors,
                                               slices, static_cast<T*>(buffers.d), p.n, ShortExtent(ld / kVector),
                                               ShortExtent(p.m), EpilogueParams<Accumulator, T>(p, buffers));
  return from_cuda(error, "launching the split-K reduction");
}

}  // namespace

Status launch_reduction(GemmProblem const& p, Device const& device, int32_t slices, int64_t ld, void const* partials,
                        Buffers const& buffers, cudaStream_t stream) {
  switch (p.d.format.type) {
    case Type::kF64: return launch_typed<double, double>(p, device, slices, ld, partials, buffers, stream);
    case Type::kF32: return launch_typed<float, float>(p, device, slices, ld, partials, buffers, stream);
    case Type::kBF16: return launch_typed<float, __nv_bfloat16>(p, device, slices, ld, partials, buffers, stream);
    case Type::kF16: return launch_typed<float, __half>(p, device, slices, ld, partials, buffers, stream);
    default: return Status::internal(std::string("no split-K reduction into ") + name_of(p.d.format.type));
  }
}

}  // namespace jax_streamk
