// What a problem on a kernel needs of each resource of a GPU, before any schedule. Times are in microseconds.
#pragma once

#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/planner/machine.h"
#include "cutlass_kernels/planner/share.h"
#include "cutlass_kernels/planner/wave.h"

namespace jax_streamk {

// The time of things that overlap: (t1^p + t2^p + ...)^(1/p). The larger p, the better the slowest hides the others.
template <typename... Times>
double overlapped(Machine const& machine, Times... times) {
  int32_t const p = static_cast<int32_t>(machine.overlap_power);
  auto const power = [p](double x) {
    double y = x;
    for (int32_t i = 1; i < p; ++i) y *= x;
    return y;
  };
  double const sum = (power(times) + ...);
  // pow() would take twice as long.
  return p == 3 ? std::cbrt(sum) : std::pow(sum, 1.0 / p);
}

// A problem on a kernel, as the cost model sees it.
struct Workload {
  KernelInfo const& kernel;
  KernelTraits traits;
  GemmProblem problem;  // of a gated one, its product
  Machine const& machine;
  Tiling tiling;
  Grid grid;
  double sms = 0;                // that share the work
  double rows = 0, columns = 0;  // of D along the kernel's own tile_m and tile_n
  int32_t ctas = 1;              // of a cluster
  int64_t gathered_rows = 0;     // rows of A that are read; 0: all, as they lie
  Repack repacked;
  TileOperand a = {}, b = {};

  Workload(KernelInfo const&, GemmProblem const&, int32_t width, Machine const&);

  double area() const { return kernel.tile_m * kernel.tile_n; }
  // Of the kernel's own GEMM: with swap_ab its A is B.
  TileOperand const& own_a() const { return kernel.swap_ab ? b : a; }
  TileOperand const& own_b() const { return kernel.swap_ab ? a : b; }
};

// Bytes that a CTA requests per MAC iteration, for a row of A's tile and for a column of B's.
struct Panels {
  double a = 0, b = 0;
  bool misaligned = false;  // rows that do not start on 128-byte lines
};

Panels panels_of(Workload const&);

// Per MAC iteration of a CTA: tensor cores at boost clock, and, times the busy clusters, at the power limit.
double tensor_core_us(Workload const&);
double sustained_us(Workload const&);
// Per MAC iteration: loads into shared memory, and the latency of short vectors.
double shared_memory_us(Workload const&, Panels const&);
// What threads that transpose B move through shared memory, with all else that does: TMA writes A and B, threads read
// A, read and write B, and every wgmma of 64 rows reads all columns of B.
double transposing_us(Workload const&);
double waiting_us(Workload const&);
// Bytes that a cluster loads from L2 per MAC iteration; a multicast counts once.
double l2_bytes(Workload const&, Panels const&);

// Per call: every byte once; what Stream-K's workers, at different k, read again if L2 does not hold it; and DRAM's
// rate over that of one cluster.
double dram_us(Workload const&);
double dram_again_us(Workload const&);
double dram_draw_us(Workload const&);
double launch_us(Workload const&);
double repack_us(Workload const&);

// Per tile: the epilogue, what is fused into it, partial sums written or read.
double epilogue_us(Workload const&);
double fused_us(Workload const&);
double partial_us(Workload const&);
// The fix-up of a worker's `tiles`, each shared by `peers`.
double fix_up_us(Workload const&, double tiles, double peers);
// The kernel that adds slices and writes D.
double reduction_us(Workload const&, double slices);

}  // namespace jax_streamk
