// The main loop: wait for an empty stage, load a k-tile of A and of B into it, next; and in other warps, wait for a
// full stage, multiply, release it. operands/stage_layout.h says how operands lie in a stage and are loaded, sums.h how
// products are summed. CuTe's layouts could say the same, but it takes a compiler half of a kernel's time to work them
// out.
#pragma once

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/launch/policy.h"
#include "cutlass_kernels/sm90/accumulators.h"
#include "cutlass_kernels/sm90/operands/bytes_from_registers.h"
#include "cutlass_kernels/sm90/operands/from_registers.h"
#include "cutlass_kernels/sm90/operands/from_shared.h"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/sums.h"

namespace jax_streamk::sm90 {

// What the loads of a launch depend on. Small, because the first load waits for all parameters before it.
struct Loads {
  HeldBack held_back;
  int32_t batch = 1, part = 0;  // batches of the problem; k-tiles of one TF32 part of a split f32 operand, else 0
  Divisor by_batch;
  // High words of the L2 eviction hints of A and B (LaunchPolicy); the low words are zero.
  uint32_t hint_a = hint(false), hint_b = hint(false);
  bool early_a = false, early_b = false;  // whether A and B are there while the kernel before still runs
  static uint32_t hint(bool goes_first) {
    using Hint = cute::TMA::CacheHintSm90;
    static_assert((static_cast<uint64_t>(Hint::EVICT_FIRST) | static_cast<uint64_t>(Hint::EVICT_NORMAL)) << 32 == 0);
    return static_cast<uint64_t>(goes_first ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL) >> 32;
  }
};

// Which k-tiles of A and of B are multiplied.
struct KTiles {
  int32_t a, b;
};
struct InOrder {
  static CUTLASS_DEVICE KTiles at(int32_t k_tile, Loads const&) { return {k_tile, k_tile}; }
};
// Of f32 operands that are two TF32 parts side by side (repack.h), A (small, large) and B (large, small): after these
// two products comes large x large.
struct OfSplitF32 {
  static CUTLASS_DEVICE KTiles at(int32_t k_tile, Loads const& loads) {
    bool const again = k_tile >= 2 * loads.part;
    return {again ? k_tile - loads.part : k_tile, again ? k_tile - 2 * loads.part : k_tile};
  }
};

// kWarpgroups_ share a tile. kAFromRegisters_: A goes through registers. kNarrows: of a ragged product whose tiles are
// runs of rows, fewer columns may be multiplied.
//
// kSlices: a batch may be a slice of K. The kernel's batch index is then slice * batches + batch, and its K is that of
// a slice; TMA reads zeros beyond the last one.
template <class StageLayout_, int kWarpgroups_, bool kAFromRegisters_, class OperandA_, class OperandB_, class Order,
          class Sums_, bool kSlices, bool kNarrows>
struct TileMainloop {
  using Layout = StageLayout_;
  using OperandA = OperandA_;
  using OperandB = OperandB_;
  using Sums = Sums_;
  using TensorStorage = typename Layout::Storage;
  using TileShape = typename Layout::TileShape;
  static constexpr int kStages = Layout::kStages, kTileN = Layout::kTileN, kWarpgroups = kWarpgroups_;
  using Element = typename Layout::ElementA;
  static constexpr bool kAFromRegisters = kAFromRegisters_, kBytes = sizeof(Element) == 1;
  using Fragments = ByteFragments<kBytes && kAFromRegisters ? Layout::kTileK / 32 : 0>;
  using Stage = StageState<kStages>;
  using Accumulators = sm90::Accumulators<Layout::kTileM / (64 * kWarpgroups), kTileN, typename Sums::Value>;
  // How many k-tiles before a tile's end the next one is asked for: about as long as the counter takes.
  static constexpr int32_t kAhead = 8;
  static constexpr int kStageBytes = OperandA::kLoadedBytes + Layout::kBytesB;

  struct Params : OperandA::Params, OperandB::Params, Sums::Params {};

  static CUresult set_up(Params& params, MainloopArguments const& arguments) {
    Sums::set_up(params, arguments);
    CUresult const result = OperandA::set_up(params, arguments);
    return result == CUDA_SUCCESS ? OperandB::set_up(params, arguments) : result;
  }

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    OperandA::prefetch(params);
    OperandB::prefetch(params);
  }

  // Turns a tile of a slice, whose K has `k_tiles`, into the batch and the first k-tile of A and B that it reads.
  template <class Tile>
  static CUTLASS_DEVICE void locate(Loads const& loads, int32_t k_tiles, Tile& tile) {
    if constexpr (kSlices) {
      int32_t const slice = loads.by_batch.divide(tile.batch);
      tile.batch -= slice * loads.batch;
      tile.k_begin += slice * k_tiles;
    }
  }

  // Called by one thread: loads the k-tiles of a located `tile` into stages as these become empty. Calls `near_the_end`
  // once, kAhead k-tiles before the tile's end. `gathers`: other threads load B.
  template <class Tile, class NearTheEnd>
  static CUTLASS_DEVICE void load(Params const& params, Loads const& loads, Tile const& tile, int32_t held_back,
                                  bool gathers, FullBarrier* full, EmptyBarrier* empty, Stage& stage,
                                  TensorStorage& storage, NearTheEnd const& near_the_end) {
    ClusterPlace<Layout::kClusterM, Layout::kClusterN> const place;
    auto const load_a = OperandA::loader(params, tile, place, storage);
    auto const load_b = OperandB::loader(params, tile, place, storage);
    uint64_t const hint_a = uint64_t{loads.hint_a} << 32, hint_b = uint64_t{loads.hint_b} << 32;
    int32_t k_tile = tile.k_begin, left = tile.k_count;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      int const s = stage.index();
      if (left == min(tile.k_count, kAhead)) near_the_end();
      wait_for_empty(empty, stage, held_back);
      full[s].arrive_and_expect_tx(gathers ? kStageBytes - Layout::kBytesB : kStageBytes);
      auto& barrier = *reinterpret_cast<uint64_t*>(&full[s]);
      KTiles const k_tiles = Order::at(k_tile, loads);
      load_a(barrier, hint_a, k_tiles.a, s);
      if (!gathers) load_b(barrier, hint_b, k_tiles.b, s);
      ++k_tile, ++stage;
    } while (--left > 0);
  }

  // Called by one thread, before and after the kernel before has ended: loads the early operands of a located tile's
  // first k-tiles into empty stages, as many as there are, and then the others.
  template <class Tile>
  static CUTLASS_DEVICE int32_t load_early(Params const& params, Loads const& loads, Tile const& tile,
                                           FullBarrier* full, Stage stage, TensorStorage& storage) {
    int32_t const count = min(tile.k_count, kStages);
    load_some(params, loads, tile, count, loads.early_a, loads.early_b, full, stage, storage,
              [&](int s) { full[s].arrive_and_expect_tx(kStageBytes); });
    return count;
  }
  template <class Tile>
  static CUTLASS_DEVICE void load_late(Params const& params, Loads const& loads, Tile const& tile, int32_t count,
                                       FullBarrier* full, Stage& stage, TensorStorage& storage) {
    load_some(params, loads, tile, count, !loads.early_a, !loads.early_b, full, stage, storage, [](int) {});
  }

  // The sums of a tile, for a thread among those that share it and a named barrier of these.
  template <class Tile>
  static CUTLASS_DEVICE auto sums_of(Params const& params, Loads const& loads, int32_t k_tiles,
                                     typename Sums::Storage& storage, Tile tile, int thread, uint32_t barrier) {
    locate(loads, k_tiles, tile);
    return typename Sums::template Of<Accumulators>(params, storage, tile, thread, barrier);
  }

  // Called by the consumers of a tile: accumulators + sums = the sum over `count` k-tiles. Of a run of rows only the
  // first `columns` need be. `gathered`: threads wrote B. Returns the stage that the products in flight read (-1:
  // none). finish() must follow: it waits for them, releases the stage and adds the sums.
  template <class SumsOf>
  static CUTLASS_DEVICE int multiply(FullBarrier* full, EmptyBarrier* empty, Stage& stage, Accumulators& accumulators,
                                     SumsOf& sums, bool promotes, int32_t count, int32_t columns, bool gathered,
                                     int warpgroup, TensorStorage& storage) {
    if constexpr (kNarrows) {
      static_assert(!Sums::kPromotes && !kAFromRegisters);
      int unreleased = -1;
      auto const narrow = [&](auto eighths) CUTLASS_LAMBDA_FUNC_INLINE {
        constexpr int kN = kTileN * eighths() / 8;
        if constexpr (kN % 8 == 0) {
          if (columns > kN) return false;
          unreleased = multiply_from_shared<TileMainloop, kN, Element>(full, empty, stage, accumulators, count,
                                                                       gathered, warpgroup, storage);
          return true;
        }
        return false;
      };
      if (narrow(std::integral_constant<int, 4>()) || narrow(std::integral_constant<int, 6>()) ||
          narrow(std::integral_constant<int, 7>()))
        return unreleased;
    }
    if constexpr (Sums::kInTensorCores && !kAFromRegisters) {
      int const unreleased = multiply_from_shared<TileMainloop, kTileN, typename Sums::Numbers>(
          full, empty, stage, sums.in_tensor_cores(), count, gathered, warpgroup, storage);
      drain(empty, sums.in_tensor_cores(), unreleased);
      return -1;
    } else if constexpr (kBytes) {
      sums.with_types([&](auto numbers) CUTLASS_LAMBDA_FUNC_INLINE {
        using Numbers = decltype(numbers);
        // Of the mma-th 64 rows of this warpgroup's.
        auto const run = [&](auto& sum, Fragments& fragments, int mma, int32_t accumulate) CUTLASS_LAMBDA_FUNC_INLINE {
          bool const is_last = mma + 1 == Accumulators::kMmas;
          Stage again = stage;
          Stage& at = is_last ? stage : again;
          int const block = mma * kWarpgroups + warpgroup;
          if constexpr (kAFromRegisters) {
            return multiply_bytes_from_registers<TileMainloop, Numbers>(full, at, sum, fragments, block, storage,
                                                                        accumulate);
          } else {
            return multiply_from_shared<TileMainloop, kTileN, Numbers>(full, empty, at, sum, 1, gathered, block,
                                                                       storage);
          }
        };
        auto const release_one = [&](int stage) CUTLASS_LAMBDA_FUNC_INLINE { release(empty[stage]); };
        sums.template multiply<Fragments>(count, run, release_one);
      });
      return -1;
    } else {
      auto const run = [&](int32_t k_tiles) CUTLASS_LAMBDA_FUNC_INLINE {
        if constexpr (kAFromRegisters) {
          return multiply_from_registers<TileMainloop>(full, empty, stage, accumulators, k_tiles, warpgroup, storage);
        } else {
          return multiply_from_shared<TileMainloop, kTileN, Element>(full, empty, stage, accumulators, k_tiles,
                                                                     gathered, warpgroup, storage);
        }
      };
      auto const wait = [&](int unreleased) CUTLASS_LAMBDA_FUNC_INLINE { drain(empty, accumulators, unreleased); };
      return Sums::multiply(accumulators, sums, promotes, count, run, wait);
    }
  }

  template <class SumsOf>
  static CUTLASS_DEVICE void finish(EmptyBarrier* empty, Accumulators& accumulators, SumsOf& sums, int unreleased) {
    if constexpr (!kBytes) drain(empty, accumulators, unreleased);  // else multiply() did
    sums.add_to(accumulators);
    if constexpr (kBytes && kAFromRegisters) order_rows(accumulators);
  }

  static CUTLASS_DEVICE void release(EmptyBarrier const& empty) {
    release_stage<Layout::kClusterM, Layout::kClusterN>(empty);
  }

 private:
  template <class Tile, class Begin>
  static CUTLASS_DEVICE void load_some(Params const& params, Loads const& loads, Tile const& tile, int32_t count,
                                       bool with_a, bool with_b, FullBarrier* full, Stage& stage,
                                       TensorStorage& storage, Begin const& begin) {
    ClusterPlace<Layout::kClusterM, Layout::kClusterN> const place;
    auto const load_a = OperandA::loader(params, tile, place, storage);
    auto const load_b = OperandB::loader(params, tile, place, storage);
    uint64_t const hint_a = uint64_t{loads.hint_a} << 32, hint_b = uint64_t{loads.hint_b} << 32;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t i = 0; i < count; ++i, ++stage) {
      int const s = stage.index();
      begin(s);
      auto& barrier = *reinterpret_cast<uint64_t*>(&full[s]);
      KTiles const k_tiles = Order::at(tile.k_begin + i, loads);
      if (with_a) load_a(barrier, hint_a, k_tiles.a, s);
      if (with_b) load_b(barrier, hint_b, k_tiles.b, s);
    }
  }

  // Holding back h stages means waiting for the stage h ahead. This stage was then waited for earlier, or never filled.
  static CUTLASS_DEVICE void wait_for_empty(EmptyBarrier* empty, Stage const& stage, int32_t held_back) {
    int const s = stage.index();
    bool const wraps = s + held_back >= kStages;
    empty[s + held_back - (wraps ? kStages : 0)].wait(stage.phase() ^ wraps);
  }

  // Waits for all products and releases the stage that they read.
  template <class AnyAccumulators>
  static CUTLASS_DEVICE void drain(EmptyBarrier* empty, AnyAccumulators& accumulators, int unreleased) {
    wait_for_wgmma<0>();
    fence(accumulators);
    if (unreleased >= 0) release(empty[unreleased]);
  }
};

}  // namespace jax_streamk::sm90
