#include "cutlass_kernels/passes/repack.h"

#include <algorithm>

namespace jax_streamk {

bool is_aligned(int64_t align, bool tma, int64_t contiguous, int64_t ld, int64_t steps, int64_t batch_stride,
                int64_t batch) {
  if (tma && std::max(ld, batch_stride) >= int64_t{1} << 38)
    return false;  // a tensor map's strides are below 2^40 bytes
  return contiguous % align == 0 && ((steps <= 1 && !tma) || ld % align == 0) &&
         ((batch <= 1 && !tma) || batch_stride % align == 0);
}

bool has_misaligned_d(GemmProblem const& p) {
  return !is_aligned(16 / size_of(p.type_d), true, p.n, p.ldd, p.m, p.batch_stride_d | p.epilogue.batch_stride_bias,
                     p.batch);
}

constexpr double kMostElements = 1e15;  // of a copy: more than any GPU holds, and bytes still fit 64 bits

Repack repack_of(KernelInfo const& info, GemmProblem const& p) {
  Repack out;
  out.problem = p;
  int64_t const size = size_of(p.type_a);
  if (info.family != Family::kSm90) return out;
  bool const splits = info.math == Math::kTF32x3;
  if (splits) out.part = (p.k + info.tile_k - 1) / info.tile_k * info.tile_k;
  auto const copy = [&](Major& major, Major wanted, int64_t rows, int64_t columns, int64_t align, int64_t& ld,
                        int64_t& batch_stride, int64_t& bytes) {
    // wgmma takes K-major TF32 only; a kernel may have one operand go through registers instead.
    bool const known = major == Major::kRow || major == Major::kColumn;
    bool const transposes = known && major != wanted && info.math != Math::kNative;
    bool const row_major = (transposes ? wanted : major) == Major::kRow;
    // Split operands are K-major.
    int64_t const contiguous = splits ? 2 * out.part : row_major ? columns : rows, steps = row_major ? rows : columns;
    if (!splits && !transposes && is_aligned(align, true, contiguous, ld, steps, batch_stride, p.batch)) return false;
    // Long rows are padded to cache lines, which load faster.
    int64_t const line = 128 / size, unit = contiguous < line ? align : line, batches = batch_stride != 0 ? p.batch : 1;
    int64_t const padded = (contiguous + unit - 1) / unit * unit;
    if (static_cast<double>(batches) * steps * padded > kMostElements) return false;
    if (transposes) major = wanted;
    ld = padded;
    if (batch_stride != 0) batch_stride = steps * ld;
    bytes = align_workspace(batches * steps * ld * size);
    return true;
  };
  GemmProblem& q = out.problem;
  out.a = copy(q.major_a, info.major_a, p.m, p.k, info.align_a, q.lda, q.batch_stride_a, out.bytes_a);
  out.b = copy(q.major_b, info.major_b, p.k, p.n, info.align_b, q.ldb, q.batch_stride_b, out.bytes_b);
  bool const keeps_a = !splits && q.major_a == p.major_a, keeps_b = !splits && q.major_b == p.major_b;
  out.bytes_rearranged = (keeps_a ? 0 : out.bytes_a) + (keeps_b ? 0 : out.bytes_b);
  out.launches = ((out.a && keeps_a) || (out.b && keeps_b)) + ((out.a && !keeps_a) || (out.b && !keeps_b));
  if (splits) q.k = 3 * out.part;
  return out;
}

}  // namespace jax_streamk
