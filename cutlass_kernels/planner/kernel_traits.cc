#include "cutlass_kernels/planner/kernel_traits.h"

#include "cutlass_kernels/planner/clusters.h"

namespace jax_streamk {

KernelTraits KernelTraits::of(KernelInfo const& kernel) {
  KernelTraits traits{MathUnit::kMma, LoadPath::kVectors};
  if (kernel.family == Family::kSm90) traits = {MathUnit::kWgmma, LoadPath::kTma};
  if (kernel.family == Family::kSkinny) traits = {MathUnit::kMmaFewRows, LoadPath::kStreaming};
  traits.ctas_per_sm = kernel.warp_schedule == "single" ? kSingles : 1;
  // Where their long operand lies across K, the CTAs of an SM load side by side, each at its own rate.
  bool const across = kernel.swap_ab ? kernel.b.major == Major::kRow : kernel.a.major == Major::kColumn;
  if (kernel.family == Family::kSkinny && kernel.a.format == Type::kF32 && across) traits.ctas_per_sm = kSkinnyTF32;
  traits.hides_epilogue = kernel.warp_schedule == "pingpong";
  traits.fixes_up_in_cluster = kernel.family == Family::kSkinny;
  traits.cuts_long_tiles = kernel.ragged == Ragged::kK && kernel.warp_schedule == "cooperative";
  traits.transposes_b = kernel.family == Family::kSm90 && kernel.math == Math::kTF32 &&
                        kernel.a.major == Major::kColumn && kernel.b.major == Major::kRow;
  traits.launches_slices_apart = kernel.family == Family::kSm80;
  traits.shifted_b = kernel.family == Family::kSkinny && kernel.swap_ab && kernel.b.align < kernel.a.align;
  traits.words_of_b = kernel.family == Family::kSkinny && !kernel.swap_ab && kernel.b.align < kernel.a.align;
  return traits;
}

}  // namespace jax_streamk
