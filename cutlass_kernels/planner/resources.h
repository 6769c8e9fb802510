// What a problem on a kernel asks of each resource of a GPU, before any schedule: a function per resource. Times are in
// microseconds.
#pragma once

#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/planner/machine.h"
#include "cutlass_kernels/planner/share.h"
#include "cutlass_kernels/planner/wave.h"

namespace jax_streamk {

// Several things at once take (t1^p + t2^p + ...)^(1/p): the slowest hides the others, the better the larger p is.
template <typename... Times>
double overlapped(Machine const& machine, Times... times) {
  int32_t const p = static_cast<int32_t>(machine.overlap_power);
  auto const power = [p](double x) {
    double y = x;
    for (int32_t i = 1; i < p; ++i) y *= x;
    return y;
  };
  double const sum = (power(times) + ...);
  return p == 3 ? std::cbrt(sum) : std::pow(sum, 1.0 / p);
}

// A kernel, the problem that it runs, and both as the GPU sees them.
struct Launch {
  KernelInfo const& kernel;
  KernelTraits traits;
  GemmProblem const& problem;
  Machine const& machine;
  Tiling tiling;
  Grid grid;
  double sms = 0;                // of the device that share the work
  double rows = 0, columns = 0;  // extents that the kernel's own tile_m and tile_n run along
  int32_t ctas = 1;              // of a cluster
  Repack repacked;
  TileOperand a = {}, b = {};

  Launch(KernelInfo const&, GemmProblem const&, int32_t width, Machine const&);

  double area() const { return kernel.tile_m * kernel.tile_n; }
  // The operand that the kernel's own tile_m runs along.
  TileOperand const& own_a() const { return kernel.swap_ab ? b : a; }
  TileOperand const& own_b() const { return kernel.swap_ab ? a : b; }
};

// Of a MAC iteration: bytes that a CTA asks for, for a row of A's tile and for a column of B's.
struct Panels {
  double a = 0, b = 0;
  bool misaligned = false;  // rows that do not start on 128-byte lines
};

Panels panels_of(Launch const&);

// Of a MAC iteration of a CTA: its tensor cores, and for each busy cluster what power allows.
double tensor_core_us(Launch const&);
double sustained_us(Launch const&);
// ... its loads into shared memory, and what it waits for beside them.
double shared_memory_us(Launch const&, Panels const&);
double waiting_us(Launch const&);
// ... bytes that a cluster loads from L2, a multicast counted once.
double l2_bytes(Launch const&, Panels const&);

// Of a call: every byte that must move, once; what Stream-K's workers, at different k, read again of operands that L2
// does not hold; and the time in which one cluster could draw as much as DRAM gives in one microsecond.
double dram_us(Launch const&);
double dram_again_us(Launch const&);
double dram_draw_us(Launch const&);
double launch_us(Launch const&);
double repack_us(Launch const&);

// Of a tile: its epilogue, what is fused into it, its partial sums written or read.
double epilogue_us(Launch const&);
double fused_us(Launch const&);
double partial_us(Launch const&);
// The fix-up of `tiles` of a worker's tiles, each shared by `peers`.
double fix_up_us(Launch const&, double tiles, double peers);
// Of the kernel that adds slices, and writes D.
double reduction_us(Launch const&, double slices);

}  // namespace jax_streamk
