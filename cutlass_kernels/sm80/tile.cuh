// One output tile: CUTLASS's main loop and epilogue of the words of a row, and what the family's kernels say of
// themselves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/sm80/words.cuh"

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

// The types of a tile's main loop (Mma) and epilogue.
template <typename A_, typename B_, typename D_, typename Math_, typename MajorA_, typename MajorB_,
          typename Threadblock, typename Warp, int kStages, int kAlign, int kAlignD>
struct Sm80Tile {
  using A = A_;
  using B = B_;
  using D = D_;
  using MajorA = MajorA_;
  using MajorB = MajorB_;
  using Shape = Threadblock;
  using Accumulator = typename A::Accumulator;
  // CUTLASS's epilogue passes accumulators through this unchanged, and reads no C.
  template <typename T>
  using Unchanged = cutlass::epilogue::thread::LinearCombination<T, kAlignD, Accumulator, Accumulator,
                                                                 cutlass::epilogue::thread::ScaleType::Nothing>;
  using Default = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      typename A::Element, typename MajorA::Layout, cutlass::ComplexTransform::kNone, kAlign, typename B::Element,
      typename MajorB::Layout, cutlass::ComplexTransform::kNone, kAlign, typename D::Element, cutlass::layout::RowMajor,
      Accumulator, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Threadblock, Warp, sm80::InstructionOf<A, D>,
      Unchanged<typename D::Element>, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, kStages,
      typename Math_::Operator>::GemmKernel;
  using DefaultEpilogue = typename Default::Epilogue;
  using Output = OutputIterator<typename DefaultEpilogue::OutputTileIterator, Accumulator>;

  using Mma = typename Default::Mma;
  using Epilogue = cutlass::epilogue::threadblock::Epilogue<
      typename DefaultEpilogue::Shape, typename DefaultEpilogue::WarpMmaOperator, DefaultEpilogue::kPartitionsK, Output,
      typename DefaultEpilogue::AccumulatorFragmentIterator, typename DefaultEpilogue::WarpTileIterator,
      typename DefaultEpilogue::SharedLoadIterator, Unchanged<Accumulator>, typename DefaultEpilogue::Padding,
      DefaultEpilogue::Base::kFragmentsPerIteration>;

  // All but the schedules. `suffix` ends the name.
  static KernelInfo describe(int threads, int64_t shared_memory, std::string const& suffix) {
    auto const initial = [](Major major) { return major == Major::kRow ? 'r' : 'c'; };
    auto const number = [](int x) { return std::to_string(x); };
    constexpr int kWidestD = std::min<int>(kAlign, 16 / sizeof(typename D::Element));
    constexpr bool kSliced = Threadblock::kK > Warp::kK;

    KernelInfo info;
    info.name = std::string("sm80_") + name_of(A::kType) + "_" + name_of(D::kType) + "_" + initial(MajorA::kMajor) +
                initial(MajorB::kMajor) + "_" + number(Threadblock::kM) + "x" + number(Threadblock::kN) + "x" +
                number(Threadblock::kK) + "_s" + number(kStages) + "_a" + number(kAlign);
    if (kAlignD != kWidestD) info.name += "_d" + number(kAlignD);
    if (Math_::kMath != Math::kNative) info.name += std::string("_") + name_of(Math_::kMath);
    if (kSliced) info.name += "_sliced";
    info.name += suffix;
    info.family = Family::kSm80;
    info.a.format = A::kType;
    info.b.format = B::kType;
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
    info.warp_schedule = kStages > 2 ? WarpSchedule::kMultistage : WarpSchedule::kPipelined;
    info.threads = threads;
    info.shared_memory = shared_memory;
    if (sm80::kPromotes<D>) info.promotion_k = A::Instruction::kK;
    return info;
  }
};

}  // namespace jax_streamk
