// Sums of products of eight bits, whose operands may have scales. Tensor cores add such products with fewer bits than
// float32 has, so that runs of one k-tile are promoted, each multiplied by the scales of its blocks; where these do not
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
    bool change;                // whether scales change along K
    bool m_is_e5m2, n_is_e5m2;  // or e4m3: what A and B are
  };

  static void set_up(Params& params, MainloopArguments const& x) {
    GemmProblem const& p = x.problem;
    SideScales const a = side_of(p, x.buffers, false, TileShape::kK), b = side_of(p, x.buffers, true, TileShape::kK);
    params.m = kSwap ? b : a, params.n = kSwap ? a : b;
    auto const k_tiles = static_cast<int32_t>((p.k + TileShape::kK - 1) / TileShape::kK);
    params.change = a.change_along_k(k_tiles) || b.change_along_k(k_tiles);
    params.m_is_e5m2 = (kSwap ? p.b : p.a).format == Type::kE5M2;
    params.n_is_e5m2 = (kSwap ? p.a : p.b).format == Type::kE5M2;
  }

  // Scales of a tile's columns: of one k-tile, and of the next while some threads still read those.
  struct Storage {
    alignas(16) float columns[kWarpgroups][2][TileShape::kN];
  };

  template <class Accumulators>
  class Of {
    using PlacesOf = Places<Accumulators, kWarpgroups>;
    static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup, kRows = 2 * Accumulators::kMmas,
                         kOwn = (TileShape::kN + kThreads - 1) / kThreads;  // columns whose scales a thread loads

   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const& params, Storage& storage, Tile const& tile, int thread, uint32_t barrier)
        : params_(params),
          columns_(storage.columns[thread / kThreads]),
          barrier_(barrier),
          thread_(thread % kThreads),
          m_(PlacesOf(tile.m * TileShape::kM, 0, thread).m + (kPermutes ? thread % 32 / 4 : 0)),
          n_(tile.n * TileShape::kN),
          batch_(tile.batch),
          k_tile_(tile.k_begin) {
      sums_.clear();
      if (params.m.numbers.data != nullptr || params.n.numbers.data != nullptr) wait_for_primary();
    }

    // Calls use() with the Fp8 of the types of A and B.
    template <class Use>
    CUTLASS_DEVICE int with_types(Use const& use) const {
      if (!params_.m_is_e5m2) return params_.n_is_e5m2 ? use(Fp8<false, true>()) : use(Fp8<false, false>());
      return params_.n_is_e5m2 ? use(Fp8<true, true>()) : use(Fp8<true, false>());
    }

    CUTLASS_DEVICE bool change() const { return params_.change; }

    // Loads the scales of the next k-tile.
    CUTLASS_DEVICE void load() {
      load(rows_, params_.m, m_,
           [](int i) { return kPermutes ? i : PlacesOf::along_m(i / 2 * Accumulators::kValuesPerMma + i % 2 * 2); });
      load(own_, params_.n, n_, [&](int i) { return thread_ + i * kThreads; });
      ++k_tile_;
    }

    CUTLASS_DEVICE void add(Accumulators const& accumulators) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Accumulators::kValues; ++i) sums_(i) += accumulators(i);
    }
    CUTLASS_DEVICE void add_scaled(Accumulators const& accumulators) {
      with_factors([&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sums_(i) += factor * accumulators(i); });
    }
    CUTLASS_DEVICE void add_to(Accumulators& accumulators) {
      if (params_.change) {
        add_scaled(accumulators);
        accumulators = sums_;
      } else {
        add(accumulators);
        with_factors([&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { accumulators(i) = factor * sums_(i); });
      }
    }

   private:
    // Calls use(i, the product of the scales of its row and its column) for each accumulator.
    template <class Use>
    CUTLASS_DEVICE void with_factors(Use const& use) {
      auto const row_of = [](int i) { return i / Accumulators::kValuesPerMma * 2 + i / 2 % 2; };
      if (params_.n.of_tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows; ++i) rows_[i] *= own_[0];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Accumulators::kValues; ++i) use(i, rows_[row_of(i)]);
        return;
      }
      float* const columns = columns_[k_tile_ % 2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        if (int const column = thread_ + i * kThreads; column < TileShape::kN) columns[column] = own_[i];
      }
      cutlass::arch::NamedBarrier::sync(kThreads, barrier_);
      uint32_t const at = cute::cast_smem_ptr_to_uint(columns + threadIdx.x % 4 * 2);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Accumulators::kValuesPerMma; i += 4) {
        float of_two[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of_two[0]), "=f"(of_two[1])
                     : "r"(at + PlacesOf::along_n(i) * 4));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4 * Accumulators::kMmas; ++j) {
          int const own = j / 4 * Accumulators::kValuesPerMma + i + j % 4;
          use(own, rows_[row_of(own)] * of_two[j % 2]);
        }
      }
    }

    template <int kCount, class Along>
    CUTLASS_DEVICE void load(float (&to)[kCount], SideScales const& side, int32_t first, Along const& along) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) to[i] = 1;
      if (side.numbers.data == nullptr) return;
      uint32_t const base = batch_ * side.batch_stride + side.by_k_tiles.divide(k_tile_) * side.stride_k;
      uint32_t raw[kCount];
      scaled::load_numbers<kCount>(
          side.numbers,
          [&](int i) {
            int32_t const at = min(first + (side.of_tile ? 0 : along(i)), side.last);
            return base + (side.of_tile ? side.by_block.divide(at) : at) * side.stride;
          },
          [&](int i, uint32_t x) { raw[i] = x; });
      scaled::with_type(side.numbers.type, [&](auto to_float) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) to[i] = to_float(raw[i]);
      });
    }

    Params const& params_;
    float (&columns_)[2][TileShape::kN];
    uint32_t const barrier_;
    int const thread_;             // of the warpgroup
    int32_t const m_, n_, batch_;  // the first row of this thread, and column of the tile
    int32_t k_tile_;
    Accumulators sums_;
    float rows_[kRows], own_[kOwn];
  };

  template <class Accumulators, class Tile>
  static CUTLASS_DEVICE Of<Accumulators> of(Params const& params, Storage& storage, Tile const& tile, int thread,
                                            uint32_t barrier) {
    return Of<Accumulators>(params, storage, tile, thread, barrier);
  }

  template <class Accumulators, class Run, class Drain>
  static CUTLASS_DEVICE int multiply(Accumulators& accumulators, Of<Accumulators>& sums, bool, int32_t count,
                                     Run const& run, Drain const& drain) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 1; --count) {
      if (sums.change()) sums.load();
      drain(run(1));
      if (sums.change()) {
        sums.add_scaled(accumulators);
      } else {
        sums.add(accumulators);
      }
    }
    sums.load();
    return run(1);
  }
};

}  // namespace jax_streamk::sm90
