// A through registers: wgmma reads TF32 from shared memory only if it is K-major, so threads load an M-major A.
#pragma once

#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/stages.h"
#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

// Loads a thread's wgmma fragments of an M-major TF32 A. With g = lane / 4 and t = lane % 4, the fragment of 8 along k
// is rows g and g + 8 of the warp's 16, at k = t and then at k = t + 4.
template <int kTileK>
class RegisterLoader {
 public:
  // Shared memory holds blocks of 32 rows x 8 of k; a row is 128 bytes along m, one k.
  static constexpr int kBlockBytes = 1024, kBlocks = kTileK / 8;  // blocks of 32 rows of A

  // `first`: the first 64 rows of this warpgroup's A in stage 0.
  CUTLASS_DEVICE explicit RegisterLoader(void const* first) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    odd_ = t % 2;
    // The 128-byte swizzle puts 16-byte piece p of row k at p ^ k, so four neighbouring k share banks. Threads with odd
    // t therefore load k = t + 4 first.
    for (int i = 0; i < 4; ++i) {
      int const k = t ^ ((i / 2 ^ odd_) * 4), piece = warp % 2 * 4 + i % 2 * 2 + g / 4;
      from_[i] = cute::cast_smem_ptr_to_uint(first) + warp / 2 * kBlocks * kBlockBytes + k * 128 + (piece ^ k) * 16 +
                 g % 4 * 4;
    }
  }

  // The fragment that is `offset` bytes after the first.
  CUTLASS_DEVICE void load(uint32_t (&words)[4], int offset) const {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[i]) : "r"(from_[i] + offset));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = odd_ ? x[i ^ 2] : x[i];
  }

 private:
  uint32_t from_[4];
  bool odd_;
};

// Same interface as multiply_from_shared().
template <class Mainloop, class Accumulators>
CUTLASS_DEVICE int multiply_from_registers(FullBarrier* full, EmptyBarrier* empty, typename Mainloop::Stage& stage,
                                           Accumulators& accumulators, int32_t count, int warpgroup,
                                           typename Mainloop::TensorStorage& storage) {
  using Layout = typename Mainloop::Layout;
  using Loader = RegisterLoader<Layout::kTileK>;
  using B = OperandTile<typename Layout::ElementB, Layout::kLaidOutN, Layout::kTileK, true>;  // once it is transposed
  constexpr int kWarpgroups = Mainloop::kWarpgroups, kMmas = Accumulators::kMmas, kSteps = Layout::kTileK / 8;
  constexpr int k64RowsBytes = 2 * Loader::kBlocks * Loader::kBlockBytes;
  static_assert(Layout::A::kRowBytes == 128 && Layout::A::kBoxElements * 4 == Loader::kBlocks * Loader::kBlockBytes);
  Loader const loader(reinterpret_cast<char const*>(storage.a) + (kWarpgroups == 1 ? 0 : warpgroup * k64RowsBytes));
  uint32_t const b = B::low_word(cute::cast_smem_ptr_to_uint(storage.b));
  uint32_t words[kSteps][kMmas][4];
  int32_t accumulate = 0;
  int unreleased = -1;
  // Double-buffered registers: one half of a stage is loaded while the other half is multiplied.
  constexpr int kHalf = kSteps / 2;
  CUTLASS_PRAGMA_NO_UNROLL
  for (; count > 0; --count, ++stage) {
    int const s = stage.index();
    full[s].wait(stage.phase());
    uint32_t const b_of_stage = b + s * (B::kBytes / 16);
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      wait_for_wgmma<1>();
      if (half == 1 && unreleased >= 0) Mainloop::release(empty[unreleased]);
      CUTLASS_PRAGMA_UNROLL
      for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int mma = 0; mma < kMmas; ++mma)
          loader.load(words[k][mma],
                      s * Layout::A::kBytes + mma * kWarpgroups * k64RowsBytes + k * Loader::kBlockBytes);
      }
      fence(accumulators);
      arrive_at_wgmma();
      CUTLASS_PRAGMA_UNROLL
      for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int mma = 0; mma < kMmas; ++mma)
          WgmmaInstruction<Layout::kTileN>::template from_registers<typename Layout::ElementA>(
              accumulators.values + mma * Accumulators::kValuesPerMma, words[k][mma],
              B::descriptor(b_of_stage, B::step_offset(k)), accumulate);
        accumulate = 1;
      }
      commit_wgmma();
      fence(accumulators);
    }
    unreleased = s;
  }
  return unreleased;
}

}  // namespace jax_streamk::sm90
