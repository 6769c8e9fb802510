// The host family: the workers of the decomposition are calls on CPU threads, in any order, with any number of them
// running at once.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/host/tile_product.h"
#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

// The best instruction set that the machine has.
Isa choose_isa() {
  Isa isa = Isa::kBaseline;
#if defined(__x86_64__)
  __builtin_cpu_init();  // kernels are registered by static constructors, which may come first
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isa = Isa::kAvx2;  // F16C is older than AVX2
  if (isa == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    isa = __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
#endif
  return isa;
}

TileProduct tile_product(Type operand, Type d) {
  static Isa const isa = choose_isa();
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16 && operand == Type::kBF16) return host_avx512_bf16::tile_product(d);
  if (isa >= Isa::kAvx512) return host_avx512::tile_product(operand, d);
  if (isa == Isa::kAvx2) return host_avx2::tile_product(operand, d);
#endif
  (void)isa;
  return host_baseline::tile_product(operand, d);
}

int64_t scratch_bytes(Type operand, int64_t m, int64_t n, bool is_invariant) {
  if (size_of(operand) == size_of(accumulator_of(operand)) && !is_invariant) return 0;
  int64_t const product = operand == Type::kS8 ? m * n : 0;
  return ((m + n + kScratchPadding) * kScratchWords + product) * 4;
}

// Runs of this length along K are summed separately and then added, as tile products do for much shorter blocks: the
// error of a sum grows with the length of the chain of additions.
constexpr int64_t kSummedAlone = 4096;
// A B with scales is dequantized that many of K at a time, which a core's L2 holds.
constexpr int64_t kDequantizedAlone = 256;
// Up to here decoding B for every kScaledRows rows takes about half as long as dequantizing it on AVX2; float8 in a
// row-major B takes 1.1 times as long.
constexpr int64_t kFewScaledRows = 16;

// Products of float8, and of integers with scales, are those of the float32 numbers that they stand for.
bool widens(Format const& a, Format const& d) {
  return a == Type::kE4M3 || a == Type::kE5M2 || (a == Type::kS8 && d != Type::kS32);
}

// The state of a tile that has several peers.
struct SharedTile {
  std::atomic<int32_t> arrived{0};
  std::atomic<bool> locked{false};  // atomic reduction: a worker is adding
};

// One call of run().
struct Gemm {
  GemmProblem p;
  Reduction reduction;
  Decomposition decomposition;
  DenseTiles tiles;
  std::optional<RaggedTiles> ragged;  // instead of these
  int64_t tile_m, tile_n, tile_k;     // tile_m and tile_n are no larger than the problem
  TileProduct tile_product;
  Buffers buffers;

  // The workspace: [shared tiles][slots][per worker: accumulators, scratch, part and gathered rows]
  int64_t tile_bytes() const { return align_workspace(tile_m * tile_n * size_of(accumulator_of(p.a.format))); }
  int64_t shared_bytes() const {
    return align_workspace(decomposition.shared_tiles() * static_cast<int64_t>(sizeof(SharedTile)));
  }
  // Atomic reduction has one slot per shared tile, the others one per peer.
  int64_t slots() const {
    return reduction == Reduction::kAtomic ? decomposition.shared_tiles() : decomposition.slots();
  }
  Type multiplied() const { return dequantizes_a() ? Type::kF32 : p.a.format.type; }
  bool multiplies_into_d() const { return p.d.format == accumulator_of(multiplied()); }
  int64_t accumulators_bytes() const {
    return multiplies_into_d() && reduction != Reduction::kAtomic ? 0 : tile_bytes();
  }
  bool gathers() const { return p.gathered_rows > 0; }
  // Sums of s8 are exact in any order: they have parts only where a part's rows are gathered at a time.
  bool sums_in_parts() const { return p.k > alone() && (multiplied() != Type::kS8 || gathers()); }
  int64_t alone() const { return dequantizes() ? kDequantizedAlone : kSummedAlone; }
  bool is_invariant() const { return p.invariant != Invariant::kNone; }
  bool is_scaled() const { return p.b.scales.any() || dequantizes_a(); }
  bool dequantizes_a() const { return widens(p.a.format, p.d.format); }
  // With few rows B's numbers are multiplied as they are read, where their lines and blocks begin bytes.
  bool dequantizes() const {
    if (dequantizes_a()) return true;
    if (!is_scaled() || is_invariant() || p.m > kFewScaledRows) return is_scaled();
    bool const begin_bytes = p.b.major == Major::kRow || p.b.scales.rows % 2 == 0 || p.b.scales.rows == p.k;
    return p.b.format.bits() < 8 && !(begin_bytes && p.b.ld % 2 == 0 && p.b.batch_stride % 2 == 0);
  }
  int64_t scratch_bytes() const {
    return align_workspace(jax_streamk::scratch_bytes(multiplied(), tile_m, tile_n, is_invariant()));
  }
  int64_t private_bytes() const {
    return accumulators_bytes() + scratch_bytes() + part_bytes() + gathered_bytes() + scaled_bytes();
  }
  int64_t part_bytes() const { return sums_in_parts() ? tile_bytes() : 0; }
  int64_t gathered_bytes() const {
    return gathers() ? align_workspace(tile_m * std::min(p.k, alone()) * size_of(p.a.format)) : 0;
  }
  // Of B as it is multiplied, and perhaps of A, or of few rows of A.
  int64_t scaled_bytes() const { return is_scaled() ? align_workspace(bytes_of_b() + bytes_of_rows()) : 0; }
  int64_t bytes_of_b() const {
    return dequantizes() ? align_workspace(std::min(p.k, alone()) * tile_n * size_of(multiplied())) : 0;
  }
  int64_t bytes_of_rows() const {
    int64_t const rows = dequantizes_a() ? tile_m : dequantizes() ? 0 : tile_m + kScaledRows - 1;
    return std::min(p.k, alone()) * rows * 4;
  }
  int64_t workspace_bytes() const {
    return shared_bytes() + slots() * tile_bytes() + decomposition.workers * private_bytes();
  }

  char* workspace() const { return static_cast<char*>(buffers.workspace); }
  SharedTile* shared() const { return reinterpret_cast<SharedTile*>(workspace()); }
  void* slot(int64_t i) const { return workspace() + shared_bytes() + i * tile_bytes(); }
  void* accumulators(int32_t worker) const {
    return workspace() + shared_bytes() + slots() * tile_bytes() + worker * private_bytes();
  }
  void* scratch(int32_t worker) const { return static_cast<char*>(accumulators(worker)) + accumulators_bytes(); }
  void* part(int32_t worker) const { return static_cast<char*>(scratch(worker)) + scratch_bytes(); }
  void* gathered(int32_t worker) const { return static_cast<char*>(part(worker)) + part_bytes(); }
  void* scaled(int32_t worker) const { return static_cast<char*>(gathered(worker)) + gathered_bytes(); }

  struct OutputTile {
    int64_t batch, m, n, k;  // the first row, column and element of K
    Extents extents;         // with the whole K that it sums
    void* d;
    void const *bias, *residual;
  };

  // Null of an operand that the product has not.
  static void const* element(void const* operand, int64_t bytes) {
    return operand == nullptr ? nullptr : static_cast<char const*>(operand) + bytes;
  }

  OutputTile locate(int32_t index) const {
    Tile const at = ragged ? ragged->tile(index) : tiles.tile(index);
    RaggedTiles::Run const run = ragged ? ragged->run(at.group) : RaggedTiles::Run{};
    // Where the rows of the tile's D, and its K, begin and end.
    bool const cuts_m = p.ragged == Ragged::kM, cuts_k = p.ragged == Ragged::kK;
    int64_t const begin_m = cuts_m ? run.begin : 0, end_m = cuts_m ? run.begin + run.size : p.m;
    int64_t const begin_k = cuts_k ? run.begin : 0, end_k = cuts_k ? run.begin + run.size : p.k;
    int64_t const m = begin_m + at.m * tile_m, n = at.n * tile_n, k = begin_k + at.k_begin * tile_k;
    int64_t const offset = (cuts_m ? 0 : at.group * p.d.batch_stride) + m * p.d.ld + n;
    int64_t const size = size_of(p.d.format);
    return {at.group,
            m,
            n,
            k,
            {std::min(tile_m, end_m - m), std::min(tile_n, p.n - n), std::min(at.k_tiles * tile_k, end_k - k)},
            static_cast<char*>(buffers.d) + offset * size,
            element(buffers.bias, (at.group * p.epilogue.batch_stride_bias + n) * size),
            element(buffers.residual, offset * size)};
  }

  void multiply(OutputTile const& tile, Work const& work, int32_t worker, void* accumulators, int64_t stride) const {
    int64_t const begin = tile.k + work.k_begin * tile_k,
                  end = std::min(begin + work.k_count * tile_k, tile.k + tile.extents.k);
    int64_t const alone = sums_in_parts() ? this->alone() : end - begin;
    if (begin >= end) return clear(tile.extents, accumulators, stride, accumulator_of(p.a.format));
    multiply(tile, begin, std::min(begin + alone, end), worker, accumulators, stride);
    for (int64_t k = begin + alone; k < end; k += alone) {
      multiply(tile, k, std::min(k + alone, end), worker, part(worker), tile_n);
      tile_product.add(tile.extents, part(worker), tile_n, accumulators, stride);
    }
  }

  void multiply(OutputTile const& tile, int64_t k, int64_t k_end, int32_t worker, void* accumulators,
                int64_t stride) const {
    int64_t const of_batch = p.ragged == Ragged::kNone ? tile.batch * p.a.batch_stride : 0;
    Block a = gathers() ? gather(tile, k, k_end, gathered(worker))
                        : Block{element_of_a(tile.m, k) + of_batch * size_of(p.a.format), p.a.ld, p.a.major};
    if (dequantizes_a()) {
      int64_t const group = p.ragged == Ragged::kNone ? tile.batch : 0;
      ScaledBlock block = numbers(Role::kScaleOfA, a, group, tile.m, k, tile.extents.m, k_end - k);
      a = dequantize(block, static_cast<char*>(scaled(worker)) + bytes_of_b());
    }
    auto const product = is_invariant() ? tile_product.multiply_invariant : tile_product.multiply;
    // The tile's columns of one matrix of B, then those of the next.
    for (int64_t n = 0; n < tile.extents.n;) {
      auto const matrix = p.matrix_of(tile.n + n);
      int64_t const columns = std::min(tile.extents.n - n, matrix.end - tile.n - n);
      Extents const extents{tile.extents.m, columns, k_end - k};
      void* const sums = static_cast<char*>(accumulators) + n * size_of(accumulator_of(p.a.format));
      if (!is_scaled()) {
        Block const b = block_of_b(tile.batch, matrix, tile.n + n, k);
        product(extents, a, b, sums, stride, scratch(worker));
      } else {
        ScaledBlock const b = scaled_block(tile.batch, matrix, tile.n + n, k, extents);
        if (dequantizes()) {
          product(extents, a, dequantize(b, scaled(worker)), sums, stride, scratch(worker));
        } else {
          tile_product.multiply_scaled(extents, a, b, sums, stride, scaled(worker));
        }
      }
      n += columns;
    }
  }

  Block block_of_b(int64_t batch, GemmProblem::Matrix const& matrix, int64_t column, int64_t k) const {
    int64_t const ld = p.ld_of(matrix), offset = offset_of_b(batch, matrix, column, k);
    return {static_cast<char const*>(address_of(matrix)) + offset * size_of(p.b.format), ld, p.b.major};
  }

  int64_t offset_of_b(int64_t batch, GemmProblem::Matrix const& matrix, int64_t column, int64_t k) const {
    int64_t const ld = p.ld_of(matrix), n = column - matrix.first;
    return (p.ragged == Ragged::kK ? 0 : batch * p.b.batch_stride) +
           (p.b.major == Major::kRow ? k * ld + n : k + n * ld);
  }
  void const* address_of(GemmProblem::Matrix const& matrix) const {
    return matrix.role == Role::kB ? buffers.b : matrix.role == Role::kUp ? buffers.up : buffers.third;
  }

  Block dequantize(ScaledBlock const& block, void* to) const {
    tile_product.dequantize(block, to);
    return {to, block.length, block.major};
  }

  ScaledBlock scaled_block(int64_t batch, GemmProblem::Matrix const& matrix, int64_t column, int64_t k,
                           Extents const& extents) const {
    // Elements of four bits need not begin bytes.
    ScaledBlock block =
        numbers(Role::kScale, {address_of(matrix), p.ld_of(matrix), p.b.major}, batch, k, column, extents.k, extents.n);
    block.first = offset_of_b(batch, matrix, column, k);
    return block;
  }

  // Numbers from the beginning of `from` on: `rows` x `columns`, from (row, column) of A or B.
  ScaledBlock numbers(Role scale_of, Block const& from, int64_t batch, int64_t row, int64_t column, int64_t rows,
                      int64_t columns) const {
    bool const is_a = scale_of == Role::kScaleOfA, by_row = from.major == Major::kRow;
    Layout const& layout = is_a ? p.a : p.b;
    Scales const& scales = layout.scales;
    ScaledBlock block{from.major, {from.data, layout.format.type}, {}, {}, {}};
    block.first = 0, block.ld = from.stride;
    block.line = by_row ? row : column, block.position = by_row ? column : row;
    block.lines = by_row ? rows : columns, block.length = by_row ? columns : rows;
    block.block_lines = block.block_length = int64_t{1} << 62;
    if (!scales.any()) return block;
    Operand const scale = p.operand(scale_of);
    block.scale = {is_a ? buffers.scale_of_a : buffers.scale, scales.scale};
    if (!is_a) block.zero = {buffers.zero, scales.zero}, block.offset = {buffers.offset, scales.offset};
    block.first_scale = batch * scale.batch_stride, block.ld_scale = scale.ld;
    block.block_lines = by_row ? scales.rows : scales.columns;
    block.block_length = by_row ? scales.columns : scales.rows;
    return block;
  }

  char const* element_of_a(int64_t row, int64_t k) const {
    int64_t const offset = p.a.major == Major::kRow ? row * p.a.ld + k : row + k * p.a.ld;
    return static_cast<char const*>(buffers.a) + offset * size_of(p.a.format);
  }

  // Copies the tile's rows, of k to k_end, side by side.
  Block gather(OutputTile const& tile, int64_t k, int64_t k_end, void* to) const {
    int64_t const rows = tile.extents.m, length = k_end - k, size = size_of(p.a.format);
    bool const by_row = p.a.major == Major::kRow;
    for (int64_t i = 0; i < rows; ++i) {
      int64_t const index = static_cast<int32_t const*>(buffers.indices)[tile.m + i],
                    row = std::clamp<int64_t>(index, 0, p.gathered_rows - 1);
      char* const copy = static_cast<char*>(to) + i * size * (by_row ? length : 1);
      if (by_row) {
        std::memcpy(copy, element_of_a(row, k), length * size);
      } else {
        for (int64_t j = 0; j < length; ++j) std::memcpy(copy + j * rows * size, element_of_a(row, k + j), size);
      }
    }
    return {to, by_row ? length : rows, p.a.major};
  }

  void store(OutputTile const& tile, void const* accumulators, int64_t stride) const {
    tile_product.store(tile.extents, p.epilogue, tile.bias, tile.residual, accumulators, stride, tile.d, p.d.ld);
  }

  static void clear(Extents const& extents, void* d, int64_t stride, Format const& format) {
    int64_t const size = size_of(format);
    for (int64_t i = 0; i < extents.m; ++i) std::memset(static_cast<char*>(d) + i * stride * size, 0, extents.n * size);
  }

  // Whether a tile has rows that are in no group of a ragged product.
  bool is_in_no_group(OutputTile const& tile) const {
    return p.ragged == Ragged::kM && (tile.batch < 0 || tile.batch == p.batch);
  }

  // Adds the peers' slots in the order of their iterations.
  void fix_up(OutputTile const& tile, Work const& work) const {
    void* const sum = slot(decomposition.slot(work.tile, 0));
    for (int32_t peer = 1; peer < work.peers; ++peer)
      tile_product.add(tile.extents, slot(decomposition.slot(work.tile, peer)), tile_n, sum, tile_n);
    store(tile, sum, tile_n);
  }

  // Adds a partial tile to the slot of its tile; returns true for the last one.
  bool accumulate(OutputTile const& tile, Work const& work, void const* partial) const {
    SharedTile& shared_tile = shared()[work.tile];
    void* const sum = slot(work.tile);
    // The holder of the lock is adding, and waits for nobody.
    while (shared_tile.locked.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    int32_t const ticket = shared_tile.arrived.fetch_add(1, std::memory_order_relaxed);
    if (ticket == 0)
      std::memcpy(sum, partial, tile.extents.m * tile_n * size_of(accumulator_of(p.a.format)));
    else
      tile_product.add(tile.extents, partial, tile_n, sum, tile_n);
    shared_tile.locked.store(false, std::memory_order_release);
    return ticket == work.peers - 1;
  }

  void run_worker(int32_t worker) const {
    void* const own = accumulators(worker);
    Work work;
    for (int32_t ordinal = 0; decomposition.work(worker, ordinal, work); ++ordinal) {
      OutputTile const tile = locate(work.tile);
      if (is_in_no_group(tile)) {
        clear(tile.extents, tile.d, p.d.ld, p.d.format);
      } else if (work.peers == 1 && multiplies_into_d()) {
        multiply(tile, work, worker, tile.d, p.d.ld);
        if (!p.epilogue.is_plain()) store(tile, tile.d, p.d.ld);
      } else if (work.peers == 1) {
        multiply(tile, work, worker, own, tile_n);
        store(tile, own, tile_n);
      } else if (reduction == Reduction::kAtomic) {
        multiply(tile, work, worker, own, tile_n);
        if (accumulate(tile, work, own)) store(tile, slot(work.tile), tile_n);
      } else {
        multiply(tile, work, worker, slot(decomposition.slot(work.tile, work.peer)), tile_n);
        if (reduction == Reduction::kOrdered &&
            shared()[work.tile].arrived.fetch_add(1, std::memory_order_acq_rel) == work.peers - 1)
          fix_up(tile, work);
      }
    }
  }

  // The second pass of a separate reduction: the worker that had a tile's first iterations fixes it up.
  void reduce_worker(int32_t worker) const {
    Work work;
    for (int32_t ordinal = 0; decomposition.work(worker, ordinal, work); ++ordinal)
      if (work.peers > 1 && work.peer == 0) fix_up(locate(work.tile), work);
  }

  void run(Executor* executor) const {
    for (int32_t i = 0; i < decomposition.shared_tiles(); ++i) new (shared() + i) SharedTile;
    parallel<&Gemm::run_worker>(executor);
    if (reduction == Reduction::kSeparate && decomposition.shared_tiles() > 0) parallel<&Gemm::reduce_worker>(executor);
  }

  template <void (Gemm::*work)(int32_t) const>
  void parallel(Executor* executor) const {
    if (decomposition.workers == 1) return (this->*work)(0);
    executor->parallel(
        decomposition.workers, [](void* gemm, int32_t worker) { (static_cast<Gemm const*>(gemm)->*work)(worker); },
        const_cast<Gemm*>(this));
  }
};

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

TileOrder order_of(KernelInfo const& info, GemmProblem const& p, LaunchPolicy const& policy) {
  return {static_cast<int32_t>(ceil_div(p.m, info.tile_m)), static_cast<int32_t>(ceil_div(p.n, info.tile_n)),
          policy.raster, policy.swizzle};
}

DenseTiles tiles_of(KernelInfo const& info, GemmProblem const& p, LaunchPolicy const& policy) {
  return {order_of(info, p, policy), static_cast<int32_t>(p.batch), static_cast<int32_t>(ceil_div(p.k, info.tile_k))};
}

Decomposition decomposition(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  // A Stream-K schedule limited to one worker means data-parallel, on all workers.
  bool const limited = s.kind == ScheduleKind::kStreamK && s.max_sms > 1;
  ScheduleKind kind = s.kind;
  if (kind == ScheduleKind::kStreamK && s.max_sms == 1) kind = ScheduleKind::kDataParallel;
  int32_t const limit = limited ? s.max_sms : device.sms;
  if (p.ragged == Ragged::kM) {
    int64_t const tiles = RaggedTiles::most_along_m(p.batch, p.m, info.tile_m) * ceil_div(p.n, info.tile_n);
    return Decomposition::make(kind, static_cast<int32_t>(tiles), tiles_of(info, p, {}).k_tiles(), device.sms, 1);
  }
  return Decomposition::make(kind, tiles_of(info, p, {}), std::min(limit, device.sms), s.splits);
}

class HostKernel final : public Kernel {
 public:
  explicit HostKernel(KernelInfo info)
      : Kernel(std::move(info)), tile_product_(tile_product_of(this->info.a.format, this->info.d.format.type)) {}

  Status run(GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy, Device const& device,
             Buffers const& buffers, Queue const& queue) const override {
    Gemm gemm = this->gemm(p, s, policy, device, buffers);
    if (p.ragged != Ragged::kNone) {
      // Only here are the sizes known. The workspace is that of the most tiles that any have.
      gemm.ragged = ragged_tiles(p, policy, static_cast<int32_t const*>(buffers.group_sizes));
      gemm.decomposition = Decomposition::make(s.kind, *gemm.ragged, gemm.decomposition.workers, 1);
    }
    gemm.run(queue.executor);
    return {};
  }

 protected:
  std::optional<int64_t> launch_workspace_bytes(GemmProblem const& p, Schedule const& s,
                                                Device const& device) const override {
    return gemm(p, s, {}, device, {}).workspace_bytes();
  }

 private:
  RaggedTiles ragged_tiles(GemmProblem const& p, LaunchPolicy const& policy, int32_t const* sizes) const {
    auto const groups = static_cast<int32_t>(p.batch);
    if (p.ragged == Ragged::kM)
      return RaggedTiles::along_m(sizes, p.leading_rows, groups, p.m, std::min<int32_t>(info.tile_m, p.m),
                                  static_cast<int32_t>(ceil_div(p.n, info.tile_n)), tiles_of(info, p, policy).k_tiles(),
                                  policy.raster, policy.swizzle);
    return RaggedTiles::along_k(sizes, p.leading_rows, groups, p.k, info.tile_k, order_of(info, p, policy));
  }

  Gemm gemm(GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy, Device const& device,
            Buffers const& buffers) const {
    return {p,
            s.reduction,
            decomposition(p, s, device),
            tiles_of(info, p, policy),
            {},
            std::min<int64_t>(info.tile_m, p.m),
            std::min<int64_t>(info.tile_n, p.n),
            info.tile_k,
            tile_product_,
            buffers};
  }

  // Of float32, whatever widened products are stored as.
  static TileProduct tile_product_of(Format const& a, Type d) {
    if (!widens(a, d)) return tile_product(a.type, d);
    TileProduct product = tile_product(Type::kF32, Type::kF32);
    if (d != Type::kF32) product.store = tile_product(d, d).store;
    return product;
  }

  TileProduct const tile_product_;
};

struct Types {
  Type a, b, d;
};
std::vector<Types> all_types() {
  std::vector<Types> all{{Type::kF64, Type::kF64, Type::kF64}, {Type::kS8, Type::kS8, Type::kS32}};
  for (Type const a : {Type::kF32, Type::kBF16, Type::kF16}) {
    for (Type const b : {a, Type::kS4, Type::kU4, Type::kS8, Type::kU8, Type::kE4M3, Type::kE5M2, Type::kE2M1}) {
      all.push_back({a, b, Type::kF32});
      if (a != Type::kF32) all.push_back({a, b, a});
    }
  }
  for (Type const a : {Type::kE4M3, Type::kE5M2}) {
    for (Type const b : {Type::kE4M3, Type::kE5M2})
      all.push_back({a, b, Type::kF32}), all.push_back({a, b, Type::kBF16});
  }
  for (Type const d : {Type::kF32, Type::kBF16}) all.push_back({Type::kS8, Type::kS8, d});
  return all;
}

// Operands are rearranged for every tile that reads them. Large tiles amortize this: the second size reaches about nine
// tenths of the first one's speed, the third three quarters. Small tiles keep more threads busy.
constexpr int32_t kTiles[][3] = {{256, 512, 64}, {128, 128, 64}, {64, 64, 64}};

[[maybe_unused]] bool const registered = [] {
  for (Types const& types : all_types()) {
    for (Major const major_a : {Major::kRow, Major::kColumn}) {
      for (Major const major_b : {Major::kRow, Major::kColumn}) {
        for (auto const& [tile_m, tile_n, tile_k] : kTiles) {
          KernelInfo info{};
          info.scales_sums = widens(types.a, types.d);
          info.scaled = types.b != types.a && !info.scales_sums;
          info.name = std::string("host_") + name_of(types.a) + "_" +
                      (types.b != types.a ? name_of(types.b) + std::string("_") : "") + name_of(types.d) + "_" +
                      name_of(major_a)[0] + name_of(major_b)[0] + "_" + std::to_string(tile_m) + "x" +
                      std::to_string(tile_n) + "x" + std::to_string(tile_k);
          info.family = Family::kHost;
          info.a.format = types.a;
          info.b.format = types.b;
          info.d.format = types.d;
          info.a.major = major_a;
          info.b.major = major_b;
          info.a.align = info.b.align = info.d.align = 1;
          info.tile_m = tile_m;
          info.tile_n = tile_n;
          info.tile_k = tile_k;
          info.warp_schedule = WarpSchedule::kThreads;
          info.gathers = true;
          info.split_k_reductions =
              info.stream_k_reductions = {Reduction::kOrdered, Reduction::kAtomic, Reduction::kSeparate};
          Registration(std::make_unique<HostKernel>(std::move(info)));
        }
      }
    }
  }
  return true;
}();

}  // namespace

FamilyTraits const host::kTraits = [] {
  FamilyTraits traits{
      [](KernelInfo const&, GemmProblem const&, Schedule const&, Device const&) { return Status{}; },
      [](KernelInfo const&, GemmProblem const&, Schedule const&, Device const&) { return std::optional<int64_t>(); },
      decomposition, [](KernelInfo const&) { return PolicyFields{}; }};
  traits.oldest_arch = traits.newest_arch = 0;
  traits.worker = "thread";
  traits.math_unit = MathUnit::kThreads;
  traits.load_path = LoadPath::kThreads;
  return traits;
}();

}  // namespace jax_streamk
