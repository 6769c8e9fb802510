// What kernels refuse, and why.
#include <algorithm>
#include <optional>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {
namespace {

constexpr int64_t kLimit = INT32_MAX;

bool contains(std::vector<Reduction> const& list, Reduction reduction) {
  return std::find(list.begin(), list.end(), reduction) != list.end();
}

void append(std::string& text, char const* part) { text += part; }
void append(std::string& text, int64_t part) { text += std::to_string(part); }

// check(), where refuse(parts of the reason ...) makes the Status of a refusal. Each of the checks is of one question,
// in their order: messages name the first that a problem fails.
template <typename Refuse>
class Checks {
 public:
  Checks(Refuse refuse, Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device)
      : refuse_(refuse), info_(kernel.info), p_(p), s_(s), device_(device) {}

  Status run() {
    if (Status status = extents(); !status.ok()) return status;
    launch_.emplace(info_, p_, s_);  // of extents that are positive
    for (auto check : {&Checks::types, &Checks::groups, &Checks::gathered_rows, &Checks::runs, &Checks::gate,
                       &Checks::joined_matrices, &Checks::layouts, &Checks::scales, &Checks::epilogue,
                       &Checks::schedule, &Checks::counts, &Checks::passes}) {
      if (Status status = (this->*check)(); !status.ok()) return status;
    }
    return traits_of(info_).can_launch(info_, launch_->as_batch(), launch_->schedule, device_);
  }

 private:
  bool on_cpu() const { return traits_of(info_).is_host(); }
  bool loads_by_tma() const { return traits_of(info_).loads_by_tma(); }
  bool is_ragged() const { return p_.ragged != Ragged::kNone; }
  bool is_unfit() const { return launch_->copies.any() || has_misaligned_d(p_); }

  Status extents() {
    if (p_.batch < 1 || p_.m < 1 || p_.n < 1 || p_.k < 1) return refuse_("every extent must be at least 1");
    if (p_.batch > kLimit || p_.m > kLimit || p_.n > kLimit || p_.k > kLimit)
      return refuse_("every extent must be below 2^31");
    if (p_.inner_batch < 1 || p_.batch % p_.inner_batch != 0) return refuse_("inner_batch must divide batch");
    return {};
  }

  Status types() {
    Format const stored = launch_->separate ? accumulator_of(p_.a.format) : p_.d.format;
    bool const reduces_to_d = !launch_->separate || p_.d.format == stored || p_.d.format == p_.a.format;
    if (p_.a.format != info_.a.format || p_.b.format != info_.b.format || stored != info_.d.format ||
        p_.math != info_.math || !reduces_to_d)
      return refuse_("it multiplies ", name_of(info_.a.format.type), " by ", name_of(info_.b.format.type), " into ",
                     name_of(info_.d.format.type), " (", name_of(info_.math), ")");
    if (p_.inner_batch > 1 && (!traits_of(info_).nests_batches || launch_->separate))
      return refuse_("matrices of its batch are one stride apart");
    return {};
  }

  Status groups() {
    if (!on_cpu() && p_.ragged != info_.ragged)
      return refuse_(is_ragged() ? "it multiplies no groups of different sizes"
                                 : "it multiplies groups of different sizes");
    if (!is_ragged()) return {};
    if (s_.kind != ScheduleKind::kDataParallel)
      return refuse_("a ragged product is data-parallel: its schedule is Auto() or DataParallel()");
    if (p_.epilogue.has_residual || p_.inner_batch > 1)
      return refuse_("a ragged product has neither a residual nor a nested batch");
    if (!on_cpu() && p_.batch > kMostGroups) return refuse_("it has at most ", kMostGroups, " groups");
    return {};
  }

  Status gathered_rows() {
    if (p_.gathered_rows < 0 || p_.gathered_rows > kLimit) return refuse_("the rows of A to gather must be below 2^31");
    if (p_.gathered_rows > 0 && p_.ragged != Ragged::kM) return refuse_("rows are gathered only where groups cut them");
    if (p_.gathered_rows > 0 && !info_.gathers) return refuse_("it gathers no rows");
    return {};
  }

  Status runs() {
    if (is_ragged() && loads_by_tma() && is_unfit())
      return refuse_("rows of A, B and D of a ragged product must start at multiples of ", info_.b.align, " elements");
    constexpr double kMostGathered = int64_t{1} << 36;  // 2^32 pieces of 16 bytes (Mainloop::gather)
    if (p_.gathered_rows > 0 && loads_by_tma() && p_.span(Role::kA) * size_of(p_.a.format) > kMostGathered)
      return refuse_("it gathers rows of at most 64 GiB");
    constexpr int64_t kLongestRun = 1 << 30;  // RowRun::kMost
    if (is_ragged() && !on_cpu() && (p_.ragged == Ragged::kM ? p_.m : p_.k) > kLongestRun)
      return refuse_("groups may cut at most 2^30 rows, or of k");
    return {};
  }

  Status gate() {
    EpilogueOps const& epilogue = p_.epilogue;
    if (epilogue.gated != info_.gated)
      return refuse_(info_.gated ? "it multiplies by two matrices at once" : "it multiplies by one matrix only");
    if (!epilogue.gated) return {};
    if (epilogue.has_residual || epilogue.alpha != 1 || epilogue.up_offset < 0)
      return refuse_("a gate has neither residual nor alpha, nor is the second B before the first");
    if (is_unfit() || epilogue.up_offset % info_.b.align != 0)
      return refuse_("rows of A, of either B, and of D must start at multiples of ", info_.b.align, " elements");
    return {};
  }

  Status joined_matrices() {
    if (!on_cpu() && p_.is_joined() != info_.joined)
      return refuse_(info_.joined ? "it multiplies by two or three matrices" : "it multiplies by one matrix only");
    if (!p_.is_joined() && p_.third_column == 0) return {};
    int64_t const third = p_.third_column != 0 ? p_.third_column : p_.n;
    int64_t const tile = info_.swap_ab ? info_.tile_m : info_.tile_n;
    if (p_.second_column < 1 || third <= p_.second_column || p_.n < third + (p_.third_column != 0))
      return refuse_("columns of the second and of the third matrix must follow those before");
    if (p_.batch > 1 || is_ragged() || p_.epilogue.gated || s_.kind != ScheduleKind::kDataParallel)
      return refuse_("a joined product is data-parallel, and has neither batch, groups nor gate");
    if (p_.b.major == Major::kRow && p_.b.ld != p_.second_column)
      return refuse_("rows of the matrices of a joined product must follow each other directly");
    if (!on_cpu() && (p_.second_column % tile != 0 || p_.third_column % tile != 0))
      return refuse_("the first matrices of a joined product must have whole tiles of ", tile, " columns");
    if (!on_cpu() && is_unfit())
      return refuse_("rows of A, of each B, and of D must start at multiples of ", info_.b.align, " elements");
    return {};
  }

  Status layouts() {
    if (launch_->problem.a.major != info_.a.major || launch_->problem.b.major != info_.b.major)
      return refuse_("A must be ", name_of(info_.a.major), "-major and B ", name_of(info_.b.major), "-major");
    if (launch_->copies.part > 0 && !(launch_->copies.a && launch_->copies.b))
      return refuse_("copies of A and B would be too large");
    if (Status status = alignment(Role::kA, info_.a, launch_->copies.a); !status.ok()) return status;
    if (Status status = alignment(Role::kB, info_.b, launch_->copies.b); !status.ok()) return status;
    return alignment(Role::kD, info_.d, launch_->separate);
  }

  Status alignment(Role role, KernelOperand const& asked, bool is_copied) {
    if (is_copied || is_aligned(asked.align, loads_by_tma(), p_.operand(role), p_.batch)) return {};
    return refuse_("the contiguous extent and the strides of ", name_of(role), " must be multiples of ", asked.align,
                   " elements");
  }

  Status scales() {
    Scales const& scales = p_.b.scales;
    if (info_.scales_sums) return scales_of_sums();
    if (p_.a.scales.any()) return refuse_("A has no scales");
    if (scales.any() != info_.scaled)
      return refuse_(info_.scaled ? "B must have scales" : "it multiplies numbers without scales");
    if (!scales.any()) return {};
    if (scales.rows < 1 || scales.columns < 1 || p_.k % scales.rows != 0 || p_.n % scales.columns != 0)
      return refuse_("blocks that share a scale must divide B");
    for (Type const type : {scales.scale, scales.zero, scales.offset})
      if (type == Type::kF64) return refuse_("it has no scales, zero points or offsets of f64");
    if (p_.inner_batch > 1 || p_.ragged == Ragged::kK || p_.is_joined() || p_.epilogue.is_stacked())
      return refuse_("B with scales is neither cut along K, nor joined, stacked, or in a nested batch");
    return {};
  }

  // Each operand may have some, or none.
  Status scales_of_sums() {
    for (Role const role : {Role::kA, Role::kB}) {
      Operand const x = p_.operand(role);
      Scales const& scales = x.scales;
      if (!scales.any()) continue;
      if (scales.rows < 1 || scales.columns < 1 || x.rows % scales.rows != 0 || x.columns % scales.columns != 0)
        return refuse_("blocks that share a scale must divide ", name_of(role));
      if (scales.has_zero || scales.has_offset) return refuse_("sums of products have neither zero points nor offsets");
      if (scales.scale == Type::kF64) return refuse_("it has no scales of f64");
      if (p_.inner_batch > 1) return refuse_("operands with scales are not in a nested batch");
      if (role == Role::kA && p_.gathered_rows > 0) return refuse_("rows of an A with scales are not gathered");
    }
    return {};
  }

  Status epilogue() {
    EpilogueOps const& epilogue = p_.epilogue;
    int32_t const activation = static_cast<int32_t>(epilogue.activation);
    if (activation < 0 || activation >= kCount<Activation>) return refuse_("there is no activation ", activation);
    if (p_.d.format == Type::kS32 && !epilogue.is_plain()) return refuse_("an epilogue needs D in floating point");
    if (!launch_->separate && epilogue.has_bias && p_.batch > 1 && epilogue.batch_stride_bias % info_.d.align != 0)
      return refuse_("the batch stride of the bias must be a multiple of ", info_.d.align, " elements");
    return {};
  }

  Status schedule() {
    if (on_cpu() != (device_.arch == 0)) return refuse_("it runs on ", on_cpu() ? "a CPU" : "a GPU");
    FamilyTraits const& family = traits_of(info_);
    if (device_.arch < family.oldest_arch || device_.arch > family.newest_arch)
      return Status::precondition(info_.name + " is compiled for sm_" + std::to_string(family.oldest_arch) +
                                  (family.oldest_arch < family.newest_arch ? " or newer" : "a") +
                                  "; the device is sm_" + std::to_string(device_.arch));
    if (s_.kind == ScheduleKind::kSplitK) {
      if (s_.splits < 1) return refuse_("splits must be at least 1");
      if (s_.splits > k_tiles())
        return refuse_("splits=", s_.splits, " exceeds its ", k_tiles(), " k-tiles of ", info_.tile_k,
                       ": it must be at most ", k_tiles());
      if (s_.splits > 1 && !contains(info_.split_k_reductions, s_.reduction))
        return refuse_("it has no split-K with reduction \"", name_of(s_.reduction), "\"");
    }
    if (s_.kind == ScheduleKind::kStreamK && s_.max_sms != 1 && !contains(info_.stream_k_reductions, s_.reduction))
      return refuse_("it has no Stream-K with reduction \"", name_of(s_.reduction), "\"");
    return {};
  }

  // The decomposition counts in 32 bits.
  Status counts() {
    bool const swap = info_.swap_ab;
    int64_t const n = dense(p_).n;
    int64_t tiles_m = ((swap ? n : p_.m) + info_.tile_m - 1) / info_.tile_m + info_.cluster_m;
    int64_t tiles_n = ((swap ? p_.m : n) + info_.tile_n - 1) / info_.tile_n + info_.cluster_n;
    int64_t batch = p_.batch;
    if (p_.ragged == Ragged::kM) {
      int32_t const tile = swap ? info_.tile_n : info_.tile_m;
      (swap ? tiles_n : tiles_m) = RaggedTiles::most_along_m(batch, p_.m, tile);
      batch = 1;
    }
    int32_t const splits = s_.kind == ScheduleKind::kSplitK ? s_.splits : 1;
    if (tiles_m * tiles_n >= kLimit / batch ||
        !Decomposition::fits(batch * tiles_m * tiles_n, k_tiles(), device_.sms, splits))
      return refuse_("it has too many tiles or MAC iterations to count in 32 bits");
    // Coordinates are 32-bit too, including those of a tile or cluster that reaches beyond D.
    if (loads_by_tma() && std::max(tiles_m * info_.tile_m, tiles_n * info_.tile_n) > kLimit)
      return refuse_("its last tile would end beyond 2^31");
    return {};
  }

  // Those before and after the kernel.
  Status passes() {
    if (!can_copy(p_, launch_->copies))
      return refuse_("the operands to copy have 2^31 or more pieces of 1 KiB of a row");
    GemmProblem const& q = launch_->problem;
    if (launch_->separate && q.batch * q.d.batch_stride >= kLimit)
      return refuse_("D has too many elements for a separate reduction, which takes fewer than 2^31");
    return {};
  }

  int64_t k_tiles() const { return launch_->k_tiles(info_); }

  Refuse refuse_;
  KernelInfo const& info_;
  GemmProblem const& p_;
  Schedule const& s_;
  Device const& device_;
  std::optional<Launch> launch_;
};

}  // namespace

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
  return Checks(refuse, kernel, p, s, device).run();
}

bool can_run(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device) {
  auto const refuse = [](auto...) { return Status::invalid(""); };
  return Checks(refuse, kernel, p, s, device).run().ok();
}

}  // namespace jax_streamk
