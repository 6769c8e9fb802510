// Split-K with a separate reduction pass ("parallel split-K"): the K slices run as data-parallel GEMMs of a kernel whose output
// is the accumulator type, into partials in the workspace, and a second kernel adds the partials in the order of K and converts.
#pragma once

#include "cutlass_kernels/gemm.h"

namespace jax_streamk {

Status can_implement_separate(Kernel const&, GemmProblem const&, Schedule const&, Device const&);
int64_t separate_workspace_bytes(Kernel const&, GemmProblem const&, Schedule const&, Device const&);
Status run_separate(Kernel const&, GemmProblem const&, Schedule const&, Device const&, Buffers const&, void* stream);

}  // namespace jax_streamk
