// How long a kernel takes, outside XLA.
#pragma once

#include <vector>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Runs the kernel on each of the sets of buffers in turn, `repeats` times over, and appends to `microseconds` what a
// launch took in each repeat. The sets share a workspace. Returns when all is done; nothing is kept.
//
// On a GPU, on the one that holds the buffers, which must be ready: a CUDA graph with a launch per set, replayed on a
// stream of its own. It waits for no other stream: a device must not be synchronized while another thread may be
// capturing.
Status time_launches(Kernel const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&,
                     std::vector<Buffers> const& sets, int32_t repeats, std::vector<double>& microseconds);

}  // namespace jax_streamk
