#include "cutlass_kernels/scaled/scales.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace jax_streamk::scaled {

namespace {

bool is_one_of(Type type, std::initializer_list<Type> types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

}  // namespace

Status can_scale(KernelInfo const& info, GemmProblem const& p, int64_t chunk, bool rounds) {
  Scales const& scales = p.b.scales;
  auto const refuse = [&](std::string const& why) { return Status::invalid(info.name + " " + why); };
  // K of a slice is a part of it, which a block of all of K does not divide.
  if (scales.rows != p.k &&
      (scales.rows % smallest_block(p.b.format.type) != 0 || (scales.rows % chunk != 0 && chunk % scales.rows != 0)))
    return refuse("has a scale for all of K, or for a multiple of " + std::to_string(chunk) +
                  " neighbours along K or a part of it, of 32 or more, or 16 of e2m1");
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
  if (rounds && p.a.format == Type::kF16 && !is_one_of(scales.scale, {Type::kF16, Type::kE4M3}))
    return refuse("multiplies each number of B by a scale, which with A of f16 is one of f16 or e4m3");
  return {};
}

Status can_scale_sums(KernelInfo const& info, GemmProblem const& p) {
  auto const refuse = [&](std::string const& why) { return Status::invalid(info.name + " " + why); };
  constexpr int64_t kMostProducts = INT32_MAX / (128 * 128);
  if (info.a.format == Type::kS8 && p.k > kMostProducts)
    return refuse("has at most " + std::to_string(kMostProducts) + " of k, whose sums fit 32 bits");
  for (bool const is_b : {false, true}) {
    Scales const& scales = is_b ? p.b.scales : p.a.scales;
    if (!scales.any()) continue;
    int64_t const block_k = is_b ? scales.rows : scales.columns, block = is_b ? scales.columns : scales.rows,
                  extent = is_b ? p.n : p.m, tile = info.swap_ab == is_b ? info.tile_m : info.tile_n;
    if (block_k != p.k && p.ragged == Ragged::kK) return refuse("has scales for all of K, which groups cut");
    if (block_k != p.k && block_k % info.tile_k != 0)
      return refuse("has a scale for all of K, or for a multiple of " + std::to_string(info.tile_k) + " along K");
    // Threads of the consumers load the scales of one line each, or, if these do not change, of two. Integers are
    // summed in tensor cores.
    bool const may_change = info.tile_m + info.tile_n <= info.threads - 128 && info.a.format != Type::kS8;
    if (block_k != p.k && !may_change) return refuse("has scales for all of K only");
    // Groups begin at any row.
    if (!is_b && p.ragged == Ragged::kM && block != 1 && block != extent)
      return refuse("has a scale for each row of A, or for all of them");
    if (block != 1 && block != extent && block % tile != 0)
      return refuse("has a scale for each row of A and column of B, or for a multiple of its tile's " +
                    std::to_string(tile));
    if (!is_one_of(scales.scale, {Type::kF32, Type::kBF16, Type::kF16, Type::kE8M0, Type::kE4M3}))
      return refuse("has scales of f32, bf16, f16, e8m0 or e4m3");
    Operand const x = p.operand(is_b ? Role::kScale : Role::kScaleOfA);
    if (x.rows * x.columns > INT32_MAX || p.batch * x.batch_stride > INT32_MAX)
      return refuse("has at most 2^31 scales");
  }
  return {};
}

}  // namespace jax_streamk::scaled
