// The loads: cp.async from global memory to a warp's queue, a chunk at a time. Outside a matrix zeros are written, and
// the address, which may not even be aligned, is replaced by a valid one.
#pragma once

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/skinny/layout.cuh"

namespace jax_streamk::skinny {

template <class T, class D>
struct Params {
  T const* a;
  T const* b;
  D* d;
  int64_t lda, ldb, batch_stride_a, batch_stride_b, inner_stride_a, inner_stride_b, inner_stride_d;
  int32_t m, n, k, splits;
  int32_t batch;
  Divisor by_batch;  // the grid's batch index is slice * batch + batch index
  int32_t inner_batch;
  Divisor by_inner_batch;
  EvenRuns runs;  // of k-tiles, one per split or slice
  TileOrder order;
  bool evict_first_b;
  // Of D^T the columns are ldd apart and the rows 1 (epilogue.ldd), and the bias is along the rows.
  int64_t column_stride;                // elements from a column of D to the next
  int32_t bias_of_row, bias_of_column;  // 1 along the bias, else 0
  bool pairs;                           // whether two neighbours in D, bias and residual are one aligned access
  EpilogueParams<Accumulator<T>, D> epilogue;
};

template <class T, class D>
struct GatedParams : Params<T, D> {
  T const* up;  // the second B
  D const* up_bias;
};
template <class T, class D, bool kGated>
using ParamsOf = std::conditional_t<kGated, GatedParams<T, D>, Params<T, D>>;

// A batch index, and both of a nested one.
struct BatchIndex {
  int32_t index, outer, inner;

  template <class T, class D>
  __device__ BatchIndex(Params<T, D> const& p, int32_t index)
      : index(index), outer(p.by_inner_batch.divide(index)), inner(index - outer * p.inner_batch) {}
  __device__ int64_t offset(int64_t stride, int64_t inner_stride) const {
    return outer * stride + inner * inner_stride;
  }
};

template <class T>
__device__ inline uint32_t offset_in_vector(T const* p) {
  return reinterpret_cast<uintptr_t>(p) % 16;
}

// A column-major A whose chunks have few elements per k: a lane copies words of one k, and reads elements of V.
template <class T, int kBlocks>
class WordsOfA {
  using Chunk = ChunkByWords<T, kBlocks>;
  static constexpr int kRowsOfK = kChunk<T, 0>, kLanesPerK = 32 / kRowsOfK;

 public:
  // `from` is A at the tile's first row and at this warp's k; `left` elements of k are to be loaded.
  __device__ WordsOfA(T const* from, int64_t ld, int32_t rows, int32_t left)
      : at_(from + lane_k() * ld), ld_(ld), row_bytes_(min(rows, kRows * kBlocks) * static_cast<int>(sizeof(T))) {
    left_ = left - lane_k();
    words_ = (row_bytes_ + 3) / 4 + (sizeof(T) == 2);
    if constexpr (sizeof(T) == 2) {
      // Chunks begin at even k, so which half of a word an element is in depends on the parity of its k only.
      uint32_t const first = offset_in_word(from), second = (first + static_cast<uint32_t>(ld) * 2) % 4;
      halves_ = first | second << 8;
    }
  }

  // `valid` is an address to replace those outside A.
  __device__ void copy(Chunk& to, void const* valid) const {
    int const offset = static_cast<int>(offset_in_word(at_)), k = lane_k();
    char const* const words = reinterpret_cast<char const*>(at_) - offset;
#pragma unroll
    for (int i = 0; i < (Chunk::kWords + kLanesPerK - 1) / kLanesPerK; ++i) {
      int const word = i * kLanesPerK + static_cast<int>(threadIdx.x % 32) / kRowsOfK;
      int const bytes = left_ > 0 ? min(max(offset + row_bytes_ - 4 * word, 0), 4) : 0;
      if (word < words_) copy_async(&to.a[word][k], bytes > 0 ? words + 4 * word : valid, bytes);
    }
  }
  __device__ void advance(int step) {
    at_ += step * ld_;
    left_ -= step;
  }

  // The vector along K that this thread multiplies.
  __device__ uint4 vector(Chunk const& chunk, int block) const {
    int const lane = threadIdx.x % 32, row = block * kRows + lane / 4, k = kVector<T> * (lane % 4);
    uint32_t w[4];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[i] = half(chunk, row, k + 2 * i, halves_) | half(chunk, row, k + 2 * i + 1, halves_ >> 8) << 16;
    } else {
      constexpr int kPer = sizeof(T) / 4;  // words per element
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = chunk.a[kPer * row + i % kPer][k + i / kPer];
    }
    return {w[0], w[1], w[2], w[3]};
  }

 private:
  static __device__ int lane_k() { return threadIdx.x % kRowsOfK; }
  static __device__ uint32_t offset_in_word(T const* p) { return reinterpret_cast<uintptr_t>(p) % 4; }
  static __device__ uint32_t half(Chunk const& chunk, int row, int k, uint32_t offset) {
    int const at = 2 * row + static_cast<int>(offset & 2);
    return *reinterpret_cast<uint16_t const*>(reinterpret_cast<char const*>(&chunk.a[at / 4][k]) + at % 4);
  }

  T const* at_;
  int64_t ld_;
  int32_t row_bytes_, left_;
  int32_t words_;        // that a row may touch
  uint32_t halves_ = 0;  // offsets in a word of even k's rows and, in the second byte, of odd ones
};
struct NoWords {
  template <class... Parts>
  __device__ NoWords(Parts...) {}
};

// Loads aligned vectors. kGated: the second half of a warp's columns are the same columns of the second B.
template <class T, class D, Major kMajorA, Major kMajorB, int kBlocks, int kWarpsAlongK, bool kGated>
class Loader {
  static constexpr bool kByWords = kMajorA == Major::kColumn;
  static_assert(!kGated || sizeof(T) == 2);

 public:
  // Starts at the tile at (m0, n0) of D, and loads from k to `end`.
  __device__ Loader(ParamsOf<T, D, kGated> const& p, BatchIndex const& batch, int32_t m0, int32_t n0, int32_t k,
                    int32_t end)
      : p_(p),
        words_(p.a + batch.offset(p.batch_stride_a, p.inner_stride_a) + m0 + k * p.lda, p.lda, p.m - m0, end - k) {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr bool kByRows = kMajorB == Major::kRow;
    // In a row-major B a thread copies what another thread multiplies: eight neighbours copy a row.
    int const g_b = kByRows ? lane % 8 : g, t_b = kByRows ? lane / 8 : t;
    int const g_of_one = kGated ? g_b % 4 : g_b;
    int64_t const row = m0 + g, column = n0 + kNeighbours<T, kMajorB> * g_of_one;
    int64_t const k_a = k + kVector<T> * t, k_b = k + kVector<T> * t_b;
    rows_ = p.m - m0 - g;
    columns_ = p.n - n0 - kNeighbours<T, kMajorB> * g_of_one;
    left_a_ = end - k - kVector<T> * t;
    left_b_ = end - k - kVector<T> * t_b;
    slot_ = kByRows ? slot(g_b, t_b) : lane;
    a_ = p.a + batch.offset(p.batch_stride_a, p.inner_stride_a) + row * p.lda + k_a;
    T const* b = p.b;
    if constexpr (kGated) b = g_b < 4 ? p.b : p.up;
    b_ = b + batch.offset(p.batch_stride_b, p.inner_stride_b) + (kByRows ? k_b * p.ldb + column : column * p.ldb + k_b);
  }

  // This thread's vector of A.
  __device__ uint4 vector_of_a(ChunkOf<T, kBlocks, 0, kMajorA> const& chunk, int block) const {
    if constexpr (kByWords) {
      return words_.vector(chunk, block);
    } else {
      return chunk.a[block][threadIdx.x % 32];
    }
  }

  __device__ void next(ChunkOf<T, kBlocks, 0, kMajorA>& to) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr int kPerRow = 8 / kVector<T>;  // vectors per row of a row-major B
      int const row = i / kPerRow, column = i % kPerRow * 8 * kVector<T>;
      if constexpr (kMajorB == Major::kRow) {
        copy_b(to.b[i][slot_], b_ + row * p_.ldb + column, row < left_b_ && column < columns_);
      } else {
        copy_b(to.b[i][slot_], b_ + i * p_.ldb, left_b_ > 0 && i < columns_);
      }
    }
    if constexpr (kByWords) {
      words_.copy(to, p_.b);
      words_.advance(kStep);
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        bool const inside = left_a_ > 0 && block * kRows < rows_;
        copy_async(&to.a[block][lane], inside ? a_ + block * kRows * p_.lda : p_.a, inside ? 16 : 0);
      }
    }
    commit_copies();
    a_ += kStep;
    b_ += kMajorB == Major::kRow ? kStep * p_.ldb : kStep;
    left_a_ -= kStep;
    left_b_ -= kStep;
  }

 private:
  static constexpr int kStep = kChunk<T, 0> * kWarpsAlongK;  // K between two chunks of a warp

  __device__ void copy_b(uint4& to, T const* from, bool inside) const {
    if (!inside) from = kByWords ? p_.b : p_.a;
    // An explicit evict-normal policy is slower than none.
    if (p_.evict_first_b) {
      copy_async(&to, from, inside ? 16 : 0, evict_first_);
    } else {
      copy_async(&to, from, inside ? 16 : 0);
    }
  }

  Params<T, D> const& p_;
  std::conditional_t<kByWords, WordsOfA<T, kBlocks>, NoWords> words_;
  int32_t rows_, columns_;   // of A and of B, from this thread's first element on
  int32_t left_a_, left_b_;  // along K, from this thread's next element on
  int slot_;
  T const *a_, *b_;
  uint64_t const evict_first_ = evict_first();
};

// Loads the vectors that rows of B touch, at any address.
template <class T, class D, int kBlocks, int kWarpsAlongK, int kShifted>
class ShiftedLoader {
 public:
  __device__ ShiftedLoader(Params<T, D> const& p, BatchIndex const& batch, int32_t m0, int32_t n0, int32_t k,
                           int32_t end)
      : p_(p) {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    rows_ = p.m - m0 - g;
    bytes_ = min(p.n - n0, kShifted * kColumns) * static_cast<int>(sizeof(T));
    left_ = end - k;
    a_ = p.a + batch.offset(p.batch_stride_a, p.inner_stride_a) + int64_t{m0 + g} * p.lda + k + kThreadK * t;
    T const* const b = p.b + batch.offset(p.batch_stride_b, p.inner_stride_b) + int64_t{k} * p.ldb + n0;
    b_ = b + lane / kLanesPerRow * p.ldb;
    last_ = b + lane * p.ldb;
  }

  // Each lane of a row copies a vector, then one lane per row copies the last vector.
  __device__ void next(Chunk<kBlocks, kShifted>& to) {
    int const lane = threadIdx.x % 32, t = lane % 4, vector = lane % kLanesPerRow;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr int kAtOnce = 32 / kLanesPerRow;
      int const row = i * kAtOnce + lane / kLanesPerRow;
      copy_touched(&to.b[row % kThreadK][vector / 8][slot(vector % 8, row / kThreadK)], b_ + i * kAtOnce * p_.ldb,
                   vector, row < left_);
    }
    if (lane < 4 * kThreadK) copy_touched(&to.last[lane], last_, kLanesPerRow, lane < left_);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      bool const inside = kThreadK * t < left_ && block * kRows < rows_;
      copy_async(&to.a[block][lane], inside ? a_ + block * kRows * p_.lda : p_.a, inside ? sizeof(to.a[0][0]) : 0);
    }
    commit_copies();
    a_ += kStep;
    b_ += kStep * p_.ldb;
    last_ += kStep * p_.ldb;
    left_ -= kStep;
  }

 private:
  static constexpr int kStep = kChunk<T, kShifted> * kWarpsAlongK;  // K between two chunks of a warp
  static constexpr int kThreadK = skinny::kThreadK<kShifted>;
  static constexpr int kLanesPerRow = 8 * kShifted;

  // Copies the `vector`-th aligned vector that the tile's part of `row` touches. Without an eviction hint, because
  // neighbouring tiles read the line too.
  __device__ void copy_touched(uint4* to, T const* row, int vector, bool inside) const {
    int const offset = static_cast<int>(offset_in_vector(row)),
              bytes = inside ? min(max(offset + bytes_ - 16 * vector, 0), 16) : 0;
    copy_async(
        to, bytes > 0 ? reinterpret_cast<char const*>(row) - offset + 16 * vector : reinterpret_cast<char const*>(p_.a),
        bytes);
  }

  Params<T, D> const& p_;
  int32_t rows_, bytes_;  // rows of A; bytes of a row of B in the tile
  int32_t left_;          // along K
  T const *a_, *b_, *last_;
};

}  // namespace jax_streamk::skinny
