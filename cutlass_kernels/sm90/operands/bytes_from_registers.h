// A of eight bits through registers: wgmma reads it from shared memory only if it is K-major, so threads load an
// M-major A, by ldmatrix, which transposes pairs of bytes.
#pragma once

#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/stages.h"
#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

// Loads 32 of k by 16 of the other dimension, along which rows of kRowBytes lie, transposed: with g = lane / 4 and t =
// lane % 4, four bytes at k = 4t, of 2g and of 2g + 1, and then both at k = 16 + 4t. As a fragment of A these are rows
// g and g + 8, since ldmatrix gives two neighbours; order_rows() puts their sums in order.
template <int kRowBytes>
class ByteLoader {
 public:
  static constexpr int kStepBytes = 32 * kRowBytes;  // from 32 of k to the next

  CUTLASS_DEVICE ByteLoader() {
    // A lane has the address of one k of four 8 x 8 matrices of byte pairs: two for each 16 of k. Thread t gets two k
    // of each matrix. Those of t < 2 come first in one matrix and second in the other, so that all rows of a matrix
    // differ in k % 8, and by the swizzle in banks.
    int const lane = threadIdx.x % 32, of = lane % 8 / 2, second = lane / 8 % 2;
    int const k = lane / 16 * 16 + of * 4 + (of / 2 ^ second) * 2 + lane % 2;
    int const swizzle = kRowBytes == 128 ? k % 8 : k / 2 % 4;  // puts 16-byte piece p of row k at p ^ swizzle
    static_assert(kRowBytes == 128 || kRowBytes == 64);
    at_ = k * kRowBytes + swizzle * 16;
    even_ = lane % 4 < 2 ? 0x6420 : 0x2064, odd_ = lane % 4 < 2 ? 0x7531 : 0x3175;
  }

  // `first`: the address of the first k, a multiple of 1024; `piece`: of 16 bytes of its row.
  CUTLASS_DEVICE void load(uint32_t (&words)[4], uint32_t first, int piece) const {
    uint32_t x[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(first + (at_ ^ piece * 16))
                 : "memory");
    words[0] = __byte_perm(x[0], x[1], even_), words[1] = __byte_perm(x[0], x[1], odd_);
    words[2] = __byte_perm(x[2], x[3], even_), words[3] = __byte_perm(x[2], x[3], odd_);
  }

 private:
  uint32_t at_, even_, odd_;
};

// A's words of a k-tile. They must stay until its products are done.
template <int kSteps>
struct ByteFragments {
  uint32_t words[kSteps][4];

  CUTLASS_DEVICE void keep() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps * 4; ++i) asm volatile("" : "+r"(words[i / 4][i % 4])::"memory");
  }
};
template <>
struct ByteFragments<0> {
  CUTLASS_DEVICE void keep() {}
};

// sum = the product of the next k-tile, of the block-th 64 rows, added to it if `accumulate`. On return it may still be
// in flight, but no other is; the result is its stage.
template <class Mainloop, class Numbers, class Accumulators, class Fragments>
CUTLASS_DEVICE int multiply_bytes_from_registers(FullBarrier* full, typename Mainloop::Stage& stage, Accumulators& sum,
                                                 Fragments& fragments, int block,
                                                 typename Mainloop::TensorStorage& storage, int32_t accumulate) {
  using A = typename Mainloop::Layout::A;
  using B = typename Mainloop::Layout::ReadB;
  using Loader = ByteLoader<A::kRowBytes>;
  constexpr int kSteps = Mainloop::Layout::kTileK / 32;
  constexpr int kPieces = A::kRowBytes / 16;  // of a box, each 16 rows of a warp
  static_assert(!A::kAlongK && B::kAlongK && Accumulators::kMmas == 1);
  Loader const loader;
  int const piece = block * 4 + threadIdx.x / 32 % 4;
  int const s = stage.index();
  uint32_t const a = cute::cast_smem_ptr_to_uint(storage.a) + s * A::kBytes + piece / kPieces * A::kBoxElements,
                 b = B::low_word(cute::cast_smem_ptr_to_uint(Mainloop::Layout::b_of(storage))) + s * (B::kBytes / 16);
  full[s].wait(stage.phase());
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < kSteps; ++k) loader.load(fragments.words[k], a + k * Loader::kStepBytes, piece % kPieces);
  fence(sum);
  arrive_at_wgmma();
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < kSteps; ++k)
    WgmmaInstruction<Mainloop::kTileN, typename Accumulators::Value>::template from_registers<Numbers>(
        sum.values, fragments.words[k], B::descriptor(b, B::step_offset(k)), k > 0 || accumulate);
  commit_wgmma();
  wait_for_wgmma<1>();
  fence(sum);
  ++stage;
  return s;
}

// Puts a warp's rows 2g and 2g + 1, which thread g has in the places of g and g + 8, where they belong.
template <class Accumulators>
CUTLASS_DEVICE void order_rows(Accumulators& accumulators) {
  int const lane = threadIdx.x % 32, g = lane / 4;
  bool const is_low = g < 4, is_even = g % 2 == 0;
  // Even g get row g first and then g + 8, odd ones the other way round: so each source has one row to give at a time.
  int const first = (is_even ? 0 : 16) + g / 2 * 4 + lane % 4, second = first ^ 16;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Accumulators::kValues; i += 4) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = i; j < i + 2; ++j) {
      auto& upper = accumulators(j);
      auto& lower = accumulators(j + 2);
      auto const x = __shfl_sync(~0u, is_low ? upper : lower, first),
                 y = __shfl_sync(~0u, is_low ? lower : upper, second);
      upper = is_even ? x : y, lower = is_even ? y : x;
    }
  }
}

}  // namespace jax_streamk::sm90
