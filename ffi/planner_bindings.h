#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// A kernel that this build lacks, known by its description: it plans, and runs nothing.
std::unique_ptr<Kernel> described_kernel(KernelInfo const&);

// Adds the search for a plan, and its cost model, to the Python module.
void bind_planner(nanobind::module_&);

}  // namespace jax_streamk
