// What a GPU, or a CPU's thread, can do: the constants of the cost model, which jax_streamk/machines/*.json hold.
#pragma once

namespace jax_streamk {

// X(name, meaning). Names end in their unit: us is microseconds, _sm is of one SM, a factor or a share has none.
#define JAX_STREAMK_GPU_CONSTANTS(X)                                                                              \
  X(launch_us, "t of a launch, its first loads and last stores included")                                         \
  X(relaunch_us, "t of each further kernel or memset of a call")                                                  \
  X(multicast_launch_us, "launch + t * columns / 128, the columns of a CTA's B tile that a cluster multicasts")   \
  X(first_line_us, "launch + t * CTAs that ask for the same 128-byte line at once")                               \
  X(dram_bytes_per_us, "bytes / rate: operands once, D once")                                                     \
  X(dram_bytes_per_us_sm, "what one SM draws at most: DRAM time * (1 + (dram rate / (SMs * rate))^5)^(1/5)")      \
  X(dram_cluster_share, "DRAM time of loads * (1 + share * (CTAs of a cluster - 1))")                             \
  X(dram_beyond_share, "DRAM time * (1 + share * rows / 64), the rows of A's tile that A does not have")          \
  X(gpc_bytes_per_us, "bytes / rate, from L2 to all GPCs: what SMs of one GPC load together counts once")         \
  X(drift_share, "share * (1 - 1 / tiles of a worker): of what a GPC could load together, loaded apart")          \
  X(load_bytes_per_us_sm, "bytes / rate, into one SM's shared memory")                                            \
  X(misaligned_load_factor, "loads * factor: rows off sectors (along K) or off lines (along M or N)")             \
  X(short_vector_us, "max(loads, t * sqrt(8 / bytes)) for 32 of K, by vectors below 16 bytes")                    \
  X(cluster_wait_us, "loads + t * K / 64: a stage waits until all CTAs of the cluster have read it")              \
  X(wgmma_flops_per_us_sm, "tensor cores of one SM at boost clock, 16-bit operands")                              \
  X(wgmma_flops_per_us, "all SMs together, by power; also of TF32, counted twice")                                \
  X(tf32_wgmma_flops_per_us_sm, "as wgmma_flops_per_us_sm, of TF32, counted twice")                               \
  X(wgmma_lost_columns, "2 * tile_m * (tile_n + columns) * K / rate")                                             \
  X(mma_flops_per_us_sm, "mma.sync of 16 bits: 2 * area * K / (rate * sqrt(min(area / 128^2, 1))); TF32 at half") \
  X(mma_f64_flops_per_us_sm, "the same of float64, whose tiles need 64^2")                                        \
  X(few_rows_flops_per_us_sm, "mma.sync of 16 bits in kernels for few rows; TF32 at half")                        \
  X(few_rows_bytes_per_us_sm, "bytes / rate of 16-bit operands, by kernels for few rows")                         \
  X(few_rows_iteration_us, "max(loads, t * tile_m / 64 * bytes / 2), an iteration of a kernel for few rows")      \
  X(cluster_peer_us, "t * CTAs * columns / 16: CTAs of a cluster add up one tile of 4-byte sums")                 \
  X(epilogue_us, "t * area / 128^2")                                                                              \
  X(shifted_epilogue_factor, "epilogue * factor, of kernels for few rows whose B's rows start anywhere")          \
  X(fused_us, "epilogue + t * area / 128^2, with a bias, a residual or an activation")                            \
  X(fix_up_us, "t for each tile that is shared: fences and a ticket")                                             \
  X(partial_bytes_per_us_sm, "bytes / rate of partial tiles that one SM writes or reads")                         \
  X(reduction_us, "t of the kernel that adds slices, besides their bytes by DRAM's rate")

// Of one thread; only ratios matter.
#define JAX_STREAMK_HOST_CONSTANTS(X)                                     \
  X(host_wake_us, "t once, where other threads have work")                \
  X(host_multiply_add_us, "t * rows * columns * K of a tile")             \
  X(host_pack_us, "t * (rows + columns) * K: packing operands of a tile") \
  X(host_piece_us, "t of a piece of a tile, however short along K")       \
  X(host_row_us, "t * rows of a piece")                                   \
  X(host_result_us, "t * elements of a piece")                            \
  X(host_partial_us, "t * elements of a partial tile, stored or added once")

struct Machine {
#define JAX_STREAMK_FIELD(name, meaning) double name = 0;
  JAX_STREAMK_GPU_CONSTANTS(JAX_STREAMK_FIELD)
  JAX_STREAMK_HOST_CONSTANTS(JAX_STREAMK_FIELD)
#undef JAX_STREAMK_FIELD
  double l2_bytes = 0;  // from the topology: operands that fit are read from DRAM once
};

}  // namespace jax_streamk
