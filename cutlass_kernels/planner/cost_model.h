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
  double work = 0;          // the busiest worker's time, fix-up and what is fused included
  double fix_up = 0;        // of that, storing and adding partial tiles
  double floor = 0;         // what memory needs, given the number of workers that ask; it overlaps with work
  double launches = 0;      // kernel launches, or waking threads
  double extra = 0;         // the memset, and the reduction kernel
  double repack = 0;        // copying operands as TMA and wgmma take them
};

// How many SMs or threads share the work of a schedule.
int32_t width_of(Schedule const&, Device const&);

// One problem on one kernel, which must outlive this, as must the machine: what all schedules have in common.
class Estimator {
 public:
  Estimator(KernelInfo const&, GemmProblem const&, int32_t width, Machine const&);

  // No schedule costs less, in no order of tiles.
  double least() const { return least_; }
  Tiling const& tiling() const { return launch_.tiling; }

  Wave first_wave(Raster, int32_t swizzle) const;
  // What orders of tiles are ranked by: the time in which the caches can serve a wave, per element of K.
  double needs(Wave const&) const;
  // The one whose waves need the least.
  Order best_order() const;

  // In waves of this kind. Above `limit` the microseconds may be a lower bound, and the other figures are missing.
  Cost cost(Schedule const&, Wave const&, double limit = std::numeric_limits<double>::infinity()) const;

 private:
  // Of a MAC iteration where all workers are busy: what each resource needs.
  struct Iteration {
    double tensor_cores, sustained, loads, gpcs, waits;
  };
  Iteration iteration_of(Schedule const&, Share const&, Wave const&, bool cut) const;
  template <typename Join>
  double work_of(Join, Iteration const&, Share const&, double busy_last, bool separate) const;
  double dram_of(Share const&, double splits, double busy_last) const;
  double epilogues(double epilogue, double fused, double pieces) const;
  double least_of() const;

  Launch launch_;
  bool partials_;  // are all that the kernel writes
  // What resources.h says of each; microseconds and bytes.
  Panels panels_;
  double tensor_cores_ = 0, sustained_ = 0, loads_ = 0, waits_ = 0, l2_bytes_ = 0;
  double dram_ = 0, again_ = 0, draw_ = 0, launch_us_ = 0, repack_ = 0, epilogue_ = 0, fused_ = 0;
  double least_ = 0;
};

}  // namespace jax_streamk
