// Every field of what a custom call carries, stated once: FFI attributes, their decoder, the Python classes and their
// bindings follow from these lists.
//
// FIELD(name, place): the name in attributes and in Python, and the member of the struct (gemm.h), which gives the
// type. REQUIRED fields must be given; OPTIONAL ones have the struct's default. Python takes them in this order.
#pragma once

// GemmProblem
#define JAX_STREAMK_PROBLEM_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(batch, batch)                               \
  REQUIRED(m, m)                                       \
  REQUIRED(n, n)                                       \
  REQUIRED(k, k)                                       \
  REQUIRED(type_a, type_a)                             \
  REQUIRED(type_b, type_b)                             \
  REQUIRED(type_d, type_d)                             \
  REQUIRED(math, math)                                 \
  REQUIRED(major_a, major_a)                           \
  REQUIRED(major_b, major_b)                           \
  REQUIRED(lda, lda)                                   \
  REQUIRED(ldb, ldb)                                   \
  REQUIRED(ldd, ldd)                                   \
  REQUIRED(batch_stride_a, batch_stride_a)             \
  REQUIRED(batch_stride_b, batch_stride_b)             \
  REQUIRED(batch_stride_d, batch_stride_d)             \
  OPTIONAL(activation, epilogue.activation)            \
  OPTIONAL(has_bias, epilogue.has_bias)                \
  OPTIONAL(has_residual, epilogue.has_residual)        \
  OPTIONAL(alpha, epilogue.alpha)                      \
  OPTIONAL(beta, epilogue.beta)                        \
  OPTIONAL(batch_stride_bias, epilogue.batch_stride_bias)

// Schedule
#define JAX_STREAMK_SCHEDULE_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(schedule, kind)                              \
  OPTIONAL(splits, splits)                              \
  OPTIONAL(reduction, reduction)                        \
  OPTIONAL(max_sms, max_sms)                            \
  OPTIONAL(raster, raster)                              \
  OPTIONAL(swizzle, swizzle)

// Device
#define JAX_STREAMK_DEVICE_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(arch, arch)                                \
  REQUIRED(sms, sms)                                  \
  OPTIONAL(under_way, under_way)

// KernelInfo
#define JAX_STREAMK_KERNEL_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(name, name)                                \
  REQUIRED(family, family)                            \
  REQUIRED(type_a, type_a)                            \
  REQUIRED(type_b, type_b)                            \
  REQUIRED(type_d, type_d)                            \
  REQUIRED(math, math)                                \
  REQUIRED(major_a, major_a)                          \
  REQUIRED(major_b, major_b)                          \
  REQUIRED(tile_m, tile_m)                            \
  REQUIRED(tile_n, tile_n)                            \
  REQUIRED(tile_k, tile_k)                            \
  REQUIRED(cluster_m, cluster_m)                      \
  REQUIRED(cluster_n, cluster_n)                      \
  REQUIRED(warp_schedule, warp_schedule)              \
  REQUIRED(swap_ab, swap_ab)                          \
  REQUIRED(split_k_reductions, split_k_reductions)    \
  REQUIRED(stream_k_reductions, stream_k_reductions)  \
  REQUIRED(align_a, align_a)                          \
  REQUIRED(align_b, align_b)                          \
  REQUIRED(align_d, align_d)                          \
  OPTIONAL(stages, stages)                            \
  OPTIONAL(threads, threads)                          \
  OPTIONAL(shared_memory, shared_memory)              \
  OPTIONAL(promotion_k, promotion_k)
