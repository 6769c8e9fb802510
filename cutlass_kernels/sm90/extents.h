// Extents of tiles and results, and places of tiles.
#pragma once

#include <cstdint>

namespace jax_streamk::sm90 {

// Of a tile, in elements, or a cluster, in CTAs.
template <int kM_, int kN_, int kK_ = 1>
struct Extents {
  static constexpr int kM = kM_, kN = kN_, kK = kK_;
};

// Of the kernel's own problem, whose result is D, or D^T with swap_ab.
struct OwnShape {
  int32_t m, n, k, batch;
};

// A tile of the kernel's own result, in tiles.
struct TileAt {
  int32_t m, n, batch;
};

}  // namespace jax_streamk::sm90
