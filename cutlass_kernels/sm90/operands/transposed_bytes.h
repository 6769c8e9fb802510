// An N-major B of eight bits: wgmma reads K-major ones only, so threads make a transposed copy of each stage.
#pragma once

#include "cutlass_kernels/sm90/operands/bytes_from_registers.h"
#include "cutlass_kernels/sm90/operands/tile.h"

namespace jax_streamk::sm90 {

// Copies blocks of 32 of K by 16 columns: from rows of kRowBytes along N, to rows of 128 bytes along K.
template <int kRowBytes>
class ByteTransposer {
  using Loader = ByteLoader<kRowBytes>;

 public:
  static constexpr int kBlockK = 32, kBlockN = 16, kToRow = 128;

  CUTLASS_DEVICE ByteTransposer() {
    // A lane has the address of a row of four 8 x 8 matrices of byte pairs, in the order of ByteLoader's words.
    int const lane = threadIdx.x % 32, n = lane % 8 * 2 + lane / 8 % 2;
    to_ = n * kToRow + (lane / 16 ^ n % 8) * 16;
  }

  // Called by a whole warp, for kBlocks blocks along K. `from`, `to`: the stage's.
  template <int kBlocks>
  CUTLASS_DEVICE void transpose(uint32_t from, uint32_t to, int block_n) const {
    uint32_t words[kBlocks][4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBlocks; ++i) loader_.load(words[i], from + i * Loader::kStepBytes, block_n);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBlocks; ++i)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       to + block_n * (kBlockN * kToRow) + (to_ ^ i * kBlockK)),
                   "r"(words[i][0]), "r"(words[i][1]), "r"(words[i][2]), "r"(words[i][3])
                   : "memory");
  }

 private:
  Loader loader_;
  uint32_t to_;
};

// Loaded: how TMA loads it.
template <class Stage, class Loaded = TileB<Stage>>
struct TransposedBytesB : Loaded {
  using Transposer = ByteTransposer<Stage::B::kRowBytes>;
  static constexpr bool kTransposes = true;
  static constexpr int kWarps = 2;  // that transpose
  static_assert(Stage::kBIsNMajor && Stage::B::kBoxes == 1 && Stage::kTileN % (kWarps * Transposer::kBlockN) == 0 &&
                Stage::ReadB::kRowBytes == Transposer::kToRow && Stage::kTileK == Transposer::kToRow);

  // As TransposedB::transpose().
  template <class StageState>
  static CUTLASS_DEVICE void transpose(FullBarrier* full, FullBarrier* transposed, StageState& stage, int32_t count,
                                       int warp, Transposer const& transposer, typename Stage::Storage& storage) {
    uint32_t const from = cute::cast_smem_ptr_to_uint(storage.b), to = cute::cast_smem_ptr_to_uint(storage.transposed);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++stage) {
      int const s = stage.index();
      full[s].wait(stage.phase());
      CUTLASS_PRAGMA_NO_UNROLL  // these warps have few registers
      for (int i = 0; i < Stage::kTileN / Transposer::kBlockN; i += kWarps)
        transposer.template transpose<Stage::kTileK / Transposer::kBlockK>(from + s * Stage::B::kBytes,
                                                                           to + s * Stage::ReadB::kBytes, i + warp);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (cute::elect_one_sync()) transposed[s].arrive();
    }
  }
};

}  // namespace jax_streamk::sm90
