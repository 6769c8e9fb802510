#include "cutlass_kernels/planner/sum_order.h"

#include <algorithm>
#include <vector>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/clusters.h"
#include "cutlass_kernels/launch/launch.h"

namespace jax_streamk {
namespace {

bool is_split(Schedule const& s) { return s.kind == ScheduleKind::kSplitK && s.splits > 1; }

// What adds the products of a run of K.
std::string unit_of(KernelInfo const& info, GemmProblem const& p) {
  FamilyTraits const& family = traits_of(info);
  if (family.is_host()) return "threads";
  bool const is_rounded = p.d.format.bits() < 32;
  // A sum that is rounded to 16 bits in the end is not promoted in slices either, except by the skinny family.
  bool const promotes = info.promotion_k > 0 && !(is_rounded && family.math_unit == MathUnit::kWgmma);
  std::string unit;
  switch (family.math_unit) {
    case MathUnit::kWgmma: unit = "wgmma"; break;
    case MathUnit::kMmaFewRows: unit = "mma.sync of " + std::to_string(info.tile_m) + " columns"; break;
    default: unit = "mma.sync"; break;
  }
  bool const is_of_16_bits = p.a.format.bits() == 16 && p.b.format == p.a.format;
  if (is_of_16_bits && is_rounded && !promotes && family.math_unit != MathUnit::kMmaFewRows) unit = "tensor cores";
  if (!is_of_16_bits) {
    unit += std::string(" of ") + name_of(p.b.format.type);
    if (p.math != Math::kNative) unit += std::string(" as ") + name_of(p.math);
    if (family.math_unit != MathUnit::kMmaFewRows) unit += " by " + std::to_string(info.tile_k);
  }
  if (promotes) unit += ", promoted every " + std::to_string(info.promotion_k);
  return unit;
}

// Lengths of the runs that K is cut into, in order.
std::vector<int64_t> runs_of(KernelInfo const& info, GemmProblem const& p, Schedule const& s) {
  Launch const launch(info, p, s);
  int64_t const k = launch.problem.k;
  std::vector<int64_t> runs;
  auto const add_up_to = [&](int64_t end, int64_t& begin) {
    end = std::min(end, k);
    if (end > begin) runs.push_back(end - begin), begin = end;
  };
  int64_t begin = 0;
  if (launch.slices.count > 1) {
    for (int32_t i = 1; i <= launch.slices.count; ++i) add_up_to(i * launch.slices.extent, begin);
  } else {
    int32_t const splits = is_split(s) ? s.splits : 1;
    auto const even = EvenRuns::of(static_cast<int32_t>(launch.k_tiles(info)), splits);
    for (int32_t i = 1; i <= splits; ++i) add_up_to(int64_t{even.begin(i)} * info.tile_k, begin);
  }
  return runs;
}

// "2 x 1024 + 960".
std::string text_of(std::vector<int64_t> const& runs) {
  std::string text;
  for (size_t i = 0, next; i < runs.size(); i = next) {
    for (next = i; next < runs.size() && runs[next] == runs[i];) ++next;
    if (i > 0) text += " + ";
    if (next - i > 1) text += std::to_string(next - i) + " x ";
    text += std::to_string(runs[i]);
  }
  return text;
}

}  // namespace

std::string sum_order(KernelInfo const& info, GemmProblem const& p, Schedule const& s) {
  bool const is_host = traits_of(info).is_host();
  if (is_host && p.invariant == Invariant::kNone) return "";
  if (s.kind == ScheduleKind::kStreamK && s.max_sms != 1) return "";
  if (is_split(s) && s.reduction == Reduction::kAtomic) return "";
  if (cuts_long_tiles(info)) return "";
  std::vector<int64_t> const runs = is_split(s) ? runs_of(info, p, s) : std::vector<int64_t>{};
  return unit_of(info, p) + (runs.size() > 1 ? ", k = " + text_of(runs) : ", k in one run");
}

}  // namespace jax_streamk
