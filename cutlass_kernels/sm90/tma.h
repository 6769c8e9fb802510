// How TMA is told of a matrix.
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/cuda_host_adapter.hpp"

namespace jax_streamk::sm90 {

// Boxes of so many columns and rows of a matrix whose columns are contiguous, in rows of shared memory that are
// `row_bytes` apart, 32, 64 or 128, between which pieces of 16 bytes change places. A box may be narrower than they
// are.
template <class Element>
CUresult describe(cute::TmaDescriptor& descriptor, void const* matrix, int64_t columns, int64_t rows, int64_t batch,
                  int64_t ld, int64_t batch_stride, uint32_t box_columns, uint32_t box_rows, uint32_t row_bytes) {
  constexpr uint64_t kSize = sizeof(Element);
  uint64_t const extents[] = {uint64_t(columns), uint64_t(rows), uint64_t(batch)},
                 strides[] = {ld * kSize, batch_stride * kSize};
  uint32_t const box[] = {box_columns, box_rows, 1}, steps[] = {1, 1, 1};
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      &descriptor, cute::TMA::to_CUtensorMapDataType<Element>(), 3, const_cast<void*>(matrix), extents, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
      : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                        : CU_TENSOR_MAP_SWIZZLE_32B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace jax_streamk::sm90
