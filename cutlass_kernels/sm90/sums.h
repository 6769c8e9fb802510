// How the products of k-tiles become a tile's sum. wgmma truncates its accumulators at every instruction, so for a
// float32 result, partial sums over short runs of K are added up in separate float32 registers: promotion.
//
// An Of has the sums of a tile, for a thread among those that share it and a named barrier of these. multiply(run,
// drain
// ...) calls run(k-tiles) for each run, which returns the stage that the products in flight read, and drain(stage) to
// wait for them; add_to() completes the accumulators then.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_kernels/sm90/operands/stage_layout.h"

namespace jax_streamk::sm90 {

// Those that need to know nothing of a tile.
struct SumsOfAnyTile {
  using Value = float;  // of accumulators
  static constexpr bool kInTensorCores = false;
  struct Params {};
  struct Storage {};  // in shared memory
  static void set_up(Params&, MainloopArguments const&) {}
};

// All of K in the tensor cores.
struct PlainSums : SumsOfAnyTile {
  static constexpr bool kPromotes = false;

  template <class Accumulators>
  struct Of {
    template <class Tile>
    CUTLASS_DEVICE Of(Params const&, Storage&, Tile const&, int, uint32_t) {}

    CUTLASS_DEVICE void add_to(Accumulators&) const {}
  };

  template <class Accumulators, class Run, class Drain>
  static CUTLASS_DEVICE int multiply(Accumulators&, Of<Accumulators>&, bool, int32_t count, Run const& run,
                                     Drain const&) {
    return run(count);
  }
};

// The last run's sum stays in the accumulators; `promotes`: there are others.
template <int kKTiles>
struct PromotedSums : SumsOfAnyTile {
  static constexpr bool kPromotes = true;

  template <class Accumulators>
  class Of {
   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const&, Storage&, Tile const&, int, uint32_t) {
      sums_.clear();
    }

    CUTLASS_DEVICE void add(Accumulators const& accumulators) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Accumulators::kValues; ++i) sums_(i) += accumulators(i);
    }
    CUTLASS_DEVICE void add_to(Accumulators& accumulators) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Accumulators::kValues; ++i) accumulators(i) += sums_(i);
    }

   private:
    Accumulators sums_;
  };

  template <class Accumulators, class Run, class Drain>
  static CUTLASS_DEVICE int multiply(Accumulators& accumulators, Of<Accumulators>& sums, bool promotes, int32_t count,
                                     Run const& run, Drain const& drain) {
    int32_t const k_tiles = promotes ? kKTiles : count;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > k_tiles; count -= k_tiles) {
      drain(run(k_tiles));
      sums.add(accumulators);
    }
    return run(count);
  }
};

}  // namespace jax_streamk::sm90
