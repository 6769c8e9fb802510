// Tile products of bf16 with vdpbf16ps, which adds the products of two neighbours along K to each f32 lane: twice the
// rate of f32, and Eigen has no kernel for it. (The instruction takes subnormal operands and sums as zero.)
//
// Except for few rows, the usual packed GEMM: for a block of K, panels of rows of A and of columns of B are laid out as
// the inner loop reads them, and each pair of panels is multiplied into a block of registers.
#include <immintrin.h>

#include <utility>

#include "cutlass_kernels/host/tile_product.h"

namespace jax_streamk::host_avx512_bf16 {
namespace {

using BF16 = uint16_t;
using Pair = uint32_t;  // the elements at k and k + 1, for an even k

constexpr int kLanes = 16;
constexpr int kMostRows = 12, kVectors = 2,
              kColumns = kVectors * kLanes;  // of a panel: 24 of the 32 registers accumulate
constexpr int64_t kPairs = 192;              // along K: a panel of B is half of a 48 KiB L1
static_assert(kPairs <= kScratchWords && kMostRows - 1 + kColumns - 1 <= kScratchPadding);

constexpr int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
constexpr int64_t round_up(int64_t x, int64_t y) { return ceil_div(x, y) * y; }

Pair pair(BF16 low, BF16 high) { return low | static_cast<Pair>(high) << 16; }

// Packed rows of A or columns of B ("lanes") for a block of K: [panel][pair][lane in panel], zero where a panel reaches
// beyond the operand or a pair beyond K.
struct Lanes {
  BF16 const* data;
  int64_t lane_stride, k_stride;
  int64_t lanes, k;

  BF16 const* at(int64_t lane, int64_t pair) const { return data + lane * lane_stride + 2 * pair * k_stride; }
};

// Pairs whose elements are neighbours in memory: transposed 4 lanes x 4 pairs at a time.
template <int kWidth>
void pack_along_k(Lanes const& from, int64_t first_lane, int64_t pairs, Pair* to) {
  for (int lane = 0; lane < kWidth; lane += 4) {
    for (int64_t p = 0; p + 4 <= pairs; p += 4) {
      auto const load = [&](int i) {
        return _mm_loadu_ps(reinterpret_cast<float const*>(from.at(first_lane + lane + i, p)));
      };
      __m128 x0 = load(0), x1 = load(1), x2 = load(2), x3 = load(3);
      _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
      auto const store = [&](int i, __m128 x) {
        _mm_storeu_ps(reinterpret_cast<float*>(to + (p + i) * kWidth + lane), x);
      };
      store(0, x0), store(1, x1), store(2, x2), store(3, x3);
    }
  }
}

template <int kWidth>
void pack(Lanes const& from, Pair* to) {
  int64_t const pairs = ceil_div(from.k, 2);
  int64_t const whole_panels = from.lanes / kWidth, panels = ceil_div(from.lanes, kWidth);
  int64_t packed_pairs = 0;  // in the whole panels
  if (from.lane_stride == 1) {
    packed_pairs = from.k / 2;
    // The panels are the inner loop: a pair of rows is read from memory from end to end.
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

// visit(0), visit(1), ... unrolled, so that arrays indexed by the argument stay in registers.
template <class Visit, int... kIndices>
void unroll(std::integer_sequence<int, kIndices...>, Visit const& visit) {
  (visit(std::integral_constant<int, kIndices>{}), ...);
}
template <int kCount, class Visit>
void unroll(Visit const& visit) {
  unroll(std::make_integer_sequence<int, kCount>{}, visit);
}

// sum += a vector of the first columns that the mask selects, or = if `first`. The sums of a block of K are added to
// those of the previous ones instead of continuing them: one chain of additions along all of K would lose digits.
void add_block(__m512 block, __mmask16 inside, bool first, float* sum) {
  _mm512_mask_storeu_ps(sum, inside, first ? block : _mm512_add_ps(_mm512_maskz_loadu_ps(inside, sum), block));
}

// sum += a panel of A times a panel of B, or = if `first`; `rows` and `columns`: those left in the tile from here on.
template <int kPanelRows>
void multiply_panels(int64_t pairs, Pair const* a, Pair const* b, int64_t rows, int64_t columns, bool first, float* sum,
                     int64_t stride) {
  __m512 block[kPanelRows][kVectors];
  unroll<kPanelRows>([&](auto i) { block[i][0] = block[i][1] = _mm512_setzero_ps(); });
  for (int64_t p = 0; p < pairs; ++p, a += kPanelRows, b += kColumns) {
    __m512bh column[kVectors];
    for (int v = 0; v < kVectors; ++v) column[v] = (__m512bh)_mm512_load_si512(b + v * kLanes);
    unroll<kPanelRows>([&](auto i) {
      __m512bh const row = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
      for (int v = 0; v < kVectors; ++v) block[i][v] = _mm512_dpbf16_ps(block[i][v], row, column[v]);
    });
  }
  auto const inside = static_cast<__mmask32>(columns >= kColumns ? ~0u : (1u << columns) - 1);
  unroll<kPanelRows>([&](auto i) {
    if (i >= rows) return;
    for (int v = 0; v < kVectors; ++v)
      add_block(block[i][v], static_cast<__mmask16>(inside >> (v * kLanes)), first, sum + i * stride + v * kLanes);
  });
}

// With few rows of A, packing B does not pay. Its rows are read a block at a time, so that few pages are in use.
constexpr int64_t kFewRows = 64, kFewK = 64;

// A panel of `rows` rows of A times 32 columns of a row-major B, whose rows are interleaved in pairs in registers. `k`
// may be odd.
template <int kPanelRows>
void multiply_few(int64_t k, Pair const* a, BF16 const* b, int64_t stride_b, int64_t rows, int64_t columns, bool first,
                  float* sum, int64_t stride) {
  __mmask32 const inside = columns >= kColumns ? ~0u : (1u << columns) - 1;
  __m512 block[kPanelRows][2];
  unroll<kPanelRows>([&](auto i) { block[i][0] = block[i][1] = _mm512_setzero_ps(); });
  for (int64_t row = 0; row < k; row += 2, b += 2 * stride_b, a += kPanelRows) {
    // Prefetch the next block of K, which L2 holds until it is needed.
    for (int i = 0; i < 2; ++i) _mm_prefetch(reinterpret_cast<char const*>(b + (kFewK + i) * stride_b), _MM_HINT_T1);
    __m512i const low = _mm512_maskz_loadu_epi16(inside, b);
    __m512i const high = row + 1 < k ? _mm512_maskz_loadu_epi16(inside, b + stride_b) : _mm512_setzero_si512();
    // The first four of each eight columns, and the others.
    __m512bh const front = (__m512bh)_mm512_unpacklo_epi16(low, high),
                   back = (__m512bh)_mm512_unpackhi_epi16(low, high);
    unroll<kPanelRows>([&](auto i) {
      __m512bh const pairs = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
      block[i][0] = _mm512_dpbf16_ps(block[i][0], pairs, front);
      block[i][1] = _mm512_dpbf16_ps(block[i][1], pairs, back);
    });
  }
  unroll<kPanelRows>([&](auto i) {
    if (i >= rows) return;
    __m512 const halves[2] = {_mm512_shuffle_f32x4(block[i][0], block[i][1], _MM_SHUFFLE(1, 0, 1, 0)),
                              _mm512_shuffle_f32x4(block[i][0], block[i][1], _MM_SHUFFLE(3, 2, 3, 2))};
    for (int half = 0; half < 2; ++half) {
      __m512 const in_order = _mm512_shuffle_f32x4(halves[half], halves[half], _MM_SHUFFLE(3, 1, 2, 0));
      add_block(in_order, static_cast<__mmask16>(inside >> (half * kLanes)), first, sum + i * stride + half * kLanes);
    }
  });
}

template <int kPanelRows>
void multiply_few_rows(Extents e, Lanes rows, Block b, float* sum, int64_t stride, Pair* packed) {
  auto const* from = static_cast<BF16 const*>(b.data);
  for (int64_t begin = 0; begin < e.k; begin += kFewK, rows.data += kFewK * rows.k_stride, from += kFewK * b.stride) {
    rows.k = smaller(kFewK, e.k - begin);
    int64_t const pairs = ceil_div(rows.k, 2);
    pack<kPanelRows>(rows, packed);
    for (int64_t j = 0; j < e.n; j += kColumns)
      for (int64_t i = 0; i < e.m; i += kPanelRows)
        multiply_few<kPanelRows>(rows.k, packed + i * pairs, from + j, b.stride, e.m - i, e.n - j, begin == 0,
                                 sum + i * stride + j, stride);
  }
}

template <int kPanelRows>
void multiply_packed(int64_t block, Extents e, Lanes rows, Lanes columns, float* sum, int64_t stride, Pair* packed_b) {
  for (int64_t begin = 0; begin < e.k; begin += block) {
    rows.k = columns.k = smaller(block, e.k - begin);
    int64_t const pairs = ceil_div(rows.k, 2);
    Pair* const packed_a = packed_b + round_up(e.n, kColumns) * pairs;  // behind B, which is loaded as aligned vectors
    pack<kColumns>(columns, packed_b);
    pack<kPanelRows>(rows, packed_a);
    for (int64_t j = 0; j < e.n; j += kColumns)
      for (int64_t i = 0; i < e.m; i += kPanelRows)
        multiply_panels<kPanelRows>(pairs, packed_a + i * pairs, packed_b + j * pairs, e.m - i, e.n - j, begin == 0,
                                    sum + i * stride + j, stride);
    rows.data += block * rows.k_stride;
    columns.data += block * columns.k_stride;
  }
}

// `block`: of K, where there are more rows than few.
template <int kPanelRows>
void multiply_in_panels(int64_t block, Extents e, Block a, Block b, float* sum, int64_t stride, Pair* scratch) {
  bool const row_a = a.major == Major::kRow, row_b = b.major == Major::kRow;
  Lanes const rows{static_cast<BF16 const*>(a.data), row_a ? a.stride : 1, row_a ? 1 : a.stride, e.m, 0};
  Lanes const columns{static_cast<BF16 const*>(b.data), row_b ? 1 : b.stride, row_b ? b.stride : 1, e.n, 0};
  if (row_b && e.m <= kFewRows)
    multiply_few_rows<kPanelRows>(e, rows, b, sum, stride, scratch);
  else
    multiply_packed<kPanelRows>(block, e, rows, columns, sum, stride, scratch);
}

template <int64_t kBlock>
void multiply(Extents e, Block a, Block b, void* accumulators, int64_t stride, void* scratch) {
  // Panels are multiplied in full, with the height that fits best.
  bool const low = round_up(e.m, 8) < round_up(e.m, kMostRows);
  auto const chosen = e.m <= 4 ? multiply_in_panels<4> : low ? multiply_in_panels<8> : multiply_in_panels<kMostRows>;
  chosen(kBlock, e, a, b, static_cast<float*>(accumulators), stride, static_cast<Pair*>(scratch));
}

}  // namespace

TileProduct tile_product(Type d) {
  TileProduct product = host_avx512::tile_product(Type::kBF16, d);
  product.multiply = multiply<2 * kPairs>;
  product.multiply_invariant = multiply<kFewK>;  // few rows and many have the same blocks
  return product;
}

}  // namespace jax_streamk::host_avx512_bf16
