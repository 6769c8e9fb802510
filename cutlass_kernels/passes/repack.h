// How TMA brings operands. Those whose rows do not start on its 16 bytes are copied into rows that do. And how wgmma
// multiplies f32 as three TF32, which it has no room in registers to make: operands are copied in two parts.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// Whether an operand's lines start, and end, on whole accesses of `align` elements. Strides that nothing steps over do
// not count, but for TMA, whose descriptors hold them all.
bool is_aligned(int64_t align, bool tma, Operand const& operand, int64_t batch);

// Whether TMA cannot store D, or read a bias of each batch.
bool has_misaligned_d(GemmProblem const&);

// For how many columns of a B of 16 bits that is contiguous along n a tile of so many has room. TMA's rows have 128, 64
// or 32 bytes and cost about as much to ask for: they lie 128 apart, and the last of a tile may have fewer columns.
constexpr int32_t columns_by_tma(int32_t tile) { return tile > 64 ? (tile + 63) / 64 * 64 : tile; }

struct Repack {
  bool a = false, b = false;  // copied
  GemmProblem problem;        // what the kernel runs: with the strides of copies, and all K that it multiplies
  // Where f32 is split: so much of K, in rows of A and columns of B, are large TF32 numbers, and as much what they
  // lack, filled up with zeros. The small ones are first of A, of B the large ones, or with swap_ab the other way
  // round. The kernel multiplies small by large, large by small and large by large, thrice as long a K. Else 0.
  int64_t part = 0;
  int64_t bytes_a = 0, bytes_b = 0;  // of workspace, for the copies
  int64_t bytes_rearranged = 0;      // of them, those of operands that are transposed or split
  int32_t launches = 0;              // one of copies that keep their rows, one of the others

  int64_t bytes() const { return bytes_a + bytes_b; }
};

// Nothing for a kernel that has the alignments, or does not use TMA.
Repack repack_of(KernelInfo const&, GemmProblem const&);

}  // namespace jax_streamk
