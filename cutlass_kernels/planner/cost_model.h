// What running a kernel on a problem is expected to cost, in microseconds.
//
// On a GPU this is the cost model of Osama et al., "Stream-K" (2023), section 5: the busiest worker takes
// a + b*[it fixes up] + c*iterations + d*(peers - 1), over a floor of the bytes that must come from memory. c follows
// from the tile and from which tiles run together: what tensor cores, the SM's loads and the L2 cache need for one MAC
// iteration.
#pragma once

#include <limits>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// The constants of one kind of GPU. jax_streamk/cost_model.py says what each is, and has their values.
struct Machine {
  double launch, cluster, relaunch;
  double memory_rate, memory_rate_sm, written, idle, beyond, gang, handshake, cache_rate, gpc_rate, drift,
      misaligned_drift, load_rate_sm, line, first_line;
  double wgmma_rate_sm, wgmma_sustained, tf32_rate_sm, tf32_sustained, shared_tile, mma_16bit, mma_tf32, mma_tf32x3,
      mma_f64;
  double narrow, from_registers, narrow_loads, misaligned_k, misaligned_mn, off_sectors_mn;
  double skinny_launch, skinny_rate_sm, skinny_rate_16bit, skinny_memory, skinny_mma, skinny_alone, skinny_fix_up,
      skinny_peer, half_lines;
  double epilogue, misaligned_d, fused, overlapped, copy_rate, rearrange_rate, fix_up, partial_rate_sm, memset;
  double reduction, reduction_sharing, reduction_rate;
};

// Rows of A and columns of B that one wave of whole tiles needs at once.
struct Wave {
  double rows = 0, columns = 0;  // of all GPCs added up, whose clusters share what their CTAs load by themselves
  double footprint = 0;          // rows and columns of the whole wave, which shares them in L2
  double near = 0;               // ... of all groups of near neighbours added up, by which orders are ranked
};

// An order of tiles, and the wave it starts with.
struct Order {
  Raster raster = Raster::kAlongM;
  int32_t swizzle = 1;
  Wave wave;
};

// The output tiles of one batch, those of a cluster of CTAs being one: their extents along m and n, the CTAs of one,
// and how many there are.
struct Tiling {
  int64_t rows = 0, columns = 0;
  int64_t ctas_m = 1, ctas_n = 1;
  int64_t tiles_m = 0, tiles_n = 0;
};

// An estimate and what it is made of.
struct Cost {
  double microseconds = 0;  // of the whole call
  double waves = 0;         // output tiles, times splits, over workers
  double iterations = 0;    // MAC iterations of the busiest worker
  double peers = 1;         // workers that share a tile, at most
  double work = 0;          // the busiest worker's time, fix-up and what is fused included
  double fix_up = 0;        // of that, storing and adding partial tiles
  double floor = 0;         // what memory needs for the problem, asked by so many workers; it overlaps with work
  double launches = 0;      // kernel launches, or waking threads
  double extra = 0;         // the memset, and the reduction kernel
  double repack = 0;        // copying operands as TMA and wgmma take them
};

// How many SMs or threads share the work of a schedule.
int32_t width_of(Schedule const&, Device const&);

// One problem on one kernel, which must outlive this: what all schedules have in common.
class Estimator {
 public:
  // The machine is not asked about kernels of the host.
  Estimator(KernelInfo const&, GemmProblem const&, int32_t width, Machine const&);

  // No schedule costs less, in no order of tiles.
  double least() const { return least_; }
  Tiling const& tiling() const { return tiling_; }

  Wave first_wave(Raster, int32_t swizzle) const;
  // What orders of tiles are ranked by: the time in which the caches can serve a wave, per element of K.
  double needs(Wave const&, int32_t swizzle) const;
  // The one whose waves need the least.
  Order best_order() const;

  // In waves of this kind. Above `limit` the microseconds may be a lower bound, and the other figures are missing.
  Cost cost(Schedule const&, Wave const&, double limit = std::numeric_limits<double>::infinity()) const;

 private:
  struct Share;
  Share share_of(Schedule const&, bool separate) const;
  double epilogues(double epilogue, double fused, double pieces) const;
  double reduction_of(double slices) const;
  Cost host_cost(Schedule const&) const;

  KernelInfo const& kernel_;
  GemmProblem const& problem_;
  Machine const& machine_;
  Tiling tiling_;
  // Extents that the kernel's own tile_m and tile_n run along; output tiles of one batch and of all; MAC iterations of
  // each; clusters or threads that work at once.
  double rows_, columns_, wave_tiles_, tiles_, k_tiles_, workers_;
  int32_t ctas_of_sm_ = 1;  // that share one
  bool partials_;           // are all that the kernel writes
  bool sliced_;             // whether K is likely to be
  // Of one MAC iteration: bytes of a row of A's tile and of a column of B's, bytes that a cluster loads, and
  // microseconds, those of wgmma at sustained clocks for each busy cluster.
  double panel_a_ = 0, panel_b_ = 0, multicast_ = 0, math_ = 0, wgmma_sustained_ = 0, loads_ = 0, line_ = 0, alone_ = 0;
  // Microseconds of memory for what clusters at different k all load, and how far the last tiles make them stray.
  double again_ = 0, uneven_ = 0;
  // Microseconds of the launch, of memory, of a tile's epilogue, more of it to a misaligned D, of what is fused into
  // it, and of a partial tile; bytes of D in the accumulator's type; microseconds of copying operands first.
  double launch_ = 0, floor_ = 0, drawn_ = 0, epilogue_ = 0, misaligned_d_ = 0, fused_ = 0, partial_ = 0,
         result_bytes_ = 0, repack_ = 0;
  double least_ = 0;
  bool misaligned_ = false;
};

}  // namespace jax_streamk
