// Tile products through Eigen. f32 and f64 operands are multiplied where they lie; narrower ones are widened to f32 first, a
// block of K at a time. CMake compiles this file once per instruction set: JSK_ISA is its namespace, and Eigen's is renamed.
#include <Eigen/Core>

#include "cutlass_kernels/epilogue.h"
#include "cutlass_kernels/host/tile_product.h"

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

struct InPlace {
  template <class Operand, int order_a, int order_b>
  static void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void*) {
    view<Operand>(accumulators, e.m, e.n, stride).noalias() =
        view<Operand, order_a>(a.data, e.m, e.k, a.stride) * view<Operand, order_b>(b.data, e.k, e.n, b.stride);
  }
};

struct Widened {
  static constexpr int64_t kBlock = kScratchWords;  // of K; f32 sums of so many products of s8 are exact

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
            : (row_b ? How::template multiply<Operand, kColumn, kRow> : How::template multiply<Operand, kColumn, kColumn>);
  chosen(e, a, b, accumulators, stride, scratch);
}

template <class Accumulator>
void add(Extents e, void const* partial, void* sum, int64_t stride) {
  view<Accumulator>(sum, e.m, e.n, stride) += view<Accumulator>(partial, e.m, e.n, stride);
}

template <class Accumulator, class D>
void store(Extents e, Epilogue const& epilogue, void const* bias, void const* residual, void const* accumulators, int64_t stride,
           void* d, int64_t stride_d) {
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
          x += beta * view<D>(residual, e.m, e.n, stride_d).row(row).segment(begin, columns).template cast<Accumulator>();
        if (epilogue.has_bias) x += view<D>(bias, 1, e.n, e.n).row(0).segment(begin, columns).template cast<Accumulator>();
        activate(epilogue.activation, x.data(), static_cast<int>(columns));
        out.row(row).segment(begin, columns) = x.template cast<D>();
      }
    }
  }
}

template <class How, class Operand, class Accumulator, class D>
constexpr TileProduct kProduct = {multiply<How, Operand>, add<Accumulator>, store<Accumulator, D>};

}  // namespace

TileProduct tile_product(Type operand, Type d) {
  using Eigen::bfloat16, Eigen::half;
  switch (operand) {
    case Type::kF64: return kProduct<InPlace, double, double, double>;
    case Type::kBF16:
      return d == Type::kF32 ? kProduct<Widened, bfloat16, float, float> : kProduct<Widened, bfloat16, float, bfloat16>;
    case Type::kF16: return d == Type::kF32 ? kProduct<Widened, half, float, float> : kProduct<Widened, half, float, half>;
    case Type::kS8: return kProduct<Widened, int8_t, int32_t, int32_t>;
    default: return kProduct<InPlace, float, float, float>;
  }
}

}  // namespace jax_streamk::JSK_ISA
