// In which order a kernel adds up an element of D: all that the element's bits depend on besides the operands and the
// epilogue.
#pragma once

#include <string>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// The instruction, the distance between promotions, and the runs that K is cut into, as text: plans of one text give
// the same bits, however many rows or columns there are. Tile, cluster, order of tiles, and which operand is swapped
// do not change them. Empty where bits depend on these or on timing: under Stream-K, whose cuts move with the number of
// tiles, atomic reductions, long groups that workers share, and the host's kernels unless the problem is invariant.
//
// It was measured on an H200 which kernels agree: wgmma and mma.sync do where results have 16 bits and sums are not
// promoted, and an ordered and a separate reduction where their cuts are equal. What was not measured counts as apart.
std::string sum_order(KernelInfo const&, GemmProblem const&, Schedule const&);

}  // namespace jax_streamk
