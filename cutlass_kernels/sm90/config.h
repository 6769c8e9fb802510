// The parameters of an sm90 kernel: a row of table.txt, with one of the row's combinations of types and majornesses.
#pragma once

#include <string>

#include "cutlass/numeric_types.h"
#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/sm90/warp_roles.h"

namespace jax_streamk::sm90 {

template <Type kType>
struct ElementOf;
template <>
struct ElementOf<Type::kBF16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<Type::kF16> {
  using type = cutlass::half_t;
};
template <>
struct ElementOf<Type::kF32> {
  using type = float;
};

struct Config {
  Type type_ab, type_d;
  Major major_a, major_b;
  int tile_m, tile_n, tile_k;
  int cluster_m, cluster_n;
  WarpSchedule warp_schedule;
  // Computes D^T = B^T A^T, so that the tile's n, which may be any multiple of 8, lies along the problem's m.
  bool swap_ab;
  Math math;
  int store_columns;  // columns of the kernel's own result in a box of the store (store.h)

  // Consumer warpgroups that share a tile.
  constexpr int warpgroups() const { return warp_schedule != WarpSchedule::kCooperative ? 1 : tile_m == 192 ? 3 : 2; }

  // KernelInfo::promotion_k. Separate sums take as many registers as the accumulators; with more of these, or with TF32
  // operands in registers, they would spill. Three TF32 promote every k-tile.
  constexpr int promotion_k() const {
    if (math == Math::kTF32x3) return tile_k;
    int const accumulators = tile_m * tile_n / (128 * warpgroups());
    bool const fits = warpgroups() < 3 && accumulators <= (type_ab == Type::kF32 ? 32 : 64);
    return fits && type_d == Type::kF32 ? promotion_k_of(type_ab) : 0;
  }
};

inline char const* name_of(WarpSchedule schedule) {
  return schedule == WarpSchedule::kPingpong ? "pingpong" : schedule == WarpSchedule::kSingle ? "single" : "coop";
}

inline std::string name_of(Config const& c) {
  auto const letter = [](Major major) { return major == Major::kRow ? "r" : "c"; };
  auto const number = [](int x) { return std::to_string(x); };
  return std::string("sm90_") + jax_streamk::name_of(c.type_ab) + "_" + jax_streamk::name_of(c.type_d) + "_" +
         letter(c.major_a) + letter(c.major_b) + "_" + number(c.tile_m) + "x" + number(c.tile_n) + "x" +
         number(c.tile_k) + "_" + number(c.cluster_m) + "x" + number(c.cluster_n) + "_" + name_of(c.warp_schedule) +
         (c.swap_ab ? "_swap" : "") + (c.math == Math::kNative ? "" : std::string("_") + jax_streamk::name_of(c.math));
}

}  // namespace jax_streamk::sm90
