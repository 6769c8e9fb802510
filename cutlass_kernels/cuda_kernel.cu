#include "cutlass_kernels/cuda_kernel.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cutlass_kernels/decomposition.h"
#include "cutlass_kernels/epilogue.cuh"
#include "cutlass_kernels/reduction.h"
#include "cutlass_kernels/repack.h"

namespace jax_streamk {

Status from_cuda(cudaError_t error, std::string const& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // or the next launch would report it as its own
  return Status::internal(what + ": " + cudaGetErrorString(error));
}

namespace {

bool is_separate(Schedule const& s) {
  return s.kind == ScheduleKind::kSplitK && s.splits > 1 && s.reduction == Reduction::kSeparate;
}

// What each slice of a separate split-K runs.
Schedule data_parallel(Schedule s) {
  s.kind = ScheduleKind::kDataParallel;
  return s;
}

// The K slices of a separate split-K, or all of K as one, as GEMMs into the partials: slices x batches x m x (n in whole 16 bytes).
// Slices of equal extent that are evenly spaced in A and B are one launch whose batch is the slices; a batched problem
// launches once per slice, or once per batch and run of equal slices, whichever is fewer.
struct Slices {
  GemmProblem problem;  // of the longest slice
  int64_t partial_bytes;
  int32_t splits, tile_k;
  EvenRuns runs;

  Slices(KernelInfo const& info, GemmProblem const& p, int32_t splits) : problem(p), splits(splits), tile_k(info.tile_k) {
    problem.type_d = accumulator_of(p.type_a);
    problem.epilogue = {};  // that of the reduction
    int64_t const vector = 16 / size_of(problem.type_d);
    problem.ldd = (p.n + vector - 1) / vector * vector;
    problem.batch_stride_d = p.m * problem.ldd;
    partial_bytes = align_workspace(splits * p.batch * problem.batch_stride_d * size_of(problem.type_d));
    runs = EvenRuns::of(static_cast<int32_t>((p.k + tile_k - 1) / tile_k), splits);
    problem.k = extent(0, p.k);
  }

  int64_t begin(int32_t slice) const { return static_cast<int64_t>(runs.begin(slice)) * tile_k; }
  int64_t extent(int32_t slice, int64_t k) const {
    int64_t const end = begin(slice + 1);
    return (end < k ? end : k) - begin(slice);
  }
  int64_t offset_a(int64_t k) const { return problem.major_a == Major::kRow ? k : k * problem.lda; }
  int64_t offset_b(int64_t k) const { return problem.major_b == Major::kRow ? k * problem.ldb : k; }
};

// Divides non-negative numbers. Those that fit 31 bits, as most do, divide much faster.
struct Extent {
  int64_t size;
  Divisor divisor;

  explicit Extent(int64_t size) : size(size), divisor(size >> 31 == 0 ? Divisor(static_cast<int32_t>(size)) : Divisor()) {}
  __device__ int64_t divide(int64_t x) const {
    return (x | size) >> 31 == 0 ? divisor.divide(static_cast<int32_t>(x)) : x / size;
  }
};

// D = epilogue(sum over slices of partials[slice]). Partials are slices x rows x ld; rows are those of all batches. The threads of a
// block that have the same threadIdx.x own 16 bytes of one row of partials. Each adds a run of slices in the order of K, and the
// first of them adds the runs in that order: the same bits every time. Where kWide, D, bias and residual have as many neighbours in
// whole vectors.
template <typename Accumulator, typename T, bool kWide>
__global__ void reduce_slices(Accumulator const* __restrict__ partials, int slices, Extent vectors_per_row, int64_t rows,
                              Extent rows_per_batch, int64_t n, T* __restrict__ d, EpilogueParams<Accumulator, T> epilogue) {
  constexpr int kVector = 16 / sizeof(Accumulator);
  struct alignas(16) Vector {
    Accumulator x[kVector];
  };
  struct alignas(sizeof(T) * kVector) Out {
    T x[kVector];
  };
  __shared__ Vector sums[kReducers];
  int const run = static_cast<int>(threadIdx.y), runs = static_cast<int>(blockDim.y), owners = static_cast<int>(blockDim.x);
  int const owner = static_cast<int>(threadIdx.x);
  int const log_runs = 31 - __clz(runs), begin = run * slices >> log_runs, end = (run + 1) * slices >> log_runs;
  int64_t const vectors = rows * vectors_per_row.size, ld = vectors_per_row.size * kVector;
  for (int64_t first = blockIdx.x * static_cast<int64_t>(owners); first < vectors; first += static_cast<int64_t>(gridDim.x) * owners) {
    int64_t const at = first + owner;
    int64_t const row = vectors_per_row.divide(at), column = at * kVector - row * ld;
    Vector sum;
    if (at < vectors) {
      Accumulator const* const from = partials + at * kVector;
      sum = *reinterpret_cast<Vector const*>(from + begin * rows * ld);
#pragma unroll 8
      for (int slice = begin + 1; slice < end; ++slice) {
        Vector const next = *reinterpret_cast<Vector const*>(from + slice * rows * ld);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum.x[i] += next.x[i];
      }
    }
    if (runs > 1) {
      __syncthreads();  // the sums before have been read
      sums[run * owners + owner] = sum;
      __syncthreads();
      if (run > 0) continue;
      for (int other = 1; other < runs; ++other) {
        Vector const next = sums[other * owners + owner];
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum.x[i] += next.x[i];
      }
    }
    if (at >= vectors) continue;
    int64_t const batch = rows_per_batch.divide(row);
    int64_t const offset = batch * epilogue.batch_stride_d + (row - batch * rows_per_batch.size) * epilogue.ldd + column;
    if (!epilogue.plain) {
      auto const add = [&](Accumulator factor, T const* from) {
        Out values{};
        if constexpr (kWide) {
          values = load_vector<Out>(from);
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            if (column + i < n) values.x[i] = from[i];
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum.x[i] += factor * static_cast<Accumulator>(values.x[i]);
      };
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum.x[i] *= epilogue.alpha;
      if (epilogue.bias != nullptr) add(1, epilogue.bias + batch * epilogue.batch_stride_bias + column);
      if (epilogue.residual != nullptr) add(epilogue.beta, epilogue.residual + offset);
      activate(epilogue.activation, sum.x, kVector);
    }
    Out out;
#pragma unroll
    for (int i = 0; i < kVector; ++i) out.x[i] = static_cast<T>(sum.x[i]);
    if constexpr (kWide) {
      *reinterpret_cast<Out*>(d + offset) = out;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column + i < n) d[offset + i] = out.x[i];
    }
  }
}

template <typename Accumulator, typename T>
Status launch_typed(GemmProblem const& p, int32_t slices, int64_t ld, void const* partials, Buffers const& buffers,
                    cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(Accumulator);
  int64_t const rows = p.batch * p.m, vectors = rows * (ld / kVector);
  bool const wide = (p.n | p.ldd | p.batch_stride_d | p.epilogue.batch_stride_bias) % kVector == 0;
  int32_t const runs = reduction_runs(static_cast<double>(vectors), slices);
  dim3 const threads(kReducers / runs, runs);
  int64_t const blocks = (vectors + threads.x - 1) / threads.x;
  unsigned const grid = static_cast<unsigned>(blocks < 65535 ? blocks : 65535);
  (wide ? reduce_slices<Accumulator, T, true> : reduce_slices<Accumulator, T, false>)<<<grid, threads, 0, stream>>>(
      static_cast<Accumulator const*>(partials), slices, Extent(ld / kVector), rows, Extent(p.m), p.n, static_cast<T*>(buffers.d),
      EpilogueParams<Accumulator, T>(p, buffers));
  return from_cuda(cudaGetLastError(), "launching the split-K reduction");
}

Status launch_reduction(GemmProblem const& p, int32_t slices, int64_t ld, void const* partials, Buffers const& buffers,
                        cudaStream_t stream) {
  switch (p.type_d) {
    case Type::kF64: return launch_typed<double, double>(p, slices, ld, partials, buffers, stream);
    case Type::kF32: return launch_typed<float, float>(p, slices, ld, partials, buffers, stream);
    case Type::kBF16: return launch_typed<float, __nv_bfloat16>(p, slices, ld, partials, buffers, stream);
    case Type::kF16: return launch_typed<float, __half>(p, slices, ld, partials, buffers, stream);
    default: return Status::internal(std::string("no split-K reduction into ") + name_of(p.type_d));
  }
}

// Rows of 16-bit elements to copy, which start anywhere, each filled up with zeros to a multiple of `unit` elements.
struct Rows {
  uint16_t const* from;
  uint16_t* to;
  int64_t batches;
  Extent rows;
  int64_t columns, ld_from, batch_stride_from, ld_to, batch_stride_to;
  int unit;
  Extent per_row{(columns + kPiece - 1) / kPiece};

  static constexpr int kPiece = 512;  // of a row, which a warp copies
  __host__ __device__ int64_t pieces() const { return batches * rows.size * per_row.size; }
};

// Two matrices in one launch, along y.
__global__ void copy_rows(Rows first, Rows second) {
  Rows const p = blockIdx.y == 0 ? first : second;
  int64_t const pieces = p.pieces();
  int const lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(warps) + threadIdx.x / 32; at < pieces;
       at += static_cast<int64_t>(gridDim.x) * warps) {
    int64_t const of_all = p.per_row.divide(at), begin = (at - of_all * p.per_row.size) * Rows::kPiece;
    int64_t const batch = p.rows.divide(of_all), row = of_all - batch * p.rows.size;
    uint16_t const* const from = p.from + batch * p.batch_stride_from + row * p.ld_from + begin;
    uint16_t* const to = p.to + batch * p.batch_stride_to + row * p.ld_to + begin;
    int64_t const left = p.columns - begin;
    int const columns = static_cast<int>(left < Rows::kPiece ? left : Rows::kPiece);
    int const filled = (columns + p.unit - 1) / p.unit * p.unit;
#pragma unroll 8
    for (int column = lane; column < filled; column += 32) to[column] = column < columns ? __ldg(from + column) : 0;
  }
}

Status launch_copies(std::vector<Rows> const& matrices, cudaStream_t stream) {
  if (matrices.empty()) return {};
  Rows const &first = matrices.front(), &last = matrices.back();
  int const threads = 256, warps = threads / 32;
  int64_t const pieces = first.pieces() > last.pieces() ? first.pieces() : last.pieces(), blocks = (pieces + warps - 1) / warps;
  dim3 const grid(static_cast<unsigned>(blocks < 65535 ? blocks : 65535), static_cast<unsigned>(matrices.size()));
  copy_rows<<<grid, threads, 0, stream>>>(first, last);
  return from_cuda(cudaGetLastError(), "launching the copy of misaligned matrices");
}

// Copies of A and B to the head of the workspace, as far as they are needed, and room for that of D. Points `at` there.
Status launch_repack(GemmProblem const& p, Repack const& repacked, Buffers& at, cudaStream_t stream) {
  auto* to = static_cast<char*>(at.workspace);
  std::vector<Rows> matrices;
  auto const add = [&](void const*& matrix, bool row_major, int64_t m, int64_t n, int64_t ld, int64_t ld_to, int64_t batch_stride,
                       int64_t batch_stride_to, int64_t bytes) {
    matrices.push_back({static_cast<uint16_t const*>(matrix), reinterpret_cast<uint16_t*>(to), batch_stride != 0 ? p.batch : 1,
                        Extent(row_major ? m : n), row_major ? n : m, ld, batch_stride, ld_to, batch_stride_to, 8});
    matrix = to;
    to += bytes;
  };
  GemmProblem const& q = repacked.problem;
  if (repacked.a)
    add(at.a, p.major_a == Major::kRow, p.m, p.k, p.lda, q.lda, p.batch_stride_a, q.batch_stride_a, repacked.bytes_a);
  if (repacked.b)
    add(at.b, p.major_b == Major::kRow, p.k, p.n, p.ldb, q.ldb, p.batch_stride_b, q.batch_stride_b, repacked.bytes_b);
  if (repacked.d) {
    at.d = to;
    to += repacked.bytes_d;
  }
  at.workspace = to;
  return launch_copies(matrices, stream);
}

}  // namespace

Status CudaKernel::can_implement(GemmProblem const& p, Schedule const& s, Device const& device) const {
  bool const separate = is_separate(s);
  Repack const repacked = repack_of(info, p, separate);
  if (!separate) return can_launch(repacked.reduced_d ? Slices(info, repacked.problem, 1).problem : repacked.problem, s, device);
  return can_launch(Slices(info, repacked.problem, s.splits).problem, data_parallel(s), device);
}

int64_t CudaKernel::workspace_bytes(GemmProblem const& p, Schedule const& s, Device const& device) const {
  bool const separate = is_separate(s);
  Repack const repacked = repack_of(info, p, separate);
  if (!separate && !repacked.reduced_d) return repacked.bytes() + launch_workspace_bytes(repacked.problem, s, device);
  Slices const slices(info, repacked.problem, separate ? s.splits : 1);
  return repacked.bytes() + slices.partial_bytes + (separate ? 0 : launch_workspace_bytes(slices.problem, s, device));
}

Status CudaKernel::run(GemmProblem const& p, Schedule const& s, Device const& device, Buffers const& buffers, void* stream_,
                       Executor*) const {
  auto const stream = static_cast<cudaStream_t>(stream_);
  if (Status status = allow_shared_memory(); !status.ok()) return status;
  bool const separate = is_separate(s);
  Repack const repacked = repack_of(info, p, separate);
  Buffers aligned = buffers;
  if (Status status = launch_repack(p, repacked, aligned, stream); !status.ok()) return status;
  if (!separate && !repacked.reduced_d) {
    Status const status = launch(repacked.problem, s, device, aligned, stream);
    if (!status.ok() || !repacked.d) return status;
    GemmProblem const& q = repacked.problem;
    return launch_copies({{static_cast<uint16_t const*>(aligned.d), static_cast<uint16_t*>(buffers.d), p.batch, Extent(p.m), p.n, q.ldd,
                           q.batch_stride_d, p.ldd, p.batch_stride_d, 1}},
                         stream);
  }

  Slices const slices(info, repacked.problem, separate ? s.splits : 1);
  auto* const partials = static_cast<char*>(aligned.workspace);
  auto const reduce = [&] { return launch_reduction(p, slices.splits, slices.problem.ldd, partials, buffers, stream); };
  if (!separate) {
    aligned.d = partials;
    aligned.workspace = partials + slices.partial_bytes;
    Status const status = launch(slices.problem, s, device, aligned, stream);
    return status.ok() ? reduce() : status;
  }
  GemmProblem const& whole = repacked.problem;
  auto const* a = static_cast<char const*>(aligned.a);
  auto const* b = static_cast<char const*>(aligned.b);
  int64_t const size_ab = size_of(p.type_a), size_d = size_of(slices.problem.type_d), stride_m_n = slices.problem.batch_stride_d;
  auto const launch_slices = [&](int32_t first, int32_t count, int64_t batch_first, int64_t batch_count) {
    GemmProblem q = slices.problem;
    q.k = slices.extent(first, p.k);
    int64_t const k0 = slices.begin(first);
    if (count > 1) {
      q.batch = count;
      q.batch_stride_a = slices.offset_a(q.k);
      q.batch_stride_b = slices.offset_b(q.k);
      q.batch_stride_d = p.batch * stride_m_n;
    } else {
      q.batch = batch_count;
    }
    Buffers at = aligned;
    at.a = a + (slices.offset_a(k0) + batch_first * whole.batch_stride_a) * size_ab;
    at.b = b + (slices.offset_b(k0) + batch_first * whole.batch_stride_b) * size_ab;
    at.d = partials + (first * p.batch + batch_first) * stride_m_n * size_d;
    at.workspace = nullptr;  // a data-parallel launch uses none
    return launch(q, data_parallel(s), device, at, stream);
  };
  // Runs of slices with equal extents: the longer ones, the shorter ones, and a last one that K cuts off.
  struct Run {
    int32_t first, count;
  };
  std::vector<Run> runs;
  for (int32_t slice = 0; slice < slices.splits; ++slice) {
    if (!runs.empty() && slices.extent(slice, p.k) == slices.extent(runs.back().first, p.k)) {
      ++runs.back().count;
    } else {
      runs.push_back({slice, 1});
    }
  }
  bool const by_slice = slices.splits <= static_cast<int64_t>(runs.size()) * p.batch;
  Status status;
  if (by_slice) {
    for (int32_t slice = 0; slice < slices.splits && status.ok(); ++slice) status = launch_slices(slice, 1, 0, p.batch);
  } else {
    for (int64_t batch = 0; batch < p.batch; ++batch)
      for (Run const& run : runs)
        if (status.ok()) status = launch_slices(run.first, run.count, batch, 1);
  }
  return status.ok() ? reduce() : status;
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
