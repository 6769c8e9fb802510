#include "cutlass_kernels/planner/reach.h"

#include <limits>

#include "cutlass_kernels/core/cuda_kernel.h"

namespace jax_streamk {
namespace {

// Rows along K lie apart, so that what is read beyond an operand comes from memory as well: it must be little, one in
// so many rows of both operands at most, and fewer than these cost nothing, nor do tiles that have none.
constexpr int64_t kManyBeyond = 32, kOneIn = 16;

}  // namespace

// As measured (benchmarks/results/beyond_h200_2026-11-26.md, rows_beyond_h200_2026-11-26.md, reach_h200_2026-11-27.md):
// rows that end within a box, rows along K that are not there, and whole boxes of contiguous rows, also of a cluster's
// tiles that have nothing else, for which its other tiles wait. Contiguous rows overlap then, and are in L2.
int64_t described_extent(TiledOperand const& x) {
  int64_t const step = x.contiguous ? x.tile * x.cluster : x.tile;
  int64_t const whole = (x.extent + step - 1) / step * step, beyond = whole - x.extent;
  if (x.contiguous ? beyond == 0 : beyond < kManyBeyond || beyond * kOneIn > x.extent + x.others) return x.extent;
  int64_t const last = x.contiguous ? (x.k - 1) * x.ld + whole : (whole - 1) * x.ld + x.k;
  bool const is_there = (x.batches - 1) * x.batch_stride + last <= bytes_left(x.data) / x.element_bytes;
  return is_there && whole <= std::numeric_limits<int>::max() ? whole : x.extent;
}

}  // namespace jax_streamk
