// Numbers of four and eight bits as pairs of 16-bit floating-point numbers, exactly.
//
// Halves are 32-bit words with a code in the low bits of each half; bits above it are ignored. pair() turns them into
// two numbers of T, less `zero`, which is two numbers of T that zero_of() made. Integers become mantissas: in bf16,
// 0x4300 + x is 128 + x for x < 128, in f16 0x6400 + x is 1024 + x for x < 1024 (Kim et al., "Who Says Elephants Can't
// Run", 2022).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk::scaled {

template <class T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ inline PairOf<T> as_pair(uint32_t bits) {
  return *reinterpret_cast<PairOf<T> const*>(&bits);
}
template <class Pair>
__device__ inline uint32_t bits_of(Pair const& pair) {
  return *reinterpret_cast<uint32_t const*>(&pair);
}
// x twice, rounded to T.
template <class T>
__device__ inline uint32_t twice(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return bits_of(__float2half2_rn(x));
  } else {
    return bits_of(__float2bfloat162_rn(x));
  }
}

// Signed and unsigned integers differ in `flip`, the bit that a code's highest is exchanged by.
template <class T, int kBits>
struct Integers {
  static constexpr bool kF16 = std::is_same_v<T, __half>;
  static constexpr uint32_t kMagic = kF16 ? 0x64006400 : 0x43004300, kHighest = kBits == 4 ? 0x00080008 : 0x00800080;
  // Eight bits do not fit bf16's mantissa beside the leading one: the high bit is subtracted apart.
  static constexpr bool kSplits = kBits == 8 && !kF16;

  static constexpr uint32_t flip_of(bool is_signed) { return kMagic | (is_signed == kSplits ? 0 : kHighest); }
  // Of a code, in the low bits. As pair() makes numbers, whose highest bit it exchanges.
  static __device__ uint32_t zero_of(uint32_t code, uint32_t flip) {
    constexpr int kUnused = 32 - kBits;
    bool const flips = (flip & kHighest) != 0;
    int32_t const is_signed = flips != kSplits, low = static_cast<int32_t>(code << kUnused) >> kUnused,
                  zero = is_signed ? low : static_cast<int32_t>(code << kUnused >> kUnused);
    if constexpr (kSplits) return twice<T>(static_cast<float>(flips ? zero - 128 : zero));
    return twice<T>(static_cast<float>((kF16 ? 1024 : 128) + (flips ? 1 << (kBits - 1) : 0) + zero));
  }
  static __device__ uint32_t pair(uint32_t halves, uint32_t zero, uint32_t flip) {
    if constexpr (kSplits) {
      // As signed: 128 + low seven bits, less 128 or, if negative, 256.
      auto const low = as_pair<T>((halves & 0x007f007f) | kMagic), high = as_pair<T>((halves & kHighest) ^ flip);
      return bits_of(__hsub2(__hsub2(low, high), as_pair<T>(zero)));
    } else {
      constexpr uint32_t kMask = kBits == 4 ? 0x000f000f : 0x00ff00ff;
      return bits_of(__hsub2(as_pair<T>((halves & kMask) ^ flip), as_pair<T>(zero)));
    }
  }
};

// Numbers with exponents have no zero points.
template <class T>
struct FloatingPoint {
  static constexpr uint32_t flip_of(bool) { return 0; }
  static __device__ uint32_t zero_of(uint32_t, uint32_t) { return 0; }
  static __device__ uint32_t from_f16(__half2 x) {
    if constexpr (std::is_same_v<T, __half>) {
      return bits_of(x);
    } else {
      float2 const wide = __half22float2(x);
      return bits_of(__floats2bfloat162_rn(wide.x, wide.y));
    }
  }
};
template <class T>
struct E2M1 : FloatingPoint<T> {
  static __device__ uint32_t pair(uint32_t halves, uint32_t, uint32_t) {
    // Exponent and mantissa as T's, subnormal numbers too, whose exponents are too small by a constant.
    constexpr bool kF16 = std::is_same_v<T, __half>;
    constexpr int kUp = kF16 ? 9 : 6;
    constexpr uint32_t kFactor = kF16 ? 0x74007400 : 0x7e807e80;  // 2^14, 2^126
    uint32_t const x = ((halves << kUp) & (0x00070007 << kUp)) | ((halves << 12) & 0x80008000);
    return bits_of(__hmul2(as_pair<T>(x), as_pair<T>(kFactor)));
  }
};
template <class T, __nv_fp8_interpretation_t kHow>
struct Eight : FloatingPoint<T> {
  static __device__ uint32_t pair(uint32_t halves, uint32_t, uint32_t) {
    auto const codes = static_cast<__nv_fp8x2_storage_t>(__byte_perm(halves, 0, 0x4420));
    return FloatingPoint<T>::from_f16(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, kHow)));
  }
};

template <class T, Type>
struct DecoderOf;
template <class T>
struct DecoderOf<T, Type::kS4> : Integers<T, 4> {};
template <class T>
struct DecoderOf<T, Type::kS8> : Integers<T, 8> {};
template <class T>
struct DecoderOf<T, Type::kE2M1> : E2M1<T> {};
template <class T>
struct DecoderOf<T, Type::kE4M3> : Eight<T, __NV_E4M3> {};
template <class T>
struct DecoderOf<T, Type::kE5M2> : Eight<T, __NV_E5M2> {};

constexpr int bits_of_type(Type type) {
  switch (type) {
#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) \
  case Type::type: return bits;
#include "cutlass_kernels/core/types.def"
  }
  return 0;
}

// Numbers for each block of B.
struct Numbers {
  void const* data;  // null: there are none
  Type type;
  int bits;
};

// Calls function(what makes float32 of a number as it lies in memory, in the low bits), of a type that scales have.
template <class Function>
__device__ void with_type(Type type, Function const& function) {
  auto const from_half = [](uint32_t raw) { return __half2float(__ushort_as_half(static_cast<unsigned short>(raw))); };
  switch (type) {
    case Type::kBF16: return function([](uint32_t raw) { return __uint_as_float(raw << 16); });
    case Type::kF32: return function([](uint32_t raw) { return __uint_as_float(raw); });
    case Type::kF16: return function(from_half);
    // 2^(raw - 127): 0 is subnormal, 255 NaN.
    case Type::kE8M0:
      return function([](uint32_t raw) {
        return __uint_as_float(raw == 0 ? 0x00400000 : raw == 255 ? 0x7fc00000 : raw << 23);
      });
    default:  // e4m3: f16 with another bias of the exponent
      return function([&](uint32_t raw) {
        return 256 * from_half((raw & 0x7f) == 0x7f ? 0x7e00 : (raw << 8 & 0x8000) | (raw << 7 & 0x3f80));
      });
  }
}

}  // namespace jax_streamk::scaled
