#include "ffi/work_units.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/kernel.h"

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

// What one launch of the kernel multiplies: `slices` of K from `slice` on, of `batches` batches from `batch` on.
struct Part {
  Decomposition cut;
  int32_t slice = 0, slices = 1, batch = 0, batches = 1;
};

class Units {
 public:
  Units(Kernel const& kernel, GemmProblem const& p, Schedule const& s, Device const& device)
      : kernel_(kernel),
        info_(kernel.info),
        family_(traits_of(info_)),
        launch_(info_, p, s),
        p_(launch_.problem),
        s_(s),
        device_(device) {}

  WorkUnits list() {
    out_.k_tiles = k_tiles_of(p_.k);
    GemmProblem many = p_;
    many.m = many.n = 1, many.batch = 1 << 16;
    // Where each piece of work has a CTA of its own, those that share an SM are shown one after another.
    bool const by_hardware = family_.cta_per_piece;
    out_.workers = by_hardware ? device_.sms : kernel_.decomposition(many, {}, device_).workers;
    std::vector<Part> const parts = this->parts();
    int64_t units = 0;
    for (Part const& part : parts) {
      if (!by_hardware) out_.workers = std::max(out_.workers, part.cut.workers);  // several of CUTLASS share an SM
      units += int64_t{part.cut.tiles} * part.cut.splits + 2 * part.cut.stream_k_workers;
    }
    if (units > kMostUnits)
      throw nb::value_error(
          (info_.name + ": " + std::to_string(units) + " units of work are too many to list").c_str());
    for (Part const& part : parts) {
      int64_t const before = out_.end.empty() ? 0 : *std::max_element(out_.end.begin(), out_.end.end());
      by_hardware ? add_dispatched(part) : add(part, static_cast<int32_t>(before));
      out_.tiles = per_batch(part) * static_cast<int32_t>(p_.batch);
    }
    mark_fix_ups();
    return std::move(out_);
  }

 private:
  int32_t k_tiles_of(int64_t k) const { return static_cast<int32_t>((k + info_.tile_k - 1) / info_.tile_k); }
  static int32_t per_batch(Part const& part) { return part.cut.tiles / (part.slices * part.batches); }

  std::vector<Part> parts() const {
    auto const batch = static_cast<int32_t>(p_.batch);
    auto const cut = [&](GemmProblem const& p) { return kernel_.decomposition(p, launch_.schedule, device_); };
    if (!launch_.separate || !family_.slices_by_launch) return {{cut(launch_.as_batch()), 0, slices_.count, 0, batch}};
    // Equal slices are batches of one launch, and a shorter last one has its own; or each slice has, of all batches.
    auto const whole = static_cast<int32_t>(p_.k / slices_.extent);
    bool const apart = whole < slices_.count;
    std::vector<Part> found;
    auto const add = [&](int32_t slice, int32_t slices, int32_t first, int32_t batches) {
      GemmProblem q = p_;
      q.k = std::min(slices_.extent, p_.k - slice * slices_.extent);
      q.batch = slices * batches;
      found.push_back({cut(q), slice, slices, first, batches});
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
  int32_t append(Part const& part, int32_t worker, Work const& work, int32_t begin) {
    int32_t const tiles = per_batch(part), group = work.tile / tiles, in_batch = work.tile % tiles;
    int32_t const slice = part.slice + group / part.batches, batch = part.batch + group % part.batches;
    int32_t const first = slice * k_tiles_of(slices_.extent) * launch_.separate;
    int32_t const k_begin = first + work.k_begin, k_end = std::min(k_begin + work.k_count, out_.k_tiles);
    // Zeros beyond K that TMA reads in a last slice are multiplied; others stop.
    int32_t const end = begin + (family_.loads_by_tma() ? work.k_count : k_end - k_begin);
    out_.worker.push_back(worker);
    out_.tile.push_back(batch * tiles + in_batch);
    out_.k_begin.push_back(k_begin);
    out_.k_end.push_back(k_end);
    out_.begin.push_back(begin);
    out_.end.push_back(end);
    out_.peer.push_back(launch_.separate ? slice : work.peer);
    out_.peers.push_back(launch_.separate ? slices_.count : work.peers);
    return end;
  }

  void add(Part const& part, int32_t begin) {
    Decomposition const& cut = part.cut;
    bool const backwards = family_.fix_up == FixUp::kTurnstile && cut.kind == ScheduleKind::kStreamK;
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
      for (Work const& piece : pieces) at = append(part, worker, piece, at);
    }
  }

  // CTAs begin in the order of their tiles, those of a tile one after another, each on the SM that has done least.
  void add_dispatched(Part const& part) {
    Decomposition const& cut = part.cut;
    using Free = std::pair<int32_t, int32_t>;  // since when, and which SM
    std::priority_queue<Free, std::vector<Free>, std::greater<Free>> sms;
    for (int32_t sm = 0; sm < out_.workers; ++sm) sms.push({0, sm});
    for (int32_t tile = 0; tile < cut.tiles; ++tile) {
      for (int32_t peer = 0; peer < cut.splits; ++peer) {
        auto const [since, sm] = sms.top();
        sms.pop();
        Work work;
        cut.work(tile + peer * cut.tiles, 0, work);
        sms.push({append(part, sm, work, since), sm});
      }
    }
  }

  // Who adds up a shared tile. Where that is the last to arrive, it is the one that ends last if all MAC iterations
  // take equally long.
  void mark_fix_ups() {
    out_.fixes_up.resize(out_.size());
    if (launch_.separate) return;  // a second kernel does
    bool const first = family_.adds_in_cluster() || s_.reduction == Reduction::kSeparate;
    bool const last_to_arrive = !first && family_.fix_up == FixUp::kLastToArrive;
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
  FamilyTraits const& family_;
  Launch const launch_;
  GemmProblem const& p_;  // its problem
  Schedule const s_;
  Device const device_;
  Slices const& slices_ = launch_.slices;
  WorkUnits out_;
};

WorkUnits work_units(KernelInfo const& info, GemmProblem const& p, Schedule const& s, Device const& device) {
  Kernel const described(info);
  Status const status = check(described, p, s, device);
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return Units(described, p, s, device).list();
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
