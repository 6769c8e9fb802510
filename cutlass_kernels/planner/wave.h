// Which tiles run together and what they read of the operands. Orders of tiles are ranked by it.
#pragma once

#include "cutlass_kernels/core/decomposition.h"

namespace jax_streamk {

// Rows of A and columns of B that one wave of whole tiles needs at once.
struct Wave {
  double rows = 0, columns = 0;  // added up over GPCs: CTAs of one GPC share what they load together
  double footprint = 0;          // rows and columns of the whole wave, which shares them in L2
};

// An order of tiles, and the wave it starts with.
struct Order {
  Raster raster = Raster::kAlongM;
  int32_t swizzle = 1;
  Wave wave;
};

// The output tiles of one batch. The tiles of a cluster count as one.
struct Tiling {
  int64_t rows = 0, columns = 0;   // of a tile, along m and n
  int64_t ctas_m = 1, ctas_n = 1;  // of a tile
  int64_t tiles_m = 0, tiles_n = 0;
};

// Tiles across the widest panel that is tried.
inline constexpr int32_t kWidestPanel = 4;

// The wave that `workers` clusters start with, of tiles of a problem m x n, on GPCs of gpc_sms.
Wave first_wave(Tiling const&, int64_t m, int64_t n, double workers, double gpc_sms, Raster, int32_t swizzle);

}  // namespace jax_streamk
