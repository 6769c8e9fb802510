// The sm90 family: warp-specialized TMA and wgmma kernels. A translation unit has a few rows of table.txt, each an
// expansion of JAX_STREAMK_SM90_KERNEL.
#pragma once

#include <algorithm>
#include <memory>

#include "cutlass/cutlass.h"
#include "cutlass_kernels/launch/cuda_kernel.h"
#include "cutlass_kernels/launch/policy.h"
#include "cutlass_kernels/sm90/config.h"
#include "cutlass_kernels/sm90/epilogue.h"
#include "cutlass_kernels/sm90/family.h"
#include "cutlass_kernels/sm90/gated_epilogue.h"
#include "cutlass_kernels/sm90/mainloop.h"
#include "cutlass_kernels/sm90/operands/gathered.h"
#include "cutlass_kernels/sm90/operands/joined.h"
#include "cutlass_kernels/sm90/operands/pair.h"
#include "cutlass_kernels/sm90/operands/run_of_k.h"
#include "cutlass_kernels/sm90/operands/tile.h"
#include "cutlass_kernels/sm90/operands/transposed.h"
#include "cutlass_kernels/sm90/operands/transposed_bytes.h"
#include "cutlass_kernels/sm90/ragged.h"
#include "cutlass_kernels/sm90/scheduler.h"
#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

// operands/numbers.h, scaled_sums.h and integer_sums.h, which units with rows of numbers, of float8, or of integers
// include.
template <class Stage, class T, Type kType>
struct NumbersA;
template <class TileShape, int kWarpgroups, bool kSwap, bool kPermutes, bool kRun>
struct ScaledSums;
template <class TileShape, int kWarpgroups, bool kSwap, bool kPermutes, bool kRun, class Value>
struct IntegerSums;

// A template of a way to load, chosen without being instantiated.
template <template <class> class Way>
struct Chosen {
  template <class Stage>
  using type = Way<Stage>;
};

// kTypeA, kTypeB: the types of operands that an instance is for. They may differ from those of Operands where one
// kernel serves several: numbers with and without a sign, and pairs of float8.
template <class Operands, class Row, Type kTypeA, Type kTypeB>
class Sm90Kernel final : public CudaKernel {
  static constexpr Config kConfig = config_of<Operands, Row>();
  static constexpr bool kCooperative = kConfig.warp_schedule == WarpSchedule::kCooperative;
  static constexpr int kCtasPerSm = kConfig.warp_schedule == WarpSchedule::kSingle ? kSingles : 1;
  static constexpr bool kSwap = kConfig.swap_ab;

  // As they are multiplied: TMA rounds float32 to TF32.
  using Element = typename ElementOf<kConfig.type_a>::multiplied;
  using ElementD = typename ElementOf<kConfig.type_d>::type;
  // The kernel's own operands: with swap_ab its A is B^T (n x k) and its B is A^T (k x m).
  static constexpr bool kAAlongK = kSwap ? kConfig.major_b == Major::kColumn : kConfig.major_a == Major::kRow,
                        kBAlongK = kSwap ? kConfig.major_a == Major::kRow : kConfig.major_b == Major::kColumn;
  static constexpr int kAlign = 16 / sizeof(Element);  // TMA's

  using TileShape = Extents<kConfig.tile_m, kConfig.tile_n, kConfig.tile_k>;
  using ClusterShape = Extents<kConfig.cluster_m, kConfig.cluster_n>;
  static constexpr bool kScaled = kConfig.scaled(), kBytes = kConfig.is_bytes(), kIntegers = kConfig.is_integer();
  static constexpr int kNumberBits = kConfig.number_bits();
  static constexpr bool kGated = kConfig.gated, kJoined = kConfig.joined;
  static constexpr Ragged kRagged = kConfig.ragged;
  static constexpr bool kRun = kRagged == Ragged::kM;  // a tile stores a run of rows of D
  static_assert(kRagged == Ragged::kNone || (kConfig.cluster_m * kConfig.cluster_n == 1 && kSwap == kRun &&
                                             (kBytes || kConfig.type_a == kConfig.type_d)));
  static_assert(!kScaled || (kSwap && kCooperative && !kGated && !kJoined));
  static_assert(!kGated || (kSwap && kConfig.tile_m == 2 * kGatedRows && kConfig.warpgroups() == 1 &&
                            kConfig.cluster_m * kConfig.cluster_n == 1));
  static_assert(!kJoined || (kSwap && !kGated && kRagged == Ragged::kNone && kConfig.type_a == kConfig.type_d &&
                             kConfig.cluster_m * kConfig.cluster_n == 1));
  // Registers are short beside promoted sums, and beside runs of K.
  static constexpr bool kInlines = !kSwap && (kConfig.promotion_k() > 0 || kRagged == Ragged::kK);
  using Epilogue = std::conditional_t<kGated, GatedEpilogue<ElementD, kConfig.tile_n, kConfig.store_columns, kRun>,
                                      TileEpilogue<ElementD, kSwap, kConfig.tile_m, kConfig.tile_n,
                                                   kConfig.warpgroups(), kConfig.store_columns, kRun, kInlines>>;

  // With several CTAs per SM there would be too many clusters to list.
  using DenseScheduler = sm90::Scheduler<TileShape, ClusterShape, kCooperative, kCtasPerSm == 1>;
  using Scheduler = std::conditional_t<kRagged == Ragged::kNone, DenseScheduler,
                                       RaggedScheduler<TileShape, kRun, kCooperative && !kRun>>;

  // The shared memory of an SM, where CUDA takes 1 KiB per CTA and barriers of a single kernel at most 256 bytes; and
  // what a CTA leaves to the other CTAs on its SM.
  static constexpr int kSmBytes = 228 << 10, kOthersBytes = kRagged != Ragged::kNone ? sizeof(typename Scheduler::Table)
                                                            : kCtasPerSm == 1
                                                                ? 0
                                                                : (227 << 10) - (kSmBytes / kCtasPerSm - 1024 - 256);
  static constexpr int kCarvedOut = static_cast<int>(sizeof(typename Epilogue::TensorStorage)) + kOthersBytes;
  // A stage with numbers has room for these beside what they become, and its tables of scales take at most 8 KiB; those
  // of sums take as much.
  // Barriers of all stages and the table of tiles take less than 2 KiB.
  static constexpr int kLaidOutN = kBAlongK ? kConfig.tile_n : columns_by_tma(kConfig.tile_n);
  static constexpr bool kTransposesBytes = kBytes && !kBAlongK;
  static constexpr int kBytesOfStage =
      kConfig.tile_k * (kConfig.tile_m * (sizeof(Element) + kNumberBits / 8.0) + kLaidOutN * sizeof(Element) +
                        (kTransposesBytes ? kConfig.tile_n : 0));
  static constexpr int kBarrierBytes = 16;  // of a stage
  static constexpr int kStages = kScaled ? ((227 << 10) - kCarvedOut - (10 << 10)) / kBytesOfStage
                                 : kBytes
                                     ? ((227 << 10) - kCarvedOut - (9 << 10)) / kBytesOfStage
                                     : ((227 << 10) - (kCarvedOut + 127) / 128 * 128) / (kBytesOfStage + kBarrierBytes);
  using Stage = StageLayout<Element, kAAlongK, Element, kBAlongK, TileShape, ClusterShape, kLaidOutN, kStages,
                            kNumberBits, kTransposesBytes>;

  // The way to load each operand. Threads gather rows of up to 128: beside more the warpgroup that loads has too few
  // registers.
  static constexpr bool kRunsOfK = kRagged == Ragged::kK, kGathers = kRun && kConfig.tile_n <= 128 && !kBytes,
                        kFromRegisters = (kConfig.math == Math::kTF32 || kBytes) && !kAAlongK,
                        kTransposes = kFromRegisters && !kBAlongK && !kBytes;
  static_assert(!kBytes || (kCooperative && !kGated && !kJoined));
  template <class Stage>
  using NumbersOfStage =
      NumbersA<Stage, std::conditional_t<kConfig.type_a == Type::kF16, __half, __nv_bfloat16>, kConfig.type_b>;
  using OperandA = typename std::conditional_t<
      kScaled, Chosen<NumbersOfStage>,
      std::conditional_t<
          kGated, Chosen<PairA>,
          std::conditional_t<kJoined, Chosen<JoinedA>, std::conditional_t<kRunsOfK, Chosen<RunA>, Chosen<TileA>>>>>::
      template type<Stage>;
  template <class Stage>
  using TileOfB = TileB<Stage, kRun>;
  template <class Stage>
  using TransposedBytes = TransposedBytesB<Stage, std::conditional_t<kRunsOfK, RunB<Stage>, TileB<Stage>>>;
  using OperandB = typename std::conditional_t<
      kTransposes, Chosen<TransposedB>,
      std::conditional_t<kTransposesBytes, Chosen<TransposedBytes>,
                         std::conditional_t<kGathers, Chosen<GatheredB>,
                                            std::conditional_t<kRunsOfK, Chosen<RunB>, Chosen<TileOfB>>>>>::
      template type<Stage>;
  static constexpr int kPromotionK = kConfig.promotion_k();
  static_assert(kPromotionK % kConfig.tile_k == 0);
  using SumsOfIntegers = IntegerSums<TileShape, kConfig.warpgroups(), kSwap, kFromRegisters, kRun,
                                     std::conditional_t<kConfig.type_d == Type::kS32, int32_t, float>>;
  using Sums = std::conditional_t<
      kIntegers, SumsOfIntegers,
      std::conditional_t<kBytes, ScaledSums<TileShape, kConfig.warpgroups(), kSwap, kFromRegisters, kRun>,
                         std::conditional_t<(kPromotionK > 0), PromotedSums<kPromotionK / kConfig.tile_k>, PlainSums>>>;
  using Order = std::conditional_t<kConfig.math == Math::kTF32x3, OfSplitF32, InOrder>;
  // A separate reduction adds slices of float32 results, which are those of other operands than integers.
  using Mainloop = TileMainloop<Stage, kConfig.warpgroups(), kFromRegisters, OperandA, OperandB, Order, Sums,
                                kConfig.type_d == Type::kF32 && !kIntegers, kRun && !kBytes>;

 public:
  using Gemm = GemmKernel<Mainloop, Epilogue, Scheduler, kConfig.warp_schedule>;

 private:
  static_assert(kCtasPerSm * (sizeof(typename Gemm::SharedStorage) + 1024) <= kSmBytes);

 public:
  Sm90Kernel() : CudaKernel(make_info()) {}

 protected:
  Status launch(Launch const& launch, LaunchPolicy const& policy, Device const& device, Buffers const& buffers,
                cudaStream_t stream) const override {
    GemmProblem const &p = launch.problem, q = launch.as_batch();
    Schedule const& s = launch.schedule;
    Workspace const parts = Workspace::of(info, q, s, device);
    auto* const workspace = static_cast<char*>(buffers.workspace);
    auto* const arrivals = reinterpret_cast<uint32_t*>(workspace + parts.counter);
    auto* const partials = reinterpret_cast<float*>(workspace + parts.counter + parts.arrivals);
    if (parts.zeroed > 0) {
      Status const status =
          from_cuda(cudaMemsetAsync(workspace, 0, parts.zeroed, stream), info.name + ": zeroing its arrival words");
      if (!status.ok()) return status;
    }
    Decomposition const cut = decomposition(q, s, device);
    int64_t const rows = kSwap ? p.n : p.m, columns = kSwap ? p.m : p.n;
    int64_t const part = kConfig.math == Math::kTF32x3 ? p.k / 3 : 0;
    typename Gemm::Params params;
    params.scheduler.decomposition = cut;
    TileOrder const order = own_order(info, p, policy.raster, policy.swizzle);
    int32_t const clusters = [&] {
      if constexpr (kRagged != Ragged::kNone) {
        void* const counter = parts.zeroed > 0 ? workspace : nullptr;
        params.scheduler.set_up(p, buffers, order, order.tiles_m(), kConfig.tile_m, device.sms, counter);
        if (parts.partials > 0) {
          params.scheduler.arrivals = arrivals;
          params.scheduler.partials = partials;
          return device.sms;
        }
        return static_cast<int32_t>(std::min<int64_t>(device.sms, params.scheduler.most_tiles()));
      } else {
        params.scheduler.order = order;
        params.scheduler.atomic = s.reduction == Reduction::kAtomic;
        params.scheduler.arrivals = arrivals;
        params.scheduler.partials = partials;
        return params.scheduler.place(policy, device.sms);
      }
    }();
    params.loads.held_back = HeldBack::of(cut, policy.held_back, policy.held_back_last);
    params.loads.batch = static_cast<int32_t>(p.batch);
    params.loads.by_batch = Divisor(params.loads.batch);
    params.loads.part = static_cast<int32_t>(part / kConfig.tile_k);
    params.loads.hint_a = Loads::hint(kSwap ? policy.evict_first_b : policy.evict_first_a);
    params.loads.hint_b = Loads::hint(kSwap ? policy.evict_first_a : policy.evict_first_b);
    // Not beside the kernel before if there is a memset between them.
    Overlap const overlap = parts.zeroed == 0 ? launch.overlap : Overlap{};
    params.loads.early_a = kSwap ? overlap.has_b : overlap.has_a;
    params.loads.early_b = kSwap ? overlap.has_a : overlap.has_b;
    params.straight = cut.kind == ScheduleKind::kDataParallel && p.epilogue.is_plain() && !has_misaligned_d(p);
    params.shape = {static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(q.k),
                    static_cast<int>(q.batch)};
    MainloopArguments::Matrices const of_a{buffers.a, p.a.ld, p.a.batch_stride},
        of_b{buffers.b, p.b.ld, p.b.batch_stride}, own_a = kSwap ? of_b : of_a, own_b = kSwap ? of_a : of_b;
    auto loaded_m = static_cast<int32_t>(rows), loaded_n = static_cast<int32_t>(columns);
    if (!kScaled && (kSwap ? policy.extend_b : policy.extend_a))
      loaded_m = extended(own_a, {!kAAlongK, rows, kConfig.tile_m, kConfig.cluster_m}, p);
    if (kSwap ? policy.extend_a : policy.extend_b)
      loaded_n = extended(own_b, {!kBAlongK, columns, kConfig.tile_n, kConfig.cluster_n}, p);
    params.gathers = p.gathered_rows > 0;
    if (params.gathers) loaded_n = static_cast<int32_t>(p.gathered_rows);
    CUresult const loads = Mainloop::set_up(
        params.mainloop,
        {own_a, own_b, loaded_m, loaded_n, static_cast<int32_t>(part > 0 ? 2 * part : p.k),
         static_cast<int32_t>(p.batch),
         p.epilogue.is_stacked() ? static_cast<Element const*>(own_a.data) + p.epilogue.up_offset : buffers.up,
         params.gathers ? static_cast<int32_t const*>(buffers.indices) : nullptr, static_cast<int32_t>(columns),
         buffers.third, static_cast<int32_t>(p.second_column), static_cast<int32_t>(p.third_column), p, buffers,
         kTypeB == Type::kU4 || kTypeB == Type::kU8});
    CUresult const stores = Epilogue::set_up(params.epilogue, params.shape, p, buffers);
    params.shares = Scheduler::shares(params.scheduler);
    params.has_early_bias = Epilogue::has_early_bias(params.epilogue);
    params.has_residual = Epilogue::has_residual(params.epilogue);
    params.promotes = !launch.slices.rounded;
    if (loads != CUDA_SUCCESS || stores != CUDA_SUCCESS)
      return Status::internal(info.name + ": TMA cannot " + (loads != CUDA_SUCCESS ? "load B" : "store D"));
    cudaLaunchAttribute attributes[1];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(clusters * kConfig.cluster_m, kConfig.cluster_n);
    config.blockDim = dim3(Gemm::kThreads);
    config.dynamicSmemBytes = sizeof(typename Gemm::SharedStorage);
    config.stream = stream;
    config.attrs = attributes;
    if (overlap.any) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    return from_cuda(cudaLaunchKernelEx(&config, entry_of<Operands, Row>(), params), "launching " + info.name);
  }

  void const* entry_point() const override { return reinterpret_cast<void const*>(entry_of<Operands, Row>()); }

 private:
  static KernelInfo make_info() {
    KernelInfo info;
    Config config = kConfig;
    config.type_a = kTypeA, config.type_b = kTypeB;
    info.name = name_of(config);
    info.family = Family::kSm90;
    info.a.format = config.type_a;
    info.b.format = config.type_b;
    info.d.format = kConfig.type_d;
    info.math = kConfig.math;
    info.a.major = kConfig.major_a;
    info.b.major = kConfig.major_b;
    info.a.align = kAlign;
    info.b.align = kScaled ? 128 / kNumberBits : kAlign;
    info.d.align = 1;
    info.tile_m = kConfig.tile_m;
    info.tile_n = kConfig.tile_n;
    info.tile_k = kConfig.tile_k;
    info.cluster_m = kConfig.cluster_m;
    info.cluster_n = kConfig.cluster_n;
    info.stages = kStages;
    info.warp_schedule = kConfig.warp_schedule;
    info.swap_ab = kSwap;
    // Pingpong and single kernels run all of K for a tile.
    if (kCooperative) info.split_k_reductions = info.stream_k_reductions = {Reduction::kOrdered, Reduction::kAtomic};
    if (kConfig.type_d == Type::kF32 && !kIntegers) info.split_k_reductions.push_back(Reduction::kSeparate);
    info.threads = Gemm::kThreads;
    info.shared_memory = sizeof(typename Gemm::SharedStorage);
    info.promotion_k = kConfig.promotion_k();
    info.gated = kGated;
    info.joined = kJoined;
    info.ragged = kRagged;
    info.gathers = OperandB::kGathers;
    info.scaled = kScaled;
    info.scales_sums = kBytes && kConfig.type_d != Type::kS32;
    return info;
  }

  // The extent up to which tiles read an operand, if its allocation reaches that far; else its own.
  static int32_t extended(MainloopArguments::Matrices const& own, TiledOperand const& x, GemmProblem const& p) {
    int64_t const whole = x.tiled_extent(), before = own.batch_stride != 0 ? (p.batch - 1) * own.batch_stride : 0;
    int64_t const last = before + (x.contiguous ? (p.k - 1) * own.ld + whole : (whole - 1) * own.ld + p.k);
    return static_cast<int32_t>(last <= bytes_left(own.data) / static_cast<int64_t>(sizeof(Element)) ? whole
                                                                                                     : x.extent);
  }
};

// The element types of D, and the majornesses of A and B, that a row stands for.
enum class Results { kOwn, kF32, kBoth };
enum class Majors { kAll, kThree, kRow, kRowA, kRowB, kKInner, kKOuter };
enum class Types { kHalf, kTF32, kTF32x3, kFp8, kInt8, kS4, kS8, kE2M1, kE4M3, kE5M2 };

// How a row's kernels take the operands: A and B exchanged, and for which problems.
struct Arrangement {
  bool swap_ab, gated;
  Ragged ragged;
  bool joined = false;
};

// Registers the kernels of a row of table.txt.
template <class Row>
struct Kernels {
  template <Type kTypeAB, Type kTypeD, Major kMajorA, Major kMajorB, Math kMath = Math::kNative>
  static void add() {
    using Operands = typename OperandsOf<kTypeAB, kTypeD, kMajorA, kMajorB, kMath>::type;
    Registration(std::make_unique<Sm90Kernel<Operands, Row>>());
    if constexpr (kTypeAB == Type::kE4M3) {
      Registration(std::make_unique<Sm90Kernel<Operands, Row, Type::kE4M3, Type::kE5M2>>());
      Registration(std::make_unique<Sm90Kernel<Operands, Row, Type::kE5M2, Type::kE4M3>>());
      Registration(std::make_unique<Sm90Kernel<Operands, Row, Type::kE5M2, Type::kE5M2>>());
    }
  }
  template <Type kTypeAB, Type kTypeD, Majors kMajors>
  static void add_majors() {
    constexpr bool kMost = kMajors == Majors::kAll || kMajors == Majors::kThree;
    if constexpr (kMajors != Majors::kKInner && kMajors != Majors::kKOuter)
      add<kTypeAB, kTypeD, Major::kRow, Major::kRow>();
    if constexpr (kMost || kMajors == Majors::kRowA || kMajors == Majors::kKInner)
      add<kTypeAB, kTypeD, Major::kRow, Major::kColumn>();
    if constexpr (kMost || kMajors == Majors::kRowB || kMajors == Majors::kKOuter)
      add<kTypeAB, kTypeD, Major::kColumn, Major::kRow>();
    if constexpr (kMajors == Majors::kAll) add<kTypeAB, kTypeD, Major::kColumn, Major::kColumn>();
  }
  template <Type kTypeAB, Results kResults, Majors kMajors>
  static void add_results() {
    if constexpr (kResults != Results::kF32) add_majors<kTypeAB, kTypeAB, kMajors>();
    if constexpr (kResults != Results::kOwn) add_majors<kTypeAB, Type::kF32, kMajors>();
  }
  // Only the kernel's own A can go through registers, so a row-major B requires a swap. Of column-major A and row-major
  // B the kernel transposes B.
  template <Majors kMajors>
  static void add_tf32() {
    static_assert(kMajors != Majors::kRowA && Row::kSwapAB == (kMajors != Majors::kKOuter));
    constexpr bool kAll = kMajors == Majors::kAll;
    if constexpr (!Row::kSwapAB) add<Type::kF32, Type::kF32, Major::kColumn, Major::kRow, Math::kTF32>();
    if constexpr (Row::kSwapAB) add<Type::kF32, Type::kF32, Major::kRow, Major::kRow, Math::kTF32>();
    if constexpr (kAll) add<Type::kF32, Type::kF32, Major::kRow, Major::kColumn, Math::kTF32>();
    if constexpr (kAll) add<Type::kF32, Type::kF32, Major::kColumn, Major::kColumn, Math::kTF32>();
  }
  template <Type kTypeB, Results kResults, Type kTypeA>
  static void add_numbers() {
    auto const add_majors = [](auto type_d) {
      auto const add_one = [&](auto major) {
        using Operands = typename NumbersOf<kTypeA, kTypeB, type_d(), major()>::type;
        Registration(std::make_unique<Sm90Kernel<Operands, Row>>());
        constexpr Type kUnsigned = kTypeB == Type::kS4 ? Type::kU4 : Type::kU8;
        if constexpr (kTypeB == Type::kS4 || kTypeB == Type::kS8)
          Registration(std::make_unique<Sm90Kernel<Operands, Row, kTypeA, kUnsigned>>());
      };
      add_one(std::integral_constant<Major, Major::kRow>());
      add_one(std::integral_constant<Major, Major::kColumn>());
    };
    if constexpr (kResults != Results::kF32) add_majors(std::integral_constant<Type, kTypeA>());
    if constexpr (kResults != Results::kOwn) add_majors(std::integral_constant<Type, Type::kF32>());
  }
  template <Types kTypes, Results kResults, Majors kMajors>
  static bool add_all() {
    constexpr Type kNumbers[] = {Type::kS4, Type::kS8, Type::kE2M1, Type::kE4M3, Type::kE5M2};
    if constexpr (kTypes >= Types::kS4) {
      constexpr Type kTypeB = kNumbers[static_cast<int>(kTypes) - static_cast<int>(Types::kS4)];
      add_numbers<kTypeB, kResults, Type::kBF16>();
      add_numbers<kTypeB, kResults, Type::kF16>();
    } else if constexpr (kTypes == Types::kFp8) {
      if constexpr (kResults != Results::kF32) add_majors<Type::kE4M3, Type::kBF16, kMajors>();
      if constexpr (kResults != Results::kOwn) add_majors<Type::kE4M3, Type::kF32, kMajors>();
    } else if constexpr (kTypes == Types::kInt8) {
      static_assert(kResults != Results::kF32);
      add_majors<Type::kS8, Type::kS32, kMajors>();
      if constexpr (kResults == Results::kBoth) {
        add_majors<Type::kS8, Type::kBF16, kMajors>();
        add_majors<Type::kS8, Type::kF32, kMajors>();
      }
    } else if constexpr (kTypes == Types::kTF32) {
      static_assert(kResults == Results::kF32);
      add_tf32<kMajors>();
    } else if constexpr (kTypes == Types::kTF32x3) {
      // repack.h copies both operands, into a K-major layout.
      static_assert(kResults == Results::kF32);
      add<Type::kF32, Type::kF32, Major::kRow, Major::kColumn, Math::kTF32x3>();
    } else {
      add_results<Type::kBF16, kResults, kMajors>();
      add_results<Type::kF16, kResults, kMajors>();
    }
    return true;
  }
};

// The words of table.txt.
namespace words {
inline constexpr Types half = Types::kHalf, tf32 = Types::kTF32, tf32x3 = Types::kTF32x3, fp8 = Types::kFp8,
                       int8 = Types::kInt8;
inline constexpr WarpSchedule cooperative = WarpSchedule::kCooperative, pingpong = WarpSchedule::kPingpong,
                              single = WarpSchedule::kSingle;
inline constexpr Types s4 = Types::kS4, s8 = Types::kS8, e2m1 = Types::kE2M1, e4m3 = Types::kE4M3, e5m2 = Types::kE5M2;
inline constexpr Arrangement plain{false, false, Ragged::kNone}, swapped{true, false, Ragged::kNone},
    numbers = swapped, gated{true, true, Ragged::kNone}, ragged_m{true, false, Ragged::kM}, ragged_numbers = ragged_m,
    ragged_gated{true, true, Ragged::kM}, ragged_k{false, false, Ragged::kK}, joined{true, false, Ragged::kNone, true};
inline constexpr Results own = Results::kOwn, f32 = Results::kF32, both = Results::kBoth;
inline constexpr Majors all = Majors::kAll, row = Majors::kRow, three = Majors::kThree, row_a = Majors::kRowA,
                        row_b = Majors::kRowB, k_inner = Majors::kKInner, k_outer = Majors::kKOuter;
}  // namespace words

}  // namespace jax_streamk::sm90

#define JAX_STREAMK_SM90_KERNEL(types, tile_m, tile_n, tile_k, cluster_m, cluster_n, warp_schedule, operands, results, \
                                majors, store_columns)                                                                 \
  JAX_STREAMK_SM90_ROW(                                                                                                \
      types##_##tile_m##x##tile_n##x##tile_k##_##cluster_m##x##cluster_n##_##warp_schedule##_##operands##_##results,   \
      types, tile_m, tile_n, tile_k, cluster_m, cluster_n, warp_schedule, operands, results, majors, store_columns)

#define JAX_STREAMK_SM90_ROW(name, types, tile_m, tile_n, tile_k, cluster_m, cluster_n, warp_schedule, operands,       \
                             results, majors, store_columns)                                                           \
  namespace jax_streamk::sm90 {                                                                                        \
  struct name {                                                                                                        \
    static constexpr int kTileM = tile_m, kTileN = tile_n, kTileK = tile_k, kClusterM = cluster_m,                     \
                         kClusterN = cluster_n, kStoreColumns = store_columns;                                         \
    static constexpr WarpSchedule kWarpSchedule = words::warp_schedule;                                                \
    static constexpr bool kSwapAB = words::operands.swap_ab, kGated = words::operands.gated,                           \
                          kJoined = words::operands.joined;                                                            \
    static constexpr Ragged kRagged = words::operands.ragged;                                                          \
  };                                                                                                                   \
  static bool const JAX_STREAMK_ROW(__LINE__) = Kernels<name>::add_all<words::types, words::results, words::majors>(); \
  }
