#include "cutlass_kernels/planner/kernel_traits.h"

#include "cutlass_kernels/launch/clusters.h"

namespace jax_streamk {

KernelTraits KernelTraits::of(KernelInfo const& kernel) {
  KernelTraits traits{traits_of(kernel), ctas_of_sm(kernel)};
  bool const streams = traits.family.load_path == LoadPath::kStreaming;
  // Where their long operand lies across K, the CTAs of an SM load side by side, each at its own rate.
  bool const across = kernel.swap_ab ? kernel.b.major == Major::kRow : kernel.a.major == Major::kColumn;
  if (streams && kernel.a.format == Type::kF32 && across) traits.ctas_per_sm = kSkinnyTF32;
  traits.hides_epilogue = kernel.warp_schedule == WarpSchedule::kPingpong;
  traits.transposes_b = traits.family.math_unit == MathUnit::kWgmma && kernel.math == Math::kTF32 &&
                        kernel.a.major == Major::kColumn && kernel.b.major == Major::kRow;
  traits.shifted_b = streams && kernel.swap_ab && kernel.b.align < kernel.a.align;
  traits.words_of_b = streams && !kernel.swap_ab && kernel.b.align < kernel.a.align;
  return traits;
}

}  // namespace jax_streamk
