// Included before a family's header in a build with JAX_STREAMK_RECORD.
#pragma once

#include "cutlass_kernels/core/record.h"

namespace jax_streamk {
namespace {

__device__ WorkRecords work_records;

[[maybe_unused]] bool const records_can_be_set = [] {
  recording_units().push_back([](WorkRecords const& to) { return cudaMemcpyToSymbol(work_records, &to, sizeof(to)); });
  return true;
}();

// Called by one thread of a CTA when it begins a unit of work. The units of a CTA are recorded in its order.
__device__ void record_work(int32_t m, int32_t n, int32_t batch, int32_t k_begin, int32_t k_end) {
  if (work_records.capacity == 0) return;
  uint32_t const i = atomicAdd(work_records.count, 1u);
  if (i < work_records.capacity) work_records.records[i] = {blockIdx.x, blockIdx.y, m, n, batch, k_begin, k_end};
}

}  // namespace
}  // namespace jax_streamk
