// Which output tiles CUTLASS 2.x shares among how many CTAs under Stream-K, for a build without its kernels. It is the
// rule of get_blocks() and get_sk_blocks() in cutlass/gemm/threadblock/threadblock_swizzle_streamk.h (CUTLASS 4.2).
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_streamk {

struct SharedTiles {
  int32_t tiles = 0, workers = 0;  // none: all tiles are whole
};

// The number of workers that saves most MAC iterations, each of `rounds` CTAs per SM at most; none if all lose some.
inline SharedTiles shared_by_cutlass(int32_t tiles, int32_t k_tiles, int32_t sms, int32_t rounds, int32_t fewest) {
  int64_t const iterations = int64_t{tiles} * k_tiles;
  auto const ceil_div = [](int64_t x, int64_t y) { return static_cast<int32_t>((x + y - 1) / y); };
  int32_t const unshared = k_tiles * ceil_div(tiles, sms);
  auto const most = static_cast<int32_t>(std::min<int64_t>(int64_t{sms} * rounds, iterations / 2));
  SharedTiles best;
  int32_t saved = 0;
  for (int32_t workers = fewest; workers <= most; ++workers) {
    int32_t const waves = ceil_div(workers, sms), taken = ceil_div(iterations, workers) * waves;
    // In floats, as CUTLASS counts. Runs that end where tiles do cost no waiting for a neighbour.
    bool const aligned = workers % tiles == 0;
    auto const peers = static_cast<float>(ceil_div(workers, tiles) + !aligned);
    float const waiting = aligned ? 0.0f : 0.02f * peers * static_cast<float>(taken);
    auto const fix_up = static_cast<int32_t>(2.0f * static_cast<float>(waves) + waiting + 2.0f * peers);
    if (unshared - taken - fix_up < saved) continue;
    saved = unshared - taken - fix_up;
    best = {tiles, workers};
  }
  return best;
}

// The last, partial wave of tiles is shared while SMs have room for more CTAs, of which `occupancy` fit on one; or else
// the last two waves are.
inline SharedTiles stream_k_of_cutlass(int32_t tiles, int32_t k_tiles, int32_t sms, int32_t occupancy) {
  int32_t const waves = tiles / sms, left = tiles % sms;
  if (sms == 1 || left == 0) return {};
  int32_t const fewest = std::min(sms, left + 1);
  if (waves < occupancy) return shared_by_cutlass(left, k_tiles, sms, occupancy - waves, fewest);
  if (occupancy > 1 && waves % occupancy == occupancy - 1) {
    SharedTiles const found = shared_by_cutlass(left, k_tiles, sms, 1, fewest);
    if (found.tiles > 0) return found;
  }
  return shared_by_cutlass(left + sms, k_tiles, sms, occupancy - (waves - 1) % occupancy, sms);
}

}  // namespace jax_streamk
