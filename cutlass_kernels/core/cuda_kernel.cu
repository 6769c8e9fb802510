#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cutlass_kernels/core/cuda_kernel.h"
#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/core/tf32.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/passes/reduction.h"
#include "cutlass_kernels/passes/repack.h"

namespace jax_streamk {

Status from_cuda(cudaError_t error, std::string const& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // or the next launch would report it as its own
  return Status::internal(what + ": " + cudaGetErrorString(error));
}

int64_t bytes_left(void const* p) {
  using Range = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);
  static Range const range = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 3020, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault, &result);
#endif
    return from_cuda(error, "").ok() && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Range>(found)
                                                                              : nullptr;
  }();
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  auto const at = reinterpret_cast<CUdeviceptr>(p);
  if (range == nullptr || range(&begin, &bytes, at) != CUDA_SUCCESS) return 0;
  return static_cast<int64_t>(begin + bytes - at);
}

namespace {

// The GEMM into partial sums, slices x batches x m x (n in whole 16 bytes), that a reduction finishes: it has the
// epilogue.
GemmProblem into_partials(GemmProblem p) {
  p.d.format = accumulator_of(p.a.format);
  p.epilogue = {};
  int64_t const vector = 16 / size_of(p.d.format);
  p.d.ld = (p.n + vector - 1) / vector * vector;
  p.d.batch_stride = p.m * p.d.ld;
  return p;
}

int64_t partial_bytes(GemmProblem const& partials, int32_t slices) {
  return align_workspace(slices * partials.batch * partials.d.batch_stride * size_of(partials.d.format));
}

// Divides non-negative numbers. Those that fit 31 bits, as most do, divide much faster.
struct Extent {
  int64_t size;
  Divisor divisor;

  explicit Extent(int64_t size)
      : size(size), divisor(size >> 31 == 0 ? Divisor(static_cast<int32_t>(size)) : Divisor()) {}
  __device__ int64_t divide(int64_t x) const {
    return (x | size) >> 31 == 0 ? divisor.divide(static_cast<int32_t>(x)) : x / size;
  }
};

// The same for numbers that always fit.
struct ShortExtent {
  int32_t size = 1;
  Divisor divisor;

  ShortExtent() = default;
  explicit ShortExtent(int64_t size) : size(static_cast<int32_t>(size)), divisor(this->size) {}
};

// How D lies, and what becomes of it: as partials lie, a vector of them after the other and nothing but converted; with
// whole vectors in a row; or anyhow.
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

// The kernel that writes partials may still run when the one that reads them starts: they do not come by way of the
// read-only cache.
template <typename Accumulator>
__device__ Sums<Accumulator> load_partials(Sums<Accumulator> const* from) {
  uint4 const words = __ldcg(reinterpret_cast<uint4 const*>(from));
  Sums<Accumulator> sums;
  std::memcpy(&sums, &words, sizeof sums);
  return sums;
}

// D = epilogue(sum over slices of partials[slice]). Partials are slices x rows x ld; rows are those of all batches.
// kRuns threads share 16 bytes of one row of partials: each adds every kRuns-th slice, then the runs are added, all in
// an order that is always the same.
//
// Of a small result nearly all the time is latency, also that of instructions, which come a cache line at a time. So
// there is a kernel for each number of slices of a thread, kLoads, that asks for all of them in one straight line of
// code; only the last may be missing. kLoads = 0 is for any number from four on.
template <typename Accumulator, typename T, Result kResult, int kRuns, int kLoads>
__global__ __launch_bounds__(reducers(kRuns)) void reduce_slices(Accumulator const* partials, int vectors, int slices,
                                                                 T* d, int64_t n, ShortExtent vectors_per_row,
                                                                 ShortExtent rows_per_batch,
                                                                 EpilogueParams<Accumulator, T> epilogue) {
  constexpr int kLaneRuns = lane_runs(kRuns), kWarps = kRuns / kLaneRuns, kOwners = 32 / kLaneRuns;
  constexpr int kVector = Sums<Accumulator>::kCount, kAtOnce = kLoads > 0 ? kLoads : 4;
  constexpr bool kWide = kResult != Result::kAny;
  struct alignas(sizeof(T) * kVector) Out {
    T x[kVector];
  };
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = warp % kWarps * kLaneRuns + lane / kOwners;
  int const at = blockIdx.x * (reducers(kRuns) / kRuns) + warp / kWarps * kOwners + lane % kOwners;
  bool const is_inside = at < vectors;
  auto const* from = reinterpret_cast<Sums<Accumulator> const*>(partials) +
                     (static_cast<int64_t>(run) * vectors + (is_inside ? at : 0));
  int64_t const stride = static_cast<int64_t>(kRuns) * vectors;
  Sums<Accumulator> next[kAtOnce];
  wait_for_primary();
  if (kRuns == 1 || run + (kAtOnce - 1) * kRuns < slices)
    next[kAtOnce - 1] = load_partials(from + (kAtOnce - 1) * stride);
#pragma unroll
  for (int j = 0; j < kAtOnce - 1; ++j) next[j] = load_partials(from + j * stride);

  // Meanwhile, where D is, and what else there is to add.
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
        // Without these branches ptxas has the first added before the last is asked for.
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
    static_assert(reducers(kRuns) == 32 * kWarps);
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
    // T's own assignment would store element by element.
    std::conditional_t<sizeof out == 8, uint2, uint4> word;
    std::memcpy(&word, &out, sizeof out);
    *reinterpret_cast<decltype(word)*>(d + offset) = word;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < n) d[offset + i] = out.x[i];
  }
}

// Of kernels whose blocks go on to further work.
unsigned blocks_for(int64_t work, int64_t per_block) {
  int64_t const blocks = (work + per_block - 1) / per_block, most = 65535;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

template <typename Accumulator, typename T>
using Reducer = void (*)(Accumulator const*, int, int, T*, int64_t, ShortExtent, ShortExtent,
                         EpilogueParams<Accumulator, T>);

// The kernel for so many loads of a thread, if it is among kLoads.
template <typename Accumulator, typename T, Result kResult, int kRuns, int... kLoads>
Reducer<Accumulator, T> reducer_of(int32_t loads) {
  Reducer<Accumulator, T> found = nullptr;
  ((loads == kLoads && (found = reduce_slices<Accumulator, T, kResult, kRuns, kLoads>)), ...);
  return found;
}

// For what reduction_runs says; 0 loads are any number.
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
  int32_t const loads = (slices + runs - 1) / runs, threads = reducers(runs);
  auto* const kernel = as_partials ? reducer_of<Accumulator, T, Result::kAsPartials>(runs, loads)
                       : wide      ? reducer_of<Accumulator, T, Result::kWide>(runs, loads)
                                   : reducer_of<Accumulator, T, Result::kAny>(runs, loads);
  if (kernel == nullptr) return Status::internal("no reduction for " + std::to_string(loads) + " slices of a thread");
  int32_t const owners = threads / runs, blocks = (vectors + owners - 1) / owners;
  // It starts while the kernel that writes the partials ends.
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

// Rows of 16-bit elements, or of 32 bits as two of them, to copy, which start anywhere, each filled up with zeros to
// whole 16 bytes.
struct Rows {
  static constexpr int kPiece = 512;  // of a row, which a warp copies

  uint16_t const* from;
  uint16_t* to;
  int64_t columns, ld_from, batch_stride_from, ld_to, batch_stride_to;
  int32_t pieces = 0;
  ShortExtent per_row, of_batch;
};

// One or two matrices in one launch, along y.
struct Copies {
  Rows of[2];
  int count = 0;
};

constexpr int kCopiers = 256;

__global__ __launch_bounds__(kCopiers) void copy_rows(__grid_constant__ Copies const copies) {
  let_dependents_start();
  Rows const& p = copies.of[blockIdx.y];
  int const lane = threadIdx.x % 32, at = blockIdx.x * (kCopiers / 32) + threadIdx.x / 32;
  if (at >= p.pieces) return;
  int const of_all = p.per_row.divisor.divide(at);
  int64_t const begin = static_cast<int64_t>(at - of_all * p.per_row.size) * Rows::kPiece;
  int const batch = p.of_batch.divisor.divide(of_all), row = of_all - batch * p.of_batch.size;
  uint16_t const* const from = p.from + batch * p.batch_stride_from + row * p.ld_from + begin;
  uint16_t* const to = p.to + batch * p.batch_stride_to + row * p.ld_to + begin;
  int const columns = static_cast<int>(min(p.columns - begin, int64_t{Rows::kPiece}));
  // Pairs, all loads before the first store. Of a row that starts in the upper half of a word, a pair is the upper half
  // of one word and the lower of the next, which a neighbour has. The last word may have one element of the row, and
  // end beyond the matrix.
  constexpr int kPairs = Rows::kPiece / 64;
  int const odd = reinterpret_cast<uintptr_t>(from) % 4 != 0, whole = (columns + odd) / 2;
  bool const is_last = (columns + odd) % 2 != 0 && whole % 32 == lane;
  uint32_t words[kPairs + 1] = {};
  uint32_t const last = is_last ? __ldg(from + columns - 1) : 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j)
    if (lane + 32 * j < whole) words[j] = __ldg(reinterpret_cast<uint32_t const*>(from - odd) + lane + 32 * j);
#pragma unroll
  for (int j = 0; j <= kPairs; ++j)
    if (is_last && whole / 32 == j) words[j] = last;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    int const column = 2 * (lane + 32 * j);
    uint32_t pair = words[j];
    if (odd) {
      uint32_t const next = __shfl_down_sync(~0u, words[j], 1), first = __shfl_sync(~0u, words[j + 1], 0);
      pair = pair >> 16 | (lane == 31 ? first : next) << 16;
    }
    if (column < (columns + 7) / 8 * 8) *reinterpret_cast<uint32_t*>(to + column) = pair;
  }
}

// A matrix of f32, of so many rows or columns of k elements, copied into rows of k.
struct Squares {
  float const* from;
  float* to;
  int64_t batches, rows, k, ld_from, batch_stride_from, ld_to, batch_stride_to;
  bool along_k;      // as the rows to be
  int64_t part = 0;  // or of twice so many, filled up with zeros: TF32 numbers near the elements, and what they lack
  bool small_first = false;  // what they lack

  static constexpr int kSide = 32, kThreads = 8;  // of a square that a block copies; threads down it
  int64_t columns = part > 0 ? part : k;
  Extent down{(rows + kSide - 1) / kSide}, across{(columns + kSide - 1) / kSide};
  __host__ __device__ int64_t squares() const { return batches * down.size * across.size; }
};

// Two matrices in one launch, along y.
__global__ void copy_squares(Squares first, Squares second) {
  let_dependents_start();
  constexpr int kSide = Squares::kSide, kStep = Squares::kThreads;
  __shared__ float square[kSide][kSide + 1];  // columns in different banks
  Squares const p = blockIdx.y == 0 ? first : second;
  int const x = threadIdx.x;
  for (int64_t at = blockIdx.x; at < p.squares(); at += gridDim.x) {
    int64_t const of_all = p.across.divide(at), batch = p.down.divide(of_all);
    int64_t const k = (at - of_all * p.across.size) * kSide, row = (of_all - batch * p.down.size) * kSide;
    float const* const from = p.from + batch * p.batch_stride_from;
    float* const to = p.to + batch * p.batch_stride_to + row * p.ld_to + k + x;
    float values[kSide / kStep];
#pragma unroll
    for (int i = 0; i < kSide / kStep; ++i) {
      int const y = threadIdx.y + i * kStep;
      int64_t const at_row = row + (p.along_k ? y : x), at_k = k + (p.along_k ? x : y);
      values[i] = at_row < p.rows && at_k < p.k
                      ? __ldg(from + (p.along_k ? at_row * p.ld_from + at_k : at_k * p.ld_from + at_row))
                      : 0;
    }
    if (!p.along_k) {
#pragma unroll
      for (int i = 0; i < kSide / kStep; ++i) square[threadIdx.y + i * kStep][x] = values[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSide / kStep; ++i) values[i] = square[x][threadIdx.y + i * kStep];
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kSide / kStep; ++i) {
      int const y = threadIdx.y + i * kStep;
      if (row + y >= p.rows || k + x >= p.columns) break;
      if (p.part == 0) {
        to[y * p.ld_to] = values[i];
        continue;
      }
      float const large = __uint_as_float(to_tf32(values[i])), small = __uint_as_float(to_tf32(values[i] - large));
      to[y * p.ld_to] = p.small_first ? small : large;
      to[y * p.ld_to + p.part] = p.small_first ? large : small;
    }
  }
}

// What a copy of an m x n matrix in rows, or columns, is cut into.
int64_t pieces_of(GemmProblem const& p, Major as, int64_t m, int64_t n, int64_t batch_stride) {
  if (as != Major::kRow) std::swap(m, n);
  return (batch_stride != 0 ? p.batch : 1) * m * ((n * (size_of(p.a.format) / 2) + Rows::kPiece - 1) / Rows::kPiece);
}

// Copies of A and B to the head of the workspace, as far as they are needed. Points `at` there.
Status launch_repack(GemmProblem const& p, Repack const& repacked, bool swap_ab, Buffers& at, cudaStream_t stream) {
  GemmProblem const& q = repacked.problem;
  auto* to = static_cast<char*>(at.workspace);
  Copies copies;
  std::vector<Squares> squares;
  // Of rows of the copy, which are the matrix's own or, where those are transposed, its columns.
  auto const add = [&](void const*& matrix, Major major, Major as, int64_t m, int64_t n, int64_t ld, int64_t ld_to,
                       int64_t batch_stride, int64_t batch_stride_to, bool small_first, int64_t bytes) {
    int64_t const batches = batch_stride != 0 ? p.batch : 1, extent = as == Major::kRow ? m : n,
                  columns = as == Major::kRow ? n : m;
    if (major != as || repacked.part > 0) {
      squares.push_back({static_cast<float const*>(matrix), reinterpret_cast<float*>(to), batches, extent, columns, ld,
                         batch_stride, ld_to, batch_stride_to, major == as, repacked.part, small_first});
    } else {
      int64_t const halves = size_of(p.a.format) / 2;
      copies.of[copies.count++] = {static_cast<uint16_t const*>(matrix),
                                   reinterpret_cast<uint16_t*>(to),
                                   columns * halves,
                                   ld * halves,
                                   batch_stride * halves,
                                   ld_to * halves,
                                   batch_stride_to * halves,
                                   static_cast<int32_t>(pieces_of(p, as, m, n, batch_stride)),
                                   ShortExtent((columns * halves + Rows::kPiece - 1) / Rows::kPiece),
                                   ShortExtent(extent)};
    }
    matrix = to;
    to += bytes;
  };
  if (repacked.a)
    add(at.a, p.a.major, q.a.major, p.m, p.k, p.a.ld, q.a.ld, p.a.batch_stride, q.a.batch_stride, !swap_ab,
        repacked.bytes_a);
  if (repacked.b)
    add(at.b, p.b.major, q.b.major, p.k, p.n, p.b.ld, q.b.ld, p.b.batch_stride, q.b.batch_stride, swap_ab,
        repacked.bytes_b);
  at.workspace = to;
  if (!squares.empty()) {
    Squares const &first = squares.front(), &last = squares.back();
    copy_squares<<<dim3(blocks_for(std::max(first.squares(), last.squares()), 1),
                        static_cast<unsigned>(squares.size())),
                   dim3(Squares::kSide, Squares::kThreads), 0, stream>>>(first, last);
    if (Status status = from_cuda(cudaGetLastError(), "launching the copy of operands of f32"); !status.ok())
      return status;
  }
  if (copies.count == 0) return {};
  int const warps = kCopiers / 32, blocks = (std::max(copies.of[0].pieces, copies.of[1].pieces) + warps - 1) / warps;
  copy_rows<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(copies.count)), kCopiers, 0, stream>>>(copies);
  return from_cuda(cudaGetLastError(), "launching the copy of misaligned matrices");
}

}  // namespace

Status CudaKernel::can_implement(GemmProblem const& p, Schedule const& s, Device const& device) const {
  Repack const repacked = repack_of(info, p);
  GemmProblem const& q = repacked.problem;
  if (std::max(repacked.a ? pieces_of(p, q.a.major, p.m, p.k, p.a.batch_stride) : 0,
               repacked.b ? pieces_of(p, q.b.major, p.k, p.n, p.b.batch_stride) : 0) >= INT32_MAX - kCopiers)
    return Status::invalid(
        info.name +
        ": operands to be copied have too many rows, or pieces of them, of which a copy takes less than 2^31");
  if (!is_separate(s)) return can_launch(q, s, device);
  GemmProblem const partials = into_partials(q);
  if (partials.batch * partials.d.batch_stride >= INT32_MAX)
    return Status::invalid(info.name +
                           ": D has too many elements for a separate reduction, which takes less than 2^31");
  return can_launch(Slices::of(q.k, info.tile_k, s.splits).as_batch(partials), data_parallel(s), device);
}

int64_t CudaKernel::workspace_bytes(GemmProblem const& p, Schedule const& s, Device const& device) const {
  Repack const repacked = repack_of(info, p);
  if (!is_separate(s)) return repacked.bytes() + launch_workspace_bytes(repacked.problem, s, device);
  GemmProblem const& q = repacked.problem;
  return repacked.bytes() + partial_bytes(into_partials(q), Slices::of(q.k, info.tile_k, s.splits).count);
}

Status CudaKernel::run(GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy, Device const& device,
                       Buffers const& buffers, void* stream_, Executor*) const {
  auto const stream = static_cast<cudaStream_t>(stream_);
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  Repack const repacked = repack_of(info, p);
  GemmProblem const& q = repacked.problem;
  Buffers aligned = buffers;
  if (Status status = launch_repack(p, repacked, info.swap_ab, aligned, stream); !status.ok()) return status;
  bool const after_copy = repacked.a || repacked.b;
  if (!is_separate(s)) return launch(q, {1, q.k}, s, policy, device, aligned, after_copy, stream);
  GemmProblem const partials = into_partials(q);
  Slices slices = Slices::of(q.k, info.tile_k, s.splits);
  slices.rounded = size_of(p.d.format) < size_of(partials.d.format);
  aligned.d = aligned.workspace;
  Status const status = launch(partials, slices, data_parallel(s), policy, device, aligned, after_copy, stream);
  return status.ok() ? launch_reduction(p, device, slices.count, partials.d.ld, aligned.d, buffers, stream) : status;
}

Status CudaKernel::resources(Resources& out) const {
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  cudaFuncAttributes attributes;
  Status status = from_cuda(cudaFuncGetAttributes(&attributes, entry_point()), info.name + ": cudaFuncGetAttributes");
  if (!status.ok()) return status;
  out.registers = attributes.numRegs;
  return from_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&out.ctas_per_sm, entry_point(), info.threads,
                                                                 static_cast<size_t>(info.shared_memory)),
                   info.name + ": occupancy");
}

Status CudaKernel::allow_shared_memory() const {
  if (info.shared_memory <= 48 * 1024) return {};
  return from_cuda(cudaFuncSetAttribute(entry_point(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(info.shared_memory)),
                   info.name + ": raising its shared memory limit");
}

}  // namespace jax_streamk
