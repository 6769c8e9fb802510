#include "cutlass_kernels/passes/repack.h"

#include <algorithm>

#include "cutlass_kernels/core/family.h"

namespace jax_streamk {

bool is_aligned(int64_t align, bool tma, Operand const& x, int64_t batch) {
  if (tma && std::max(x.ld, x.batch_stride) >= int64_t{1} << 38)
    return false;  // a tensor map's strides are below 2^40 bytes
  return x.contiguous() % align == 0 && ((x.lines() <= 1 && !tma) || x.ld % align == 0) &&
         ((batch <= 1 && !tma) || (x.batch_stride | x.inner_stride) % align == 0);
}

bool has_misaligned_d(GemmProblem const& p) {
  Operand d = p.operand(Role::kD);
  d.batch_stride |= p.epilogue.batch_stride_bias;
  return !is_aligned(16 / size_of(p.d.format), true, d, p.batch);
}

constexpr double kMostElements = 1e15;  // per copy: more than any GPU holds, and the bytes still fit 64 bits
// A row-major 16-bit B of fewer columns is not aligned for TMA: transposed, its copy has few long lines. Its rows are
// copied in one wave of blocks; of more rows it was not measured.
constexpr int64_t kFewColumns = 8, kMostRows = 1 << 15;

Repack repack_of(KernelInfo const& info, GemmProblem const& p) {
  Repack out;
  out.problem = p;
  if (!traits_of(info).loads_by_tma()) return out;
  bool const splits = info.math == Math::kTF32x3;
  if (splits) out.part = (p.k + info.tile_k - 1) / info.tile_k * info.tile_k;
  auto const copy = [&](Role role, KernelOperand const& wanted, Layout& copied, int64_t& bytes) {
    Operand x = p.operand(role);
    // wgmma takes K-major TF32 only. A kernel wants another layout of what it has in registers, or transposes itself.
    bool const known = x.major == Major::kRow || x.major == Major::kColumn,
               few = role == Role::kB && x.major == Major::kRow && size_of(x.format) == 2 && p.n < kFewColumns &&
                     (x.batch_stride != 0 ? p.batch : 1) * p.k <= kMostRows;
    bool const transposes = known && x.major != wanted.major && (info.math != Math::kNative || few);
    if (transposes) x.major = wanted.major;
    // The parts of split operands are K-major.
    int64_t const contiguous = splits ? 2 * out.part : x.contiguous(), lines = x.lines(), size = size_of(x.format);
    if (size < 2) return false;  // copies are made of words of 16 bits
    if (!splits && !transposes && is_aligned(wanted.align, true, x, p.batch)) return false;
    // Long lines are padded to whole cache lines, which load faster.
    int64_t const whole = 128 / size, unit = contiguous < whole ? wanted.align : whole,
                  batches = x.batch_stride != 0 ? p.batch : 1;
    x.ld = (contiguous + unit - 1) / unit * unit;
    if (static_cast<double>(batches) * lines * x.ld > kMostElements) return false;
    if (x.batch_stride != 0) x.batch_stride = lines * x.ld;
    copied = x;
    bytes = align_workspace(batches * lines * x.ld * size);
    return true;
  };
  GemmProblem& q = out.problem;
  out.a = copy(Role::kA, info.a, q.a, out.bytes_a);
  if (!p.b.scales.any()) out.b = copy(Role::kB, info.b, q.b, out.bytes_b);  // others are read as they lie
  bool const keeps_a = !splits && q.a.major == p.a.major, keeps_b = !splits && q.b.major == p.b.major;
  out.bytes_rearranged = (keeps_a ? 0 : out.bytes_a) + (keeps_b ? 0 : out.bytes_b);
  out.launches = ((out.a && keeps_a) || (out.b && keeps_b)) + ((out.a && !keeps_a) || (out.b && !keeps_b));
  if (splits) q.k = 3 * out.part;
  return out;
}

int64_t pieces_of(GemmProblem const& p, Major as, int64_t m, int64_t n, int64_t batch_stride) {
  if (as != Major::kRow) std::swap(m, n);
  return (batch_stride != 0 ? p.batch : 1) * m * ((n * (size_of(p.a.format) / 2) + kCopiedPiece - 1) / kCopiedPiece);
}

bool can_copy(GemmProblem const& p, Repack const& repack) {
  constexpr int64_t kMost = INT32_MAX - 256;  // less a block's threads
  GemmProblem const& q = repack.problem;
  return (!repack.a || pieces_of(p, q.a.major, p.m, p.k, p.a.batch_stride) < kMost) &&
         (!repack.b || pieces_of(p, q.b.major, p.k, p.n, p.b.batch_stride) < kMost);
}

std::vector<std::pair<Major, Major>> majors_of(KernelInfo const& info, bool few) {
  bool const copies = traits_of(info).loads_by_tma();
  std::vector<std::pair<Major, Major>> majors;
  for (Major const a : {Major::kRow, Major::kColumn}) {
    for (Major const b : {Major::kRow, Major::kColumn}) {
      bool const own = a == info.a.major && b == info.b.major;
      bool const transposed = info.math == Math::kTF32 && info.a.major == info.b.major && a == Major::kColumn;
      bool const columns = few && info.math == Math::kNative && a == info.a.major;
      if (own || (copies && (info.math == Math::kTF32x3 || ((transposed || columns) && b == Major::kRow))))
        majors.emplace_back(a, b);
    }
  }
  return majors;
}

}  // namespace jax_streamk
