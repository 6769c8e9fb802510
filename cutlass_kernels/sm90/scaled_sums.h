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

  // Scales of a tile's rows and columns, of a few k-tiles. A thread loads those of one or two of these lines; beside
  // two there are no registers for scales that change along K (can_scale_sums() in scaled/scales.cc).
  static constexpr int kThreads = kWarpgroups * cutlass::NumThreadsPerWarpGroup,
                       kLines = (TileShape::kM + TileShape::kN + kThreads - 1) / kThreads,
                       kTables = kLines == 1 ? 8 : 1;
  struct Storage {
    alignas(16) float rows[kTables][TileShape::kM];
    alignas(16) float columns[kTables][TileShape::kN];
  };

  template <class Accumulators>
  class Of {
    using PlacesOf = Places<Accumulators, kWarpgroups>;
    static constexpr int kM = TileShape::kM, kN = TileShape::kN, kMmas = Accumulators::kMmas;
    static_assert(kM % 32 == 0);
    using Part = sm90::Accumulators<1, kN>;  // the sum of a k-tile, of 64 rows
    // Whether one of two parts is added while the other is computed. Where registers are short, other warpgroups
    // compute.
    static constexpr bool kTakesTurns = Accumulators::kValues <= (kPermutes ? 16 : 32);

   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const& params, Storage& tables, Tile const& tile, int thread, uint32_t barrier)
        : params_(params), tables_(tables), barrier_(barrier), thread_(thread), k_tile_(tile.k_begin) {
      sums_.clear();
      if (!params.any) return;
      wait_for_primary();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLines; ++i) {
        SideScales const& own = side(i);
        int32_t const line = min(is_row(i) ? tile.m * kM + index(i) : tile.n * kN + index(i) - kM, own.last);
        first_[i] = tile.batch * own.batch_stride + (own.of_tile ? own.by_block.divide(line) : line) * own.stride;
      }
      if (changes()) {
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

    // Called by the consumers of a tile, with run(a part, its fragments, which 64 rows) for the next k-tile, which
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
            int const stage = run(part, fragments, mma);
            wait_for_wgmma<0>();
            end(part, fragments, stage, mma);
          }
        }
        return;
      }
      Part other;
      Fragments of_other;
      int stage = run(part, fragments, 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > 2; count -= 2) {
        int const next = run(other, of_other, 0);
        end(part, fragments, stage, 0);
        stage = run(part, fragments, 0);
        end(other, of_other, next, 0);
      }
      if (count == 2) {
        int const next = run(other, of_other, 0);
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
      if (params_.any && !changes()) {
        fill<1>();
        CUTLASS_PRAGMA_UNROLL
        for (int mma = 0; mma < kMmas; ++mma)
          with_factors(0, mma, [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sum(mma, i) *= factor; });
      }
      accumulators = sums_;
    }

   private:
    CUTLASS_DEVICE bool changes() const { return kLines == 1 && params_.change; }
    CUTLASS_DEVICE float& sum(int mma, int i) { return sums_(mma * Part::kValues + i); }

    // Adds the next k-tile, of the mma-th 64 rows.
    CUTLASS_DEVICE void add(Part const& x, int mma) {
      if (!changes()) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Part::kValues; ++i) sum(mma, i) += x(i);
        return;
      }
      if (mma == 0 && left_ == 0) {
        fill<kTables>();
        load<kTables>();
        left_ = kTables;
      }
      with_factors(kTables - left_, mma,
                   [&](int i, float factor) CUTLASS_LAMBDA_FUNC_INLINE { sum(mma, i) += factor * x(i); });
      if (mma + 1 == kMmas) --left_;
    }

    // Calls use(i, the product of the scales of its row and its column) for each value of a part.
    template <class Use>
    CUTLASS_DEVICE void with_factors(int table, int mma, Use const& use) const {
      int const lane = threadIdx.x % 32,
                row = PlacesOf(0, 0, thread_).m + PlacesOf::along_m(mma * Part::kValues) + (kPermutes ? lane / 4 : 0);
      float rows[2] = {tables_.rows[table][row], tables_.rows[table][row + (kPermutes ? 1 : 8)]};
      if (params_.n.of_tile) {
        rows[0] *= tables_.columns[table][0], rows[1] *= tables_.columns[table][0];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Part::kValues; ++i) use(i, rows[i / 2 % 2]);
        return;
      }
      uint32_t const at = cute::cast_smem_ptr_to_uint(tables_.columns[table] + lane % 4 * 2);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Part::kValues; i += 4) {
        float of_two[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of_two[0]), "=f"(of_two[1])
                     : "r"(at + PlacesOf::along_n(i) * 4));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) use(i + j, rows[j / 2] * of_two[j % 2]);
      }
    }

    // The i-th row or column, one after the other, whose scales this thread loads, and puts into the tables later.
    CUTLASS_DEVICE int index(int i) const { return thread_ + i * kThreads; }
    CUTLASS_DEVICE bool is_row(int i) const { return index(i) < kM; }
    CUTLASS_DEVICE SideScales const& side(int i) const { return is_row(i) ? params_.m : params_.n; }

    template <int kCount>
    CUTLASS_DEVICE void load() {
      CUTLASS_PRAGMA_UNROLL
      for (int line = 0; line < kLines; ++line) {
        SideScales const& own = side(line);
        if (index(line) >= kM + kN || own.numbers.data == nullptr) continue;
        scaled::load_numbers<kCount>(
            own.numbers,
            [&](int i) {
              return first_[line] + own.by_k_tiles.divide(min(k_tile_ + i, params_.last_k_tile)) * own.stride_k;
            },
            [&](int i, uint32_t x) { raw_[line][i] = x; });
      }
      k_tile_ += kCount;
    }

    template <int kCount>
    CUTLASS_DEVICE void fill() {
      cutlass::arch::NamedBarrier::sync(kThreads, barrier_);  // all have read the tables
      CUTLASS_PRAGMA_UNROLL
      for (int line = 0; line < kLines; ++line) {
        if (index(line) >= kM + kN) continue;
        SideScales const& own = side(line);
        auto const store = [&](auto const& to_float) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kCount; ++i)
            (is_row(line) ? tables_.rows[i] : tables_.columns[i] - kM)[index(line)] = to_float(raw_[line][i]);
        };
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
    uint32_t first_[kLines];  // the scales of this thread's lines at k = 0
    int32_t k_tile_;          // whose scale is loaded next
    int left_ = 0;            // tables that are not yet used
    uint32_t raw_[kLines][kTables];
    Accumulators sums_;
  };

  template <class Accumulators, class Tile>
  static CUTLASS_DEVICE Of<Accumulators> of(Params const& params, Storage& tables, Tile const& tile, int thread,
                                            uint32_t barrier) {
    return Of<Accumulators>(params, tables, tile, thread, barrier);
  }
};

}  // namespace jax_streamk::sm90
