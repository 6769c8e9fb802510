#include "cutlass_kernels/eviction.h"

namespace jax_streamk {
namespace {

constexpr int32_t kReadTogether = 4;  // tiles, one after another
constexpr int64_t kMuchSmaller = 8;
constexpr int32_t kTogether = 128;  // MAC iterations, after which neighbours have drifted apart

}  // namespace

bool goes_first(TileOrder const& order, Decomposition const& cut, OperandUse const& use) {
  int32_t const reach = order.reach(use.line);
  if (reach == 1 && !use.by_all_batches) return true;
  // Workers of a Stream-K tile are at different k.
  if (use.again || cut.kind == ScheduleKind::kStreamK) return false;
  bool const at_once = cut.workers == cut.tiles * cut.splits;
  bool const drift = cut.k_tiles / cut.splits > kTogether;
  // A much larger operand is what fills L2, and readers that have drifted apart would find it gone.
  if (at_once) return kMuchSmaller * use.bytes >= use.others && !(drift && use.bytes > kMuchSmaller * use.others);
  return reach <= kReadTogether && !use.by_all_batches && use.bytes >= use.others;
}

}  // namespace jax_streamk
