// What sm90 kernels and the family's traits have in common.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk::sm90 {

// The parts of a launch's workspace, in bytes, in this order.
struct Workspace {
  int64_t counter = 0;   // of a ragged kernel (counter_bytes)
  int64_t arrivals = 0;  // words by which workers that share a tile arrive
  int64_t partials = 0;
  int64_t zeroed = 0;  // from the start, before each launch

  int64_t bytes() const { return counter + arrivals + partials; }
  static Workspace of(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&);
};

}  // namespace jax_streamk::sm90
