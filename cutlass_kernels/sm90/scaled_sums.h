// Sums of products of float8, whose operands may have scales. Tensor cores add such products with fewer bits than
// float32 has, so each k-tile is added to float32 sums, multiplied by the scales of its blocks; where these do not
// change along K, the sum of all is.
#pragma once

#include "cutlass_kernels/sm90/scale_tables.h"
#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

template <class TileShape, int kWarpgroups, bool kSwap, bool kPermutes, bool kRun>
struct ScaledSums {
  using Value = float;
  static constexpr bool kPromotes = true, kInTensorCores = false;
  // Beside the scales of two lines a thread has no registers for such that change along K (can_scale_sums() in
  // scaled/scales.cc).
  static constexpr int kTables = TileShape::kM + TileShape::kN <= kWarpgroups * 128 ? 8 : 1;
  using Tables = ScaleTables<TileShape, kWarpgroups, kSwap, kPermutes, kRun, kTables>;
  using Storage = typename Tables::Storage;

  struct Params : Tables::Params {
    bool m_is_e5m2, n_is_e5m2;  // or e4m3: what A and B are
  };

  static void set_up(Params& params, MainloopArguments const& x) {
    Tables::set_up(params, x);
    GemmProblem const& p = x.problem;
    params.m_is_e5m2 = (kSwap ? p.b : p.a).format == Type::kE5M2;
    params.n_is_e5m2 = (kSwap ? p.a : p.b).format == Type::kE5M2;
  }

  template <class Accumulators>
  class Of {
    static constexpr int kMmas = Accumulators::kMmas;
    using Part = sm90::Accumulators<1, TileShape::kN>;  // the sum of a k-tile, of 64 rows
    // Whether one of two parts is added while the other is computed. Where registers are short, other warpgroups
    // compute.
    static constexpr bool kTakesTurns = Accumulators::kValues <= (kPermutes ? 16 : 32);

   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const& params, Storage& tables, Tile const& tile, int thread, uint32_t barrier)
        : params_(params), scales_(params, tables, tile, thread, barrier) {
      sums_.clear();
      if (!scales_.any()) return;
      if (changes()) {
        scales_.template load<kTables>();
      } else {
        scales_.template load<1>();
      }
    }

    // Calls use() with the Fp8 of the types of A and B.
    template <class Use>
    CUTLASS_DEVICE void with_types(Use const& use) const {
      if (!params_.m_is_e5m2) return params_.n_is_e5m2 ? use(Fp8<false, true>()) : use(Fp8<false, false>());
      return params_.n_is_e5m2 ? use(Fp8<true, true>()) : use(Fp8<true, false>());
    }

    // Called by the consumers of a tile, with run(a part, its fragments, which 64 rows, 0) for the next k-tile, which
    // returns its stage when the run before is done, and release(stage). add_to() must follow.
    template <class Fragments, class Run, class Release>
    CUTLASS_DEVICE void multiply(int32_t count, Run const& run, Release const& release) {
      auto const end = [&](Part& part, Fragments& words, int stage, int mma) CUTLASS_LAMBDA_FUNC_INLINE {
        fence(part), words.keep();
        if (mma + 1 == kMmas) release(stage);
        add(part, mma);
      };
      Part part;
      Fragments fragments;
      if constexpr (!kTakesTurns) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (; count > 0; --count) {
          CUTLASS_PRAGMA_UNROLL
          for (int mma = 0; mma < kMmas; ++mma) {
            int const stage = run(part, fragments, mma, 0);
            wait_for_wgmma<0>();
            end(part, fragments, stage, mma);
          }
        }
        return;
      }
      Part other;
      Fragments of_other;
      int stage = run(part, fragments, 0, 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > 2; count -= 2) {
        int const next = run(other, of_other, 0, 0);
        end(part, fragments, stage, 0);
        stage = run(part, fragments, 0, 0);
        end(other, of_other, next, 0);
      }
      if (count == 2) {
        int const next = run(other, of_other, 0, 0);
        end(part, fragments, stage, 0);
        wait_for_wgmma<0>();
        end(other, of_other, next, 0);
      } else {
        wait_for_wgmma<0>();
        end(part, fragments, stage, 0);
      }
    }

    // accumulators = the sum of all k-tiles.
    CUTLASS_DEVICE void add_to(Accumulators& accumulators) {
      if (scales_.any() && !changes()) {
        scales_.template fill<1>();
        CUTLASS_PRAGMA_UNROLL
        for (int mma = 0; mma < kMmas; ++mma)
          scales_.with_factors(0, mma, [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sum(mma, i) *= factor; });
      }
      accumulators = sums_;
    }

   private:
    CUTLASS_DEVICE bool changes() const { return kTables > 1 && scales_.change(); }
    CUTLASS_DEVICE float& sum(int mma, int i) { return sums_(mma * Part::kValues + i); }

    // Adds the next k-tile, of the mma-th 64 rows.
    CUTLASS_DEVICE void add(Part const& x, int mma) {
      if (!changes()) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Part::kValues; ++i) sum(mma, i) += x(i);
        return;
      }
      if (mma == 0 && left_ == 0) {
        scales_.template fill<kTables>();
        scales_.template load<kTables>();
        left_ = kTables;
      }
      scales_.with_factors(kTables - left_, mma,
                           [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sum(mma, i) += factor * x(i); });
      if (mma + 1 == kMmas) --left_;
    }

    Params const& params_;
    typename Tables::template Of<Accumulators> scales_;
    int left_ = 0;  // tables that are not yet used
    Accumulators sums_;
  };
};

}  // namespace jax_streamk::sm90
