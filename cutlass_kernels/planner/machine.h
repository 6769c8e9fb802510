// What a GPU, or a CPU's thread, can do: the constants of the planner, which jax_streamk/machines/*.json hold.
#pragma once

namespace jax_streamk {

// X(name, meaning). Names end in their unit: us is microseconds, _sm is of one SM, a factor or a share has none.
#define JAX_STREAMK_GPU_CONSTANTS(X)                                                                                  \
  X(launch_us, "t of a launch with its first loads and last stores; t of each further kernel, memset or shared tile") \
  X(multicast_launch_us, "launch + t * columns / 128, the columns of a CTA's B tile that a cluster multicasts")       \
  X(overlap_power, "things at once take (t1^p + t2^p + ...)^(1/p); an integer")                                       \
  X(dram_bytes_per_us, "bytes / rate: operands once, D once")                                                         \
  X(dram_cluster_share, "DRAM time of loads * (1 + share * (CTAs of a cluster - 1))")                                 \
  X(gpc_bytes_per_us, "bytes / rate, from L2 to all GPCs: what SMs of one GPC load together counts once")             \
  X(load_bytes_per_us_sm, "bytes / rate, into one SM's shared memory; from DRAM at half the rate")                    \
  X(misaligned_load_factor, "loads * factor: rows off sectors (along K) or off lines (along M or N)")                 \
  X(short_vector_us, "max(loads, t * sqrt(8 / bytes)) for 32 of K, by vectors below 16 bytes")                        \
  X(cluster_wait_us, "loads + t * K / 64: a stage waits until all CTAs of the cluster have read it")                  \
  X(wgmma_flops_per_us_sm, "tensor cores of one SM, 16-bit wgmma; mma.sync: rate / 2 * sqrt(min(area / 128^2, 1))")   \
  X(wgmma_flops_per_us, "all SMs together, limited by power")                                                         \
  X(wgmma_lost_columns, "2 * tile_m * (tile_n + columns) * K / rate; TF32 takes twice as long as 16 bits")            \
  X(mma_f64_flops_per_us_sm, "2 * area * K / (rate * sqrt(min(area / 64^2, 1))), of float64")                         \
  X(few_rows_flops_per_us_sm, "16-bit mma.sync in kernels for few rows; TF32 at half")                                \
  X(thread_bytes_per_us_sm, "bytes / rate that threads of one SM move: few rows' operands, gathered rows, partials")  \
  X(cluster_peer_us, "t * CTAs * columns / 16: CTAs of a cluster add up one tile of 4-byte sums")                     \
  X(epilogue_us, "t * area / 128^2, and a multiple of it with a bias, a residual or an activation")                   \
  X(shifted_epilogue_factor, "epilogue * factor, of kernels for few rows whose B's rows start anywhere")              \
  X(reduction_us, "t of the kernel that adds slices, besides their bytes by DRAM's rate")

// Of the launch policy: planner/launch_policy.cc. No table of plans tells of them, and `fit` leaves them as they are.
#define JAX_STREAMK_POLICY_CONSTANTS(X)                                                                               \
  X(under_way_bytes, "of an operand that streams past, loads in flight that the whole GPU's memory serves well")      \
  X(under_way_bytes_cta, "the same of one CTA: it gains nothing from more")                                           \
  X(under_way_share, "under_way_bytes * share, where CTAs share SMs")                                                 \
  X(held_back_columns, "at most that many rows (columns) of D: with more, multiplying takes as long as memory")       \
  X(evict_first_ratio, "bytes * ratio >= bytes of the other operand, to leave L2 first if read at once")              \
  X(evict_first_iterations, "at most that many MAC iterations: readers drift apart along K, and the last would miss") \
  X(evict_first_multiply_adds, "at most that many in whole 16-bit tiles: a long product gains nothing from the hint") \
  X(extend_rows, "at least that many missing rows along K: a descriptor beyond them saves time")                      \
  X(extend_share, "missing rows <= share * rows of both operands, since they are read")                               \
  X(spread_waves, "in one line of fewer waves than that, the longer workers are spread over GPCs")

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
  JAX_STREAMK_POLICY_CONSTANTS(JAX_STREAMK_FIELD)
  JAX_STREAMK_HOST_CONSTANTS(JAX_STREAMK_FIELD)
#undef JAX_STREAMK_FIELD
  // From the topology.
  double l2_bytes = 0;  // operands that fit are read from DRAM once
  double gpc_sms = 0;   // of most GPCs: what their CTAs load together L2 serves once, unless it is multicast
};

}  // namespace jax_streamk
