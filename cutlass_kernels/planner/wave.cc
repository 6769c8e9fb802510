#include "cutlass_kernels/planner/wave.h"

#include <algorithm>

#include "cutlass_kernels/planner/share.h"

namespace jax_streamk {
namespace {

// Counts rows and columns of tiles that a run of consecutive tiles touches (TileOrder in decomposition.h).
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

  // Those of tiles [begin, end).
  Count among(int32_t begin, int32_t end) const {
    int32_t const first = by_panel_.divide(begin), last = by_panel_.divide(end - 1);
    int32_t const from = begin - first * panel_, to = end - 1 - last * panel_;
    bool const whole = last < whole_;
    int32_t const width = whole ? swizzle_ : last_width_;
    Divisor const& by_width = whole ? by_width_ : by_last_width_;
    if (first == last) return {std::min(end - begin, width), by_width.divide(to) - by_width.divide(from) + 1};
    // The run leaves the first panel at its end and enters the last at its beginning.
    int32_t const along = std::min(panel_ - from, swizzle_) + (last - first - 1) * swizzle_ + std::min(to + 1, width);
    int32_t const across = last - first > 1 ? fast_ : fast_ - by_width_.divide(from) + by_width.divide(to) + 1;
    return {along, std::min(across, fast_)};
  }

 private:
  int32_t fast_, swizzle_;
  int32_t panel_, whole_, last_width_;  // tiles of a panel, panels that are whole, width of one that is not
  Divisor by_panel_, by_width_, by_last_width_;
};

// Adds up the rows and columns of tiles of several runs of consecutive workers, which share nothing with each other.
class Runs {
 public:
  Runs(Lines const& lines, bool along_m) : lines_(lines), along_m_(along_m) {}

  void add(int32_t begin, int32_t end) {
    auto const [along, across] = lines_.among(begin, end);
    tiles_ += end - begin;
    of_m_ += along_m_ ? across : along;
    of_n_ += along_m_ ? along : across;
  }

  // Per tile: 1 if no two tiles of a run share a row (column).
  double rows() const { return of_m_ / tiles_; }
  double columns() const { return of_n_ / tiles_; }

 private:
  Lines const& lines_;
  bool along_m_;
  double tiles_ = 0, of_m_ = 0, of_n_ = 0;
};

// What CTAs of one GPC share, for `last` workers, `neighbours` to a GPC.
Runs runs_of_gpcs(Lines const& lines, bool along_m, int32_t neighbours, int32_t last) {
  Runs runs(lines, along_m);
  // Nothing says with which worker a GPC begins, so runs overlap by half.
  for (int32_t begin = 0; begin < last; begin += std::max(neighbours / 2, 1))
    runs.add(begin, std::min(last, begin + neighbours));
  return runs;
}

}  // namespace

Wave first_wave(Tiling const& tiling, int64_t m, int64_t n, double workers, double gpc_sms, Raster raster,
                int32_t swizzle) {
  bool const along_m = raster == Raster::kAlongM;
  int32_t const fast = along_m ? tiling.tiles_m : tiling.tiles_n, slow = along_m ? tiling.tiles_n : tiling.tiles_m;
  swizzle = std::min(swizzle, slow);
  Lines const lines(fast, slow, swizzle);
  double const rows = std::min(tiling.rows, m), columns = std::min(tiling.columns, n);
  int32_t const ctas = static_cast<int32_t>(tiling.ctas_m * tiling.ctas_n), last = static_cast<int32_t>(workers);
  int32_t const neighbours = std::max(static_cast<int32_t>(gpc_sms) / ctas, 1);
  Runs const gpcs = runs_of_gpcs(lines, along_m, neighbours, last);
  Wave wave;
  // A multicast loads once: A along n, B along m.
  wave.rows = workers * rows * (tiling.ctas_n > 1 ? 1 : gpcs.rows());
  wave.columns = workers * columns * (tiling.ctas_m > 1 ? 1 : gpcs.columns());
  double const panels = ceil_div(workers, static_cast<double>(fast) * swizzle);
  double const down = panels == 1 ? ceil_div(workers, swizzle) : fast;
  double const across = std::min<double>(panels * swizzle, slow);
  wave.footprint = (along_m ? down : across) * rows + (along_m ? across : down) * columns;
  return wave;
}

}  // namespace jax_streamk
