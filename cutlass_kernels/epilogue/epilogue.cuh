// The epilogue in CUDA kernels: its parameters, and loads of its operands.
#pragma once

#include <cstring>
#include <type_traits>

#include "cutlass_kernels/epilogue/epilogue.h"

namespace jax_streamk {

template <class T, class D>
struct EpilogueParams {
  Activation activation = Activation::kNone;
  bool plain = true;
  T alpha = 1, beta = 1;
  D const* bias = nullptr;
  D const* residual = nullptr;
  int64_t batch_stride_bias = 0, ldd = 0, batch_stride_d = 0;

  EpilogueParams() = default;
  EpilogueParams(GemmProblem const& p, Buffers const& buffers)
      : activation(p.epilogue.activation),
        plain(p.epilogue.is_plain()),
        alpha(static_cast<T>(p.epilogue.alpha)),
        beta(static_cast<T>(p.epilogue.beta)),
        bias(p.epilogue.has_bias ? static_cast<D const*>(buffers.bias) : nullptr),
        residual(p.epilogue.has_residual ? static_cast<D const*>(buffers.residual) : nullptr),
        batch_stride_bias(p.epilogue.batch_stride_bias),
        ldd(p.d.ld),
        batch_stride_d(p.d.batch_stride) {}
};

// Loads a vector, aligned to its size, through the read-only cache.
template <class Vector>
__device__ inline Vector load_vector(void const* from) {
  constexpr int kBytes = sizeof(Vector);
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  using Word =
      std::conditional_t<kBytes == 2, unsigned short,
                         std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 8, uint2, uint4>>>;
  Word const word = __ldg(static_cast<Word const*>(from));
  Vector vector;
  std::memcpy(&vector, &word, kBytes);
  return vector;
}

__device__ inline void prefetch_to_l2(void const* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

}  // namespace jax_streamk
