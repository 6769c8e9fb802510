// Tile products through Eigen. f32 and f64 operands are multiplied where they lie; narrower ones are widened to f32
// first, a block of K at a time. CMake compiles this file once per instruction set: JSK_ISA is its namespace, and
// Eigen's is renamed.
#include <Eigen/Core>

#include "cutlass_kernels/epilogue/epilogue.h"
#include "cutlass_kernels/host/tile_product.h"
#include "cutlass_kernels/host/tile_scaled.h"

namespace jax_streamk::JSK_ISA {
namespace {

template <class T, int order>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, order>;
template <class T, int order = Eigen::RowMajor>
using View = Eigen::Map<Matrix<T, order>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class T, int order = Eigen::RowMajor>
using ConstView = Eigen::Map<Matrix<T, order> const, Eigen::Unaligned, Eigen::OuterStride<>>;

template <class T, int order = Eigen::RowMajor>
View<T, order> view(void* data, int64_t m, int64_t n, int64_t stride) {
  return {static_cast<T*>(data), m, n, Eigen::OuterStride<>(stride)};
}
template <class T, int order = Eigen::RowMajor>
ConstView<T, order> view(void const* data, int64_t m, int64_t n, int64_t stride) {
  return {static_cast<T const*>(data), m, n, Eigen::OuterStride<>(stride)};
}

// A few rows of A by a row-major B, without the packed copy of B that Eigen's product makes, which does not pay for few
// rows. A block of B, 64 rows by a few vectors, stays in L1 while every four rows of A are multiplied by it in
// registers.
template <class T>
struct FewRows {
#if defined(__AVX512F__)
  static constexpr int kBytes = 64;
#elif defined(__AVX__)
  static constexpr int kBytes = 32;
#else
  static constexpr int kBytes = 16;
#endif
  typedef T Vector __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));
  static constexpr int kVectors = kBytes == 64 ? 4 : 2, kWidth = kBytes / sizeof(T), kColumns = kVectors * kWidth;
  static constexpr int64_t kMost = kBytes == 64 ? 64 : 32, kBlock = 64;

  T const* a;
  int64_t row_a, k_a;  // steps from a row of A to the next, and from an element to the next
  T const* b;
  int64_t stride_b;
  T* sum;
  int64_t stride;

  // The sums of a block of K are added to those of the previous ones: one chain of additions along all of K would lose
  // several digits.
  template <int kRows>
  void multiply(int64_t row, int64_t column, int64_t k_begin, int64_t k_end) const {
    Vector sums[kRows][kVectors] = {};
    for (int64_t k = k_begin; k < k_end; ++k) {
      auto const* const of_b = reinterpret_cast<Vector const*>(b + k * stride_b + column);
      if (row == 0) prefetch(b + (k + kBlock) * stride_b + column);
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kVectors; ++j) sums[i][j] += of_b[j] * a[(row + i) * row_a + k * k_a];
    }
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kVectors; ++j)
        *reinterpret_cast<Vector*>(sum + (row + i) * stride + column + j * kWidth) += sums[i][j];
  }

  // Prefetch the next block, which L2 holds until it is needed.
  static void prefetch(T const* columns) {
    constexpr int kLine = 64 / sizeof(T);
    for (int i = 0; i < kColumns; i += kLine) __builtin_prefetch(columns + i, 0, 2);
  }

  // Multiplies whole columns of blocks; returns the number of columns.
  int64_t multiply(Extents e) const {
    int64_t const columns = e.n / kColumns * kColumns;
    for (int64_t i = 0; i < e.m; ++i) std::fill_n(sum + i * stride, columns, T(0));
    for (int64_t k = 0; k < e.k; k += kBlock) {
      int64_t const end = std::min(k + kBlock, e.k);
      for (int64_t column = 0; column < columns; column += kColumns) multiply_block(e.m, column, k, end);
    }
    return columns;
  }

  void multiply_block(int64_t rows, int64_t column, int64_t k_begin, int64_t k_end) const {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) multiply<4>(row, column, k_begin, k_end);
    switch (rows - row) {
      case 3: return multiply<3>(row, column, k_begin, k_end);
      case 2: return multiply<2>(row, column, k_begin, k_end);
      case 1: return multiply<1>(row, column, k_begin, k_end);
    }
  }
};

// Any number of rows, all alike: each element is the sum of its blocks of K, and each block one chain of additions. A
// panel of columns of B is read where it lies, or copied, if it is narrow, column-major, or of another type. Scratch
// has what scratch_bytes() in host_kernel.cc says.
template <class Operand, class T>
struct AllRows {
  using Panels = FewRows<T>;
  static constexpr int64_t kColumns = Panels::kColumns, kBlock = Panels::kBlock;
  static_assert(kBlock * sizeof(T) + kColumns * sizeof(T) <= 4 * kScratchWords);        // for each row
  static_assert(kBlock * kColumns * sizeof(T) <= 4 * kScratchWords * kScratchPadding);  // for a panel

  static void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void* scratch) {
    bool const row_a = a.major == Major::kRow, row_b = b.major == Major::kRow;
    constexpr bool kIsWidened = !std::is_same_v<Operand, T>;
    bool const copies_a = kIsWidened || !row_a;
    auto const *of_a = static_cast<Operand const*>(a.data), *of_b = static_cast<Operand const*>(b.data);
    int64_t const row_step_a = row_a ? a.stride : 1, k_step_a = row_a ? 1 : a.stride;
    int64_t const k_step_b = row_b ? b.stride : 1, column_step_b = row_b ? 1 : b.stride;
    T* const panel = static_cast<T*>(scratch);
    T* const rows = panel + kBlock * kColumns;
    T* const narrow = rows + e.m * kBlock;
    T* const sum = static_cast<T*>(accumulators);
    for (int64_t i = 0; i < e.m; ++i) std::fill_n(sum + i * stride, e.n, T(0));
    for (int64_t k = 0; k < e.k; k += kBlock) {
      int64_t const length = std::min(kBlock, e.k - k);
      if (copies_a) copy(of_a + k * k_step_a, row_step_a, k_step_a, e.m, length, rows, kBlock);
      for (int64_t column = 0; column < e.n; column += kColumns) {
        int64_t const columns = std::min(kColumns, e.n - column);
        Panels few{nullptr, 0, 1, panel, kColumns, sum + column, stride};
        few.a = reinterpret_cast<T const*>(copies_a ? static_cast<void const*>(rows) : of_a + k);
        few.row_a = copies_a ? kBlock : a.stride;
        Operand const* const from = of_b + k * k_step_b + column * column_step_b;
        if (!kIsWidened && row_b && columns == kColumns) {
          few.b = reinterpret_cast<T const*>(from), few.stride_b = b.stride;
        } else {
          if (columns < kColumns) std::fill_n(panel, length * kColumns, T(0));
          copy(from, k_step_b, column_step_b, length, columns, panel, kColumns);
        }
        if (columns < kColumns) {
          few.sum = narrow, few.stride = kColumns;
          std::fill_n(narrow, e.m * kColumns, T(0));
        }
        few.multiply_block(e.m, 0, 0, length);
        if (columns < kColumns) view<T>(sum + column, e.m, columns, stride) += view<T>(narrow, e.m, columns, kColumns);
      }
    }
  }

  // to (m x n, row-major) = a block whose rows and columns are these steps apart, one of which is 1.
  static void copy(Operand const* from, int64_t row_step, int64_t column_step, int64_t m, int64_t n, T* to,
                   int64_t stride) {
    if (column_step == 1) {
      view<T>(to, m, n, stride) = view<Operand>(from, m, n, row_step).template cast<T>();
      return;
    }
    constexpr int64_t kAtOnce = 8;  // more columns would push one another out of L1, if they are a power of two apart
    for (int64_t i = 0; i < n; i += kAtOnce) {
      int64_t const columns = std::min(kAtOnce, n - i);
      view<T>(to + i, m, columns, stride) =
          view<Operand, Eigen::ColMajor>(from + i * column_step, m, columns, column_step).template cast<T>();
    }
  }
};

struct InPlace {
  template <class Operand, int order_a, int order_b>
  static void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void*) {
    auto const operand_a = view<Operand, order_a>(a.data, e.m, e.k, a.stride);
    auto const operand_b = view<Operand, order_b>(b.data, e.k, e.n, b.stride);
    auto sum = view<Operand>(accumulators, e.m, e.n, stride);
    int64_t done = 0;
    if (order_b == Eigen::RowMajor && 1 < e.m && e.m <= FewRows<Operand>::kMost) {
      constexpr bool kRowA = order_a == Eigen::RowMajor;
      FewRows<Operand> const few{
          operand_a.data(), kRowA ? a.stride : 1, kRowA ? 1 : a.stride, operand_b.data(), b.stride, sum.data(), stride};
      done = few.multiply(e);
      if (done == e.n) return;
    }
    sum.rightCols(e.n - done).noalias() = operand_a * operand_b.rightCols(e.n - done);
  }
};

struct Widened {
  static constexpr int64_t kBlock = kScratchWords;  // along K; f32 sums of this many products of s8 are exact

  template <class Operand, int order_a, int order_b>
  static void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void* scratch) {
    using Accumulator = std::conditional_t<std::is_same_v<Operand, int8_t>, int32_t, float>;
    auto const operand_a = view<Operand, order_a>(a.data, e.m, e.k, a.stride);
    auto const operand_b = view<Operand, order_b>(b.data, e.k, e.n, b.stride);
    auto sum = view<Accumulator>(accumulators, e.m, e.n, stride);
    float* const widened_a = static_cast<float*>(scratch);
    float* const widened_b = widened_a + e.m * kBlock;
    float* const product = widened_b + e.n * kBlock;
    sum.setZero();
    for (int64_t begin = 0; begin < e.k; begin += kBlock) {
      int64_t const k = std::min(kBlock, e.k - begin);
      Eigen::Map<Matrix<float, order_a>> lhs(widened_a, e.m, k);
      Eigen::Map<Matrix<float, order_b>> rhs(widened_b, k, e.n);
      lhs = operand_a.middleCols(begin, k).template cast<float>();
      rhs = operand_b.middleRows(begin, k).template cast<float>();
      if constexpr (std::is_same_v<Accumulator, float>) {
        sum.noalias() += lhs * rhs;
      } else {
        Eigen::Map<Matrix<float, Eigen::RowMajor>> block(product, e.m, e.n);
        block.noalias() = lhs * rhs;
        sum += block.template cast<Accumulator>();
      }
    }
  }
};

template <class How, class Operand>
void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void* scratch) {
  constexpr int kRow = Eigen::RowMajor, kColumn = Eigen::ColMajor;
  bool const row_a = a.major == Major::kRow, row_b = b.major == Major::kRow;
  auto const chosen =
      row_a ? (row_b ? How::template multiply<Operand, kRow, kRow> : How::template multiply<Operand, kRow, kColumn>)
            : (row_b ? How::template multiply<Operand, kColumn, kRow>
                     : How::template multiply<Operand, kColumn, kColumn>);
  chosen(e, a, b, accumulators, stride, scratch);
}

template <class Accumulator>
void add(Extents e, void const* partial, int64_t stride_partial, void* sum, int64_t stride) {
  view<Accumulator>(sum, e.m, e.n, stride) += view<Accumulator>(partial, e.m, e.n, stride_partial);
}

template <class Accumulator, class D>
void store(Extents e, EpilogueOps const& epilogue, void const* bias, void const* residual, void const* accumulators,
           int64_t stride, void* d, int64_t stride_d) {
  auto const sum = view<Accumulator>(accumulators, e.m, e.n, stride);
  auto out = view<D>(d, e.m, e.n, stride_d);
  if (epilogue.is_plain()) {
    out = sum.template cast<D>();
    return;
  }
  if constexpr (std::is_floating_point_v<Accumulator>) {
    auto const alpha = static_cast<Accumulator>(epilogue.alpha), beta = static_cast<Accumulator>(epilogue.beta);
    constexpr int64_t kColumns = 256;
    Eigen::Matrix<Accumulator, 1, Eigen::Dynamic, Eigen::RowMajor, 1, kColumns> x;
    for (int64_t row = 0; row < e.m; ++row) {
      for (int64_t begin = 0; begin < e.n; begin += kColumns) {
        int64_t const columns = std::min(kColumns, e.n - begin);
        x = alpha * sum.row(row).segment(begin, columns);
        if (epilogue.has_residual)
          x += beta *
               view<D>(residual, e.m, e.n, stride_d).row(row).segment(begin, columns).template cast<Accumulator>();
        if (epilogue.has_bias)
          x += view<D>(bias, 1, e.n, e.n).row(0).segment(begin, columns).template cast<Accumulator>();
        activate(epilogue.activation, x.data(), static_cast<int>(columns));
        out.row(row).segment(begin, columns) = x.template cast<D>();
      }
    }
  }
}

template <class How, class Operand, class Accumulator, class D>
constexpr TileProduct product() {
  TileProduct x{multiply<How, Operand>, multiply<How, Operand>, add<Accumulator>, store<Accumulator, D>};
  if constexpr (!std::is_integral_v<Accumulator>)  // sums of integers are exact in any order
    x.multiply_invariant = AllRows<Operand, Accumulator>::multiply;
  if constexpr (std::is_same_v<Accumulator, float>)
    x.dequantize = dequantize<Operand>, x.multiply_scaled = multiply_scaled<Operand>;
  return x;
}

}  // namespace

TileProduct tile_product(Type operand, Type d) {
  using Eigen::bfloat16, Eigen::half;
  switch (operand) {
    case Type::kF64: return product<InPlace, double, double, double>();
    case Type::kBF16:
      return d == Type::kF32 ? product<Widened, bfloat16, float, float>()
                             : product<Widened, bfloat16, float, bfloat16>();
    case Type::kF16:
      return d == Type::kF32 ? product<Widened, half, float, float>() : product<Widened, half, float, half>();
    case Type::kS8: return product<Widened, int8_t, int32_t, int32_t>();
    default: return product<InPlace, float, float, float>();
  }
}

}  // namespace jax_streamk::JSK_ISA
