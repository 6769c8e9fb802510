#include "ffi/planner_bindings.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "cutlass_kernels/core/gpu.h"
#include "cutlass_kernels/launch/clusters.h"
#include "cutlass_kernels/planner/planner.h"
#include "cutlass_kernels/planner/policy_choice.h"
#include "cutlass_kernels/planner/sum_order.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_streamk {
namespace {

// For which an SM has shared memory and threads.
int64_t most_ctas_per_sm(KernelInfo const& info, Device const& device) {
  return std::min(shared_memory_per_sm(device) / (info.shared_memory + kReservedSharedMemory),
                  threads_per_sm(device) / info.threads);
}

class Kernels {
 public:
  explicit Kernels(std::vector<KernelInfo> const& infos) {
    for (KernelInfo const& info : infos) {
      Kernel const* kernel = find_kernel(info.name);
      if (kernel == nullptr) kernel = described_.emplace_back(std::make_unique<Kernel>(info)).get();
      all_.push_back(kernel);
    }
  }

  Kernels(Kernels const&) = delete;

  std::vector<Kernel const*> const& all() const { return all_; }

 private:
  std::vector<std::unique_ptr<Kernel>> described_;
  std::vector<Kernel const*> all_;
};

// Raster and swizzle.
using TilesOrder = std::pair<Raster, int32_t>;

Wave wave_of(KernelInfo const& kernel, GemmProblem const& problem, Schedule const& s, TilesOrder const& order,
             Device const& device, Machine const& machine) {
  return Estimator(kernel, problem, width_of(s, device), machine).first_wave(order.first, order.second);
}

Cost estimate(KernelInfo const& kernel, GemmProblem const& problem, Schedule const& s, Device const& device,
              Machine const& machine) {
  Estimator const estimator(kernel, problem, width_of(s, device), machine);
  return estimator.cost(s, traits_of(kernel).is_host() ? Wave{} : estimator.best_order().wave);
}

Parts parts(KernelInfo const& kernel, GemmProblem const& problem, Schedule const& s, Device const& device,
            Machine const& machine) {
  if (traits_of(kernel).is_host()) throw nb::value_error("of a CPU the parts are not modelled");
  Estimator const estimator(kernel, problem, width_of(s, device), machine);
  return estimator.parts(s, estimator.best_order().wave);
}

// Many candidates, whose waves are computed once.
class Batch {
 public:
  Batch(nb::list kernels, std::vector<GemmProblem> problems, std::vector<Schedule> schedules,
        std::vector<TilesOrder> orders, Device const& device, Machine const& machine)
      : kernels_(std::move(kernels)),
        problems_(std::move(problems)),
        schedules_(std::move(schedules)),
        orders_(std::move(orders)),
        device_(device) {
    if (kernels_.size() != problems_.size() || kernels_.size() != schedules_.size() ||
        kernels_.size() != orders_.size())
      throw nb::value_error("there must be as many kernels as problems, as schedules and as orders");
    for (size_t i = 0; i < kernels_.size(); ++i) {
      infos_.push_back(nb::cast<KernelInfo const*>(kernels_[i]));
      waves_.push_back(wave_of(*infos_[i], problems_[i], schedules_[i], orders_[i], device_, machine));
    }
  }

  std::vector<double> microseconds(Machine const& machine) const {
    return of_each(machine, [&](Estimator const& estimator, size_t i) {
      return estimator.cost(schedules_[i], waves_[i]).microseconds;
    });
  }

  std::vector<double> needs(Machine const& machine) const {
    return of_each(machine, [&](Estimator const& estimator, size_t i) { return estimator.needs(waves_[i]); });
  }

 private:
  template <typename Of>
  std::vector<double> of_each(Machine const& machine, Of of) const {
    std::vector<double> values(infos_.size());
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = of(Estimator(*infos_[i], problems_[i], width_of(schedules_[i], device_), machine), i);
    return values;
  }

  nb::list kernels_;  // keeps what infos_ points to
  std::vector<KernelInfo const*> infos_;
  std::vector<GemmProblem> problems_;
  std::vector<Schedule> schedules_;
  std::vector<TilesOrder> orders_;
  std::vector<Wave> waves_;
  Device device_;
};

int64_t k_tiles(KernelInfo const& info, GemmProblem const& p) { return Launch(info, p, {}).k_tiles(info); }

// Constants, and what planning returns.
void bind_values(nb::module_& m) {
  nb::dict gpu, policy, host;
#define JAX_STREAMK_GPU(name, meaning) gpu[#name] = meaning;
#define JAX_STREAMK_POLICY(name, meaning) policy[#name] = meaning;
#define JAX_STREAMK_HOST(name, meaning) host[#name] = meaning;
  JAX_STREAMK_GPU_CONSTANTS(JAX_STREAMK_GPU)
  JAX_STREAMK_POLICY_CONSTANTS(JAX_STREAMK_POLICY)
  JAX_STREAMK_HOST_CONSTANTS(JAX_STREAMK_HOST)
#undef JAX_STREAMK_GPU
#undef JAX_STREAMK_POLICY
#undef JAX_STREAMK_HOST
  m.attr("GPU_CONSTANTS") = gpu;  // what each means, by name
  m.attr("POLICY_CONSTANTS") = policy;
  m.attr("HOST_CONSTANTS") = host;
#define JAX_STREAMK_BIND(name, meaning) .def_rw(#name, &Machine::name, meaning)
  nb::class_<Machine>(m, "Machine", "The constants of the cost model; see jax_streamk.machines.")
      .def("__init__", [](Machine* self) { new (self) Machine{}; }) JAX_STREAMK_GPU_CONSTANTS(JAX_STREAMK_BIND)
          JAX_STREAMK_POLICY_CONSTANTS(JAX_STREAMK_BIND) JAX_STREAMK_HOST_CONSTANTS(JAX_STREAMK_BIND)
      .def_rw("l2_bytes", &Machine::l2_bytes, "of the topology")
      .def_rw("gpc_sms", &Machine::gpc_sms, "of the topology");
#undef JAX_STREAMK_BIND

  nb::class_<Wave>(m, "Wave",
                   "Rows of A and columns of B that one wave needs: of all GPCs added up, and of the whole wave.")
      .def_ro("rows", &Wave::rows)
      .def_ro("columns", &Wave::columns)
      .def_ro("footprint", &Wave::footprint);

  nb::class_<Cost>(m, "Cost", "An estimate and what it is made of; times in microseconds.")
      .def_ro("microseconds", &Cost::microseconds)
      .def_ro("waves", &Cost::waves)
      .def_ro("iterations", &Cost::iterations)
      .def_ro("peers", &Cost::peers)
      .def_ro("work", &Cost::work)
      .def_ro("fix_up", &Cost::fix_up)
      .def_ro("floor", &Cost::floor)
      .def_ro("launches", &Cost::launches)
      .def_ro("extra", &Cost::extra)
      .def_ro("repack", &Cost::repack);

  nb::class_<Parts>(
      m, "Parts",
      "What a call's main loop and epilogue ask of each resource of a GPU, in microseconds: of the busiest "
      "worker, except for `memory`. They overlap.")
      .def_ro("memory", &Parts::memory)
      .def_ro("tensor_cores", &Parts::tensor_cores)
      .def_ro("shared_memory", &Parts::shared_memory)
      .def_ro("l2", &Parts::l2)
      .def_ro("waits", &Parts::waits)
      .def_ro("epilogue", &Parts::epilogue)
      .def_ro("fix_up", &Parts::fix_up);

  nb::class_<Kernels>(m, "Kernels",
                      "Kernels to choose from; one that this build lacks is known by its description alone.")
      .def(nb::init<std::vector<KernelInfo> const&>(), "infos"_a);

  nb::class_<Candidate>(m, "Candidate", "A kernel, its schedule and launch policy, and what it is expected to cost.")
      .def_prop_ro("kernel", [](Candidate const& candidate) { return candidate.kernel->info.name; })
      .def_ro("schedule", &Candidate::schedule)
      .def_ro("policy", &Candidate::policy)
      .def_ro("cost", &Candidate::cost);

  nb::class_<Choice>(m, "Choice",
                     "What choose() found: the cheapest candidates in order; without any, the closest refusal.")
      .def_ro("candidates", &Choice::candidates)
      .def_ro("workspace_bytes", &Choice::workspace_bytes,
              "Of the first candidate; None where a kernel that this build lacks would have to tell.")
      .def_ro("refusal", &Choice::refusal);
}

// The parts of a launch policy, for tests.
void bind_policies(nb::module_& m) {
  m.def(
      "goes_first",
      [](Machine const& machine, int32_t tiles_m, int32_t tiles_n, Schedule const& s, TilesOrder const& order,
         int32_t workers, Raster line, bool by_all_batches, bool again, int64_t bytes, int64_t others,
         int32_t element_bytes, int32_t slices, double multiply_adds, int32_t k_tiles) {
        auto const cut = Decomposition::make(s.kind, tiles_m * tiles_n, k_tiles, workers, s.splits);
        OperandUse const use{line, by_all_batches, again, bytes, others, element_bytes, slices, multiply_adds};
        return goes_first(TileOrder(tiles_m, tiles_n, order.first, order.second), cut, use, machine);
      },
      "machine"_a, "tiles_m"_a, "tiles_n"_a, "schedule"_a, "order"_a, "workers"_a, "line"_a, "by_all_batches"_a = false,
      "again"_a = false, "bytes"_a = 1, "others"_a = 1, "element_bytes"_a = 2, "slices"_a = 1, "multiply_adds"_a = 0.0,
      "k_tiles"_a = 64, "Whether what a line of tiles of one batch reads of an operand may leave L2 first.");
  m.def(
      "held_back",
      [](Machine const& machine, int32_t tiles, Schedule const& s, int32_t workers, int32_t ctas, int32_t sms,
         int32_t stages, int64_t stage_bytes, int64_t under_way) {
        auto const cut = Decomposition::make(s.kind, tiles, s.splits, workers, s.splits);
        HeldBack const held = held_back(cut, ctas, sms, stages, stage_bytes, under_way, machine);
        std::vector<int32_t> of_waves;
        for (int32_t left = tiles * s.splits, wave = 0; left > 0; left -= cut.workers, ++wave)
          of_waves.push_back(wave == 0 ? held.first : held.stages(wave));
        return of_waves;
      },
      "machine"_a, "tiles"_a, "schedule"_a, "workers"_a, "ctas"_a, "sms"_a, "stages"_a, "stage_bytes"_a, "under_way"_a,
      "Of each wave of whole tiles or slices, how many stages of a CTA its loads leave empty.");
  m.def(
      "idle_clusters",
      [](int32_t working, int32_t ctas, int32_t sms) {
        Idle const idle = idle_clusters(working, ctas, sms);
        return std::pair(idle.first, idle.count);
      },
      "working"_a, "ctas"_a, "sms"_a,
      "(first, count) of the clusters without work in a launch of `working` clusters of `ctas` CTAs.");
  m.def(
      "number_clusters",
      [](ClusterOrder order, uint8_t clusters, uint8_t idle, int32_t ctas) {
        std::vector<uint8_t> numbers(std::max(clusters, idle));
        number_clusters(order, clusters, idle, ctas, numbers.data());
        return std::vector<int32_t>(numbers.begin() + idle, numbers.end());
      },
      "order"_a, "clusters"_a, "idle"_a, "ctas"_a,
      "The numbers of the clusters of `ctas` CTAs in a ClusterOrder, without the first `idle` ones.");
}

}  // namespace

void bind_planner(nb::module_& m) {
  bind_values(m);
  bind_policies(m);
  m.def("majors", &majors_of, "kernel"_a, "few"_a,
        "The (majorness of A, of B) of problems that a kernel may run; of B with less than 8 columns if few.");
  m.def("k_tiles", &k_tiles, "kernel"_a, "problem"_a, "The k-tiles of a kernel for each tile of a problem.");
  m.def(
      "choose",
      [](Kernels const& kernels, GemmProblem const& p, std::optional<Schedule> const& wanted, Device const& device,
         Machine const& machine, size_t listed,
         std::string const& order) { return choose(kernels.all(), p, wanted, device, machine, listed, order); },
      "kernels"_a, "problem"_a, "schedule"_a.none(), "device"_a, "machine"_a, "listed"_a = 6, "order"_a = "",
      nb::keep_alive<0, 1>(),
      "The cheapest candidates, at most `listed`, among kernels of the problem's types and majorness, each of another "
      "kernel or kind of schedule; a schedule but None is the only one considered, and so is a sum order but \"\".");
  m.def("sum_order", &sum_order, "kernel"_a, "problem"_a, "schedule"_a,
        "In which order a KernelInfo adds up an element of D, as text: plans of one text give the same bits, however "
        "many rows or columns there are. \"\" where bits depend on these.");
  m.def(
      "costs_by_sum_order",
      [](Kernels const& kernels, GemmProblem const& p, std::optional<Schedule> const& wanted, Device const& device,
         Machine const& machine) { return costs_by_sum_order(kernels.all(), p, wanted, device, machine); },
      "kernels"_a, "problem"_a, "schedule"_a.none(), "device"_a, "machine"_a,
      "{sum order: the least time of a kernel with it, in microseconds}");
  m.def("estimate", &estimate, "kernel"_a, "problem"_a, "schedule"_a, "device"_a, "machine"_a,
        "The Cost of a kernel under a schedule in the best order of tiles, whether or not the kernel can run it.");
  m.def("most_ctas_per_sm", &most_ctas_per_sm, "kernel"_a, "device"_a,
        "CTAs of a CUDA kernel for which an SM has shared memory and threads; registers may allow fewer.");
  m.def("parts", &parts, "kernel"_a, "problem"_a, "schedule"_a, "device"_a, "machine"_a,
        "The Parts of what estimate() returns, of a kernel for GPUs.");
  m.def("launch_policy", &choose_policy, "kernel"_a, "problem"_a, "schedule"_a, "raster"_a, "swizzle"_a, "device"_a,
        "machine"_a, "The planner's LaunchPolicy for a KernelInfo that can run the problem, in this order of tiles.");
  m.def("first_wave", &wave_of, "kernel"_a, "problem"_a, "schedule"_a, "order"_a, "device"_a, "machine"_a,
        "The Wave that a CUDA kernel starts with.");

  nb::class_<Batch>(
      m, "Batch",
      "CUDA candidates, as a list of each of their parts, to estimate on one machine after another, all of "
      "the topology of the first.")
      .def(nb::init<nb::list, std::vector<GemmProblem>, std::vector<Schedule>, std::vector<TilesOrder>, Device const&,
                    Machine const&>(),
           "kernels"_a, "problems"_a, "schedules"_a, "orders"_a, "device"_a, "machine"_a)
      .def("microseconds", &Batch::microseconds, "machine"_a, "What each is expected to take.")
      .def("needs", &Batch::needs, "machine"_a, "What orders of tiles are ranked by, the least first.");
}

}  // namespace jax_streamk
