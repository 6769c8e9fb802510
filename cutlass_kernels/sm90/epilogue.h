// What happens to a tile's accumulators: the epilogue in registers, then the store by TMA or, if TMA cannot write D, by
// threads.
#pragma once

#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/sm90/epilogue_operands.h"
#include "cutlass_kernels/sm90/fused_epilogue.h"
#include "cutlass_kernels/sm90/store.h"
#include "cutlass_kernels/sm90/unaligned_store.h"

namespace jax_streamk::sm90 {

// The parameters are those of BoxStore; kInlines: as activated() has it.
template <class Element, bool kSwap, int kTileM, int kTileN, int kWarpgroups, int kColumns, bool kRun = false,
          bool kInlines = false>
class TileEpilogue : public BoxStore<Element, kSwap, kTileM, kTileN, kWarpgroups, kColumns, kRun> {
  using Store = BoxStore<Element, kSwap, kTileM, kTileN, kWarpgroups, kColumns, kRun>;
  using Store::kValues, Store::kValuesPerBox, Store::kWholeBoxes;
  using Accumulators = typename Store::Accumulators;
  static constexpr bool kIsPlain = std::is_same_v<typename Accumulators::Value, int32_t>;  // always

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
  static CUresult set_up(Params& params, OwnShape const& shape, GemmProblem const& p, Buffers const& buffers) {
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
  static CUTLASS_DEVICE void prefetch(Params const& params, OwnShape const& shape, TileAt const& tile) {
    int32_t const begin_m = tile.m * kTileM, begin_n = tile.n * kTileN;
    int32_t const extent_m = min(shape.m - begin_m, kTileM), extent_n = min(shape.n - begin_n, kTileN);
    if constexpr (kSwap) {
      prefetch_residual(params.thread, tile.batch, begin_n, begin_m, extent_n, extent_m, threadIdx.x % 32);
    } else {
      prefetch_residual(params.thread, tile.batch, begin_m, begin_n, extent_m, extent_n, threadIdx.x % 32);
    }
  }

  // `thread` is the index among the threads that share a tile; the named barrier is its warpgroup's.
  CUTLASS_DEVICE TileEpilogue(Params const& params, TensorStorage& storage, int thread, uint32_t barrier)
      : Store(params.d, storage, thread, barrier), params_(params), storage_(storage), thread_(thread) {}

  // The bias of the tile that the consumers multiply next; loaded only if `early` and if registers can hold it.
  CUTLASS_DEVICE auto biases(bool early, OwnShape const& shape, TileAt const& tile) const {
    Biases<kSwap, Element, Accumulators, kWarpgroups == 3> biases;
    if constexpr (!kIsPlain && decltype(biases)::kEarly) {
      if (early) {
        wait_for_primary();
        biases.load(params_.thread, tile.batch, shape.m, shape.n, places_of(tile), 0);
      }
    }
    return biases;
  }

  template <class Tile, class Biases>
  CUTLASS_DEVICE void store(OwnShape const& shape, Tile const& tile, Biases& biases, Accumulators& accumulators) {
    auto const& epilogue = params_.thread;
    if (!kRun && epilogue.unaligned_d != nullptr) {
      constexpr int kWarpBytes = sizeof(TensorStorage) / (kWarpgroups * 4) / 512 * 512;
      auto* const own = reinterpret_cast<char*>(&storage_) + thread_ / 32 * kWarpBytes;
      store_unaligned<kSwap, kWarpBytes>(epilogue, tile.batch, shape.m, shape.n, places_of(tile), accumulators,
                                         reinterpret_cast<typename Accumulators::Value*>(own));
      return;
    }
    if constexpr (kIsPlain) return this->store_converted(tile, accumulators);
    if (!epilogue.plain)
      apply_epilogue<kAtOnce, kInlines>(epilogue, tile.batch, shape.m, shape.n, places_of(tile), biases, accumulators,
                                        [&](int begin, int end) CUTLASS_LAMBDA_FUNC_INLINE {
                                          this->store_converted(tile, accumulators, begin, end);
                                        });
    if (epilogue.plain || kAtOnce == kValues) this->store_converted(tile, accumulators);
  }

 private:
  CUTLASS_DEVICE auto places_of(TileAt const& tile) const {
    int thread = thread_;
    asm volatile("" : "+r"(thread));  // opaque, or places would be computed before the main loop and stay in registers
    return Places<Accumulators, kWarpgroups>(tile.m * kTileM, tile.n * kTileN, thread);
  }

  Params const& params_;
  TensorStorage& storage_;
  int const thread_;
};

}  // namespace jax_streamk::sm90
