// Which operands are copied before a GEMM: those whose rows TMA cannot load, because they do not start on 16 bytes, and
// those that wgmma cannot multiply as they are. For three TF32, A and B are split into two parts each.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Whether an operand's lines start and end on multiples of `align` elements. Unused strides do not matter, except to
// TMA, whose tensor maps hold all of them.
bool is_aligned(int64_t align, bool tma, Operand const& operand, int64_t batch);

// Whether TMA cannot store D, or vectors of the bias are unaligned.
bool has_misaligned_d(GemmProblem const&);

// Columns of a 16-bit N-major B that a tile has room for. A row of 32 or 64 bytes takes TMA as long as one of 128, so
// boxes are 64 columns, 128 bytes apart, and only the last may load fewer.
constexpr int32_t columns_by_tma(int32_t tile) { return tile > 64 ? (tile + 63) / 64 * 64 : tile; }

struct Repack {
  bool a = false, b = false;  // copied
  GemmProblem problem;        // what the kernel runs: with the strides of copies, and all K that it multiplies
  // Three TF32: K padded to whole k-tiles, else 0. A is copied as [small | large] along K and B as [large | small], or
  // with swap_ab the other way round. The kernel's K is 3 * part: small x large, large x small, large x large.
  int64_t part = 0;
  int64_t bytes_a = 0, bytes_b = 0;  // of workspace, for the copies
  int64_t bytes_rearranged = 0;      // of them, those of operands that are transposed or split
  int32_t launches = 0;              // one of copies that keep their rows, one of the others

  int64_t bytes() const { return bytes_a + bytes_b; }
};

// Nothing for a kernel that has the alignments, or does not use TMA.
Repack repack_of(KernelInfo const&, GemmProblem const&);

}  // namespace jax_streamk
