// Bias and residual in registers. Both are loaded straight from global memory: as CUTLASS's C operand they would take
// shared memory from the main loop. The bias stays in registers while a tile is multiplied; the residual is loaded
// afterwards, and an idle warp prefetches it to L2 meanwhile.
//
// With g = lane / 4 and t = lane % 4, as in accumulators.h.
#pragma once

#include <cstring>

#include "cute/arch/copy_sm75.hpp"
#include "cute/numeric/math.hpp"
#include "cutlass/array.h"
#include "cutlass_kernels/epilogue/epilogue.cuh"

namespace jax_streamk::sm90 {

// The number of accumulators that get their residual in one turn, with all loads of the turn in flight at once. Large
// tiles leave few registers for it, and three warpgroups (160 per thread) fewer than two (240). Turns are unrolled,
// since a loop would have to move accumulators.
constexpr int accumulators_per_turn(int accumulators, int element_bytes, bool swap, bool three_warpgroups) {
  if (accumulators >= 160) return 8;
  if (accumulators > (three_warpgroups ? 72 : 128)) return 16;
  // Without swap_ab the bias takes more registers.
  bool const few_registers =
      three_warpgroups || accumulators >= (swap ? 128 : 112) || accumulators * element_bytes > 256;
  return cute::min(accumulators, (few_registers ? 64 : 128) / element_bytes);
}

// The bias of a thread's accumulators, packed as in memory. Accumulators of a column of D share one: both rows of a
// wgmma without swap_ab, all its columns with it.
template <bool kSwap, class Element, class Accumulators, bool kThree>
struct Biases {
  static constexpr int kValues = Accumulators::kValues, kValuesPerMma = Accumulators::kValuesPerMma;
  static constexpr int kTurn = accumulators_per_turn(kValues, sizeof(Element), kSwap, kThree);
  static constexpr int kVector = kSwap ? 1 : 2;  // neighbours in a row of D
  using Vector = cutlass::AlignedArray<Element, kVector>;
  static constexpr int kVectorsPerTile = kSwap ? kValues / kValuesPerMma * 2 : kValues / 4;
  // Early: all are loaded before the tile is multiplied. If that would spill, each turn loads its own.
  static constexpr bool kEarly = kVectorsPerTile * sizeof(Vector) <= 128;
  static constexpr int kVectors = kEarly ? kVectorsPerTile : kTurn / 4;

  Vector values[kVectors];

  CUTLASS_DEVICE Biases() {
#pragma unroll
    for (Vector& value : values) value.clear();
  }

  // Starts at accumulator `begin`.
  template <class Places>
  CUTLASS_DEVICE void load(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                           Places const& places, int begin) {
    if (params.bias == nullptr) return;
    int32_t const first = kSwap ? places.m : places.n, extent = kSwap ? m : n;
    Element const* const bias = params.bias + batch * params.batch_stride_bias + first;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      int const i = kSwap ? j / 2 * kValuesPerMma + j % 2 * 2 : begin + j * 4;
      if (i >= kValues) break;
      int32_t const along = kSwap ? Places::along_m(i) : Places::along_n(i);
      if (first + along < extent) values[j] = load_vector<Vector>(bias + along);
    }
  }

  // The bias of accumulator i.
  CUTLASS_DEVICE float of(int i) const {
    return static_cast<float>(
        values[kSwap ? i / kValuesPerMma * 2 + i / 2 % 2 : (kEarly ? i : i % kTurn) / 4][i % kVector]);
  }
};

// The residual of a turn's accumulators. A warp's load touches eight rows, in as many cache lines. To load more of
// each line at once, threads load 16-bit residuals in the order of memory, and then exchange them:
//   without swap_ab, 16 bytes each of 32 columns: a 4 x 4 transpose of words among four threads;
//   with swap_ab, 4 bytes each of an 8 x 8 block: movmatrix.
// f32 residuals, and turns too short for 16 bytes, are loaded by the threads that need them.
template <bool kSwap, class Element, class Accumulators, int kTurn>
struct Residuals {
  static constexpr int kValues = Accumulators::kValues;
  static constexpr bool kHalf = sizeof(Element) == 2;
  static constexpr int kPerWord = kHalf ? 2 : 1;  // neighbouring accumulators along n
  static constexpr bool kTransposes4x4 = kHalf && !kSwap && kTurn % 16 == 0 && Accumulators::kValuesPerMma % 16 == 0;
  static constexpr int kWordsPerLoad = kTransposes4x4 ? 4 : kHalf || kSwap ? 1 : 2;
  using Words = cutlass::AlignedArray<uint32_t, kWordsPerLoad>;

  uint32_t words[kTurn / kPerWord];

  // The word of accumulator i of a turn. Before the exchange, the words of one load are consecutive.
  static constexpr int index(int i) { return kTransposes4x4 ? i / 16 * 8 + i / 2 % 2 * 4 + i / 4 % 4 : i / kPerWord; }

  // Starts at accumulator `begin`.
  template <class Places>
  CUTLASS_DEVICE void load(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                           Places const& places, int begin) {
    int32_t first_m = places.m, first_n = places.n;
    int32_t const g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (kTransposes4x4) first_n += 6 * t;                            // thread t starts at column 8t, not 2t
    if (kHalf && kSwap) first_m += 2 * t - g, first_n += g - 2 * t;  // g and 2t trade places
    Element const* base = params.residual + batch * params.batch_stride_d;
    base += kSwap ? first_n * params.ldd + first_m : first_m * params.ldd + first_n;
    asm("" : "+l"(base));  // opaque, or every load would compute it again
#pragma unroll
    for (int i = 0; i < kTurn && begin + i < kValues; i += kHalf ? 2 : kWordsPerLoad) {
      if (kTransposes4x4 && i % 16 >= 4) continue;
      int32_t const at_m = Places::along_m(begin + i), at_n = Places::along_n(begin + i);
      if (first_m + at_m >= m || first_n + at_n >= n) continue;
      auto const loaded = load_vector<Words>(base + (kSwap ? at_n * params.ldd + at_m : at_m * params.ldd + at_n));
#pragma unroll
      for (int j = 0; j < kWordsPerLoad; ++j) words[index(i) + j] = loaded[j];
    }
  }

  // Called by all threads of a warp, between load() and of().
  CUTLASS_DEVICE void exchange(int begin) {
    if constexpr (!kHalf) return;
#pragma unroll
    for (int word = 0; word < kTurn / 2 && begin + 2 * word < kValues; word += kWordsPerLoad) {
      if constexpr (kSwap) {
        cute::SM75_U32x1_MOVM_T::copy(words[word], words[word]);
      } else if constexpr (kTransposes4x4) {
        transpose_4x4(word);
      }
    }
  }

  // The residual of accumulator i, after exchange().
  CUTLASS_DEVICE float of(int i) const {
    cutlass::AlignedArray<Element, kPerWord> word;
    std::memcpy(&word, &words[index(i % kTurn)], sizeof(word));
    return static_cast<float>(word[i % kPerWord]);
  }

 private:
  // Row t of the matrix is words first ... first + 3 of thread t: swaps off-diagonal elements of 2 x 2 blocks, then the
  // blocks.
  CUTLASS_DEVICE void transpose_4x4(int first) {
#pragma unroll
    for (int apart = 1; apart <= 2; apart *= 2) {
      bool const second = threadIdx.x & apart;
#pragma unroll
      for (int j = first; j < first + 4; ++j) {
        if (j & apart) continue;
        uint32_t const got = __shfl_xor_sync(~0u, second ? words[j] : words[j + apart], apart);
        words[j] = second ? got : words[j];
        words[j + apart] = second ? words[j + apart] : got;
      }
    }
  }
};

// Called by one warp: prefetches the residual of a tile of D that begins at (row, column) and has rows x columns in D.
template <class Element>
CUTLASS_DEVICE void prefetch_residual(EpilogueParams<float, Element> const& params, int64_t batch, int32_t row,
                                      int32_t column, int32_t rows, int32_t columns, int lane) {
  constexpr int kLine = 128 / sizeof(Element);
  Element const* const residual = params.residual + batch * params.batch_stride_d + column;
  for (int32_t r = lane; r < rows; r += 32)
    for (int32_t i = 0; i < columns; i += kLine) prefetch_to_l2(residual + (row + r) * params.ldd + i);
}

}  // namespace jax_streamk::sm90
