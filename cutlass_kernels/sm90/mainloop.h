// The main loop: how a tile's operands get into the stages of shared memory, and which loop multiplies them there.
// Shared-memory layouts, TMA copies and wgmma are those of CUTLASS's collective; the loops are ours.
#pragma once

#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/launch/policy.h"
#include "cutlass_kernels/sm90/collective.h"
#include "cutlass_kernels/sm90/operand_registers.h"
#include "cutlass_kernels/sm90/operand_shared.h"
#include "cutlass_kernels/sm90/promotion.h"
#include "cutlass_kernels/sm90/ragged.h"
#include "cutlass_kernels/sm90/stages.h"
#include "cutlass_kernels/sm90/tma.h"
#include "cutlass_kernels/sm90/transposition.h"

namespace jax_streamk::sm90 {

// What the loads of a launch depend on. Small, because the first load waits for all parameters before it.
struct Loads {
  HeldBack held_back;
  int32_t batch = 1, part = 0;  // batches of the problem; k-tiles of one TF32 part of a split f32 operand, else 0
  Divisor by_batch;
  // High words of the L2 eviction hints of A and B (LaunchPolicy); the low words are zero.
  using Hint = cute::TMA::CacheHintSm90;
  static_assert((static_cast<uint64_t>(Hint::EVICT_FIRST) | static_cast<uint64_t>(Hint::EVICT_NORMAL)) << 32 == 0);
  uint32_t hint_a = hint(false), hint_b = hint(false);
  static uint32_t hint(bool goes_first) {
    return static_cast<uint64_t>(goes_first ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL) >> 32;
  }
};

// OwnMma multiplies tiles of OwnShape. Base is the collective of a tile with as many or more columns, because CUTLASS
// lacks a good layout for some widths; only OwnShape's columns are loaded and multiplied. An N-major B comes in boxes
// of 64 columns, since TMA takes as long for a row of 32 bytes as for one of 128; the last box may be narrower. A
// K-major B comes in boxes with fewer rows.
//
// kSlices: a batch may be a slice of K. The kernel's batch index is then slice * batches + batch, and its K is that of
// a slice; TMA reads zeros beyond the last one. kSplits: each f32 operand is two TF32 parts side by side (repack.h).
// kPromotionK: the length of K after which sums are promoted; 0: never. kGated: half of A's rows come from each of two
// matrices, both loaded from the tile's half of D's columns (gated_epilogue.h). kJoined: A's rows are those of two or
// three matrices, each of whole tiles but the last. kRagged: a tile begins at any row of B,
// which is the problem's A, or reads a run of K (ragged.h); Narrow::WideMma<n> multiplies the first n of its columns.
template <class Base, class OwnMma, class Narrow, class OwnShape, bool kSlices, bool kSplits, int kPromotionK,
          bool kGated, bool kJoined, Ragged kRagged>
struct CollectiveMainloop : Base {
  using typename Base::TensorStorage;
  using TileShape = OwnShape;
  using TiledMma = OwnMma;
  using LoadedMma = typename Base::TiledMma;
  static constexpr int kStages = Base::DispatchPolicy::Stages;
  using Stage = StageState<kStages>;
  static constexpr bool kAFromRegisters =
      !cute::is_base_of<cute::GMMA::DescriptorIterator, typename TiledMma::FrgTypeA>::value;
  static constexpr bool kPromotes = kPromotionK > 0;
  // How many k-tiles before a tile's end the next one is asked for: about as long as the counter takes.
  static constexpr int32_t kAhead = 8;
  // How many before it the next one's indices are: by then the counter has answered, and memory has time to.
  static constexpr int32_t kIndicesAhead = 3;
  static constexpr int kClusterM = cute::size<0>(typename Base::DispatchPolicy::ClusterShape{});
  static constexpr int kClusterN = cute::size<1>(typename Base::DispatchPolicy::ClusterShape{});

  using ElementB = typename Base::InternalElementB;
  static constexpr int kTileN = cute::size<1>(TileShape{}), kTileK = cute::size<2>(TileShape{}),
                       kLaidOutN = cute::size<1>(typename Base::TileShape{});
  static constexpr bool kBIsNMajor = cute::is_static<cute::tuple_element_t<0, typename Base::StrideB>>::value;
  static constexpr int kRowBytes = 128, kRowElements = kRowBytes / sizeof(ElementB);  // rows of B in shared memory
  // N-major B: the columns of the tile's last box if it is narrower than the others, else 0.
  static constexpr int kLastBoxColumns = kBIsNMajor && kLaidOutN != kTileN ? kTileN % kRowElements : 0;
  // K-major B: by how many rows a CTA's share of the multicast B is smaller than Base's.
  static constexpr int kRowsLess = kBIsNMajor ? 0 : (kLaidOutN - kTileN) / kClusterM;
  static_assert(kBIsNMajor || kRowsLess * kClusterM == kLaidOutN - kTileN);
  static constexpr int kStageBytes = Base::TmaTransactionBytes - (kLaidOutN - kTileN) * kTileK * sizeof(ElementB);

  // Whether threads transpose B between TMA and wgmma.
  static constexpr bool kTransposes = kAFromRegisters && kBIsNMajor;
  static constexpr int kTransposers = 2;  // warps
  static_assert(!kTransposes ||
                (kTileK == BlockTransposer::kBlock && kTileN % (kTransposers * BlockTransposer::kBlock) == 0 &&
                 kLaidOutN == kTileN && kRagged == Ragged::kNone));

  // Whether threads can copy rows of B that lie anywhere, so that TMA loads only A. For more columns the warpgroup that
  // loads has too few registers.
  static constexpr bool kMayGather = kRagged == Ragged::kM && kTileN <= 128;
  static constexpr int kBytesB = kTileN * kTileK * sizeof(ElementB);  // of a stage
  // They copy 8 rows of 128 bytes at once, a warp 4 of these.
  static constexpr int kGatherThreads = 64, kRowsAtOnce = kGatherThreads * 16 / kRowBytes;

  struct Arguments : Base::Arguments {
    int32_t k, batch;               // extents of A and B in memory, not those of a slice
    void const* up;                 // the second A of a gated or joined product
    int32_t const* indices;         // which row of B each column of the product reads, or null
    int32_t columns;                // number of indices
    void const* third;              // of a joined product, A's third matrix
    int32_t second_row, third_row;  // of a joined product's A, where these begin; 0: there is no third
  };
  struct LastBox {
    typename Base::Params::TMA_B tma_load_last;
  };
  struct NoLastBox {};
  struct GatedMaps {
    cute::TmaDescriptor gate, up;
  };
  struct NoGatedMaps {};
  struct JoinedMaps {
    cute::TmaDescriptor matrices[3];
    int32_t second_tile, third_tile;
  };
  struct NoJoinedMaps {};
  struct RunMaps {
    cute::TmaDescriptor run_a, run_b;
  };
  struct NoRunMaps {};
  struct GatheredRows {
    char const* rows;
    int32_t const* indices;
    uint32_t row_pieces;  // 16-byte pieces from a row to the next
    int32_t k, last_row, last_index;
  };
  struct NoGatheredRows {};
  struct Params : Base::Params,
                  std::conditional_t<(kLastBoxColumns > 0), LastBox, NoLastBox>,
                  std::conditional_t<kGated, GatedMaps, NoGatedMaps>,
                  std::conditional_t<kJoined, JoinedMaps, NoJoinedMaps>,
                  std::conditional_t<kRagged == Ragged::kK, RunMaps, NoRunMaps>,
                  std::conditional_t<kMayGather, GatheredRows, NoGatheredRows> {};

  template <class ProblemShape>
  static CUresult set_up(Params& params, ProblemShape const& shape, Arguments const& arguments) {
    auto const whole = cute::make_shape(cute::get<0>(shape), cute::get<1>(shape), arguments.k, arguments.batch);
    static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(whole, arguments, nullptr);
    if constexpr (kGated) {
      if (CUresult const result = encode_gated(params.gate, whole, arguments, arguments.ptr_A); result != CUDA_SUCCESS)
        return result;
      if (CUresult const result = encode_gated(params.up, whole, arguments, arguments.up); result != CUDA_SUCCESS)
        return result;
    }
    if constexpr (kJoined) {
      int32_t const rows = cute::get<0>(shape), third = arguments.third_row != 0 ? arguments.third_row : rows;
      params.second_tile = arguments.second_row / kTileM, params.third_tile = (third + kTileM - 1) / kTileM;
      int32_t const ends[] = {arguments.second_row, third, rows};
      void const* const matrices[] = {arguments.ptr_A, arguments.up, arguments.third};
      for (int i = 0; i < (arguments.third_row != 0 ? 3 : 2); ++i) {
        CUresult const result =
            encode_joined(params.matrices[i], matrices[i], ends[i] - (i > 0 ? ends[i - 1] : 0), arguments);
        if (result != CUDA_SUCCESS) return result;
      }
    }
    int64_t const columns = cute::get<1>(shape);
    auto const [along_n, along_k, batch_stride] = arguments.dB;
    if constexpr (kMayGather) {
      params.rows = reinterpret_cast<char const*>(arguments.ptr_B), params.indices = arguments.indices;
      params.row_pieces = static_cast<uint32_t>(along_n * sizeof(ElementB) / 16);
      params.k = arguments.k;
      params.last_row = static_cast<int32_t>(columns) - 1, params.last_index = arguments.columns - 1;
    }
    if constexpr (kRagged == Ragged::kK) {
      CUresult const result = RowRun::encode<ElementA>(params.run_a, arguments.ptr_A, cute::get<0>(shape),
                                                       cute::get<1>(arguments.dA), kRowElements, kTileK, kRowBytes);
      if (result != CUDA_SUCCESS) return result;
      return RowRun::encode<ElementB>(params.run_b, arguments.ptr_B, columns, along_k, kRowElements, kTileK, kRowBytes);
    }
    if constexpr (kLastBoxColumns > 0) {
      params.tma_load_last = params.tma_load_b;
      return encode_tensor_map<ElementB>(params.tma_load_last.tma_desc_, arguments.ptr_B, columns, arguments.k,
                                         arguments.batch, along_k, batch_stride, kLastBoxColumns, kTileK / kClusterM,
                                         kRowBytes);
    } else if constexpr (kRowsLess > 0) {
      return encode_tensor_map<ElementB>(params.tma_load_b.tma_desc_, arguments.ptr_B, arguments.k, columns,
                                         arguments.batch, along_n, batch_stride, kRowElements, kTileN / kClusterM,
                                         kRowBytes);
    }
    return CUDA_SUCCESS;
  }

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    if constexpr (kGated) {
      cute::prefetch_tma_descriptor(&params.gate);
      cute::prefetch_tma_descriptor(&params.up);
      cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
    } else if constexpr (kJoined) {
      cute::prefetch_tma_descriptor(&params.matrices[0]);
      cute::prefetch_tma_descriptor(&params.matrices[1]);
      cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
    } else if constexpr (kRagged == Ragged::kK) {
      cute::prefetch_tma_descriptor(&params.run_a);
      cute::prefetch_tma_descriptor(&params.run_b);
    } else {
      Base::prefetch_tma_descriptors(params);
    }
    if constexpr (kLastBoxColumns > 0) cute::prefetch_tma_descriptor(params.tma_load_last.get_tma_descriptor());
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

  // Called by one thread: loads the k-tiles of a located `tile` into stages as these become empty. A row or column of
  // the cluster shares operands: each CTA loads a part and multicasts it. Of a ragged product calls `near_the_end`
  // once. `gathers`: other threads load B.
  template <class ProblemShape, class Tile, class NearTheEnd>
  static CUTLASS_DEVICE void load(Params const& params, Loads const& loads, ProblemShape const& shape, Tile const& tile,
                                  int32_t held_back, bool gathers, FullBarrier* full, EmptyBarrier* empty, Stage& stage,
                                  TensorStorage& storage, NearTheEnd const& near_the_end) {
    using namespace cute;
    // CTAs of a cluster are numbered along m first.
    uint32_t const rank = kClusterM * kClusterN == 1 ? 0 : block_rank_in_cluster(), cta_m = rank % kClusterM,
                   cta_n = rank / kClusterM;
    auto const [to_row, to_column] = multicast_masks(cta_m, cta_n);
    auto const part_a = params.tma_load_a.get_slice(cta_n);
    auto const part_b = params.tma_load_b.get_slice(cta_m);
    auto const a = Base{}.load_init(shape, params);
    int32_t k_tile = tile.k_begin;
    auto const from_a = part_a.partition_S(get<0>(a)(_, _, tile.m, _, tile.batch));
    int const skipped = cta_m * kRowsLess;  // rows of Base's B before this CTA's that no CTA loads
    auto const from_b = part_b.partition_S(columns_of_b(params, shape, tile, skipped));
    auto const to_a =
        part_a.partition_D(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{}));
    auto const to_b = part_b.partition_D(
        make_tensor(make_smem_ptr(storage.smem_B.data() - skipped * kRowElements), typename Base::SmemLayoutB{}));
    auto const hint_a = static_cast<Loads::Hint>(uint64_t{loads.hint_a} << 32),
               hint_b = static_cast<Loads::Hint>(uint64_t{loads.hint_b} << 32);
    int32_t left = tile.k_count;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      int const s = stage.index();
      if (kRagged != Ragged::kNone && left == min(tile.k_count, kAhead)) near_the_end();
      wait_for_empty(empty, stage, held_back);
      full[s].arrive_and_expect_tx(gathers ? kStageBytes - kBytesB : kStageBytes);
      auto& barrier = *reinterpret_cast<uint64_t*>(&full[s]);
      // Three TF32: along K, A is (small, large) and B (large, small); after these two products comes large x large.
      bool const again = kSplits && k_tile >= 2 * loads.part;
      int32_t const k_a = again ? k_tile - loads.part : k_tile, k_b = again ? k_tile - 2 * loads.part : k_tile;
      if constexpr (kGated) {
        load_gated(params, barrier, hint_a, tile, k_a * kTileK, storage.smem_A.data() + s * kTileM * kTileK);
      } else if constexpr (kJoined) {
        load_joined(params, barrier, hint_a, tile, k_a * kTileK, storage.smem_A.data() + s * kTileM * kTileK);
      } else if constexpr (kRagged == Ragged::kK) {
        load_run<kTileM>(params.run_a, barrier, hint_a, RowRun(tile.run), tile.m, k_a, storage.smem_A.data(), s);
      } else {
        copy(params.tma_load_a.with(barrier, to_row, hint_a), from_a(_, _, _, k_a), to_a(_, _, _, s));
      }
      if constexpr (kRagged == Ragged::kK) {
        load_run<kTileN>(params.run_b, barrier, hint_b, RowRun(tile.run), tile.n, k_b, storage.smem_B.data(), s);
      } else if (!gathers) {
        copy_b(params, barrier, to_column, hint_b, from_b(_, _, _, k_b), to_b(_, _, _, s));
      }
      ++k_tile, ++stage;
    } while (--left > 0);
  }

  // A tile's indices: those of a warp's rows, 32 in each register.
  struct Indices {
    int32_t of_lane[(kTileN / 2 + 31) / 32];
  };

  // Called by kGatherThreads threads.
  template <class Tile>
  static CUTLASS_DEVICE Indices indices_of(Params const& params, Tile const& tile) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 2;
    Indices indices;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i * 32 < kTileN / 2; ++i) {
      int32_t const own = i * 32 + lane, row = own / 4 * kRowsAtOnce + warp * 4 + own % 4;
      indices.of_lane[i] = __ldg(params.indices + min(tile.from + row, params.last_index));
    }
    return indices;
  }

  // Called by kGatherThreads threads, for the same tiles as load(): copies B's rows into stages as these become empty.
  // Every thread arrives once at the stage's full barrier when its copies are done. Rows beyond the tile's last are
  // copied up to the next multiple of 32 or not at all, since nothing stores their products. Calls `near_the_end` once.
  template <class Tile, class NearTheEnd>
  static CUTLASS_DEVICE void gather(Params const& params, Tile const& tile, bool is_outside, Indices const& indices,
                                    FullBarrier* full, EmptyBarrier* empty, Stage& stage, TensorStorage& storage,
                                    NearTheEnd const& near_the_end) {
    using namespace cute;
    static_assert(!kBIsNMajor && sizeof(ElementB) == 2 && kLaidOutN == kTileN && kClusterM * kClusterN == 1 &&
                  !kSplits && !kSlices && kRowsAtOnce == 8 && kTileN % kRowsAtOnce == 0);
    // Boxes of 64 columns along K, each the 128-byte swizzle in atoms of 8 rows, one atom after the other.
    using Layout = decltype(as_position_independent_swizzle_layout(typename Base::SmemLayoutB{}));
    constexpr int kBoxes = kTileK / kRowElements, kBoxElements = kTileN * kRowElements;
    static_assert(kBoxes * kRowElements == kTileK && Layout{}(_0{}, _8{}, _0{}) == 8 &&
                  Layout{}(_1{}, _0{}, _0{}) == 64 + 8 && Layout{}(_3{}, Int<16>{}, _0{}) == 3 * 64 + (2 ^ 3) * 8 &&
                  Layout{}(_8{}, _0{}, _0{}) == 8 * 64 && Layout{}(_0{}, _0{}, _1{}) == kBoxes * kBoxElements);
    static_assert(kBoxes == 1 ||
                  Layout{}(_1{}, Int<kTileK - kRowElements>{}, _0{}) == (kBoxes - 1) * kBoxElements + 64 + 8);
    constexpr int kTurns = kTileN / kRowsAtOnce, kTurnsOf32 = 32 / kRowsAtOnce;
    int const lane = threadIdx.x % 32, row = threadIdx.x % kGatherThreads / 8, piece = lane % 8;
    uint32_t pieces[kTurns];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      int32_t const index = __shfl_sync(~0u, indices.of_lane[i / 8], i % 8 * 4 + lane / 8);
      pieces[i] = static_cast<uint32_t>(min(max(index, 0), params.last_row)) * params.row_pieces + piece;
    }
    char const* from = params.rows;
    uint32_t const to = cast_smem_ptr_to_uint(storage.smem_B.data()) + row * kRowBytes + (piece ^ row) * 16;
    int32_t k_left = is_outside ? 0 : params.k - piece * 8, left = tile.k_count;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      int const s = stage.index();
      empty[s].wait(stage.phase());
      uint32_t const to_stage = to + s * kBytesB;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTurns; ++i) {
        if (i > 0 && i % kTurnsOf32 == 0 && tile.columns <= i * kRowsAtOnce) break;
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < kBoxes; ++box)
          copy_or_clear(to_stage + i * kRowsAtOnce * kRowBytes + box * kBoxElements * 2,
                        from + uint64_t{pieces[i]} * 16 + box * kRowBytes, k_left > box * kRowElements);
      }
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t const*>(&full[s]));
      if (left == min(tile.k_count, kIndicesAhead)) near_the_end();
      from += kTileK * sizeof(ElementB), k_left -= kTileK, ++stage;
    } while (--left > 0);
  }

  // Called by kTransposers warps, for the same tiles as load(): transposes B in `count` stages as TMA has filled them.
  static CUTLASS_DEVICE void transpose(FullBarrier* full, FullBarrier* transposed, Stage& stage, int32_t count,
                                       int warp, BlockTransposer const& transposer, TensorStorage& storage) {
    using namespace cute;
    using From = decltype(as_position_independent_swizzle_layout(typename Base::SmemLayoutB{}));
    using To = decltype(as_position_independent_swizzle_layout(typename Base::GmmaSmemLayoutB{}));
    constexpr int kBlock = BlockTransposer::kBlock, kBlockBytes = BlockTransposer::kBlockBytes;
    static_assert(From{}(_0{}, _1{}, _0{}) == kBlock + 4 && To{}(_1{}, _0{}, _0{}) == kBlock + 4 &&
                  From{}(Int<kTileN - kBlock>{}, _8{}, _0{}) == (kTileN - kBlock + 8) * kBlock &&
                  To{}(Int<kTileN - kBlock + 8>{}, _0{}, _0{}) == (kTileN - kBlock + 8) * kBlock &&
                  From{}(_0{}, _0{}, _1{}) == kTileN * kTileK && To{}(_0{}, _0{}, _1{}) == kTileN * kTileK);
    uint32_t const b = cast_smem_ptr_to_uint(storage.smem_B.data());
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++stage) {
      int const s = stage.index();
      full[s].wait(stage.phase());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTileN / kBlock; i += kTransposers)
        transposer.transpose(b + s * kBytesB + (i + warp) * kBlockBytes);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (elect_one_sync()) transposed[s].arrive();
    }
  }

  // The separate sums of a tile, initially zero: see promotion.h.
  template <class Accumulators>
  static CUTLASS_DEVICE auto make_sums(Accumulators const&) {
    if constexpr (kPromotes) {
      return PromotedSums<Accumulators>{};
    } else {
      return NoSums{};
    }
  }

  // Called by the consumers of a tile: accumulators + sums = the sum over `count` k-tiles. Of a ragged product's
  // tile only the first `columns` need be. `gathered`: threads wrote B. Returns the stage that the products in flight
  // read (-1: none). finish() must follow: it waits for them, releases the stage and adds the sums.
  template <class Accumulators, class Sums>
  static CUTLASS_DEVICE int multiply(FullBarrier* full, EmptyBarrier* empty, Stage& stage, Accumulators& accumulators,
                                     Sums& sums, bool promotes, int32_t count, int32_t columns, bool gathered,
                                     int warpgroup, TensorStorage& storage) {
    if constexpr (kRagged == Ragged::kM) {
      static_assert(!kPromotes && !kAFromRegisters);
      int unreleased = -1;
      auto const narrow = [&](auto eighths) CUTLASS_LAMBDA_FUNC_INLINE {
        constexpr int kN = kTileN * decltype(eighths)::value / 8;
        if constexpr (kN % 8 == 0) {
          if (columns > kN) return false;
          auto first = first_of<kN>(accumulators);
          unreleased = multiply_from_shared<CollectiveMainloop, typename Narrow::template WideMma<kN>>(
              full, empty, stage, first, count, gathered, warpgroup, storage);
          return true;
        }
        return false;
      };
      if (narrow(cute::_4{}) || narrow(cute::_6{}) || narrow(cute::_7{})) return unreleased;
    }
    if constexpr (kPromotes) {
      static_assert(kPromotionK % kTileK == 0);
      int32_t const run = promotes ? kPromotionK / kTileK : count;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > run; count -= run) {
        drain(empty, accumulators, multiply_run(full, empty, stage, accumulators, run, gathered, warpgroup, storage));
        sums.add(accumulators);
      }
    }
    return multiply_run(full, empty, stage, accumulators, count, gathered, warpgroup, storage);
  }

  template <class Accumulators, class Sums>
  static CUTLASS_DEVICE void finish(EmptyBarrier* empty, Accumulators& accumulators, Sums const& sums, int unreleased) {
    drain(empty, accumulators, unreleased);
    if constexpr (kPromotes) sums.add_to(accumulators);
  }

  static CUTLASS_DEVICE void release(EmptyBarrier const& empty) { release_stage<kClusterM, kClusterN>(empty); }

 private:
  // A gated A in shared memory: rows of 128 bytes along M or along K, the gate's before the other's.
  using ElementA = typename Base::InternalElementA;
  static constexpr int kTileM = cute::size<0>(TileShape{}), kHalfM = kTileM / 2;
  static constexpr bool kAIsMMajor = cute::is_static<cute::tuple_element_t<0, typename Base::StrideA>>::value;
  static_assert(!kGated || (kHalfM == kRowBytes / sizeof(ElementA) && (kAIsMMajor || kTileK % kRowElements == 0)));

  template <class ProblemShape>
  static CUresult encode_gated(cute::TmaDescriptor& map, ProblemShape const& whole, Arguments const& arguments,
                               void const* a) {
    auto const [m, n, k, batch] = whole;
    auto const [along_m, along_k, batch_stride] = arguments.dA;
    if constexpr (kAIsMMajor) {
      return encode_tensor_map<ElementA>(map, a, m, k, batch, along_k, batch_stride, kHalfM, kTileK, kRowBytes);
    } else {
      return encode_tensor_map<ElementA>(map, a, k, m, batch, along_m, batch_stride, kRowElements, kHalfM, kRowBytes);
    }
  }

  template <class Tile, class Element>
  static CUTLASS_DEVICE void load_gated(Params const& params, uint64_t& barrier, Loads::Hint hint, Tile const& tile,
                                        int32_t k, Element* to) {
    using namespace cute;
    using Layout = typename Base::SmemLayoutA;
    static_assert(Layout{}(Int<kHalfM>{}, _0{}, _0{}) == kHalfM * (kAIsMMajor ? kTileK : kRowElements) &&
                  Layout{}(_0{}, _0{}, _1{}) == kTileM * kTileK);
    int32_t const m = tile.m * kHalfM;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      TmaDescriptor const* const map = half == 0 ? &params.gate : &params.up;
      if constexpr (kAIsMMajor) {
        SM90_TMA_LOAD_3D::copy(map, &barrier, static_cast<uint64_t>(hint), to + half * kHalfM * kTileK, m, k,
                               tile.batch);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kTileK; at += kRowElements)
          SM90_TMA_LOAD_3D::copy(map, &barrier, static_cast<uint64_t>(hint),
                                 to + at * kTileM + half * kHalfM * kRowElements, k + at, m, tile.batch);
      }
    }
  }

  static CUresult encode_joined(cute::TmaDescriptor& map, void const* a, int64_t rows, Arguments const& arguments) {
    auto const [along_m, along_k, batch_stride] = arguments.dA;
    if constexpr (kAIsMMajor) {
      return encode_tensor_map<ElementA>(map, a, rows, arguments.k, 1, rows, rows * arguments.k, kRowElements, kTileK,
                                         kRowBytes);
    } else {
      return encode_tensor_map<ElementA>(map, a, arguments.k, rows, 1, along_m, rows * along_m, kRowElements, kTileM,
                                         kRowBytes);
    }
  }

  // Boxes as of a gated A, each of all rows.
  template <class Tile, class Element>
  static CUTLASS_DEVICE void load_joined(Params const& params, uint64_t& barrier, Loads::Hint hint, Tile const& tile,
                                         int32_t k, Element* to) {
    using namespace cute;
    using Layout = typename Base::SmemLayoutA;
    static_assert(!kAIsMMajor || kTileM == kRowElements ||
                  Layout{}(Int<kTileM - kRowElements>{}, _0{}, _0{}) == (kTileM - kRowElements) * kTileK);
    static_assert(kAIsMMajor || kTileK == kRowElements ||
                  Layout{}(_0{}, Int<kTileK - kRowElements>{}, _0{}) == (kTileK - kRowElements) * kTileM);
    bool const second = tile.m >= params.second_tile, third = tile.m >= params.third_tile;
    TmaDescriptor const* const map = &params.matrices[second + third];
    int32_t const m = (tile.m - (third ? params.third_tile : second ? params.second_tile : 0)) * kTileM;
    if constexpr (kAIsMMajor) {
      CUTLASS_PRAGMA_UNROLL
      for (int at = 0; at < kTileM; at += kRowElements)
        SM90_TMA_LOAD_3D::copy(map, &barrier, static_cast<uint64_t>(hint), to + at * kTileK, m + at, k, 0);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int at = 0; at < kTileK; at += kRowElements)
        SM90_TMA_LOAD_3D::copy(map, &barrier, static_cast<uint64_t>(hint), to + at * kTileM, k + at, m, 0);
    }
  }

  // Rows of the run of K, kTile elements of each from the tile-th on. Boxes are as in an M-major or N-major tile.
  template <int kTile, class Element>
  static CUTLASS_DEVICE void load_run(cute::TmaDescriptor const& map, uint64_t& barrier, Loads::Hint hint,
                                      RowRun const& run, int32_t tile, int32_t k_tile, Element* to, int stage) {
    static_assert(kAIsMMajor && kBIsNMajor && kClusterM * kClusterN == 1 && kTile % kRowElements == 0);
    CUTLASS_PRAGMA_UNROLL
    for (int at = 0; at < kTile; at += kRowElements)
      run.load(map, barrier, static_cast<uint64_t>(hint), to + (stage * kTile + at) * kTileK, tile * kTile + at,
               k_tile * kTileK);
  }
  static_assert(kRagged != Ragged::kK || (typename Base::SmemLayoutA{}(cute::Int<kRowElements>{}, cute::_0{},
                                                                       cute::_0{}) == kRowElements * kTileK &&
                                          typename Base::SmemLayoutB{}(cute::Int<kRowElements>{}, cute::_0{},
                                                                       cute::_0{}) == kRowElements * kTileK));

  struct MulticastMasks {
    uint32_t row, column;  // masks of the CTAs in this one's row (which share A) and column (which share B)
  };
  static CUTLASS_DEVICE MulticastMasks multicast_masks(uint32_t cta_m, uint32_t cta_n) {
    uint32_t row = 0, column = ((1u << kClusterM) - 1) << (cta_n * kClusterM);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kClusterN; ++n) row |= 1u << (cta_m + n * kClusterM);
    asm volatile("" : "+r"(row));  // opaque, or ptxas would shift it as 16 bits, in three more instructions
    return {row, column};
  }

  // Base's tile of B; its last columns may not belong to this tile.
  template <class ProblemShape, class Tile>
  static CUTLASS_DEVICE auto columns_of_b(Params const& params, ProblemShape const& shape, Tile const& tile,
                                          int skipped) {
    using namespace cute;
    auto const [first, batch] = [&] {
      if constexpr (kRagged == Ragged::kM) return cute::make_tuple(tile.from, 0);
      if constexpr (kRagged != Ragged::kM) return cute::make_tuple(tile.n * kTileN, tile.batch);
    }();
    auto const from_n =
        domain_offset(make_coord(first - skipped, 0, 0), params.tma_load_b.get_tma_tensor(select<1, 2, 3>(shape)));
    return local_tile(from_n, select<1, 2>(typename Base::TileShape{}), make_coord(0, _, batch));
  }

  // Holding back h stages means waiting for the stage h ahead. This stage was then waited for earlier, or never filled.
  static CUTLASS_DEVICE void wait_for_empty(EmptyBarrier* empty, Stage const& stage, int32_t held_back) {
    int const s = stage.index();
    bool const wraps = s + held_back >= kStages;
    empty[s + held_back - (wraps ? kStages : 0)].wait(stage.phase() ^ wraps);
  }

  template <class From, class To>
  static CUTLASS_DEVICE void copy_b(Params const& params, uint64_t& barrier, uint32_t ctas, Loads::Hint hint,
                                    From const& from, To to) {
    using namespace cute;
    auto const load = params.tma_load_b.with(barrier, ctas, hint);
    if constexpr (kLastBoxColumns > 0) {
      constexpr int kWholeBoxes = kTileN / kRowElements;
      CUTLASS_PRAGMA_UNROLL
      for (int box = 0; box < kWholeBoxes; ++box)
        copy(load, from(make_coord(_, box), _, _), to(make_coord(_, box), _, _));
      copy(params.tma_load_last.with(barrier, ctas, hint), from(make_coord(_, kWholeBoxes), _, _),
           to(make_coord(_, kWholeBoxes), _, _));
    } else {
      copy(load, from, to);
    }
  }

  // Copies 16 bytes, or clears them.
  static CUTLASS_DEVICE void copy_or_clear(uint32_t to, char const* from, bool copies) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}\n" ::"r"(to),
                 "l"(from), "r"(static_cast<int>(copies)));
  }

  template <class Accumulators>
  static CUTLASS_DEVICE int multiply_run(FullBarrier* full, EmptyBarrier* empty, Stage& stage,
                                         Accumulators& accumulators, int32_t count, bool gathered, int warpgroup,
                                         TensorStorage& storage) {
    if constexpr (kAFromRegisters) {
      return multiply_from_registers<CollectiveMainloop>(full, empty, stage, accumulators, count, warpgroup, storage);
    } else {
      return multiply_from_shared<CollectiveMainloop, TiledMma>(full, empty, stage, accumulators, count, gathered,
                                                                warpgroup, storage);
    }
  }

  // The accumulators of the first kN columns of a tile. Each instruction along m has four for 8 columns.
  template <int kN, class Accumulators>
  static CUTLASS_DEVICE auto first_of(Accumulators& accumulators) {
    using namespace cute;
    static_assert(size<0>(Accumulators{}) == kTileN / 2);
    return make_tensor(accumulators.data(),
                       make_layout(make_shape(make_shape(_2{}, _2{}, Int<kN / 8>{}), size<1>(accumulators), _1{}),
                                   make_stride(make_stride(_1{}, _2{}, _4{}), Int<kTileN / 2>{}, _0{})));
  }

  // Waits for all products and releases the stage that they read.
  template <class Accumulators>
  static CUTLASS_DEVICE void drain(EmptyBarrier* empty, Accumulators& accumulators, int unreleased) {
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(accumulators);
    if (unreleased >= 0) release(empty[unreleased]);
  }
};

}  // namespace jax_streamk::sm90
