// The copies of A and B that repack.h asks for.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_kernels/passes/repack.h"

namespace jax_streamk {

// Whether the copies are small enough for a launch, which counts pieces of rows in 32 bits.
bool can_copy(GemmProblem const&, Repack const&);

// Copies operands to the head of the workspace as far as `repack` says, and points `buffers` to the copies and to the
// workspace behind them.
Status launch_copies(GemmProblem const&, Repack const& repack, bool swap_ab, Buffers& buffers, cudaStream_t);

}  // namespace jax_streamk
