// Times a kernel outside XLA.
#pragma once

#include <vector>

#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {

// Runs the kernel on each set of buffers in turn, `repeats` times, and appends the time of a launch in each repeat to
// `microseconds`. The sets share a workspace. Returns when all launches have ended.
//
// On a GPU this is a CUDA graph with a launch per set, replayed on a stream of its own, on the GPU that holds the
// buffers. These must be ready: no other stream is waited for, since a device must not be synchronized while another
// thread may be capturing.
Status time_launches(Kernel const&, GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&,
                     std::vector<Buffers> const& sets, int32_t repeats, std::vector<double>& microseconds);

}  // namespace jax_streamk
