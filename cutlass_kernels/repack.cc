#include "cutlass_kernels/repack.h"

namespace jax_streamk {

bool is_aligned(int64_t align, bool tma, int64_t contiguous, int64_t ld, int64_t steps, int64_t batch_stride, int64_t batch) {
  return contiguous % align == 0 && ((steps <= 1 && !tma) || ld % align == 0) &&
         ((batch <= 1 && !tma) || batch_stride % align == 0);
}

constexpr int64_t kSize = 2;  // bytes of the elements that are copied
constexpr double kMostElements = 1e15;  // of a copy: no GPU has memory for more, and bytes stay countable

Repack repack_of(KernelInfo const& info, GemmProblem const& p) {
  Repack out;
  out.problem = p;
  if (info.family != Family::kSm90 || size_of(p.type_a) != kSize) return out;
  auto const copy = [&](bool row_major, int64_t rows, int64_t columns, int64_t align, int64_t& ld, int64_t& batch_stride, int64_t& bytes) {
    int64_t const contiguous = row_major ? columns : rows, steps = row_major ? rows : columns;
    if (is_aligned(align, true, contiguous, ld, steps, batch_stride, p.batch)) return false;
    // Long rows in whole cache lines: starting anywhere else they are slower to load.
    int64_t const line = 128 / kSize, unit = contiguous < line ? align : line, batches = batch_stride != 0 ? p.batch : 1;
    int64_t const padded = (contiguous + unit - 1) / unit * unit;
    if (static_cast<double>(batches) * steps * padded > kMostElements) return false;
    ld = padded;
    if (batch_stride != 0) batch_stride = steps * ld;
    bytes = align_workspace(batches * steps * ld * kSize);
    return true;
  };
  GemmProblem& q = out.problem;
  out.a = copy(p.major_a == Major::kRow, p.m, p.k, info.align_a, q.lda, q.batch_stride_a, out.bytes_a);
  out.b = copy(p.major_b == Major::kRow, p.k, p.n, info.align_b, q.ldb, q.batch_stride_b, out.bytes_b);
  return out;
}

}  // namespace jax_streamk
