#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Whether check() is ok, for those who ask often: most refusals cost no words.
bool can_run(Kernel const&, GemmProblem const&, Schedule const&, Device const&);

// How every refusal begins: with the kernel and the shape.
std::string cannot_run(KernelInfo const&, GemmProblem const&);

}  // namespace jax_streamk
