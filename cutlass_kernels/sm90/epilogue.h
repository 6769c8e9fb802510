// The epilogue of the sm90 family, in registers, and the store of D by way of shared memory: by TMA, or by threads
// where rows of D do not start on 16 bytes.
//
// Bias and residual come straight from global memory: as a C operand they would take shared memory from the main loop.
// The bias waits in registers while a tile is multiplied; an idle warp has the residual brought near meanwhile.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/epilogue/epilogue.cuh"
#include "cutlass_kernels/sm90/mainloop.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

template <class Element>
struct StoreParams : EpilogueParams<float, Element> {
  Element* misaligned_d;  // where rows of D start anywhere; null where TMA stores them

  StoreParams() = default;
  StoreParams(GemmProblem const& p, Buffers const& buffers, bool misaligned)
      : EpilogueParams<float, Element>(p, buffers),
        misaligned_d(misaligned ? static_cast<Element*>(buffers.d) : nullptr) {}
};

// How many accumulators get their residual at a time, of elements of so many bytes: all loads of a turn are under way
// at once, and the next turn waits for its own. The more accumulators, the fewer registers are left for it before ptxas
// spills; three warpgroups have 160 each where two have 240. A loop around turns would have to move accumulators, since
// registers have no index, and take longer than its code does to load.
constexpr int turn_of(int values, int bytes, bool swap, bool three) {
  if (values >= 160) return 8;
  if (values > (three ? 72 : 128)) return 16;
  int const bytes_of_turn =
      three || values >= (swap ? 128 : 112) || values * bytes > 256 ? 64 : 128;  // a plain tile has more of a bias
  return cute::min(values, bytes_of_turn / bytes);
}

// The bias of a thread's accumulators, as it lies in memory: unpacked it would take more registers. `coordinates` are
// where accumulators lie in the kernel's own result, of extents (m, n), which is D, or with swap_ab its transpose: two
// neighbours along n, two of a row 8 below, and so on along n. So of a column of D are 2 of 4 in turn, or with swap_ab
// the upper or lower rows of a wgmma.
template <bool kSwap, class Element, class Accumulators, bool kThree>
struct Biases {
  static constexpr int kValues = cute::size(Accumulators{}), kBlock = cute::size<0>(Accumulators{});
  static constexpr int kTurn = turn_of(kValues, sizeof(Element), kSwap, kThree);
  static constexpr int kVector = kSwap ? 1 : 2;  // neighbours in a row of D
  using Vector = cutlass::AlignedArray<Element, kVector>;
  static constexpr int kOfTile = kSwap ? kValues / kBlock * 2 : kValues / 4;
  // Whether all of a tile's are loaded before it is multiplied. Where there are no registers for them each turn loads
  // its own.
  static constexpr bool kEarly = kOfTile * sizeof(Vector) <= 128;
  static constexpr int kCount = kEarly ? kOfTile : kTurn / 4;

  Vector values[kCount];

  CUTLASS_DEVICE Biases() {
#pragma unroll
    for (Vector& value : values) value.clear();
  }

  // From the accumulator `begin` on.
  template <class Coordinates>
  CUTLASS_DEVICE void load(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                           Coordinates const& coordinates, int begin) {
    if (params.bias == nullptr) return;
    constexpr int kAlong = kSwap ? 0 : 1;
    int32_t const first = cute::get<kAlong>(coordinates(0)), extent = kSwap ? m : n;
    Element const* const bias = params.bias + batch * params.batch_stride_bias + first;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      int const i = kSwap ? j / 2 * kBlock + j % 2 * 2 : begin + j * 4;
      if (i >= kValues) break;
      auto const along = static_cast<int32_t>(cute::get<kAlong>(coordinates.layout()(i)));
      if (first + along < extent) values[j] = load_vector<Vector>(bias + along);
    }
  }

  CUTLASS_DEVICE float of(int i) const {
    return static_cast<float>(values[kSwap ? i / kBlock * 2 + i / 2 % 2 : (kEarly ? i : i % kTurn) / 4][i % kVector]);
  }
};

// The residual of a turn's accumulators, with what `Biases` says. Each load of a warp touches eight rows of D, and
// lines take time to look up. So of 2-byte elements threads load words as they lie together, 16 bytes each or 4 of a
// transposed tile, and exchange them when they have come. Turns too short for 16 bytes have each thread load its own.
template <bool kSwap, class Element, class Accumulators, int kTurn>
struct Residuals {
  static constexpr int kValues = cute::size(Accumulators{});
  static constexpr bool kHalf = sizeof(Element) == 2;
  static constexpr int kOfWord = kHalf ? 2 : 1;  // accumulators, neighbours along n
  // Of four blocks of 8 columns each of four threads loads one.
  static constexpr bool kOfFour = kHalf && !kSwap && kTurn % 16 == 0 && cute::size<0>(Accumulators{}) % 16 == 0;
  static constexpr int kLoaded = kOfFour ? 4 : kHalf || kSwap ? 1 : 2;  // words at once
  using Words = cutlass::AlignedArray<uint32_t, kLoaded>;

  uint32_t words[kTurn / kOfWord];

  // Of the accumulators of a turn. Before the exchange those that a thread has loaded at once follow each other.
  static constexpr int index(int i) { return kOfFour ? i / 16 * 8 + i / 2 % 2 * 4 + i / 4 % 4 : i / kOfWord; }

  // From the accumulator `begin` on.
  template <class Coordinates>
  CUTLASS_DEVICE void load(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                           Coordinates const& coordinates, int begin) {
    int32_t first_m = cute::get<0>(coordinates(0)), first_n = cute::get<1>(coordinates(0));
    int32_t const row = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
    if (kOfFour) first_n += 6 * place;  // 8 columns each instead of 2
    if (kHalf && kSwap) first_m += 2 * place - row, first_n += row - 2 * place;
    Element const* base = params.residual + batch * params.batch_stride_d;
    base += kSwap ? first_n * params.ldd + first_m : first_m * params.ldd + first_n;
    asm("" : "+l"(base));  // opaque, or every load would compute it again
#pragma unroll
    for (int i = 0; i < kTurn && begin + i < kValues; i += kHalf ? 2 : kLoaded) {
      if (kOfFour && i % 16 >= 4) continue;
      auto const at_m = static_cast<int32_t>(cute::get<0>(coordinates.layout()(begin + i)));
      auto const at_n = static_cast<int32_t>(cute::get<1>(coordinates.layout()(begin + i)));
      if (first_m + at_m >= m || first_n + at_n >= n) continue;
      auto const loaded = load_vector<Words>(base + (kSwap ? at_n * params.ldd + at_m : at_m * params.ldd + at_n));
#pragma unroll
      for (int j = 0; j < kLoaded; ++j) words[index(i) + j] = loaded[j];
    }
  }

  // By all threads of a warp, before of(). `i` counts words.
  CUTLASS_DEVICE void exchange(int begin) {
    if constexpr (!kHalf) return;
#pragma unroll
    for (int i = 0; i < kTurn / 2 && begin + 2 * i < kValues; i += kLoaded) {
      if constexpr (kSwap) {
        cute::SM75_U32x1_MOVM_T::copy(words[i], words[i]);
      } else if constexpr (kOfFour) {
        // Four words of four threads are a matrix: its transpose, first of each two by two and then of those.
#pragma unroll
        for (int apart = 1; apart <= 2; apart *= 2) {
          bool const second = threadIdx.x & apart;
#pragma unroll
          for (int j = i; j < i + 4; ++j) {
            if (j & apart) continue;
            uint32_t const got = __shfl_xor_sync(~0u, second ? words[j] : words[j + apart], apart);
            words[j] = second ? got : words[j];
            words[j + apart] = second ? words[j + apart] : got;
          }
        }
      }
    }
  }

  CUTLASS_DEVICE float of(int i) const {
    cutlass::AlignedArray<Element, kOfWord> word;
    std::memcpy(&word, &words[index(i % kTurn)], sizeof(word));
    return static_cast<float>(word[i % kOfWord]);
  }
};

// accumulators = epilogue(accumulators), with what `Biases` says; and unless all are done at once, store(begin, end)
// for so many in turn, which are stored while the next have their activation. Each activation has one piece of code for
// a whole tile: at every jump the instructions are fetched that nobody has read, and waited for.
template <int kAtOnce, bool kSwap, bool kThree, class Element, class Accumulators, class Coordinates, class Store>
CUTLASS_DEVICE void apply(EpilogueParams<float, Element> const& params, int64_t batch, int32_t m, int32_t n,
                          Coordinates const& coordinates, Biases<kSwap, Element, Accumulators, kThree>& biases,
                          Accumulators& accumulators, Store const& store) {
  using Bias = Biases<kSwap, Element, Accumulators, kThree>;
  constexpr int kValues = Bias::kValues, kTurn = Bias::kTurn;
  auto const store_some = [&](int begin, int end) CUTLASS_LAMBDA_FUNC_INLINE {
    if (kAtOnce < kValues) store(begin, end);
  };
  bool const has_residual = params.residual != nullptr;
  // Whether all of these lie beyond D, along n. Then their work is skipped; and as ptxas moves little past a branch, it
  // keeps from being under way at once what there are no registers for, of which 64 accumulators leave enough. Columns
  // of two wgmmas begin with the tile's.
  int32_t const tile_n = cute::get<1>(coordinates(0)) - threadIdx.x % 4 * 2;
  auto const beyond = [&](int begin, int end) CUTLASS_LAMBDA_FUNC_INLINE {
    bool const of_one_mma = begin / Bias::kBlock == (end - 1) / Bias::kBlock;
    auto const first_n = static_cast<int32_t>(cute::get<1>(coordinates.layout()(begin)));
    return kValues > 64 && tile_n + (of_one_mma ? first_n : 0) >= n;
  };
  // function(two neighbours) of these.
  auto const each_two_of = [&](int begin, int end, auto const& function) CUTLASS_LAMBDA_FUNC_INLINE {
    if (beyond(begin, end)) return;
#pragma unroll
    for (int i = begin; i < end; i += 2) function(i, i + 1);
  };

  Residuals<kSwap, Element, Accumulators, kTurn> residuals;
  auto const load_operands = [&](int begin) CUTLASS_LAMBDA_FUNC_INLINE {
    if (!Bias::kEarly) biases.load(params, batch, m, n, coordinates, begin);
    if (has_residual) residuals.load(params, batch, m, n, coordinates, begin);
  };

  float alpha = params.alpha;
  if (has_residual || (!Bias::kEarly && params.bias != nullptr)) {
    load_operands(0);
#pragma unroll
    for (int begin = 0; begin < kValues; begin += kTurn) {
      if (has_residual) residuals.exchange(begin);
      auto const add = [&](int i) CUTLASS_LAMBDA_FUNC_INLINE {
        accumulators(i) = alpha * accumulators(i) + (Bias::kEarly ? 0 : biases.of(i));
        if (has_residual) accumulators(i) += params.beta * residuals.of(i);
      };
      each_two_of(begin, cute::min(begin + kTurn, kValues),
                  [&](int i, int j) CUTLASS_LAMBDA_FUNC_INLINE { add(i), add(j); });
      if (begin + kTurn < kValues) load_operands(begin + kTurn);
    }
    bool const waits = Bias::kEarly && params.bias != nullptr;  // what came early is added below
    if (params.activation == Activation::kNone && !waits) return store_some(0, kValues);
    alpha = 1;
  }
  constexpr int kFew = kValues >= 160 ? 4 : cute::min(kTurn / 2, 16);  // an activation needs registers of its own
  constexpr bool kShares = kValues < 128;                              // as two do that share a reciprocal
  with_activation<kShares>(params.activation, [&](auto const& function) CUTLASS_LAMBDA_FUNC_INLINE {
#pragma unroll
    for (int first = 0; first < kValues; first += kAtOnce) {
      int const last = cute::min(first + kAtOnce, kValues);
#pragma unroll
      for (int begin = first; begin < last; begin += kFew)
        each_two_of(begin, cute::min(begin + kFew, last), [&](int i, int j) CUTLASS_LAMBDA_FUNC_INLINE {
          auto const biased = [&](int at) CUTLASS_LAMBDA_FUNC_INLINE {
            return alpha * accumulators(at) + (Bias::kEarly ? biases.of(at) : 0);
          };
          float x = biased(i), y = biased(j);
          activate_two(function, x, y);
          accumulators(i) = x, accumulators(j) = y;
        });
      store_some(first, last);
    }
  });
}

// D = epilogue(accumulators), whose rows may start anywhere: each warp puts some of its accumulators into `kBytes` of
// shared memory of its own and takes them out along rows of D. The arguments are those of apply().
template <bool kSwap, int kBytes, class Element, class Accumulators, class Coordinates>
CUTLASS_DEVICE void store_misaligned(StoreParams<Element> const& params, int64_t batch, int32_t m, int32_t n,
                                     Coordinates const& coordinates, Accumulators const& accumulators, float* shared) {
  // A warp has 16 rows of the kernel's own result, and of so many blocks of 8 columns at a time.
  constexpr int kBlocks = kBytes >= 2048 ? 4 : kBytes >= 1024 ? 2 : 1;
  static_assert(kBytes >= 512);
  constexpr int kRows = kSwap ? 8 * kBlocks : 16, kColumns = kSwap ? 16 : 8 * kBlocks;  // of D
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or addresses would be computed before the first tile, and take registers from all
  // Spread over banks.
  auto const at = [&](int row, int column) {
    constexpr int kPeriod = kSwap ? 2 : 4 / kBlocks;
    return shared + row * kColumns + (column ^ row / kPeriod % (kColumns / 8) * 8);
  };
  auto const first = coordinates(0);
  int32_t const first_m = cute::get<0>(first) - lane / 4, first_n = cute::get<1>(first) - lane % 4 * 2;
  int32_t const rows = kSwap ? n : m, columns = kSwap ? m : n;
  constexpr int kValues = cute::size(Accumulators{});
  // write(row and column of D where a piece begins, blocks of it) for each piece, which is in shared memory. Each
  // `write` has a loop of its own: code that others skip would lie between its pieces, and be read with every tile.
  auto const each_piece = [&](auto const& write) CUTLASS_LAMBDA_FUNC_INLINE {
    // Of one wgmma, of which the accumulators of 8 columns are 4.
    constexpr int kValuesOfMma = cute::size<0>(Accumulators{});
#pragma unroll
    for (int of_mma = 0; of_mma < kValues; of_mma += kValuesOfMma) {
#pragma unroll
      for (int block = 0; block < kValuesOfMma / 4; block += kBlocks) {
        int const begin = of_mma + block * 4, blocks = cute::min(kBlocks, kValuesOfMma / 4 - block);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < blocks * 4; ++i) {
          int const own_row = lane / 4 + i / 2 % 2 * 8, own_column = i / 4 * 8 + lane % 4 * 2 + i % 2;
          *(kSwap ? at(own_column, own_row) : at(own_row, own_column)) = accumulators(begin + i);
        }
        __syncwarp();
        int32_t const begin_m = first_m + static_cast<int32_t>(cute::get<0>(coordinates.layout()(begin)));
        int32_t const begin_n = first_n + static_cast<int32_t>(cute::get<1>(coordinates.layout()(begin)));
        write(kSwap ? begin_n : begin_m, kSwap ? begin_m : begin_n, blocks);
      }
    }
  };
  Element* const d = params.misaligned_d + batch * params.batch_stride_d;

  // As many neighbours in one store as their address allows.
  auto const store_plain = [&](auto width) CUTLASS_LAMBDA_FUNC_INLINE {
    constexpr int kWidth = decltype(width)::value, kLanes = kColumns / kWidth, kStep = 32 / kLanes;
    // Many accumulators leave no registers for addresses.
    constexpr bool kMany = kValues >= 128;
    constexpr int kAtOnce = cute::min(kRows / kStep, kMany ? cute::max(4 / kWidth, 1) : kRows),
                  kUnroll = kMany ? 1 : kRows;
    using From = cutlass::AlignedArray<float, kWidth>;
    using To = cutlass::AlignedArray<Element, kWidth>;
    each_piece([&](int32_t d_row, int32_t d_column, int blocks) CUTLASS_LAMBDA_FUNC_INLINE {
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
          auto const converted = cutlass::NumericArrayConverter<Element, float, kWidth>{}(x[j]);
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
    int64_t const strides = params.ldd | params.batch_stride_d | columns;
    if (sizeof(Element) == 2 && strides % 4 == 0) return store_plain(cute::Int<4>{});
    if (strides % 2 == 0) return store_plain(cute::Int<2>{});
    return store_plain(cute::Int<1>{});
  }

  constexpr int kStep = 32 / kColumns, kTurn = 4;  // few values at once: activations are much code
  each_piece([&](int32_t d_row, int32_t d_column, int blocks) CUTLASS_LAMBDA_FUNC_INLINE {
    int const row = lane / kColumns, column = lane % kColumns;
    bool const inside = d_column + column < columns && (kSwap || column < blocks * 8);
    float bias = 0;
    if (params.bias != nullptr && inside)
      bias = static_cast<float>(params.bias[batch * params.batch_stride_bias + d_column + column]);
#pragma unroll 1
    for (int below = row; below - row < kRows; below += kTurn * kStep) {
      auto const stored = [&](int j) {
        int const own_row = below + j * kStep;
        return inside && d_row + own_row < rows && (!kSwap || own_row < blocks * 8);
      };
      int64_t const offset = (d_row + below) * params.ldd + d_column + column;
      float x[kTurn];
#pragma unroll
      for (int j = 0; j < kTurn; ++j) x[j] = params.alpha * *at(below + j * kStep, column) + bias;
      if (params.residual != nullptr) {
        Element const* const residual = params.residual + batch * params.batch_stride_d + offset;
#pragma unroll
        for (int j = 0; j < kTurn; ++j)
          if (stored(j)) x[j] += params.beta * static_cast<float>(residual[j * kStep * params.ldd]);
      }
      activate(params.activation, x, kTurn);
#pragma unroll
      for (int j = 0; j < kTurn; ++j)
        if (stored(j)) d[offset + j * kStep * params.ldd] = static_cast<Element>(x[j]);
    }
  });
}

// Has the residual of a tile of D brought to L2 by a warp that stores nothing and waits for nothing. The tile begins at
// (row, column) of D, (rows, columns) are the extents that D and the tile share.
template <class Element>
CUTLASS_DEVICE void prefetch(EpilogueParams<float, Element> const& params, int64_t batch, int32_t row, int32_t column,
                             int32_t rows, int32_t columns, int lane) {
  constexpr int kLine = 128 / sizeof(Element);
  Element const* const residual = params.residual + batch * params.batch_stride_d + column;
  for (int32_t r = lane; r < rows; r += 32)
    for (int32_t i = 0; i < columns; i += kLine) prefetch_to_l2(residual + (row + r) * params.ldd + i);
}

// Of kernels whose tile is shared by so many warpgroups, each with 64 rows in turn. A warpgroup puts 64 rows by
// kColumns columns into a box of shared memory, and while TMA stores it fills another. Where the columns of a tile are
// no whole boxes the last box has some of those before it, which are stored twice.
template <class Element, bool kSwap, int kTileM, int kTileN, int kWarpgroups, int kColumns>
class CollectiveEpilogue {
  static constexpr int kSize = sizeof(Element), kRows = 64;
  static constexpr int kMmas = kTileM / (kRows * kWarpgroups), kBoxesOfMma = (kTileN + kColumns - 1) / kColumns,
                       kBoxes = kMmas * kBoxesOfMma;
  static constexpr bool kWhole = kTileN % kColumns == 0;
  static constexpr int kStages = cute::min(kBoxes, 2);
  static constexpr int kOfBox = kColumns / 2, kValues = kMmas * kTileN / 2;  // accumulators of a thread
  // So many have their activation before they are stored. All where they are done sooner than TMA reads a box that is
  // waited for, leave no registers, or are in two boxes.
  static constexpr bool kAll =
      kValues * kWarpgroups <= 64 || kValues >= 144 || kTileM == 256 || kTileN == 216 || kTileN == 224 || !kWhole;
  static constexpr int kAtOnce = kAll ? kValues : kOfBox * kWarpgroups < 24 ? 2 * kOfBox : kOfBox;
  // A row of shared memory is of D, and of no more than 128 bytes.
  static constexpr int kParts = kSwap ? kRows * kSize / 128 : 1;
  static constexpr int kRowBytes = kSwap ? 128 : kColumns * kSize, kBoxBytes = kRows * kColumns * kSize;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  static_assert(kColumns % (kSwap && kSize == 2 ? 8 : 16) == 0 && kTileN >= kColumns &&
                kTileM % (kRows * kWarpgroups) == 0);

 public:
  struct Params {
    StoreParams<Element> thread;
    cute::TmaDescriptor d;
  };
  struct alignas(1024) TensorStorage {
    char boxes[kWarpgroups][kStages][kBoxBytes];
  };

  // (m, n, k, batch) is the kernel's own shape.
  template <class ProblemShape>
  static CUresult set_up(Params& params, ProblemShape const& shape, GemmProblem const& p, Buffers const& buffers) {
    bool const misaligned = has_misaligned_d(p);
    params.thread = {p, buffers, misaligned};
    if (misaligned) return CUDA_SUCCESS;
    auto const [m, n, k, batch] = shape;
    return describe<Element>(params.d, buffers.d, kSwap ? m : n, kSwap ? n : m, batch, p.d.ld, p.d.batch_stride,
                             kRowBytes / kSize, kSwap ? kColumns : kRows, kRowBytes);
  }

  // Whether there is anything to prefetch, and any bias that is loaded before a product.
  static bool has_residual(Params const& params) { return params.thread.residual != nullptr; }
  static bool has_early_bias(Params const& params) {
    return params.thread.bias != nullptr && params.thread.misaligned_d == nullptr;
  }

  // For the tile (m, n) of the kernel's own result.
  template <class ProblemShape>
  static CUTLASS_DEVICE void prefetch(Params const& params, ProblemShape const& shape, int32_t tile_m, int32_t tile_n,
                                      int32_t batch) {
    int32_t const begin_m = tile_m * kTileM, begin_n = tile_n * kTileN;
    int32_t const extent_m = min(cute::get<0>(shape) - begin_m, kTileM),
                  extent_n = min(cute::get<1>(shape) - begin_n, kTileN);
    if constexpr (kSwap) {
      sm90::prefetch(params.thread, batch, begin_n, begin_m, extent_n, extent_m, threadIdx.x % 32);
    } else {
      sm90::prefetch(params.thread, batch, begin_m, begin_n, extent_m, extent_n, threadIdx.x % 32);
    }
  }

  // `thread` of those that share a tile; the named barrier is its warpgroup's.
  CUTLASS_DEVICE CollectiveEpilogue(Params const& params, TensorStorage& storage, int thread, uint32_t barrier)
      : params_(params),
        storage_(storage),
        boxes_(storage.boxes[thread / kWarpgroup][0]),
        thread_(thread),
        barrier_(barrier) {
    int const lane = thread % 32, warp = thread / 32 % 4;
    int offset;
    if constexpr (kSize == 2) {
      // What stmatrix takes of each thread: where a row of one of four squares of 8 x 8 begins.
      int const square = lane / 8, row = lane % 8;
      offset = kSwap ? (square / 2 * 8 + row) * kRowBytes + (warp * 2 + square % 2) * 16
                     : (warp * 16 + square % 2 * 8 + row) * kRowBytes + square / 2 * 16;
    } else {
      int const row = lane / 4, column = lane % 4 * 2;
      offset = kSwap ? warp / 2 * (kBoxBytes / 2) + column * kRowBytes + (warp % 2 * 16 + row) * 4
                     : (warp * 16 + row) * kRowBytes + column * 4;
    }
    at_ = cute::cast_smem_ptr_to_uint(storage.boxes[thread / kWarpgroup]) + (offset ^ (offset >> 3 & kRowBytes - 16));
    if (kValues < 192) asm("" : "+r"(at_));  // opaque, or it would be computed when accumulators wait for it
  }

  // Of the tile that is multiplied next, by its consumers.
  template <class Accumulators, class ProblemShape, class TileCoordinate, class TiledMma>
  CUTLASS_DEVICE auto biases(bool early, ProblemShape const& shape, TileCoordinate const& tile,
                             TiledMma const& tiled_mma) const {
    Biases<kSwap, Element, Accumulators, kWarpgroups == 3> biases;
    if (decltype(biases)::kEarly && early) {
      wait_for_primary();
      auto const [m, n, k, l] = shape;
      biases.load(params_.thread, cute::get<3>(tile), m, n, coordinates_of(shape, tile, tiled_mma), 0);
    }
    return biases;
  }

  template <class ProblemShape, class TileCoordinate, class Biases, class Accumulators, class TiledMma>
  CUTLASS_DEVICE void store(ProblemShape const& shape, TileCoordinate const& tile, Biases& biases,
                            Accumulators& accumulators, TiledMma const& tiled_mma) {
    auto const& epilogue = params_.thread;
    auto const coordinates = [&] { return coordinates_of(shape, tile, tiled_mma); };
    auto const [m, n, k, l] = shape;
    if (epilogue.misaligned_d != nullptr) {
      constexpr int kBytes = sizeof(TensorStorage) / (kWarpgroups * 4) / 512 * 512;
      auto* const of_warp = reinterpret_cast<char*>(&storage_) + thread_ / 32 * kBytes;
      store_misaligned<kSwap, kBytes>(epilogue, cute::get<3>(tile), m, n, coordinates(), accumulators,
                                      reinterpret_cast<float*>(of_warp));
      return;
    }
    if (!epilogue.plain)
      apply<kAtOnce>(epilogue, cute::get<3>(tile), m, n, coordinates(), biases, accumulators,
                     [&](int begin, int end)
                         CUTLASS_LAMBDA_FUNC_INLINE { store_converted(tile, accumulators, begin, end); });
    if (epilogue.plain || kAtOnce == kValues) store_converted(tile, accumulators);
  }

  // Accumulators, of whole boxes.
  template <class TileCoordinate, class Accumulators>
  CUTLASS_DEVICE void store_converted(TileCoordinate const& tile, Accumulators const& accumulators, int begin = 0,
                                      int end = kValues) {
    static_assert(cute::size(Accumulators{}) == kValues && cute::size<0>(Accumulators{}) == kTileN / 2);
#pragma unroll
    for (int box = begin / kOfBox; box < (kWhole ? end / kOfBox : kBoxes); ++box) store_box(tile, accumulators, box);
  }

  // Waits until TMA has read all boxes but the newest so many, and tells the warpgroup.
  template <int kNewest = 0>
  CUTLASS_DEVICE void wait_for_boxes() {
    cute::tma_store_wait<kNewest>();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, barrier_);
  }

  // The same, when nothing more is stored.
  CUTLASS_DEVICE void finish() { cute::tma_store_wait<0>(); }

  // From now on no box waits for another: each has a place of its own in `memory`, which the main loop has left.
  template <class Storage>
  CUTLASS_DEVICE void spread(Storage& memory) {
    static_assert(alignof(Storage) % 128 == 0 && sizeof(Storage) >= kBoxes * kBoxBytes);
    if constexpr (kBoxes == kStages) return;
    at_ += cute::cast_smem_ptr_to_uint(&memory) - cute::cast_smem_ptr_to_uint(boxes_);
    boxes_ = reinterpret_cast<char*>(&memory);
    spread_ = true;
  }

 private:
  static constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;

  template <class TileCoordinate, class Accumulators>
  CUTLASS_DEVICE void store_box(TileCoordinate const& tile, Accumulators const& accumulators, int box) {
    if (box >= kStages && !spread_) wait_for_boxes<kStages - 1>();
    fill(accumulators, box);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, barrier_);
    // A warp issues it once. Electing a thread takes longer: what it needs then leaves uniform registers.
    if (thread_ / 32 % 4 != 0) return;
    int const warpgroup = thread_ / kWarpgroup, mma = box / kBoxesOfMma;
    int32_t const m = cute::get<0>(tile) * kTileM + (mma * kWarpgroups + warpgroup) * kRows;
    int32_t const n = cute::get<1>(tile) * kTileN + first_column(box);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      cute::SM90_TMA_STORE_3D::copy(&params_.d, boxes_ + place(box) + part * (kBoxBytes / kParts),
                                    kSwap ? m + part * (kRows / kParts) : n, kSwap ? n : m, cute::get<3>(tile));
    cute::tma_store_arrive();
  }

  // A box's accumulators into shared memory. Along a row the pieces' places are those of the first with some bits
  // flipped.
  template <class Accumulators>
  CUTLASS_DEVICE void fill(Accumulators const& accumulators, int box) {
    uint32_t at = at_ + place(box);
    if (kBoxes > 2) asm volatile("" : "+r"(at));  // opaque, or the places of all boxes would be in registers
    int const begin = kWhole ? box * kOfBox : (box / kBoxesOfMma * kTileN + first_column(box)) / 2;
    if constexpr (kSize == 2) {
#pragma unroll
      for (int block = 0; block < kColumns / 8; block += 2) {
        bool const alone = block + 1 == kColumns / 8;  // a last block of a transposed tile
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < (alone ? 2 : 4); ++i) {
          cutlass::Array<float, 2> two;
          two[0] = accumulators(begin + block * 4 + i * 2), two[1] = accumulators(begin + block * 4 + i * 2 + 1);
          auto const converted = cutlass::NumericArrayConverter<Element, float, 2>{}(two);
          std::memcpy(&words[i], &converted, 4);
        }
        if constexpr (kSwap) {
          uint32_t const to = at + block * 8 * kRowBytes;
          if (alone) {
            asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(words[0]),
                         "r"(words[1])
                         : "memory");
          } else {
            asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                         "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
          }
        } else {
          asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ block * 16),
                       "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOfBox; i += 2) {
        int const block = i / 4, lower = i / 2 % 2;  // 8 rows below
        float const x = accumulators(begin + i), y = accumulators(begin + i + 1);
        if constexpr (kSwap) {
          uint32_t const first = (at ^ lower * 32) + block * 8 * kRowBytes;
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(first), "f"(x) : "memory");
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(first ^ kRowBytes + 16), "f"(y) : "memory");
        } else {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((at ^ block * 32) + lower * 8 * kRowBytes), "f"(x),
                       "f"(y)
                       : "memory");
        }
      }
    }
  }

  template <class ProblemShape, class TileCoordinate, class TiledMma>
  CUTLASS_DEVICE auto coordinates_of(ProblemShape const& shape, TileCoordinate const& tile,
                                     TiledMma const& tiled_mma) const {
    auto const whole = cute::make_identity_tensor(cute::take<0, 2>(shape));
    auto const tile_shape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{};
    return tiled_mma.get_slice(thread_).partition_C(cute::local_tile(whole, tile_shape, cute::take<0, 2>(tile)));
  }

  // The column of the tile at which a box begins. What is simple where boxes are whole stays so: ptxas must see which
  // accumulators a box has, or all of them lie in memory.
  static CUTLASS_DEVICE int first_column(int box) {
    int const first = box % kBoxesOfMma * kColumns;
    return kWhole ? first : min(first, kTileN - kColumns);
  }

  CUTLASS_DEVICE int place(int box) const { return (spread_ ? box : box % kStages) * kBoxBytes; }

  Params const& params_;
  TensorStorage& storage_;
  char* boxes_;  // of this warpgroup
  bool spread_ = false;
  int const thread_;
  uint32_t const barrier_;
  uint32_t at_;  // where this thread's part of the first box begins
};

}  // namespace jax_streamk::sm90
