// The activation functions of every family, for GPU kernels and for CPU loops that the compiler vectorizes.
//
// In f32 their relative error is about 1e-6, and 1e-5 far out in a tail: tails are computed as products, without
// cancellation. NaN and infinities give what jax.nn gives. Unnamed namespace: see tile_product.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {
namespace {

JSK_HOST_DEVICE float multiply_add(float x, float y, float z) {
#if defined(__CUDA_ARCH__) || defined(__FMA__)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

// Horner's rule; coefficients in ascending order.
template <class... Rest>
JSK_HOST_DEVICE float polynomial(float x, float lowest, Rest... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return lowest;
  } else {
    return multiply_add(polynomial(x, rest...), x, lowest);
  }
}

// 2^x, with subnormal results flushed to zero.
JSK_HOST_DEVICE float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  x = x < -200.0f ? -200.0f : x > 200.0f ? 200.0f : x;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  float const shift = 12582912.0f, shifted = x + shift, f = x - (shifted - shift);
  int32_t bits, shift_bits;
  std::memcpy(&bits, &shifted, 4);
  std::memcpy(&shift_bits, &shift, 4);
  int32_t const exponent = bits - shift_bits + 127;
  int32_t const scale_bits = (exponent < 0 ? 0 : exponent > 255 ? 255 : exponent) << 23;
  float scale;
  std::memcpy(&scale, &scale_bits, 4);
  return scale * polynomial(f, 1.0f, 0.693147206f, 0.240226469f, 5.55032876e-2f, 9.61848896e-3f, 1.33999379e-3f,
                            1.53458283e-4f);
#endif
}

JSK_HOST_DEVICE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}
JSK_HOST_DEVICE double reciprocal(double x) { return 1.0 / x; }

JSK_HOST_DEVICE float exponential(float x) { return power_of_two(x * 1.44269504f); }
JSK_HOST_DEVICE double exponential(double x) { return std::exp(x); }

template <class T>
JSK_HOST_DEVICE T relu(T x) {
  return x < 0 ? T(0) : x;
}

template <class T>
JSK_HOST_DEVICE T sigmoid(T x) {
  return reciprocal(1 + exponential(-x));
}

// A fraction whose division two numbers share (activate_two), because reciprocals and powers have a sixteenth of the
// throughput of FMAs. Denominators are in [1, 2], so that neither number can spoil the other.
template <class T>
struct Quotient {
  T numerator, denominator;
};

// factor * sigmoid(x). The factor must be NaN if x is.
template <bool kShares, class T>
JSK_HOST_DEVICE auto times_sigmoid(T factor, T x) {
  if constexpr (kShares) {
    T const power = exponential(-(std::abs(x) < 800 ? std::abs(x) : T(800)));
    return Quotient<T>{x < 0 ? factor * power : factor, 1 + power};
  } else {
    return factor * sigmoid(x);
  }
}

template <bool kShares, class T>
JSK_HOST_DEVICE auto silu(T x) {
  return times_sigmoid<kShares>(x, x);
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
template <bool kShares, class T>
JSK_HOST_DEVICE auto gelu_tanh(T x) {
  return times_sigmoid<kShares>(x, x * (T(1.5957691216057308) + T(0.0713548162726) * x * x));
}

JSK_HOST_DEVICE float hyperbolic_tangent(float x) {
  float const square = x * x;
  float const near_zero =
      polynomial(square, 0.0f, -0.333333176f, 0.133325861f, -0.0538522998f, 0.0210716341f, -0.00627417159f);
  return std::abs(x) < 0.55f ? multiply_add(near_zero, x, x) : 1 - 2 * reciprocal(1 + exponential(2 * x));
}
JSK_HOST_DEVICE double hyperbolic_tangent(double x) { return std::tanh(x); }

// x * Phi(x), with Phi the normal distribution. Its tail beyond m = |x| is exp(-m^2 / 2) times a polynomial in
// 1 / (1 + 0.3 m), and zero in f32 beyond 15.
JSK_HOST_DEVICE float gelu(float x) {
  float const m = std::abs(x) > 15.0f ? 15.0f : std::abs(x);
  float const t = reciprocal(multiply_add(0.3f, m, 1.0f));
  float const scaled_tail = polynomial(t, 0.0f, 0.119632007f, 0.120712137f, 0.100175945f, 0.127691777f, -0.0520340171f,
                                       0.204556775f, -0.156158437f, 0.0354237313f);
  // Far out the exponent is large and its rounding errors matter: `lost` corrects them to first order.
  float const half_square = 0.5f * m * m, y = half_square * -1.44269504f, power = power_of_two(y);
  float const lost = multiply_add(y, -0.693147181f, -half_square) - multiply_add(0.5f * m, m, -half_square);
  float const tail = scaled_tail * multiply_add(power, lost, power);
  return x * (x < 0 ? tail : 1 - tail);
}
JSK_HOST_DEVICE double gelu(double x) { return 0.5 * x * std::erfc(-0.70710678118654752 * x); }

// Calls use(function) with the activation's function; with kShares it may return a Quotient. `use` is instantiated for
// each function. Always inlined, because registers cannot be passed by reference.
template <bool kShares, class Use>
__attribute__((always_inline)) JSK_HOST_DEVICE void with_activation(Activation activation, Use const& use) {
  // A chain of comparisons: a GPU would wait for a jump table to come from memory.
  auto const is = [=](Activation one) {
    auto asked = static_cast<int32_t>(activation);
#if defined(__CUDA_ARCH__)
    asm("" : "+r"(asked));
#endif
    return asked == static_cast<int32_t>(one);
  };
  if (is(Activation::kNone)) return use([](auto v) { return v; });
  if (is(Activation::kSilu)) return use([](auto v) { return silu<kShares>(v); });
  if (is(Activation::kRelu)) return use([](auto v) { return relu(v); });
  if (is(Activation::kGeluTanh)) return use([](auto v) { return gelu_tanh<kShares>(v); });
  if (is(Activation::kGelu)) return use([](auto v) { return gelu(v); });
  if (is(Activation::kSigmoid)) return use([](auto v) { return sigmoid(v); });
  use([](auto v) { return hyperbolic_tangent(v); });
}

// x, y = activation(x), activation(y), with one reciprocal for both if `function` returns a Quotient.
template <class Function, class T>
__attribute__((always_inline)) JSK_HOST_DEVICE void activate_two(Function const& function, T& x, T& y) {
  auto const of_x = function(x), of_y = function(y);
  if constexpr (std::is_same_v<decltype(of_x), T const>) {
    x = of_x, y = of_y;
  } else {
    T const of_both = reciprocal(of_x.denominator * of_y.denominator);
    x = of_x.numerator * (of_both * of_y.denominator);
    y = of_y.numerator * (of_both * of_x.denominator);
  }
}

template <class T>
JSK_HOST_DEVICE void activate(Activation activation, T* x, int n) {
  with_activation<false>(activation, [=](auto const& function) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = function(x[i]);
  });
}

}  // namespace
}  // namespace jax_streamk
