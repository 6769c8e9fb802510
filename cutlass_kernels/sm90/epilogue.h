// What happens to a tile's accumulators: the epilogue in registers, then the store by TMA or, if TMA cannot write D, by
// threads.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/sm90/epilogue_operands.h"
#include "cutlass_kernels/sm90/fused_epilogue.h"
#include "cutlass_kernels/sm90/store.h"
#include "cutlass_kernels/sm90/unaligned_store.h"

namespace jax_streamk::sm90 {

// The parameters are those of BoxStore.
template <class Element, bool kSwap, int kTileM, int kTileN, int kWarpgroups, int kColumns, bool kRun = false>
class CollectiveEpilogue : public BoxStore<Element, kSwap, kTileM, kTileN, kWarpgroups, kColumns, kRun> {
  using Store = BoxStore<Element, kSwap, kTileM, kTileN, kWarpgroups, kColumns, kRun>;
  using Store::kValues, Store::kValuesPerBox, Store::kWholeBoxes;

  // Accumulators that pass the activation before the first box of them is stored: those of one box, or of two small
  // ones. All of a tile's if they would wait for TMA, if registers are short, or if boxes overlap.
  static constexpr bool kAll =
      kValues * kWarpgroups <= 64 || kValues >= 144 || kTileM == 256 || kTileN == 216 || kTileN == 224 || !kWholeBoxes;
  static constexpr int kAtOnce = kAll ? kValues : kValuesPerBox * kWarpgroups < 24 ? 2 * kValuesPerBox : kValuesPerBox;

 public:
  static constexpr bool kGated = false;
  using typename Store::TensorStorage;
  struct Params {
    StoreParams<Element> thread;
    cute::TmaDescriptor d;
  };

  // `shape` is the kernel's own.
  template <class ProblemShape>
  static CUresult set_up(Params& params, ProblemShape const& shape, GemmProblem const& p, Buffers const& buffers) {
    bool const unaligned = has_misaligned_d(p);
    params.thread = {p, buffers, unaligned};
    return unaligned ? CUDA_SUCCESS : Store::set_up(params.d, shape, p, buffers.d);
  }

  // Whether to prefetch a residual, and to load a bias before the main loop.
  static bool has_residual(Params const& params) { return params.thread.residual != nullptr; }
  static bool has_early_bias(Params const& params) {
    return params.thread.bias != nullptr && params.thread.unaligned_d == nullptr;
  }

  // Called by one warp, for a tile of the kernel's own result.
  template <class ProblemShape>
  static CUTLASS_DEVICE void prefetch(Params const& params, ProblemShape const& shape, int32_t tile_m, int32_t tile_n,
                                      int32_t batch) {
    int32_t const begin_m = tile_m * kTileM, begin_n = tile_n * kTileN;
    int32_t const extent_m = min(cute::get<0>(shape) - begin_m, kTileM),
                  extent_n = min(cute::get<1>(shape) - begin_n, kTileN);
    if constexpr (kSwap) {
      prefetch_residual(params.thread, batch, begin_n, begin_m, extent_n, extent_m, threadIdx.x % 32);
    } else {
      prefetch_residual(params.thread, batch, begin_m, begin_n, extent_m, extent_n, threadIdx.x % 32);
    }
  }

  // `thread` is the index among the threads that share a tile; the named barrier is its warpgroup's.
  CUTLASS_DEVICE CollectiveEpilogue(Params const& params, TensorStorage& storage, int thread, uint32_t barrier)
      : Store(params.d, storage, thread, barrier), params_(params), storage_(storage), thread_(thread) {}

  // The bias of the tile that the consumers multiply next; loaded only if `early` and if registers can hold it.
  template <class Accumulators, class ProblemShape, class TileCoordinate, class TiledMma>
  CUTLASS_DEVICE auto biases(bool early, ProblemShape const& shape, TileCoordinate const& tile,
                             TiledMma const& tiled_mma) const {
    Biases<kSwap, Element, Accumulators, kWarpgroups == 3> biases;
    if (decltype(biases)::kEarly && early) {
      wait_for_primary();
      auto const [m, n, k, l] = shape;
      biases.load(params_.thread, cute::get<3>(tile), m, n, coordinates_of(shape, tile, tiled_mma), 0);
    }
    return biases;
  }

  template <class ProblemShape, class TileCoordinate, class Biases, class Accumulators, class TiledMma>
  CUTLASS_DEVICE void store(ProblemShape const& shape, TileCoordinate const& tile, Biases& biases,
                            Accumulators& accumulators, TiledMma const& tiled_mma) {
    auto const& epilogue = params_.thread;
    auto const coordinates = [&] { return coordinates_of(shape, tile, tiled_mma); };
    auto const [m, n, k, l] = shape;
    if (!kRun && epilogue.unaligned_d != nullptr) {
      constexpr int kWarpBytes = sizeof(TensorStorage) / (kWarpgroups * 4) / 512 * 512;
      auto* const own = reinterpret_cast<char*>(&storage_) + thread_ / 32 * kWarpBytes;
      store_unaligned<kSwap, kWarpBytes>(epilogue, cute::get<3>(tile), m, n, coordinates(), accumulators,
                                         reinterpret_cast<float*>(own));
      return;
    }
    if (!epilogue.plain)
      apply_epilogue<kAtOnce>(epilogue, cute::get<3>(tile), m, n, coordinates(), biases, accumulators,
                              [&](int begin, int end) CUTLASS_LAMBDA_FUNC_INLINE {
                                this->store_converted(tile, accumulators, begin, end);
                              });
    if (epilogue.plain || kAtOnce == kValues) this->store_converted(tile, accumulators);
  }

 private:
  template <class ProblemShape, class TileCoordinate, class TiledMma>
  CUTLASS_DEVICE auto coordinates_of(ProblemShape const& shape, TileCoordinate const& tile,
                                     TiledMma const& tiled_mma) const {
    auto const whole = cute::make_identity_tensor(cute::take<0, 2>(shape));
    auto const tile_shape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{};
    return tiled_mma.get_slice(thread_).partition_C(cute::local_tile(whole, tile_shape, cute::take<0, 2>(tile)));
  }

  Params const& params_;
  TensorStorage& storage_;
  int const thread_;
};

}  // namespace jax_streamk::sm90
