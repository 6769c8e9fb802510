#include "cutlass_kernels/skinny/family.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/skinny/scales.h"

namespace jax_streamk::skinny {
namespace {

constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1024;  // so that the ends of tiles fit 32 bits

// A worker per piece of work. (CTAs are numbered differently: the peers of a tile are neighbours, a cluster.)
Decomposition decomposition(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const&) {
  auto const along = [](int64_t extent, int32_t tile) { return static_cast<int32_t>((extent + tile - 1) / tile); };
  int64_t const n = dense(p).n;
  int32_t const tiles = along(info.swap_ab ? n : p.m, info.tile_m) * along(info.swap_ab ? p.m : n, info.tile_n) *
                        static_cast<int32_t>(p.batch);
  int32_t const splits = s.kind == ScheduleKind::kSplitK ? s.splits : 1;
  return Decomposition::make(splits > 1 ? s.kind : ScheduleKind::kDataParallel, tiles, along(p.k, info.tile_k),
                             tiles * splits, splits);
}

// Of a B with scales: which blocks and types a kernel of scaled/kernel.cuh reads.
Status can_scale(KernelInfo const& info, GemmProblem const& p) {
  Scales const& scales = p.b.scales;
  if (!scales.any()) return {};
  auto const refuse = [&](char const* why) { return Status::invalid(info.name + " " + why); };
  auto const is_one_of = [](Type type, std::initializer_list<Type> types) {
    return std::find(types.begin(), types.end(), type) != types.end();
  };
  int64_t const chunk = kChunkBytes * 8 / p.b.format.bits() / info.tile_m;  // of K, of a warp
  // K of a slice is a part of it, which a block of all of K does not divide.
  if (scales.rows != p.k &&
      (scales.rows % smallest_block(p.b.format.type) != 0 || (scales.rows % chunk != 0 && chunk % scales.rows != 0)))
    return refuse(
        "has a scale for 32, 64, or a multiple of 128 neighbours along K, or for all of K, and for 16 of e2m1");
  if (!is_one_of(scales.scale, {Type::kF32, Type::kBF16, Type::kF16, Type::kE8M0, Type::kE4M3}))
    return refuse("has scales of f32, bf16, f16, e8m0 or e4m3");
  bool const has_integers = is_one_of(p.b.format.type, {Type::kS4, Type::kU4, Type::kS8, Type::kU8});
  if (scales.has_zero && (!has_integers || scales.zero != p.b.format.type))
    return refuse("has zero points of B's type, which are integers");
  if (scales.has_zero && scales.has_offset) return refuse("has either zero points or offsets");
  if (std::max(p.n * p.k, p.batch * p.b.batch_stride) / (scales.rows * scales.columns) > INT32_MAX)
    return refuse("has at most 2^31 scales");
  if (scales.has_offset && !is_one_of(scales.offset, {Type::kF32, Type::kBF16, Type::kF16}))
    return refuse("has offsets of f32, bf16 or f16");
  // Factors of numbers are rounded to A's type, whose smallest numbers may be too large.
  if (rounds_numbers(scales, p.k) && p.a.format == Type::kF16 && !is_one_of(scales.scale, {Type::kF16, Type::kE4M3}))
    return refuse("has scales of f16 or e4m3 where they are for 16 neighbours, or there are offsets");
  return {};
}

Status can_launch(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  if (std::max({p.m, p.n, p.k}) >= kMaxExtent) return Status::invalid(info.name + ": too large");
  if (Status status = can_scale(info, p); !status.ok()) return status;
  if (decomposition(info, p, s, device).splits == 1) return {};
  if (device.arch < 90)
    return Status::invalid(info.name +
                           " splits K among the CTAs of a cluster, which needs compute capability 9.0 or newer");
  if (s.splits > kMaxSplits)
    return Status::invalid(info.name + " has at most " + std::to_string(kMaxSplits) + " splits, the CTAs of a cluster");
  return {};
}

std::optional<int64_t> workspace_bytes(KernelInfo const&, GemmProblem const&, Schedule const&, Device const&) {
  return 0;
}

// Loads of B may have a hint, or with few columns those of A: neighbouring tiles of an unaligned B share cache lines. B
// with scales always leaves L2 first.
PolicyFields obeys(KernelInfo const& info) { return {!info.swap_ab, info.swap_ab && info.b.align > 1 && !info.scaled}; }

}  // namespace

FamilyTraits const kTraits = [] {
  FamilyTraits traits{can_launch, workspace_bytes, decomposition, obeys};
  traits.math_unit = MathUnit::kMmaFewRows;
  traits.load_path = LoadPath::kStreaming;
  traits.fix_up = FixUp::kCluster;
  traits.cta_per_piece = traits.nests_batches = true;
  return traits;
}();

}  // namespace jax_streamk::skinny
