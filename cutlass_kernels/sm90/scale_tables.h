// The scales of a tile's rows and columns, by which sums of its products are multiplied.
#pragma once

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/scaled/blocks.cuh"
#include "cutlass_kernels/sm90/accumulators.h"
#include "cutlass_kernels/sm90/operands/stage_layout.h"

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

// Scales in shared memory, of up to kTables k-tiles at a time. kPermutes: accumulators of rows g and g + 8 are those of
// 2g and 2g + 1 (bytes_from_registers.h). kRun: a tile's columns begin at any row of a ragged product's A (tile.from).
template <class TileShape, int kWarpgroups, bool kSwap, bool kPermutes, bool kRun, int kTables>
struct ScaleTables {
  static constexpr int kThreads = kWarpgroups * cutlass::NumThreadsPerWarpGroup,
                       kLines = (TileShape::kM + TileShape::kN + kThreads - 1) / kThreads;  // that a thread loads

  struct Params {
    SideScales m, n;
    int32_t last_k_tile, last_batch;
    bool any, change;  // whether there are scales, and whether they change along K
  };
  struct Storage {
    alignas(16) float rows[kTables][TileShape::kM];
    alignas(16) float columns[kTables][TileShape::kN];
  };

  static void set_up(Params& params, MainloopArguments const& x) {
    GemmProblem const& p = x.problem;
    SideScales const a = side_of(p, x.buffers, false, TileShape::kK), b = side_of(p, x.buffers, true, TileShape::kK);
    params.m = kSwap ? b : a, params.n = kSwap ? a : b;
    auto const k_tiles = static_cast<int32_t>((p.k + TileShape::kK - 1) / TileShape::kK);
    params.last_k_tile = k_tiles - 1, params.last_batch = static_cast<int32_t>(p.batch) - 1;
    params.any = p.a.scales.any() || p.b.scales.any();
    params.change = a.change_along_k(k_tiles) || b.change_along_k(k_tiles);
  }

  // Of a tile, for the threads that share it and a named barrier. load() the scales of the next k-tiles, then fill()
  // the tables with them.
  template <class Accumulators>
  class Of {
    using PlacesOf = Places<Accumulators, kWarpgroups>;
    static constexpr int kM = TileShape::kM, kN = TileShape::kN, kValuesPerMma = Accumulators::kValuesPerMma;
    static_assert(kM % 32 == 0);

   public:
    template <class Tile>
    CUTLASS_DEVICE Of(Params const& params, Storage& tables, Tile const& tile, int thread, uint32_t barrier)
        : params_(params), tables_(tables), barrier_(barrier), thread_(thread), k_tile_(tile.k_begin) {
      if (!params.any) return;
      wait_for_primary();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLines; ++i) {
        SideScales const& own = side(i);
        int32_t const line = min(is_row(i) ? tile.m * kM + index(i) : first_column(tile) + index(i) - kM, own.last);
        // Rows in no group are those of none.
        first_[i] = (kRun ? min(tile.batch, params.last_batch) : tile.batch) * own.batch_stride +
                    (own.of_tile ? own.by_block.divide(line) : line) * own.stride;
      }
    }

    CUTLASS_DEVICE bool any() const { return params_.any; }
    CUTLASS_DEVICE bool change() const { return params_.change; }

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
          for (int i = 0; i < kCount; ++i)  // one index for both tables: with two, ptxas spills
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

    // Calls use(i, the product of the scales of its row and its column) for each value of the mma-th 64 rows.
    template <class Use>
    CUTLASS_DEVICE void with_factors(int table, int mma, Use const& use) const {
      int const lane = threadIdx.x % 32,
                row = PlacesOf(0, 0, thread_).m + PlacesOf::along_m(mma * kValuesPerMma) + (kPermutes ? lane / 4 : 0);
      float rows[2] = {tables_.rows[table][row], tables_.rows[table][row + (kPermutes ? 1 : 8)]};
      if (params_.n.of_tile) {
        rows[0] *= tables_.columns[table][0], rows[1] *= tables_.columns[table][0];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValuesPerMma; ++i) use(i, rows[i / 2 % 2]);
        return;
      }
      uint32_t const at = cute::cast_smem_ptr_to_uint(tables_.columns[table] + lane % 4 * 2);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValuesPerMma; i += 4) {
        float of_two[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of_two[0]), "=f"(of_two[1])
                     : "r"(at + PlacesOf::along_n(i) * 4));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) use(i + j, rows[j / 2] * of_two[j % 2]);
      }
    }

   private:
    template <class Tile>
    static CUTLASS_DEVICE int32_t first_column(Tile const& tile) {
      if constexpr (kRun) return tile.from;
      if constexpr (!kRun) return tile.n * kN;
    }

    // The i-th row or column, one after the other, whose scales this thread loads, and puts into the tables later.
    CUTLASS_DEVICE int index(int i) const { return thread_ + i * kThreads; }
    CUTLASS_DEVICE bool is_row(int i) const { return index(i) < kM; }
    CUTLASS_DEVICE SideScales const& side(int i) const { return is_row(i) ? params_.m : params_.n; }

    Params const& params_;
    Storage& tables_;
    uint32_t const barrier_;
    int const thread_;
    uint32_t first_[kLines];  // the scales of this thread's lines at k = 0
    int32_t k_tile_;          // whose scale is loaded next
    uint32_t raw_[kLines][kTables];
  };
};

}  // namespace jax_streamk::sm90
