// Every field that a custom call carries, stated once: FFI attributes, their decoder, the Python classes and their
// bindings follow from these lists.
//
// FIELD(name, place): the name in attributes and in Python, and the member of the struct (gemm.h), which gives the
// type. REQUIRED fields must be given; OPTIONAL ones have the struct's default. Python takes them in this order.
#pragma once

// ROLE(enumerator of Role, member of Buffers, name in messages). Calls take operands, and their results, in this order.
#define JAX_STREAMK_ROLES(ROLE)                      \
  ROLE(kA, a, "A")                                   \
  ROLE(kB, b, "B")                                   \
  ROLE(kD, d, "D")                                   \
  ROLE(kUp, up, "the second B")                      \
  ROLE(kThird, third, "the third B")                 \
  ROLE(kBias, bias, "the bias")                      \
  ROLE(kUpBias, up_bias, "the second bias")          \
  ROLE(kResidual, residual, "the residual")          \
  ROLE(kGroupSizes, group_sizes, "group_sizes")      \
  ROLE(kIndices, indices, "lhs_indices")             \
  ROLE(kScale, scale, "the scale")                   \
  ROLE(kZero, zero, "the zero point")                \
  ROLE(kOffset, offset, "the offset")                \
  ROLE(kUpScale, scale_of_up, "the second scale")    \
  ROLE(kUpZero, zero_of_up, "the second zero point") \
  ROLE(kUpOffset, offset_of_up, "the second offset") \
  ROLE(kScaleOfA, scale_of_a, "the scale of A")

// GemmProblem
#define JAX_STREAMK_PROBLEM_FIELDS(REQUIRED, OPTIONAL)    \
  REQUIRED(batch, batch)                                  \
  REQUIRED(m, m)                                          \
  REQUIRED(n, n)                                          \
  REQUIRED(k, k)                                          \
  REQUIRED(type_a, a.format.type)                         \
  REQUIRED(type_b, b.format.type)                         \
  REQUIRED(type_d, d.format.type)                         \
  REQUIRED(math, math)                                    \
  REQUIRED(major_a, a.major)                              \
  REQUIRED(major_b, b.major)                              \
  REQUIRED(lda, a.ld)                                     \
  REQUIRED(ldb, b.ld)                                     \
  REQUIRED(ldd, d.ld)                                     \
  REQUIRED(batch_stride_a, a.batch_stride)                \
  REQUIRED(batch_stride_b, b.batch_stride)                \
  REQUIRED(batch_stride_d, d.batch_stride)                \
  OPTIONAL(activation, epilogue.activation)               \
  OPTIONAL(has_bias, epilogue.has_bias)                   \
  OPTIONAL(has_residual, epilogue.has_residual)           \
  OPTIONAL(alpha, epilogue.alpha)                         \
  OPTIONAL(beta, epilogue.beta)                           \
  OPTIONAL(batch_stride_bias, epilogue.batch_stride_bias) \
  OPTIONAL(gated, epilogue.gated)                         \
  OPTIONAL(up_offset, epilogue.up_offset)                 \
  OPTIONAL(inner_batch, inner_batch)                      \
  OPTIONAL(inner_stride_a, a.inner_stride)                \
  OPTIONAL(inner_stride_b, b.inner_stride)                \
  OPTIONAL(inner_stride_d, d.inner_stride)                \
  OPTIONAL(ragged, ragged)                                \
  OPTIONAL(leading_rows, leading_rows)                    \
  OPTIONAL(gathered_rows, gathered_rows)                  \
  OPTIONAL(second_column, second_column)                  \
  OPTIONAL(third_column, third_column)                    \
  OPTIONAL(scale_rows, b.scales.rows)                     \
  OPTIONAL(scale_columns, b.scales.columns)               \
  OPTIONAL(scale_type, b.scales.scale)                    \
  OPTIONAL(has_zero, b.scales.has_zero)                   \
  OPTIONAL(zero_type, b.scales.zero)                      \
  OPTIONAL(has_offset, b.scales.has_offset)               \
  OPTIONAL(offset_type, b.scales.offset)                  \
  OPTIONAL(scale_rows_of_a, a.scales.rows)                \
  OPTIONAL(scale_columns_of_a, a.scales.columns)          \
  OPTIONAL(scale_type_of_a, a.scales.scale)               \
  OPTIONAL(invariant, invariant)

// Schedule
#define JAX_STREAMK_SCHEDULE_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(schedule, kind)                              \
  OPTIONAL(splits, splits)                              \
  OPTIONAL(reduction, reduction)                        \
  OPTIONAL(max_sms, max_sms)

// LaunchPolicy
#define JAX_STREAMK_POLICY_FIELDS(REQUIRED, OPTIONAL) \
  OPTIONAL(raster, raster)                            \
  OPTIONAL(swizzle, swizzle)                          \
  OPTIONAL(evict_first_a, evict_first_a)              \
  OPTIONAL(evict_first_b, evict_first_b)              \
  OPTIONAL(held_back, held_back)                      \
  OPTIONAL(held_back_last, held_back_last)            \
  OPTIONAL(idle_clusters, idle_clusters)              \
  OPTIONAL(cluster_order, cluster_order)              \
  OPTIONAL(extend_a, extend_a)                        \
  OPTIONAL(extend_b, extend_b)

// Device. The optional field is for the planner only.
#define JAX_STREAMK_DEVICE_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(arch, arch)                                \
  REQUIRED(sms, sms)                                  \
  OPTIONAL(under_way, under_way)
#define JAX_STREAMK_NOT_CARRIED(name, place)

// All that a call carries, except the kernel's name and the size of its workspace.
#define JAX_STREAMK_CALL_FIELDS(OF_PROBLEM, OF_SCHEDULE, OF_POLICY, OF_DEVICE) \
  JAX_STREAMK_PROBLEM_FIELDS(OF_PROBLEM, OF_PROBLEM)                           \
  JAX_STREAMK_SCHEDULE_FIELDS(OF_SCHEDULE, OF_SCHEDULE)                        \
  JAX_STREAMK_POLICY_FIELDS(OF_POLICY, OF_POLICY)                              \
  JAX_STREAMK_DEVICE_FIELDS(OF_DEVICE, JAX_STREAMK_NOT_CARRIED)

// KernelInfo
#define JAX_STREAMK_KERNEL_FIELDS(REQUIRED, OPTIONAL) \
  REQUIRED(name, name)                                \
  REQUIRED(family, family)                            \
  REQUIRED(type_a, a.format.type)                     \
  REQUIRED(type_b, b.format.type)                     \
  REQUIRED(type_d, d.format.type)                     \
  REQUIRED(math, math)                                \
  REQUIRED(major_a, a.major)                          \
  REQUIRED(major_b, b.major)                          \
  REQUIRED(tile_m, tile_m)                            \
  REQUIRED(tile_n, tile_n)                            \
  REQUIRED(tile_k, tile_k)                            \
  REQUIRED(cluster_m, cluster_m)                      \
  REQUIRED(cluster_n, cluster_n)                      \
  REQUIRED(warp_schedule, warp_schedule)              \
  REQUIRED(swap_ab, swap_ab)                          \
  REQUIRED(split_k_reductions, split_k_reductions)    \
  REQUIRED(stream_k_reductions, stream_k_reductions)  \
  REQUIRED(align_a, a.align)                          \
  REQUIRED(align_b, b.align)                          \
  REQUIRED(align_d, d.align)                          \
  OPTIONAL(stages, stages)                            \
  OPTIONAL(threads, threads)                          \
  OPTIONAL(shared_memory, shared_memory)              \
  OPTIONAL(promotion_k, promotion_k)                  \
  OPTIONAL(gated, gated)                              \
  OPTIONAL(ragged, ragged)                            \
  OPTIONAL(gathers, gathers)                          \
  OPTIONAL(joined, joined)                            \
  OPTIONAL(scaled, scaled)                            \
  OPTIONAL(scales_sums, scales_sums)
