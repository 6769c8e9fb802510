// Sums of products of eight bits, whose operands may have scales. Tensor cores add such products with fewer bits than
// float32 has, so each k-tile is added to float32 sums, multiplied by the scales of its blocks; where these do not
// change along K, the sum of all is.
#pragma once

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/scaled/blocks.cuh"
#include "cutlass_kernels/sm90/accumulators.h"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

// The scales of the kernel's own A or B: one for each row (column of the result) or for all of a tile's.
struct SideScales {
  scaled::Numbers numbers = {};             // no data: there are none
  uint32_t batch_stride, stride, stride_k;  // elements from a block to the next
  int32_t last;                             // row or column
  bool of_tile = true;                      // whether all of a tile share them
  Divisor by_block, by_k_tiles;             // rows or columns, and k-tiles, of a block

  bool change_along_k(int32_t k_tiles) const { return numbers.data != nullptr && by_k_tiles.divide(k_tiles - 1) > 0; }
};

inline SideScales side_of(GemmProblem const& p, Buffers const& buffers, bool is_b, int32_t tile_k) {
  Scales const& scales = is_b ? p.b.scales : p.a.scales;
  if (!scales.any()) return {};
  Operand const x = p.operand(is_b ? Role::kScale : Role::kScaleOfA);
  bool const along_k = (x.major == Major::kRow) != is_b;  // in memory
  int64_t const block = is_b ? scales.columns : scales.rows, block_k = is_b ? scales.rows : scales.columns,
                extent = is_b ? p.n : p.m;
  return {{is_b ? buffers.scale : buffers.scale_of_a, scales.scale, Format(scales.scale).bits()},
          static_cast<uint32_t>(x.batch_stride),
          static_cast<uint32_t>(along_k ? x.ld : 1),
          static_cast<uint32_t>(along_k ? 1 : x.ld),
          static_cast<int32_t>(extent) - 1,
          block > 1 || extent == 1,
          Divisor(static_cast<int32_t>(block)),
          Divisor(static_cast<int32_t>((block_k + tile_k - 1) / tile_k))};
}

// kPermutes: accumulators of rows g and g + 8 are those of 2g and 2g + 1 (bytes_from_registers.h).
template <class TileShape, int kWarpgroups, bool kSwap, bool kPermutes>
struct ScaledSums {
  static constexpr bool kPromotes = true;

  struct Params {
    SideScales m, n;
    int32_t last_k_tile;
    bool any, change;           // whether there are scales, and whether they change along K
    bool m_is_e5m2, n_is_e5m2;  // or e4m3: what A and B are
  };

  static void set_up(Params& params, MainloopArguments const& x) {
    GemmProblem const& p = x.problem;
    SideScales const a = side_of(p, x.buffers, false, TileShape::kK), b = side_of(p, x.buffers, true, TileShape::kK);
    params.m = kSwap ? b : a, params.n = kSwap ? a : b;
    auto const k_tiles = static_cast<int32_t>((p.k + TileShape::kK - 1) / TileShape::kK);
    params.last_k_tile = k_tiles - 1;
    params.any = p.a.scales.any() || p.b.scales.any();
    params.change = a.change_along_k(k_tiles) || b.change_along_k(k_tiles);
    params.m_is_e5m2 = (kSwap ? p.b : p.a).format == Type::kE5M2;
    params.n_is_e5m2 = (kSwap ? p.a : p.b).format == Type::kE5M2;
  }

  // Scales of a tile's rows and columns, of a few k-tiles.
  static constexpr int kTables = 8;
  struct Storage {
    alignas(16) float rows[kTables][TileShape::kM];
    alignas(16) float columns[kTables][TileShape::kN];
  };

  template <class Accumulators>
  class Of {
    using PlacesOf = Places<Accumulators, kWarpgroups>;
    static constexpr int kThreads = kWarpgroups * cutlass::NumThreadsPerWarpGroup, kM = TileShape::kM,
                         kN = TileShape::kN;
    static_assert(kM + kN <= kThreads && kM % 32 == 0);
    // Whether one of two sums is added while the other is computed. Where registers are short, other warpgroups
    // compute.
    static constexpr bool kTakesTurns = Accumulators::kValues <= (kPermutes ? 16 : 32);

   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const& params, Storage& tables, Tile const& tile, int thread, uint32_t barrier)
        : params_(params), tables_(tables), barrier_(barrier), thread_(thread), k_tile_(tile.k_begin) {
      sums_.clear();
      if (!params.any) return;
      wait_for_primary();
      int32_t const line =
          min(is_row() ? tile.m * kM + thread : tile.n * kN + thread - kM, static_cast<int32_t>(side().last));
      first_ =
          tile.batch * side().batch_stride + (side().of_tile ? side().by_block.divide(line) : line) * side().stride;
      if (params.change) {
        load<kTables>();
      } else {
        load<1>();
      }
    }

    // Calls use() with the Fp8 of the types of A and B.
    template <class Use>
    CUTLASS_DEVICE void with_types(Use const& use) const {
      if (!params_.m_is_e5m2) return params_.n_is_e5m2 ? use(Fp8<false, true>()) : use(Fp8<false, false>());
      return params_.n_is_e5m2 ? use(Fp8<true, true>()) : use(Fp8<true, false>());
    }

    // Called by the consumers of a tile, with run(a sum, its fragments) for the next k-tile, which returns its stage
    // when the one before is done, and release(stage). `accumulators` are used as one of two sums. add_to() must
    // follow.
    template <class Fragments, class Run, class Release>
    CUTLASS_DEVICE void multiply(Accumulators& accumulators, int32_t count, Run const& run, Release const& release) {
      auto const end = [&](Accumulators& sum, Fragments& words, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
        fence(sum), words.keep();
        release(stage);
        add(sum);
      };
      Fragments fragments;
      if constexpr (!kTakesTurns) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (; count > 0; --count) {
          int const stage = run(accumulators, fragments);
          wait_for_wgmma<0>();
          end(accumulators, fragments, stage);
        }
        return;
      }
      Accumulators other;
      Fragments of_other;
      int stage = run(accumulators, fragments);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > 2; count -= 2) {
        int const next = run(other, of_other);
        end(accumulators, fragments, stage);
        stage = run(accumulators, fragments);
        end(other, of_other, next);
      }
      if (count == 2) {
        int const next = run(other, of_other);
        end(accumulators, fragments, stage);
        wait_for_wgmma<0>();
        end(other, of_other, next);
      } else {
        wait_for_wgmma<0>();
        end(accumulators, fragments, stage);
      }
    }

    // accumulators = the sum of all k-tiles.
    CUTLASS_DEVICE void add_to(Accumulators& accumulators) {
      if (params_.any && !params_.change) {
        fill<1>();
        with_factors(0, [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sums_(i) *= factor; });
      }
      accumulators = sums_;
    }

   private:
    // Adds the next k-tile.
    CUTLASS_DEVICE void add(Accumulators const& x) {
      if (!params_.change) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Accumulators::kValues; ++i) sums_(i) += x(i);
        return;
      }
      if (left_ == 0) {
        fill<kTables>();
        load<kTables>();
        left_ = kTables;
      }
      with_factors(kTables - left_, [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sums_(i) += factor * x(i); });
      --left_;
    }

    // Calls use(i, the product of the scales of its row and its column) for each accumulator.
    template <class Use>
    CUTLASS_DEVICE void with_factors(int table, Use const& use) const {
      int const lane = threadIdx.x % 32, g = lane / 4;
      int const row = kPermutes ? PlacesOf(0, 0, thread_).m + g : PlacesOf(0, 0, thread_).m;
      float rows[2 * Accumulators::kMmas];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * Accumulators::kMmas; ++i)
        rows[i] =
            tables_.rows[table]
                        [row + (kPermutes ? i : PlacesOf::along_m(i / 2 * Accumulators::kValuesPerMma + i % 2 * 2))];
      auto const row_of = [](int i) { return i / Accumulators::kValuesPerMma * 2 + i / 2 % 2; };
      uint32_t const at = cute::cast_smem_ptr_to_uint(tables_.columns[table] + lane % 4 * 2);
      if (params_.n.of_tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * Accumulators::kMmas; ++i) rows[i] *= tables_.columns[table][0];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Accumulators::kValues; ++i) use(i, rows[row_of(i)]);
        return;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Accumulators::kValuesPerMma; i += 4) {
        float of_two[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of_two[0]), "=f"(of_two[1])
                     : "r"(at + PlacesOf::along_n(i) * 4));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4 * Accumulators::kMmas; ++j) {
          int const own = j / 4 * Accumulators::kValuesPerMma + i + j % 4;
          use(own, rows[row_of(own)] * of_two[j % 2]);
        }
      }
    }

    // Each thread loads the scales of one row or column, and puts them into the tables later.
    CUTLASS_DEVICE bool is_row() const { return thread_ < kM; }
    CUTLASS_DEVICE SideScales const& side() const { return is_row() ? params_.m : params_.n; }

    template <int kCount>
    CUTLASS_DEVICE void load() {
      SideScales const& own = side();
      if (thread_ >= kM + kN || own.numbers.data == nullptr) return;
      auto const index = [&](int i) {
        return first_ + own.by_k_tiles.divide(min(k_tile_ + i, params_.last_k_tile)) * own.stride_k;
      };
      scaled::load_numbers<kCount>(own.numbers, index, [&](int i, uint32_t x) { raw_[i] = x; });
      k_tile_ += kCount;
    }

    template <int kCount>
    CUTLASS_DEVICE void fill() {
      cutlass::arch::NamedBarrier::sync(kThreads, barrier_);  // all have read the tables
      SideScales const& own = side();
      auto const store = [&](auto const& to_float) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          float* const table = is_row() ? tables_.rows[i] : tables_.columns[i] - kM;
          table[thread_] = to_float(raw_[i]);
        }
      };
      if (thread_ < kM + kN) {
        if (own.numbers.data == nullptr) {
          store([](uint32_t) { return 1.0f; });
        } else {
          scaled::with_type(own.numbers.type, store);
        }
      }
      cutlass::arch::NamedBarrier::sync(kThreads, barrier_);
    }

    Params const& params_;
    Storage& tables_;
    uint32_t const barrier_;
    int const thread_;
    uint32_t first_ = 0;  // the scale of this thread's row or column at k = 0
    int32_t k_tile_;      // whose scale is loaded next
    int left_ = 0;        // tables that are not yet used
    uint32_t raw_[kTables];
    Accumulators sums_;
  };

  template <class Accumulators, class Tile>
  static CUTLASS_DEVICE Of<Accumulators> of(Params const& params, Storage& tables, Tile const& tile, int thread,
                                            uint32_t barrier) {
    return Of<Accumulators>(params, tables, tile, thread, barrier);
  }
};

}  // namespace jax_streamk::sm90
