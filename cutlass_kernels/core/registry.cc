#include "cutlass_kernels/core/registry.h"

#include <algorithm>

#include "cutlass_kernels/passes/repack.h"

namespace jax_streamk {

int32_t Format::bits() const {
  switch (type) {
    case Type::kF64: return 64;
    case Type::kF32:
    case Type::kS32: return 32;
    case Type::kBF16:
    case Type::kF16: return 16;
    case Type::kS8: return 8;
  }
  return 0;
}

Type accumulator_of(Format const& operand) {
  return operand == Type::kF64 ? Type::kF64 : operand == Type::kS8 ? Type::kS32 : Type::kF32;
}

char const* name_of(Role role) {
  switch (role) {
#define JAX_STREAMK_ROLE(role, member, words) \
  case Role::role: return words;
    JAX_STREAMK_ROLES(JAX_STREAMK_ROLE)
#undef JAX_STREAMK_ROLE
  }
  return "?";
}

char const* name_of(Family family) {
  switch (family) {
    case Family::kHost: return "host";
    case Family::kSm80: return "sm80";
    case Family::kSm90: return "sm90";
    case Family::kSkinny: return "skinny";
  }
  return "?";
}

char const* name_of(Type type) {
  switch (type) {
    case Type::kF64: return "f64";
    case Type::kF32: return "f32";
    case Type::kBF16: return "bf16";
    case Type::kF16: return "f16";
    case Type::kS8: return "s8";
    case Type::kS32: return "s32";
  }
  return "?";
}

char const* name_of(Major major) { return major == Major::kRow ? "row" : "column"; }

char const* name_of(Math math) {
  switch (math) {
    case Math::kNative: return "native";
    case Math::kTF32: return "tf32";
    case Math::kTF32x3: return "tf32x3";
  }
  return "?";
}

char const* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kOrdered: return "ordered";
    case Reduction::kAtomic: return "atomic";
    case Reduction::kSeparate: return "separate";
  }
  return "?";
}

char const* name_of(Ragged ragged) {
  switch (ragged) {
    case Ragged::kNone: return "none";
    case Ragged::kM: return "m";
    case Ragged::kK: return "k";
  }
  return "?";
}

char const* name_of(Activation activation) {
  switch (activation) {
    case Activation::kNone: return "none";
    case Activation::kRelu: return "relu";
    case Activation::kGelu: return "gelu";
    case Activation::kGeluTanh: return "gelu_tanh";
    case Activation::kSilu: return "silu";
    case Activation::kSigmoid: return "sigmoid";
    case Activation::kTanh: return "tanh";
  }
  return "?";
}

char const* name_of(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kDataParallel: return "data_parallel";
    case ScheduleKind::kSplitK: return "split_k";
    case ScheduleKind::kStreamK: return "stream_k";
  }
  return "?";
}

char const* name_of(Raster raster) { return raster == Raster::kAlongM ? "along_m" : "along_n"; }

char const* name_of(ClusterOrder order) {
  switch (order) {
    case ClusterOrder::kAsLaunched: return "as_launched";
    case ClusterOrder::kByGpc: return "by_gpc";
    case ClusterOrder::kSpread: return "spread";
  }
  return "?";
}

namespace {

std::vector<std::unique_ptr<Kernel>>& registry() {
  static std::vector<std::unique_ptr<Kernel>> kernels;
  return kernels;
}

bool contains(std::vector<Reduction> const& list, Reduction reduction) {
  return std::find(list.begin(), list.end(), reduction) != list.end();
}

void append(std::string& text, char const* part) { text += part; }
void append(std::string& text, int64_t part) { text += std::to_string(part); }

// check(), where refuse(parts of the reason ...) makes the Status of a refusal.
template <typename Refuse>
Status check_or(Refuse refuse, Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  KernelInfo const& info = kernel.info;
  if (p.batch < 1 || p.m < 1 || p.n < 1 || p.k < 1) return refuse("every extent must be at least 1");
  int64_t const limit = INT32_MAX;
  if (p.batch > limit || p.m > limit || p.n > limit || p.k > limit) return refuse("every extent must be below 2^31");
  if (p.inner_batch < 1 || p.batch % p.inner_batch != 0) return refuse("inner_batch must divide batch");
  bool const separate = info.family != Family::kHost && s.kind == ScheduleKind::kSplitK && s.splits > 1 &&
                        s.reduction == Reduction::kSeparate;
  Repack const repack = repack_of(info, p);
  Format const stored = separate ? accumulator_of(p.a.format) : p.d.format;
  bool const reduces_to_d = !separate || p.d.format == stored || p.d.format == p.a.format;
  if (p.a.format != info.a.format || p.b.format != info.b.format || stored != info.d.format || p.math != info.math ||
      !reduces_to_d)
    return refuse("it multiplies ", name_of(info.a.format.type), " by ", name_of(info.b.format.type), " into ",
                  name_of(info.d.format.type), " (", name_of(info.math), ")");
  if (p.inner_batch > 1 && (info.family != Family::kSkinny || separate))
    return refuse("matrices of its batch are one stride apart");
  bool const is_ragged = p.ragged != Ragged::kNone;
  if (info.family != Family::kHost && p.ragged != info.ragged)
    return refuse(is_ragged ? "it multiplies no groups of different sizes" : "it multiplies groups of different sizes");
  if (is_ragged && s.kind != ScheduleKind::kDataParallel)
    return refuse("a ragged product is data-parallel: its schedule is Auto() or DataParallel()");
  if (is_ragged && (p.epilogue.has_residual || p.inner_batch > 1))
    return refuse("a ragged product has neither a residual nor a nested batch");
  if (is_ragged && info.family != Family::kHost && p.batch > kMostGroups)
    return refuse("it has at most ", kMostGroups, " groups");
  if (p.gathered_rows < 0 || p.gathered_rows > limit) return refuse("the rows of A to gather must be below 2^31");
  if (p.gathered_rows > 0 && p.ragged != Ragged::kM) return refuse("rows are gathered only where groups cut them");
  if (p.gathered_rows > 0 && !info.gathers) return refuse("it gathers no rows");
  if (is_ragged && info.family == Family::kSm90 && (repack.a || repack.b || has_misaligned_d(p)))
    return refuse("rows of A, B and D of a ragged product must start at multiples of ", info.b.align, " elements");
  constexpr double kMostGathered = int64_t{1} << 36;  // 2^32 pieces of 16 bytes (Mainloop::gather)
  if (p.gathered_rows > 0 && info.family == Family::kSm90 && p.span(Role::kA) * size_of(p.a.format) > kMostGathered)
    return refuse("it gathers rows of at most 64 GiB");
  constexpr int64_t kLongestRun = 1 << 30;  // RowRun::kMost
  if (is_ragged && info.family != Family::kHost && (p.ragged == Ragged::kM ? p.m : p.k) > kLongestRun)
    return refuse("groups may cut at most 2^30 rows, or of k");
  if (p.epilogue.gated != info.gated)
    return refuse(info.gated ? "it multiplies by two matrices at once" : "it multiplies by one matrix only");
  if (p.epilogue.gated && (p.epilogue.has_residual || p.epilogue.alpha != 1 || p.epilogue.up_offset < 0))
    return refuse("a gate has neither residual nor alpha, nor is the second B before the first");
  if (p.epilogue.gated && (repack.a || repack.b || p.epilogue.up_offset % info.b.align != 0 || has_misaligned_d(p)))
    return refuse("rows of A, of either B, and of D must start at multiples of ", info.b.align, " elements");
  if (info.family != Family::kHost && p.is_joined() != info.joined)
    return refuse(info.joined ? "it multiplies by two or three matrices" : "it multiplies by one matrix only");
  if (p.is_joined() || p.third_column != 0) {
    int64_t const third = p.third_column != 0 ? p.third_column : p.n, tile = info.swap_ab ? info.tile_m : info.tile_n;
    if (p.second_column < 1 || third <= p.second_column || p.n < third + (p.third_column != 0))
      return refuse("columns of the second and of the third matrix must follow those before");
    if (p.batch > 1 || is_ragged || p.epilogue.gated || s.kind != ScheduleKind::kDataParallel)
      return refuse("a joined product is data-parallel, and has neither batch, groups nor gate");
    if (p.b.major == Major::kRow && p.b.ld != p.second_column)
      return refuse("rows of the matrices of a joined product must follow each other directly");
    if (info.family != Family::kHost && (p.second_column % tile != 0 || p.third_column % tile != 0))
      return refuse("the first matrices of a joined product must have whole tiles of ", tile, " columns");
    if (info.family != Family::kHost && (repack.a || repack.b || has_misaligned_d(p)))
      return refuse("rows of A, of each B, and of D must start at multiples of ", info.b.align, " elements");
  }
  if (repack.problem.a.major != info.a.major || repack.problem.b.major != info.b.major)
    return refuse("A must be ", name_of(info.a.major), "-major and B ", name_of(info.b.major), "-major");
  if (repack.part > 0 && !(repack.a && repack.b)) return refuse("copies of A and B would be too large");
  bool const tma = info.family == Family::kSm90;
  auto const refuse_alignment = [&](Role role, KernelOperand const& asked) {
    return refuse("the contiguous extent and the strides of ", name_of(role), " must be multiples of ", asked.align,
                  " elements");
  };
  auto const aligned = [&](Role role, KernelOperand const& asked) {
    return is_aligned(asked.align, tma, p.operand(role), p.batch);
  };
  if (!repack.a && !aligned(Role::kA, info.a)) return refuse_alignment(Role::kA, info.a);
  if (!repack.b && !aligned(Role::kB, info.b)) return refuse_alignment(Role::kB, info.b);
  if (!separate && !aligned(Role::kD, info.d)) return refuse_alignment(Role::kD, info.d);
  EpilogueOps const& epilogue = p.epilogue;
  if (epilogue.activation < Activation::kNone || epilogue.activation > Activation::kTanh)
    return refuse("there is no activation ", static_cast<int32_t>(epilogue.activation));
  if (p.d.format == Type::kS32 && !epilogue.is_plain()) return refuse("an epilogue needs D in floating point");
  if (!separate && epilogue.has_bias && p.batch > 1 && epilogue.batch_stride_bias % info.d.align != 0)
    return refuse("the batch stride of the bias must be a multiple of ", info.d.align, " elements");
  if ((info.family == Family::kHost) != (device.arch == 0))
    return refuse("it runs on ", info.family == Family::kHost ? "a CPU" : "a GPU");

  int64_t const k_tiles = (repack.problem.k + info.tile_k - 1) / info.tile_k;
  if (s.kind == ScheduleKind::kSplitK) {
    if (s.splits < 1) return refuse("splits must be at least 1");
    if (s.splits > k_tiles)
      return refuse("splits=", s.splits, " exceeds its ", k_tiles, " k-tiles of ", info.tile_k, ": it must be at most ",
                    k_tiles);
    if (s.splits > 1 && !contains(info.split_k_reductions, s.reduction))
      return refuse("it has no split-K with reduction \"", name_of(s.reduction), "\"");
  }
  if (s.kind == ScheduleKind::kStreamK && s.max_sms != 1 && !contains(info.stream_k_reductions, s.reduction))
    return refuse("it has no Stream-K with reduction \"", name_of(s.reduction), "\"");
  // The decomposition counts in 32 bits.
  bool const swap = info.swap_ab;
  int64_t const n = dense(p).n;
  int64_t tiles_m = ((swap ? n : p.m) + info.tile_m - 1) / info.tile_m + info.cluster_m;
  int64_t tiles_n = ((swap ? p.m : n) + info.tile_n - 1) / info.tile_n + info.cluster_n;
  int64_t batch = p.batch;
  if (p.ragged == Ragged::kM) {
    int32_t const tile = swap ? info.tile_n : info.tile_m;
    (swap ? tiles_n : tiles_m) = RaggedTiles::most_along_m(batch, p.m, tile);
    batch = 1;
  }
  if (tiles_m * tiles_n >= limit / batch || !Decomposition::fits(batch * tiles_m * tiles_n, k_tiles, device.sms,
                                                                 s.kind == ScheduleKind::kSplitK ? s.splits : 1))
    return refuse("it has too many tiles or MAC iterations to count in 32 bits");
  // Coordinates are 32-bit too, including those of a tile or cluster that reaches beyond D.
  if (tma && std::max(tiles_m * info.tile_m, tiles_n * info.tile_n) > limit)
    return refuse("its last tile would end beyond 2^31");
  return kernel.can_implement(p, s, device);
}

}  // namespace

Registration::Registration(std::unique_ptr<Kernel> kernel) { registry().push_back(std::move(kernel)); }

std::vector<std::unique_ptr<Kernel>> const& kernels() {
  static bool const sorted = [] {
    std::sort(registry().begin(), registry().end(),
              [](auto const& x, auto const& y) { return x->info.name < y->info.name; });
    return true;
  }();
  (void)sorted;
  return registry();
}

Kernel const* find_kernel(std::string_view name) {
  auto const& all = kernels();
  auto const at = std::lower_bound(all.begin(), all.end(), name,
                                   [](auto const& kernel, std::string_view key) { return kernel->info.name < key; });
  return at != all.end() && (*at)->info.name == name ? at->get() : nullptr;
}

std::string cannot_run(KernelInfo const& info, GemmProblem const& p) {
  return info.name + " cannot run (batch, m, n, k) = (" + std::to_string(p.batch) + ", " + std::to_string(p.m) + ", " +
         std::to_string(p.n) + ", " + std::to_string(p.k) + "): ";
}

Status check(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  auto const refuse = [&](auto... why) {
    std::string message = cannot_run(kernel.info, p);
    (append(message, why), ...);
    return Status::invalid(std::move(message));
  };
  return check_or(refuse, kernel, p, s, device);
}

bool can_run(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  auto const refuse = [](auto...) { return Status::invalid(""); };
  return check_or(refuse, kernel, p, s, device).ok();
}

}  // namespace jax_streamk
