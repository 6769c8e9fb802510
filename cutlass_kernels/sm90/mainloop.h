// The main loop of the sm90 family: how a tile's operands are loaded into stages of shared memory and multiplied from
// there. Layouts, TMA copies and wgmma are those of the collective that CUTLASS builds; the loops are ours.
//
// Loads of what goes first from L2 say so (launch_policy.h).
#pragma once

#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/planner/launch_policy.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// wgmma takes TF32 that is contiguous along K, or an A of it from registers. Of an A that is contiguous along m,
// CUTLASS would have TMA bring rows of 32 bytes, which threads can read without conflicts of banks; these are rows of
// 128, read by turns (LoaderOfA).
template <class Collective>
struct WideRows {
  using type = Collective;
};
template <int kStages, class Cluster, class KernelSchedule, class Tile, class StrideA, class StrideB, class Mma,
          class CopyA, class LayoutA, class FromA, class CopyB, class LayoutB, class FromB>
struct WideRows<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<kStages, Cluster, KernelSchedule>, Tile, float, StrideA,
    float, StrideB, Mma, CopyA, LayoutA, FromA, cute::identity, CopyB, LayoutB, FromB, cute::identity>> {
  using type = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<kStages, Cluster, KernelSchedule>, Tile, float, StrideA,
      float, StrideB, Mma, CopyA, cute::GMMA::Layout_MN_SW128_Atom<cutlass::tfloat32_t>, FromA, cute::identity, CopyB,
      LayoutB, FromB, cute::identity>;
};

// A collective of one warpgroup, made one of three that are side by side along m, where kThree.
template <bool kThree, class Collective>
struct OfThree {
  using type = Collective;
};
template <int kStages, class Cluster, class KernelSchedule, class Tile, class A, class StrideA, class B, class StrideB,
          class Mma, class... Copies>
struct OfThree<true, cutlass::gemm::collective::CollectiveMma<
                         cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, KernelSchedule>, Tile, A,
                         StrideA, B, StrideB, Mma, Copies...>> {
  using Three =
      decltype(cute::make_tiled_mma(typename Mma::Atom{}, cute::Layout<cute::Shape<cute::_3, cute::_1, cute::_1>>{}));
  using type = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, KernelSchedule>, Tile, A, StrideA, B, StrideB,
      Three, Copies...>;
};

// A thread's part of an A of TF32 that is contiguous along m in shared memory: of each eight of K, rows g and g + 8 of
// its warp's sixteen at t, then at t + 4, with g = lane / 4 and t = lane % 4.
template <int kTileK>
class LoaderOfA {
 public:
  // `first` is the stage 0 of a warpgroup's first 64 rows.
  CUTLASS_DEVICE explicit LoaderOfA(void const* first) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    odd_ = t % 2;
    // Memory has blocks of 32 rows by 8 of K, of which sixteen bytes lie at their number XOR k: four t of neighbouring
    // k meet in the same banks. Odd t load t + 4 first.
    for (int i = 0; i < 4; ++i) {
      int const k = t ^ ((i / 2 ^ odd_) * 4), number = warp % 2 * 4 + i % 2 * 2 + g / 4;
      from_[i] =
          cute::cast_smem_ptr_to_uint(first) + warp / 2 * kBlocks * kBlock + k * 128 + (number ^ k) * 16 + g % 4 * 4;
    }
  }

  // `a` = the fragment of eight of K, `offset` bytes on.
  template <class Fragment>
  CUTLASS_DEVICE void load(Fragment&& a, int offset) const {
    auto words = cute::recast<uint32_t>(a);
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[i]) : "r"(from_[i] + offset));
#pragma unroll
    for (int i = 0; i < 4; ++i) words(i) = odd_ ? x[i ^ 2] : x[i];
  }

  static constexpr int kBlock = 1024, kBlocks = kTileK / 8;  // bytes of one; of 32 rows

 private:
  uint32_t from_[4];
  bool odd_;
};

// What is asked of loads, little, for it comes with the first of a kernel's parameters.
struct Loads {
  HeldBack held_back;
  int32_t batch = 1, part = 0;  // batches; k-tiles of a part, where f32 is in two
  Divisor by_batch;
  // Upper halves of hints which operand goes first from L2 (launch_policy.h).
  using Hint = cute::TMA::CacheHintSm90;
  static_assert((static_cast<uint64_t>(Hint::EVICT_FIRST) | static_cast<uint64_t>(Hint::EVICT_NORMAL)) << 32 == 0);
  uint32_t hint_a = hint(false), hint_b = hint(false);
  static uint32_t hint(bool goes_first) {
    return static_cast<uint64_t>(goes_first ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL) >> 32;
  }
};

// OwnMma multiplies a tile of OwnShape, which CUTLASS could not lay out well: Base is that of a tile of more columns. A
// B that is contiguous along n comes in boxes of 64 columns, since rows of 128 bytes cost as much to ask for as rows of
// 32 or 64; the last box has but the tile's, in rows of memory as far apart as the others', of which TMA leaves the
// rest as it was. Of a B that is contiguous along K, boxes have fewer rows.
//
// Where kSlices, a batch may be a slice of K: the kernel's K is that of a slice, and what it calls batches are slices x
// batches. TMA reads zeros beyond the end of the last slice. With kSplits f32 is in two parts (repack.h).
//
// wgmma truncates its sums with every instruction. With kPromotionK, float32 adds up the sums of this much of K outside
// of it.
template <class Base, class OwnMma, class OwnShape, bool kSlices, bool kSplits, int kPromotionK>
struct CollectiveMainloop : Base {
  using typename Base::TensorStorage;
  using TileShape = OwnShape;
  using TiledMma = OwnMma;
  // Whether A comes from registers.
  static constexpr bool kFromRegisters =
      !cute::is_base_of<cute::GMMA::DescriptorIterator, typename TiledMma::FrgTypeA>::value;
  static constexpr bool kPromotes = kPromotionK > 0;
  static constexpr int kStages = Base::DispatchPolicy::Stages;
  static constexpr int kClusterM = cute::size<0>(typename Base::DispatchPolicy::ClusterShape{});
  static constexpr int kClusterN = cute::size<1>(typename Base::DispatchPolicy::ClusterShape{});
  using LoadedB = typename Base::InternalElementB;
  static constexpr int kTileN = cute::size<1>(TileShape{}), kTileK = cute::size<2>(TileShape{}),
                       kRoomN = cute::size<1>(typename Base::TileShape{});
  static constexpr int kRowBytes = 128, kOfRow = kRowBytes / sizeof(LoadedB);  // and elements
  static constexpr bool kBAlongN = cute::is_static<cute::tuple_element_t<0, typename Base::StrideB>>::value;
  // Of a B along n, the columns of the last box, if fewer than the others'.
  static constexpr int kLast = kBAlongN && kRoomN != kTileN ? kTileN % kOfRow : 0;
  // Of a B along K, how many fewer rows a CTA loads than Base, its part of those that are multicast.
  static constexpr int kFewer = kBAlongN ? 0 : (kRoomN - kTileN) / kClusterM;
  static_assert(kBAlongN || kFewer * kClusterM == kRoomN - kTileN);
  static constexpr int kBytes = Base::TmaTransactionBytes - (kRoomN - kTileN) * kTileK * sizeof(LoadedB);

  struct Arguments : Base::Arguments {
    int32_t k, batch;  // all of K that A and B have, and of the batches
  };
  struct LastBox {
    typename Base::Params::TMA_B tma_load_last;
  };
  struct NoBox {};
  struct Params : Base::Params, std::conditional_t<(kLast > 0), LastBox, NoBox> {};

  template <class ProblemShape>
  static CUresult set_up(Params& params, ProblemShape const& shape, Arguments const& arguments) {
    auto const whole = cute::make_shape(cute::get<0>(shape), cute::get<1>(shape), arguments.k, arguments.batch);
    static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(whole, arguments, nullptr);
    int64_t const columns = cute::get<1>(shape);
    auto const [along_n, along_k, batch_stride] = arguments.dB;
    if constexpr (kLast > 0) {
      params.tma_load_last = params.tma_load_b;
      return describe<LoadedB>(params.tma_load_last.tma_desc_, arguments.ptr_B, columns, arguments.k, arguments.batch,
                               along_k, batch_stride, kLast, kTileK / kClusterM, kRowBytes);
    } else if constexpr (kFewer > 0) {
      return describe<LoadedB>(params.tma_load_b.tma_desc_, arguments.ptr_B, arguments.k, columns, arguments.batch,
                               along_n, batch_stride, kOfRow, kTileN / kClusterM, kRowBytes);
    }
    return CUDA_SUCCESS;
  }

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    if constexpr (kLast > 0) cute::prefetch_tma_descriptor(params.tma_load_last.get_tma_descriptor());
  }

  // Where a tile's operands lie: of a slice of so many k-tiles its batch and first k-tile.
  template <class Tile>
  static CUTLASS_DEVICE void locate(Loads const& loads, int32_t k_tiles, Tile& tile) {
    if constexpr (kSlices) {
      int32_t const slice = loads.by_batch.divide(tile.batch);
      tile.batch -= slice * loads.batch;
      tile.k_begin += slice * k_tiles;
    }
  }

  // By one thread: the k-tiles of a located `tile` into stages as they become empty. A CTA loads its part of what its
  // cluster's rows and columns share, for all of them.
  template <class ProblemShape, class Tile, class Full, class Empty, class Stage>
  static CUTLASS_DEVICE void load(Params const& params, Loads const& loads, ProblemShape const& shape, Tile const& tile,
                                  int32_t held_back, Full* full, Empty* empty, Stage& stage, TensorStorage& storage) {
    using namespace cute;
    // CTAs are numbered along m first: those of a row are kClusterM apart.
    uint32_t const rank = kClusterM * kClusterN == 1 ? 0 : block_rank_in_cluster(), cta_m = rank % kClusterM,
                   cta_n = rank / kClusterM;
    uint32_t row = 0, column = ((1u << kClusterM) - 1) << (cta_n * kClusterM);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kClusterN; ++n) row |= 1u << (cta_m + n * kClusterM);
    asm volatile("" : "+r"(row));  // opaque, or it is shifted as 16 bits, which takes three instructions more

    auto const operands = Base{}.load_init(shape, params);
    auto const part_a = params.tma_load_a.get_slice(cta_n);
    auto const part_b = params.tma_load_b.get_slice(cta_m);
    int32_t k_tile = tile.k_begin;
    auto const from_a = part_a.partition_S(get<0>(operands)(_, _, tile.m, _, tile.batch));
    int const before = cta_m * kFewer;  // rows that other CTAs do not load
    auto const b_from_n = domain_offset(make_coord(tile.n * kTileN - before, 0, 0),
                                        params.tma_load_b.get_tma_tensor(select<1, 2, 3>(shape)));
    auto const from_b = part_b.partition_S(
        local_tile(b_from_n, select<1, 2>(typename Base::TileShape{}), make_coord(0, _, tile.batch)));
    auto const to_a =
        part_a.partition_D(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{}));
    auto const to_b = part_b.partition_D(
        make_tensor(make_smem_ptr(storage.smem_B.data() - before * kOfRow), typename Base::SmemLayoutB{}));
    auto const hint_a = static_cast<Loads::Hint>(uint64_t{loads.hint_a} << 32),
               hint_b = static_cast<Loads::Hint>(uint64_t{loads.hint_b} << 32);
    int32_t left = tile.k_count;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      int const s = stage.index();
      // So that so many stay empty, the stage that far ahead is waited for; this one was then, or has never been
      // filled.
      bool const wraps = s + held_back >= kStages;
      empty[s + held_back - (wraps ? kStages : 0)].wait(stage.phase() ^ wraps);
      full[s].arrive_and_expect_tx(kBytes);
      auto& barrier = *reinterpret_cast<uint64_t*>(&full[s]);
      // Of A, small, large and again large numbers; of B, large, small and large.
      bool const again = kSplits && k_tile >= 2 * loads.part;
      int32_t const k_a = again ? k_tile - loads.part : k_tile, k_b = again ? k_tile - 2 * loads.part : k_tile;
      copy(params.tma_load_a.with(barrier, row, hint_a), from_a(_, _, _, k_a), to_a(_, _, _, s));
      auto const load_b = params.tma_load_b.with(barrier, column, hint_b);
      if constexpr (kLast > 0) {
        constexpr int kWhole = kTileN / kOfRow;
        auto const from = from_b(_, _, _, k_b);
        auto const to = to_b(_, _, _, s);
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < kWhole; ++box)
          copy(load_b, from(make_coord(_, box), _, _), to(make_coord(_, box), _, _));
        copy(params.tma_load_last.with(barrier, column, hint_b), from(make_coord(_, kWhole), _, _),
             to(make_coord(_, kWhole), _, _));
      } else {
        copy(load_b, from_b(_, _, _, k_b), to_b(_, _, _, s));
      }
      ++k_tile, ++stage;
    } while (--left > 0);
  }

  // What float32 has added up of a tile so far.
  struct NoSums {};
  template <class Accumulators>
  static CUTLASS_DEVICE auto promoted(Accumulators const& accumulators) {
    if constexpr (kPromotes) {
      auto sums = cute::make_fragment_like(accumulators);
      cute::clear(sums);
      return sums;
    } else {
      return NoSums{};
    }
  }

  // By the consumers of a tile: accumulators + sums = the sum of `count` k-tiles. The last one's products may still be
  // under way, and its stage, which is returned, be read: finish() waits for them, and adds. -1 where there are none.
  template <class Full, class Empty, class Stage, class Accumulators, class Sums>
  static CUTLASS_DEVICE int multiply(Full* full, Empty* empty, Stage& stage, Accumulators& accumulators, Sums& sums,
                                     bool promotes, int32_t count, int warpgroup, TensorStorage& storage) {
    if constexpr (kPromotes) {
      static_assert(kPromotionK % kTileK == 0);
      int32_t const run = promotes ? kPromotionK / kTileK : count;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > run; count -= run) {
        settle(empty, accumulators,
               multiply_in_tensor_cores(full, empty, stage, accumulators, run, warpgroup, storage));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < cute::size(sums); ++i) sums(i) += accumulators(i);
      }
    }
    return multiply_in_tensor_cores(full, empty, stage, accumulators, count, warpgroup, storage);
  }

  template <class Empty, class Accumulators, class Sums>
  static CUTLASS_DEVICE void finish(Empty* empty, Accumulators& accumulators, Sums const& sums, int unreleased) {
    settle(empty, accumulators, unreleased);
    if constexpr (kPromotes) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(sums); ++i) accumulators(i) += sums(i);
    }
  }

 private:
  static constexpr int NumThreadsPerWarpGroup = cutlass::NumThreadsPerWarpGroup;

  // Waits for all products.
  template <class Empty, class Accumulators>
  static CUTLASS_DEVICE void settle(Empty* empty, Accumulators& accumulators, int unreleased) {
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(accumulators);
    if (unreleased >= 0) release(empty[unreleased]);
  }

  template <class... Arguments>
  static CUTLASS_DEVICE int multiply_in_tensor_cores(Arguments&&... arguments) {
    if constexpr (kFromRegisters) {
      return multiply_from_registers(arguments...);
    } else {
      return multiply_from_memory(arguments...);
    }
  }

  template <class Full, class Empty, class Stage, class Accumulators>
  static CUTLASS_DEVICE int multiply_from_memory(Full* full, Empty* empty, Stage& stage, Accumulators& accumulators,
                                                 int32_t count, int warpgroup, TensorStorage& storage) {
    using namespace cute;
    TiledMma mma;
    // Descriptors of a warpgroup do not depend on the thread.
    auto const part = mma.get_slice(size(mma) == NumThreadsPerWarpGroup ? 0 : warpgroup * NumThreadsPerWarpGroup);
    auto const a = part.make_fragment_A(
        part.partition_A(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{})));
    // Nor do those of B on how many of the columns are multiplied.
    auto const loaded = typename Base::TiledMma{}.get_slice(0);
    auto const b = loaded.make_fragment_B(
        loaded.partition_B(make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{})));
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int unreleased = -1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++stage) {
      int const s = stage.index();
      full[s].wait(stage.phase());
      warpgroup_fence_operand(accumulators);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(a); ++k) {
        cute::gemm(mma, a(_, _, k, s), b(_, _, k, s), accumulators);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(accumulators);
      if (unreleased >= 0) release(empty[unreleased]);
      unreleased = s;
    }
    return unreleased;
  }

  // ... with A in registers.
  template <class Full, class Empty, class Stage, class Accumulators>
  static CUTLASS_DEVICE int multiply_from_registers(Full* full, Empty* empty, Stage& stage, Accumulators& accumulators,
                                                    int32_t count, int warpgroup, TensorStorage& storage) {
    using namespace cute;
    TiledMma mma;
    constexpr int kWarpgroups = size(mma) / NumThreadsPerWarpGroup, kTileM = size<0>(TileShape{});
    using Loader = LoaderOfA<kTileK>;
    constexpr int kOf64Rows = 2 * Loader::kBlocks * Loader::kBlock,
                  kStage = kTileM / 32 * Loader::kBlocks * Loader::kBlock;
    int const of_warpgroup = kWarpgroups == 1 ? 0 : warpgroup;
    Loader const loader(reinterpret_cast<char const*>(storage.smem_A.data()) + of_warpgroup * kOf64Rows);
    auto const part = mma.get_slice(of_warpgroup * NumThreadsPerWarpGroup);
    auto a = part.partition_fragment_A(
        make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{})(_, _, Int<0>{}));
    auto const b = part.make_fragment_B(
        part.partition_B(make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{})));
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int unreleased = -1;
    // While one half of a stage is multiplied, the other half's registers are loaded.
    constexpr int kHalf = size<2>(a) / 2;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++stage) {
      int const s = stage.index();
      full[s].wait(stage.phase());
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        warpgroup_wait<1>();
        if (half == 1 && unreleased >= 0) release(empty[unreleased]);
        CUTLASS_PRAGMA_UNROLL
        for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
          CUTLASS_PRAGMA_UNROLL
          for (int m = 0; m < size<1>(a); ++m)
            loader.load(a(_, m, k), s * kStage + m * kWarpgroups * kOf64Rows + k * Loader::kBlock);
        }
        warpgroup_fence_operand(accumulators);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
          cute::gemm(mma, a(_, _, k), b(_, _, k, s), accumulators);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        warpgroup_fence_operand(accumulators);
      }
      unreleased = s;
    }
    return unreleased;
  }

  // Tells every CTA that loads into this one's stage that a warpgroup has read it.
  template <class Empty>
  static CUTLASS_DEVICE void release(Empty const& empty) {
    int const thread = threadIdx.x % NumThreadsPerWarpGroup;
    if constexpr (kClusterM * kClusterN == 1) {
      if (thread == 0) empty.arrive();
    } else {
      int const rank = cute::block_rank_in_cluster();
      bool const shares = thread % kClusterM == rank % kClusterM || thread / kClusterM == rank / kClusterM;
      empty.arrive(thread, thread < kClusterM * kClusterN && shares);
    }
  }
};

}  // namespace jax_streamk::sm90
