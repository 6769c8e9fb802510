// What CTAs worked on, in a build with JAX_STREAMK_RECORD: a debug build of a few kernels (recorded.txt).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace jax_streamk {

// A unit of work, at its begin: the CTA's index in the grid, its own output tile, and its k-tiles of the product's K.
struct WorkRecord {
  uint32_t cta_x, cta_y;
  int32_t m, n, batch;
  int32_t k_begin, k_end;
};

// Where CTAs append to; `count` exceeds `capacity` if there was no room.
struct WorkRecords {
  uint32_t* count = nullptr;
  WorkRecord* records = nullptr;
  uint32_t capacity = 0;
};

// Every translation unit with kernels has its own copy of WorkRecords in GPU memory, which a function here sets.
using SetWorkRecords = cudaError_t (*)(WorkRecords const&);
inline std::vector<SetWorkRecords>& recording_units() {
  static std::vector<SetWorkRecords> units;
  return units;
}

}  // namespace jax_streamk
