// The copies of A and B that repack.h calls for.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_kernels/passes/repack.h"

namespace jax_streamk {

// Makes the copies that `repack` calls for, at the start of the workspace, and points `buffers` to them and to the
// workspace after them.
Status launch_copies(GemmProblem const&, Repack const& repack, bool swap_ab, Buffers& buffers, cudaStream_t);

}  // namespace jax_streamk
