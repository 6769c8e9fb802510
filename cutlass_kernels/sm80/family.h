// What sm80 kernels and the family's traits have in common; none of it needs CUTLASS.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk::sm80 {

// A lower bound of CTAs per SM, for 255 registers per thread. A workspace may depend on it, so lowering (perhaps
// without a GPU) and the launch must agree.
int32_t occupancy(KernelInfo const&, Device const&);
// Whether a launch shares tiles, which it does for one GEMM only.
bool shares_tiles(Schedule const&);

}  // namespace jax_streamk::sm80
