// Tile products of bf16 with vdpbf16ps, which adds the products of two neighbours along K to each f32 lane: twice the rate of
// f32, and Eigen has no kernel for it. (The instruction takes subnormal operands and sums for zero.)
//
// But for a few rows, the usual packed GEMM: for a block of K, panels of kRows rows of A and kColumns columns of B are laid out as the inner loop
// reads them, and each pair of panels is multiplied into a block of registers.
#include <immintrin.h>

#include "cutlass_kernels/host/tile_product.h"

namespace jax_streamk::host_avx512_bf16 {
namespace {

using BF16 = uint16_t;
using Pair = uint32_t;  // the elements at k and k + 1, k even

constexpr int kLanes = 16;
constexpr int kRows = 12, kVectors = 2, kColumns = kVectors * kLanes;  // 24 of the 32 registers accumulate
constexpr int64_t kPairs = 192;                                        // along K: a panel of B is half of a 48 KiB L1
static_assert(kPairs <= kScratchWords && kRows - 1 + kColumns - 1 <= kScratchPadding);

constexpr int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

Pair pair(BF16 low, BF16 high) { return low | static_cast<Pair>(high) << 16; }

// Rows of A or columns of B ("lanes") with a block of K. They are packed as [panel][pair][lane in panel], zero where a panel
// reaches beyond the operand or a pair beyond K.
struct Lanes {
  BF16 const* data;
  int64_t lane_stride, k_stride;
  int64_t lanes, k;

  BF16 const* at(int64_t lane, int64_t pair) const { return data + lane * lane_stride + 2 * pair * k_stride; }
};

// Pairs of which both elements are neighbours in memory: transposed 4 lanes x 4 pairs at a time.
template <int kWidth>
void pack_along_k(Lanes const& from, int64_t first_lane, int64_t pairs, Pair* to) {
  for (int lane = 0; lane < kWidth; lane += 4) {
    for (int64_t p = 0; p + 4 <= pairs; p += 4) {
      auto const load = [&](int i) { return _mm_loadu_ps(reinterpret_cast<float const*>(from.at(first_lane + lane + i, p))); };
      __m128 x0 = load(0), x1 = load(1), x2 = load(2), x3 = load(3);
      _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
      auto const store = [&](int i, __m128 x) { _mm_storeu_ps(reinterpret_cast<float*>(to + (p + i) * kWidth + lane), x); };
      store(0, x0), store(1, x1), store(2, x2), store(3, x3);
    }
  }
}

template <int kWidth>
void pack(Lanes const& from, Pair* to) {
  int64_t const pairs = ceil_div(from.k, 2);
  int64_t const whole_panels = from.lanes / kWidth, panels = ceil_div(from.lanes, kWidth);
  int64_t packed_pairs = 0;  // of the whole panels
  if (from.lane_stride == 1) {
    packed_pairs = from.k / 2;
    // Panels inside: a pair of rows of memory is read from end to end.
    for (int64_t p = 0; p < packed_pairs; ++p) {
      for (int64_t panel = 0; panel < whole_panels; ++panel) {
        BF16 const *low = from.at(panel * kWidth, p), *high = low + from.k_stride;
        for (int lane = 0; lane < kWidth; ++lane) to[(panel * pairs + p) * kWidth + lane] = pair(low[lane], high[lane]);
      }
    }
  } else if (from.k_stride == 1) {
    packed_pairs = from.k / 8 * 4;
    for (int64_t panel = 0; panel < whole_panels; ++panel)
      pack_along_k<kWidth>(from, panel * kWidth, packed_pairs, to + panel * pairs * kWidth);
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t p = panel < whole_panels ? packed_pairs : 0; p < pairs; ++p) {
      for (int64_t i = 0; i < kWidth; ++i) {
        int64_t const lane = panel * kWidth + i;
        BF16 const* const low = from.at(lane, p);
        bool const low_inside = lane < from.lanes, high_inside = low_inside && 2 * p + 1 < from.k;
        to[(panel * pairs + p) * kWidth + i] = pair(low_inside ? low[0] : 0, high_inside ? low[from.k_stride] : 0);
      }
    }
  }
}

// sum += a panel of A times a panel of B, or = if `first`; `rows` and `columns` are left of the tile from here on.
void multiply_panels(int64_t pairs, Pair const* a, Pair const* b, int64_t rows, int64_t columns, bool first, float* sum,
                     int64_t stride) {
  __mmask16 inside[kVectors];
  __m512 block[kRows][kVectors];
  for (int v = 0; v < kVectors; ++v) {
    int64_t const lanes = columns - v * kLanes;
    inside[v] = lanes >= kLanes ? 0xffff : lanes > 0 ? (1u << lanes) - 1 : 0;
    for (int i = 0; i < kRows; ++i)
      block[i][v] = first || i >= rows ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(inside[v], sum + i * stride + v * kLanes);
  }
  for (int64_t p = 0; p < pairs; ++p, a += kRows, b += kColumns) {
    __m512bh column[kVectors];
    for (int v = 0; v < kVectors; ++v) column[v] = (__m512bh)_mm512_load_si512(b + v * kLanes);
    for (int i = 0; i < kRows; ++i) {
      __m512bh const row = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
      for (int v = 0; v < kVectors; ++v) block[i][v] = _mm512_dpbf16_ps(block[i][v], row, column[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v)
    for (int i = 0; i < kRows; ++i)
      if (i < rows) _mm512_mask_storeu_ps(sum + i * stride + v * kLanes, inside[v], block[i][v]);
}

// The first kFew rows of a panel of A, of which there are `rows`, times 32 columns of a row-major B, two rows of which are interleaved
// in registers. `k` may be odd.
template <int kFew>
void multiply_few(int64_t k, Pair const* a, BF16 const* b, int64_t stride_b, int64_t rows, int64_t columns, bool first, float* sum,
                  int64_t stride) {
  __mmask32 const inside = columns >= kColumns ? ~0u : (1u << columns) - 1;
  __m512 block[kFew][2];
  for (int i = 0; i < kFew; ++i) block[i][0] = block[i][1] = _mm512_setzero_ps();
  for (int64_t row = 0; row < k; row += 2, b += 2 * stride_b, a += kRows) {
    _mm_prefetch(reinterpret_cast<char const*>(b + kColumns), _MM_HINT_T0);
    __m512i const low = _mm512_maskz_loadu_epi16(inside, b);
    __m512i const high = row + 1 < k ? _mm512_maskz_loadu_epi16(inside, b + stride_b) : _mm512_setzero_si512();
    // Of each eight columns the first four, and the others.
    __m512bh const front = (__m512bh)_mm512_unpacklo_epi16(low, high), back = (__m512bh)_mm512_unpackhi_epi16(low, high);
    for (int i = 0; i < kFew; ++i) {
      __m512bh const pairs = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
      block[i][0] = _mm512_dpbf16_ps(block[i][0], pairs, front);
      block[i][1] = _mm512_dpbf16_ps(block[i][1], pairs, back);
    }
  }
  for (int i = 0; i < kFew && i < rows; ++i) {
    for (int half = 0; half < 2; ++half) {
      __m512 const quarters = half == 0 ? _mm512_shuffle_f32x4(block[i][0], block[i][1], _MM_SHUFFLE(1, 0, 1, 0))
                                        : _mm512_shuffle_f32x4(block[i][0], block[i][1], _MM_SHUFFLE(3, 2, 3, 2));
      __m512 const in_order = _mm512_shuffle_f32x4(quarters, quarters, _MM_SHUFFLE(3, 1, 2, 0));
      auto const mask = static_cast<__mmask16>(inside >> (half * kLanes));
      float* const to = sum + i * stride + half * kLanes;
      _mm512_mask_storeu_ps(to, mask, first ? in_order : _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), in_order));
    }
  }
}

// Few rows of A do not repay packing B. Its rows are read a block at a time, so that few pages are in use at once.
constexpr int64_t kFewRows = 8, kFewK = 64;

void multiply_few_rows(Extents e, Lanes rows, Block b, float* sum, int64_t stride, Pair* packed) {
  auto const* from = static_cast<BF16 const*>(b.data);
  for (int64_t begin = 0; begin < e.k; begin += kFewK, rows.data += kFewK * rows.k_stride, from += kFewK * b.stride) {
    rows.k = smaller(kFewK, e.k - begin);
    pack<kRows>(rows, packed);
    for (int64_t j = 0; j < e.n; j += kColumns)
      (e.m <= 4 ? multiply_few<4> : multiply_few<kFewRows>)(rows.k, packed, from + j, b.stride, e.m, e.n - j, begin == 0, sum + j, stride);
  }
}

void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void* scratch) {
  bool const row_a = a.major == Major::kRow, row_b = b.major == Major::kRow;
  Lanes rows{static_cast<BF16 const*>(a.data), row_a ? a.stride : 1, row_a ? 1 : a.stride, e.m, 0};
  if (row_b && e.m <= kFewRows)
    return multiply_few_rows(e, rows, b, static_cast<float*>(accumulators), stride, static_cast<Pair*>(scratch));
  Lanes columns{static_cast<BF16 const*>(b.data), row_b ? 1 : b.stride, row_b ? b.stride : 1, e.n, 0};
  for (int64_t begin = 0; begin < e.k; begin += 2 * kPairs) {
    rows.k = columns.k = smaller(2 * kPairs, e.k - begin);
    int64_t const pairs = ceil_div(rows.k, 2);
    Pair* const packed_b = static_cast<Pair*>(scratch);  // first, because it is loaded as aligned vectors
    Pair* const packed_a = packed_b + ceil_div(e.n, kColumns) * kColumns * pairs;
    pack<kColumns>(columns, packed_b);
    pack<kRows>(rows, packed_a);
    for (int64_t j = 0; j < e.n; j += kColumns)
      for (int64_t i = 0; i < e.m; i += kRows)
        multiply_panels(pairs, packed_a + i * pairs, packed_b + j * pairs, e.m - i, e.n - j, begin == 0,
                        static_cast<float*>(accumulators) + i * stride + j, stride);
    rows.data += 2 * kPairs * rows.k_stride;
    columns.data += 2 * kPairs * columns.k_stride;
  }
}

}  // namespace

TileProduct tile_product(Type d) {
  TileProduct product = host_avx512::tile_product(Type::kBF16, d);
  product.multiply = multiply;
  return product;
}

}  // namespace jax_streamk::host_avx512_bf16
