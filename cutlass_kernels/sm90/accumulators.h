// The sums of a thread of a warpgroup, as wgmma leaves them, and their places in a tile.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace jax_streamk::sm90 {

// Of kMmas_ instructions of 64 x kN, one below the other: rows (i * kWarpgroups + warpgroup) * 64 and on are the i-th's
// of a warpgroup. With g = lane / 4 and t = lane % 4, a thread has four for each 8 columns:
//   row g: columns 2t, 2t + 1;  row g + 8: columns 2t, 2t + 1;  then the same 8 columns further on.
template <int kMmas_, int kN, class Value_ = float>
struct Accumulators {
  using Value = Value_;
  static constexpr int kMmas = kMmas_, kValuesPerMma = kN / 2, kValues = kMmas * kValuesPerMma;

  Value values[kValues];

  CUTLASS_DEVICE Value& operator()(int i) { return values[i]; }
  CUTLASS_DEVICE Value operator()(int i) const { return values[i]; }
  CUTLASS_DEVICE void clear() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = 0;
  }
};

// Where a thread's accumulators are in the kernel's own m x n result, D or D^T with swap_ab: the first one, and how far
// the i-th is from it.
template <class Accumulators, int kWarpgroups>
struct Places {
  int32_t m, n;

  // `thread`: among those that share the tile that begins at (tile_m, tile_n).
  CUTLASS_DEVICE Places(int32_t tile_m, int32_t tile_n, int thread)
      : m(tile_m + thread / 32 * 16 + thread % 32 / 4), n(tile_n + thread % 4 * 2) {}

  CUTLASS_DEVICE static constexpr int32_t along_m(int i) {
    return i / Accumulators::kValuesPerMma * (64 * kWarpgroups) + i / 2 % 2 * 8;
  }
  CUTLASS_DEVICE static constexpr int32_t along_n(int i) { return i % Accumulators::kValuesPerMma / 4 * 8 + i % 2; }
};

}  // namespace jax_streamk::sm90
