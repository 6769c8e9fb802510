// What skinny kernels and the family's traits have in common.
#pragma once

namespace jax_streamk::skinny {

inline constexpr int kMaxSplits = 8;  // CTAs in a cluster: the portable limit

}  // namespace jax_streamk::skinny
