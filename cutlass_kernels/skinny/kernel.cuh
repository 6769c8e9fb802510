// The skinny family: products of few rows, whose time is that of reading B once.
//
// A warp multiplies 64 columns of B, 32 of K at a time (16 of f32, 8 of f64), with mma.sync. Which element of a
// fragment a register holds is free as long as both operands agree on K and D on n: a thread takes vectors of sixteen
// bytes of either majorness, and its accumulators are neighbours in D. Shared memory is a queue of each warp's own: no
// barrier of the CTA and no descriptor is between memory and tensor core, and a short product is short.
//
// Rows of a B that start anywhere come as the vectors that they touch, nine for 64 columns, and are shifted into place
// in registers. A warp with 128 columns, and half as much of K at a time, asks for 17: fewer requests for as many
// bytes.
//
// The warps of a CTA share K, and their sums meet in shared memory; or they are side by side, and a row of B that they
// load is four times as long, which memory serves faster where there is much to load. Split-K is a cluster of CTAs,
// whose sums meet in the first one's shared memory, in the order of K: no workspace, nothing to zero, one launch.
#pragma once

#include <algorithm>

#include "cutlass_kernels/core/cuda_kernel.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/core/tf32.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/skinny/instructions.cuh"

namespace jax_streamk::skinny {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kColumns = 64;   // of a warp, or of half of a wide one
inline constexpr int kTileK = 128;    // what splits are cut by
inline constexpr int kRows = 8;       // of A in one mma.sync
inline constexpr int kMaxSplits = 8;  // CTAs in a cluster: the portable limit

// A kernel that shifts B has `kShifted` times 64 columns in a warp, one or two; of others it is zero.
template <int kShifted>
inline constexpr int kWide = kShifted == 2 ? 2 : 1;  // times kColumns, of a warp
template <int kShifted>
inline constexpr int kOwn = 8 / kWide<kShifted>;  // a thread's rows of K of a chunk that is shifted

// Chunks of a warp's queue. With three that are shifted, and with registers for it, an SM of Hopper has three CTAs of
// up to 16 rows, of which one loads while another starts or ends. Those of 16 rows would be two with a fourth chunk.
template <int kShifted>
inline constexpr int kStages = kShifted ? 3 : 4;
template <int kBlocks, int kShifted>
inline constexpr int kCtas = kShifted && kBlocks <= 2 ? 3 : 0;  // zero leaves it to the compiler

template <class T>
inline constexpr int kVector = 16 / sizeof(T);
template <class T, int kShifted>
inline constexpr int kChunk = 4 * kVector<T> / kWide<kShifted>;  // of K, which a warp multiplies at a time

template <class T, class D>
struct Params {
  T const* a;
  T const* b;
  D* d;
  int64_t lda, ldb, batch_stride_a, batch_stride_b;
  int32_t m, n, k, splits;
  int32_t batch;
  Divisor by_batch;  // of batches, which come once for each slice
  EvenRuns runs;     // of k-tiles, by split or by slice
  TileOrder order;
  bool evict_first_b;
  bool pairs;  // whether two neighbours in D, in bias and residual are one access
  EpilogueParams<Accumulator<T>, D> epilogue;
};

// What each thread of a warp has of a chunk: with g = lane / 4, t = lane % 4 and V elements in a vector, rows Vt ... Vt
// + V - 1 of K, by eight columns of B and by row g of each eight of A. The columns are 8g ... 8g + 7, one vector each
// where B is contiguous along K. Of a row-major B a vector is a row's; rows of f32 are two of them and rows of f64
// four, of which lanes together load whole sectors: columns Vg ... Vg + V - 1, as many 8V further on, and so on.
template <int kBlocks, int kShifted>
struct Chunk {
  // Of a B that is shifted, the vectors that rows touch, and their last ones. A wide warp's threads have rows 4t ... 4t
  // + 3, in each half.
  uint4 b[kOwn<kShifted>][kShifted][32], last[4 * kOwn<kShifted>];
  using Words = std::conditional_t<kShifted == 2, uint2, uint4>;
  Words a[kBlocks][32];
};
template <int kBlocks>
struct Chunk<kBlocks, 0> {
  using Words = uint4;
  uint4 b[8][32];
  Words a[kBlocks][32];
};

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, double>, double2, float2>;  // of sums, neighbours in D

// Of a CTA in which `kDeep` warps share K.
template <class T, int kBlocks, int kDeep, int kShifted>
struct Shared {
  union {
    Chunk<kBlocks, kShifted> queue[kStages<kShifted>];
    struct {                                                                 // once the queue is empty
      Accumulator<T> sums[kRows * kBlocks][kWide<kShifted> * kColumns + 4];  // of this warp's part of K
      Pair<T> totals[kRows * kBlocks * kWide<kShifted> / kDeep]
                    [kColumns / 2];  // of all warps' parts, of this warp's part of the rows
    };
  } warps[kWarps];
};

// Where vectors of a row-major B are that thread (g, t) takes. Eight neighbours load the 128 bytes of a row, which is
// one request to L2; a quarter of a warp takes those of two g and four t. Either eight are in different banks.
__device__ inline int slot(int g, int t) { return 8 * t + (g ^ (2 * t)); }

template <class T, Major kMajorB>
inline constexpr int kNeighbours = kMajorB == Major::kRow ? kVector<T> : 8;  // a thread's columns that lie side by side

__device__ inline uint32_t word(uint4 const& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ inline uint32_t word(uint2 const& v, int i) { return i == 0 ? v.x : v.y; }

// The vector that begins `offset` bytes, an even number below sixteen, into these two.
__device__ inline uint4 shifted(uint4 const& first, uint4 const& second, uint32_t offset) {
  uint32_t w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = offset & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = offset & 4 ? w[i + 1] : w[i];
  uint32_t const bits = (offset & 2) * 8;
  return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
          __funnelshift_r(w[3], w[4], bits)};
}

template <class T>
__device__ inline uint32_t offset_of(T const* p) {
  return reinterpret_cast<uintptr_t>(p) % 16;
}

// A thread's loads, chunk after chunk. What lies beyond an edge is zero, and its address, which may not even be
// aligned, is not used.
template <class T, class D, Major kMajorB, int kBlocks, int kDeep>
class Loader {
 public:
  // Of a tile that begins at row m0 and column n0 of D, from row k of K on, which ends at row `end`.
  __device__ Loader(Params<T, D> const& p, int32_t batch, int32_t m0, int32_t n0, int32_t k, int32_t end) : p_(p) {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    bool const by_rows = kMajorB == Major::kRow;
    int const g_b = by_rows ? lane % 8 : g, t_b = by_rows ? lane / 8 : t;  // what it loads of B another thread may take
    int64_t const row = m0 + g, column = n0 + kNeighbours<T, kMajorB> * g_b;
    int64_t const k_a = k + kVector<T> * t, k_b = k + kVector<T> * t_b;
    rows_ = p.m - m0 - g;
    columns_ = p.n - n0 - kNeighbours<T, kMajorB> * g_b;
    left_a_ = end - k - kVector<T> * t;
    left_b_ = end - k - kVector<T> * t_b;
    slot_ = by_rows ? slot(g_b, t_b) : lane;
    a_ = p.a + batch * p.batch_stride_a + row * p.lda + k_a;
    b_ = p.b + batch * p.batch_stride_b + (by_rows ? k_b * p.ldb + column : column * p.ldb + k_b);
  }

  __device__ void next(Chunk<kBlocks, 0>& to) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr int kPerRow = 8 / kVector<T>;  // vectors of a row-major B
      int const row = i / kPerRow, column = i % kPerRow * 8 * kVector<T>;
      if constexpr (kMajorB == Major::kRow) {
        copy_b(to.b[i][slot_], b_ + row * p_.ldb + column, row < left_b_ && column < columns_);
      } else {
        copy_b(to.b[i][slot_], b_ + i * p_.ldb, left_b_ > 0 && i < columns_);
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      bool const inside = left_a_ > 0 && block * kRows < rows_;
      copy_async(&to.a[block][lane], inside ? a_ + block * kRows * p_.lda : p_.a, inside ? 16 : 0);
    }
    commit_copies();
    a_ += kRound;
    b_ += kMajorB == Major::kRow ? kRound * p_.ldb : kRound;
    left_a_ -= kRound;
    left_b_ -= kRound;
  }

 private:
  static constexpr int kRound = kChunk<T, 0> * kDeep;  // of K, which the warps that share it multiply at a time

  __device__ void copy_b(uint4& to, T const* from, bool inside) const {
    if (!inside) from = p_.a;
    // A policy of eviction as usual is slower than none.
    if (p_.evict_first_b) {
      copy_async(&to, from, inside ? 16 : 0, evict_first_);
    } else {
      copy_async(&to, from, inside ? 16 : 0);
    }
  }

  Params<T, D> const& p_;
  int32_t rows_, columns_;   // left of A and of B, from this thread's first on
  int32_t left_a_, left_b_;  // of K, for what is loaded next
  int slot_;
  T const *a_, *b_;
  uint64_t const evict_first_ = evict_first();
};

// The same of a row-major B whose rows start anywhere. Neighbours load what fills the tile's columns of a row, and one
// what is beyond.
template <class T, class D, int kBlocks, int kDeep, int kShifted>
class ShiftedLoader {
 public:
  __device__ ShiftedLoader(Params<T, D> const& p, int32_t batch, int32_t m0, int32_t n0, int32_t k, int32_t end)
      : p_(p) {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    rows_ = p.m - m0 - g;
    bytes_ = min(p.n - n0, kShifted * kColumns) * static_cast<int>(sizeof(T));
    left_ = end - k;
    a_ = p.a + batch * p.batch_stride_a + int64_t{m0 + g} * p.lda + k + kOwn * t;
    T const* const b = p.b + batch * p.batch_stride_b + int64_t{k} * p.ldb + n0;
    b_ = b + lane / kOfRow * p.ldb;
    last_ = b + lane * p.ldb;
  }

  __device__ void next(Chunk<kBlocks, kShifted>& to) {
    int const lane = threadIdx.x % 32, t = lane % 4, vector = lane % kOfRow;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr int kAtOnce = 32 / kOfRow;
      int const row = i * kAtOnce + lane / kOfRow;
      copy_touched(&to.b[row % kOwn][vector / 8][slot(vector % 8, row / kOwn)], b_ + i * kAtOnce * p_.ldb, vector,
                   row < left_);
    }
    if (lane < 4 * kOwn) copy_touched(&to.last[lane], last_, kOfRow, lane < left_);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      bool const inside = kOwn * t < left_ && block * kRows < rows_;
      copy_async(&to.a[block][lane], inside ? a_ + block * kRows * p_.lda : p_.a, inside ? sizeof(to.a[0][0]) : 0);
    }
    commit_copies();
    a_ += kRound;
    b_ += kRound * p_.ldb;
    last_ += kRound * p_.ldb;
    left_ -= kRound;
  }

 private:
  static constexpr int kRound = kChunk<T, kShifted> * kDeep;
  static constexpr int kOwn = skinny::kOwn<kShifted>;
  static constexpr int kOfRow = 8 * kShifted;  // threads that load a row

  // Of the vectors that the tile's part of a row touches, so many on from the first. Tiles beside this one read the
  // line, too: it stays in L2.
  __device__ void copy_touched(uint4* to, T const* row, int vector, bool inside) const {
    int const offset = static_cast<int>(offset_of(row)),
              bytes = inside ? min(max(offset + bytes_ - 16 * vector, 0), 16) : 0;
    copy_async(
        to, bytes > 0 ? reinterpret_cast<char const*>(row) - offset + 16 * vector : reinterpret_cast<char const*>(p_.a),
        bytes);
  }

  Params<T, D> const& p_;
  int32_t rows_, bytes_;  // left of A and of a row of B
  int32_t left_;          // of K, for what is loaded next
  T const *a_, *b_, *last_;
};

// Of K, after which sums are promoted (KernelInfo::promotion_k), 0: never.
template <class T, Math kMath, class D>
inline constexpr int kPromotion = !std::is_same_v<D, float> ? 0
                                  : sizeof(T) == 2          ? 16
                                                            : 8;

// The product of two words of K by 16 columns of B and eight rows of A.
template <class T, Math kMath, class D>
__device__ inline void multiply_add(Accumulator<T> (&sums)[4], uint32_t const (&b)[4], uint32_t a0, uint32_t a1) {
  auto const promote = [&](auto const& multiply) {
    if constexpr (kPromotion<T, kMath, D> > 0) {
      float products[4] = {};
      multiply(products);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += products[i];
    } else {
      multiply(sums);
    }
  };
  if constexpr (kMath == Math::kNative) {
    promote([&](auto& to) { multiply_words<T>(to, b, a0, a1); });
  } else {
    // An f32 number is a large TF32 number and a small one. Of their products, small by small is less than the rest is
    // wrong by.
    uint32_t const words[6] = {b[0], b[1], b[2], b[3], a0, a1};
    uint32_t large[6], small[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      large[i] = to_tf32(__uint_as_float(words[i]));
      if constexpr (kMath == Math::kTF32x3) small[i] = to_tf32(__uint_as_float(words[i]) - __uint_as_float(large[i]));
    }
    uint32_t const large_b[4] = {large[0], large[1], large[2], large[3]};
    promote([&](auto& to) {
      if constexpr (kMath == Math::kTF32x3) {
        uint32_t const small_b[4] = {small[0], small[1], small[2], small[3]};
        multiply_words<T>(to, small_b, large[4], large[5]);
        multiply_words<T>(to, large_b, small[4], small[5]);
      }
      multiply_words<T>(to, large_b, large[4], large[5]);
    });
  }
}

// Two neighbours of D.
template <class T, class D>
__device__ inline void store(Params<T, D> const& p, int32_t batch, int32_t row, int32_t column,
                             Accumulator<T> (&x)[2]) {
  struct alignas(2 * sizeof(D)) Neighbours {
    D x[2];
  };
  auto const& epilogue = p.epilogue;
  int64_t const offset = batch * epilogue.batch_stride_d + row * epilogue.ldd + column;
  bool const both = column + 1 < p.n;
  if (!epilogue.plain) {
    auto const add = [&](Accumulator<T> factor, D const* from) {
      Neighbours values{};
      if (p.pairs) {
        values = load_vector<Neighbours>(from);
      } else {
        values.x[0] = from[0];
        if (both) values.x[1] = from[1];
      }
      x[0] += factor * static_cast<Accumulator<T>>(values.x[0]);
      x[1] += factor * static_cast<Accumulator<T>>(values.x[1]);
    };
    x[0] *= epilogue.alpha, x[1] *= epilogue.alpha;
    if (epilogue.bias != nullptr) add(1, epilogue.bias + batch * epilogue.batch_stride_bias + column);
    if (epilogue.residual != nullptr) add(epilogue.beta, epilogue.residual + offset);
    activate(epilogue.activation, x, 2);
  }
  Neighbours const out{static_cast<D>(x[0]), static_cast<D>(x[1])};
  if (p.pairs) {
    *reinterpret_cast<Neighbours*>(p.d + offset) = out;
  } else {
    p.d[offset] = out.x[0];
    if (both) p.d[offset + 1] = out.x[1];
  }
}

// The words of four rows of K as mma.sync takes them: those of the first two by column, and those of the others.
__device__ inline void pair_rows(uint32_t (&w)[4], uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
  w[0] = __byte_perm(v0, v1, 0x5410), w[1] = __byte_perm(v0, v1, 0x7632);
  w[2] = __byte_perm(v2, v3, 0x5410), w[3] = __byte_perm(v2, v3, 0x7632);
}

template <class T, Math kMath, class D, Major kMajorB, int kBlocks, int kDeep, int kShifted>
__global__ __launch_bounds__(kThreads, kCtas<kBlocks, kShifted>) void multiply(__grid_constant__ Params<T, D> const p) {
  extern __shared__ __align__(16) char storage[];
  auto& shared = *reinterpret_cast<Shared<T, kBlocks, kDeep, kShifted>*>(storage);
  constexpr int kStages = skinny::kStages<kShifted>;
  using Pair = skinny::Pair<T>;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int32_t const tile = p.splits > 1 ? quotient(blockIdx.x, p.splits) : blockIdx.x, rank = blockIdx.x - tile * p.splits;
  TileOrder::Coordinate const at = p.order.coordinate(tile);
  int const beside = warp / kDeep, deep = warp % kDeep;
  int32_t batch = at.batch, run = rank;
  if constexpr (std::is_same_v<D, Accumulator<T>>) {
    int32_t const slice = p.by_batch.divide(batch);
    batch -= slice * p.batch;
    run += slice;  // of splits or slices there are several, not of both
  }
  constexpr int kWide = skinny::kWide<kShifted>, kOwn = skinny::kOwn<kShifted>, kChunk = skinny::kChunk<T, kShifted>;
  int32_t const begin = p.runs.begin(run) * kTileK + deep * kChunk, end = min(p.runs.begin(run + 1) * kTileK, p.k);
  int32_t const m0 = at.m * kRows * kBlocks, n0 = (at.n * (kWarps / kDeep) + beside) * kWide * kColumns;

  using Aligned = Loader<T, D, kMajorB, kBlocks, kDeep>;
  using Loader = std::conditional_t<kShifted != 0, ShiftedLoader<T, D, kBlocks, kDeep, kShifted>, Aligned>;
  Loader loader(p, batch, m0, n0, begin, end);
  // Where this thread's first row of B starts: the same in all chunks, as eight rows are whole vectors.
  uint32_t const row_bytes = static_cast<uint32_t>(p.ldb * sizeof(T));
  uint32_t const offset = offset_of(p.b + batch * p.batch_stride_b) + kOwn * t * row_bytes;
  auto& own = shared.warps[warp];
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) loader.next(own.queue[stage]);
  // Neighbours in D that a thread ends with: columns 2 lane and 2 lane + 1 of each 64, of every kDeep-th row.
  constexpr int kPairs = kRows * kBlocks * kWide / kDeep;
  auto const row_of = [&](int pair) { return m0 + deep + pair / kWide * kDeep; };
  auto const column_of = [&](int pair) { return n0 + pair % kWide * kColumns + 2 * lane; };
  if (rank == 0 && !p.epilogue.plain) {
    // Wanted when all else is done.
    auto const& epilogue = p.epilogue;
    for (int i = 0; i < kPairs && row_of(i) < p.m; ++i) {
      int32_t const row = row_of(i), column = column_of(i);
      if (column >= p.n) continue;
      if (epilogue.bias != nullptr && i < kWide)
        prefetch_to_l2(epilogue.bias + at.batch * epilogue.batch_stride_bias + column);
      if (epilogue.residual != nullptr)
        prefetch_to_l2(epilogue.residual + at.batch * epilogue.batch_stride_d + row * epilogue.ldd + column);
    }
  }
  Accumulator<T> sums[kBlocks][4 * kWide][4] = {};
  int stage = 0;
  for (int32_t k = begin; k < end; k += kChunk * kDeep) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // those of all lanes are there, and all have read the chunk before
    Chunk<kBlocks, kShifted> const& chunk = own.queue[stage];
    auto& used_up = own.queue[stage == 0 ? kStages - 1 : stage - 1];
    stage = stage == kStages - 1 ? 0 : stage + 1;
    typename Chunk<kBlocks, kShifted>::Words a[kBlocks];
    if constexpr (kShifted) {
      loader.next(used_up);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) a[block] = chunk.a[block][lane];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        // A wide warp's other half, or the other rows of K.
        int const half = step % kWide, first = 4 * step % kOwn;
        uint4 b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          auto const& row = chunk.b[first + i];
          uint4 const& beyond = half + 1 < kWide ? row[half + 1][slot(0, t)] : chunk.last[kOwn * t + first + i];
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
      for (int block = 0; block < kBlocks; ++block) a[block] = chunk.a[block][lane];
#pragma unroll
      for (int i = 0; i < 8; ++i) b[i] = chunk.b[i][kMajorB == Major::kRow ? slot(g, t) : lane];
      loader.next(used_up);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // Words 2 step and 2 step + 1 of this thread's rows of K are what the instruction calls words t and t + 4.
          // Row g of its D is column 2j of this thread's eight, and row g + 8 the next.
          uint32_t w[4];
          if constexpr (kMajorB == Major::kColumn) {
            w[0] = word(b[2 * j], 2 * step), w[1] = word(b[2 * j + 1], 2 * step);
            w[2] = word(b[2 * j], 2 * step + 1), w[3] = word(b[2 * j + 1], 2 * step + 1);
          } else if constexpr (sizeof(T) == 2) {
            pair_rows(w, word(b[4 * step], j), word(b[4 * step + 1], j), word(b[4 * step + 2], j),
                      word(b[4 * step + 3], j));
          } else if constexpr (sizeof(T) == 8) {
            uint4 const& v = b[4 * step + j];
            w[0] = v.x, w[2] = v.y, w[1] = v.z, w[3] = v.w;
          } else {
            uint4 const& v0 = b[4 * step + j / 2];
            uint4 const& v1 = b[4 * step + 2 + j / 2];
            w[0] = word(v0, 2 * j % 4), w[1] = word(v0, 2 * j % 4 + 1);
            w[2] = word(v1, 2 * j % 4), w[3] = word(v1, 2 * j % 4 + 1);
          }
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

  Pair total[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    total[i] = {0, 0};
#pragma unroll
    for (int from = 0; from < kDeep; ++from) {
      auto const part =
          *reinterpret_cast<Pair const*>(&shared.warps[beside * kDeep + from].sums[row_of(i) - m0][column_of(i) - n0]);
      total[i].x += part.x, total[i].y += part.y;
    }
  }
  if (p.splits > 1) {
    if (rank > 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) own.totals[i][lane] = total[i];
    }
    cluster_arrive();
    cluster_wait();
    if (rank > 0) {
      // Its memory must be there until the first CTA has read it.
      cluster_arrive();
      cluster_wait();
      return;
    }
    // All loads at once, but where their values would fill the registers.
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
  if constexpr (std::is_same_v<D, Accumulator<T>>) let_dependents_start();  // which reduce slices
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    int32_t const row = row_of(i), column = column_of(i);
    Accumulator<T> x[2] = {total[i].x, total[i].y};
    if (row < p.m && column < p.n) store(p, at.batch, row, column, x);
  }
  if (p.splits > 1) cluster_wait();
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

template <Type kTypeAB, Math kMath, Type kTypeD, Major kMajorB, int kBlocks, int kTileN, int kShifted>
class SkinnyKernel final : public CudaKernel {
  using T = typename ElementOf<kTypeAB>::type;
  using D = typename ElementOf<kTypeD>::type;
  static constexpr int kDeep = kWarps * kWide<kShifted> * kColumns / kTileN;
  static constexpr int64_t kSharedMemory = sizeof(Shared<T, kBlocks, kDeep, kShifted>);
  static_assert(!kShifted || (sizeof(T) == 2 && kMajorB == Major::kRow));
  static constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1024;  // positions a little beyond are counted in 32 bits

 public:
  SkinnyKernel() : CudaKernel(describe()) {}

  Decomposition decomposition(GemmProblem const& p, Schedule const& s, Device const&) const override {
    // As many workers as pieces of work. CTAs are numbered otherwise: those of a cluster, which share a tile, are
    // neighbours.
    DenseTiles const tiles(tile_order(p, {}), static_cast<int32_t>(p.batch),
                           static_cast<int32_t>((p.k + kTileK - 1) / kTileK));
    int32_t const splits = s.kind == ScheduleKind::kSplitK ? s.splits : 1;
    return Decomposition::make(splits > 1 ? s.kind : ScheduleKind::kDataParallel, tiles, tiles.tiles() * splits,
                               splits);
  }

 protected:
  Status can_launch(GemmProblem const& p, Schedule const& s, Device const& device) const override {
    if (device.arch < 80) return Status::invalid(info.name + " needs compute capability 8.0 or newer");
    if (std::max({p.m, p.n, p.k}) >= kMaxExtent) return Status::invalid(info.name + ": too large");
    if (decomposition(p, s, device).splits == 1) return {};
    if (device.arch < 90 || !kHopper)
      return Status::invalid(
          info.name + " splits K among the CTAs of a cluster, which needs compute capability 9.0 and a build for it");
    if (s.splits > kMaxSplits)
      return Status::invalid(info.name + " has at most " + std::to_string(kMaxSplits) +
                             " splits, the CTAs of a cluster");
    return {};
  }

  int64_t launch_workspace_bytes(GemmProblem const&, Schedule const&, Device const&) const override { return 0; }

  Status launch(GemmProblem const& p, Slices const& slices, Schedule const& s, LaunchPolicy const& policy,
                Device const& device, Buffers const& buffers, bool, cudaStream_t stream) const override {
    Decomposition const work = decomposition(slices.as_batch(p), s, device);
    Params<T, D> params;
    params.a = static_cast<T const*>(buffers.a);
    params.b = static_cast<T const*>(buffers.b);
    params.d = static_cast<D*>(buffers.d);
    params.lda = p.a.ld, params.ldb = p.b.ld;
    params.batch_stride_a = p.a.batch_stride, params.batch_stride_b = p.b.batch_stride;
    params.m = static_cast<int32_t>(p.m), params.n = static_cast<int32_t>(p.n), params.k = static_cast<int32_t>(p.k);
    params.splits = work.splits;
    params.batch = static_cast<int32_t>(p.batch);
    params.by_batch = Divisor(params.batch);
    params.runs = slices.count > 1 ? EvenRuns{work.k_tiles, 0} : EvenRuns::of(work.k_tiles, work.splits);
    params.order = tile_order(p, policy);
    params.evict_first_b = policy.evict_first_b;
    params.pairs = (p.n | p.d.ld | p.d.batch_stride | p.epilogue.batch_stride_bias) % 2 == 0 &&
                   reinterpret_cast<uintptr_t>(buffers.d) % (2 * sizeof(D)) == 0;
    params.epilogue = EpilogueParams<Accumulator<T>, D>(p, buffers);

    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(work.splits), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(work.tiles) * work.splits);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedMemory;
    config.stream = stream;
    config.attrs = &cluster;
    // A launch with clusters of one CTA places neighbouring CTAs differently.
    config.numAttrs = work.splits > 1;
    return from_cuda(cudaLaunchKernelEx(&config, kMultiply, params), "launching " + info.name);
  }

  void const* entry_point() const override { return reinterpret_cast<void const*>(kMultiply); }

 private:
  static constexpr auto kMultiply = &multiply<T, kMath, D, kMajorB, kBlocks, kDeep, kShifted>;

  static KernelInfo describe() {
    KernelInfo info;
    info.name = std::string("skinny_") + name_of(kTypeAB) + "_" + name_of(kTypeD) +
                (kMajorB == Major::kRow ? "_rr_" : "_rc_") + std::to_string(kTileN) + "x" +
                std::to_string(kRows * kBlocks) + "x" + std::to_string(kTileK);
    if (kMath != Math::kNative) info.name += std::string("_") + name_of(kMath);
    if (kShifted) info.name += "_shifted";
    info.family = Family::kSkinny;
    info.a.format = info.b.format = kTypeAB;
    info.d.format = kTypeD;
    info.math = kMath;
    info.a.major = Major::kRow;
    info.b.major = kMajorB;
    info.a.align = kVector<T>;
    info.b.align = kShifted ? 1 : kVector<T>;
    info.d.align = 1;
    info.tile_m = kTileN;
    info.tile_n = kRows * kBlocks;
    info.tile_k = kTileK;
    info.stages = kStages<kShifted>;
    info.warp_schedule = "streaming";
    info.swap_ab = true;
    info.split_k_reductions = {Reduction::kOrdered};
    if (kTypeD == accumulator_of(kTypeAB)) info.split_k_reductions.push_back(Reduction::kSeparate);
    info.threads = kThreads;
    info.shared_memory = kSharedMemory;
    info.promotion_k = kPromotion<T, kMath, D>;
    return info;
  }

  static TileOrder tile_order(GemmProblem const& p, LaunchPolicy const& policy) {
    return {static_cast<int32_t>((p.m + kRows * kBlocks - 1) / (kRows * kBlocks)),
            static_cast<int32_t>((p.n + kTileN - 1) / kTileN), policy.raster, policy.swizzle};
  }
};

// One row of the table: so many rows of A, which is row-major, by so many columns of a B of either majorness, into the
// operands' type and into that of their sums. Of 16 bits and where warps share K, also by as many and twice as many of
// a row-major B whose rows start anywhere.
template <Type kTypeAB, Math kMath, int kTileM, int kTileN>
bool add_row() {
  constexpr bool kHalf = kTypeAB == Type::kBF16 || kTypeAB == Type::kF16;
  auto const add = [](auto major_b, auto columns, auto shifted) {
    auto const add_type = [&](auto type_d) {
      Registration(
          std::make_unique<SkinnyKernel<kTypeAB, kMath, type_d(), major_b(), kTileM / kRows, columns(), shifted()>>());
    };
    add_type(std::integral_constant<Type, kTypeAB == Type::kF64 ? Type::kF64 : Type::kF32>());
    if constexpr (kHalf) add_type(std::integral_constant<Type, kTypeAB>());
  };
  std::integral_constant<Major, Major::kRow> const row;
  std::integral_constant<Major, Major::kColumn> const column;
  std::integral_constant<int, kTileN> const columns;
  std::integral_constant<int, 0> const none;
  add(row, columns, none), add(column, columns, none);
  if constexpr (kHalf && kTileN == kColumns) {
    add(row, columns, std::integral_constant<int, 1>());
    add(row, std::integral_constant<int, 2 * kColumns>(), std::integral_constant<int, 2>());
  }
  return true;
}

// The words of table.txt.
namespace words {
inline constexpr Type bf16 = Type::kBF16, f16 = Type::kF16, f32 = Type::kF32, f64 = Type::kF64;
inline constexpr Math native = Math::kNative, tf32 = Math::kTF32, tf32x3 = Math::kTF32x3;
}  // namespace words

}  // namespace jax_streamk::skinny

#define JAX_STREAMK_SKINNY_KERNEL(type_ab, math, rows, columns)                          \
  namespace jax_streamk::skinny::words {                                                 \
  static bool const JAX_STREAMK_ROW(__LINE__) = add_row<type_ab, math, rows, columns>(); \
  }
