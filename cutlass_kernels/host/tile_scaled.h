// Numbers with scales, included by tile_eigen.cc for each instruction set: operands dequantized a block at a time, and
// few rows of A multiplied by its numbers in registers.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "cutlass_kernels/host/tile_product.h"

namespace jax_streamk::JSK_ISA {
namespace {

// What each code of eight bits stands for; a type of four bits has the first sixteen.
using Table = std::array<float, 256>;
Table table_of(int exponent_bits, int mantissa_bits, Type type) {
  Table table{};
  int const bits = 1 + exponent_bits + mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  for (int code = 0; code < 1 << bits; ++code) {
    int const exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1),
              mantissa = code & ((1 << mantissa_bits) - 1);
    bool const is_largest = exponent == (1 << exponent_bits) - 1;
    float x = exponent == 0 ? std::ldexp(float(mantissa), 1 - bias - mantissa_bits)
                            : std::ldexp(float(mantissa | 1 << mantissa_bits), exponent - bias - mantissa_bits);
    if (type == Type::kE4M3 && is_largest && mantissa == 7) x = std::numeric_limits<float>::quiet_NaN();
    if (type == Type::kE5M2 && is_largest)
      x = mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    table[code] = code >> (bits - 1) ? -x : x;
  }
  return table;
}
Table powers_of_two() {
  Table table{};
  for (int code = 0; code < 255; ++code) table[code] = std::ldexp(1.0f, code - 127);
  table[255] = std::numeric_limits<float>::quiet_NaN();
  return table;
}

// to = numbers first ... first + count - 1, as float32.
void widen(Numbers const& from, int64_t first, int64_t count, float* to) {
  static Table const e4m3 = table_of(4, 3, Type::kE4M3), e5m2 = table_of(5, 2, Type::kE5M2),
                     e2m1 = table_of(2, 1, Type::kE2M1), e8m0 = powers_of_two();
  auto const* const bytes = static_cast<uint8_t const*>(from.data);
  auto const copy = [&](auto element) {
    using Elements = Eigen::Map<Eigen::Array<decltype(element), 1, Eigen::Dynamic> const>;
    Eigen::Map<Eigen::Array<float, 1, Eigen::Dynamic>>(to, count) =
        Elements(static_cast<decltype(element) const*>(from.data) + first, count).template cast<float>();
  };
  auto const eight = [&](Table const& table) {
    for (int64_t i = 0; i < count; ++i) to[i] = table[bytes[first + i]];
  };
  // Two to a byte, the lower half first.
  auto const four = [&](auto const& value) {
    int64_t i = 0;
    if (first % 2 != 0) to[i++] = value(bytes[first / 2] >> 4);
    uint8_t const* const pairs = bytes + (first + i) / 2;
    int64_t const whole = (count - i) / 2;
    float* const out = to + i;
    for (int64_t j = 0; j < whole; ++j) out[2 * j] = value(pairs[j] & 15), out[2 * j + 1] = value(pairs[j] >> 4);
    if ((count - i) % 2 != 0) out[2 * whole] = value(pairs[whole] & 15);
  };
  switch (from.type) {
    case Type::kF32: return copy(float());
    case Type::kBF16: return copy(Eigen::bfloat16());
    case Type::kF16: return copy(Eigen::half());
    case Type::kS8: return copy(int8_t());
    case Type::kS32: return copy(int32_t());
    case Type::kU8: return copy(uint8_t());
    case Type::kS4: return four([](int code) { return static_cast<float>((code ^ 8) - 8); });
    case Type::kU4: return four([](int code) { return static_cast<float>(code); });
    case Type::kE2M1: return four([](int code) { return e2m1[code]; });
    case Type::kE4M3: return eight(e4m3);
    case Type::kE5M2: return eight(e5m2);
    case Type::kE8M0: return eight(e8m0);
    default: return;
  }
}

// Scales, zero points and offsets as float32.
struct Factors {
  static constexpr int64_t kMost = 512;
  alignas(64) float scale[kMost], zero[kMost], offset[kMost];

  // Those of blocks of a line of them.
  void read(ScaledBlock const& b, int64_t line, int64_t first, int64_t count) {
    int64_t const at = b.first_scale + line * b.ld_scale + first;
    if (b.scale.data != nullptr) {
      widen(b.scale, at, count, scale);
    } else {
      std::fill_n(scale, count, 1.0f);
    }
    if (b.zero.data != nullptr) widen(b.zero, at, count, zero);
    if (b.offset.data != nullptr) widen(b.offset, at, count, offset);
  }

  // Those of each element of a line of B.
  void read_each(ScaledBlock const& b, int64_t line, int64_t position, int64_t count) {
    int64_t const first = position / b.block_length, before = position % b.block_length,
                  blocks = (before + count - 1) / b.block_length + 1;
    read(b, line, first, blocks);
    if (b.block_length == 1) return;
    auto const repeat = [&](Numbers const& from, float* x) {
      for (int64_t i = blocks - 1, end = count; i >= 0 && from.data != nullptr; --i) {
        float const of_block = x[i];
        int64_t const begin = std::max<int64_t>(i * b.block_length - before, 0);
        std::fill(x + begin, x + end, of_block);
        end = begin;
      }
    };
    repeat(b.scale, scale), repeat(b.zero, zero), repeat(b.offset, offset);
  }
};

template <class T>
void dequantize(ScaledBlock const& b, void* to) {
  constexpr int64_t kPiece = 256;
  alignas(64) float x[kPiece];
  Factors factors;
  bool const each = b.block_length == 1;  // whether each element of a line has a scale of its own
  for (int64_t i = 0, length; i < b.length; i += length) {
    int64_t const position = b.position + i, in_block = position % b.block_length;
    length = std::min(kPiece, b.length - i);
    if (!each) length = std::min(length, b.block_length - in_block);
    int64_t const scales = each ? length : 1;
    for (int64_t line = 0; line < b.lines; ++line) {
      int64_t const of_blocks = (b.line + line) / b.block_lines;
      if (line == 0 || (b.line + line) % b.block_lines == 0) {
        factors.read(b, of_blocks, position / b.block_length, scales);
      }
      widen(b.codes, b.first + line * b.ld + i, length, x);
      using Line = Eigen::Map<Eigen::Array<float, 1, Eigen::Dynamic>>;
      Line numbers(x, length);
      Eigen::Map<Eigen::Array<T, 1, Eigen::Dynamic>> out(static_cast<T*>(to) + line * b.length + i, length);
      if (each) {
        if (b.zero.data != nullptr) numbers -= Line(factors.zero, length);
        numbers *= Line(factors.scale, length);
        if (b.offset.data != nullptr) numbers += Line(factors.offset, length);
      } else {
        if (b.zero.data != nullptr) numbers -= factors.zero[0];
        numbers *= factors.scale[0];
        if (b.offset.data != nullptr) numbers += factors.offset[0];
      }
      out = numbers.template cast<T>();
    }
  }
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

Floats& floats(float* x) { return *reinterpret_cast<Floats*>(x); }
Floats const& floats(float const* x) { return *reinterpret_cast<Floats const*>(x); }

constexpr bool is_half_byte(Type type) { return type == Type::kS4 || type == Type::kU4 || type == Type::kE2M1; }
template <Type type>
constexpr int64_t bytes_of(int64_t elements) {
  return is_half_byte(type) ? (elements + 1) >> 1 : elements;
}

// What codes of a floating-point format stand for. Magnitudes above the largest are infinities and NaN.
template <int exponent_bits, int mantissa_bits, int largest>
Floats floats_of(Words codes) {
  constexpr int kBits = exponent_bits + mantissa_bits;
  constexpr uint32_t kExponent = 128 - (1 << (exponent_bits - 1)), kInfinity = 255u << 23;
  Words const magnitude = codes & ((1u << kBits) - 1);
  // Subnormal numbers get an implicit one, which is taken away: a subnormal float32 might be flushed to zero.
  Floats const with = (Floats)((magnitude << (23 - mantissa_bits)) + (kExponent << 23)),
               without = with + with - (Floats)(Words{} + ((kExponent + 1) << 23));
  Words bits = (Words)(without < with ? without : with);
  if constexpr (largest < (1 << kBits) - 1) bits |= (Words)((Ints)magnitude > largest) & kInfinity;
  return (Floats)(bits | (codes << (31 - kBits) & (1u << 31)));
}

// As many numbers as a vector has lanes. The first begins a byte.
template <Type type>
Floats numbers(uint8_t const* from) {
  constexpr int kBits = is_half_byte(type) ? 4 : 8, kInWord = 32 / kBits, kBytes = kLanes * kBits / 8;
  Words words{}, lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  // Each word goes to all lanes from its first on, whose numbers are then shifted into place.
  for (int i = 0; i < kLanes; i += kInWord) {
    uint32_t word = 0;
    std::memcpy(&word, from + i * kBits / 8, std::min(kBytes, 4));
    words = i == 0 ? words + word : (Ints)lane < i ? words : Words{} + word;
  }
  Words const shift = lane % kInWord * kBits;
  if constexpr (type == Type::kS4 || type == Type::kS8)
    return __builtin_convertvector((Ints)(words << (32 - kBits - shift)) >> (32 - kBits), Floats);
  Words const codes = words >> shift;
  if constexpr (type == Type::kE2M1) return floats_of<2, 1, 7>(codes);
  if constexpr (type == Type::kE4M3) return floats_of<4, 3, 0x7e>(codes);
  if constexpr (type == Type::kE5M2) return floats_of<5, 2, 0x7b>(codes);
  return __builtin_convertvector((Ints)(codes & ((1 << kBits) - 1)), Floats);
}

// The first `count` of them.
template <Type type>
Floats numbers(uint8_t const* from, int64_t count) {
  uint8_t copy[kLanes] = {};
  std::memcpy(copy, from, bytes_of<type>(count));
  return numbers<type>(copy);
}

// A few rows of A, float32 with zeros up to kRows, by a B with scales, whose numbers never leave registers. Scales
// multiply sums of a block of K, which are of limited length; where there are offsets, each number.
template <Type type, int kRows>
struct ScaledRows {
  static constexpr int64_t kLongest = 256;

  float const* a;
  int64_t stride_a, rows;
  ScaledBlock const& b;
  float* sum;
  int64_t stride;

  uint8_t const* line(int64_t i) const {
    return static_cast<uint8_t const*>(b.codes.data) + bytes_of<type>(b.first + i * b.ld);
  }

  // A dot product for each column.
  void multiply_along_k() const {
    Factors factors;
    for (int64_t i = 0; i < b.lines; ++i) {
      Floats sums[kRows] = {};
      int64_t first = 0, blocks = 0;  // those of `factors`
      int64_t block = b.position / b.block_length;
      for (int64_t k = 0, end; k < b.length; k = end) {
        int64_t const block_end = (block + 1) * b.block_length - b.position;
        end = std::min({block_end, k + kLongest, b.length});
        if (block >= first + blocks) {
          first = block;
          blocks = std::min(Factors::kMost, (b.position + b.length - 1) / b.block_length + 1 - first);
          factors.read(b, (b.line + i) / b.block_lines, first, blocks);
        }
        add_block(line(i), k, end, factors, block - first, sums);
        block += end == block_end;
      }
      for (int64_t row = 0; row < rows; ++row) {
        float x = 0;
        for (int lane = 0; lane < kLanes; ++lane) x += sums[row][lane];
        sum[row * stride + i] = x;
      }
    }
  }

  void add_block(uint8_t const* codes, int64_t k, int64_t end, Factors const& factors, int64_t at, Floats* sums) const {
    constexpr int kChains = kRows == 1 ? 2 : 1;  // of additions, which wait for one another
    Floats block_sums[kChains][kRows] = {};
    auto const add = [&](Floats x, float const* of_a, int64_t stride_a, Floats* to) {
      if (b.zero.data != nullptr) x -= factors.zero[at];
      if (b.offset.data != nullptr) x = x * factors.scale[at] + factors.offset[at];
      for (int row = 0; row < kRows; ++row) to[row] += x * floats(of_a + row * stride_a);
    };
    for (; k + kChains * kLanes <= end; k += kChains * kLanes)
      for (int chain = 0; chain < kChains; ++chain)
        add(numbers<type>(codes + bytes_of<type>(k + chain * kLanes)), a + k + chain * kLanes, stride_a,
            block_sums[chain]);
    for (; k < end; k += kLanes) {
      int64_t const count = std::min<int64_t>(kLanes, end - k);
      float of_a[kRows][kLanes] = {};
      for (int row = 0; row < kRows; ++row) std::copy_n(a + row * stride_a + k, count, of_a[row]);
      add(numbers<type>(codes + bytes_of<type>(k), count), of_a[0], kLanes, block_sums[0]);
    }
    float const scale = b.offset.data == nullptr ? factors.scale[at] : 1;
    for (int row = 0; row < kRows; ++row) {
      for (int chain = 1; chain < kChains; ++chain) block_sums[0][row] += block_sums[chain][row];
      sums[row] += block_sums[0][row] * scale;
    }
  }

  // A few lines at a time, each number times an element of A.
  void multiply_along_n() const {
    constexpr int kLines = 4;
    Factors factors;
    alignas(64) float block_sums[kRows][Factors::kMost];
    for (int64_t row = 0; row < rows; ++row) std::fill_n(sum + row * stride, b.length, 0.0f);
    for (int64_t column = 0, columns; column < b.length; column += columns) {
      columns = std::min(Factors::kMost, b.length - column);
      for (int64_t k = 0, end; k < b.lines; k = end) {
        int64_t const block = (b.line + k) / b.block_lines;
        end = std::min({(block + 1) * b.block_lines - b.line, k + kLongest, b.lines});
        factors.read_each(b, block, b.position + column, columns);
        for (auto& of_row : block_sums) std::fill_n(of_row, Factors::kMost, 0.0f);
        int64_t i = k;
        for (; i + kLines <= end; i += kLines) add_lines<kLines>(i, column, columns, factors, block_sums);
        for (; i < end; ++i) add_lines<1>(i, column, columns, factors, block_sums);
        for (int64_t row = 0; row < rows; ++row) {
          float* const to = sum + row * stride + column;
          for (int64_t j = 0; j < columns; ++j)
            to[j] += b.offset.data == nullptr ? block_sums[row][j] * factors.scale[j] : block_sums[row][j];
        }
      }
    }
  }

  template <int kLines>
  void add_lines(int64_t k, int64_t column, int64_t columns, Factors const& factors,
                 float (&sums)[kRows][Factors::kMost]) const {
    constexpr int64_t kAhead = 16, kCacheLine = 64;
    Floats of_a[kRows][kLines];
    uint8_t const* lines[kLines];
    for (int i = 0; i < kLines; ++i) {
      lines[i] = line(k + i) + bytes_of<type>(column);
      for (int row = 0; row < kRows; ++row) of_a[row][i] = Floats{} + a[row * stride_a + k + i];
      uint8_t const* const ahead = lines[i] + bytes_of<type>(kAhead * b.ld);
      for (int64_t at = 0; at < bytes_of<type>(columns); at += kCacheLine) __builtin_prefetch(ahead + at);
    }
    auto const add = [&](int64_t j, auto const& numbers) {
      Floats to[kRows];
      for (int row = 0; row < kRows; ++row) to[row] = floats(sums[row] + j);
      for (int i = 0; i < kLines; ++i) {
        Floats x = numbers(lines[i] + bytes_of<type>(j));
        if (b.zero.data != nullptr) x -= floats(factors.zero + j);
        if (b.offset.data != nullptr) x = x * floats(factors.scale + j) + floats(factors.offset + j);
        for (int row = 0; row < kRows; ++row) to[row] += x * of_a[row][i];
      }
      for (int row = 0; row < kRows; ++row) floats(sums[row] + j) = to[row];
    };
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) add(j, [](uint8_t const* from) { return numbers<type>(from); });
    if (j < columns) add(j, [&](uint8_t const* from) { return numbers<type>(from, columns - j); });
  }
};

template <Type type, int kRows>
void multiply_scaled(Extents e, float const* a, ScaledBlock const& b, float* sum, int64_t stride) {
  ScaledRows<type, kRows> const some{a, e.k, std::min<int64_t>(e.m, kRows), b, sum, stride};
  b.major == Major::kRow ? some.multiply_along_n() : some.multiply_along_k();
}

template <Type type>
void multiply_scaled(Extents e, float const* a, ScaledBlock const& b, float* sum, int64_t stride) {
  for (; e.m > 0; e.m -= kScaledRows, a += kScaledRows * e.k, sum += kScaledRows * stride)
    (e.m == 1 ? multiply_scaled<type, 1> : multiply_scaled<type, kScaledRows>)(e, a, b, sum, stride);
}

template <class Operand>
void multiply_scaled(Extents e, Block a, ScaledBlock const& b, void* accumulators, int64_t stride, void* scratch) {
  using Rows = Eigen::Array<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  using RowsOfA = Eigen::Map<Eigen::Array<Operand, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> const, 0, Strides>;
  bool const row_a = a.major == Major::kRow;
  auto* const widened = static_cast<float*>(scratch);
  Eigen::Map<Rows>(widened, e.m, e.k) =
      RowsOfA(static_cast<Operand const*>(a.data), e.m, e.k, Strides(row_a ? a.stride : 1, row_a ? 1 : a.stride))
          .template cast<float>();
  std::fill(widened + e.m * e.k, widened + (e.m + kScaledRows - 1) / kScaledRows * kScaledRows * e.k, 0.0f);
  auto* const sum = static_cast<float*>(accumulators);
  switch (b.codes.type) {
    case Type::kS4: return multiply_scaled<Type::kS4>(e, widened, b, sum, stride);
    case Type::kU4: return multiply_scaled<Type::kU4>(e, widened, b, sum, stride);
    case Type::kE2M1: return multiply_scaled<Type::kE2M1>(e, widened, b, sum, stride);
    case Type::kS8: return multiply_scaled<Type::kS8>(e, widened, b, sum, stride);
    case Type::kU8: return multiply_scaled<Type::kU8>(e, widened, b, sum, stride);
    case Type::kE4M3: return multiply_scaled<Type::kE4M3>(e, widened, b, sum, stride);
    case Type::kE5M2: return multiply_scaled<Type::kE5M2>(e, widened, b, sum, stride);
    default: return;
  }
}

}  // namespace
}  // namespace jax_streamk::JSK_ISA
