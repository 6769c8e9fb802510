#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Whether check() is ok, for frequent calls: refusals make no message.
bool can_run(Kernel const&, GemmProblem const&, Schedule const&, Device const&);

// The beginning of every refusal: the kernel and the shape.
std::string cannot_run(KernelInfo const&, GemmProblem const&);

}  // namespace jax_streamk
