// Promotion: wgmma truncates its accumulators at every instruction, so for a float32 result, partial sums over short
// runs of K are added up in separate float32 registers.
#pragma once

#include <utility>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace jax_streamk::sm90 {

template <class Accumulators>
class PromotedSums {
 public:
  CUTLASS_DEVICE PromotedSums() { cute::clear(sums_); }

  CUTLASS_DEVICE void add(Accumulators const& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums_); ++i) sums_(i) += accumulators(i);
  }
  CUTLASS_DEVICE void add_to(Accumulators& accumulators) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums_); ++i) accumulators(i) += sums_(i);
  }

 private:
  decltype(cute::make_fragment_like(std::declval<Accumulators const&>())) sums_;
};

// For kernels that leave all of K to the tensor cores.
struct NoSums {};

}  // namespace jax_streamk::sm90
