#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Whether check() is ok, for those who ask often: most refusals cost no words.
bool can_run(Kernel const&, GemmProblem const&, Schedule const&, Device const&);

}  // namespace jax_streamk
