// jax_streamk._ffi: what Python sees of the C++ side. Handlers for XLA, the registry of kernels, and what planning and
// lowering ask about a kernel. Everything but resources() works without a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <iterator>
#include <optional>
#include <thread>
#include <tuple>

#ifdef JAX_STREAMK_WITH_CUDA
#include "cutlass_kernels/core/cuda.h"
#else
#include "without_cuda.h"
#endif
#include "cutlass_kernels/core/family.h"
#include "cutlass_kernels/launch/policy.h"
#include "cutlass_kernels/passes/rows.h"
#include "cutlass_kernels/planner/planner.h"
#include "ffi/fields.h"
#include "ffi/gemm_call.h"
#include "ffi/planner_bindings.h"
#ifdef JAX_STREAMK_RECORD
#include "ffi/record.h"
#endif
#include "ffi/timing.h"
#include "ffi/work_units.h"

namespace nb = nanobind;
using namespace nb::literals;

extern "C" {
XLA_FFI_Error* jax_streamk_echo(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_host_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_host_execute(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_host_chain_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_host_chain_execute(XLA_FFI_CallFrame*);
#ifdef JAX_STREAMK_WITH_CUDA
XLA_FFI_Error* jax_streamk_cuda_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_cuda_execute(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_cuda_chain_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_cuda_chain_execute(XLA_FFI_CallFrame*);
#endif
}

namespace jax_streamk {
namespace {

nb::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict handlers(XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*), XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
  nb::dict stages;
  stages["instantiate"] = capsule(instantiate);
  stages["execute"] = capsule(execute);
  return stages;
}

Kernel const& kernel_named(std::string const& name) {
  Kernel const* const kernel = find_kernel(name);
  if (kernel == nullptr) throw nb::key_error(("no kernel named " + name + " was compiled").c_str());
  return *kernel;
}

std::vector<KernelInfo> kernel_infos() {
  std::vector<KernelInfo> infos;
  for (auto const& kernel : kernels()) infos.push_back(kernel->info);
  return infos;
}

Kernel const& kernel_that_runs(std::string const& name, GemmProblem const& p, Schedule const& s, Device const& device) {
  Kernel const& kernel = kernel_named(name);
  Status const status = check(kernel, p, s, device);
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return kernel;
}

// Checks the launch policy too.
Kernel const& kernel_that_launches(std::string const& name, GemmProblem const& p, Schedule const& s,
                                   LaunchPolicy const& policy, Device const& device) {
  Kernel const& kernel = kernel_that_runs(name, p, s, device);
  Status const status = check_policy(kernel.info, p, s, policy, device);
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return kernel;
}

template <Status (*ask)(Kernel const&, GemmProblem const&, Schedule const&, Device const&)>
std::optional<std::string> why_not(std::string const& name, GemmProblem const& p, Schedule const& s,
                                   Device const& device) {
  Status const status = ask(kernel_named(name), p, s, device);
  if (status.ok()) return std::nullopt;
  return status.message;
}

std::optional<std::string> why_not_so(KernelInfo const& info, GemmProblem const& p, Schedule const& s,
                                      LaunchPolicy const& policy, Device const& device) {
  Status const status = check_policy(info, p, s, policy, device);
  if (status.ok()) return std::nullopt;
  return status.message;
}

// [worker][piece] -> (tile, first MAC iteration, MAC iterations, peer, peers)
using Piece = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>;
std::vector<std::vector<Piece>> decomposition(std::string const& name, GemmProblem const& p, Schedule const& s,
                                              Device const& device) {
  Kernel const& kernel = kernel_that_runs(name, p, s, device);
  Decomposition const d = kernel.decomposition(Launch(kernel.info, p, {}).problem, s, device);
  std::vector<std::vector<Piece>> workers(d.workers);
  for (int32_t worker = 0; worker < d.workers; ++worker) {
    Work work;
    for (int32_t ordinal = 0; d.work(worker, ordinal, work); ++ordinal)
      workers[worker].emplace_back(work.tile, work.k_begin, work.k_count, work.peer, work.peers);
  }
  return workers;
}

class ThreadExecutor final : public Executor {
 public:
  void parallel(int32_t count, void (*work)(void*, int32_t), void* context) override {
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < count; ++i) threads.emplace_back(work, context, i);
    for (std::thread& thread : threads) thread.join();
  }
};

using Addresses = std::vector<uintptr_t>;  // by role; those at the end may be left out

Buffers buffers_at(Addresses const& addresses, uintptr_t workspace) {
  Buffers buffers{nullptr, nullptr, nullptr, reinterpret_cast<void*>(workspace)};
  if (addresses.size() > std::size(kRoles)) throw std::invalid_argument("more addresses than operands");
  for (size_t i = 0; i < addresses.size(); ++i) buffers.set(kRoles[i], reinterpret_cast<void*>(addresses[i]));
  return buffers;
}

void launch(std::string const& name, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
            Device const& device, Addresses const& addresses, uintptr_t workspace, uintptr_t stream) {
  Kernel const& kernel = kernel_that_launches(name, p, s, policy, device);
  ThreadExecutor executor;
  Status const status =
      kernel.run(p, s, policy, device, buffers_at(addresses, workspace), {reinterpret_cast<void*>(stream), &executor});
  if (!status.ok()) throw std::runtime_error(status.message);
}

std::vector<double> time_launches_at(std::string const& name, GemmProblem const& p, Schedule const& s,
                                     LaunchPolicy const& policy, Device const& device,
                                     std::vector<Addresses> const& addresses, uintptr_t workspace, int32_t repeats) {
  std::vector<Buffers> sets;
  for (Addresses const& set : addresses) sets.push_back(buffers_at(set, workspace));
  std::vector<double> microseconds;
  Status const status = time_launches(kernel_that_launches(name, p, s, policy, device), p, s, policy, device, sets,
                                      repeats, microseconds);
  if (!status.ok()) throw std::runtime_error(status.message);
  return microseconds;
}

#ifdef JAX_STREAMK_RECORD
std::vector<std::array<int64_t, 7>> record_work(std::string const& name, GemmProblem const& p, Schedule const& s,
                                                LaunchPolicy const& policy, Device const& device,
                                                Addresses const& addresses, uintptr_t workspace) {
  std::vector<WorkRecord> records;
  Status const status = record_launch(kernel_that_launches(name, p, s, policy, device), p, s, policy, device,
                                      buffers_at(addresses, workspace), records);
  if (!status.ok()) throw std::runtime_error(status.message);
  std::vector<std::array<int64_t, 7>> rows;
  for (WorkRecord const& r : records) rows.push_back({r.cta_x, r.cta_y, r.m, r.n, r.batch, r.k_begin, r.k_end});
  return rows;
}
#endif

// The roles of operands, as the members of Buffers that hold them, in the order in which calls take them.
nb::tuple roles() {
#define JAX_STREAMK_NAME(role, member, words) #member,
  char const* const names[] = {JAX_STREAMK_ROLES(JAX_STREAMK_NAME)};
#undef JAX_STREAMK_NAME
  nb::list found;
  for (char const* name : names) found.append(name);
  return nb::tuple(found);
}

// For each role: the type, and the number of elements from the first to the last (0 if the operand is absent).
std::vector<std::pair<Type, int64_t>> spans(GemmProblem const& p) {
  std::vector<std::pair<Type, int64_t>> found;
  for (Role const role : kRoles) {
    int64_t const span = p.has(role) ? static_cast<int64_t>(p.span(role)) : 0;
    found.emplace_back(p.operand(role).format.type, span);
  }
  return found;
}

std::pair<int32_t, int32_t> resources(KernelInfo const& info) {
  Resources out;
  Status const status = kernel_named(info.name).resources(out);
  if (!status.ok()) throw std::runtime_error(status.message);
  return {out.registers, out.ctas_per_sm};
}

char const* platform_of(KernelInfo const& info) { return traits_of(info).is_host() ? "cpu" : "cuda"; }

char const* worker_of(KernelInfo const& info) { return traits_of(info).worker; }

bool adds_in_cluster(KernelInfo const& info) { return traits_of(info).adds_in_cluster(); }

// Every field by name, for pickle.
nb::dict state_of(KernelInfo const& info) {
  nb::dict state;
#define JAX_STREAMK_GET(name, place) state[#name] = info.place;
  JAX_STREAMK_KERNEL_FIELDS(JAX_STREAMK_GET, JAX_STREAMK_GET)
#undef JAX_STREAMK_GET
  return state;
}

void set_state(KernelInfo& info, nb::dict const& state) {
  new (&info) KernelInfo{};
#define JAX_STREAMK_PUT(name, place) info.place = nb::cast<decltype(KernelInfo::place)>(state[#name]);
  JAX_STREAMK_KERNEL_FIELDS(JAX_STREAMK_PUT, JAX_STREAMK_PUT)
#undef JAX_STREAMK_PUT
}

template <typename Enum>
void enumeration(nb::module_& m, char const* name, char const* doc, int32_t count) {
  auto type = nb::enum_<Enum>(m, name, doc, nb::is_arithmetic());
  for (int32_t i = 0; i < count; ++i) type.value(name_of(Enum{i}), Enum{i});
}

// An attribute of an enumeration's values.
template <typename Function>
void property(nb::handle type, char const* name, Function function) {
  nb::setattr(type, name, nb::module_::import_("builtins").attr("property")(nb::cpp_function(function)));
}

nb::object numpy_type(Type type) {
  char const* name = "";
  switch (type) {
#define JAX_STREAMK_TYPE(type, name_, bits, numpy, xla) \
  case Type::type: name = numpy; break;
#include "cutlass_kernels/core/types.def"
  }
  nb::module_::import_("ml_dtypes");  // which tells NumPy its types
  return nb::module_::import_("numpy").attr("dtype")(name);
}

void bind_enumerations(nb::module_& m) {
  constexpr Type kTypes[] = {
#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) Type::type,
#include "cutlass_kernels/core/types.def"
  };
  enumeration<Type>(m, "Type", "Element types; ``bits`` of an element, and NumPy's ``dtype``.", std::size(kTypes));
  property(m.attr("Type"), "bits", [](Type type) { return Format{type}.bits(); });
  property(m.attr("Type"), "dtype", &numpy_type);
#define JAX_STREAMK_ENUM(type, values, doc) enumeration<type>(m, #type, doc, kCount<type>);
  JAX_STREAMK_ENUMS(JAX_STREAMK_ENUM)
#undef JAX_STREAMK_ENUM
}

void bind_structs(nb::module_& m) {
  nb::class_<GemmProblem> problem(
      m, "GemmProblem",
      "D[l] = activation(alpha * A[l] @ B[l] + beta * residual[l] + bias[l]): extents, types, majorness and strides in "
      "elements.");
  JAX_STREAMK_BIND_FIELDS(problem, JAX_STREAMK_PROBLEM_FIELDS);
  problem.def("spans", &spans,
              "For each of `roles`: the type, and the number of elements from the first to the last (0 if absent).");

  nb::class_<Schedule> schedule(m, "Schedule", "How one kernel launch cuts its work.");
  JAX_STREAMK_BIND_FIELDS(schedule, JAX_STREAMK_SCHEDULE_FIELDS);

  nb::class_<LaunchPolicy> policy(m, "LaunchPolicy",
                                  "The native side of launch_policy.LaunchPolicy, which documents the fields.");
  JAX_STREAMK_BIND_FIELDS(policy, JAX_STREAMK_POLICY_FIELDS);

  nb::class_<Device> device(
      m, "Device",
      "arch is 10 * major + minor of the compute capability, 0 for the host; under_way is machines.under_way's.");
  JAX_STREAMK_BIND_FIELDS(device, JAX_STREAMK_DEVICE_FIELDS);

  nb::class_<KernelInfo> kernel(m, "KernelInfo", "A kernel of this build, or described in order to plan for another.");
  JAX_STREAMK_BIND_FIELDS(kernel, JAX_STREAMK_KERNEL_FIELDS);
  kernel.def_prop_ro("platform", &platform_of, "JAX's name of what it runs on.")
      .def_prop_ro("worker", &worker_of,
                   "What a worker of the decomposition is: \"thread\", \"SM\", or \"CTA\" (a cluster counts as one).")
      .def_prop_ro("adds_in_cluster", &adds_in_cluster, "Whether a cluster of CTAs adds the partial sums of a tile.")
      .def("resources", &resources, "(registers per thread, CTAs per SM) on the current GPU; RuntimeError without one.")
      .def("__getstate__", &state_of)
      .def("__setstate__", &set_state)
      .def("__repr__", [](KernelInfo const& info) { return "<kernel " + info.name + ">"; });
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "Kernels, their registry and their XLA FFI handlers.";
  // Caches may hold plans and kernels until the process ends, which nanobind would report as leaks.
  nb::set_leak_warnings(false);
  m.attr("roles") = roles();

  bind_enumerations(m);
  bind_structs(m);
  m.def("kernels", &kernel_infos, "Every kernel compiled into this build, ordered by name.");
  m.def("can_implement", &why_not<check>, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
        "None, or why the kernel cannot run the problem under the schedule.");
  m.def("may_serve", &why_not<may_serve>, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
        "None, or why the planner does not use the kernel: can_implement's reason, or sums that are not exact enough.");
  m.def(
      "workspace_bytes",
      [](std::string const& name, GemmProblem const& p, Schedule const& s, Device const& device) {
        return kernel_that_runs(name, p, s, device).workspace_bytes(p, s, device);
      },
      "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
      "Bytes of workspace that a launch needs. ValueError if can_implement gives a reason.");
  m.def("decomposition", &decomposition, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
        "For each worker, its pieces of work in order: (tile, first MAC iteration, MAC iterations, peer, peers). "
        "ValueError if can_implement gives a reason.");

  m.def(
      "check_policy", &why_not_so, "kernel"_a, "problem"_a, "schedule"_a, "policy"_a, "device"_a,
      "None, or why a kernel, by name or KernelInfo, that can run the problem cannot be launched as the policy says.");
  m.def(
      "check_policy",
      [](std::string const& name, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
         Device const& device) { return why_not_so(kernel_named(name).info, p, s, policy, device); },
      "kernel"_a, "problem"_a, "schedule"_a, "policy"_a, "device"_a);

  bind_planner(m);
  bind_work_units(m);

  m.def("launch", &launch, "kernel"_a, "problem"_a, "schedule"_a, "policy"_a, "device"_a, "addresses"_a, "workspace"_a,
        "stream"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
        "Runs a kernel on raw addresses, in the order of gemm_fields.h's roles and 0 if absent, outside XLA: for tests "
        "that poison buffers. On a GPU it returns once the launches are queued on the stream.");
  m.def("time_launches", &time_launches_at, "kernel"_a, "problem"_a, "schedule"_a, "policy"_a, "device"_a, "sets"_a,
        "workspace"_a, "repeats"_a = 3, nb::call_guard<nb::gil_scoped_release>(),
        "Microseconds per launch for each repeat. A repeat launches on each set of addresses (as for launch()); on a "
        "GPU it is the replay of one CUDA graph. RuntimeError if a launch fails.");
#ifdef JAX_STREAMK_RECORD
  m.def("record_work", &record_work, "kernel"_a, "problem"_a, "schedule"_a, "policy"_a, "device"_a, "addresses"_a,
        "workspace"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Launches as launch() does, waits, and returns what the CTAs of the GEMM worked on, in the order in which they "
        "began: (CTA along x and y, tile along m, n and batch, first k-tile, the one after the last).");
#endif

  m.def(
      "echo_handler", [] { return capsule(jax_streamk_echo); },
      "A handler for \"cpu\" that decodes the attributes into a float64 result: a number for each field of problem, "
      "schedule, launch policy and device, in order.");
  m.def(
      "host_handler", [] { return handlers(jax_streamk_host_instantiate, jax_streamk_host_execute); },
      "The stages of the handler for platform \"cpu\".");
  nb::dict row_ops;
#define JAX_STREAMK_ROW_OP(name, reads) row_ops[#name] = static_cast<int>(RowOp::name);
  JAX_STREAMK_ROW_OPS(JAX_STREAMK_ROW_OP)
#undef JAX_STREAMK_ROW_OP
  m.attr("row_ops") = row_ops;  // the number of each in a program of rows, by name
  m.attr("first_row_number") = kNumbers;
  m.def(
      "why_no_rows",
      [](int64_t rows, int64_t columns, int64_t values, int64_t numbers, std::vector<int32_t> steps,
         std::vector<int64_t> operands, std::vector<float> constants, Device const& device) {
        RowProgram program;
        return make(program,
                    {rows, columns, values, numbers, std::move(steps), std::move(operands), std::move(constants)},
                    device)
            .message;
      },
      "rows"_a, "columns"_a, "values"_a, "numbers"_a, "steps"_a, "operands"_a, "constants"_a, "device"_a,
      "Why a program of rows cannot run; \"\" if it can.");
  m.def(
      "host_chain_handler", [] { return handlers(jax_streamk_host_chain_instantiate, jax_streamk_host_chain_execute); },
      "The stages of the handler of chains for platform \"cpu\".");
#ifdef JAX_STREAMK_WITH_CUDA
  m.attr("has_cuda") = true;
  m.attr("without_cuda") = "";              // why there are no CUDA kernels, and how to build them
  m.attr("cuda_version") = CUDART_VERSION;  // 1000 * major + 10 * minor; 0 in a build without CUDA
  m.def(
      "synchronize",
      [] {
        Status const status = from_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        if (!status.ok()) throw std::runtime_error(status.message);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Waits for the current GPU; RuntimeError if its kernels failed.");
  m.def(
      "cuda_handler", [] { return handlers(jax_streamk_cuda_instantiate, jax_streamk_cuda_execute); },
      "The stages of the handler for platform \"CUDA\".");
  m.def(
      "cuda_chain_handler", [] { return handlers(jax_streamk_cuda_chain_instantiate, jax_streamk_cuda_chain_execute); },
      "The stages of the handler of chains for platform \"CUDA\".");
#else
  m.attr("has_cuda") = false;
  m.attr("without_cuda") = JAX_STREAMK_WITHOUT_CUDA;
  m.attr("cuda_version") = 0;
#endif
}

}  // namespace jax_streamk
