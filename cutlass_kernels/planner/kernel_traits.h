// What the cost model asks about a kernel: which unit multiplies, how operands arrive, what overlaps.
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

enum class MathUnit { kWgmma, kMma, kMmaFewRows };
enum class LoadPath { kTma, kVectors, kStreaming };

// Skinny CTAs that convert TF32 need as many on an SM to reach its threads' rate.
constexpr int32_t kSkinnyTF32 = 3;

struct KernelTraits {
  MathUnit math_unit;
  LoadPath load_path;
  int32_t ctas_per_sm = 1;
  // Pingpong: one warpgroup stores its tile while another multiplies.
  bool hides_epilogue = false;
  // CTAs that share a tile add it up in distributed shared memory.
  bool fixes_up_in_cluster = false;
  // A separate reduction needs a launch per batch, and one more for a shorter last slice.
  bool launches_slices_apart = false;
  // CTAs share the tiles of groups that are much longer along K than others (sm90/long_tiles.h).
  bool cuts_long_tiles = false;
  bool transposes_b = false;  // threads transpose the kernel's own B in shared memory
  bool shifted_b = false;     // B's rows may start anywhere
  bool words_of_b = false;    // B has few columns, loaded as words of 4 bytes wherever rows start

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
