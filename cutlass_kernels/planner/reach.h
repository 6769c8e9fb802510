// How far operands are described to TMA, which takes two or three times as long for what is not there.
#pragma once

#include <cstdint>

namespace jax_streamk {

// An operand of rows (columns) of M or N by K, as the tiles of a kernel read it.
struct TiledOperand {
  void const* data;  // on the GPU
  int32_t element_bytes;
  bool contiguous;  // along its rows, not along K
  int64_t extent, k, ld, batches, batch_stride;
  int64_t tile, cluster;  // rows of a tile, tiles of a cluster
  int64_t others;         // rows of the other operand
};

// So many rows it is described to have, `extent` or more: what follows it in its allocation is read as if it were its
// own, and multiplied into what D does not have.
int64_t described_extent(TiledOperand const&);

}  // namespace jax_streamk
