#include "cutlass_kernels/planner/cost_model.h"

#include <algorithm>

#include "cutlass_kernels/core/slices.h"
#include "cutlass_kernels/planner/host_cost.h"

namespace jax_streamk {
namespace {

// Keeps lower bounds below costs in spite of rounding.
constexpr double kRounding = 1 - 1e-9;

}  // namespace

int32_t width_of(Schedule const& s, Device const& device) {
  return s.kind == ScheduleKind::kStreamK && s.max_sms > 1 ? std::min(s.max_sms, device.sms) : device.sms;
}

Estimator::Estimator(KernelInfo const& kernel, GemmProblem const& p, int32_t width, Machine const& machine)
    : work_(kernel, p, width, machine) {
  partials_ = kernel.d.format != p.d.format;
  if (traits_of(kernel).is_host()) return;
  panels_ = panels_of(work_);
  tensor_cores_ = tensor_core_us(work_);
  sustained_ = sustained_us(work_);
  loads_ = shared_memory_us(work_, panels_);
  transposes_ = transposing_us(work_);
  waits_ = waiting_us(work_);
  l2_bytes_ = l2_bytes(work_, panels_);
  dram_ = dram_us(work_);
  again_ = dram_again_us(work_);
  draw_ = dram_draw_us(work_);
  launch_us_ = launch_us(work_);
  repack_ = repack_us(work_);
  epilogue_ = epilogue_us(work_);
  fused_ = fused_us(work_);
  least_ = least_of();
}

// The busiest worker has at least the mean of all work, in whole tiles if the kernel cannot share one.
double Estimator::least_of() const {
  Grid const& grid = work_.grid;
  KernelInfo const& kernel = work_.kernel;
  bool const shares = !kernel.split_k_reductions.empty() || !kernel.stream_k_reductions.empty();
  double const pieces = shares ? std::max(grid.tiles / grid.workers, 1.0) : ceil_div(grid.tiles, grid.workers);
  double const iterations = shares ? std::max(grid.tiles * grid.k_tiles / grid.workers, 1.0) : pieces * grid.k_tiles;
  double const busy = std::min(grid.workers, grid.tiles);
  double const last = shares ? 0 : grid.k_tiles, busy_last = grid.tiles - (pieces - 1) * busy;
  auto const iteration = [&](double busy) { return std::max({tensor_cores_, sustained_ * busy, loads_, transposes_}); };
  double const work = iteration(busy) * (iterations - last) + (last > 0 ? iteration(busy_last) * last : 0);
  double const reduction = partials_ ? reduction_us(work_, 2) : 0;
  double const waited = epilogues(0, pieces, std::numeric_limits<double>::infinity());
  return kRounding * (launch_us_ + std::max(work + waited, dram_) + reduction + repack_);
}

// What a worker waits for epilogues. In a pingpong kernel all but the last hide behind the other warpgroup's product,
// which takes `product`, as far as they are not longer. What is fused into the last one counts in cost().
double Estimator::epilogues(double fused, double pieces, double product) const {
  double const waited =
      work_.traits.hides_epilogue ? std::max(epilogue_ + fused - product, 0.0) / 2 : epilogue_ + fused;
  return epilogue_ + (pieces - 1) * waited;
}

Wave Estimator::first_wave(Raster raster, int32_t swizzle) const {
  // CTAs of one SM take turns, so a wave is one per SM.
  double const workers = std::min(work_.grid.workers / work_.traits.ctas_per_sm, work_.grid.wave_tiles);
  return jax_streamk::first_wave(work_.tiling, work_.problem.m, work_.problem.n, workers, work_.machine.gpc_sms, raster,
                                 swizzle);
}

double Estimator::needs(Wave const& wave) const {
  return (wave.rows + wave.columns) / work_.machine.gpc_bytes_per_us + wave.footprint / work_.machine.dram_bytes_per_us;
}

Order Estimator::best_order() const {
  Tiling const& tiling = work_.tiling;
  Order best;
  double least = std::numeric_limits<double>::infinity();
  for (int32_t swizzle = 1; swizzle <= kWidestPanel; swizzle *= 2) {
    for (Raster const raster : {Raster::kAlongM, Raster::kAlongN}) {
      bool const along_m = raster == Raster::kAlongM;
      int64_t const fast = along_m ? tiling.tiles_m : tiling.tiles_n, slow = along_m ? tiling.tiles_n : tiling.tiles_m;
      // A single line of tiles has one order, and so has a single panel.
      if (swizzle > 1 && (fast == 1 || swizzle / 2 >= slow)) continue;
      Wave const wave = first_wave(raster, swizzle);
      if (double const needed = needs(wave); needed < least) {
        least = needed;
        best = {raster, swizzle, wave};
      }
    }
  }
  return best;
}

// `cut`: Stream-K cuts tiles, so workers are at different k and share no loads.
Estimator::Iteration Estimator::iteration_of(Schedule const& s, Share const& share, Wave const& wave, bool cut) const {
  Machine const& machine = work_.machine;
  double const splits = is_separate(s) ? share.slices : splits_of(s);
  // Batches and slices of K in one wave share nothing.
  double const alike =
      std::min(std::max(work_.grid.workers / work_.grid.wave_tiles, 1.0), work_.problem.batch * splits);
  double const together = alike * (wave.rows * panels_.a + wave.columns * panels_.b), apart = l2_bytes_ * share.busy;
  // Neighbours drift apart with every tile. With misaligned rows they share no lines at all.
  bool const shares_nothing = cut || panels_.misaligned;
  double const drift = shares_nothing ? 1 : 1 - 1 / share.pieces;
  double const gpcs = (together + drift * std::max(apart - together, 0.0)) / machine.gpc_bytes_per_us;
  // One CTA alone on an SM waits for each instruction of a streamed B.
  double const alone = work_.grid.in_clusters > 0 && share.pieces <= 1 ? 1.25 : 1;
  return {alone * tensor_cores_, sustained_ * share.busy, loads_, gpcs, waits_, transposes_};
}

// The share of workers busy in the last wave: they have caches and power to themselves. sm80 slices launched apart may
// leave none.
double Estimator::busy_last_of(Share const& share, double splits, bool cut) const {
  double const left = std::max(work_.grid.tiles * splits - (share.pieces - 1) * share.busy, 1.0);
  return cut ? 1 : std::min(left / share.busy, 1.0);
}

// Few workers cannot saturate DRAM, least of all in the last wave.
double Estimator::dram_of(Share const& share, double splits, double busy_last) const {
  double const pieces = work_.grid.tiles * splits, left = std::max(pieces - (share.pieces - 1) * share.busy, 1.0);
  double const of_last = left / pieces;
  auto const slower = [&](double at_work) { return overlapped(work_.machine, 1.0, draw_ / (at_work * share.busy)); };
  double const us = (dram_ + again_ * share.cut_tiles) * ((1 - of_last) * slower(1) + of_last * slower(busy_last));
  bool const in_cluster = work_.traits.family.adds_in_cluster();
  return in_cluster ? us * (1 + work_.machine.dram_cluster_share * (share.peers - 1)) : us;
}

// The busiest worker's MAC iterations, and with epilogues. `busy_last` is the share of workers busy with the last
// piece.
template <typename Join>
double Estimator::products_of(Join join, Iteration const& whole, Share const& share, double busy_last) const {
  auto const iteration = [&](double busy) {
    return join(std::max(whole.tensor_cores, whole.sustained * busy), whole.loads + whole.gpcs * busy, whole.waits,
                whole.transposes);
  };
  double const last = share.iterations / share.pieces;
  return iteration(1) * (share.iterations - last) + iteration(busy_last) * last;
}

template <typename Join>
double Estimator::work_of(Join join, Iteration const& whole, Share const& share, double busy_last,
                          bool separate) const {
  double const products = products_of(join, whole, share, busy_last);
  return products + epilogues(separate ? 0 : fused_, share.pieces, products / share.pieces);
}

Cost Estimator::cost(Schedule const& s, Wave const& wave, double limit) const {
  KernelTraits const& traits = work_.traits;
  if (work_.traits.family.is_host()) return host_cost(work_, s);
  bool const separate = is_separate(s);
  Share const share = share_of(s, work_.grid, work_.kernel, traits, work_.problem, separate);
  double const splits = separate ? share.slices : splits_of(s);
  bool const cut = streams(s) && share.peers > 1;
  Cost cost;
  cost.iterations = share.iterations;
  cost.peers = share.peers;
  // Split-K shares every piece of a worker. Of Stream-K's shared pieces only the last is waited for.
  cost.fix_up = fix_up_us(work_, cut ? 1 : share.pieces, share.peers);
  cost.launches = launch_us_ + work_.machine.launch_us * (share.launches - 1);
  if (separate) {
    cost.extra = reduction_us(work_, share.slices);
  } else if (share.peers > 1 && !traits.family.adds_in_cluster()) {
    cost.extra = work_.machine.launch_us;  // the memset of its tickets
  }
  cost.repack = repack_;

  Iteration const whole = iteration_of(s, share, wave, cut);
  double const busy_last = busy_last_of(share, splits, cut);
  // The fused part of the last epilogue overlaps with nothing; a separate reduction does it in its own time.
  double const last_fused = separate ? 0 : fused_;
  double const others = last_fused + cost.extra + cost.repack;
  double const least_work =
      work_of([](auto... times) { return std::max({times...}); }, whole, share, busy_last, separate) + cost.fix_up;
  cost.microseconds = kRounding * (cost.launches + std::max(least_work, dram_) + others);
  if (cost.microseconds > limit) return cost;

  auto const overlap = [this](auto... times) { return overlapped(work_.machine, times...); };
  cost.work = work_of(overlap, whole, share, busy_last, separate) + cost.fix_up;
  cost.floor = dram_of(share, splits, busy_last);
  cost.microseconds = cost.launches + overlap(cost.work, cost.floor) + others;
  cost.work += last_fused;
  cost.waves = work_.grid.tiles * splits / work_.grid.workers;
  return cost;
}

Parts Estimator::parts(Schedule const& s, Wave const& wave) const {
  bool const separate = is_separate(s);
  Share const share = share_of(s, work_.grid, work_.kernel, work_.traits, work_.problem, separate);
  double const splits = separate ? share.slices : splits_of(s);
  bool const cut = streams(s) && share.peers > 1;
  double const busy_last = busy_last_of(share, splits, cut);
  Iteration const whole = iteration_of(s, share, wave, cut);
  auto const of_one = [&](Iteration const& iteration) {
    auto const overlap = [this](auto... times) { return overlapped(work_.machine, times...); };
    return products_of(overlap, iteration, share, busy_last);
  };
  auto const most = [](auto... times) { return std::max({times...}); };
  double const fused = separate ? 0 : fused_,
               epilogue = epilogues(fused, share.pieces, products_of(most, whole, share, busy_last) / share.pieces);
  Parts parts;
  parts.memory = dram_of(share, splits, busy_last);
  parts.tensor_cores = of_one({whole.tensor_cores, whole.sustained});
  parts.shared_memory = of_one({0, 0, whole.loads, 0, 0, whole.transposes});
  parts.l2 = of_one({0, 0, 0, whole.gpcs});
  parts.waits = of_one({0, 0, 0, 0, whole.waits});
  parts.epilogue = epilogue + fused;
  parts.fix_up = fix_up_us(work_, cut ? 1 : share.pieces, share.peers);
  return parts;
}

}  // namespace jax_streamk
