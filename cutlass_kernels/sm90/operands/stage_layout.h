// How operands get into the stages of shared memory, and who multiplies them there.
//
// A way to load an operand is a type of its own: `TileA` and `TileB` (tile.h) for a tile by TMA, `PairA` for half of
// its rows from each of two matrices, `JoinedA` for rows of the one of several matrices that has them, `RunA` and
// `RunB` for a run of K, `GatheredB` for rows that lie anywhere, `TransposedB` for a B that threads transpose. Each has
//
//   Params       what it adds to the kernel's parameters (FirstParams: before those of A)
//   set_up()     fills these in, on the host
//   prefetch()   prefetches its tensor maps
//   loader()     for a tile, a function that loads a k-tile into a stage
//
// and CollectiveMainloop (mainloop.h) is composed of one for A and one for B. To add one: a file here, a line in
// kernel.cuh that chooses it, a word of table.txt.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_kernels/sm90/stages.h"

namespace jax_streamk::sm90 {

// What all of them know of a stage. Base is CUTLASS's collective of a tile with as many or more columns than Shape's,
// because CUTLASS lacks a good layout for some widths; only Shape's columns are loaded and multiplied.
// kNumberBits_: of a number of A where a stage also has room for numbers that are decoded, else 0.
template <class Base_, class Shape_, int kNumberBits_ = 0>
struct StageLayout {
  using Base = Base_;
  using TileShape = Shape_;
  using ElementA = typename Base::InternalElementA;
  using ElementB = typename Base::InternalElementB;
  static constexpr int kStages = Base::DispatchPolicy::Stages, kNumberBits = kNumberBits_;
  static constexpr int kTileM = cute::size<0>(TileShape{}), kTileN = cute::size<1>(TileShape{}),
                       kTileK = cute::size<2>(TileShape{}), kLaidOutN = cute::size<1>(typename Base::TileShape{});
  static constexpr int kClusterM = cute::size<0>(typename Base::DispatchPolicy::ClusterShape{});
  static constexpr int kClusterN = cute::size<1>(typename Base::DispatchPolicy::ClusterShape{});
  static constexpr bool kAIsMMajor = cute::is_static<cute::tuple_element_t<0, typename Base::StrideA>>::value,
                        kBIsNMajor = cute::is_static<cute::tuple_element_t<0, typename Base::StrideB>>::value;
  static constexpr int kRowBytes = 128, kRowElements = kRowBytes / sizeof(ElementB);  // rows in shared memory
  static constexpr int kBytesA = kTileM * kTileK * sizeof(ElementA), kBytesB = kTileN * kTileK * sizeof(ElementB),
                       kBytesOfNumbers = kTileM * kTileK * kNumberBits / 8;  // of a stage
  struct WithNumbers : Base::TensorStorage {
    alignas(1024) uint8_t numbers[kStages * kBytesOfNumbers + (kNumberBits == 0)];
  };
  using Storage = std::conditional_t<(kNumberBits > 0), WithNumbers, typename Base::TensorStorage>;
};

// A that TMA loads as wgmma reads it.
template <class Stage>
struct LoadedA {
  static constexpr bool kDecodes = false;
  static constexpr int kLoadedBytes = Stage::kBytesA;  // of a stage
};

// What the host knows of A and B of a launch, besides what CUTLASS asks for.
template <class Base>
struct MainloopArguments : Base::Arguments {
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
