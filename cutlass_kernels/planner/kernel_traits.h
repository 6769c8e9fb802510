// What the cost model asks about a kernel besides its family's traits: what overlaps, what loads cost more.
#pragma once

#include "cutlass_kernels/core/family.h"

namespace jax_streamk {

// Skinny CTAs that convert TF32 need as many on an SM to reach its threads' rate.
constexpr int32_t kSkinnyTF32 = 3;

struct KernelTraits {
  FamilyTraits const& family;
  int32_t ctas_per_sm = 1;
  // Pingpong: one warpgroup stores its tile while another multiplies.
  bool hides_epilogue = false;
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
