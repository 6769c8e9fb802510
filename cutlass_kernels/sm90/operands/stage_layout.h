// How operands get into the stages of shared memory, and who multiplies them there.
//
// A way to load an operand is a type of its own: `TileA` and `TileB` (tile.h) for a tile by TMA, `PairA` for half of
// its rows from each of two matrices, `JoinedA` for rows of the one of several matrices that has them, `RunA` and
// `RunB` for a run of K, `GatheredB` for rows that lie anywhere, `TransposedB` and `TransposedBytesB` for a B that
// threads transpose. Each has
//
//   Params       what it adds to the kernel's parameters
//   set_up()     fills these in, on the host
//   prefetch()   prefetches its tensor maps
//   loader()     for a tile, a function that loads a k-tile into a stage
//
// and TileMainloop (mainloop.h) is composed of one for A and one for B. To add one: a file here, a line in
// kernel.cuh that chooses it, a word of table.txt.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "cutlass_kernels/launch/cuda_kernel.h"
#include "cutlass_kernels/sm90/extents.h"
#include "cutlass_kernels/sm90/stages.h"

namespace jax_streamk::sm90 {

// A tile of an operand in a stage: kExtent along m or n, kTileK along k, kAlongK if its rows in memory lie along k. In
// shared memory it is boxes, each as TMA writes them: rows of kRowBytes under the swizzle of that width, of
// kRowElements along the rows in memory and all of the tile the other way.
template <class Element_, int kExtent, int kTileK, bool kAlongK_>
struct OperandTile {
  using Element = Element_;
  static constexpr int kSize = sizeof(Element);
  static constexpr bool kAlongK = kAlongK_;
  static constexpr int kAlongRows = kAlongK ? kTileK : kExtent, kRows = kAlongK ? kExtent : kTileK;
  static constexpr int kRowBytes = kAlongRows * kSize % 128 == 0  ? 128
                                   : kAlongRows * kSize % 64 == 0 ? 64
                                                                  : 32,
                       kRowElements = kRowBytes / kSize;
  static constexpr int kBoxes = kAlongRows / kRowElements, kBoxElements = kRows * kRowElements,
                       kElements = kBoxes * kBoxElements, kBytes = kElements * kSize;
  static_assert(kAlongRows % kRowElements == 0 && kBytes % 1024 == 0);

  // What wgmma needs to know of 64 rows of A, or all columns of B, and 32 bytes of k (PTX: matrix descriptors). The
  // low word has the address, in units of 16 bytes, and how far boxes are apart; the high one how far 8 rows are, and
  // the swizzle. In a cluster an address also tells the CTA, in bits that do not belong here.
  static CUTLASS_DEVICE uint32_t low_word(uint32_t address) {
    return (address & 0x3ffff) >> 4 | (kAlongK ? 1u : kBoxElements * kSize / 16u) << 16;
  }
  static constexpr uint32_t kHighWord = 8 * kRowBytes / 16 | (kRowBytes == 128 ? 1u : kRowBytes == 64 ? 2u : 3u) << 30;
  static CUTLASS_DEVICE uint64_t descriptor(uint32_t low_word, int offset) {
    uint64_t result;
    asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(low_word + offset), "n"(kHighWord));
    return result;
  }

  // How far, in units of 16 bytes, the step-th 32 bytes of k are from the first, and the block-th 64 rows.
  static constexpr int step_offset(int step) {
    return (kAlongK ? step * 32 / kRowBytes * kBoxElements * kSize + step * 32 % kRowBytes
                    : step * (32 / kSize) * kRowBytes) /
           16;
  }
  static constexpr int block_offset(int block) {
    return (kAlongK ? block * 64 * kRowBytes : block * 64 / kRowElements * kBoxElements * kSize) / 16;
  }
};

// What all ways to load know of a stage. An N-major B has room for whole rows of 128 bytes, of which only kTileN
// columns are loaded and multiplied. kNumberBits_: of a number of A where a stage also has room for numbers that are
// decoded, else 0. kTransposesB_: a stage also has room for B as threads transpose it.
template <class ElementA_, bool kAAlongK, class ElementB_, bool kBAlongK, class TileShape_, class ClusterShape,
          int kLaidOutN_, int kStages_, int kNumberBits_ = 0, bool kTransposesB_ = false>
struct StageLayout {
  using TileShape = TileShape_;
  static constexpr int kTileM = TileShape::kM, kTileN = TileShape::kN, kTileK = TileShape::kK, kLaidOutN = kLaidOutN_,
                       kClusterM = ClusterShape::kM, kClusterN = ClusterShape::kN;
  using A = OperandTile<ElementA_, kTileM, kTileK, kAAlongK>;
  using B = OperandTile<ElementB_, kLaidOutN, kTileK, kBAlongK>;
  // B as wgmma reads it.
  using ReadB = std::conditional_t<kTransposesB_, OperandTile<ElementB_, kTileN, kTileK, true>, B>;
  using ElementA = ElementA_;
  using ElementB = ElementB_;
  static constexpr int kStages = kStages_, kNumberBits = kNumberBits_;
  static constexpr bool kAIsMMajor = !kAAlongK, kBIsNMajor = !kBAlongK;
  static constexpr int kBytesA = A::kBytes,
                       kBytesB = kTileN * kTileK * sizeof(ElementB),  // that are loaded
      kBytesOfNumbers = kTileM * kTileK * kNumberBits / 8;
  struct Operands {
    alignas(1024) ElementA a[kStages * A::kElements];
    alignas(1024) ElementB b[kStages * B::kElements];
  };
  struct WithNumbers : Operands {
    alignas(1024) uint8_t numbers[kStages * kBytesOfNumbers + (kNumberBits == 0)];
  };
  struct WithTransposed : Operands {
    alignas(1024) ElementB transposed[kStages * ReadB::kElements];
  };
  using Storage =
      std::conditional_t<(kNumberBits > 0), WithNumbers, std::conditional_t<kTransposesB_, WithTransposed, Operands>>;
  static CUTLASS_DEVICE ElementB* b_of(Storage& storage) {
    if constexpr (kTransposesB_) {
      return storage.transposed;
    } else {
      return storage.b;
    }
  }
};

// A that TMA loads as wgmma reads it.
template <class Stage>
struct LoadedA {
  static constexpr bool kDecodes = false;
  static constexpr int kLoadedBytes = Stage::kBytesA;  // of a stage
};

// What the host knows of A and B of a launch.
struct MainloopArguments {
  struct Matrices {
    void const* data;
    int64_t ld, batch_stride;  // in elements
  };
  Matrices a, b;                  // the kernel's own
  int32_t m, n;                   // of the result
  int32_t k, batch;               // extents of A and B in memory, not those of a slice
  void const* up;                 // the second A of a gated or joined product
  int32_t const* indices;         // which row of B each column of the product reads, or null
  int32_t columns;                // number of indices
  void const* third;              // of a joined product, A's third matrix
  int32_t second_row, third_row;  // of a joined product's A, where these begin; 0: there is no third
  GemmProblem const& problem;
  Buffers const& buffers;
  bool is_unsigned;  // whether an A of numbers is, as A's type is not
};

// The place of a CTA in its cluster, whose CTAs are numbered along m first, and masks of those in its row, which share
// A, and in its column, which share B.
template <int kClusterM, int kClusterN>
struct ClusterPlace {
  uint32_t m, n, row = 0, column;

  CUTLASS_DEVICE ClusterPlace() {
    uint32_t const rank = kClusterM * kClusterN == 1 ? 0 : cute::block_rank_in_cluster();
    m = rank % kClusterM, n = rank / kClusterM;
    column = ((1u << kClusterM) - 1) << (n * kClusterM);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kClusterN; ++i) row |= 1u << (m + i * kClusterM);
    asm volatile("" : "+r"(row));  // opaque, or ptxas would shift it as 16 bits, in three more instructions
  }
};

}  // namespace jax_streamk::sm90
