// Products of few rows of A by a row-major B whose scales are factors of sums and lie in rows of whole vectors, the
// usual case: less code and fewer instructions than kernel.cuh.
//
// Each warp has a unit, 32 of K, of every k-tile. Its queue holds units of B, A and the scales. A thread multiplies 16
// columns by eight k: 16 g ... 16 g + 15 and 8 t ... 8 t + 7. Four-bit integers keep what decoding adds to them, and
// the product of A by that is subtracted from the sums.
#pragma once

#include <set>
#include <string>
#include <utility>

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/scaled/blocks.cuh"
#include "cutlass_kernels/scaled/cluster.cuh"
#include "cutlass_kernels/skinny/kernel.cuh"

namespace jax_streamk::scaled {

template <class T, class D>
struct StreamedParams : skinny::Params<T, D> {
  char const* codes;  // of B; b is unused
  Blocks blocks;
  bool early;   // whether B and the scales are there while the kernel before still runs
  bool in_row;  // whether tiles are numbered along N only
};

template <class T, class D, Type kType, Type kScale, int kBlocks>
struct Streamed {
  using Decoder = DecoderOf<T, kType>;
  static constexpr int kBits = bits_of_type(kType), kScaleBits = bits_of_type(kScale);
  static constexpr int kColumns = 128, kChunkK = 32, kTileK = 128, kRows = skinny::kRows, kWarps = skinny::kWarps;
  static constexpr int kStages = kBits == 4 ? 5 - kBlocks : 3, kCtasPerSm = (kBits == 4 ? 5 : 4) - kBlocks;
  static constexpr int kRowBytes = kColumns * kBits / 8, kPieces = kRowBytes / 16, kCopies = kChunkK * kPieces / 32;
  // Integers of four bits are left as 128 + x or, if signed, 136 + x. In f16, or with D in f32, that loses too much.
  static constexpr bool kBiased = kType == Type::kS4 && std::is_same_v<T, __nv_bfloat16> && sizeof(D) == 2;

  struct Chunk {
    char b[kChunkK * kRowBytes];
    uint4 a[kBlocks][32];
    uint4 scales[kColumns * kScaleBits / 128];
  };
  struct Shared {
    union {
      Chunk queue[kStages];
      float sums[kRows * kBlocks][kColumns + 4];
    } warps[kWarps];
    // From each CTA of the cluster, the sums of this one's share of the tile.
    float2 received[kRows * kBlocks * kColumns / 2 + skinny::kMaxSplits];
    uint64_t barrier;
  };

  // Rows that are eight apart, which neighbouring threads read, are in different banks.
  static __device__ int swizzled(int byte, int row) { return byte ^ (row / 8 % 4) << 5; }

  static __device__ void pair_a(uint32_t (&w)[4], uint4 const& x) {
    w[0] = __byte_perm(x.x, x.z, 0x5410), w[1] = __byte_perm(x.x, x.z, 0x7632);
    w[2] = __byte_perm(x.y, x.w, 0x5410), w[3] = __byte_perm(x.y, x.w, 0x7632);
  }

  // The factors of two neighbours in a row.
  static __device__ float2 factors_of(Chunk const& chunk, int pair) {
    using Pair = std::conditional_t<kScaleBits == 32, uint2, std::conditional_t<kScaleBits == 16, uint32_t, uint16_t>>;
    Pair const raw = reinterpret_cast<Pair const*>(chunk.scales)[pair];
    float2 factors;
    with_type(kScale, [&](auto to_float) {
      if constexpr (kScaleBits == 32) {
        factors = {to_float(raw.x), to_float(raw.y)};
      } else {
        factors = {to_float(raw & ((1u << kScaleBits) - 1)), to_float(raw >> kScaleBits)};
      }
    });
    return factors;
  }

  // sums += the products of a chunk.
  static __device__ void multiply(Chunk const& chunk, uint32_t flip, float (&sums)[kBlocks][8][4]) {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    using Words = std::conditional_t<kBits == 4, uint2, uint4>;
    uint32_t a[kBlocks][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) pair_a(a[block], chunk.a[block][lane]);
    Words words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      words[i] = *reinterpret_cast<Words const*>(
          chunk.b + swizzled((8 * t + i) * kRowBytes + g * static_cast<int>(sizeof(Words)), 8 * t));
    float bias[kBlocks][4] = {};
    uint32_t const zero = Decoder::zero_of(0, flip);
    if constexpr (kBiased) {
      uint32_t const minus = zero ^ 0x80008000, w[4] = {minus, minus, minus, minus};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          skinny::multiply_words<T>(bias[block], w, a[block][2 * half], a[block][2 * half + 1]);
      }
    }
    auto const halves = [&](int c, int i) {
      if constexpr (kBits == 4) {
        uint32_t const first = c < 8 ? words[i].x : words[i].y, second = c < 8 ? words[i + 4].x : words[i + 4].y;
        return __byte_perm(first, second, c % 8 < 4 ? 0x5410 : 0x7632) >> (c % 4 * 4);
      } else {
        return __byte_perm(skinny::word(words[i], c / 4), skinny::word(words[i + 4], c / 4), c % 4 * 0x1111 + 0x4400);
      }
    };
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32_t b[4][2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          b[i][c] =
              kBiased ? (halves(2 * j + c, i) & 0x000f000f) ^ flip : Decoder::pair(halves(2 * j + c, i), zero, flip);
      float2 const factors = factors_of(chunk, 8 * g + j);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float products[4] = {bias[block][0], bias[block][1], bias[block][2], bias[block][3]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t const w[4] = {b[2 * half][0], b[2 * half][1], b[2 * half + 1][0], b[2 * half + 1][1]};
          skinny::multiply_add<T, Math::kNative, D>(products, w, a[block][2 * half], a[block][2 * half + 1]);
        }
        auto& to = sums[block][j];
        to[0] += factors.x * products[0], to[1] += factors.x * products[1];
        to[2] += factors.y * products[2], to[3] += factors.y * products[3];
      }
    }
  }
};

template <class T, class D, Type kType, Type kScale, int kBlocks>
__global__ __launch_bounds__(skinny::kThreads, Streamed<T, D, kType, kScale, kBlocks>::kCtasPerSm) void streamed_gemm(
    __grid_constant__ StreamedParams<T, D> const p) {
  extern __shared__ __align__(16) char storage[];
  using Gemm = Streamed<T, D, kType, kScale, kBlocks>;
  using Chunk = typename Gemm::Chunk;
  constexpr int kColumns = Gemm::kColumns, kStages = Gemm::kStages, kTileK = Gemm::kTileK, kBits = Gemm::kBits,
                kRows = skinny::kRows, kThreads = skinny::kThreads, kWarps = skinny::kWarps, kChunkK = Gemm::kChunkK,
                kScaleBits = Gemm::kScaleBits;
  auto& shared = *reinterpret_cast<typename Gemm::Shared*>(storage);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto& own = shared.warps[warp];
  bool const splits = p.splits > 1;

  // The CTA's tile, and its run of K: a split, which is its rank in the cluster, or a slice.
  int32_t tile = blockIdx.x, rank = 0;
  if (splits) tile = cluster_index(), rank = cluster_rank();
  TileOrder::Coordinate at{0, tile, 0};
  if (!p.in_row) at = p.order.coordinate(tile);
  int32_t index = at.batch, run = rank;
  if constexpr (std::is_same_v<D, float>) {
    int32_t const slice = p.by_batch.divide(index);
    index -= slice * p.batch;
    run += slice;  // runs are either splits or slices
  }
  skinny::BatchIndex const batch(p, index);
  int32_t const first_tile = p.runs.begin(run), end = min(p.runs.begin(run + 1) * kTileK, p.k),
                m0 = at.m * kRows * kBlocks, n0 = at.n * kColumns;
  int32_t const rows = min(p.m - m0, kRows * kBlocks);
#ifdef JAX_STREAMK_RECORD
  if (threadIdx.x == 0) record_work(at.m, at.n, index, first_tile, (end + kTileK - 1) / kTileK);
#endif

  // The loads: each warp has the same unit of every k-tile. A lane copies pieces of rows that are swizzled alike.
  int32_t k = first_tile * kTileK + warp * kChunkK;
  constexpr int kPieces = Gemm::kPieces, kApart = 8 / kPieces;
  int const row = lane / 8 * 8 + lane % 8 / kPieces, column = lane % kPieces * (128 / kBits);
  bool const has_columns = n0 + column < p.n;
  char const* from_b =
      p.codes + (batch.offset(p.batch_stride_b, p.inner_stride_b) + int64_t{k + row} * p.ldb + n0 + column) * kBits / 8;
  int64_t const step_b = int64_t{kTileK} * p.ldb * kBits / 8, between_b = int64_t{kApart} * p.ldb * kBits / 8;
  T const* from_a = p.a + batch.offset(p.batch_stride_a, p.inner_stride_a) + int64_t{m0 + g} * p.lda + k + 8 * t;
  constexpr int kScalesOfLane = 128 / kScaleBits;
  bool const has_scales = lane < kScaleBits && n0 + lane * kScalesOfLane < p.n;
  uint32_t const of_lane = index * p.blocks.batch_stride + n0 + lane * kScalesOfLane;
  // Offsets in a chunk, which a shuffle keeps in registers: else they would be computed again for each chunk.
  int const to_b = __shfl_sync(~0u, Gemm::swizzled(row * Gemm::kRowBytes + lane % kPieces * 16, row), lane),
            to_lane = __shfl_sync(~0u, lane * 16, lane);
  uint64_t const evict_first = skinny::evict_first();
  auto const of_lane_in = [&](uint4* x) { return reinterpret_cast<uint4*>(reinterpret_cast<char*>(x) + to_lane); };
  auto const load_b = [&](Chunk& to, int32_t k) {
    auto const piece = [&](int i) { return reinterpret_cast<uint4*>(to.b + to_b + i * kApart * Gemm::kRowBytes); };
    if (k + kChunkK <= end) {
      if (has_columns) {
#pragma unroll
        for (int i = 0; i < Gemm::kCopies; ++i) skinny::copy_async(piece(i), from_b + i * between_b, 16, evict_first);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < Gemm::kCopies; ++i) {
        bool const inside = has_columns && k + i * kApart + row < end;
        skinny::copy_async(piece(i), inside ? from_b + i * between_b : reinterpret_cast<char const*>(p.a),
                           inside ? 16 : 0);
      }
    }
    if (has_scales) {
      uint32_t const first = p.blocks.by_block_k.divide(k) * p.blocks.stride_k + of_lane;
      skinny::copy_async(of_lane_in(to.scales),
                         static_cast<char const*>(p.blocks.scale.data) + uint64_t{first} * (kScaleBits / 8), 16);
    }
    from_b += step_b;
  };
  auto const load_a = [&](Chunk& to, int32_t k) {
    if (k + kChunkK <= end) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        if (block * kRows + g < rows) skinny::copy_async(of_lane_in(to.a[block]), from_a + block * kRows * p.lda, 16);
    } else {
#pragma unroll 1
      for (int block = 0; block < kBlocks; ++block) {
        bool const inside = block * kRows + g < rows && k + 8 * t < end;
        skinny::copy_async(of_lane_in(to.a[block]), inside ? from_a + block * kRows * p.lda : p.a, inside ? 16 : 0);
      }
    }
    from_a += kTileK;
  };
  int32_t const chunks = k < end ? (end - k + kTileK - 1) / kTileK : 0;
  int32_t const pairs = rows * (kColumns / 2);
  int32_t share = pairs, first = 0, own_pairs = pairs;
  if (splits) {
    // Each CTA of a cluster adds up, and stores, a share of the tile's pairs of neighbours.
    share = (pairs + p.splits - 1) / p.splits, first = rank * share, own_pairs = max(min(share, pairs - first), 0);
    if (threadIdx.x == 0) expect_bytes(&shared.barrier, own_pairs * p.splits * sizeof(float2));
    __syncwarp();
    cluster_arrive_relaxed();
  }
  if (p.early) {
#pragma unroll 1
    for (int i = 0; i < min(chunks, kStages); ++i) load_b(own.queue[i], k + i * kTileK);
  }
  wait_for_primary();

  float sums[kBlocks][8][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int32_t i = -kStages; i < chunks; ++i) {
    if (i >= 0) {
      Chunk const& chunk = own.queue[stage];
      skinny::wait_for_copies<kStages - 1>();
      __syncwarp();  // all lanes' copies have arrived
      Gemm::multiply(chunk, p.blocks.flip, sums);
      __syncwarp();  // all lanes have read the chunk
    }
    if (i + kStages < chunks) {
      if (i >= 0 || !p.early) load_b(own.queue[stage], k);
      load_a(own.queue[stage], k);
      k += kTileK;
    }
    skinny::commit_copies();
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // The sum over the warps along K.
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = block * kRows + 2 * t + i;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        *reinterpret_cast<float4*>(&own.sums[row][16 * g + 2 * j]) = {sums[block][j][i], sums[block][j][i + 2],
                                                                      sums[block][j + 1][i], sums[block][j + 1][i + 2]};
    }
  let_dependents_start();
  __syncthreads();
  auto const sum_of_warps = [&](int pair) {
    float2 total = {0, 0};
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      auto const part =
          *reinterpret_cast<float2 const*>(&shared.warps[from].sums[pair / (kColumns / 2)][pair % (kColumns / 2) * 2]);
      total.x += part.x, total.y += part.y;
    }
    return total;
  };
  if (splits) {
    skinny::cluster_wait();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
      int const owner = quotient(pair, share);
      send(owner, &shared.received[rank * share + pair - owner * share], sum_of_warps(pair), &shared.barrier);
    }
    if (static_cast<int32_t>(threadIdx.x) < own_pairs) wait_for_bytes(&shared.barrier);
  }
  skinny::BatchIndex const stored = std::is_same_v<D, float> ? skinny::BatchIndex(p, at.batch) : batch;
#pragma unroll 1
  for (int i = threadIdx.x; i < own_pairs; i += kThreads) {
    float2 total = {0, 0};
    if (splits) {
      for (int peer = 0; peer < p.splits; ++peer) {
        float2 const part = shared.received[peer * share + i];
        total.x += part.x, total.y += part.y;
      }
    } else {
      total = sum_of_warps(i);
    }
    int32_t const pair = first + i, column = n0 + pair % (kColumns / 2) * 2;
    float x[2] = {total.x, total.y};
    if (column < p.n) skinny::store<T, D>(p, stored, m0 + pair / (kColumns / 2), column, x);
  }
}

// Whether scales are factors of sums, with nothing else beside them, and lie in rows of whole vectors.
inline bool can_stream(Blocks const& blocks, bool in_registers, int64_t block_n) {
  auto const is_aligned = [&](int64_t elements) { return elements * blocks.scale.bits % 128 == 0; };
  return !in_registers && blocks.other.data == nullptr && block_n == 1 && blocks.stride_n == 1 &&
         is_aligned(blocks.stride_k) && is_aligned(blocks.batch_stride) &&
         reinterpret_cast<uintptr_t>(blocks.scale.data) % 16 == 0;
}

// Raises a streamed_gemm's shared-memory limit on the current device. On Hopper its clusters go to the SMs with the
// fewest CTAs: else some SMs would have four while others, which take no large cluster, have none.
inline Status prepare(void const* function, int64_t shared_memory, Device const& device, std::string const& name) {
  int gpu = 0;
  if (Status status = from_cuda(cudaGetDevice(&gpu), "cudaGetDevice"); !status.ok()) return status;
  thread_local std::set<std::pair<void const*, int>> prepared;
  if (prepared.count({function, gpu}) != 0) return {};
  auto const set = [&](cudaFuncAttribute attribute, int64_t value) {
    return from_cuda(cudaFuncSetAttribute(function, attribute, static_cast<int>(value)), name + ": its attributes");
  };
  Status status = set(cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory);
  if (status.ok() && device.arch >= 90)
    status = set(cudaFuncAttributeClusterSchedulingPolicyPreference, cudaClusterSchedulingPolicyLoadBalancing);
  if (status.ok()) prepared.emplace(function, gpu);
  return status;
}

}  // namespace jax_streamk::scaled
