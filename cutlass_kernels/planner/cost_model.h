// What running a kernel on a problem is expected to cost, in microseconds.
//
// On a GPU this is the cost model of Osama et al., "Stream-K" (2023), section 5: the busiest worker takes
// a + b*[it fixes up] + c*iterations + d*(peers - 1), over a floor of the bytes that must come from memory. c follows
// from the tile and from which tiles run together: what tensor cores, the SM's loads and the L2 cache need for one MAC
// iteration (resources.h).
#pragma once

#include <limits>

#include "cutlass_kernels/planner/resources.h"

namespace jax_streamk {

// An estimate and what it is made of.
struct Cost {
  double microseconds = 0;  // of the whole call
  double waves = 0;         // output tiles, times splits, over workers
  double iterations = 0;    // MAC iterations of the busiest worker
  double peers = 1;         // workers that share a tile, at most
  double work = 0;          // the busiest worker's time, with fix-up and fused epilogue
  double fix_up = 0;        // the part of work that stores and adds partial tiles
  double floor = 0;         // DRAM's time, which overlaps with work
  double launches = 0;      // kernel launches, or waking threads
  double extra = 0;         // the memset or the reduction kernel
  double repack = 0;        // copies of operands for TMA and wgmma
};

// What the main loop and the epilogue of a call ask of each resource: of the busiest worker, except for memory. They
// overlap, so that together they take less than their sum.
struct Parts {
  double memory = 0;  // Cost::floor
  double tensor_cores = 0;
  double shared_memory = 0, l2 = 0;  // loads into the SM's shared memory, and transposing there; loads from L2
  double waits = 0;                  // beside loads
  double epilogue = 0, fix_up = 0;
};

// How many SMs or threads share the work of a schedule.
int32_t width_of(Schedule const&, Device const&);

// What all schedules of a problem on a kernel have in common. Keeps references to all arguments.
class Estimator {
 public:
  Estimator(KernelInfo const&, GemmProblem const&, int32_t width, Machine const&);

  // A lower bound for every schedule and order of tiles.
  double least() const { return least_; }
  Tiling const& tiling() const { return work_.tiling; }
  KernelTraits const& traits() const { return work_.traits; }
  // Whether it copies the rows of a B of few columns, or loads them as a whole TF32 tile's.
  bool is_slow_with_few_columns() const {
    Repack const& repacked = work_.repacked;
    bool const as_tile =
        repacked.problem.b.major == Major::kRow && work_.kernel.math == Math::kTF32 && !work_.traits.words_of_b;
    return as_tile || repacked.bytes() > repacked.bytes_rearranged;
  }

  Wave first_wave(Raster, int32_t swizzle) const;
  // The time L2 and DRAM need to serve a wave, per byte of K: orders of tiles are ranked by it.
  double needs(Wave const&) const;
  // The order of tiles whose first wave needs least.
  Order best_order() const;

  // For waves like this one. If it exceeds `limit`, microseconds may be a lower bound and the other figures missing.
  Cost cost(Schedule const&, Wave const&, double limit = std::numeric_limits<double>::infinity()) const;
  // Of what cost() returns, on a GPU.
  Parts parts(Schedule const&, Wave const&) const;

 private:
  // What a MAC iteration needs of each resource when all workers are busy.
  struct Iteration {
    double tensor_cores = 0, sustained = 0, loads = 0, gpcs = 0, waits = 0, transposes = 0;
  };
  Iteration iteration_of(Schedule const&, Share const&, Wave const&, bool cut) const;
  template <typename Join>
  double products_of(Join, Iteration const&, Share const&, double busy_last) const;
  template <typename Join>
  double work_of(Join, Iteration const&, Share const&, double busy_last, bool separate) const;
  double busy_last_of(Share const&, double splits, bool cut) const;
  double dram_of(Share const&, double splits, double busy_last) const;
  double epilogues(double fused, double pieces, double product) const;
  double least_of() const;

  Workload work_;
  bool partials_;  // the kernel writes partial sums only
  // As in resources.h, in microseconds and bytes.
  Panels panels_;
  double tensor_cores_ = 0, sustained_ = 0, loads_ = 0, transposes_ = 0, waits_ = 0, l2_bytes_ = 0;
  double dram_ = 0, again_ = 0, draw_ = 0, launch_us_ = 0, repack_ = 0, epilogue_ = 0, fused_ = 0;
  double least_ = 0;
};

}  // namespace jax_streamk
