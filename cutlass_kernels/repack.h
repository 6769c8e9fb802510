// What a kernel that loads and stores by TMA does about matrices whose rows do not start on its 16 bytes: A and B are copied into
// rows that do, and D is copied out of such rows, or left in f32 to the pass that otherwise reduces slices.
#pragma once

#include "cutlass_kernels/gemm.h"

namespace jax_streamk {

// Whether a matrix's rows start, and end, on whole accesses of `align` elements. Strides that nothing steps over do not count, but
// for TMA, whose descriptors hold them all.
bool is_aligned(int64_t align, bool tma, int64_t contiguous, int64_t ld, int64_t steps, int64_t batch_stride, int64_t batch);

struct Repack {
  bool a = false, b = false, d = false;           // copied
  bool reduced_d = false;                         // left to the reduction, by kernels that write f32
  GemmProblem problem;                            // what the kernel runs: with the strides of copies
  int64_t bytes_a = 0, bytes_b = 0, bytes_d = 0;  // of workspace, for the copies

  int64_t bytes() const { return bytes_a + bytes_b + bytes_d; }
};

// Nothing for a kernel that has the alignments, or does not use TMA for elements of 16 bits. A separate reduction writes any D itself.
Repack repack_of(KernelInfo const&, GemmProblem const&, bool separate);

}  // namespace jax_streamk
