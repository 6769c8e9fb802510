// What the cost model asks of a kernel: which units multiply, how operands arrive, what overlaps.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

enum class MathUnit { kWgmma, kMma, kMmaFewRows };
enum class LoadPath { kTma, kVectors, kStreaming };

struct KernelTraits {
  MathUnit math_unit;
  LoadPath load_path;
  int32_t ctas_per_sm = 1;
  // One warpgroup stores its tile while another multiplies (pingpong).
  bool hides_epilogue = false;
  // CTAs that share a tile add it up in distributed shared memory, without partials in memory.
  bool fixes_up_in_cluster = false;
  // A separate reduction's slice that K cuts short is a launch of its own, and so is each batch.
  bool launches_slices_apart = false;
  bool shifted_b = false;  // B's rows may start anywhere

  static KernelTraits of(KernelInfo const&);
};

// An operand as a CTA's tile reads it.
struct TileOperand {
  double element_bytes;
  int64_t ld;      // elements from one row to the next
  bool along_k;    // contiguous along K, else along M or N
  int64_t extent;  // of M or N
  int32_t tile;    // rows of A or columns of B in a tile
  int32_t row;     // bytes of a row of a TMA box, if contiguous along M or N
  double vector;   // bytes that a thread loads at once, at most
};

}  // namespace jax_streamk
