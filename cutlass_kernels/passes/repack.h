// Which operands are copied before a GEMM: those whose rows TMA cannot load because they are not aligned to 16 bytes,
// and those that the kernel cannot multiply as they are. For three TF32, A and B are split into two parts each.
#pragma once

#include <utility>
#include <vector>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Whether an operand's lines start and end at multiples of `align` elements. Unused strides matter to TMA only, whose
// tensor maps have all of them.
bool is_aligned(int64_t align, bool tma, Operand const& operand, int64_t batch);

// Whether TMA cannot store D, or vectors of the bias are unaligned.
bool has_misaligned_d(GemmProblem const&);

// The columns of a 16-bit N-major B that a tile has space for. TMA takes as long for a row of 32 or 64 bytes as for one
// of 128, so boxes are 64 columns, 128 bytes apart, and only the last may load fewer.
constexpr int32_t columns_by_tma(int32_t tile) { return tile > 64 ? (tile + 63) / 64 * 64 : tile; }

struct Repack {
  bool a = false, b = false;  // whether it is copied
  GemmProblem problem;        // the kernel's: with the strides of copies, and all of K that it multiplies
  // Three TF32: K padded to whole k-tiles, else 0. A is copied as [small | large] along K and B as [large | small], or
  // with swap_ab the other way round. The kernel's K is 3 * part: small x large, large x small, large x large.
  int64_t part = 0;
  int64_t bytes_a = 0, bytes_b = 0;  // of workspace, for the copies
  int64_t bytes_rearranged = 0;      // of these, bytes of operands that are transposed or split
  int32_t launches = 0;              // one for copies that keep their rows, one for the others

  bool any() const { return a || b; }
  int64_t bytes() const { return bytes_a + bytes_b; }
};

// No copies if a kernel's alignments are met, or if it does not use TMA.
Repack repack_of(KernelInfo const&, GemmProblem const&);

// Copies are made by pieces of rows, of kCopiedPiece 16-bit words: how many the copy of an m x n matrix has, and
// whether a launch can count them, in 32 bits.
inline constexpr int kCopiedPiece = 512;
int64_t pieces_of(GemmProblem const&, Major as, int64_t m, int64_t n, int64_t batch_stride);
bool can_copy(GemmProblem const&, Repack const&);

// The (majorness of A, of B) of problems that a kernel may run, those included whose operands are copied or transposed
// first. `few`: of B with less columns than kFewColumns.
std::vector<std::pair<Major, Major>> majors_of(KernelInfo const&, bool few);

}  // namespace jax_streamk
