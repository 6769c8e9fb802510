// Sums of products of eight-bit integers: exact in tensor cores, over all of K. They are the result, or are multiplied
// by the scales of their rows and columns, which do not change along K.
#pragma once

#include <type_traits>

#include "cutlass_kernels/sm90/integer_wgmma.h"
#include "cutlass_kernels/sm90/scale_tables.h"

namespace jax_streamk::sm90 {

// Value_: int32 where integers are stored, else float.
template <class TileShape, int kWarpgroups, bool kSwap, bool kPermutes, bool kRun, class Value_>
struct IntegerSums {
  using Value = Value_;
  using Numbers = Integers;
  static constexpr bool kPromotes = false, kInTensorCores = true, kScales = std::is_same_v<Value, float>;
  using Tables = ScaleTables<TileShape, kWarpgroups, kSwap, kPermutes, kRun, 1>;
  using Storage = typename Tables::Storage;
  using Params = typename Tables::Params;

  static void set_up(Params& params, MainloopArguments const& x) { Tables::set_up(params, x); }

  template <class Accumulators>
  class Of {
    using Sums = sm90::Accumulators<Accumulators::kMmas, TileShape::kN, int32_t>;

   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const& params, Storage& tables, Tile const& tile, int thread, uint32_t barrier)
        : scales_(params, tables, tile, thread, barrier) {
      if (kScales && scales_.any()) scales_.template load<1>();
    }

    CUTLASS_DEVICE Sums& in_tensor_cores() { return sums_; }

    template <class Use>
    CUTLASS_DEVICE void with_types(Use const& use) const {
      use(Integers());
    }

    // Called by the consumers of a tile, with run(sums, fragments, 0, whether to add to sums) for the next k-tile,
    // which returns its stage when the run before is done, and release(stage). add_to() must follow.
    template <class Fragments, class Run, class Release>
    CUTLASS_DEVICE void multiply(int32_t count, Run const& run, Release const& release) {
      Fragments fragments, others;
      int stage = run(sums_, fragments, 0, 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > 2; count -= 2) {
        int const next = run(sums_, others, 0, 1);
        fragments.keep(), release(stage);
        stage = run(sums_, fragments, 0, 1);
        others.keep(), release(next);
      }
      if (count == 2) {
        int const next = run(sums_, others, 0, 1);
        fragments.keep(), release(stage);
        stage = next;
      }
      wait_for_wgmma<0>();
      fence(sums_), fragments.keep(), others.keep();
      release(stage);
    }

    // accumulators = the sum of all k-tiles.
    CUTLASS_DEVICE void add_to(Accumulators& accumulators) {
      if constexpr (kScales) {
        if (scales_.any()) {
          scales_.template fill<1>();
          CUTLASS_PRAGMA_UNROLL
          for (int mma = 0; mma < Accumulators::kMmas; ++mma)
            scales_.with_factors(0, mma, [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE {
              int const at = mma * Accumulators::kValuesPerMma + i;
              accumulators(at) = factor * static_cast<float>(sums_(at));
            });
          return;
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Accumulators::kValues; ++i) accumulators(i) = static_cast<Value>(sums_(i));
    }

   private:
    typename Tables::template Of<Accumulators> scales_;
    Sums sums_;
  };
};

}  // namespace jax_streamk::sm90
