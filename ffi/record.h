// Launches a kernel outside XLA and finds out what its CTAs worked on.
#pragma once

#include <vector>

#include "cutlass_kernels/core/record.h"
#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {

// Runs the kernel once on the current GPU, whose buffers must be ready, and returns when it has ended, with the units
// of work of all CTAs in `records`; those of a CTA are in its order.
Status record_launch(Kernel const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&,
                     Buffers const&, std::vector<WorkRecord>& records);

}  // namespace jax_streamk
