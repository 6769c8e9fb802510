// B transposed in shared memory: wgmma reads TF32 from there only if it is K-major, so threads transpose an N-major B
// where TMA has put it.
#pragma once

#include "cutlass_kernels/sm90/operands/tile.h"

namespace jax_streamk::sm90 {

// Transposes a block of 32 columns of B by 32 of K where it lies: 32 rows of 128 bytes under the 128-byte swizzle,
// which puts 16-byte piece p of row r at p ^ r % 8. Before, a row is a k; after, a column of B.
class BlockTransposer {
 public:
  static constexpr int kBlock = 32, kBlockBytes = 4 * kBlock * kBlock;

  // A thread transposes squares of 4 in registers: columns 4p to 4p + 3 by k 4q to 4q + 3, p ^ q = its quarter of the
  // warp, and then the same with q ^ 4. Eight threads have one p ^ q: they write where they read, in different banks.
  CUTLASS_DEVICE BlockTransposer() {
    int const lane = threadIdx.x % 32, p = lane % 8, q = p ^ lane / 8;
    from_ = 4 * q * kRow + (p ^ 4 * q % 8) * kPiece, to_ = 4 * p * kRow + (q ^ 4 * p % 8) * kPiece;
    to_other_half_ = (q < 4 ? 16 : -16) * kRow;
  }

  // Called by a whole warp. `block`: a multiple of 1024.
  CUTLASS_DEVICE void transpose(uint32_t block) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Row i: its bits are zero in the first address, and the swizzle takes i from the piece by XOR.
      constexpr int kNext = kRow + kPiece;
      uint32_t const from = block + from_ + half * to_other_half_, to = (block + to_) ^ half * 4 * kPiece;
      uint32_t x[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                     : "r"(from ^ i * kNext)
                     : "memory");
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to ^ i * kNext), "r"(x[0][i]), "r"(x[1][i]),
                     "r"(x[2][i]), "r"(x[3][i])
                     : "memory");
    }
  }

 private:
  static constexpr int kRow = 128, kPiece = 16;  // bytes
  uint32_t from_, to_;
  int32_t to_other_half_;
};

template <class Stage>
struct TransposedB : TileB<Stage> {
  using Transposer = BlockTransposer;
  static constexpr bool kTransposes = true;
  static constexpr int kWarps = 2;  // that transpose
  static constexpr int kTileN = Stage::kTileN, kTileK = Stage::kTileK, kBlock = BlockTransposer::kBlock;
  static_assert(Stage::kBIsNMajor && kTileK == kBlock && kTileN % (kWarps * kBlock) == 0 && Stage::kLaidOutN == kTileN);

  using Transposed = OperandTile<typename Stage::ElementB, kTileN, kTileK, true>;  // what wgmma reads

  // Called by kWarps warps, for the same tiles as the producer's: transposes B in `count` stages as TMA has filled
  // them.
  template <class StageState>
  static CUTLASS_DEVICE void transpose(FullBarrier* full, FullBarrier* transposed, StageState& stage, int32_t count,
                                       int warp, Transposer const& transposer, typename Stage::Storage& storage) {
    static_assert(Stage::B::kRowElements == kBlock && Transposed::kRowElements == kBlock);
    uint32_t const b = cute::cast_smem_ptr_to_uint(storage.b);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++stage) {
      int const s = stage.index();
      full[s].wait(stage.phase());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTileN / kBlock; i += kWarps)
        transposer.transpose(b + s * Stage::kBytesB + (i + warp) * BlockTransposer::kBlockBytes);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (cute::elect_one_sync()) transposed[s].arrive();
    }
  }
};

}  // namespace jax_streamk::sm90
