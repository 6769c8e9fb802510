// What a kernel that loads by TMA does about operands whose rows do not start on its 16 bytes: they are copied into rows that do.
#pragma once

#include "cutlass_kernels/gemm.h"

namespace jax_streamk {

// Whether a matrix's rows start, and end, on whole accesses of `align` elements. Strides that nothing steps over do not count, but
// for TMA, whose descriptors hold them all.
bool is_aligned(int64_t align, bool tma, int64_t contiguous, int64_t ld, int64_t steps, int64_t batch_stride, int64_t batch);

struct Repack {
  bool a = false, b = false;         // copied
  GemmProblem problem;               // what the kernel runs: with the strides of copies
  int64_t bytes_a = 0, bytes_b = 0;  // of workspace, for the copies

  int64_t bytes() const { return bytes_a + bytes_b; }
};

// Nothing for a kernel that has the alignments, or does not use TMA.
Repack repack_of(KernelInfo const&, GemmProblem const&);

}  // namespace jax_streamk
