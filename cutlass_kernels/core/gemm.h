// The types that every family, the FFI handlers and the Python module share: a problem, a schedule, what a kernel is.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cutlass_kernels/core/decomposition.h"
#include "cutlass_kernels/core/gemm_fields.h"

namespace jax_streamk {

// How the elements of an operand are stored.
struct Format {
  Type type = Type::kF32;

  constexpr Format() = default;
  constexpr Format(Type type) : type(type) {}
  int32_t bits() const;  // of an element
  friend constexpr bool operator==(Format const& x, Format const& y) { return x.type == y.type; }
  friend constexpr bool operator!=(Format const& x, Format const& y) { return !(x == y); }
};

// How blocks of `rows` x `columns` elements of an operand share a scale: an element x stands for (x - zero) * scale +
// offset. Zero points and offsets, where there are any, have blocks of the same size.
struct Scales {
  int64_t rows = 0, columns = 0;  // 0: no scales
  Type scale = Type::kF32, zero = Type::kF32, offset = Type::kF32;
  bool has_zero = false, has_offset = false;

  constexpr bool any() const { return rows > 0; }
};

inline int64_t size_of(Format const& format) { return format.bits() / 8; }  // of whole bytes
inline int64_t bytes_of(Format const& format, int64_t elements) { return (elements * format.bits() + 7) / 8; }
Type accumulator_of(Format const& operand);

// What an operand is in a product (gemm_fields.h lists them).
enum class Role : int32_t {
#define JAX_STREAMK_ROLE(role, member, words) role,
  JAX_STREAMK_ROLES(JAX_STREAMK_ROLE)
#undef JAX_STREAMK_ROLE
};
inline constexpr Role kRoles[] = {
#define JAX_STREAMK_ROLE(role, member, words) Role::role,
    JAX_STREAMK_ROLES(JAX_STREAMK_ROLE)
#undef JAX_STREAMK_ROLE
};
char const* name_of(Role role);  // as messages name it

// How an operand lies in memory. Strides are in elements; a batch stride of 0 broadcasts it. The leading dimension is
// the stride of the index that is not contiguous. In a nested batch (GemmProblem), batch_stride is that of the outer
// one.
struct Layout {
  Format format;
  Major major = Major::kRow;
  int64_t ld = 0;
  int64_t batch_stride = 0, inner_stride = 0;
  Scales scales = {};
};

// An operand with its extents, which follow from its role and the problem's extents.
struct Operand : Layout {
  int64_t rows = 0, columns = 0;

  int64_t contiguous() const { return major == Major::kRow ? columns : rows; }
  int64_t lines() const { return major == Major::kRow ? rows : columns; }  // number of contiguous lines, ld apart
};

// What is done once to a finished sum of products, in the accumulator's type: activation(alpha * sum + beta * residual
// + bias). The bias has n contiguous elements of D's format for each batch, batch_stride_bias apart (0: all batches
// share them); the residual has D's format and layout.
//
// With a gate, activation(sum + bias) * (second sum + second bias). The second B has the format and layout of B, as the
// second bias has of the first: each is an operand of its own, or, stacked, begins up_offset elements after B and n
// after the bias.
struct EpilogueOps {
  Activation activation = Activation::kNone;
  bool has_bias = false, has_residual = false;
  double alpha = 1, beta = 1;
  int64_t batch_stride_bias = 0;
  bool gated = false;
  int64_t up_offset = 0;  // 0: not stacked

  bool is_plain() const {
    return activation == Activation::kNone && !has_bias && !has_residual && alpha == 1 && !gated;
  }
  bool is_pair() const { return gated && up_offset == 0; }
  bool is_stacked() const { return gated && up_offset != 0; }
};

// D[l] = epilogue(A[l] @ B[l]) for l in [0, batch). D is always kRow.
//
// The batch may be nested: l is at l / inner_batch * batch_stride + l % inner_batch * inner_stride, as the heads of
// texts are in a cache of (text, position, head, size).
//
// A ragged product has one A, and `batch` groups: the group_sizes, int32 numbers on the device, cut the rows of A and D
// (kM) or the K of A and B (kK) into consecutive runs, one for each B (kM) or D (kK). Sizes are at least 0 and their
// sum at most the extent. Rows of D in no group are zero, and those of A are not read. With leading_rows a size comes
// before the first group's: that of a run that is in no group.
//
// With gathered_rows (kM only) A has that many rows, and row i of the product is row indices[i] of A, of m int32
// numbers on the device. Numbers of no row stand for the nearest one.
//
// The elements of B may have scales (Scales); a kernel multiplies what they stand for, in A's type. Those of A may have
// scales, too, if both are of eight bits: a kernel multiplies them as they are, and sums by scales.
//
// The B of a joined product is two or three matrices side by side that lie apart: its columns from second_column and,
// if that is not 0, from third_column on are of a matrix of their own, whose rows or columns follow each other
// directly.
//
// With `invariant` the bits of an element of D depend on its row of A and its column of B alone, not on how many rows
// (kM) or columns (kN) there are, nor on its place among them: plans are of one sum order (planner/sum_order.h), and
// the host's kernels multiply any number of rows alike.
struct GemmProblem {
  int64_t batch = 1, m = 0, n = 0, k = 0;
  int64_t inner_batch = 1;
  Layout a, b, d;
  Math math = Math::kNative;
  EpilogueOps epilogue;
  Ragged ragged = Ragged::kNone;
  bool leading_rows = false;
  int64_t gathered_rows = 0;
  int64_t second_column = 0, third_column = 0;  // 0: B is one matrix, or two
  Invariant invariant = Invariant::kNone;

  bool is_joined() const { return second_column != 0; }

  // Of the matrices of B, the one that has this column: its operand and its columns, [first, end).
  struct Matrix {
    Role role;
    int64_t first, end;
  };
  Matrix matrix_of(int64_t column) const {
    if (!is_joined() || column < second_column) return {Role::kB, 0, is_joined() ? second_column : n};
    int64_t const end = third_column != 0 ? third_column : n;
    return column < end ? Matrix{Role::kUp, second_column, end} : Matrix{Role::kThird, third_column, n};
  }
  // Its elements from a line to the next.
  int64_t ld_of(Matrix const& x) const { return is_joined() && b.major == Major::kRow ? x.end - x.first : b.ld; }

  bool has(Role role) const {
    switch (role) {
      case Role::kUp: return epilogue.is_pair() || is_joined();
      case Role::kThird: return third_column != 0;
      case Role::kBias: return epilogue.has_bias;
      case Role::kUpBias: return epilogue.has_bias && epilogue.is_pair();
      case Role::kResidual: return epilogue.has_residual;
      case Role::kGroupSizes: return ragged != Ragged::kNone;
      case Role::kIndices: return gathered_rows > 0;
      case Role::kScale: return b.scales.any();
      case Role::kZero: return b.scales.has_zero;
      case Role::kOffset: return b.scales.has_offset;
      case Role::kUpScale: return b.scales.any() && epilogue.is_pair();
      case Role::kUpZero: return b.scales.has_zero && epilogue.is_pair();
      case Role::kUpOffset: return b.scales.has_offset && epilogue.is_pair();
      case Role::kScaleOfA: return a.scales.any();
      default: return true;
    }
  }

  Operand operand(Role role) const {
    switch (role) {
      case Role::kA: return {a, gathered_rows > 0 ? gathered_rows : m, k};
      case Role::kB:
      case Role::kUp:
      case Role::kThird: {
        Matrix const matrix = matrix_of(role == Role::kThird               ? third_column
                                        : role == Role::kUp && is_joined() ? second_column
                                                                           : 0);
        Layout layout = b;
        layout.ld = ld_of(matrix);
        return {layout, k, matrix.end - matrix.first};
      }
      case Role::kBias:
      case Role::kUpBias: return {{d.format, Major::kRow, 0, epilogue.batch_stride_bias}, 1, n};
      case Role::kGroupSizes: return {{Type::kS32}, 1, batch + leading_rows};
      case Role::kIndices: return {{Type::kS32}, 1, m};
      case Role::kScale:
      case Role::kUpScale: return per_block(b, k, n, b.scales.scale);
      case Role::kZero:
      case Role::kUpZero: return per_block(b, k, n, b.scales.zero);
      case Role::kOffset:
      case Role::kUpOffset: return per_block(b, k, n, b.scales.offset);
      case Role::kScaleOfA: return per_block(a, m, k, a.scales.scale);
      case Role::kD:
      case Role::kResidual: break;
    }
    return {d, m, n};
  }

  // Numbers for each block of an operand: dense, in its majorness, and as many for each matrix of a batch.
  static Operand per_block(Layout const& of, int64_t rows, int64_t columns, Type type) {
    Scales const& blocks = of.scales;
    if (!blocks.any()) return {};
    Operand x{{type, of.major}, rows / blocks.rows, columns / blocks.columns};
    x.ld = x.contiguous();
    x.batch_stride = of.batch_stride == 0 ? 0 : x.rows * x.columns;
    return x;
  }

  // Elements from an operand's first to its last, both of stacked ones included. In floating point, since products of
  // unbounded strides may not fit an integer.
  double span(Role role) const {
    Operand const x = operand(role);
    double const more = !epilogue.is_stacked() ? 0
                        : role == Role::kB     ? static_cast<double>(epilogue.up_offset)
                        : role == Role::kBias  ? static_cast<double>(n)
                                               : 0;
    double const outer = batch / inner_batch - 1, inner = inner_batch - 1;
    return outer * x.batch_stride + inner * x.inner_stride + static_cast<double>(x.lines() - 1) * x.ld +
           x.contiguous() + more;
  }
};

// A dense product of as many MAC iterations: of a gated problem, its product, with twice the columns; of a joined one,
// the product by one matrix; of a ragged one, a batch of groups of one size. `tile` is the extent of a tile along the
// ragged dimension. A group lacks half a tile of K, or a quarter of a tile of rows, which its tiles share equally
// (ragged_table.cuh).
inline GemmProblem dense(GemmProblem p, int32_t tile = 1) {
  if (p.epilogue.gated) p.n *= 2, p.epilogue.gated = false;
  p.second_column = p.third_column = 0;
  if (p.ragged == Ragged::kNone) return p;
  int64_t& extent = p.ragged == Ragged::kM ? p.m : p.k;
  p.batch = p.batch < extent ? p.batch : extent;
  extent = (extent + p.batch - 1) / p.batch + tile / (p.ragged == Ragged::kM ? 4 : 2);
  p.a.batch_stride = extent * p.a.ld;
  Layout& other = p.ragged == Ragged::kM ? p.d : p.b;
  other.batch_stride = extent * other.ld;
  p.ragged = Ragged::kNone, p.gathered_rows = 0;
  return p;
}

struct Schedule {
  ScheduleKind kind = ScheduleKind::kDataParallel;
  int32_t splits = 1;
  Reduction reduction = Reduction::kOrdered;
  int32_t max_sms = 0;  // Stream-K: the most SMs to use; 0 for all of them, 1 for data-parallel
};

// The choices of a launch besides its kernel and its schedule (planner/policy_choice.h explains them). A and B are the
// problem's, even if the kernel swaps them.
struct LaunchPolicy {
  Raster raster = Raster::kAlongM;
  int32_t swizzle = 1;                                // tiles across a panel of TileOrder
  bool evict_first_a = false, evict_first_b = false;  // whether loads mark the operand as first to leave L2
  // Stages per CTA that loads leave empty, in whole waves and in a partial last wave.
  int32_t held_back = 0, held_back_last = 0;
  int32_t idle_clusters = 0;  // launched in addition, to exit at once
  ClusterOrder cluster_order = ClusterOrder::kAsLaunched;
  // Whether TMA may read an operand up to the end of its last tile, if its allocation extends that far.
  bool extend_a = false, extend_b = false;
};

// The device of a plan. `arch` is 10 * major + minor of the compute capability, 0 for the host; `sms` is the number of
// SMs, or of CPU threads on the host; `under_way` is the most bytes that should be in flight of an operand that streams
// from memory (0: no limit).
struct Device {
  int32_t arch = 0;
  int32_t sms = 1;
  int64_t under_way = 0;
};

struct Status {
  enum class Code { kOk, kInvalidArgument, kFailedPrecondition, kInternal } code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
  static Status precondition(std::string message) { return {Code::kFailedPrecondition, std::move(message)}; }
  static Status internal(std::string message) { return {Code::kInternal, std::move(message)}; }
};

// What a kernel requires of an operand: multiples of `align` elements for base, leading dimension and batch stride.
struct KernelOperand {
  Format format;
  Major major = Major::kRow;
  int32_t align = 1;
};

struct KernelInfo {
  std::string name;
  Family family = Family::kHost;
  KernelOperand a, b, d;
  Math math = Math::kNative;
  int32_t tile_m = 1, tile_n = 1, tile_k = 1;  // of the kernel's own GEMM: with swap_ab, tile_m is along n
  int32_t cluster_m = 1, cluster_n = 1;
  int32_t stages = 1;
  WarpSchedule warp_schedule = WarpSchedule::kThreads;
  bool swap_ab = false;
  // Which schedules the kernel runs besides data-parallel. A CUDA kernel that lists kSeparate writes accumulators: the
  // reduction pass converts them to the problem's type of D.
  std::vector<Reduction> split_k_reductions, stream_k_reductions;
  int32_t threads = 1;
  int64_t shared_memory = 0;  // bytes per CTA
  // Tensor cores truncate their sums. For a float32 result they sum runs of K of this length, which are then added in
  // float32. 0: they sum all of K.
  int32_t promotion_k = 0;
  // Whether it runs gated problems, and only these. A tile then has tile_m / 2 columns of each B (with swap_ab).
  bool gated = false;
  // The ragged problems that it runs, and only these; the host's kernels run all.
  Ragged ragged = Ragged::kNone;
  bool gathers = false;      // whether it also runs ragged problems with gathered_rows
  bool joined = false;       // whether it runs joined problems, and only these; the host's kernels run all
  bool scaled = false;       // whether its B has scales
  bool scales_sums = false;  // whether it multiplies sums by the scales that A, B or both may have
};

// The promotion_k of kernels that promote. Truncation loses about 1e-9 of a sum per product; TF32 operands have errors
// of 2^-12 themselves, so their runs may be longer.
constexpr int32_t promotion_k_of(Format const& operand) { return operand == Type::kF32 ? 256 : 128; }

// Addresses by role; null if the call lacks the operand.
struct Buffers {
  void const* a;
  void const* b;
  void* d;
  void* workspace;  // at least workspace_bytes(), aligned to kWorkspaceAlignment
  void const* up = nullptr;
  void const* bias = nullptr;
  void const* up_bias = nullptr;
  void const* third = nullptr;
  void const* residual = nullptr;
  void const* group_sizes = nullptr;
  void const* indices = nullptr;
  void const* scale = nullptr;
  void const* zero = nullptr;
  void const* offset = nullptr;
  void const* scale_of_up = nullptr;
  void const* zero_of_up = nullptr;
  void const* offset_of_up = nullptr;
  void const* scale_of_a = nullptr;

  void set(Role role, void* address) {
    switch (role) {
#define JAX_STREAMK_ROLE(role, member, words) \
  case Role::role: member = address; break;
      JAX_STREAMK_ROLES(JAX_STREAMK_ROLE)
#undef JAX_STREAMK_ROLE
    }
  }
};
inline constexpr int64_t kWorkspaceAlignment = 256;

// Rounds up to whole workspace alignments.
constexpr int64_t align_workspace(int64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// Groups that a ragged CUDA kernel may have: its CTAs hold a table of them.
inline constexpr int32_t kMostGroups = 512;

// Bytes of the counter by which a ragged kernel's CTAs take tiles. Where groups have at most one tile of rows on
// average, they take turns: few CTAs read the same matrix, and zeroing the counter takes 2 us.
inline int64_t counter_bytes(KernelInfo const& info, GemmProblem const& p) {
  int64_t const tile_rows = info.swap_ab ? info.tile_n : info.tile_m;
  bool const counts = info.ragged == Ragged::kK || (info.ragged == Ragged::kM && p.m > p.batch * tile_rows);
  return counts ? align_workspace(sizeof(uint32_t)) : 0;
}

}  // namespace jax_streamk
