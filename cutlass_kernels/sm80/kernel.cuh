// The sm80 family: CUTLASS 2.x GEMMs (cp.async and mma.sync), for Ampere and Ada, and on newer GPUs for what no other
// family supports. A translation unit has a few rows of table.txt.
//
// A row of table.txt is one GemmUniversalStreamk, which runs every schedule: ThreadblockSwizzleStreamK maps CTAs to
// whole tiles (data-parallel), to `splits` runs of every tile (split-K) or to equal runs over the last waves
// (Stream-K). Peers of a tile add their partials, in the accumulator's type, to a slot of the workspace; the last one
// runs the epilogue. They only wait for CTAs of a lower index, which the GPU dispatches earlier. Or it is a ragged
// kernel (ragged_kernel.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "cutlass/gemm/kernel/gemm_universal_streamk.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/launch/cuda_kernel.h"
#include "cutlass_kernels/sm80/family.h"
#include "cutlass_kernels/sm80/ragged_kernel.cuh"
#include "cutlass_kernels/sm80/tile.cuh"

namespace jax_streamk {

namespace sm80 {

// Peers add to the slot in the order of K, each waiting for the previous one. If there are many, and CTAs to spare,
// they leave partials to a wave of reducing CTAs, which adds them in the same order.
struct OrderedSwizzle : cutlass::gemm::threadblock::ThreadblockSwizzleStreamK {
  using ThreadblockSwizzleStreamK::ThreadblockSwizzleStreamK;
  static constexpr Reduction kReduction = Reduction::kOrdered;
};
// Peers add to the slot in the order of their arrival.
struct AtomicSwizzle : cutlass::gemm::threadblock::ThreadblockSwizzleStreamK {
  using ThreadblockSwizzleStreamK::ThreadblockSwizzleStreamK;
  static constexpr Reduction kReduction = Reduction::kAtomic;
  static ReductionStrategy const kReductionStrategy = kAtomic;
};

}  // namespace sm80

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

template <typename Tile, typename Swizzle, typename Row>
class Sm80Kernel final : public CudaKernel {
  using A = typename Tile::A;
  using B = typename Tile::B;
  using D = typename Tile::D;
  using Threadblock = typename Tile::Shape;
  using Accumulator = typename Tile::Accumulator;

 public:
  using Gemm = cutlass::gemm::kernel::GemmUniversalStreamk<typename Tile::Mma, typename Tile::Epilogue, Swizzle>;

 private:
  using Params = typename Gemm::Params;

  static constexpr int64_t kSharedMemory = sizeof(typename Gemm::SharedStorage);
  static constexpr int64_t kMaxGridZ = 65535;

 public:
  Sm80Kernel() : CudaKernel(describe()) {}

 protected:
  std::optional<int64_t> launch_workspace_bytes(GemmProblem const& p, Schedule const& s,
                                                Device const& device) const override {
    Params const params = params_of(p, s, device, {});
    return needs_workspace(params) ? align_workspace(static_cast<int64_t>(params.get_workspace_size())) : 0;
  }

  // Slices of equal extent are evenly spaced in A and B: one launch with the slices as batch, and another for a shorter
  // last slice. A batched problem takes a launch per slice or per batch, whichever are fewer.
  Status launch(Launch const& launch, LaunchPolicy const&, Device const& device, Buffers const& buffers,
                cudaStream_t stream) const override {
    GemmProblem const& p = launch.problem;
    Slices const& slices = launch.slices;
    Schedule const& s = launch.schedule;
    if (slices.count == 1) return launch_batch(p, s, device, buffers, stream);
    auto const whole = static_cast<int32_t>(p.k / slices.extent);
    int64_t const stride_a = Tile::MajorA::kMajor == Major::kRow ? slices.extent : slices.extent * p.a.ld;
    int64_t const stride_b = Tile::MajorB::kMajor == Major::kRow ? slices.extent * p.b.ld : slices.extent;
    auto const part = [&](int32_t slice, int32_t count, int64_t batch, int64_t batches) {
      GemmProblem q = p;
      q.k = std::min(slices.extent, p.k - slice * slices.extent);
      q.batch = batches;
      if (count > 1)
        q.batch = count, q.a.batch_stride = stride_a, q.b.batch_stride = stride_b, q.d.batch_stride *= p.batch;
      Buffers at = buffers;
      at.a = static_cast<typename A::Element const*>(buffers.a) + slice * stride_a + batch * p.a.batch_stride;
      at.b = static_cast<typename B::Element const*>(buffers.b) + slice * stride_b + batch * p.b.batch_stride;
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
      at.a = static_cast<typename A::Element const*>(buffers.a) + first * p.a.batch_stride;
      at.b = static_cast<typename B::Element const*>(buffers.b) + first * p.b.batch_stride;
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
    constexpr bool kAtomic = Swizzle::kReduction == Reduction::kAtomic;
    KernelInfo info = Tile::describe(Gemm::kThreadCount, kSharedMemory, kAtomic ? "_atomic" : "");
    info.split_k_reductions = info.stream_k_reductions = {Swizzle::kReduction};
    if (D::kType == accumulator_of(A::kType)) info.split_k_reductions.push_back(Reduction::kSeparate);
    return info;
  }

  // A LaunchPolicy has no effect: the swizzle chooses its own order, along the shorter side of D or in cohorts. max_sms
  // is the number of SMs that a Stream-K cut balances for; whole tiles may still run on all SMs.
  Params params_of(GemmProblem const& p, Schedule const& s, Device const& device, Buffers const& buffers) const {
    // CUTLASS splits only in mode kGemm, whose batch count is the number of splits (1: Stream-K).
    bool const batched = !sm80::shares_tiles(s);
    typename Gemm::Arguments const arguments(
        batched ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k)},
        batched                           ? static_cast<int>(p.batch)
        : s.kind == ScheduleKind::kSplitK ? s.splits
                                          : 1,
        {}, buffers.a, buffers.b, nullptr, buffers.d, p.a.batch_stride, p.b.batch_stride, 0, 0, p.a.ld, p.b.ld, 0,
        p.d.ld, s.kind == ScheduleKind::kStreamK && s.max_sms > 0 ? s.max_sms : -1);
    Params params(arguments, device.sms, sm80::occupancy(info, device));
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

// The last word of a row.
namespace sm80 {

struct ordered {
  template <typename Tile, typename Row>
  using Kernel = Sm80Kernel<Tile, OrderedSwizzle, Row>;
};
struct atomic {
  template <typename Tile, typename Row>
  using Kernel = Sm80Kernel<Tile, AtomicSwizzle, Row>;
};
struct ragged_m {
  template <typename Tile, typename Row>
  using Kernel = Sm80RaggedKernel<Tile, Ragged::kM, Row>;
};
struct ragged_k {
  template <typename Tile, typename Row>
  using Kernel = Sm80RaggedKernel<Tile, Ragged::kK, Row>;
};

}  // namespace sm80
}  // namespace jax_streamk

// One row of table.txt: a type, which names its kernel, and the kernel. The row's last word tells which of the kernels.
#define JAX_STREAMK_SM80_KERNEL(ab, d, math, a, b, m, n, k, wm, wn, wk, stages, align, align_d, kind)                 \
  JAX_STREAMK_SM80_ROW(                                                                                               \
      ab##_##d##_##math##_##a##_##b##_##m##x##n##x##k##_##wm##x##wn##x##wk##_##stages##_##align##_##align_d##_##kind, \
      kind, ab, ab, d, math, a, b, ::cutlass::gemm::GemmShape<m, n, k>, ::cutlass::gemm::GemmShape<wm, wn, wk>,       \
      stages, align, align_d)

#define JAX_STREAMK_SM80_ROW(name, kind, ...)                                                     \
  namespace jax_streamk::sm80 {                                                                   \
  struct name {                                                                                   \
    using Kernel = kind::Kernel<Sm80Tile<__VA_ARGS__>, name>;                                     \
  };                                                                                              \
  static Registration const JAX_STREAMK_ROW(__LINE__)(std::make_unique<typename name::Kernel>()); \
  }
