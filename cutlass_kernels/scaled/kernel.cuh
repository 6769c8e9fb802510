// Products of few rows of A by a B of four or eight bits with scales, for as long as reading B takes: the skinny family
// with numbers that are decoded on the way from shared memory to mma.sync.
//
// Each warp streams B through its own queue, 4 KiB at a time: kColumns columns by kChunkK of K. A unit is 32 of K, of
// which thread (g, t) = (lane / 4, lane % 4) multiplies k = 8t ... 8t + 7 of eight columns. Which k mma.sync calls
// which does not matter as long as A and B agree, so that decoded pairs are what is cheap to decode: in four bits k and
// k + 4, in eight k and k + 2 if B is column-major.
//
// Scales are factors of sums: the numbers themselves are exact in 16 bits, and each run of K that shares scales is
// summed by itself. Where blocks are shorter than a unit, and where there are offsets, each number is multiplied and
// rounded to 16 bits, as if B had been dequantized.
//
// A row-major B with usual scales has a faster kernel, streamed.cuh.
#pragma once

#include <algorithm>

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/scaled/blocks.cuh"
#include "cutlass_kernels/scaled/streamed.cuh"
#include "cutlass_kernels/skinny/kernel.cuh"

namespace jax_streamk::scaled {

using skinny::BatchIndex;
using skinny::kRows;
using skinny::kThreads;
using skinny::kWarps;

inline constexpr int kUnit = 32;    // of K
inline constexpr int kTileK = 128;  // of splits

template <Major kMajorB>
inline constexpr int kColumns = kMajorB == Major::kRow ? 128 : 64;
inline constexpr int kStages = 2;  // chunks in a queue

template <class T, class D>
struct Params : skinny::Params<T, D> {
  void const* codes;  // of B; b is unused
  Blocks blocks;
  bool in_registers;      // whether each number is multiplied, and not sums
  int32_t groups, units;  // of a chunk, blocks along K; and units that have scales of their own
};

template <int kColumns, int kChunkK, int kMostGroups, int kBlocks>
struct Shared {
  struct Chunk {
    uint4 b[kChunkBytes / 16];
    uint4 a[kBlocks][kChunkK / kUnit][32];
  };
  struct Warp {
    union {
      Chunk queue[kStages];
      struct {
        float sums[kRows * kBlocks][kColumns + 4];
        float2 totals[kRows * kBlocks / kWarps][kColumns / 2];
      };
    };
    // Of each block of the chunk, by column: what sums are multiplied by, in f32, or each number, twice in T; and,
    // twice in T, what is subtracted before, or added then.
    uint32_t factors[kMostGroups][kColumns], others[kMostGroups][kColumns];
  } warps[kWarps];
};

// Where a row-major B's 32 bytes `unit` lie: rows that are eight apart, which neighbouring threads read, are in
// different banks.
template <int kBits>
__device__ inline int swizzled(int unit, int row) {
  return unit ^ (kBits == 4 ? (row >> 3) & 3 : ((row >> 3) & 1) << 1);
}

template <class T, class D, Type kType, Major kMajorB, int kBlocks>
struct Gemm {
  static constexpr int kBits = bits_of_type(kType), kColumns = scaled::kColumns<kMajorB>,
                       kChunkK = kChunkBytes * 8 / kBits / kColumns,
                       kPer16 = 128 / kBits,  // numbers in 16 bytes
      kOctets = kColumns / 64, kStep = kChunkK * kWarps;
  static constexpr bool kByRows = kMajorB == Major::kRow;
  static constexpr bool kHasZeros = kType == Type::kS4 || kType == Type::kS8;
  using Decoder = DecoderOf<T, kType>;
  static constexpr int kMostGroups = kChunkK / smallest_block(kType), kOwnColumns = kColumns / 32;
  using Shared = scaled::Shared<kColumns, kChunkK, kMostGroups, kBlocks>;
  using Warp = typename Shared::Warp;
  using Chunk = typename Shared::Chunk;
  using Params = scaled::Params<T, D>;

  // The loads of a warp's queue. A piece is 16 bytes of B; rows and columns of B are whole pieces.
  class Loader {
    static constexpr int kPieces = kColumns / kPer16;  // in a row of a row-major B
    static constexpr int kRowsAtOnce = 32 / kPieces;

   public:
    __device__ Loader(Params const& p, BatchIndex const& batch, int32_t m0, int32_t n0, int32_t k, int32_t end)
        : p_(p), rows_(p.m - m0 - lane() / 4) {
      // A lane copies pieces of one column, a row apart; or, lane (g, t), piece t of columns 8g, 8g + 1, ...
      int const row = kByRows ? lane() / kPieces : lane() % 4 * kPer16,
                column = kByRows ? lane() % kPieces * kPer16 : lane() / 4 * 8;
      columns_ = p.n - n0 - column;
      left_a_ = end - k - lane() % 4 * 8;
      left_b_ = end - k - row;
      if (kByRows && columns_ <= 0) left_b_ = 0;
      a_ = p.a + batch.offset(p.batch_stride_a, p.inner_stride_a) + int64_t{m0 + lane() / 4} * p.lda + k +
           lane() % 4 * 8;
      int64_t const first = batch.offset(p.batch_stride_b, p.inner_stride_b) +
                            (kByRows ? int64_t{k + row} * p.ldb + n0 + column : int64_t{n0 + column} * p.ldb + k + row);
      b_ = static_cast<char const*>(p.codes) + first * kBits / 8;
      step_ = (kByRows ? kRowsAtOnce : 1) * p.ldb * kBits / 8;
    }

    __device__ void next(Chunk& to) {
      // Where all of a chunk is there, nothing need be asked for each piece.
      bool const is_whole =
          left_b_ > (kByRows ? (kChunkBytes / 512 - 1) * kRowsAtOnce : 0) && (kByRows || columns_ >= 8);
      if (__all_sync(~0u, is_whole && left_a_ > kChunkK - kUnit)) {
        copy<true>(to);
      } else {
        copy<false>(to);
      }
      skinny::commit_copies();
      a_ += kStep;
      b_ += (kByRows ? kStep * p_.ldb : kStep) * kBits / 8;
      left_a_ -= kStep, left_b_ -= kStep;
    }

   private:
    static __device__ int lane() { return threadIdx.x % 32; }

    template <bool kWhole>
    __device__ void copy(Chunk& to) const {
      char const* from = b_;
#pragma unroll
      for (int i = 0; i < kChunkBytes / 512; ++i, from += step_) {
        int const row = i * kRowsAtOnce + lane() / kPieces,
                  slot = kByRows ? swizzled<kBits>(i * 16 + lane() / 2, row) * 2 + lane() % 2
                                 : i * 32 + skinny::slot(lane() / 4, lane() % 4);
        bool const inside = kWhole || (kByRows ? i * kRowsAtOnce < left_b_ : left_b_ > 0 && i < columns_);
        skinny::copy_async(&to.b[slot], inside ? from : reinterpret_cast<char const*>(p_.a), inside ? 16 : 0,
                           evict_first_);
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        T const* const row = block * kRows < rows_ ? a_ + block * kRows * p_.lda : p_.a;
        int const bytes = block * kRows < rows_ ? 16 : 0;
#pragma unroll
        for (int unit = 0; unit < kChunkK / kUnit; ++unit) {
          bool const inside = kWhole || unit * kUnit < left_a_;
          skinny::copy_async(&to.a[block][unit][lane()], inside ? row + unit * kUnit : p_.a, inside ? bytes : 0);
        }
      }
    }

    Params const& p_;
    int32_t rows_, columns_;   // of A and of B, from this lane's first on
    int32_t left_a_, left_b_;  // along K, from this lane's next element on
    T const* a_;
    char const* b_;
    int64_t step_;
    uint64_t const evict_first_ = skinny::evict_first();
  };

  // What belongs to the blocks of a chunk, on its way from memory to shared memory while the chunk before is
  // multiplied. A lane has each 32nd column.
  class BlocksOfChunk {
   public:
    __device__ BlocksOfChunk(Params const& p, int32_t batch, int32_t n0, int32_t end)
        : p_(p), end_(end), columns_(p.n - n0 - lane()) {
#pragma unroll
      for (int c = 0; c < kOwnColumns; ++c)
        of_column_[c] =
            batch * p.blocks.batch_stride + p.blocks.by_block_n.divide(n0 + lane() + 32 * c) * p.blocks.stride_n;
    }

    __device__ void load(int32_t k) {
      k_ = k;
      of_k_ = p_.blocks.by_block_k.divide(k) * p_.blocks.stride_k;
      load(p_.blocks.scale, factors_);
      if (p_.blocks.other.data != nullptr) load(p_.blocks.other, others_);
    }

    __device__ void store(Warp& to) const {
      Blocks const& blocks = p_.blocks;
      auto const factor = [&](float x) { return p_.in_registers ? twice<T>(x) : __float_as_uint(x); };
      with_type(blocks.scale.type, [&](auto to_float) {
        for_each([&](int group, int c) { to.factors[group][lane() + 32 * c] = factor(to_float(factors_[group][c])); });
      });
      if (blocks.other.data == nullptr) return;
      if (blocks.adds) {
        with_type(blocks.other.type, [&](auto to_float) {
          for_each(
              [&](int group, int c) { to.others[group][lane() + 32 * c] = twice<T>(to_float(others_[group][c])); });
        });
      } else {
        for_each([&](int group, int c) {
          uint32_t const half = kBits == 4 ? of(group, c) % 2 : 0;
          to.others[group][lane() + 32 * c] = Decoder::zero_of(others_[group][c] >> 4 * half, blocks.flip);
        });
      }
    }

   private:
    using Words = uint32_t[kMostGroups][kOwnColumns];
    static __device__ int lane() { return threadIdx.x % 32; }
    __device__ uint32_t of(int group, int c) const { return of_column_[c] + of_k_ + group * p_.blocks.stride_k; }

    // Calls function(block of the chunk, own column) for those there are.
    template <class Function>
    __device__ void for_each(Function const& function) const {
#pragma unroll
      for (int group = 0; group < kMostGroups; ++group) {
        if (group >= p_.groups) break;
#pragma unroll
        for (int c = 0; c < kOwnColumns; ++c) function(group, c);
      }
    }

    __device__ void load(Numbers const& from, Words& to) const {
      auto const all = [&](auto word, int per_word) {
        for_each([&](int group, int c) {
          bool const inside = k_ + group * p_.blocks.block_k < end_ && 32 * c < columns_;
          to[group][c] = inside ? __ldg(static_cast<decltype(word) const*>(from.data) + of(group, c) / per_word) : 0;
        });
      };
      if (from.bits == 16) {
        all(uint16_t(), 1);
      } else if (from.bits == 8) {
        all(uint8_t(), 1);
      } else if (from.bits == 32) {
        all(uint32_t(), 1);
      } else {
        all(uint8_t(), 2);
      }
    }

    Params const& p_;
    int32_t end_, columns_, k_ = 0;
    uint32_t of_k_ = 0, of_column_[kOwnColumns];
    Words factors_, others_;
  };

  // The four words of A, of a vector of eight neighbours along K, that go with the pairs of decoded B.
  static __device__ void pair_a(uint32_t (&w)[4], uint4 const& x) {
    if constexpr (kBits == 8 && !kByRows) {  // (0, 2), (1, 3), (4, 6), (5, 7)
      w[0] = __byte_perm(x.x, x.y, 0x5410), w[1] = __byte_perm(x.x, x.y, 0x7632);
      w[2] = __byte_perm(x.z, x.w, 0x5410), w[3] = __byte_perm(x.z, x.w, 0x7632);
    } else {  // (0, 4), (1, 5), (2, 6), (3, 7)
      w[0] = __byte_perm(x.x, x.z, 0x5410), w[1] = __byte_perm(x.x, x.z, 0x7632);
      w[2] = __byte_perm(x.y, x.w, 0x5410), w[3] = __byte_perm(x.y, x.w, 0x7632);
    }
  }

  // A thread's numbers of a unit, eight columns by eight k.
  struct Codes {
    uint32_t words[kBits == 4 ? 8 : 16];

    __device__ Codes(Chunk const& chunk, int unit, int octet) {
      int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      auto const* const bytes = reinterpret_cast<char const*>(chunk.b);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        char const* from;
        if constexpr (kByRows) {  // row i of eight: eight columns
          int const row = unit * kUnit + 8 * t + i;
          constexpr int kPerRow = kColumns * kBits / 256;  // of 32 bytes
          int const at = octet * (64 * kBits / 8) + g * kBits;
          from = bytes + swizzled<kBits>(row * kPerRow + at / 32, row) * 32 + at % 32;
        } else {  // column i of eight: eight k
          int const at = unit * kUnit + 8 * t;
          from = bytes + (i * 32 + skinny::slot(g, at / kPer16)) * 16 + at % kPer16 * kBits / 8;
        }
        if constexpr (kBits == 4) {
          words[i] = *reinterpret_cast<uint32_t const*>(from);
        } else {
          auto const both = *reinterpret_cast<uint2 const*>(from);
          words[2 * i] = both.x, words[2 * i + 1] = both.y;
        }
      }
    }

    // The halves of pair i of column c.
    __device__ uint32_t halves(int c, int i) const {
      if constexpr (kByRows) {
        if constexpr (kBits == 4) {
          return __byte_perm(words[i], words[i + 4], c < 4 ? 0x5410 : 0x7632) >> (c % 4 * 4);
        } else {
          uint32_t const first = words[2 * i + c / 4], second = words[2 * (i + 4) + c / 4];
          return __byte_perm(first, second, c % 4 * 0x1111 + 0x4400);
        }
      } else {
        if constexpr (kBits == 4) return words[c] >> (4 * i);
        return words[2 * c + i / 2] >> (i % 2 * 8);
      }
    }
  };

  // sums += the products of a chunk.
  //
  // kUnits: how many units have the same scales. Else (0) numbers are multiplied, not sums.
  template <int kUnits, bool kSubtracts>
  static __device__ void multiply(Params const& p, Warp const& own, Chunk const& chunk,
                                  float (&sums)[kBlocks][4 * kOctets][4]) {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr bool kInRegisters = kUnits == 0;
    constexpr int kOfRun = kInRegisters ? 1 : kUnits;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      int const column = octet * 64 + 8 * g;
#pragma unroll(kInRegisters ? 1 : kChunkK / kUnit)
      for (int run = 0; run < kChunkK / kUnit / kOfRun; ++run) {
        float products[kBlocks][4][4] = {};
#pragma unroll
        for (int unit = run * kOfRun; unit < run * kOfRun + kOfRun; ++unit) {
          // With factors for each number: where a unit has two blocks, threads 2 and 3 have the second.
          int const group = !kInRegisters ? run : p.groups * kUnit > kChunkK ? 2 * unit + t / 2 : unit / p.units;
          Codes const codes(chunk, unit, octet);
          uint32_t a[kBlocks][4];
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) pair_a(a[block], chunk.a[block][unit][lane]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t b[4][2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              uint32_t const zero =
                  kSubtracts ? own.others[group][column + 2 * j + c] : Decoder::zero_of(0, p.blocks.flip);
              uint32_t factor = 0, added = 0;
              if constexpr (kInRegisters) {
                factor = own.factors[group][column + 2 * j + c];
                if (p.blocks.adds) added = own.others[group][column + 2 * j + c];
              }
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                b[i][c] = Decoder::pair(codes.halves(2 * j + c, i), zero, p.blocks.flip);
                if constexpr (kInRegisters)
                  b[i][c] = bits_of(__hfma2(as_pair<T>(b[i][c]), as_pair<T>(factor), as_pair<T>(added)));
              }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              uint32_t const w[4] = {b[2 * half][0], b[2 * half][1], b[2 * half + 1][0], b[2 * half + 1][1]};
#pragma unroll
              for (int block = 0; block < kBlocks; ++block)
                skinny::multiply_add<T, Math::kNative, D>(products[block][j], w, a[block][2 * half],
                                                          a[block][2 * half + 1]);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float first = 1, second = 1;
          if constexpr (!kInRegisters) {
            first = __uint_as_float(own.factors[run][column + 2 * j]);
            second = __uint_as_float(own.factors[run][column + 2 * j + 1]);
          }
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            auto& to = sums[block][4 * octet + j];
            auto const& from = products[block][j];
            to[0] += first * from[0], to[1] += first * from[1];
            to[2] += second * from[2], to[3] += second * from[3];
          }
        }
      }
    }
  }

  static __device__ void multiply_by_kind(Params const& p, Warp const& own, Chunk const& chunk,
                                          float (&sums)[kBlocks][4 * kOctets][4]) {
    if (p.in_registers) return multiply<0, false>(p, own, chunk, sums);
    bool const subtracts = kHasZeros && p.blocks.other.data != nullptr;
    auto const by_units = [&](auto units) {
      constexpr int kUnits = decltype(units)::value;
      if constexpr (kUnits * kUnit <= kChunkK) {
        if (p.units != kUnits) return;
        if (kHasZeros && subtracts) {
          multiply<kUnits, kHasZeros>(p, own, chunk, sums);
        } else {
          multiply<kUnits, false>(p, own, chunk, sums);
        }
      }
    };
    by_units(std::integral_constant<int, 1>());
    by_units(std::integral_constant<int, 2>());
    by_units(std::integral_constant<int, 4>());
  }
};

template <class T, class D, Type kType, Major kMajorB, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks == 1 ? 3 : 2) void scaled_gemm(__grid_constant__ Params<T, D> const p) {
  extern __shared__ __align__(16) char storage[];
  using Gemm = scaled::Gemm<T, D, kType, kMajorB, kBlocks>;
  constexpr int kColumns = Gemm::kColumns, kChunkK = Gemm::kChunkK;
  auto& shared = *reinterpret_cast<typename Gemm::Shared*>(storage);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  // The CTA's tile, and its run of K: a split, which is its rank in the cluster, or a slice.
  int32_t const tile = p.splits > 1 ? quotient(blockIdx.x, p.splits) : blockIdx.x, rank = blockIdx.x - tile * p.splits;
  TileOrder::Coordinate const at = p.order.coordinate(tile);
  int32_t index = at.batch, run = rank;
  if constexpr (std::is_same_v<D, float>) {
    int32_t const slice = p.by_batch.divide(index);
    index -= slice * p.batch;
    run += slice;  // runs are either splits or slices
  }
  BatchIndex const batch(p, index);
  int32_t const begin = p.runs.begin(run) * kTileK + warp * kChunkK, end = min(p.runs.begin(run + 1) * kTileK, p.k);
  int32_t const m0 = at.m * kRows * kBlocks, n0 = at.n * kColumns;
#ifdef JAX_STREAMK_RECORD
  if (threadIdx.x == 0) record_work(at.m, at.n, index, p.runs.begin(run), (end + kTileK - 1) / kTileK);
#endif

  auto& own = shared.warps[warp];
  typename Gemm::Loader loader(p, batch, m0, n0, begin, end);
  wait_for_primary();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) loader.next(own.queue[stage]);
  typename Gemm::BlocksOfChunk blocks(p, index, n0, end);
  float sums[kBlocks][4 * Gemm::kOctets][4] = {};
  // One round more than there are chunks: the first one only loads what belongs to blocks.
  int stage = 0;
  for (int32_t k = begin - Gemm::kStep; k < end; k += Gemm::kStep) {
    bool const loads_only = k < begin;
    if (!loads_only) skinny::wait_for_copies<kStages - 2>();
    __syncwarp();  // all lanes' copies and blocks have arrived, and all lanes have read the previous chunk
    blocks.load(k + Gemm::kStep);
    if (!loads_only) {
      auto const& chunk = own.queue[stage];
      loader.next(own.queue[stage == 0 ? kStages - 1 : stage - 1]);
      stage = stage == kStages - 1 ? 0 : stage + 1;
      Gemm::multiply_by_kind(p, own, chunk, sums);
      __syncwarp();  // all lanes have read the blocks
    }
    blocks.store(own);
  }

  // The sum over the warps along K.
  skinny::wait_for_copies<0>();
  __syncwarp();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4 * Gemm::kOctets; ++j)
        *reinterpret_cast<float2*>(&own.sums[block * kRows + 2 * t + i][j / 4 * 64 + 8 * g + j % 4 * 2]) = {
            sums[block][j][i], sums[block][j][i + 2]};
  __syncthreads();
  constexpr int kHalves = kColumns / 64, kPairs = kRows * kBlocks / kWarps * kHalves;
  auto const row_of = [&](int pair) { return warp + pair / kHalves * kWarps; };
  auto const column_of = [&](int pair) { return pair % kHalves * 64 + 2 * lane; };
  float2 total[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    total[i] = {0, 0};
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      auto const part = *reinterpret_cast<float2 const*>(&shared.warps[from].sums[row_of(i)][column_of(i)]);
      total[i].x += part.x, total[i].y += part.y;
    }
  }

  // The sum over the splits, in the first CTA of the cluster. The others stay until it has read their shared memory.
  if (p.splits > 1) {
    auto* const totals = &own.totals[0][0] + lane;
    if (rank > 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) totals[i * 32] = total[i];
    }
    skinny::cluster_arrive();
    skinny::cluster_wait();
    if (rank > 0) {
      skinny::cluster_arrive();
      skinny::cluster_wait();
      return;
    }
    for (int peer = 1; peer < p.splits; ++peer) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float2 const part = skinny::load_of(peer, totals + i * 32);
        total[i].x += part.x, total[i].y += part.y;
      }
    }
    skinny::cluster_arrive();
  }

  let_dependents_start();
  BatchIndex const stored = std::is_same_v<D, float> ? BatchIndex(p, at.batch) : batch;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    int32_t const row = m0 + row_of(i), column = n0 + column_of(i);
    float x[2] = {total[i].x, total[i].y};
    if (row < p.m && column < p.n) skinny::store<T, D>(p, stored, row, column, x);
  }
  if (p.splits > 1) skinny::cluster_wait();
}

// Codes of kTypeB are read as those of kCodes.
template <Type kTypeA, Type kTypeB, Type kCodes, Type kTypeD, Major kMajorB, int kBlocks>
class ScaledKernel final : public CudaKernel {
  using T = typename skinny::ElementOf<kTypeA>::type;
  using D = typename skinny::ElementOf<kTypeD>::type;
  using Gemm = scaled::Gemm<T, D, kCodes, kMajorB, kBlocks>;
  template <Type kScale>
  using Streamed = scaled::Streamed<T, D, kCodes, kScale, kBlocks>;
  // The other scales that streamed_gemm has, besides those of A's type.
  static constexpr Type kOtherScale = Gemm::kHasZeros ? Type::kF32 : Type::kE8M0;
  static constexpr bool kStreams = kMajorB == Major::kRow;
  static constexpr int64_t kSharedMemory = std::max(
      sizeof(typename Gemm::Shared),
      kStreams ? std::max(sizeof(typename Streamed<kTypeA>::Shared), sizeof(typename Streamed<kOtherScale>::Shared))
               : 0);
  static constexpr int kTileM = kRows * kBlocks;

 public:
  ScaledKernel() : CudaKernel(describe()) {}

 protected:
  Status launch(Launch const& launch, LaunchPolicy const& policy, Device const& device, Buffers const& buffers,
                cudaStream_t stream) const override {
    GemmProblem const& p = launch.problem;
    Decomposition const work = decomposition(launch.as_batch(), launch.schedule, device);
    TileOrder const order = {static_cast<int32_t>((p.m + kTileM - 1) / kTileM),
                             static_cast<int32_t>((p.n + Gemm::kColumns - 1) / Gemm::kColumns), policy.raster,
                             policy.swizzle};
    Blocks const blocks = blocks_of(p, buffers, Gemm::Decoder::flip_of(kTypeB == kCodes));
    bool const in_registers = rounds_numbers(p.b.scales, p.k);
    auto const run = [&](auto kernel, auto const& params, int64_t shared_memory) {
      return skinny::launch_in_clusters(kernel, params, work, shared_memory, launch.overlap.any, stream, info.name);
    };

    if constexpr (kStreams) {
      auto const streams = [&](auto scale) {
        auto const kernel = kStreamed<scale()>;
        constexpr int64_t kShared = sizeof(typename Streamed<scale()>::Shared);
        if (Status status = prepare(reinterpret_cast<void const*>(kernel), kShared, device, info.name); !status.ok())
          return status;
        StreamedParams<T, D> params;
        skinny::fill<false>(params, launch, work, buffers);
        params.codes = static_cast<char const*>(buffers.b);
        params.order = order;
        params.blocks = blocks;
        params.early = launch.overlap.has_b;
        params.in_row = order.tiles_m() * params.batch * launch.slices.count == 1;
        return run(kernel, params, kShared);
      };
      if (can_stream(blocks, in_registers, p.b.scales.columns)) {
        if (blocks.scale.type == kTypeA) return streams(std::integral_constant<Type, kTypeA>());
        if (blocks.scale.type == kOtherScale) return streams(std::integral_constant<Type, kOtherScale>());
      }
    }

    Params<T, D> params;
    skinny::fill<false>(params, launch, work, buffers);
    params.codes = buffers.b;
    params.order = order;
    params.blocks = blocks;
    params.in_registers = in_registers;
    params.groups = std::max(1, Gemm::kChunkK / params.blocks.block_k);
    params.units = std::max(1, Gemm::kChunkK / kUnit / params.groups);
    return run(kMultiply, params, sizeof(typename Gemm::Shared));
  }

  void const* entry_point() const override { return reinterpret_cast<void const*>(kMultiply); }

 private:
  static constexpr auto kMultiply = &scaled_gemm<T, D, kCodes, kMajorB, kBlocks>;
  template <Type kScale>
  static constexpr auto kStreamed = &streamed_gemm<T, D, kCodes, kScale, kBlocks>;

  static KernelInfo describe() {
    KernelInfo info;
    info.a.major = Major::kRow;
    info.b.major = kMajorB;
    info.name = std::string("scaled_") + name_of(kTypeA) + "_" + name_of(kTypeB) + "_" + name_of(kTypeD) + "_r" +
                name_of(kMajorB)[0] + "_" + std::to_string(Gemm::kColumns) + "x" + std::to_string(kTileM) + "x" +
                std::to_string(kTileK);
    info.family = Family::kSkinny;
    info.a.format = kTypeA;
    info.b.format = kTypeB;
    info.d.format = kTypeD;
    info.a.align = 16 / sizeof(T);
    info.b.align = Gemm::kPer16;
    info.tile_m = Gemm::kColumns;
    info.tile_n = kTileM;
    info.tile_k = kTileK;
    info.stages = kStages;
    info.warp_schedule = WarpSchedule::kStreaming;
    info.swap_ab = true;                                                  // mma.sync's first operand is B^T
    if (kHopper) info.split_k_reductions.push_back(Reduction::kOrdered);  // among the CTAs of a cluster
    if (kTypeD == Type::kF32) info.split_k_reductions.push_back(Reduction::kSeparate);
    info.threads = kThreads;
    info.shared_memory = kSharedMemory;
    info.promotion_k = skinny::kPromotion<T, Math::kNative, D>;
    info.scaled = true;
    return info;
  }
};

// Registers the kernels of one row of table.txt: D in 16 bits and in f32, and for signed integers unsigned ones, too.
template <Type kTypeA, Type kTypeB, Major kMajorB, int kTileM>
bool add_row() {
  auto const add = [](auto type_d) {
    auto const add_one = [&](auto type_b) {
      constexpr int kBlocks = kTileM / kRows;
      Registration(std::make_unique<ScaledKernel<kTypeA, type_b(), kTypeB, type_d(), kMajorB, kBlocks>>());
    };
    add_one(std::integral_constant<Type, kTypeB>());
    if constexpr (kTypeB == Type::kS4) add_one(std::integral_constant<Type, Type::kU4>());
    if constexpr (kTypeB == Type::kS8) add_one(std::integral_constant<Type, Type::kU8>());
  };
  add(std::integral_constant<Type, kTypeA>());
  add(std::integral_constant<Type, Type::kF32>());
  return true;
}

// The words of table.txt.
namespace words {
inline constexpr Type bf16 = Type::kBF16, f16 = Type::kF16, s4 = Type::kS4, s8 = Type::kS8, e4m3 = Type::kE4M3,
                      e5m2 = Type::kE5M2, e2m1 = Type::kE2M1;
inline constexpr Major row = Major::kRow, column = Major::kColumn;
}  // namespace words

}  // namespace jax_streamk::scaled

#define JAX_STREAMK_SCALED_KERNEL(type_a, type_b, major_b, rows)                          \
  namespace jax_streamk::scaled::words {                                                  \
  static bool const JAX_STREAMK_ROW(__LINE__) = add_row<type_a, type_b, major_b, rows>(); \
  }
