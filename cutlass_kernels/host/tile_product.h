// What a CPU thread does to one output tile. The host kernel decides which tile and which run of K; these functions do
// the arithmetic. They are compiled once per instruction set and picked at run time.
//
// Translation units that define one are compiled for instructions that the machine may lack. They keep everything that
// they define to themselves (an unnamed namespace, Eigen under a name of its own), so that the linker never uses an
// inline function from one of them for the rest of the program.
#pragma once

#include <cstdint>

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

// A block of an operand, with `stride` elements between its rows (kRow) or its columns (kColumn).
struct Block {
  void const* data;
  int64_t stride;
  Major major;
};

// Numbers of one type, for each block of B or each of its elements.
struct Numbers {
  void const* data = nullptr;  // null: there are none
  Type type = Type::kF32;
};

// A block of an operand that may have scales: `lines` of its contiguous dimension, and `length` elements of each.
struct ScaledBlock {
  Major major;
  Numbers codes, scale, zero, offset;
  int64_t first, ld;              // its first element in `codes`, and the elements from a line to the next
  int64_t first_scale, ld_scale;  // of the batch, in `scale`, `zero` and `offset`
  int64_t line, position;         // its place in the operand
  int64_t lines, length;
  int64_t block_lines, block_length;  // elements that share a scale
};

struct Extents {
  int64_t m, n, k;
};

// Operands narrower than their accumulators are rearranged in scratch, a block of K at a time. Its size is the same for
// every instruction set, so that a program exported on one machine runs on another.
constexpr int64_t kScratchWords = 256;   // 32-bit words for each row of A and column of B
constexpr int64_t kScratchPadding = 48;  // number of rows and columns beyond those of the tile

// Rows that are multiplied by a B with scales at a time.
constexpr int64_t kScaledRows = 4;

// Accumulators are row-major with `stride` elements between rows, of type accumulator_of(operand).
struct TileProduct {
  // accumulators (m x n) = a (m x k) @ b (k x n). Scratch is aligned to 64 bytes.
  void (*multiply)(Extents, Block a, Block b, void* accumulators, int64_t stride, void* scratch);
  // The same, where an element's bits depend on its row of a and its column of b alone.
  void (*multiply_invariant)(Extents, Block a, Block b, void* accumulators, int64_t stride, void* scratch);
  // sum (m x n) += partial
  void (*add)(Extents, void const* partial, int64_t stride_partial, void* sum, int64_t stride);
  // d (m x n) = epilogue(accumulators), converted to the type of D. The bias is that of the tile's columns; the
  // residual has the strides of D. Accumulators of D's type may be D.
  void (*store)(Extents, EpilogueOps const&, void const* bias, void const* residual, void const* accumulators,
                int64_t stride, void* d, int64_t stride_d);
  // to (lines x length, contiguous) = what a block stands for, in the operands' type. Null for integers and f64.
  void (*dequantize)(ScaledBlock const&, void* to);
  // accumulators = a @ what b stands for, for few rows. Lines and blocks of b begin bytes. Scratch has k f32 for each
  // row, up to a multiple of kScaledRows.
  void (*multiply_scaled)(Extents, Block a, ScaledBlock const& b, void* accumulators, int64_t stride, void* scratch);
};

// tile_eigen.cc, once per instruction set; AVX2 and AVX-512 on x86 only.
namespace host_baseline {
TileProduct tile_product(Type operand, Type d);
}
namespace host_avx2 {
TileProduct tile_product(Type operand, Type d);
}
namespace host_avx512 {
TileProduct tile_product(Type operand, Type d);
}

// tile_avx512_bf16.cc: the same for bf16 operands, with a multiply() of AVX512_BF16.
namespace host_avx512_bf16 {
TileProduct tile_product(Type d);
}

}  // namespace jax_streamk
