#include "cutlass_kernels/planner/resources.h"

#include <algorithm>
#include <numeric>

#include "cutlass_kernels/launch/clusters.h"
#include "cutlass_kernels/scaled/scales.h"

namespace jax_streamk {
namespace {

// Bytes of an L2 line, of a sector, of the widest vector that a thread loads.
constexpr int32_t kLine = 128, kSector = 32, kVector = 16, kWord = 4;
// Smaller tiles than these keep mma.sync less busy.
constexpr double kSquare = 128 * 128, kSquareOfF64 = 64 * 64;

Tiling tiling_of(KernelInfo const& kernel, GemmProblem const& p) {
  Tiling tiling{kernel.tile_m * kernel.cluster_m, kernel.tile_n * kernel.cluster_n, kernel.cluster_m, kernel.cluster_n};
  if (kernel.swap_ab) std::swap(tiling.rows, tiling.columns), std::swap(tiling.ctas_m, tiling.ctas_n);
  tiling.tiles_m = (p.m + tiling.rows - 1) / tiling.rows;
  tiling.tiles_n = (p.n + tiling.columns - 1) / tiling.columns;
  return tiling;
}

bool misses(TileOperand const& x, int64_t bytes) { return x.ld * static_cast<int64_t>(x.element_bytes) % bytes != 0; }

// Tiles that request parts of the same line.
double parts_of(TileOperand const& x) {
  return std::max(std::min<double>(x.extent, kLine / x.element_bytes) / x.tile, 1.0);
}

// Bytes requested per MAC iteration for a row of A's tile or a column of B's.
double panel_of(Workload const& l, TileOperand const& x) {
  double const factor = l.machine.misaligned_load_factor;
  // A request for a shorter vector costs as much as one for 16 bytes.
  double const panel = l.kernel.tile_k * x.element_bytes / std::min(x.vector / kVector, 1.0);
  double const more = misses(x, x.along_k ? kSector : kLine) ? factor - 1 : 0;
  if (x.along_k || !l.traits.family.loads_by_tma()) return panel * (1 + more);
  // TMA loads boxes with rows of at most a line. A partial box costs as much as a whole one, a partial line as a line.
  double const bytes = x.tile * x.element_bytes, boxes = ceil_div(bytes, x.row);
  return panel * parts_of(x) * boxes * (x.row + kLine * more) / bytes;
}

// Bytes of a tile's rows and columns.
double loaded_bytes(Workload const& l, Panels const& panels, double rows, double columns) {
  return l.kernel.swap_ab ? columns * panels.a + rows * panels.b : rows * panels.a + columns * panels.b;
}

// CTAs of one SM take turns at its tensor cores and stores.
double turns_of(Workload const& l) {
  return std::clamp(std::ceil(l.grid.tiles / l.sms), 1.0, static_cast<double>(l.traits.ctas_per_sm));
}

// Whether scaled/streamed.cuh multiplies: few rows by a row-major B whose scales are factors of sums, and one per
// column.
bool streams_scales(KernelInfo const& kernel, KernelTraits const& traits, GemmProblem const& p) {
  Scales const& scales = p.b.scales;
  if (!kernel.scaled || traits.family.math_unit != MathUnit::kMmaFewRows) return false;
  Type const type = kernel.b.format.type;
  bool const is_integer = type == Type::kS4 || type == Type::kU4 || type == Type::kS8 || type == Type::kU8;
  return kernel.b.major == Major::kRow && !scales.has_zero && scales.columns == 1 &&
         !scaled::rounds_numbers(scales, p.k) &&
         (scales.scale == p.a.format.type || scales.scale == (is_integer ? Type::kF32 : Type::kE8M0));
}

double result_bytes(Workload const& l) {
  GemmProblem const& p = l.problem;
  return static_cast<double>(p.batch) * p.m * p.n * size_of(accumulator_of(p.a.format));
}

}  // namespace

Workload::Workload(KernelInfo const& kernel, GemmProblem const& p, int32_t width, Machine const& machine)
    : kernel(kernel),
      traits(KernelTraits::of(kernel)),
      problem(dense(p, p.ragged == Ragged::kK ? kernel.tile_k
                       : kernel.swap_ab       ? kernel.tile_n
                                              : kernel.tile_m)),
      machine(machine),
      tiling(tiling_of(kernel, problem)),
      sms(width),
      rows(kernel.swap_ab ? problem.n : problem.m),
      columns(kernel.swap_ab ? problem.m : problem.n),
      ctas(kernel.cluster_m * kernel.cluster_n),
      gathered_rows(std::min(p.gathered_rows, p.m)),
      repacked(repack_of(kernel, problem)) {
  grid.wave_tiles = static_cast<double>(tiling.tiles_m) * tiling.tiles_n;
  grid.tiles = problem.batch * grid.wave_tiles;
  grid.k_tiles = ceil_div(repacked.problem.k, kernel.tile_k);
  grid.workers = active_clusters(width * traits.ctas_per_sm, ctas);
  if (streams_scales(kernel, traits, p)) grid.in_clusters = 4 * active_clusters(width, 4);
  // If sizes of groups fall as 1 / rank, the first has this share of K.
  if (p.ragged == Ragged::kK) {
    grid.longest = ceil_div(p.k / (1 + std::log(p.batch)), kernel.tile_k);
    grid.cuts_longest = cuts_long_tiles(kernel);
  }
  // `is_b`: of the kernel's own GEMM.
  auto const operand = [&](Layout const& layout, KernelOperand const& own, bool along_k, int64_t extent, bool is_b) {
    int32_t const tile = is_b ? kernel.tile_n : kernel.tile_m;
    int32_t const row = std::gcd((is_b ? columns_by_tma(tile) : tile) * layout.format.bits() / 8, kLine);
    double const size = layout.format.bits() / 8.0;
    return TileOperand{size, layout.ld, along_k, extent, tile, row, own.align * size};
  };
  Layout const &layout_a = repacked.problem.a, &layout_b = repacked.problem.b;
  a = operand(layout_a, kernel.a, kernel.a.major == Major::kRow, problem.m, kernel.swap_ab);
  b = operand(layout_b, kernel.b, kernel.b.major == Major::kColumn, problem.n, !kernel.swap_ab);
  // Rows that start anywhere are shifted after loads of whole vectors.
  if (traits.shifted_b) b.vector = kVector;
  // Such rows are short: several share a cache line.
  if (traits.words_of_b) b.vector = kWord, b.ld = kLine;
}

Panels panels_of(Workload const& l) {
  return {panel_of(l, l.a), panel_of(l, l.b), misses(l.a, kLine) || misses(l.b, kLine)};
}

// Makes 16-bit numbers of a tile's numbers with scales. `cycles`: of one of an SM's 128 lanes for an integer of four
// bits, a third more for other types; in a cycle an SM's tensor cores do 4096 16-bit FLOPs.
double decoding_us(Workload const& l, double cycles) {
  if (!l.kernel.scaled) return 0;
  Type const type = l.kernel.b.format.type;
  if (type != Type::kS4 && type != Type::kU4) cycles *= 4 / 3.0;
  return cycles / 128 * 4096 * l.kernel.tile_m * l.kernel.tile_k / l.machine.wgmma_flops_per_us_sm;
}

// Multiplies the sums of a k-tile by scales that change along K, in cycles as of decoding_us(): a scale for each row
// and column of 128 x 16 to 128 x 128, or, of kernels that do not swap operands, often one for all columns.
double scaling_us(Workload const& l) {
  Scales const &a = l.problem.a.scales, &b = l.problem.b.scales;
  bool const change = (a.any() && a.columns < l.problem.k) || (b.any() && b.rows < l.problem.k);
  if (!l.kernel.scales_sums || !change) return 0;
  double const cycles = 85 + (l.kernel.swap_ab ? 5 : 2) * l.kernel.tile_n;
  return cycles * 4096 / l.machine.wgmma_flops_per_us_sm;
}

// Of a wgmma product, in those of 16 bits.
double times_half(Workload const& l) { return l.problem.a.format.bits() / 16.0; }

double tensor_core_us(Workload const& l) {
  Machine const& machine = l.machine;
  Type const type = l.problem.a.format.type;
  double const flops = 2 * l.area() * l.kernel.tile_k;
  double const products = type == Type::kF32 && l.problem.math == Math::kTF32x3 ? 3 : 1;
  double us;
  if (l.traits.family.math_unit == MathUnit::kWgmma) {
    double const lost = 2 * l.kernel.tile_m * machine.wgmma_lost_columns * l.kernel.tile_k;
    us = times_half(l) * (flops + lost) / machine.wgmma_flops_per_us_sm;  // three TF32 have three times the iterations
    us += scaling_us(l);
    // One warpgroup decodes. Half of the products' time is hidden: both wait for shared memory.
    if (l.kernel.scaled) us = us / 2 + decoding_us(l, 10);
  } else if (type == Type::kF64) {
    us = flops / (machine.mma_f64_flops_per_us_sm * std::sqrt(std::min(l.area() / kSquareOfF64, 1.0)));
  } else if (l.traits.family.math_unit == MathUnit::kMmaFewRows) {
    // Streamed, most of it is hidden behind the products. Those of a float32 result are each promoted.
    bool const is_s4 = l.kernel.b.format.type == Type::kS4 || l.kernel.b.format.type == Type::kU4;
    double const streamed = (is_s4 ? 1.25 : 3) + (l.kernel.d.format.type == Type::kF32 ? 1 : 0),
                 cycles = l.grid.in_clusters > 0 ? streamed : 6;
    us = products * (type == Type::kF32 ? 2 : 1) * flops / machine.few_rows_flops_per_us_sm + decoding_us(l, cycles);
  } else {
    // mma.sync reaches half of wgmma's rate, and a fifth of it for TF32, whose fragments are loaded by words.
    us = products * (type == Type::kF32 ? 2.4 : 1) * flops /
         (machine.wgmma_flops_per_us_sm / 2 * std::sqrt(std::min(l.area() / kSquare, 1.0)));
  }
  return us * turns_of(l);
}

double sustained_us(Workload const& l) {
  if (l.traits.family.math_unit != MathUnit::kWgmma) return 0;
  return times_half(l) * 2 * l.area() * l.kernel.tile_k * l.ctas / l.machine.wgmma_flops_per_us;
}

double shared_memory_us(Workload const& l, Panels const& panels) {
  Machine const& machine = l.machine;
  bool const by_tma = l.traits.family.loads_by_tma();
  auto const loaded = [&](TileOperand const& x, double tile, double extent) {
    return by_tma && !x.along_k ? tile : std::min(tile, extent);
  };
  double const rows = loaded(l.own_a(), l.kernel.tile_m, l.rows),
               columns = loaded(l.own_b(), l.kernel.tile_n, l.columns);
  double const bytes = loaded_bytes(l, panels, rows, columns);
  if (l.traits.family.load_path == LoadPath::kStreaming) {
    bool const is_16bit = l.own_a().element_bytes == 2;
    // Warps request half lines of a long 16-bit operand that is contiguous along K.
    double const requests = l.own_a().along_k && is_16bit ? 2 : 1;
    double const words = l.traits.words_of_b ? columns * panels.b : 0, loaded = requests * (bytes - words) + words;
    if (l.problem.a.format == Type::kF32) return kSkinnyTF32 * loaded / machine.thread_bytes_per_us_sm;
    return loaded / (is_16bit ? machine.thread_bytes_per_us_sm : machine.load_bytes_per_us_sm);
  }
  double const wait = by_tma && l.ctas > 1 ? machine.cluster_wait_us * l.kernel.tile_k / 64 : 0;
  // Threads load gathered rows: in vectors, which pass the load/store units.
  double const gathered = l.gathered_rows > 0 ? (l.kernel.swap_ab ? columns : rows) * panels.a : 0;
  double const us = (bytes - gathered) / machine.load_bytes_per_us_sm + gathered / machine.thread_bytes_per_us_sm;
  return (us + wait) * l.traits.ctas_per_sm;
}

double transposing_us(Workload const& l) {
  if (!l.traits.transposes_b) return 0;
  double const a = l.kernel.tile_m * l.own_a().element_bytes, b = l.kernel.tile_n * l.own_b().element_bytes;
  // In the cycle of 4096 16-bit FLOPs, 128 bytes pass.
  return 32 * l.kernel.tile_k * (2 * a + (3 + l.kernel.tile_m / 64) * b) / l.machine.wgmma_flops_per_us_sm;
}

double waiting_us(Workload const& l) {
  double const vector = std::min(l.a.vector, l.b.vector);
  if (l.traits.family.load_path == LoadPath::kStreaming) return 0;
  return vector < kVector ? l.machine.short_vector_us * std::sqrt(8 / vector) * l.kernel.tile_k / 32 : 0;
}

double l2_bytes(Workload const& l, Panels const& panels) {
  double const rows = std::min<double>(l.kernel.tile_m, l.rows), columns = std::min<double>(l.kernel.tile_n, l.columns);
  return loaded_bytes(l, panels, rows / l.kernel.cluster_n, columns / l.kernel.cluster_m) * l.ctas;
}

double dram_us(Workload const& l) {
  GemmProblem const& p = l.problem;
  Machine const& machine = l.machine;
  auto const batches = [&](int64_t stride) { return static_cast<double>(stride != 0 ? p.batch : 1); };
  double const m = p.m, n = p.n, k = p.k, d = static_cast<double>(p.batch) * m * n;
  double const bias = p.epilogue.has_bias ? n * batches(p.epilogue.batch_stride_bias) : 0;
  double const rows_of_a = l.gathered_rows > 0 ? static_cast<double>(l.gathered_rows) : m * batches(p.a.batch_stride);
  double const read = rows_of_a * k * l.a.element_bytes + k * n * batches(p.b.batch_stride) * l.b.element_bytes +
                      ((p.epilogue.has_residual ? d : 0) + bias) * size_of(p.d.format);
  double us = (read + d * size_of(p.d.format)) / machine.dram_bytes_per_us;
  if (l.traits.family.loads_by_tma()) {
    // CTAs of a cluster wait for each other to load, not to store.
    double const stored = d * size_of(p.d.format) / machine.dram_bytes_per_us;
    us += machine.dram_cluster_share * (l.ctas - 1) * std::max(us - stored, 0.0);
  }
  // In a row that starts anywhere, a tile's columns take one sector more.
  return l.traits.shifted_b ? us * (1 + kSector / l.b.element_bytes / l.kernel.tile_m) : us;
}

double dram_again_us(Workload const& l) {
  if (!l.traits.family.loads_by_tma()) return 0;
  double const depth = static_cast<double>(l.problem.batch) * l.repacked.problem.k;
  double const a = l.problem.m * depth * l.a.element_bytes, b = l.problem.n * depth * l.b.element_bytes;
  double const once = a + b, more = (l.tiling.tiles_n - 1.0) * a + (l.tiling.tiles_m - 1.0) * b;
  return once > l.machine.l2_bytes ? more / l.machine.dram_bytes_per_us : 0;
}

double dram_draw_us(Workload const& l) {
  // With as many loads in flight: DRAM takes about twice as long to answer as L2.
  double const rate = l.machine.load_bytes_per_us_sm / 2 * l.ctas / l.traits.ctas_per_sm;
  return l.machine.dram_bytes_per_us / rate;
}

double launch_us(Workload const& l) {
  // The first stage is complete later if B is multicast. Multicasting A was measured to cost nothing.
  double const multicast = l.kernel.cluster_m > 1 ? l.kernel.tile_n / 128.0 : 0;
  return l.machine.launch_us + l.machine.multicast_launch_us * multicast;
}

double repack_us(Workload const& l) {
  // Read and written. Transposed TF32 operands were measured at half of DRAM's rate.
  double const transposed = l.kernel.math == Math::kTF32 ? l.repacked.bytes_rearranged : 0;
  return 2 * (l.repacked.bytes() + transposed) / l.machine.dram_bytes_per_us +
         l.machine.launch_us * l.repacked.launches;
}

double epilogue_us(Workload const& l) {
  double us = l.machine.epilogue_us * l.area() / kSquare * turns_of(l);
  // If 32 does not divide tile_n, the store's boxes of 64 columns overlap (sm90/store.h).
  bool const overlap = l.traits.family.loads_by_tma() && !l.kernel.swap_ab && l.kernel.tile_n > 64;
  if (overlap && l.kernel.tile_n % 32 != 0 && size_of(l.kernel.d.format) == 2)
    us *= ceil_div(l.kernel.tile_n, 64) * 64 / l.kernel.tile_n;
  return l.traits.shifted_b ? us * l.machine.shifted_epilogue_factor : us;
}

// In multiples of a plain epilogue: of bf16 products with K = 768 on an H200, in tiles of 128 x 128 to 128 x 256.
double activation_factor(Activation activation) {
  switch (activation) {
    case Activation::kNone: return 0;
    case Activation::kRelu: return 1;
    case Activation::kGeluTanh: return 2.5;
    case Activation::kGelu: return 3.5;
    default: return 2;
  }
}

// Many accumulators leave registers for little of the residual at a time, so that each load is waited for, and none
// for calls of activations; without swap_ab, nor for a bias that is loaded early (sm90/epilogue_operands.h).
double fused_us(Workload const& l) {
  EpilogueOps const& epilogue = l.problem.epilogue;
  if (epilogue.is_plain()) return 0;
  double const us = l.machine.epilogue_us * l.area() / kSquare * turns_of(l);
  if (!l.traits.family.loads_by_tma()) return us;
  double const warpgroups = l.kernel.warp_schedule == WarpSchedule::kCooperative ? l.kernel.threads / 128.0 - 1 : 1;
  double const accumulators = l.area() / (128 * warpgroups);
  bool const many = accumulators >= 160, late_bias = epilogue.has_bias && !l.kernel.swap_ab && accumulators > 128;
  double const residual = !epilogue.has_residual ? 0 : (many ? 11 : accumulators > 128 ? 6 : 2) / warpgroups;
  double const calls = !many ? 1 : l.kernel.swap_ab ? 1.5 : 2.2;
  return us * (0.5 + late_bias + calls * activation_factor(epilogue.activation) + residual);
}

double partial_us(Workload const& l) {
  return l.area() * size_of(accumulator_of(l.problem.a.format)) / l.machine.thread_bytes_per_us_sm;
}

double fix_up_us(Workload const& l, double tiles, double peers) {
  if (peers <= 1) return 0;
  if (l.traits.family.adds_in_cluster()) {
    double const sixteens = l.kernel.tile_n * size_of(accumulator_of(l.problem.a.format)) / 64.0;
    // The CTAs of a streamed B's tile add up a share each.
    return l.machine.cluster_peer_us * (l.grid.in_clusters > 0 ? 2 : peers) * sixteens;
  }
  return tiles * (l.machine.launch_us + (1 + peers) * partial_us(l));
}

double reduction_us(Workload const& l, double slices) {
  return l.machine.reduction_us + slices * result_bytes(l) / l.machine.dram_bytes_per_us;
}

}  // namespace jax_streamk
