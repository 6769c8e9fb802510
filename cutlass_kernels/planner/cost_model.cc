#include "cutlass_kernels/planner/cost_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cutlass_kernels/passes/reduction.h"
#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/planner/clusters.h"

namespace jax_streamk {
namespace {

// Counts are doubles that hold integers: products of them overflow 64 bits for problems that no kernel runs.
double floor_div(double x, double y) { return std::floor(x / y); }
double ceil_div(double x, double y) { return std::ceil(x / y); }
double remainder_of(double x, double y) { return x - floor_div(x, y) * y; }

// So many CTAs of neighbouring workers sit on one GPC (clusters.h), and what they load together is fetched from L2
// once; but for multicasts, of which each is fetched (benchmarks/results/placement_h200_2026-11-25.md). Of CTAs without
// clusters two such groups stand for all. Slices of few tiles come in the same order one after another, so that the
// nearest neighbours tell: sixes and dozens of the first two dozen.
constexpr int32_t kNeighbours = 16, kStarts[] = {0, 40}, kNear[] = {6, 12}, kCounted = 24;

// How nearly the slowest of several overlapping things hides the others: the exponent of the norm that joins them,
// those of a MAC iteration and those of a call. In sm80 kernels and those of f64 who multiplies loads as well, and
// waits for memory at a call's start and end: the longer it takes, the less that matters.
double fifth_power(double x) { return x * x * x * x * x; }
constexpr auto overlapped = [](auto... times) { return std::pow((fifth_power(times) + ...), 1.0 / 5); };
double softly_overlapped(double work, double floor) {
  double const power = 1.6 + 0.4 * std::max(std::log2(floor / 8), 0.0);
  return std::pow(std::pow(work, power) + std::pow(floor, power), 1 / power);
}

// Bytes that the stages of a CTA alone on an SM hold, and those of one that shares it, of which one is being
// multiplied: the fewer these are, the less it draws from memory, whether or not loads leave some empty
// (launch_policy.h).
// But few rows by weights that come in rows of more than 128 bytes take less of memory's time where all tiles are at
// work at once, up to so many bytes of all their stages. Fitted to stages_h100_2026-11-25.csv.gz and
// plans_single_h100_2026-11-25.csv.gz of benchmarks/results.
constexpr double kUnderWay = 211 << 10, kStagesOfSingle = 52 << 10, kWideRows = 0.97, kAtOnce = 17.5e6;

// Of these stages one is multiplied and another not yet released: loads take longer the fewer are left, by so much of
// how six compare with them, to the fourth power. Choices in the tables of H200s and of H100s alike lose least by it
// (benchmarks/results/stages_h200_2026-11-26.md). They are reckoned from the bytes, for kernels that are only described
// do not know theirs. No kernel has fewer than three.
constexpr double kFewStages = 0.0645, kFewest = 3;

// How many microseconds later the CTAs of a cluster of eight are all there than those of smaller ones: choices in all
// measured tables lose least by it.
constexpr double kBeginTogether = 0.2;

// ... and how much longer they wait for one another with a stage: of tiles of 64 rows that counts.
constexpr double kManyHands = 1.5;

// CTAs that share an SM and wait for loads in turn: of the skinny family, and of those that load less than 16 bytes at
// a time.
constexpr double kResident = 2;

// ... Kernels of the latter, of 16 bits, take so many microseconds more than others to begin and end that load 8 bytes
// at a time, and in proportion less (benchmarks/results/small_rows_h200_2026-11-26.md).
constexpr double kNarrowBegin = 1.4;

// Splitting an element of B into two of TF32 takes skinny kernels as long as multiplying it by so many rows, once for
// 16 of A's, and so much longer for more (benchmarks/results/float32_high_h200_2026-11-22.md,
// float32_high_h200_2026-11-26.md and float32_few_h200_2026-11-26.md).
constexpr double kSplitRows = 22, kManyRows = 1.25;

// Neighbours drift apart with every piece of work, and with so much of K as with a piece.
constexpr double kDriftK = 16384;

// What several clusters load comes from memory again, up to kAgain of it, where they are at different k and the
// operands have more than kStay bytes, all of that from twice as many on: L2 holds 50 or 60 MB. Workers of Stream-K are
// at different k. Those of slices are where the last of several tiles in a line is cut short, and so runs ahead of the
// others: the further the less it has, with the root of what it lacks, and half of how far it can along kApartK of K.
// Fitted to choices in plans_alone_strong_h200_2026-11-24, plans_other_sets_h100_2026-11-26 and others, the root too.
constexpr double kAgain = 0.9, kApartK = 32768, kStay = 60e6;

// Rows of B that start anywhere: a warp's columns of one are in a sector more, of 16 columns, and B is nearly all that
// memory gives.
constexpr double kSectorColumns = 16;
// ... They take more requests, as if so much more were loaded. That, and so much longer for what comes after the loads,
// was fitted to choices and times in benchmarks/results/plans_misaligned_h200_2026-11-23.csv.gz.
constexpr double kRequests = 1.35, kAfterwards = 23;

// What asking for the last box of a tile's columns takes, of a whole box, however few columns it has.
constexpr double kLastBox = 0.6;

// A warpgroup of a pingpong kernel loses a fixed time with every 64 rows and MAC iteration, with those beyond 128 rows
// only so much of it. Choices in all measured tables are as good without it, but 1200 x 1712 x 1632 takes its fastest
// tile, of 192 rows (benchmarks/results/plans_panels_h200_2026-11-26.csv.gz).
constexpr double kFurtherRows = 0.7;

// How much longer one warpgroup takes for what is fused into a tile's epilogue than two that share the tile.
constexpr double kOneWarpgroup = 1.5;

// How much longer Stream-K takes, whose workers are at different k and share neither lines of L2 nor pages of memory.
// Measured (benchmarks/results/plans_orders_h200_2026-11-26.csv.gz and the tables of plans alone of 2026-11-25).
constexpr double kEverywhere = 1.05;

// How much more panels need that are twice as wide than what is counted tells. Of 15000 plans measured in several
// orders (plans_ of 2026-11-21 to 2026-11-23) this and no panels wider than four lose least to the best order, and of
// those since too.
constexpr double kWiderPanel = 0.05;

// Of what is fused into an epilogue of 128 x 128, the share that the pass which adds slices takes longer.
constexpr double kOfReduction = 0.4;

// Lower bounds of costs stay below them however both are rounded.
constexpr double kRounding = 1 - 1e-9;

// A CPU thread: microseconds a multiply-add, an element of an operand's tile packed, an element of a partial tile
// stored or added. Waking other threads costs a small product more than its arithmetic. Only ratios matter: of the
// speed of a tile of 256x512, one of 128x128 was measured to have about nine tenths and one of 64x64 three quarters.
constexpr double kHostMultiplyAdd = 1.2e-5, kHostPack = 1.7e-4, kHostPartial = 5e-4, kHostWake = 20;
// And of a piece of a tile, however short along K: itself, each of its rows and each of its results. Batches of 1000
// and 100000 products of up to 64x64x1 were measured, of float32 and bfloat16, whose pieces take half as long again.
constexpr double kHostPiece = 0.05, kHostRow = 6e-3, kHostResult = 2e-4;

// Bytes that any kernel must move: each operand read once, bias and residual too, D written once, which takes longer.
double bytes_of(GemmProblem const& p, double written) {
  auto const batches = [&](int64_t stride) { return static_cast<double>(stride != 0 ? p.batch : 1); };
  double const m = p.m, n = p.n, k = p.k, batch = p.batch;
  double const bias = p.epilogue.has_bias ? n * batches(p.epilogue.batch_stride_bias) : 0;
  return m * k * batches(p.a.batch_stride) * size_of(p.a.format) +
         k * n * batches(p.b.batch_stride) * size_of(p.b.format) +
         (((p.epilogue.has_residual ? 1 : 0) + written) * batch * m * n + bias) * size_of(p.d.format);
}

double mma_rate(Machine const& machine, Type type, Math math) {
  if (type == Type::kF64) return machine.mma_f64;
  if (type == Type::kF32) return math == Math::kTF32x3 ? machine.mma_tf32x3 : machine.mma_tf32;
  return machine.mma_16bit;
}

// Lines of tiles, along the raster and across it, among consecutive ones of a batch (TileOrder in decomposition.h).
class Lines {
 public:
  struct Count {
    int32_t along, across;
  };

  // `slow` lines along the raster, of `fast` tiles each.
  Lines(int32_t fast, int32_t slow, int32_t swizzle)
      : fast_(std::max(fast, 1)),
        swizzle_(std::clamp(swizzle, 1, std::max(slow, 1))),
        panel_(static_cast<int32_t>(std::min(int64_t{fast_} * swizzle_, int64_t{1} << 30))),
        whole_(slow / swizzle_),
        last_width_(slow % swizzle_),
        by_panel_(panel_),
        by_width_(swizzle_) {
    if (last_width_ > 0) by_last_width_ = Divisor(last_width_);
  }

  // How many there are among tiles [begin, end).
  Count among(int32_t begin, int32_t end) const {
    int32_t const first = by_panel_.divide(begin), last = by_panel_.divide(end - 1);
    int32_t const from = begin - first * panel_, to = end - 1 - last * panel_;
    bool const whole = last < whole_;
    int32_t const width = whole ? swizzle_ : last_width_;
    Divisor const& by_width = whole ? by_width_ : by_last_width_;
    if (first == last) return {std::min(end - begin, width), by_width.divide(to) - by_width.divide(from) + 1};
    // They leave a panel at its end, and enter the next at its begin.
    int32_t const along = std::min(panel_ - from, swizzle_) + (last - first - 1) * swizzle_ + std::min(to + 1, width);
    int32_t const across = last - first > 1 ? fast_ : fast_ - by_width_.divide(from) + by_width.divide(to) + 1;
    return {along, std::min(across, fast_)};
  }

 private:
  int32_t fast_, swizzle_, panel_, whole_,
      last_width_;  // tiles of a panel, panels that are whole, width of one that is not
  Divisor by_panel_, by_width_, by_last_width_;
};

bool streams(Schedule const& s) { return s.kind == ScheduleKind::kStreamK && s.max_sms != 1; }
double splits_of(Schedule const& s) { return s.kind == ScheduleKind::kSplitK ? s.splits : 1; }

}  // namespace

int32_t width_of(Schedule const& s, Device const& device) {
  return s.kind == ScheduleKind::kStreamK && s.max_sms > 1 ? std::min(s.max_sms, device.sms) : device.sms;
}

Estimator::Estimator(KernelInfo const& kernel, GemmProblem const& p, int32_t width, Machine const& machine)
    : kernel_(kernel), problem_(p), machine_(machine) {
  bool const swap = kernel.swap_ab;
  int32_t const ctas = kernel.cluster_m * kernel.cluster_n;
  tiling_ = {kernel.tile_m * kernel.cluster_m, kernel.tile_n * kernel.cluster_n, kernel.cluster_m, kernel.cluster_n};
  if (swap) std::swap(tiling_.rows, tiling_.columns), std::swap(tiling_.ctas_m, tiling_.ctas_n);
  tiling_.tiles_m = (p.m + tiling_.rows - 1) / tiling_.rows;
  tiling_.tiles_n = (p.n + tiling_.columns - 1) / tiling_.columns;
  partials_ = kernel.d.format != p.d.format;
  rows_ = swap ? p.n : p.m;
  columns_ = swap ? p.m : p.n;
  wave_tiles_ = static_cast<double>(tiling_.tiles_m) * tiling_.tiles_n;
  tiles_ = p.batch * wave_tiles_;
  Repack const repacked = repack_of(kernel, p);
  k_tiles_ = ceil_div(repacked.problem.k, kernel.tile_k);
  ctas_of_sm_ = kernel.warp_schedule == "single" ? kSingles : 1;
  workers_ = active_clusters(width * ctas_of_sm_, ctas);
  // Kernels whose results are sums have both slices and whole tiles: of few tiles slices.
  sliced_ = partials_ || (kernel.d.format == accumulator_of(p.a.format) && 2 * tiles_ <= workers_);
  if (kernel.family == Family::kHost) return;

  double const size = size_of(p.a.format), accumulator = size_of(accumulator_of(p.a.format));
  double const area = kernel.tile_m * kernel.tile_n, tile_k = kernel.tile_k;
  floor_ = bytes_of(p, machine.written) / machine.memory_rate;
  drawn_ = machine.memory_rate_sm * ctas;
  if (ctas_of_sm_ > 1) {
    double const stage = (kernel.tile_m + kernel.tile_n) * tile_k * size;
    double const stages = std::floor(kStagesOfSingle / stage);
    drawn_ *= std::max(stages - 1, 1.0) * stage / kUnderWay;
    bool const wide = swap && kernel.b.major == Major::kRow && kernel.tile_m * size > 128;
    if (wide && columns_ <= kernel.tile_n && tiles_ <= std::min(workers_, kAtOnce / (stages * stage)))
      floor_ *= kWideRows;
  }
  if (kernel.family == Family::kSm90) {
    // TMA takes its time for rows that a tile of A has beyond the problem; a cluster shares them. Measured of products
    // of 1 to 8 rows, whose tiles have few more. Many are read on (reach.cc), which was not measured of products of one
    // such tile.
    double const beyond = (swap ? kernel.tile_n : kernel.tile_m) - p.m,
                 sharers = swap ? kernel.cluster_m : kernel.cluster_n;
    floor_ *= 1 + machine.beyond * std::max(beyond, 0.0) / 64 / sharers;
    // CTAs of a cluster wait for one another to load, but store D when they are done.
    double const stored = machine.written * p.batch * p.m * p.n * size_of(p.d.format) / machine.memory_rate;
    floor_ += machine.gang * (ctas - 1) * std::max(floor_ - stored, 0.0);
  }
  // The more of B is multicast, the later the first stage is complete. Of A that costs nothing, as measured.
  double const multicast = kernel.cluster_m > 1 ? kernel.tile_n : 0;
  launch_ =
      kernel.family == Family::kSkinny ? machine.skinny_launch : machine.launch + machine.cluster * multicast / 128;
  if (ctas > 4) launch_ += kBeginTogether;
  epilogue_ = machine.epilogue * (area / (128 * 128));
  // Rows of D are stored in boxes of 64 columns that overlap, if no 32 divide those of the tile (store_columns in
  // sm90/kernel.cuh).
  if (kernel.family == Family::kSm90 && !swap && kernel.tile_n > 64 && kernel.tile_n % 32 != 0 &&
      size_of(kernel.d.format) == 2)
    epilogue_ *= ceil_div(kernel.tile_n, 64) * 64 / kernel.tile_n;
  if (kernel.family == Family::kSm90 && has_misaligned_d(p))
    misaligned_d_ = machine.misaligned_d * (area / (128 * 128));
  if (!p.epilogue.is_plain())
    fused_ = machine.fused * (area / (128 * 128)) *
             (ctas_of_sm_ > 1 || kernel.warp_schedule == "pingpong" ? kOneWarpgroup : 1);
  partial_ = area * accumulator / machine.partial_rate_sm;
  result_bytes_ = static_cast<double>(p.batch) * p.m * p.n * accumulator;

  // wgmma loses a fixed time per iteration, as if the tile were wider; mma.sync loses where warps reuse little.
  if (kernel.family == Family::kSm90) {
    double const operations = size;  // 2 of a multiply-add; TF32's run at half the rate of 16 bits
    double const further =
        kernel.warp_schedule == "pingpong" ? std::max(kernel.tile_m - 128, 0) * (1 - kFurtherRows) : 0;
    bool const tf32 = p.a.format == Type::kF32;
    math_ = operations * (area + (kernel.tile_m - further) * machine.narrow) * tile_k /
            (tf32 ? machine.tf32_rate_sm : machine.wgmma_rate_sm);
    Major const major = swap ? kernel.b.major : kernel.a.major;
    bool const along_k = (major == Major::kColumn) == swap;
    if (tf32 && !along_k) math_ *= machine.from_registers;
    // SMs that clusters leave out save some of their power for the others.
    wgmma_sustained_ = operations * area * tile_k * ctas * std::sqrt(std::max(width / (workers_ * ctas), 1.0)) /
                       (tf32 ? machine.tf32_sustained : machine.wgmma_sustained);
    if (kernel.warp_schedule == "cooperative") wgmma_sustained_ *= machine.shared_tile;
  } else {
    double rate = mma_rate(machine, p.a.format.type, p.math);
    // f64's instructions take so long that tiles of a quarter feed them as well.
    double const enough = p.a.format == Type::kF64 ? 64 * 64 : 128 * 128;
    if (kernel.family == Family::kSkinny && p.math == Math::kTF32x3) {
      rate /= 1 + kSplitRows / std::min(kernel.tile_n, 16) * (kernel.tile_n > 16 ? kManyRows : 1);
    } else if (kernel.family == Family::kSkinny && p.a.format != Type::kF64) {
      rate *= machine.skinny_mma / machine.mma_16bit;
    } else {
      rate *= std::pow(std::min(area / enough, 1.0), 0.35);
    }
    math_ = 2 * area * tile_k / rate;
  }

  // Rows of A and columns of B of a CTA: those beyond the problem are not loaded. Vectors below 16 bytes take more
  // requests for the same bytes.
  double const panel = tile_k * size / std::sqrt(std::min(kernel.a.align * size / 16, 1.0));
  auto const misses = [&](int64_t ld, int64_t bytes) { return ld * static_cast<int64_t>(size) % bytes != 0; };
  auto const is_misaligned = [&](int64_t ld) { return misses(ld, 128); };
  bool const by_tma = kernel.family == Family::kSm90;
  // A or B: what lies contiguously, along K or so many of m or n, `ld` apart; how many of m or n a tile has; and if
  // they are contiguous the bytes of the rows in which they come.
  struct Operand {
    int64_t ld;
    bool along_k;
    int64_t extent;
    int32_t tile, row;
  };
  auto const operand = [&](int64_t ld, bool along_k, int64_t extent, bool is_b) -> Operand {
    int32_t const tile = is_b ? kernel.tile_n : kernel.tile_m;
    int32_t const row = std::gcd((is_b ? columns_by_tma(tile) : tile) * static_cast<int32_t>(size), 128);
    return {ld, along_k, extent, tile, row};
  };
  Operand const a = operand(repacked.problem.a.ld, kernel.a.major == Major::kRow, p.m, swap);
  Operand const b = operand(repacked.problem.b.ld, kernel.b.major == Major::kColumn, p.n, !swap);
  // How many tiles ask each for a part of a line.
  auto const parts_of = [&](Operand const& x) {
    return std::max(std::min<double>(x.extent, 128 / size) / x.tile, 1.0);
  };
  // A tile that is contiguous along m or n comes in rows of at most 128 bytes, of which each costs more. A part of one
  // costs as much.
  auto const panel_of = [&](Operand const& x) {
    bool const off_sectors = misses(x.ld, 32);
    double const off_lines = by_tma && off_sectors ? machine.off_sectors_mn : machine.misaligned_mn;
    double const each = x.along_k             ? (off_sectors ? machine.misaligned_k - 1 : 0)
                        : is_misaligned(x.ld) ? off_lines - 1
                                              : 0;
    if (x.along_k || !by_tma) return panel * (1 + each);
    double const bytes = x.tile * size, whole = floor_div(bytes, x.row), last = bytes / x.row - whole;
    double const rows = whole + (last > 0 ? kLastBox + (1 - kLastBox) * last : 0);
    return panel * parts_of(x) * rows * (x.row + 128 * each) / bytes;
  };
  panel_a_ = panel_of(a);
  panel_b_ = panel_of(b);
  misaligned_ = is_misaligned(a.ld) || is_misaligned(b.ld);
  double const rearranged = repacked.bytes_rearranged;
  double const copies = (repacked.bytes() - rearranged) / machine.copy_rate + rearranged / machine.rearrange_rate;
  repack_ = 2 * copies + machine.relaunch * repacked.launches;
  double const tile_rows = std::min<double>(kernel.tile_m, rows_),
               tile_columns = std::min<double>(kernel.tile_n, columns_);
  auto const loaded = [&](double rows, double columns) {
    return (swap ? columns : rows) * panel_a_ + (swap ? rows : columns) * panel_b_;
  };
  // TMA takes as long for what a row that is not along K has beyond the problem.
  loads_ = loaded(by_tma && !(swap ? b : a).along_k ? kernel.tile_m : tile_rows,
                  by_tma && !(swap ? a : b).along_k ? kernel.tile_n : tile_columns) /
           machine.load_rate_sm;
  if (by_tma && ctas_of_sm_ == 1) {
    double const columns = (swap ? a : b).along_k ? kernel.tile_n : columns_by_tma(kernel.tile_n);
    double const stages = std::max(std::floor(kUnderWay / ((kernel.tile_m + columns) * tile_k * size)), kFewest);
    loads_ *= 1 + kFewStages * (std::pow(6 / stages, 4) - 1);
  }
  if (by_tma && ctas > 1) loads_ += machine.handshake * (ctas > 4 ? kManyHands : 1) * tile_k / 64;
  if (ctas_of_sm_ > 1) {
    // They take turns, and each has stages for its part of what an SM can ask for.
    double const turns = std::clamp(std::ceil(tiles_ / width), 1.0, static_cast<double>(ctas_of_sm_));
    math_ *= turns, epilogue_ *= turns, misaligned_d_ *= turns, fused_ *= turns;
    loads_ *= ctas_of_sm_;
  }
  if (kernel.family == Family::kSkinny) {
    // Few warps of an SM wait for each other's loads. They ask L2 for half lines of a B that is contiguous along K.
    double const half_lines = p.b.major == Major::kColumn ? machine.half_lines : 1;
    double const rate = size == 2 ? machine.skinny_rate_16bit : machine.skinny_rate_sm;
    if (kernel.b.align < kernel.a.align) {
      panel_b_ *= kRequests;
      floor_ *= 1 + kSectorColumns / kernel.tile_m;
      epilogue_ *= kAfterwards;
    }
    loads_ = loaded(tile_rows, tile_columns) / rate * half_lines;
    if (p.a.format != Type::kF64) floor_ *= machine.skinny_memory;
    alone_ = machine.skinny_alone * kernel.tile_m / 64 * std::sqrt(size / 2);
  } else if (double const bytes = kernel.a.align * size; bytes < 16) {
    alone_ = machine.narrow_loads * std::pow(8 / bytes, 0.7) * tile_k / 32;
    if (size == 2) launch_ += kNarrowBegin * bytes / 8;
  }
  multicast_ = loaded(tile_rows / kernel.cluster_n, tile_columns / kernel.cluster_m) * ctas;

  if (by_tma) {
    double const k_bytes = static_cast<double>(p.batch) * repacked.problem.k * size,
                 once = (static_cast<double>(p.m) + p.n) * k_bytes;
    double const more = ((tiling_.tiles_n - 1.0) * p.m + (tiling_.tiles_m - 1.0) * p.n) * k_bytes;
    again_ = kAgain * more * std::clamp(once / kStay - 1, 0.0, 1.0) / machine.memory_rate;
    auto const lacks = [](double extent, double tile, int64_t tiles) { return tiles > 1 ? tiles - extent / tile : 0; };
    uneven_ =
        std::sqrt(std::max(lacks(p.m, tiling_.rows, tiling_.tiles_m), lacks(p.n, tiling_.columns, tiling_.tiles_n)));
  }

  // CTAs that load the same panel queue for its lines, a line of which holds several short rows of an operand. TMA asks
  // for as many rows as its tile is wide.
  auto const short_rows = [&](Operand const& x) {
    if (!by_tma) return std::max(128 / (x.ld * size), 1.0);
    return x.along_k ? 1.0 : std::max(static_cast<double>(x.tile) / x.extent, parts_of(x));
  };
  double const queue = std::min(workers_ / wave_tiles_, 1.0) *
                       std::max(tiling_.tiles_n * short_rows(a), tiling_.tiles_m * short_rows(b));
  line_ = machine.line * queue * tile_k / 64;
  launch_ += machine.first_line * queue;

  // The busiest worker has no less than its share of everything, whole tiles of a kernel that shares none, and busy
  // workers are no fewer than tiles.
  bool const shares = !kernel.split_k_reductions.empty() || !kernel.stream_k_reductions.empty();
  double const pieces = shares ? std::max(tiles_ / workers_, 1.0) : ceil_div(tiles_, workers_);
  double const iterations = shares ? std::max(tiles_ * k_tiles_ / workers_, 1.0) : pieces * k_tiles_;
  double const busy = std::min(workers_, tiles_);
  double const last = shares ? 0 : k_tiles_, busy_last = tiles_ - (pieces - 1) * busy;
  auto const iteration = [&](double busy) {
    return std::max({math_, wgmma_sustained_ * busy, loads_, multicast_ * busy / machine.cache_rate, line_});
  };
  double const work = iteration(busy) * (iterations - last) + (last > 0 ? iteration(busy_last) * last : 0);
  double const reduction = partials_ ? machine.reduction + 2 * result_bytes_ / machine.reduction_rate : 0;
  least_ = kRounding * (launch_ + std::max(work + epilogues(epilogue_, 0, pieces), floor_) + reduction + repack_);
}

// What a worker waits for epilogues, but for what is fused into its last one: `fused` is of the others. A warpgroup of
// a pingpong kernel has one while the other multiplies: what is fused into it is arithmetic, and wholly hidden.
double Estimator::epilogues(double epilogue, double fused, double pieces) const {
  if (kernel_.warp_schedule != "pingpong") return epilogue * pieces + fused * (pieces - 1);
  return epilogue * (1 + (pieces - 1) * (1 - machine_.overlapped));
}

// Of the kernel that adds slices, and writes D.
double Estimator::reduction_of(double slices) const {
  double const sharers = reduction_runs(result_bytes_ / 16, static_cast<int32_t>(slices));
  return machine_.reduction + machine_.reduction_sharing * std::log2(sharers) +
         slices * result_bytes_ / machine_.reduction_rate;
}

Wave Estimator::first_wave(Raster raster, int32_t swizzle) const {
  bool const along_m = raster == Raster::kAlongM;
  int32_t const tiles_m = tiling_.tiles_m, tiles_n = tiling_.tiles_n;
  int32_t const fast = along_m ? tiles_m : tiles_n, slow = along_m ? tiles_n : tiles_m;
  swizzle = std::min(swizzle, slow);
  Lines const lines(fast, slow, swizzle);
  // CTAs that share an SM take turns: a wave is one of each SM, as it is of kernels that have as many tiles and fill an
  // SM.
  double const workers = std::min(workers_ / ctas_of_sm_, wave_tiles_);

  double const rows = std::min(tiling_.rows, problem_.m), columns = std::min(tiling_.columns, problem_.n);
  // Tiles of runs of workers, and along m and n the different ones of each run.
  double counted = 0, of_m = 0, of_n = 0;
  auto const count = [&](int32_t begin, int32_t end) {
    auto const [along, across] = lines.among(begin, end);
    counted += end - begin, of_m += along_m ? across : along, of_n += along_m ? along : across;
  };
  Wave wave;
  int32_t const ctas = static_cast<int32_t>(tiling_.ctas_m * tiling_.ctas_n), last = static_cast<int32_t>(workers);
  if (ctas == 1) {
    for (int32_t const start : kStarts) {
      int32_t const begin = last > start ? start : 0;
      count(begin, std::min(last, begin + kNeighbours));
    }
  } else {
    // A GPC's run begins in the middle of these as often as not.
    int32_t const run = kNeighbours / ctas;
    for (int32_t begin = 0; begin < last; begin += std::max(run / 2, 1)) count(begin, std::min(last, begin + run));
  }
  // A is multicast along n, B along m.
  wave.rows = workers * rows * (tiling_.ctas_n > 1 ? 1 : of_m / counted);
  wave.columns = workers * columns * (tiling_.ctas_m > 1 ? 1 : of_n / counted);
  wave.near = wave.rows + wave.columns;
  if (ctas == 1 && sliced_) {
    wave.near = 0;
    int32_t const nearest = std::min(last, kCounted);
    for (int32_t const near : kNear) {
      counted = of_m = of_n = 0;
      for (int32_t begin = 0; begin < nearest; begin += near) count(begin, std::min(nearest, begin + near));
      wave.near += workers / counted * (rows * of_m + columns * of_n) / 2;
    }
  }
  double const panels = ceil_div(workers, static_cast<double>(fast) * swizzle);
  double const down = panels == 1 ? ceil_div(workers, swizzle) : fast;
  double const across = std::min<double>(panels * swizzle, slow);
  wave.footprint = (along_m ? down : across) * rows + (along_m ? across : down) * columns;
  return wave;
}

double Estimator::needs(Wave const& wave, int32_t swizzle) const {
  return (1 + (sliced_ ? 0 : kWiderPanel * std::log2(swizzle))) *
         (wave.near / machine_.gpc_rate + wave.footprint / machine_.memory_rate);
}

Order Estimator::best_order() const {
  Order best;
  double least = std::numeric_limits<double>::infinity();
  for (int32_t const swizzle : {1, 2, 4}) {
    for (Raster const raster : {Raster::kAlongM, Raster::kAlongN}) {
      bool const along_m = raster == Raster::kAlongM;
      int64_t const fast = along_m ? tiling_.tiles_m : tiling_.tiles_n,
                    slow = along_m ? tiling_.tiles_n : tiling_.tiles_m;
      // One line of tiles has one order, and so has a panel that holds all of them.
      if (swizzle > 1 && (fast == 1 || swizzle / 2 >= slow)) continue;
      Wave const wave = first_wave(raster, swizzle);
      if (double const needed = needs(wave, swizzle); needed < least) {
        least = needed;
        best = {raster, swizzle, wave};
      }
    }
  }
  return best;
}

// What decomposition.h gives to workers, in numbers.
struct Estimator::Share {
  double busy;        // workers with work
  double pieces;      // of the busiest worker
  double iterations;  // of the busiest worker
  double peers;       // of a shared tile, at most; 1 where none is shared
  double slices = 1;  // that a separate reduction adds
  double launches = 1;
  double cut = 0;  // of all tiles, by Stream-K
};

Estimator::Share Estimator::share_of(Schedule const& s, bool separate) const {
  if (streams(s) && workers_ > 1 && remainder_of(tiles_, workers_) != 0) {
    // Stream-K cuts the tiles of the last, partial wave and of a full one before it.
    double const whole_waves = std::max(floor_div(tiles_, workers_) - 1, 0.0);
    double const cut_tiles = tiles_ - whole_waves * workers_, cut = cut_tiles * k_tiles_;
    double const share = ceil_div(cut, std::min(workers_, cut));
    double const peers = share >= k_tiles_ ? 2 : ceil_div(k_tiles_, share) + (remainder_of(k_tiles_, share) != 0);
    double const pieces = whole_waves + ceil_div(share, k_tiles_) + (remainder_of(share, k_tiles_) != 0);
    return {
        std::min(workers_, tiles_ * k_tiles_), pieces, whole_waves * k_tiles_ + share, peers, 1, 1, cut_tiles / tiles_};
  }
  // Data-parallel is split-K in one.
  double const splits = std::min(splits_of(s), k_tiles_);
  if (separate) {
    // sm80 kernels launch a slice that K cuts short after the others.
    double const extent = ceil_div(k_tiles_, splits), slices = ceil_div(k_tiles_, extent);
    bool const launched_apart = kernel_.family == Family::kSm80 && problem_.k < slices * extent * kernel_.tile_k;
    double const pieces =
        ceil_div(tiles_ * (slices - launched_apart), workers_) + launched_apart * ceil_div(tiles_, workers_);
    double const launches =
        kernel_.family == Family::kSm80 ? std::min<double>(problem_.batch * (1 + launched_apart), slices) : 1;
    return {std::min(workers_, tiles_ * slices), pieces, pieces * extent, 1, slices, launches};
  }
  // The first k_tiles % splits runs of a tile are one iteration longer, and come first.
  double const base = floor_div(k_tiles_, splits), longer = k_tiles_ - base * splits,
               pieces = ceil_div(tiles_ * splits, workers_);
  return {std::min(workers_, tiles_ * splits), pieces, pieces * base + ceil_div(tiles_ * longer, workers_), splits};
}

Cost Estimator::cost(Schedule const& s, Wave const& wave, double limit) const {
  if (kernel_.family == Family::kHost) return host_cost(s);
  bool const separate = splits_of(s) > 1 && s.reduction == Reduction::kSeparate;
  Share const share = share_of(s, separate);
  double const splits = separate ? share.slices : splits_of(s);
  bool const cut_by_iterations = streams(s) && share.peers > 1;
  Cost cost;
  cost.iterations = share.iterations;
  cost.peers = share.peers;
  // Split-K shares every piece of a worker; of those that Stream-K shares the last one is waited for.
  double const shared = share.peers <= 1 ? 0 : cut_by_iterations ? 1 : share.pieces;
  bool const in_clusters = kernel_.family == Family::kSkinny;  // which share tiles without memory
  if (in_clusters) {
    double const sixteens = kernel_.tile_n * size_of(accumulator_of(problem_.a.format)) / 64.0;  // of rows of f32
    cost.fix_up = share.peers <= 1 ? 0 : machine_.skinny_fix_up + machine_.skinny_peer * share.peers * sixteens;
  } else {
    cost.fix_up = shared * (machine_.fix_up + (1 + share.peers) * partial_);
  }
  cost.launches = launch_ + machine_.relaunch * (share.launches - 1);
  if (separate) {
    cost.extra = reduction_of(share.slices);
  } else if (share.peers > 1 && !in_clusters) {
    cost.extra = machine_.memset;
  }
  cost.repack = repack_;

  // A wave may hold several batches or slices of K, alike but sharing nothing. Streams of one tile are at different k.
  double const alike = std::min(std::max(workers_ / wave_tiles_, 1.0), problem_.batch * splits);
  double const together = alike * (wave.rows * panel_a_ + wave.columns * panel_b_), apart = multicast_ * share.busy;
  double drift = std::min(machine_.drift, 1.0) * (1 - 1 / (share.pieces + share.iterations * kernel_.tile_k / kDriftK));
  if (misaligned_) drift = std::max(drift, std::min(machine_.misaligned_drift, 1.0));
  if (cut_by_iterations) drift = 1;
  double const gpc = (together + drift * std::max(apart - together, 0.0)) / machine_.gpc_rate;
  double const cache = apart / machine_.cache_rate, sustained = wgmma_sustained_ * share.busy;
  double const waits = std::max(line_, alone_ / std::min(share.pieces, kResident));
  // A separate reduction writes D, and partials are aligned. What threads store of a misaligned D themselves was
  // measured not to be hidden.
  double const misaligned_d = separate ? 0 : misaligned_d_ * share.pieces;
  // What is fused overlaps with nothing in the last epilogue. A pass that adds slices does it for all of them.
  double const last_fused = separate && fused_ > 0 ? kOfReduction * machine_.fused : fused_;
  // Workers of the last wave that have a piece, of those of all others. They have to themselves what all share: caches
  // and power. Slices that sm80 kernels launch apart may leave none to it.
  double const last = share.iterations / share.pieces,
               left = std::max(tiles_ * splits - (share.pieces - 1) * share.busy, 1.0);
  double const busy_last = cut_by_iterations ? 1 : std::min(left / share.busy, 1.0);
  auto const work = [&](auto const& join) {
    auto const iteration = [&](double busy) {
      return join(std::max(math_, sustained * busy), loads_ + gpc * busy, cache * busy, waits);
    };
    return iteration(1) * (share.iterations - last) + iteration(busy_last) * last +
           epilogues(epilogue_, separate ? 0 : fused_, share.pieces) + misaligned_d + cost.fix_up;
  };
  double const least_work = work([](auto... times) { return std::max({times...}); });
  cost.microseconds =
      kRounding * (cost.launches + std::max(least_work, floor_) + last_fused + cost.extra + cost.repack);
  if (cost.microseconds > limit) return cost;

  cost.work = work(overlapped);
  // Few workers do not draw all that memory could give: those with a piece of the whole waves, and of the last one.
  // Those of sm90 kernels are spread over all GPCs, but in the last of several waves only where tiles are in one line
  // (sm90/scheduler.h).
  bool const sm90 = kernel_.family == Family::kSm90;
  auto const slower = [&](double at_work, bool is_spread) {
    double const draw = drawn_ * at_work * share.busy;
    double const uneven =
        is_spread ? 1 : std::pow(std::min(at_work * share.busy * ctas_of_sm_ / workers_, 1.0), -machine_.idle);
    return sm90 ? uneven * overlapped(1.0, machine_.memory_rate / draw) : uneven;
  };
  double const of_last = left / (tiles_ * splits);
  bool const one_line = tiling_.tiles_m == 1 || tiling_.tiles_n == 1;
  double const along = share.iterations * kernel_.tile_k;
  double const strayed = splits > 1 ? uneven_ * along / (along + kApartK) : share.cut;
  cost.floor = (floor_ + again_ * strayed) *
               ((1 - of_last) * slower(1, sm90) + of_last * slower(busy_last, sm90 && (one_line || share.pieces == 1)));
  if (in_clusters) cost.floor *= 1 + machine_.gang * (share.peers - 1);
  bool const softly = kernel_.family == Family::kSm80 || problem_.a.format == Type::kF64;
  double const of_call = (softly ? softly_overlapped(cost.work, cost.floor) : overlapped(cost.work, cost.floor)) *
                         (sm90 && cut_by_iterations ? kEverywhere : 1);
  cost.microseconds = cost.launches + of_call + last_fused + cost.extra + cost.repack;
  cost.work += last_fused;
  cost.waves = tiles_ * splits / workers_;
  return cost;
}

// MAC iterations and pieces of the busiest thread, and the partials it shares.
Cost Estimator::host_cost(Schedule const& s) const {
  Share const share = share_of(s, false);
  auto const iteration = [&](double rows, double columns) {
    return problem_.k / k_tiles_ * (kHostMultiplyAdd * rows * columns + kHostPack * (rows + columns));
  };
  // Tiles at the edge are multiplied as far as they reach. The busiest thread has its part of the full tiles or of all
  // work, whichever is more; in Stream-K its iterations may all be of full tiles.
  double const rows = std::min<double>(kernel_.tile_m, rows_), columns = std::min<double>(kernel_.tile_n, columns_);
  double const average_rows = rows_ / ceil_div(rows_, kernel_.tile_m),
               average_columns = columns_ / ceil_div(columns_, kernel_.tile_n);
  bool const cut_by_iterations = streams(s) && share.peers > 1;
  Cost cost;
  if (cut_by_iterations) {
    cost.work = iteration(rows, columns) * share.iterations;
  } else {
    double const full_tiles = problem_.batch * floor_div(rows_, rows) * floor_div(columns_, columns);
    double const splits = std::min(splits_of(s), k_tiles_), base = floor_div(k_tiles_, splits);
    double const of_full =
        ceil_div(full_tiles * splits, workers_) * base + ceil_div(full_tiles * (k_tiles_ - base * splits), workers_);
    cost.work = std::max(iteration(rows, columns) * of_full,
                         iteration(average_rows, average_columns) * tiles_ * k_tiles_ / share.busy);
  }
  cost.work += share.pieces * (kHostPiece + kHostRow * average_rows + kHostResult * average_rows * average_columns);
  // Every piece of a split tile is stored once and added once; Stream-K shares two tiles of a thread at most.
  if (share.peers > 1)
    cost.fix_up = kHostPartial * rows * columns * (cut_by_iterations ? 2 + share.peers : 2 * share.pieces);
  cost.work += cost.fix_up;
  cost.launches = share.busy > 1 ? kHostWake : 1;
  cost.microseconds = cost.launches + cost.work;
  cost.waves = tiles_ * splits_of(s) / workers_;
  cost.iterations = share.iterations;
  cost.peers = share.peers;
  return cost;
}

}  // namespace jax_streamk
