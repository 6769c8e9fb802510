// The skinny family: products with few rows of A, which take as long as reading B once, and narrow ones, whose B has
// few columns: D^T = B^T A^T has few rows. A, B and D below are then B^T, A^T and D^T.
//
// Each warp streams B through its own queue in shared memory (cp.async) and multiplies 64 columns, a chunk of K at a
// time (32 for 16-bit types, 16 for f32, 8 for f64), with mma.sync. Between memory and tensor core there is no CTA
// barrier and no tensor map, so that short products are fast.
//
// Rows of B at any address are loaded as the aligned vectors that they touch, nine for 64 columns, and shifted into
// place in registers. A wide warp has 128 columns and half the K per chunk: 17 requests for as many bytes, not 18.
//
// For a tile of 64 columns (128 if wide), the four warps of a CTA share K; their sums meet in shared memory. For a tile
// of 256 they share n: rows of B are read 512 bytes at a time, which memory serves faster if there is much to read.
// Split-K is a cluster of CTAs whose sums meet in the first one's shared memory, in the order of K: no workspace, no
// zeroing, one launch.
#pragma once

#include <algorithm>

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/launch/cuda_kernel.h"
#include "cutlass_kernels/skinny/instructions.cuh"
#include "cutlass_kernels/skinny/layout.cuh"
#include "cutlass_kernels/skinny/loader.cuh"
#include "cutlass_kernels/skinny/product.cuh"

namespace jax_streamk::skinny {

template <class T, class D>
__device__ inline D const* bias_of(Params<T, D> const& p, BatchIndex const& batch, int32_t row, int32_t column) {
  return p.epilogue.bias + batch.index * p.epilogue.batch_stride_bias + row * p.bias_of_row + column * p.bias_of_column;
}

// Stores D = epilogue(x) for two neighbours in a row.
template <class T, class D>
__device__ inline void store(Params<T, D> const& p, BatchIndex const& batch, int32_t row, int32_t column,
                             Accumulator<T> (&x)[2]) {
  struct alignas(2 * sizeof(D)) Neighbours {
    D x[2];
  };
  auto const& epilogue = p.epilogue;
  int64_t const offset =
      batch.offset(epilogue.batch_stride_d, p.inner_stride_d) + row * epilogue.ldd + column * p.column_stride;
  bool const both = column + 1 < p.n;
  if (!epilogue.plain) {
    auto const add = [&](Accumulator<T> factor, D const* from, int64_t stride) {
      Neighbours values{};
      if (p.pairs) {
        values = load_vector<Neighbours>(from);
      } else {
        values.x[0] = from[0];
        if (both) values.x[1] = from[stride];
      }
      x[0] += factor * static_cast<Accumulator<T>>(values.x[0]);
      x[1] += factor * static_cast<Accumulator<T>>(values.x[1]);
    };
    x[0] *= epilogue.alpha, x[1] *= epilogue.alpha;
    if (epilogue.bias != nullptr) add(1, bias_of(p, batch, row, column), p.bias_of_column);
    if (epilogue.residual != nullptr) add(epilogue.beta, epilogue.residual + offset, p.column_stride);
    activate(epilogue.activation, x, 2);
  }
  Neighbours const out{static_cast<D>(x[0]), static_cast<D>(x[1])};
  if (p.pairs) {
    *reinterpret_cast<Neighbours*>(p.d + offset) = out;
  } else {
    p.d[offset] = out.x[0];
    if (both) p.d[offset + p.column_stride] = out.x[1];
  }
}

// Stores D = activation(x + bias) * (up + second bias) for two neighbours.
template <class T, class D>
__device__ inline void store_gated(GatedParams<T, D> const& p, BatchIndex const& batch, int32_t row, int32_t column,
                                   Accumulator<T> (&x)[2], Accumulator<T> (&up)[2]) {
  auto const& epilogue = p.epilogue;
  bool const both = column + 1 < p.n;
  auto const add = [&](Accumulator<T>(&to)[2], D const* from) {
    to[0] += static_cast<Accumulator<T>>(from[0]);
    if (both) to[1] += static_cast<Accumulator<T>>(from[1]);
  };
  if (epilogue.bias != nullptr) {
    int64_t const at = batch.index * epilogue.batch_stride_bias + column;
    add(x, epilogue.bias + at), add(up, p.up_bias + at);
  }
  activate(epilogue.activation, x, 2);
  D* const to = p.d + batch.offset(epilogue.batch_stride_d, p.inner_stride_d) + row * epilogue.ldd + column;
  to[0] = static_cast<D>(x[0] * up[0]);
  if (both) to[1] = static_cast<D>(x[1] * up[1]);
}

template <class T, Math kMath, class D, Major kMajorA, Major kMajorB, int kBlocks, int kWarpsAlongK, int kShifted,
          bool kGated>
__global__ __launch_bounds__(kThreads, kCtasPerSm<kBlocks, kShifted>) void skinny_gemm(
    __grid_constant__ ParamsOf<T, D, kGated> const p) {
  extern __shared__ __align__(16) char storage[];
  auto& shared = *reinterpret_cast<Shared<T, kBlocks, kWarpsAlongK, kShifted, kMajorA>*>(storage);
  constexpr int kStages = skinny::kStages<kShifted>, kWide = skinny::kWide<kShifted>,
                kThreadK = skinny::kThreadK<kShifted>, kChunk = skinny::kChunk<T, kShifted>;
  using Pair = skinny::Pair<T>;

  // The CTA's tile, and its run of K: a split, which is its rank in the cluster, or a slice.
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int32_t const tile = p.splits > 1 ? quotient(blockIdx.x, p.splits) : blockIdx.x, rank = blockIdx.x - tile * p.splits;
  TileOrder::Coordinate const at = p.order.coordinate(tile);
  int const along_n = warp / kWarpsAlongK, along_k = warp % kWarpsAlongK;  // the position of this warp
  int32_t index = at.batch, run = rank;
  if constexpr (std::is_same_v<D, Accumulator<T>>) {
    int32_t const slice = p.by_batch.divide(index);
    index -= slice * p.batch;
    run += slice;  // runs are either splits or slices
  }
  BatchIndex const batch(p, index);
  int32_t const begin = p.runs.begin(run) * kTileK + along_k * kChunk, end = min(p.runs.begin(run + 1) * kTileK, p.k);
  static_assert(!kGated || (kWarpsAlongK == kWarps && kShifted == 0));
  int32_t const m0 = at.m * kRows * kBlocks,
                n0 = kGated ? at.n * (kColumns / 2) : (at.n * (kWarps / kWarpsAlongK) + along_n) * kWide * kColumns;
#ifdef JAX_STREAMK_RECORD
  bool const turned = p.bias_of_row != 0;  // D^T
  if (threadIdx.x == 0)
    record_work(turned ? at.n : at.m, turned ? at.m : at.n, index, begin / kTileK, (end + kTileK - 1) / kTileK);
#endif

  using AlignedLoader = Loader<T, D, kMajorA, kMajorB, kBlocks, kWarpsAlongK, kGated>;
  using Loader = std::conditional_t<kShifted != 0, ShiftedLoader<T, D, kBlocks, kWarpsAlongK, kShifted>, AlignedLoader>;
  Loader loader(p, batch, m0, n0, begin, end);
  uint32_t const row_bytes = static_cast<uint32_t>(p.ldb * sizeof(T));
  uint32_t const offset =
      offset_in_vector(p.b + batch.offset(p.batch_stride_b, p.inner_stride_b)) + kThreadK * t * row_bytes;
  auto& own = shared.warps[warp];
  wait_for_primary();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) loader.next(own.queue[stage]);

  // The elements that this thread stores: columns 2 lane and 2 lane + 1 of each 64, of every kWarpsAlongK-th row.
  constexpr int kPairs = kRows * kBlocks * kWide / kWarpsAlongK;
  auto const row_of = [&](int pair) { return m0 + along_k + pair / kWide * kWarpsAlongK; };
  auto const column_of = [&](int pair) { return n0 + pair % kWide * kColumns + 2 * lane; };
  // Partials of slices are a batch of their own.
  BatchIndex const stored = std::is_same_v<D, Accumulator<T>> ? BatchIndex(p, at.batch) : batch;
  if (!kGated && rank == 0 && !p.epilogue.plain) {
    auto const& epilogue = p.epilogue;
    for (int i = 0; i < kPairs && row_of(i) < p.m; ++i) {
      int32_t const row = row_of(i), column = column_of(i);
      if (column >= p.n) continue;
      if (epilogue.bias != nullptr && i < kWide) prefetch_to_l2(bias_of(p, stored, row, column));
      if (epilogue.residual != nullptr)
        prefetch_to_l2(epilogue.residual + stored.offset(epilogue.batch_stride_d, p.inner_stride_d) +
                       row * epilogue.ldd + column * p.column_stride);
    }
  }

  // The main loop, a branch per load path. It is one function: split into several, it would get other registers.
  Accumulator<T> sums[kBlocks][4 * kWide][4] = {};
  int stage = 0;
  for (int32_t k = begin; k < end; k += kChunk * kWarpsAlongK) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // all lanes' copies have arrived, and all lanes have read the previous chunk
    using Chunk = ChunkOf<T, kBlocks, kShifted, kMajorA>;
    Chunk const& chunk = own.queue[stage];
    auto& used_up = own.queue[stage == 0 ? kStages - 1 : stage - 1];
    stage = stage == kStages - 1 ? 0 : stage + 1;
    typename Chunk::Words a[kBlocks];
    if constexpr (kShifted) {
      loader.next(used_up);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) a[block] = chunk.a[block][lane];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        // Four rows of K at a time: the other half of a wide warp's columns, or the other rows. In each row, this
        // thread's eight columns are in two vectors.
        int const half = step % kWide, first = 4 * step % kThreadK;
        uint4 b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          auto const& row = chunk.b[first + i];
          uint4 const& beyond = half + 1 < kWide ? row[half + 1][slot(0, t)] : chunk.last[kThreadK * t + first + i];
          b[i] = shifted(row[half][slot(g, t)], g < 7 ? row[half][slot(g + 1, t)] : beyond,
                         (offset + (first + i) * row_bytes) % 16);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t w[4];
          pair_rows(w, word(b[0], j), word(b[1], j), word(b[2], j), word(b[3], j));
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            multiply_add<T, kMath, D>(sums[block][4 * half + j], w, word(a[block], first / 2),
                                      word(a[block], first / 2 + 1));
        }
      }
    } else {
      uint4 b[8];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) a[block] = loader.vector_of_a(chunk, block);
#pragma unroll
      for (int i = 0; i < 8; ++i) b[i] = chunk.b[i][kMajorB == Major::kRow ? slot(g, t) : lane];
      loader.next(used_up);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t w[4];
          LayoutOfB<T, kMajorB>::words(b, step, j, w);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            multiply_add<T, kMath, D>(sums[block][j], w, word(a[block], 2 * step), word(a[block], 2 * step + 1));
        }
      }
    }
  }

  wait_for_copies<0>();
  __syncwarp();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto const& s = sums[block];
      constexpr int kSide = kNeighbours<T, kMajorB>;
      Accumulator<T>* const to = &own.sums[block * kRows + 2 * t + i][kSide * g];
#pragma unroll
      for (int j = 0; j < 4 * kWide; ++j)
        *reinterpret_cast<Pair*>(to + 2 * j % kSide + 2 * j / kSide * 8 * kSide) = {s[j][i], s[j][i + 2]};
    }
  }
  __syncthreads();

  // The sum over the warps along K.
  Pair total[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    total[i] = {0, 0};
#pragma unroll
    for (int from = 0; from < kWarpsAlongK; ++from) {
      auto const part = *reinterpret_cast<Pair const*>(
          &shared.warps[along_n * kWarpsAlongK + from].sums[row_of(i) - m0][column_of(i) - n0]);
      total[i].x += part.x, total[i].y += part.y;
    }
  }

  // The sum over the splits, in the first CTA of the cluster. The others stay until it has read their shared memory.
  if (p.splits > 1) {
    if (rank > 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) own.totals[i][lane] = total[i];
    }
    cluster_arrive();
    cluster_wait();
    if (rank > 0) {
      cluster_arrive();
      cluster_wait();
      return;
    }
    // All peers' totals are loaded at once, unless they would spill.
    constexpr int kAtOnce = kBlocks <= 2 ? kMaxSplits - 1 : 1;
    for (int peer = 1; peer < p.splits; peer += kAtOnce) {
      Pair parts[kAtOnce][kPairs];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
          parts[j][i] = peer + j < p.splits ? load_of(peer + j, &own.totals[i][lane]) : Pair{};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kPairs; ++i) total[i].x += parts[j][i].x, total[i].y += parts[j][i].y;
    }
    cluster_arrive();
  }

  let_dependents_start();
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    int32_t const row = row_of(i), column = column_of(i);
    Accumulator<T> x[2] = {total[i].x, total[i].y};
    if constexpr (kGated) {
      // The second product of a lane's columns is half a warp further on.
      Accumulator<T> up[2] = {__shfl_down_sync(~0u, x[0], 16), __shfl_down_sync(~0u, x[1], 16)};
      if (lane < 16 && row < p.m && column < p.n) store_gated(p, stored, row, column, x, up);
      continue;
    }
    if (row < p.m && column < p.n) store(p, stored, row, column, x);
  }
  if (p.splits > 1) cluster_wait();
}

// What the parameters of every kernel of the family have; the order of tiles and hints are the caller's. kNarrow: the
// kernel computes D^T = B^T A^T, and so its A is the problem's B^T.
template <bool kNarrow, class T, class D>
void fill(Params<T, D>& params, Launch const& launch, Decomposition const& work, Buffers const& buffers) {
  GemmProblem const& p = launch.problem;
  Layout const &a = kNarrow ? p.b : p.a, &b = kNarrow ? p.a : p.b;
  params.a = static_cast<T const*>(kNarrow ? buffers.b : buffers.a);
  params.b = static_cast<T const*>(kNarrow ? buffers.a : buffers.b);
  params.d = static_cast<D*>(buffers.d);
  params.lda = a.ld, params.ldb = b.ld;
  params.batch_stride_a = a.batch_stride, params.batch_stride_b = b.batch_stride;
  params.inner_stride_a = a.inner_stride, params.inner_stride_b = b.inner_stride;
  params.inner_stride_d = p.d.inner_stride;
  params.inner_batch = static_cast<int32_t>(p.inner_batch);
  params.by_inner_batch = Divisor(params.inner_batch);
  params.m = static_cast<int32_t>(kNarrow ? p.n : p.m), params.n = static_cast<int32_t>(kNarrow ? p.m : p.n);
  params.k = static_cast<int32_t>(p.k);
  params.splits = work.splits;
  params.batch = static_cast<int32_t>(p.batch);
  params.by_batch = Divisor(params.batch);
  params.runs = launch.slices.count > 1 ? EvenRuns{work.k_tiles, 0} : EvenRuns::of(work.k_tiles, work.splits);
  params.column_stride = kNarrow ? p.d.ld : 1;
  params.bias_of_row = kNarrow, params.bias_of_column = !kNarrow;
  params.pairs = !kNarrow &&
                 (p.n | p.d.ld | p.d.batch_stride | p.d.inner_stride | p.epilogue.batch_stride_bias) % 2 == 0 &&
                 reinterpret_cast<uintptr_t>(buffers.d) % (2 * sizeof(D)) == 0;
  params.epilogue = EpilogueParams<Accumulator<T>, D>(p, buffers);
  if (kNarrow) params.epilogue.ldd = 1;
}

// The splits of a tile are the CTAs of a cluster.
template <class AllParams>
Status launch_in_clusters(void (*kernel)(AllParams), AllParams const& params, Decomposition const& work,
                          int64_t shared_memory, bool overlaps, cudaStream_t stream, std::string const& name) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(work.tiles) * work.splits);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_memory;
  config.stream = stream;
  config.attrs = attributes;
  // Not a launch with clusters of one CTA: these are placed on SMs in another order.
  if (work.splits > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(work.splits), 1, 1};
  }
  if (kHopper && overlaps) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return from_cuda(cudaLaunchKernelEx(&config, kernel, params), "launching " + name);
}

template <Type>
struct ElementOf;
template <>
struct ElementOf<Type::kBF16> {
  using type = __nv_bfloat16;
};
template <>
struct ElementOf<Type::kF16> {
  using type = __half;
};
template <>
struct ElementOf<Type::kF32> {
  using type = float;
};
template <>
struct ElementOf<Type::kF64> {
  using type = double;
};

// kMajorA and kMajorB are the __global__ function's. kNarrow: the function computes D^T = B^T A^T, and so its A is the
// problem's B^T.
template <Type kTypeAB, Math kMath, Type kTypeD, Major kMajorA, Major kMajorB, int kBlocks, int kTileN, int kShifted,
          bool kGated, bool kNarrow>
class SkinnyKernel final : public CudaKernel {
  using T = typename ElementOf<kTypeAB>::type;
  using D = typename ElementOf<kTypeD>::type;
  static constexpr int kWarpsAlongK = kWarps * kWide<kShifted> * kColumns / kTileN;
  static constexpr int64_t kSharedMemory = sizeof(Shared<T, kBlocks, kWarpsAlongK, kShifted, kMajorA>);
  static_assert(kMajorA == Major::kRow || (!kShifted && !kGated));
  static_assert(!kShifted || (sizeof(T) == 2 && kMajorB == Major::kRow));

 public:
  SkinnyKernel() : CudaKernel(describe()) {}

 protected:
  Status launch(Launch const& launch, LaunchPolicy const& policy, Device const& device, Buffers const& buffers,
                cudaStream_t stream) const override {
    GemmProblem const& p = launch.problem;
    Decomposition const work = decomposition(launch.as_batch(), launch.schedule, device);
    ParamsOf<T, D, kGated> params;
    fill<kNarrow>(params, launch, work, buffers);
    params.order = own_order(p, policy);
    params.evict_first_b = kNarrow ? policy.evict_first_a : policy.evict_first_b;
    if constexpr (kGated) {
      bool const stacked = p.epilogue.is_stacked();
      params.up = stacked ? params.b + p.epilogue.up_offset : static_cast<T const*>(buffers.up);
      params.up_bias = stacked ? params.epilogue.bias + p.n : static_cast<D const*>(buffers.up_bias);
    }

    return launch_in_clusters(kMultiply, params, work, kSharedMemory, launch.overlap.any, stream, info.name);
  }

  void const* entry_point() const override { return reinterpret_cast<void const*>(kMultiply); }

 private:
  static constexpr auto kMultiply =
      &skinny_gemm<T, kMath, D, kMajorA, kMajorB, kBlocks, kWarpsAlongK, kShifted, kGated>;

  static KernelInfo describe() {
    KernelInfo info;
    info.a.major = kNarrow ? transposed(kMajorB) : kMajorA;
    info.b.major = kNarrow ? transposed(kMajorA) : kMajorB;
    auto const letter = [](Major major) { return major == Major::kRow ? "r" : "c"; };
    info.name = std::string("skinny_") + name_of(kTypeAB) + "_" + name_of(kTypeD) + "_" + letter(info.a.major) +
                letter(info.b.major) + "_" + std::to_string(kTileN) + "x" + std::to_string(kRows * kBlocks) + "x" +
                std::to_string(kTileK);
    if (kMath != Math::kNative) info.name += std::string("_") + name_of(kMath);
    if (kShifted) info.name += "_shifted";
    if (kGated) info.name += "_gated";
    if (kNarrow) info.name += "_narrow";
    info.family = Family::kSkinny;
    info.a.format = info.b.format = kTypeAB;
    info.d.format = kTypeD;
    info.math = kMath;
    int32_t const align_a = kMajorA == Major::kColumn ? 1 : kVector<T>, align_b = kShifted ? 1 : kVector<T>;
    info.a.align = kNarrow ? align_b : align_a;
    info.b.align = kNarrow ? align_a : align_b;
    info.d.align = 1;
    info.tile_m = kTileN;
    info.tile_n = kRows * kBlocks;
    info.tile_k = kTileK;
    info.stages = kStages<kShifted>;
    info.warp_schedule = WarpSchedule::kStreaming;
    info.swap_ab = !kNarrow;  // mma.sync's first operand is the function's B^T
    if (kHopper) info.split_k_reductions.push_back(Reduction::kOrdered);  // among the CTAs of a cluster
    if (kTypeD == accumulator_of(kTypeAB)) info.split_k_reductions.push_back(Reduction::kSeparate);
    info.threads = kThreads;
    info.shared_memory = kSharedMemory;
    info.promotion_k = kPromotion<T, kMath, D>;
    info.gated = kGated;
    return info;
  }

  static constexpr Major transposed(Major major) { return major == Major::kRow ? Major::kColumn : Major::kRow; }

  static TileOrder tile_order(GemmProblem const& p, LaunchPolicy const& policy) {
    constexpr int64_t kTileRows = kRows * kBlocks, kM = kNarrow ? kTileN : kTileRows, kN = kNarrow ? kTileRows : kTileN;
    return {static_cast<int32_t>((p.m + kM - 1) / kM), static_cast<int32_t>((dense(p).n + kN - 1) / kN), policy.raster,
            policy.swizzle};
  }
  // The same tiles in the same order, but of D^T if the function computes that.
  static TileOrder own_order(GemmProblem const& p, LaunchPolicy const& policy) {
    TileOrder const order = tile_order(p, policy);
    if (!kNarrow) return order;
    return {order.tiles_n(), order.tiles_m(), policy.raster == Raster::kAlongM ? Raster::kAlongN : Raster::kAlongM,
            policy.swizzle};
  }
};

// What a row multiplies: few rows by one matrix, or by two; or any number of rows by a row-major B of few columns.
enum class Products { kOne, kGated, kNarrow };

// Registers the kernels of one row of table.txt: row- and column-major B; D in the accumulators' type, and in 16 bits
// if A and B have 16 bits. If warps share K, 16-bit types also get kernels for a row-major B at any address, and every
// kernel for an aligned B runs narrow problems with a column-major B, too. Gated rows have the 16-bit results only.
template <Type kTypeAB, Math kMath, int kTileM, int kTileN, Products kProducts>
bool add_row() {
  constexpr bool kHalf = kTypeAB == Type::kBF16 || kTypeAB == Type::kF16, kGated = kProducts == Products::kGated;
  constexpr Major kMajorA = kProducts == Products::kNarrow ? Major::kColumn : Major::kRow;
  auto const add = [](auto major_b, auto columns, auto shifted) {
    auto const add_type = [&](auto type_d) {
      auto const add_one = [&](auto narrow) {
        Registration(std::make_unique<SkinnyKernel<kTypeAB, kMath, type_d(), kMajorA, major_b(), kTileM / kRows,
                                                   columns(), shifted(), kGated, narrow()>>());
      };
      if constexpr (kProducts != Products::kNarrow) add_one(std::false_type());
      if constexpr (!kGated && shifted() == 0) add_one(std::true_type());
    };
    if constexpr (!kGated) add_type(std::integral_constant<Type, kTypeAB == Type::kF64 ? Type::kF64 : Type::kF32>());
    if constexpr (kHalf) add_type(std::integral_constant<Type, kTypeAB>());
  };
  std::integral_constant<Major, Major::kRow> const row;
  std::integral_constant<Major, Major::kColumn> const column;
  std::integral_constant<int, kTileN> const columns;
  std::integral_constant<int, 0> const none;
  add(row, columns, none), add(column, columns, none);
  if constexpr (kHalf && kTileN == kColumns && kProducts == Products::kOne) {
    add(row, columns, std::integral_constant<int, 1>());
    add(row, std::integral_constant<int, 2 * kColumns>(), std::integral_constant<int, 2>());
  }
  return true;
}

// The words of table.txt.
namespace words {
inline constexpr Type bf16 = Type::kBF16, f16 = Type::kF16, f32 = Type::kF32, f64 = Type::kF64;
inline constexpr Math native = Math::kNative, tf32 = Math::kTF32, tf32x3 = Math::kTF32x3;
inline constexpr Products one = Products::kOne, gated = Products::kGated, narrow = Products::kNarrow;
}  // namespace words

}  // namespace jax_streamk::skinny

#define JAX_STREAMK_SKINNY_KERNEL(type_ab, math, rows, columns, products)                          \
  namespace jax_streamk::skinny::words {                                                           \
  static bool const JAX_STREAMK_ROW(__LINE__) = add_row<type_ab, math, rows, columns, products>(); \
  }
