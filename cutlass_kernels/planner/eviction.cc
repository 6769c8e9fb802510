#include "cutlass_kernels/planner/eviction.h"

namespace jax_streamk {
namespace {

constexpr int32_t kReadTogether = 4;  // tiles, one after another
constexpr int64_t kMuchSmaller = 8;
constexpr int32_t kDriftAfter = 128;  // MAC iterations: 8192 of K, as measured (also in long_k_stay_h200_2026-11-26.md
                                      // and loads_first_h200_2026-11-26.txt)
// From so many multiply-adds of 16 bits on, whole tiles take 2% longer where loads go first, in the mean of what was
// measured: what that saves at the end of a kernel is no more in a long one. Slices still find their partial sums.
constexpr double kLong = 4.5e9;

}  // namespace

bool goes_first(TileOrder const& order, Decomposition const& cut, OperandUse const& use) {
  bool const whole_tiles = cut.kind == ScheduleKind::kDataParallel && use.slices == 1;
  if (whole_tiles && use.element_bytes == 2 && use.multiply_adds >= kLong) return false;
  int32_t const reach = order.reach(use.line);
  if (reach == 1 && !use.by_all_batches) return true;
  // Workers of a Stream-K tile are at different k.
  if (use.again || cut.kind == ScheduleKind::kStreamK) return false;
  bool const at_once = cut.workers == cut.tiles * cut.splits;
  // Readers that have drifted apart would find it gone.
  if (at_once) return kMuchSmaller * use.bytes >= use.others && cut.k_tiles / cut.splits <= kDriftAfter;
  return reach <= kReadTogether && !use.by_all_batches && use.bytes >= use.others;
}

}  // namespace jax_streamk
