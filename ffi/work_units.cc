#include "ffi/work_units.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "cutlass_kernels/core/gemm.h"
#include "cutlass_kernels/core/slices.h"
#include "cutlass_kernels/passes/repack.h"
#include "ffi/planner_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_streamk {
namespace {

constexpr int64_t kMostUnits = 1 << 22;

// A column for each property of a unit. Units of a worker are in the order in which it does them.
struct WorkUnits {
  int32_t tiles = 0, k_tiles = 0, workers = 0;
  std::vector<int32_t> worker, tile, k_begin, k_end, begin, end, peer, peers;
  std::vector<uint8_t> fixes_up;

  size_t size() const { return worker.size(); }
};

// One kernel launch of a product: `slices` of K from `slice` on, of `batches` batches from `batch` on.
struct Launch {
  Decomposition cut;
  int32_t slice = 0, slices = 1, batch = 0, batches = 1;
};

class Units {
 public:
  Units(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device)
      : kernel_(kernel), info_(kernel.info), p_(repack_of(kernel.info, p).problem), s_(s), device_(device) {
    separate_ = is_separate(s) && info_.family != Family::kHost;
    slices_ = separate_ ? Slices::of(p_.k, info_.tile_k, s.splits) : Slices{1, p_.k};
  }

  WorkUnits list() {
    out_.k_tiles = k_tiles_of(p_.k);
    GemmProblem many = p_;
    many.m = many.n = 1, many.batch = 1 << 16;
    // A skinny kernel launches a CTA for each piece of work. Those that share an SM are shown one after another.
    bool const by_hardware = info_.family == Family::kSkinny;
    out_.workers = by_hardware ? device_.sms : kernel_.decomposition(many, {}, device_).workers;
    std::vector<Launch> const launches = this->launches();
    int64_t units = 0;
    for (Launch const& launch : launches) {
      if (!by_hardware) out_.workers = std::max(out_.workers, launch.cut.workers);  // several of CUTLASS share an SM
      units += int64_t{launch.cut.tiles} * launch.cut.splits + 2 * launch.cut.stream_k_workers;
    }
    if (units > kMostUnits)
      throw nb::value_error(
          (info_.name + ": " + std::to_string(units) + " units of work are too many to list").c_str());
    for (Launch const& launch : launches) {
      int64_t const before = out_.end.empty() ? 0 : *std::max_element(out_.end.begin(), out_.end.end());
      by_hardware ? add_dispatched(launch) : add(launch, static_cast<int32_t>(before));
      out_.tiles = per_batch(launch) * static_cast<int32_t>(p_.batch);
    }
    mark_fix_ups();
    return std::move(out_);
  }

 private:
  int32_t k_tiles_of(int64_t k) const { return static_cast<int32_t>((k + info_.tile_k - 1) / info_.tile_k); }
  static int32_t per_batch(Launch const& launch) { return launch.cut.tiles / (launch.slices * launch.batches); }

  std::vector<Launch> launches() const {
    auto const batch = static_cast<int32_t>(p_.batch);
    if (!separate_) return {{kernel_.decomposition(p_, s_, device_), 0, 1, 0, batch}};
    if (info_.family != Family::kSm80)
      return {{kernel_.decomposition(slices_.as_batch(p_), data_parallel(s_), device_), 0, slices_.count, 0, batch}};
    // Equal slices are batches of one launch, and a shorter last one has its own; or each slice has, of all batches.
    auto const whole = static_cast<int32_t>(p_.k / slices_.extent);
    bool const apart = whole < slices_.count;
    std::vector<Launch> found;
    auto const add = [&](int32_t slice, int32_t slices, int32_t first, int32_t batches) {
      GemmProblem q = p_;
      q.k = std::min(slices_.extent, p_.k - slice * slices_.extent);
      q.batch = slices * batches;
      found.push_back({kernel_.decomposition(q, data_parallel(s_), device_), slice, slices, first, batches});
    };
    if (slices_.count <= batch * (1 + apart)) {
      for (int32_t slice = 0; slice < slices_.count; ++slice) add(slice, 1, 0, batch);
    } else {
      for (int32_t i = 0; i < batch; ++i) {
        if (whole > 0) add(0, whole, i, 1);
        if (apart) add(whole, 1, i, 1);
      }
    }
    return found;
  }

  // Appends what a worker does from `begin` on, in MAC iterations since the call began; returns when it ends.
  int32_t append(Launch const& launch, int32_t worker, Work const& work, int32_t begin) {
    int32_t const tiles = per_batch(launch), group = work.tile / tiles, in_batch = work.tile % tiles;
    int32_t const slice = launch.slice + group / launch.batches, batch = launch.batch + group % launch.batches;
    int32_t const first = slice * k_tiles_of(slices_.extent) * separate_;
    int32_t const k_begin = first + work.k_begin, k_end = std::min(k_begin + work.k_count, out_.k_tiles);
    // An sm90 kernel multiplies the zeros beyond K that TMA reads in a last slice; others stop.
    int32_t const end = begin + (info_.family == Family::kSm90 ? work.k_count : k_end - k_begin);
    out_.worker.push_back(worker);
    out_.tile.push_back(batch * tiles + in_batch);
    out_.k_begin.push_back(k_begin);
    out_.k_end.push_back(k_end);
    out_.begin.push_back(begin);
    out_.end.push_back(end);
    out_.peer.push_back(separate_ ? slice : work.peer);
    out_.peers.push_back(separate_ ? slices_.count : work.peers);
    return end;
  }

  void add(Launch const& launch, int32_t begin) {
    Decomposition const& cut = launch.cut;
    bool const backwards = info_.family == Family::kSm80 && cut.kind == ScheduleKind::kStreamK;
    for (int32_t worker = 0; worker < cut.workers; ++worker) {
      std::vector<Work> pieces;
      Work work;
      for (int32_t ordinal = 0; cut.work(worker, ordinal, work); ++ordinal) pieces.push_back(work);
      if (backwards) {  // CUTLASS takes the tiles of a Stream-K run from its end to its beginning
        auto const whole = std::find_if(pieces.begin(), pieces.end(),
                                        [&](Work const& piece) { return piece.tile >= cut.stream_k_tiles; });
        std::reverse(pieces.begin(), whole);
      }
      int32_t at = begin;
      for (Work const& piece : pieces) at = append(launch, worker, piece, at);
    }
  }

  // CTAs begin in the order of their tiles, those of a tile one after another, each on the SM that has done least.
  void add_dispatched(Launch const& launch) {
    Decomposition const& cut = launch.cut;
    using Free = std::pair<int32_t, int32_t>;  // since when, and which SM
    std::priority_queue<Free, std::vector<Free>, std::greater<Free>> sms;
    for (int32_t sm = 0; sm < out_.workers; ++sm) sms.push({0, sm});
    for (int32_t tile = 0; tile < cut.tiles; ++tile) {
      for (int32_t peer = 0; peer < cut.splits; ++peer) {
        auto const [since, sm] = sms.top();
        sms.pop();
        Work work;
        cut.work(tile + peer * cut.tiles, 0, work);
        sms.push({append(launch, sm, work, since), sm});
      }
    }
  }

  // Who adds up a shared tile. Where that is the last to arrive, it is the one that ends last if all MAC iterations
  // take equally long.
  void mark_fix_ups() {
    out_.fixes_up.resize(out_.size());
    if (separate_) return;  // a second kernel does
    bool const first = info_.family == Family::kSkinny || s_.reduction == Reduction::kSeparate;
    bool const last_to_arrive = !first && info_.family != Family::kSm80;
    std::vector<int32_t> owner(out_.tiles, -1);
    for (size_t i = 0; i < out_.size(); ++i) {
      if (out_.peers[i] == 1) continue;
      int32_t& of_tile = owner[out_.tile[i]];
      bool const takes = last_to_arrive ? of_tile < 0 || std::pair(out_.end[i], out_.peer[i]) >
                                                             std::pair(out_.end[of_tile], out_.peer[of_tile])
                                        : out_.peer[i] == (first ? 0 : out_.peers[i] - 1);
      if (takes) of_tile = static_cast<int32_t>(i);
    }
    for (int32_t const i : owner)
      if (i >= 0) out_.fixes_up[i] = 1;
  }

  Kernel const& kernel_;
  KernelInfo const& info_;
  GemmProblem const p_;  // with copies
  Schedule const s_;
  Device const device_;
  bool separate_ = false;  // whether a second kernel adds slices
  Slices slices_;
  WorkUnits out_;
};

WorkUnits work_units(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  Kernel const* kernel = find_kernel(info.name);
  std::unique_ptr<Kernel> described;
  if (kernel == nullptr) {
    described = described_kernel(info);
    kernel = described.get();
  }
  Status const status = check(*kernel, p, s, device);
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return Units(*kernel, p, s, device).list();
}

// A numpy array that keeps the units alive.
template <class T, std::vector<T> WorkUnits::* column>
nb::ndarray<nb::numpy, T const, nb::ndim<1>> array(nb::handle self) {
  auto const& values = nb::cast<WorkUnits const&>(self).*column;
  return {values.data(), {values.size()}, self};
}

}  // namespace

void bind_work_units(nb::module_& m) {
  using U = WorkUnits;
  nb::class_<U>(
      m, "WorkUnits",
      "What every worker does: an array for each property of its units, a worker's in order. A unit is one run "
      "of MAC iterations of one output tile.")
      .def_ro("tiles", &U::tiles, "Output tiles, of all batches.")
      .def_ro("k_tiles", &U::k_tiles, "MAC iterations of each.")
      .def_ro("workers", &U::workers, "How many the machine has: clusters of CTAs, SMs or threads.")
      .def_prop_ro("worker", &array<int32_t, &U::worker>, "Who does it, below `workers`.")
      .def_prop_ro("tile", &array<int32_t, &U::tile>, "Its output tile, below `tiles`.")
      .def_prop_ro("k_begin", &array<int32_t, &U::k_begin>, "Its first MAC iteration of the tile.")
      .def_prop_ro("k_end", &array<int32_t, &U::k_end>, "The one after its last.")
      .def_prop_ro("begin", &array<int32_t, &U::begin>,
                   "When it begins, in MAC iterations since the call began, if each takes equally long.")
      .def_prop_ro("end", &array<int32_t, &U::end>,
                   "When it ends. Later than k_end says where zeros beyond K are multiplied.")
      .def_prop_ro("peer", &array<int32_t, &U::peer>, "Its number among the units of the tile, along K.")
      .def_prop_ro("peers", &array<int32_t, &U::peers>, "How many units share the tile; 1: it is whole.")
      .def_prop_ro("fixes_up", &array<uint8_t, &U::fixes_up>,
                   "1 where it adds up the tile's partial sums: of the last to arrive, by `end`. No unit does "
                   "where a second kernel does.");
  m.def(
      "work_units", &work_units, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
      "The WorkUnits of a KernelInfo, of this build or described. ValueError where the kernel cannot run the problem, "
      "and of more than four million units.");
}

}  // namespace jax_streamk
