// The store of a D that TMA cannot write, because its rows are not aligned to 16 bytes.
#pragma once

#include <type_traits>

#include "cutlass/numeric_conversion.h"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/sm90/activated.h"

namespace jax_streamk::sm90 {

template <class Element>
struct StoreParams : EpilogueParams<float, Element> {
  Element* unaligned_d;  // D if threads store it; null if TMA does

  StoreParams() = default;
  StoreParams(GemmProblem const& p, Buffers const& buffers, bool unaligned)
      : EpilogueParams<float, Element>(p, buffers),
        unaligned_d(unaligned ? static_cast<Element*>(buffers.d) : nullptr) {}
};

// D = epilogue(accumulators). A warp moves accumulators through kBytes of its own shared memory, a patch at a time (16
// rows x kBlocks * 8 columns of the kernel's result), and stores them along rows of D. For the arguments see Biases.
template <bool kSwap, int kBytes, class Element, class Accumulators, class Places>
CUTLASS_DEVICE void store_unaligned(StoreParams<Element> const& params, int64_t batch, int32_t m, int32_t n,
                                    Places const& places, Accumulators const& accumulators,
                                    typename Accumulators::Value* shared) {
  using Sum = typename Accumulators::Value;
  constexpr int kBlocks = kBytes >= 2048 ? 4 : kBytes >= 1024 ? 2 : 1;
  static_assert(kBytes >= 512);
  constexpr int kRows = kSwap ? 8 * kBlocks : 16, kColumns = kSwap ? 16 : 8 * kBlocks;  // of D in a patch
  constexpr int kValues = Accumulators::kValues, kValuesPerMma = Accumulators::kValuesPerMma;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // opaque, or addresses would be computed before the main loop and stay in registers
  // The index of an element of the patch, swizzled to avoid bank conflicts.
  auto const at = [&](int row, int column) {
    constexpr int kPeriod = kSwap ? 2 : 4 / kBlocks;
    return shared + row * kColumns + (column ^ row / kPeriod % (kColumns / 8) * 8);
  };
  int32_t const first_m = places.m - lane / 4, first_n = places.n - lane % 4 * 2;
  int32_t const rows = kSwap ? n : m, columns = kSwap ? m : n;
  auto const fill = [&](int begin, int blocks) CUTLASS_LAMBDA_FUNC_INLINE {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < blocks * 4; ++i) {
      int const own_row = lane / 4 + i / 2 % 2 * 8, own_column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      *(kSwap ? at(own_column, own_row) : at(own_row, own_column)) = accumulators(begin + i);
    }
    __syncwarp();
  };
  // Calls write(d_row, d_column, blocks) for each patch once it is in shared memory: where it begins in D, and its
  // number of blocks, which is smaller in the last patch of a wgmma. Each kind of store has a loop of its own, so that
  // no code of other kinds lies in between.
  auto const each_patch = [&](auto const& write) CUTLASS_LAMBDA_FUNC_INLINE {
#pragma unroll
    for (int mma = 0; mma < kValues; mma += kValuesPerMma) {
#pragma unroll
      for (int block = 0; block < kValuesPerMma / 4; block += kBlocks) {
        int const begin = mma + block * 4, blocks = cute::min(kBlocks, kValuesPerMma / 4 - block);
        fill(begin, blocks);
        int32_t const begin_m = first_m + Places::along_m(begin);
        int32_t const begin_n = first_n + Places::along_n(begin);
        write(kSwap ? begin_n : begin_m, kSwap ? begin_m : begin_n, blocks);
      }
    }
  };
  Element* const d = params.unaligned_d + batch * params.batch_stride_d;

  // Without an epilogue, kWidth neighbours in one store.
  auto const store_converted = [&](auto width) CUTLASS_LAMBDA_FUNC_INLINE {
    constexpr int kWidth = decltype(width)::value;
    constexpr int kLanes = kColumns / kWidth, kStep = 32 / kLanes;  // lanes per row; rows at once
    // Large tiles leave no registers for addresses.
    constexpr bool kLarge = kValues >= 128;
    constexpr int kAtOnce = cute::min(kRows / kStep, kLarge ? cute::max(4 / kWidth, 1) : kRows),
                  kUnroll = kLarge ? 1 : kRows;
    using From = cutlass::AlignedArray<Sum, kWidth>;
    using To = cutlass::AlignedArray<Element, kWidth>;
    each_patch([&](int32_t d_row, int32_t d_column, int blocks) CUTLASS_LAMBDA_FUNC_INLINE {
      int const row = lane / kLanes, column = lane % kLanes * kWidth;
      bool const inside = d_column + column < columns && (kSwap || column < blocks * 8);
      Element* to = d + (d_row + row) * params.ldd + d_column + column;
#pragma unroll kUnroll
      for (int turn = 0; turn < kRows; turn += kAtOnce * kStep) {
        From x[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) x[j] = *reinterpret_cast<From const*>(at(turn + j * kStep + row, column));
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j, to += kStep * params.ldd) {
          auto const converted = cutlass::NumericArrayConverter<Element, Sum, kWidth>{}(x[j]);
          To out;
#pragma unroll
          for (int i = 0; i < kWidth; ++i) out[i] = converted[i];
          int const own_row = turn + j * kStep + row;
          if (inside && d_row + own_row < rows && (!kSwap || own_row < blocks * 8)) *reinterpret_cast<To*>(to) = out;
        }
      }
    });
  };
  if (params.plain) {
    // As wide as the alignment of all rows allows.
    int64_t const strides = params.ldd | params.batch_stride_d | columns;
    if (sizeof(Element) == 2 && strides % 4 == 0) return store_converted(std::integral_constant<int, 4>());
    if (strides % 2 == 0) return store_converted(std::integral_constant<int, 2>());
    return store_converted(std::integral_constant<int, 1>());
  }

  // With an epilogue: element by element, as many rows at once as pass an activation.
  if constexpr (std::is_same_v<Sum, int32_t>) return;  // integers have none
  constexpr int kStep = 32 / kColumns, kAtOnce = 4;
  each_patch([&](int32_t d_row, int32_t d_column, int blocks) CUTLASS_LAMBDA_FUNC_INLINE {
    int const row = lane / kColumns, column = lane % kColumns;
    bool const inside = d_column + column < columns && (kSwap || column < blocks * 8);
    float bias = 0;
    if (params.bias != nullptr && inside)
      bias = static_cast<float>(params.bias[batch * params.batch_stride_bias + d_column + column]);
#pragma unroll 1
    for (int turn = row; turn - row < kRows; turn += kAtOnce * kStep) {
      auto const stored = [&](int j) {
        int const own_row = turn + j * kStep;
        return inside && d_row + own_row < rows && (!kSwap || own_row < blocks * 8);
      };
      int64_t const offset = (d_row + turn) * params.ldd + d_column + column;
      float x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = params.alpha * *at(turn + j * kStep, column) + bias;
      if (params.residual != nullptr) {
        Element const* const residual = params.residual + batch * params.batch_stride_d + offset;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (stored(j)) x[j] += params.beta * static_cast<float>(residual[j * kStep * params.ldd]);
      }
      float4 const y = activated_inline(params.activation, make_float4(x[0], x[1], x[2], x[3]));
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (stored(j)) d[offset + j * kStep * params.ldd] = static_cast<Element>(x[j]);
    }
  });
}

}  // namespace jax_streamk::sm90
