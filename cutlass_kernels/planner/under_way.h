// How much of an operand that streams past is on its way from memory at once: more than memory serves well makes it
// slower.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/decomposition.h"

namespace jax_streamk {

// Stages of each CTA that its loads leave empty: all but two at most, for consumers hold one while they wait for the
// next, and in the last wave, where fewer CTAs load, no more than before, for loads wait for stages that far ahead.
struct HeldBack {
  int32_t first = 0;  // of a CTA's first piece of work
  int32_t whole_waves = 0, in_whole = 0, in_last = 0;

  // Where this compares, or there is no `first`, ptxas reads parameters before the first load in a way (LDC) that takes
  // half a microsecond the first time.
  JSK_HOST_DEVICE int32_t stages(int32_t ordinal) const {
    return in_last + ((ordinal - whole_waves) >> 31 & (in_whole - in_last));
  }
};

// For pieces of work that clusters of `ctas` take in turn, each CTA with `stages` that hold so many bytes of the
// operand, where all together should have about `under_way` bytes of it under way, in whole stages, three at least; 0:
// as many as the stages hold.
HeldBack held_back(Decomposition const& cut, int32_t ctas, int32_t stages, int64_t stage_bytes, int64_t under_way);

}  // namespace jax_streamk
