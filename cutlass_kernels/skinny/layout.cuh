// Which thread holds what: the columns of warps, the chunks of K in a warp's queue, and the vectors of threads.
//
// A lane is g = lane / 4 and t = lane % 4, as in mma.sync's fragments. V is the number of elements in 16 bytes. A chunk
// is 4 V of K; thread (g, t) multiplies
//   of A: row g of each block of 8 rows, at k = V t ... V t + V - 1: one vector, or elements if A is column-major;
//   of B: eight columns at the same k, eight vectors:
//     column-major: columns 8g ... 8g + 7, a vector along K each;
//     row-major: a vector along n for each k: columns 8g ... 8g + 7 for 16 bits; V g ... V g + V - 1, and as many each
//     8 V further on, for f32 (two vectors per k) and f64 (four), so that neighbours load whole 32-byte sectors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/skinny/family.h"
#include "cutlass_kernels/skinny/instructions.cuh"

namespace jax_streamk::skinny {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kColumns = 64;  // of a warp, or of half of a wide one
inline constexpr int kTileK = 128;   // unit of splits
inline constexpr int kRows = 8;      // of A in one mma.sync: a block

// kShifted = 0: vectors of B are aligned. kShifted = 1, 2: rows of a row-major B are at any address, and a warp has 64
// or 128 columns (wide; half the K per chunk).
template <int kShifted>
inline constexpr int kWide = kShifted == 2 ? 2 : 1;
template <int kShifted>
inline constexpr int kThreadK = 8 / kWide<kShifted>;  // rows of a shifted chunk that a thread multiplies

// Chunks in a warp's queue, and CTAs per SM that ptxas must leave registers for (0: any). Up to 16 rows, three shifted
// CTAs fit a Hopper SM, so that one loads while others start or end; with a fourth chunk only two would fit.
template <int kShifted>
inline constexpr int kStages = kShifted ? 3 : 4;
template <int kBlocks, int kShifted>
inline constexpr int kCtasPerSm = kShifted && kBlocks <= 2 ? 3 : 0;

template <class T>
inline constexpr int kVector = 16 / sizeof(T);
template <class T, int kShifted>
inline constexpr int kChunk = 4 * kVector<T> / kWide<kShifted>;  // along K

// The number of neighbouring columns that a thread has.
template <class T, Major kMajorB>
inline constexpr int kNeighbours = kMajorB == Major::kRow ? kVector<T> : 8;

// A chunk in shared memory, by [...][lane]. Shifted: the aligned vectors that the rows of B touch, eight per 64 columns
// and a last one; 16 bytes of A per lane, or 8 if wide.
template <int kBlocks, int kShifted>
struct Chunk {
  using Words = std::conditional_t<kShifted == 2, uint2, uint4>;
  uint4 b[kThreadK<kShifted>][kShifted][32], last[4 * kThreadK<kShifted>];
  Words a[kBlocks][32];
};

// Aligned: each lane's eight vectors of B, and one of A per block.
template <int kBlocks>
struct Chunk<kBlocks, 0> {
  using Words = uint4;
  uint4 b[8][32];
  Words a[kBlocks][32];
};

// With a column-major A, by [word of a row of A^T][k]: the aligned 32-bit words that its rows touch, which may start at
// any element. The padding avoids bank conflicts.
template <class T, int kBlocks>
struct ChunkByWords {
  using Words = uint4;
  static constexpr int kWords = kRows * kBlocks * sizeof(T) / 4 + (sizeof(T) == 2);
  uint4 b[8][32];
  uint32_t a[kWords][kChunk<T, 0> + 1];
};

template <class T, int kBlocks, int kShifted, Major kMajorA>
using ChunkOf = std::conditional_t<kMajorA == Major::kRow, Chunk<kBlocks, kShifted>, ChunkByWords<T, kBlocks>>;

// The slot of lane (g, t)'s vector of a row-major B. Eight lanes copy the 128 bytes of a row, one request to L2; a
// quarter-warp reads the slots of two g and four t. Neither has bank conflicts.
__device__ inline int slot(int g, int t) { return 8 * t + (g ^ (2 * t)); }

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, double>, double2, float2>;  // sums of neighbours in D

// Shared memory of a CTA with kWarpsAlongK warps along K and the rest along n. Once a warp's queue is empty, its memory
// holds the warp's sums (padded against bank conflicts), and the CTA's totals for the cluster.
template <class T, int kBlocks, int kWarpsAlongK, int kShifted, Major kMajorA>
struct Shared {
  union {
    ChunkOf<T, kBlocks, kShifted, kMajorA> queue[kStages<kShifted>];
    struct {
      Accumulator<T> sums[kRows * kBlocks][kWide<kShifted> * kColumns + 4];
      Pair<T> totals[kRows * kBlocks * kWide<kShifted> / kWarpsAlongK][kColumns / 2];  // for this warp's share of rows
    };
  } warps[kWarps];
};

}  // namespace jax_streamk::skinny
