#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cutlass_kernels/core/cuda.h"
#include "cutlass_kernels/core/dependent_launch.cuh"
#include "cutlass_kernels/core/tf32.cuh"
#include "cutlass_kernels/passes/copy.h"
#include "cutlass_kernels/passes/extent.cuh"

namespace jax_streamk {
namespace {

// Rows at any address, to be copied with each row padded with zeros to a multiple of 16 bytes. Counted in 16-bit
// elements; an f32 is two. A warp copies a piece of a row.
struct Rows {
  static constexpr int kPiece = kCopiedPiece;

  uint16_t const* from;
  uint16_t* to;
  int64_t columns, ld_from, batch_stride_from, ld_to, batch_stride_to;
  int32_t pieces = 0;  // in all rows
  ShortExtent pieces_per_row, rows_per_batch;

  // Whether a copy of `x` is one of these rows too.
  bool are_those_of(Rows const& x) const {
    auto const fields = [](Rows const& y) {
      return std::tuple(y.from, y.columns, y.ld_from, y.batch_stride_from, y.ld_to, y.batch_stride_to, y.pieces,
                        y.rows_per_batch.size);
    };
    return fields(*this) == fields(x);
  }
};

// One or two matrices, selected by the grid's y.
struct Copies {
  Rows of[2];
  int count = 0;
};

constexpr int kCopiers = 256;

__global__ __launch_bounds__(kCopiers) void copy_rows(__grid_constant__ Copies const copies) {
  let_dependents_start();
  Rows const& p = copies.of[blockIdx.y];
  int const lane = threadIdx.x % 32, at = blockIdx.x * (kCopiers / 32) + threadIdx.x / 32;
  if (at >= p.pieces) return;
  int const of_all = p.pieces_per_row.divisor.divide(at);
  int64_t const begin = static_cast<int64_t>(at - of_all * p.pieces_per_row.size) * Rows::kPiece;
  int const batch = p.rows_per_batch.divisor.divide(of_all), row = of_all - batch * p.rows_per_batch.size;
  uint16_t const* const from = p.from + batch * p.batch_stride_from + row * p.ld_from + begin;
  uint16_t* const to = p.to + batch * p.batch_stride_to + row * p.ld_to + begin;
  int const columns = static_cast<int>(min(p.columns - begin, int64_t{Rows::kPiece}));
  // Pairs of elements, all loaded before the first is stored. If the row starts in the middle of a 4-byte word, a pair
  // is half of this lane's word and half of the next lane's.
  constexpr int kPairs = Rows::kPiece / 64;
  int const odd = reinterpret_cast<uintptr_t>(from) % 4 != 0, whole = (columns + odd) / 2;
  // Half of the last word may be outside the matrix; its one element is loaded alone.
  bool const is_last = (columns + odd) % 2 != 0 && whole % 32 == lane;
  uint32_t words[kPairs + 1] = {};
  uint32_t const last = is_last ? __ldg(from + columns - 1) : 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j)
    if (lane + 32 * j < whole) words[j] = __ldg(reinterpret_cast<uint32_t const*>(from - odd) + lane + 32 * j);
#pragma unroll
  for (int j = 0; j <= kPairs; ++j)
    if (is_last && whole / 32 == j) words[j] = last;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    int const column = 2 * (lane + 32 * j);
    uint32_t pair = words[j];
    if (odd) {
      uint32_t const next = __shfl_down_sync(~0u, words[j], 1), first = __shfl_sync(~0u, words[j + 1], 0);
      pair = pair >> 16 | (lane == 31 ? first : next) << 16;
    }
    if (column < (columns + 7) / 8 * 8) *reinterpret_cast<uint32_t*>(to + column) = pair;
  }
}

// A matrix, K-major or not, copied square by square into `rows` rows along K. With `part`, a copied row of f32 holds
// two TF32 parts of that length, padded with zeros: the nearest TF32 numbers (large), and the remainders (small).
template <class Element>
struct Squares {
  Element const* from;
  Element* to;
  int64_t batches, rows, k, ld_from, batch_stride_from, ld_to, batch_stride_to;
  bool along_k;              // whether `from` is K-major
  int64_t part = 0;          // 0: elements as they are
  bool small_first = false;  // the order of the parts

  static constexpr int kSide = 32, kThreads = 8;  // a block of kSide x kThreads threads copies squares of kSide
  int64_t columns = part > 0 ? part : k;
  Extent down{(rows + kSide - 1) / kSide}, across{(columns + kSide - 1) / kSide};
  __host__ __device__ int64_t squares() const { return batches * down.size * across.size; }
};

// One or two matrices, selected by the grid's y.
template <class Element>
__global__ void copy_squares(Squares<Element> first, Squares<Element> second) {
  let_dependents_start();
  constexpr int kSide = Squares<Element>::kSide, kStep = Squares<Element>::kThreads;
  __shared__ Element square[kSide][kSide + 1];  // padded: the elements of a column are in different banks
  Squares<Element> const p = blockIdx.y == 0 ? first : second;
  int const x = threadIdx.x;
  for (int64_t at = blockIdx.x; at < p.squares(); at += gridDim.x) {
    int64_t const of_all = p.across.divide(at), batch = p.down.divide(of_all);
    int64_t const k = (at - of_all * p.across.size) * kSide, row = (of_all - batch * p.down.size) * kSide;
    Element const* const from = p.from + batch * p.batch_stride_from;
    Element* const to = p.to + batch * p.batch_stride_to + row * p.ld_to + k + x;
    Element values[kSide / kStep];
#pragma unroll
    for (int i = 0; i < kSide / kStep; ++i) {
      int const y = threadIdx.y + i * kStep;
      int64_t const at_row = row + (p.along_k ? y : x), at_k = k + (p.along_k ? x : y);
      values[i] = at_row < p.rows && at_k < p.k
                      ? __ldg(from + (p.along_k ? at_row * p.ld_from + at_k : at_k * p.ld_from + at_row))
                      : Element{};
    }
    if (!p.along_k) {
#pragma unroll
      for (int i = 0; i < kSide / kStep; ++i) square[threadIdx.y + i * kStep][x] = values[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSide / kStep; ++i) values[i] = square[x][threadIdx.y + i * kStep];
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kSide / kStep; ++i) {
      int const y = threadIdx.y + i * kStep;
      if (row + y >= p.rows || k + x >= p.columns) break;
      if constexpr (std::is_same_v<Element, float>) {
        if (p.part != 0) {
          float const large = __uint_as_float(to_tf32(values[i])), small = __uint_as_float(to_tf32(values[i] - large));
          to[y * p.ld_to] = p.small_first ? small : large;
          to[y * p.ld_to + p.part] = p.small_first ? large : small;
          continue;
        }
      }
      to[y * p.ld_to] = values[i];
    }
  }
}

// A grid, possibly smaller than the number of pieces: blocks loop over the rest.
unsigned blocks_for(int64_t squares) {
  int64_t const most = 65535;
  return static_cast<unsigned>(squares < most ? squares : most);
}

// launch_copies() of elements of one size.
template <class Element>
Status launch_copies_of(GemmProblem const& p, Repack const& repack, bool swap_ab, Buffers& buffers,
                        cudaStream_t stream) {
  GemmProblem const& q = repack.problem;
  auto* to = static_cast<char*>(buffers.workspace);
  Copies copies;
  std::vector<Squares<Element>> squares;
  // Adds a copy of an m x n matrix, and points `matrix` to it. Transposed and split copies are Squares.
  auto const add = [&](void const*& matrix, Major major, Major as, int64_t m, int64_t n, int64_t ld, int64_t ld_to,
                       int64_t batch_stride, int64_t batch_stride_to, bool small_first, int64_t bytes) {
    int64_t const batches = batch_stride != 0 ? p.batch : 1, extent = as == Major::kRow ? m : n,
                  columns = as == Major::kRow ? n : m;
    if (major != as || repack.part > 0) {
      squares.push_back({static_cast<Element const*>(matrix), reinterpret_cast<Element*>(to), batches, extent, columns,
                         ld, batch_stride, ld_to, batch_stride_to, major == as, repack.part, small_first});
    } else {
      constexpr int64_t halves = sizeof(Element) / 2;
      Rows const rows{static_cast<uint16_t const*>(matrix),
                      reinterpret_cast<uint16_t*>(to),
                      columns * halves,
                      ld * halves,
                      batch_stride * halves,
                      ld_to * halves,
                      batch_stride_to * halves,
                      static_cast<int32_t>(pieces_of(p, as, m, n, batch_stride)),
                      ShortExtent((columns * halves + Rows::kPiece - 1) / Rows::kPiece),
                      ShortExtent(extent)};
      // x.T @ x copies x once.
      if (copies.count == 1 && rows.are_those_of(copies.of[0])) {
        matrix = copies.of[0].to;
        return;
      }
      copies.of[copies.count++] = rows;
    }
    matrix = to;
    to += bytes;
  };
  if (repack.a)
    add(buffers.a, p.a.major, q.a.major, p.m, p.k, p.a.ld, q.a.ld, p.a.batch_stride, q.a.batch_stride, !swap_ab,
        repack.bytes_a);
  if (repack.b)
    add(buffers.b, p.b.major, q.b.major, p.k, p.n, p.b.ld, q.b.ld, p.b.batch_stride, q.b.batch_stride, swap_ab,
        repack.bytes_b);
  buffers.workspace = to;
  if (!squares.empty()) {
    Squares<Element> const &first = squares.front(), &last = squares.back();
    dim3 const blocks(blocks_for(std::max(first.squares(), last.squares())), static_cast<unsigned>(squares.size()));
    copy_squares<<<blocks, dim3(first.kSide, first.kThreads), 0, stream>>>(first, last);
    if (Status status = from_cuda(cudaGetLastError(), "launching the copy of transposed operands"); !status.ok())
      return status;
  }
  if (copies.count == 0) return {};
  int const warps = kCopiers / 32, blocks = (std::max(copies.of[0].pieces, copies.of[1].pieces) + warps - 1) / warps;
  copy_rows<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(copies.count)), kCopiers, 0, stream>>>(copies);
  return from_cuda(cudaGetLastError(), "launching the copy of misaligned matrices");
}

}  // namespace

Status launch_copies(GemmProblem const& p, Repack const& repack, bool swap_ab, Buffers& buffers, cudaStream_t stream) {
  auto const& launch = size_of(p.a.format) == 2 ? launch_copies_of<uint16_t> : launch_copies_of<float>;
  return launch(p, repack, swap_ab, buffers, stream);
}

}  // namespace jax_streamk
