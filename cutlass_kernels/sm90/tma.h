// Tensor maps: how TMA sees a matrix.
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_streamk::sm90 {

// The tensor map of kRank dimensions, the contiguous one first; strides are in bytes. In shared memory the rows of a
// box are `row_bytes` apart (32, 64 or 128, also the swizzle); a box may be narrower.
template <class Element, int kRank>
CUresult encode_tensor_map(cute::TmaDescriptor& map, void const* matrix, uint64_t const (&extents)[kRank],
                           uint64_t const (&strides)[kRank - 1], uint32_t const (&box)[kRank], uint32_t row_bytes) {
  uint32_t const steps[] = {1, 1, 1, 1};
  static_assert(kRank <= 4);
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &map, cute::TMA::to_CUtensorMapDataType<Element>(), kRank, const_cast<void*>(matrix), extents, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
      : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                        : CU_TENSOR_MAP_SWIZZLE_32B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// The tensor map of a batch of row-major matrices, copied in boxes of `box_rows` x `box_columns` elements.
template <class Element>
CUresult encode_tensor_map(cute::TmaDescriptor& map, void const* matrix, int64_t columns, int64_t rows, int64_t batch,
                           int64_t ld, int64_t batch_stride, uint32_t box_columns, uint32_t box_rows,
                           uint32_t row_bytes) {
  constexpr uint64_t kSize = sizeof(Element);
  return encode_tensor_map<Element, 3>(map, matrix, {uint64_t(columns), uint64_t(rows), uint64_t(batch)},
                                       {ld * kSize, batch_stride * kSize}, {box_columns, box_rows, 1}, row_bytes);
}

}  // namespace jax_streamk::sm90
