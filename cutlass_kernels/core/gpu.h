// What a compute capability says of an SM: CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability".
#pragma once

#include "cutlass_kernels/core/gemm.h"

namespace jax_streamk {

inline constexpr int64_t kReservedSharedMemory = 1024;  // bytes that CUDA takes for each CTA

inline bool has_small_sms(Device const& device) { return device.arch == 86 || device.arch == 89 || device.arch >= 120; }
inline int64_t shared_memory_per_sm(Device const& device) {
  return (has_small_sms(device) ? 100 : device.arch < 90 ? 164 : 228) * int64_t{1024};
}
inline int64_t threads_per_sm(Device const& device) { return has_small_sms(device) ? 1536 : 2048; }

}  // namespace jax_streamk
