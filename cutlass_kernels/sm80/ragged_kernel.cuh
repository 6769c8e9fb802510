// Ragged products (core/ragged_table.cuh) by CUTLASS 2.x's main loop and epilogue: a CTA per place on the GPU
// multiplies one tile after another, each with pointers to its group's operands. For GPUs, types and alignments without
// TMA.
#pragma once

#include <algorithm>
#include <string>

#include "cutlass_kernels/core/ragged_table.cuh"
#include "cutlass_kernels/launch/cuda_kernel.h"
#include "cutlass_kernels/sm80/tile.cuh"

namespace jax_streamk {

template <typename Tile_, Ragged kRagged>
struct Sm80RaggedGemm {
  using Tile = Tile_;
  using Shape = typename Tile::Shape;
  using Mma = typename Tile::Mma;
  using Epilogue = typename Tile::Epilogue;
  using Output = typename Tile::Output;
  using A = typename Tile::A::Element;
  using B = typename Tile::B::Element;
  using D = typename Tile::D::Element;
  static constexpr bool kRows = kRagged == Ragged::kM;
  // Groups begin at whole lines of what they cut.
  static_assert(Tile::MajorA::kMajor == (kRows ? Major::kRow : Major::kColumn) &&
                (kRows || Tile::MajorB::kMajor == Major::kRow));
  using Table = RaggedTable<kRows, Shape::kM, Shape::kK>;
  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;

  struct Params {
    typename Table::Params tiles;
    int32_t m, n, k;
    A const* a;
    B const* b;
    D* d;
    int64_t lda, ldb, ldd, batch_stride_b, batch_stride_d;
    typename Mma::IteratorA::Params loads_of_a;
    typename Mma::IteratorB::Params loads_of_b;
    typename Output::Params stores;
  };

  struct SharedStorage {
    union {
      typename Mma::SharedStorage multiply;
      typename Epilogue::SharedStorage store;
    };
    Table table;
    // Of this CTA; not in registers, since the main loop needs them all.
    int32_t index;
    typename Table::Tile tile;
  };

  static CUTLASS_DEVICE void run(Params const& params, SharedStorage& shared) {
    if (threadIdx.x < 32) shared.table.fill(params.tiles);
    if (threadIdx.x == 0) shared.index = blockIdx.x;
    __syncthreads();
    if constexpr (!kRows) shared.table.sort(params.tiles);
    while (shared.index < shared.table.all_tiles(params.tiles)) {
      if (threadIdx.x == 0) shared.tile = shared.table.at(params.tiles, shared.index);
      __syncthreads();
      typename Mma::FragmentC sums;
      multiply(params, shared, sums);
      // Taken before the epilogue, which is long enough for the counter to answer.
      int32_t next = 0;
      if (threadIdx.x == 0) {
        int32_t const others = params.tiles.taken == nullptr ? shared.index : atomicAdd(params.tiles.taken, 1u);
        next = static_cast<int32_t>(gridDim.x) + others;
      }
      store(params, shared, sums);
      if (threadIdx.x == 0) shared.index = next;
      __syncthreads();
    }
  }

 private:
  static CUTLASS_DEVICE void multiply(Params const& params, SharedStorage& shared, typename Mma::FragmentC& sums) {
    sums.clear();
    auto const& tile = shared.tile;
    int const rows = kRows ? tile.run.rows() : params.m, depth = kRows ? params.k : tile.run.rows();
    if (depth == 0 || Table::is_outside(params.tiles, tile)) return;
    int64_t const begin = tile.run.begin;
    int const row = kRows ? 0 : tile.m * Shape::kM, column = (kRows ? tile.m : tile.n) * Shape::kN;
    int const thread = threadIdx.x, warp = cutlass::canonical_warp_idx_sync();
    B const* const b = params.b + (kRows ? tile.batch * params.batch_stride_b : begin * params.ldb);
    typename Mma::IteratorA of_a(params.loads_of_a, const_cast<A*>(params.a + begin * params.lda), {rows, depth},
                                 thread, {row, 0});
    typename Mma::IteratorB of_b(params.loads_of_b, const_cast<B*>(b), {depth, params.n}, thread, {0, column});
    Mma mma(shared.multiply, thread, warp, thread % 32);
    mma((depth + Shape::kK - 1) / Shape::kK, sums, of_a, of_b, sums);
  }

  static CUTLASS_DEVICE void store(Params const& params, SharedStorage& shared, typename Mma::FragmentC const& sums) {
    auto const& tile = shared.tile;
    int64_t const begin = tile.run.begin;
    int const rows = kRows ? tile.run.rows() : params.m;
    int const row = kRows ? 0 : tile.m * Shape::kM, column = (kRows ? tile.m : tile.n) * Shape::kN;
    int const thread = threadIdx.x, warp = cutlass::canonical_warp_idx_sync();
    typename Output::Params stores = params.stores;
    if (Table::is_outside(params.tiles, tile)) {
      stores.epilogue.plain = true;
    } else if (stores.epilogue.bias != nullptr) {
      stores.epilogue.bias += tile.batch * stores.epilogue.batch_stride_bias;
    }
    D* const d = params.d + (kRows ? begin * params.ldd : tile.batch * params.batch_stride_d);
    Output output(stores, reinterpret_cast<typename Output::Element*>(d), {rows, params.n}, thread, {row, column});
    Epilogue epilogue(shared.store, thread, warp, thread % 32);
    epilogue(typename Epilogue::OutputOp(typename Epilogue::OutputOp::Params()), output, sums);
  }
};

// Of a row of table.txt, whose name profilers show.
template <typename Row>
__global__ __launch_bounds__(Row::Kernel::Gemm::kThreads,
                             1) void sm80_cutlass_ragged_gemm(typename Row::Kernel::Gemm::Params params) {
  using Gemm = typename Row::Kernel::Gemm;
  extern __shared__ __align__(16) char storage[];
  Gemm::run(params, *reinterpret_cast<typename Gemm::SharedStorage*>(storage));
}

template <typename Tile, Ragged kRagged, typename Row>
class Sm80RaggedKernel final : public CudaKernel {
 public:
  using Gemm = Sm80RaggedGemm<Tile, kRagged>;

 private:
  using Shape = typename Tile::Shape;
  using A = typename Gemm::A;
  using B = typename Gemm::B;
  using D = typename Gemm::D;

 public:
  Sm80RaggedKernel() : CudaKernel(describe()) {}

 protected:
  Status launch(Launch const& launch, LaunchPolicy const& policy, Device const& device, Buffers const& buffers,
                cudaStream_t stream) const override {
    GemmProblem const& p = launch.problem;
    int64_t const counter = counter_bytes(info, p);
    if (counter > 0) {
      Status const status = from_cuda(cudaMemsetAsync(buffers.workspace, 0, counter, stream), info.name + ": zeroing");
      if (!status.ok()) return status;
    }
    typename Gemm::Params params{};
    int32_t const places = device.sms * ctas_per_sm();
    params.tiles.set_up(p, buffers, order_of(p, policy), static_cast<int32_t>((p.n + Shape::kN - 1) / Shape::kN),
                        Shape::kN, places, counter > 0 ? buffers.workspace : nullptr);
    params.m = static_cast<int32_t>(p.m), params.n = static_cast<int32_t>(p.n), params.k = static_cast<int32_t>(p.k);
    params.a = static_cast<A const*>(buffers.a), params.b = static_cast<B const*>(buffers.b);
    params.d = static_cast<D*>(buffers.d);
    params.lda = p.a.ld, params.ldb = p.b.ld, params.ldd = p.d.ld;
    params.batch_stride_b = p.b.batch_stride, params.batch_stride_d = p.d.batch_stride;
    params.loads_of_a = typename Gemm::Mma::IteratorA::Params(typename Tile::MajorA::Layout(p.a.ld));
    params.loads_of_b = typename Gemm::Mma::IteratorB::Params(typename Tile::MajorB::Layout(p.b.ld));
    params.stores = typename Gemm::Output::Params(cutlass::layout::RowMajor(p.d.ld));
    params.stores.epilogue = EpilogueParams<typename Tile::Accumulator, D>(p, buffers);
    auto const ctas = static_cast<unsigned>(std::min<int64_t>(places, params.tiles.most_tiles()));
    sm80_cutlass_ragged_gemm<Row><<<ctas, Gemm::kThreads, kSharedMemory, stream>>>(params);
    return from_cuda(cudaGetLastError(), info.name + ": launch");
  }

  void const* entry_point() const override { return reinterpret_cast<void const*>(&sm80_cutlass_ragged_gemm<Row>); }

 private:
  static constexpr int64_t kSharedMemory = sizeof(typename Gemm::SharedStorage);

  // On the GPU of the first launch. CTAs wait for no other, so that any number of them is right.
  int32_t ctas_per_sm() const {
    static int32_t const found = [this] {
      Resources resources;
      return this->resources(resources).ok() ? std::max(resources.ctas_per_sm, 1) : 1;
    }();
    return found;
  }

  static TileOrder order_of(GemmProblem const& p, LaunchPolicy const& policy) {
    return {static_cast<int32_t>((p.m + Shape::kM - 1) / Shape::kM),
            static_cast<int32_t>((p.n + Shape::kN - 1) / Shape::kN), policy.raster, policy.swizzle};
  }

  static KernelInfo describe() {
    KernelInfo info = Tile::describe(Gemm::kThreads, kSharedMemory, std::string("_ragged_") + name_of(kRagged));
    info.ragged = kRagged;
    return info;
  }
};

}  // namespace jax_streamk
