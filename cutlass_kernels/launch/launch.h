// What a kernel launches for a problem under a schedule: computed once, for whoever checks, plans, explains or runs it.
#pragma once

#include "cutlass_kernels/core/slices.h"
#include "cutlass_kernels/passes/repack.h"

namespace jax_streamk {

// How a launch overlaps the kernel before it on the stream, which may then still run.
struct Overlap {
  bool any = false;
  bool has_a = false, has_b = false;  // whether A and B are known to be there already, as weights are
};

struct Launch {
  Repack copies;        // of A and B, before
  bool separate;        // whether a second kernel adds slices of K afterwards
  Slices slices;        // of K; one if it does not
  GemmProblem problem;  // the kernel's: with copies, and into partial sums of each slice
  Schedule schedule;    // of each slice
  Overlap overlap;

  Launch(KernelInfo const&, GemmProblem const&, Schedule const&);

  // With the slices as batch.
  GemmProblem as_batch() const { return slices.as_batch(problem); }
  int64_t k_tiles(KernelInfo const& info) const { return (problem.k + info.tile_k - 1) / info.tile_k; }
};

}  // namespace jax_streamk
