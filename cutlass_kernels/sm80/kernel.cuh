// The sm80 family: CUTLASS 2.x GEMMs (cp.async and mma.sync), for Ampere and Ada, and on newer GPUs for what no other
// family supports.
//
// A row of table.txt is one GemmUniversalStreamk, which runs every schedule: ThreadblockSwizzleStreamK maps CTAs to
// whole tiles (data-parallel), to `splits` runs of every tile (split-K) or to equal runs over the last waves
// (Stream-K). Peers of a tile add their partials, in the accumulator's type, to a slot of the workspace; the last one
// runs the epilogue. They only wait for CTAs of a lower index, which the GPU dispatches earlier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"
#include "cutlass_kernels/core/cuda_kernel.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"

namespace jax_streamk {

// The words of the table.
namespace sm80 {

struct bf16 {
  using Element = cutlass::bfloat16_t;
  using Accumulator = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  static constexpr Type kType = Type::kBF16;
};
struct f16 {
  using Element = cutlass::half_t;
  using Accumulator = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  static constexpr Type kType = Type::kF16;
};
struct f32 {
  using Element = float;
  using Accumulator = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
  static constexpr Type kType = Type::kF32;
};
struct f64 {
  using Element = double;
  using Accumulator = double;
  // A type of its own, to select the specialization of cutlass::arch::Mma below.
  struct Instruction : cutlass::gemm::GemmShape<16, 8, 4> {};
  static constexpr Type kType = Type::kF64;
};

// Likewise a type of its own: for a float32 D every instruction's sum is promoted (KernelInfo::promotion_k).
template <int kK>
struct Promoted : cutlass::gemm::GemmShape<16, 8, kK> {};
template <class D>
inline constexpr bool kPromotes = std::is_same_v<D, f32>;
template <class AB, class D>
using InstructionOf = std::conditional_t<kPromotes<D>, Promoted<AB::Instruction::kK>, typename AB::Instruction>;

struct native {
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr Math kMath = Math::kNative;
};
// OpMultiplyAdd rounds f32 operands to the nearest TF32, ties away from zero, on the way to the tensor core.
struct tf32 {
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr Math kMath = Math::kTF32;
};
// f32 = large + small, both TF32; all products but small x small are added. An infinite operand gives NaN, because its
// small part is infinity - infinity.
struct tf32x3 {
  using Operator = cutlass::arch::OpMultiplyAddFastF32;
  static constexpr Math kMath = Math::kTF32x3;
};

struct row {
  using Layout = cutlass::layout::RowMajor;
  static constexpr Major kMajor = Major::kRow;
};
struct column {
  using Layout = cutlass::layout::ColumnMajor;
  static constexpr Major kMajor = Major::kColumn;
};

// Peers add to the slot in the order of K, each waiting for the previous one. If there are many, and CTAs to spare,
// they leave partials to a wave of reducing CTAs, which adds them in the same order.
struct ordered : cutlass::gemm::threadblock::ThreadblockSwizzleStreamK {
  using ThreadblockSwizzleStreamK::ThreadblockSwizzleStreamK;
  static constexpr Reduction kReduction = Reduction::kOrdered;
};
// Peers add to the slot in the order of their arrival.
struct atomic : cutlass::gemm::threadblock::ThreadblockSwizzleStreamK {
  using ThreadblockSwizzleStreamK::ThreadblockSwizzleStreamK;
  static constexpr Reduction kReduction = Reduction::kAtomic;
  static ReductionStrategy const kReductionStrategy = kAtomic;
};

}  // namespace sm80

// CUTLASS's f64 instructions.
template <int kM>
using F64Mma =
    cutlass::arch::Mma<cutlass::gemm::GemmShape<kM, 8, 4>, 32, double, cutlass::layout::RowMajor, double,
                       cutlass::layout::ColumnMajor, double, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;

}  // namespace jax_streamk

// f64 at full rate: m16n8k4 from compute capability 9.0 on, before that an m8n8k4 for each half of the rows. These use
// the same registers as m16n8k4, so Params and workspace are the same on every architecture.
template <>
struct cutlass::arch::Mma<jax_streamk::sm80::f64::Instruction, 32, double, cutlass::layout::RowMajor, double,
                          cutlass::layout::ColumnMajor, double, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>
    : jax_streamk::F64Mma<16> {
  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    jax_streamk::F64Mma<16>::operator()(d, a, b, c);
#else
    using Half = jax_streamk::F64Mma<8>;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      Half::FragmentC half = {c[2 * i], c[2 * i + 1]};
      Half{}(half, {a[i]}, b, half);
      d[2 * i] = half[0], d[2 * i + 1] = half[1];
    }
#endif
  }
};

template <int kK, class AB>
struct cutlass::arch::Mma<jax_streamk::sm80::Promoted<kK>, 32, AB, cutlass::layout::RowMajor, AB,
                          cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>
    : cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, kK>, 32, AB, cutlass::layout::RowMajor, AB,
                         cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd> {
  using Base =
      cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, kK>, 32, AB, cutlass::layout::RowMajor, AB,
                         cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;
  using typename Base::FragmentA, typename Base::FragmentB, typename Base::FragmentC;

  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
    FragmentC sum;
    sum.clear();
    Base::operator()(sum, a, b, sum);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < FragmentC::kElements; ++i) d[i] = c[i] + sum[i];
  }
};

namespace jax_streamk {

// CUTLASS's iterator over D, which stores accumulators through the epilogue. It applies batch strides itself, because
// bias and residual have their own.
template <typename Base, typename Accumulator>
class OutputIterator : public Base {
  using D = typename Base::Element;
  using ThreadMap = typename Base::ThreadMap;
  static constexpr int kVector = ThreadMap::kElementsPerAccess;

 public:
  using Element = Accumulator;
  using Fragment = cutlass::Array<Accumulator, Base::Fragment::kElements>;

  struct Params : Base::Params {
    using Base::Params::Params;
    EpilogueParams<Accumulator, D> epilogue;
  };

  CUTLASS_DEVICE OutputIterator(Params const& params, Element* d, cutlass::MatrixCoord extent, int thread,
                                cutlass::MatrixCoord offset)
      : Base(params, reinterpret_cast<D*>(d) + blockIdx.z * params.epilogue.batch_stride_d, extent, thread, offset),
        epilogue_(params.epilogue) {}

  CUTLASS_DEVICE void load(Fragment&) const {}  // there is no C
  CUTLASS_DEVICE void store(Fragment fragment) const {
    if (!epilogue_.plain)
      fragment = apply(epilogue_, fragment, {this->thread_start_row(), this->thread_start_column()},
                       {this->extent_row(), this->extent_column()});
    Base::store(cutlass::NumericArrayConverter<D, Accumulator, Fragment::kElements>{}(fragment));
  }

 private:
  // Applies the epilogue to a fragment at `start`. Not inlined: CUTLASS unrolls the loop over fragments.
  __device__ static __noinline__ Fragment apply(EpilogueParams<Accumulator, D> epilogue, Fragment fragment,
                                                cutlass::MatrixCoord start, cutlass::MatrixCoord extent) {
    using Iterations = typename ThreadMap::Iterations;
    using Delta = typename ThreadMap::Delta;
    D const* const bias = epilogue.bias + blockIdx.z * epilogue.batch_stride_bias;
    D const* const residual = epilogue.residual + blockIdx.z * epilogue.batch_stride_d;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) fragment[i] *= epilogue.alpha;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements / kVector; ++i) {
      int const line = i / Iterations::kColumn, group = line / Iterations::kRow;
      int const row = start.row() + line % Iterations::kRow * Delta::kRow + group % Iterations::kGroup * Delta::kGroup +
                      group / Iterations::kGroup * Delta::kCluster;
      int const column = start.column() + i % Iterations::kColumn * Delta::kColumn;
      if (row >= extent.row() || column >= extent.column()) continue;
      Accumulator* const x = fragment.data() + i * kVector;
      if (epilogue.bias != nullptr) add(x, Accumulator(1), bias + column);
      if (epilogue.residual != nullptr) add(x, epilogue.beta, residual + row * epilogue.ldd + column);
    }
    activate(epilogue.activation, fragment.data(), Fragment::kElements);
    return fragment;
  }

  CUTLASS_DEVICE static void add(Accumulator* x, Accumulator factor, D const* from) {
    auto const values = load_vector<cutlass::AlignedArray<D, kVector>>(from);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) x[i] += factor * static_cast<Accumulator>(values[i]);
  }

  EpilogueParams<Accumulator, D> const& epilogue_;
};

// Of a row of table.txt, whose name profilers show. ptxas (13.0) generates other code for kernels without "cutlass" in
// their names. All were measured with it.
template <typename Row>
__global__ __launch_bounds__(Row::Kernel::Gemm::kThreadCount,
                             1) void sm80_cutlass_gemm(typename Row::Kernel::Gemm::Params params) {
  using Gemm = typename Row::Kernel::Gemm;
  extern __shared__ __align__(16) char storage[];
  let_dependents_start();  // for a separate reduction
  Gemm::invoke(params, *reinterpret_cast<typename Gemm::SharedStorage*>(storage));
}

template <typename AB, typename D, typename Math_, typename MajorA, typename MajorB, typename Threadblock,
          typename Warp, int kStages, int kAlign, int kAlignD, typename Swizzle, typename Row>
class Sm80Kernel final : public CudaKernel {
  using Accumulator = typename AB::Accumulator;
  // CUTLASS's epilogue passes accumulators through this unchanged, and reads no C.
  template <typename T>
  using Unchanged = cutlass::epilogue::thread::LinearCombination<T, kAlignD, Accumulator, Accumulator,
                                                                 cutlass::epilogue::thread::ScaleType::Nothing>;
  using Default = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      typename AB::Element, typename MajorA::Layout, cutlass::ComplexTransform::kNone, kAlign, typename AB::Element,
      typename MajorB::Layout, cutlass::ComplexTransform::kNone, kAlign, typename D::Element, cutlass::layout::RowMajor,
      Accumulator, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Threadblock, Warp, sm80::InstructionOf<AB, D>,
      Unchanged<typename D::Element>, Swizzle, kStages, typename Math_::Operator>::GemmKernel;
  using DefaultEpilogue = typename Default::Epilogue;
  using Epilogue = cutlass::epilogue::threadblock::Epilogue<
      typename DefaultEpilogue::Shape, typename DefaultEpilogue::WarpMmaOperator, DefaultEpilogue::kPartitionsK,
      OutputIterator<typename DefaultEpilogue::OutputTileIterator, Accumulator>,
      typename DefaultEpilogue::AccumulatorFragmentIterator, typename DefaultEpilogue::WarpTileIterator,
      typename DefaultEpilogue::SharedLoadIterator, Unchanged<Accumulator>, typename DefaultEpilogue::Padding,
      DefaultEpilogue::Base::kFragmentsPerIteration>;

 public:
  using Gemm = cutlass::gemm::kernel::GemmUniversalStreamk<typename Default::Mma, Epilogue, Swizzle>;

 private:
  using Params = typename Gemm::Params;

  static constexpr int64_t kSharedMemory = sizeof(typename Gemm::SharedStorage);
  static constexpr int64_t kMaxGridZ = 65535;
  // The swizzle counts in ints: MAC iterations, and CTAs, up to eight per tile in cohorts.
  static constexpr int64_t kMaxCount = int64_t{1} << 30;

 public:
  Sm80Kernel() : CudaKernel(describe()) {}

  // For Stream-K the swizzle's own cost model decides how many tiles are cut among how many workers. This describes it
  // exactly, with two exceptions: if the number of workers is a multiple of the cut tiles, the swizzle aligns them to
  // tiles, which moves boundaries by a few iterations; and CTAs of whole tiles run on whichever SM is free.
  Decomposition decomposition(GemmProblem const& p, Schedule const& s, Device const& device) const override {
    auto const tiles = static_cast<int32_t>(tiles_of(p) * p.batch), k_tiles = static_cast<int32_t>(k_tiles_of(p));
    if (s.kind != ScheduleKind::kStreamK) return Decomposition::make(s.kind, tiles, k_tiles, device.sms, s.splits);
    Decomposition d = Decomposition::make(ScheduleKind::kDataParallel, tiles, k_tiles, device.sms, 1);
    Swizzle const swizzle = params_of(p, s, device, {}).block_mapping;
    if (swizzle.sk_tiles == 0) return d;
    d.kind = s.kind;
    d.stream_k_tiles = swizzle.sk_tiles;
    d.stream_k_workers = swizzle.sk_regions() * swizzle.sk_blocks_per_region();
    d.runs = EvenRuns::of(d.stream_k_tiles * d.k_tiles, d.stream_k_workers);
    d.workers = d.stream_k_tiles == d.tiles ? d.stream_k_workers : std::max(d.stream_k_workers, swizzle.avail_sms);
    return d;
  }

 protected:
  Status can_launch(GemmProblem const& p, Schedule const& s, Device const& device) const override {
    auto const refuse = [&](std::string const& why) { return Status::invalid(info.name + ": " + why); };
    if (device.arch < 80) return refuse("it needs compute capability 8.0 or newer");
    if (kSharedMemory > shared_memory_per_cta(device))
      return refuse("it needs " + std::to_string(kSharedMemory) + " bytes of shared memory per CTA, and sm_" +
                    std::to_string(device.arch) + " has " + std::to_string(shared_memory_per_cta(device)));
    bool const split = !is_data_parallel(s);
    if (split && p.batch > 1)
      return refuse("one launch splits one GEMM, and the batch is " + std::to_string(p.batch) +
                    "; a batch runs data-parallel, or as SplitK with reduction \"separate\"");
    int64_t const tiles = tiles_of(p);
    if (tiles >= kMaxCount / 8 || std::max({p.m, p.n, p.k}) >= 2 * kMaxCount - 1024)
      return refuse("too large: " + std::to_string(tiles) + " tiles");
    if (tiles * p.batch >= kMaxCount)
      return refuse("too large: " + std::to_string(tiles * p.batch) + " tiles over the batch");
    if (split && tiles * k_tiles_of(p) >= kMaxCount)
      return refuse("too large to split: " + std::to_string(tiles * k_tiles_of(p)) + " MAC iterations");
    return {};
  }

  int64_t launch_workspace_bytes(GemmProblem const& p, Schedule const& s, Device const& device) const override {
    Params const params = params_of(p, s, device, {});
    return needs_workspace(params) ? align_workspace(static_cast<int64_t>(params.get_workspace_size())) : 0;
  }

  // Slices of equal extent are evenly spaced in A and B: one launch with the slices as batch, and another for a shorter
  // last slice. A batched problem takes a launch per slice or per batch, whichever are fewer.
  Status launch(GemmProblem const& p, Slices const& slices, Schedule const& s, LaunchPolicy const&,
                Device const& device, Buffers const& buffers, bool, cudaStream_t stream) const override {
    if (slices.count == 1) return launch_batch(p, s, device, buffers, stream);
    auto const whole = static_cast<int32_t>(p.k / slices.extent);
    int64_t const stride_a = MajorA::kMajor == Major::kRow ? slices.extent : slices.extent * p.a.ld;
    int64_t const stride_b = MajorB::kMajor == Major::kRow ? slices.extent * p.b.ld : slices.extent;
    auto const part = [&](int32_t slice, int32_t count, int64_t batch, int64_t batches) {
      GemmProblem q = p;
      q.k = std::min(slices.extent, p.k - slice * slices.extent);
      q.batch = batches;
      if (count > 1)
        q.batch = count, q.a.batch_stride = stride_a, q.b.batch_stride = stride_b, q.d.batch_stride *= p.batch;
      Buffers at = buffers;
      at.a = static_cast<typename AB::Element const*>(buffers.a) + slice * stride_a + batch * p.a.batch_stride;
      at.b = static_cast<typename AB::Element const*>(buffers.b) + slice * stride_b + batch * p.b.batch_stride;
      at.d = static_cast<typename D::Element*>(buffers.d) + (slice * p.batch + batch) * p.d.batch_stride;
      return launch_batch(q, s, device, at, stream);
    };
    Status status;
    if (slices.count <= p.batch * (1 + (whole < slices.count))) {
      for (int32_t slice = 0; slice < slices.count && status.ok(); ++slice) status = part(slice, 1, 0, p.batch);
    } else {
      for (int64_t batch = 0; batch < p.batch && status.ok(); ++batch) {
        if (whole > 0) status = part(0, whole, batch, 1);
        if (status.ok() && whole < slices.count) status = part(whole, 1, batch, 1);
      }
    }
    return status;
  }

  void const* entry_point() const override { return reinterpret_cast<void const*>(&sm80_cutlass_gemm<Row>); }

 private:
  Status launch_batch(GemmProblem const& problem, Schedule const& s, Device const& device, Buffers const& buffers,
                      cudaStream_t stream) const {
    for (int64_t first = 0; first < problem.batch; first += kMaxGridZ) {
      GemmProblem p = problem;
      p.batch = std::min(problem.batch - first, kMaxGridZ);
      Buffers at = buffers;
      at.a = static_cast<typename AB::Element const*>(buffers.a) + first * p.a.batch_stride;
      at.b = static_cast<typename AB::Element const*>(buffers.b) + first * p.b.batch_stride;
      at.d = static_cast<typename D::Element*>(buffers.d) + first * p.d.batch_stride;
      at.bias = static_cast<typename D::Element const*>(buffers.bias) + first * p.epilogue.batch_stride_bias;
      at.residual = static_cast<typename D::Element const*>(buffers.residual) + first * p.d.batch_stride;
      Params params = params_of(p, s, device, at);
      // Zeroes the barriers, since XLA does not clear the workspace.
      if (needs_workspace(params) && params.init_workspace(at.workspace, stream) != cutlass::Status::kSuccess)
        return Status::internal(info.name + ": clearing its barriers failed");
      sm80_cutlass_gemm<Row><<<params.get_grid_dims(), Gemm::kThreadCount, kSharedMemory, stream>>>(params);
      if (Status status = from_cuda(cudaGetLastError(), info.name + ": launch"); !status.ok()) return status;
    }
    return {};
  }

  static KernelInfo describe() {
    auto const initial = [](Major major) { return major == Major::kRow ? 'r' : 'c'; };
    auto const number = [](int x) { return std::to_string(x); };
    constexpr int kWidestD = std::min<int>(kAlign, 16 / sizeof(typename D::Element));
    constexpr bool kSliced = Threadblock::kK > Warp::kK;

    KernelInfo info;
    info.name = std::string("sm80_") + name_of(AB::kType) + "_" + name_of(D::kType) + "_" + initial(MajorA::kMajor) +
                initial(MajorB::kMajor) + "_" + number(Threadblock::kM) + "x" + number(Threadblock::kN) + "x" +
                number(Threadblock::kK) + "_s" + number(kStages) + "_a" + number(kAlign);
    if (kAlignD != kWidestD) info.name += "_d" + number(kAlignD);
    if (Math_::kMath != Math::kNative) info.name += std::string("_") + name_of(Math_::kMath);
    if (kSliced) info.name += "_sliced";
    if (Swizzle::kReduction == Reduction::kAtomic) info.name += "_atomic";

    info.family = Family::kSm80;
    info.a.format = info.b.format = AB::kType;
    info.d.format = D::kType;
    info.math = Math_::kMath;
    info.a.major = MajorA::kMajor;
    info.b.major = MajorB::kMajor;
    info.a.align = info.b.align = kAlign;
    info.d.align = kAlignD;
    info.tile_m = Threadblock::kM;
    info.tile_n = Threadblock::kN;
    info.tile_k = Threadblock::kK;
    info.stages = kStages;
    info.warp_schedule = kStages > 2 ? "multistage" : "pipelined";
    info.split_k_reductions = info.stream_k_reductions = {Swizzle::kReduction};
    if (D::kType == accumulator_of(AB::kType)) info.split_k_reductions.push_back(Reduction::kSeparate);
    info.threads = Gemm::kThreadCount;
    info.shared_memory = kSharedMemory;
    if (sm80::kPromotes<D>) info.promotion_k = AB::Instruction::kK;
    return info;
  }

  static int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
  static int64_t tiles_of(GemmProblem const& p) {
    return ceil_div(p.m, Threadblock::kM) * ceil_div(p.n, Threadblock::kN);
  }
  static int64_t k_tiles_of(GemmProblem const& p) { return ceil_div(p.k, Threadblock::kK); }

  static bool is_data_parallel(Schedule const& s) {
    switch (s.kind) {
      case ScheduleKind::kDataParallel: return true;
      case ScheduleKind::kSplitK: return s.splits == 1;
      case ScheduleKind::kStreamK: return s.max_sms == 1;
    }
    return true;
  }

  // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". CUDA takes 1 KiB per CTA.
  static int64_t shared_memory_per_sm(Device const& device) {
    bool const small = device.arch == 86 || device.arch == 89 || device.arch >= 120;
    return (device.arch < 90 && !small ? 164 : small ? 100 : 228) * int64_t{1024};
  }
  static int64_t shared_memory_per_cta(Device const& device) { return shared_memory_per_sm(device) - 1024; }

  // A lower bound of CTAs per SM, for 255 registers per thread. The workspace depends on it, so lowering (perhaps
  // without a GPU) and the launch must agree.
  static int occupancy(Device const& device) {
    int64_t const by_registers = 65536 / (256 * Gemm::kThreadCount);
    int64_t const by_shared_memory = shared_memory_per_sm(device) / (kSharedMemory + 1024);
    return static_cast<int>(std::max<int64_t>(1, std::min(by_registers, by_shared_memory)));
  }

  // A LaunchPolicy has no effect: the swizzle chooses its own order, along the shorter side of D or in cohorts. max_sms
  // is the number of SMs that a Stream-K cut balances for; whole tiles may still run on all SMs.
  static Params params_of(GemmProblem const& p, Schedule const& s, Device const& device, Buffers const& buffers) {
    // CUTLASS splits only in mode kGemm, whose batch count is the number of splits (1: Stream-K).
    bool const batched = is_data_parallel(s);
    typename Gemm::Arguments const arguments(
        batched ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k)},
        batched                           ? static_cast<int>(p.batch)
        : s.kind == ScheduleKind::kSplitK ? s.splits
                                          : 1,
        {}, buffers.a, buffers.b, nullptr, buffers.d, p.a.batch_stride, p.b.batch_stride, 0, 0, p.a.ld, p.b.ld, 0,
        p.d.ld, s.kind == ScheduleKind::kStreamK && s.max_sms > 0 ? s.max_sms : -1);
    Params params(arguments, device.sms, occupancy(device));
    params.params_D.epilogue = EpilogueParams<Accumulator, typename D::Element>(p, buffers);
    // CTAs remapped by the swizzle could wait for a higher index: a deadlock if another stream's kernel holds its SM.
    params.block_mapping.remap_block_indices = false;
    // The swizzle's constructor does not know that its subclass is atomic.
    if (Swizzle::kReduction == Reduction::kAtomic) params.block_mapping.reduction_blocks = 0;
    return params;
  }

  // Even without cut tiles get_workspace_size() is not zero: it counts one CTA.
  static bool needs_workspace(Params const& params) { return params.block_mapping.sk_tiles > 0; }
};

}  // namespace jax_streamk

// One row of table.txt: a type, which names its kernel, and the kernel.
#define JAX_STREAMK_SM80_KERNEL(ab, d, math, a, b, m, n, k, wm, wn, wk, stages, align, align_d, sum)                 \
  JAX_STREAMK_SM80_ROW(                                                                                              \
      ab##_##d##_##math##_##a##_##b##_##m##x##n##x##k##_##wm##x##wn##x##wk##_##stages##_##align##_##align_d##_##sum, \
      ab, d, math, a, b, ::cutlass::gemm::GemmShape<m, n, k>, ::cutlass::gemm::GemmShape<wm, wn, wk>, stages, align, \
      align_d, sum)

#define JAX_STREAMK_SM80_ROW(name, ...)                                                           \
  namespace jax_streamk::sm80 {                                                                   \
  struct name {                                                                                   \
    using Kernel = Sm80Kernel<__VA_ARGS__, name>;                                                 \
  };                                                                                              \
  static Registration const JAX_STREAMK_ROW(__LINE__)(std::make_unique<typename name::Kernel>()); \
  }
