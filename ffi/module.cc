// jax_streamk._ffi: what the Python layer sees of the C++ side. Handlers for XLA, the registry of kernels, and the
// questions that planning and lowering ask of a kernel. Everything but resources() works without a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <thread>
#include <tuple>

#ifdef JAX_STREAMK_WITH_CUDA
#include "cutlass_kernels/core/cuda_kernel.h"
#else
#include "without_cuda.h"
#endif
#include "cutlass_kernels/passes/repack.h"
#include "cutlass_kernels/planner/planner.h"
#include "ffi/gemm_call.h"
#include "ffi/planner_bindings.h"
#include "ffi/timing.h"

namespace nb = nanobind;
using namespace nb::literals;

extern "C" {
XLA_FFI_Error* jax_streamk_host_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_host_execute(XLA_FFI_CallFrame*);
#ifdef JAX_STREAMK_WITH_CUDA
XLA_FFI_Error* jax_streamk_cuda_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_streamk_cuda_execute(XLA_FFI_CallFrame*);
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

template <Status (*ask)(Kernel const&, GemmProblem const&, Schedule const&, Device const&)>
std::optional<std::string> why_not(std::string const& name, GemmProblem const& p, Schedule const& s,
                                   Device const& device) {
  Status const status = ask(kernel_named(name), p, s, device);
  if (status.ok()) return std::nullopt;
  return status.message;
}

// [worker][piece] -> (tile, first MAC iteration, MAC iterations, peer, peers)
using Piece = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>;
std::vector<std::vector<Piece>> decomposition(std::string const& name, GemmProblem const& p, Schedule const& s,
                                              Device const& device) {
  Kernel const& kernel = kernel_that_runs(name, p, s, device);
  Decomposition const d = kernel.decomposition(repack_of(kernel.info, p).problem, s, device);
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

void launch(std::string const& name, GemmProblem const& p, Schedule const& s, Device const& device, uintptr_t a,
            uintptr_t b, uintptr_t d, uintptr_t workspace, uintptr_t stream, uintptr_t bias, uintptr_t residual) {
  Kernel const& kernel = kernel_that_runs(name, p, s, device);
  ThreadExecutor executor;
  auto const pointer = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  Status const status = kernel.run(
      p, s, device, {pointer(a), pointer(b), pointer(d), pointer(workspace), pointer(bias), pointer(residual)},
      pointer(stream), &executor);
  if (!status.ok()) throw std::runtime_error(status.message);
}

// Addresses of A, B, D, the bias and the residual.
using Addresses = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;
std::vector<double> time_launches_at(std::string const& name, GemmProblem const& p, Schedule const& s,
                                     Device const& device, std::vector<Addresses> const& addresses, uintptr_t workspace,
                                     int32_t repeats) {
  auto const pointer = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  std::vector<Buffers> sets;
  for (auto const& [a, b, d, bias, residual] : addresses)
    sets.push_back({pointer(a), pointer(b), pointer(d), pointer(workspace), pointer(bias), pointer(residual)});
  std::vector<double> microseconds;
  Status const status = time_launches(kernel_that_runs(name, p, s, device), p, s, device, sets, repeats, microseconds);
  if (!status.ok()) throw std::runtime_error(status.message);
  return microseconds;
}

std::pair<int32_t, int32_t> resources(KernelInfo const& info) {
  Resources out;
  Status const status = kernel_named(info.name).resources(out);
  if (!status.ok()) throw std::runtime_error(status.message);
  return {out.registers, out.ctas_per_sm};
}

// Every member of a KernelInfo, in their order, as pickle keeps them.
auto state_of(KernelInfo const& k) {
  return std::make_tuple(k.name, k.family, k.type_a, k.type_b, k.type_d, k.math, k.major_a, k.major_b, k.align_a,
                         k.align_b, k.align_d, k.tile_m, k.tile_n, k.tile_k, k.cluster_m, k.cluster_n, k.stages,
                         k.warp_schedule, k.swap_ab, k.split_k_reductions, k.stream_k_reductions, k.threads,
                         k.shared_memory, k.promotion_k);
}

void set_state(KernelInfo& info, decltype(state_of(info)) const& state) {
  std::apply([&](auto const&... members) { new (&info) KernelInfo{members...}; }, state);
}

template <typename Enum>
auto enumeration(nb::module_& m, char const* name, char const* doc, std::initializer_list<Enum> values) {
  auto type = nb::enum_<Enum>(m, name, doc, nb::is_arithmetic());
  for (Enum const value : values) type.value(name_of(value), value);
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "Kernels, their registry and their XLA FFI handlers.";
  // Plans and the list of kernels may live in caches until the process ends, which nanobind would report as leaks.
  nb::set_leak_warnings(false);

  enumeration<Family>(m, "Family", "Which template a kernel comes from.",
                      {Family::kHost, Family::kSm80, Family::kSm90, Family::kSkinny});
  enumeration<Type>(m, "Type", "Element types.",
                    {Type::kF64, Type::kF32, Type::kBF16, Type::kF16, Type::kS8, Type::kS32});
  enumeration<Major>(m, "Major", "row: the last index is contiguous.", {Major::kRow, Major::kColumn});
  enumeration<Math>(m, "Math", "What a product of two f32 numbers is.", {Math::kNative, Math::kTF32, Math::kTF32x3});
  enumeration<Reduction>(m, "Reduction", "How the partials of a shared tile become one.",
                         {Reduction::kOrdered, Reduction::kAtomic, Reduction::kSeparate});
  enumeration<Activation>(m, "Activation", "What the epilogue applies last.",
                          {Activation::kNone, Activation::kRelu, Activation::kGelu, Activation::kGeluTanh,
                           Activation::kSilu, Activation::kSigmoid, Activation::kTanh});
  enumeration<ScheduleKind>(m, "ScheduleKind", "How the MAC-iteration space is cut.",
                            {ScheduleKind::kDataParallel, ScheduleKind::kSplitK, ScheduleKind::kStreamK});
  enumeration<Raster>(m, "Raster", "Along which dimension consecutive tiles lie.", {Raster::kAlongM, Raster::kAlongN});

  nb::class_<GemmProblem>(
      m, "GemmProblem",
      "D[l] = activation(alpha * A[l] @ B[l] + beta * residual[l] + bias[l]): extents, types, majorness and "
      "strides in elements.")
      .def(
          "__init__",
          [](GemmProblem* self, int64_t batch, int64_t m_, int64_t n, int64_t k, Type type_a, Type type_b, Type type_d,
             Math math, Major major_a, Major major_b, int64_t lda, int64_t ldb, int64_t ldd, int64_t batch_stride_a,
             int64_t batch_stride_b, int64_t batch_stride_d, Activation activation, bool has_bias, bool has_residual,
             double alpha, double beta, int64_t batch_stride_bias) {
            new (self) GemmProblem{batch,
                                   m_,
                                   n,
                                   k,
                                   type_a,
                                   type_b,
                                   type_d,
                                   math,
                                   major_a,
                                   major_b,
                                   lda,
                                   ldb,
                                   ldd,
                                   batch_stride_a,
                                   batch_stride_b,
                                   batch_stride_d,
                                   {activation, has_bias, has_residual, alpha, beta, batch_stride_bias}};
          },
          "batch"_a, "m"_a, "n"_a, "k"_a, "type_a"_a, "type_b"_a, "type_d"_a, "math"_a, "major_a"_a, "major_b"_a,
          "lda"_a, "ldb"_a, "ldd"_a, "batch_stride_a"_a, "batch_stride_b"_a, "batch_stride_d"_a,
          "activation"_a = Activation::kNone, "has_bias"_a = false, "has_residual"_a = false, "alpha"_a = 1.0,
          "beta"_a = 1.0, "batch_stride_bias"_a = 0);

  nb::class_<Schedule>(m, "Schedule", "How one kernel launch cuts and orders its work.")
      .def(
          "__init__",
          [](Schedule* self, ScheduleKind schedule, int32_t splits, Reduction reduction, int32_t max_sms, Raster raster,
             int32_t swizzle) { new (self) Schedule{schedule, splits, reduction, max_sms, raster, swizzle}; },
          "schedule"_a, "splits"_a = 1, "reduction"_a = Reduction::kOrdered, "max_sms"_a = 0,
          "raster"_a = Raster::kAlongM, "swizzle"_a = 1)
      .def_ro("schedule", &Schedule::kind)
      .def_ro("splits", &Schedule::splits)
      .def_ro("reduction", &Schedule::reduction)
      .def_ro("raster", &Schedule::raster)
      .def_ro("swizzle", &Schedule::swizzle);

  nb::class_<Device>(
      m, "Device",
      "arch is 10 * major + minor of the compute capability, 0 for the host; of under_way machines.under_way tells.")
      .def(
          "__init__",
          [](Device* self, int32_t arch, int32_t sms, int64_t under_way) { new (self) Device{arch, sms, under_way}; },
          "arch"_a, "sms"_a, "under_way"_a = 0);

  nb::class_<KernelInfo>(m, "KernelInfo", "One kernel: of this build, or described, to plan for another.")
      .def(
          "__init__",
          [](KernelInfo* self, std::string name, Family family, Type type_ab, Type type_d, Math math, Major major_a,
             Major major_b, std::tuple<int32_t, int32_t, int32_t> tile, std::tuple<int32_t, int32_t> cluster,
             int32_t align_a, int32_t align_b, int32_t align_d, std::string warp_schedule, bool swap_ab,
             std::vector<Reduction> split_k, std::vector<Reduction> stream_k, int32_t stages, int32_t threads,
             int64_t shared_memory, int32_t promotion_k) {
            auto const [tile_m, tile_n, tile_k] = tile;
            auto const [cluster_m, cluster_n] = cluster;
            new (self) KernelInfo{std::move(name),
                                  family,
                                  type_ab,
                                  type_ab,
                                  type_d,
                                  math,
                                  major_a,
                                  major_b,
                                  align_a,
                                  align_b,
                                  align_d,
                                  tile_m,
                                  tile_n,
                                  tile_k,
                                  cluster_m,
                                  cluster_n,
                                  stages,
                                  std::move(warp_schedule),
                                  swap_ab,
                                  std::move(split_k),
                                  std::move(stream_k),
                                  threads,
                                  shared_memory,
                                  promotion_k};
          },
          "name"_a, "family"_a, "type_ab"_a, "type_d"_a, "math"_a, "major_a"_a, "major_b"_a, "tile"_a, "cluster"_a,
          "align_a"_a, "align_b"_a, "align_d"_a, "warp_schedule"_a, "swap_ab"_a, "split_k_reductions"_a,
          "stream_k_reductions"_a, "stages"_a = 1, "threads"_a = 1, "shared_memory"_a = 0, "promotion_k"_a = 0)
      .def_ro("name", &KernelInfo::name)
      .def_ro("family", &KernelInfo::family)
      .def_ro("type_a", &KernelInfo::type_a)
      .def_ro("type_b", &KernelInfo::type_b)
      .def_ro("type_d", &KernelInfo::type_d)
      .def_ro("math", &KernelInfo::math)
      .def_ro("major_a", &KernelInfo::major_a)
      .def_ro("major_b", &KernelInfo::major_b)
      .def_ro("align_a", &KernelInfo::align_a)
      .def_ro("align_b", &KernelInfo::align_b)
      .def_ro("align_d", &KernelInfo::align_d)
      .def_ro("tile_m", &KernelInfo::tile_m)
      .def_ro("tile_n", &KernelInfo::tile_n)
      .def_ro("tile_k", &KernelInfo::tile_k)
      .def_ro("cluster_m", &KernelInfo::cluster_m)
      .def_ro("cluster_n", &KernelInfo::cluster_n)
      .def_ro("stages", &KernelInfo::stages)
      .def_ro("warp_schedule", &KernelInfo::warp_schedule)
      .def_ro("swap_ab", &KernelInfo::swap_ab)
      .def_ro("split_k_reductions", &KernelInfo::split_k_reductions)
      .def_ro("stream_k_reductions", &KernelInfo::stream_k_reductions)
      .def_ro("threads", &KernelInfo::threads)
      .def_ro("shared_memory", &KernelInfo::shared_memory)
      .def_ro("promotion_k", &KernelInfo::promotion_k)
      .def("resources", &resources, "(registers per thread, CTAs per SM) on the current GPU; RuntimeError without one.")
      .def("__getstate__", &state_of)
      .def("__setstate__", &set_state)
      .def("__repr__", [](KernelInfo const& info) { return "<kernel " + info.name + ">"; });

  m.def("kernels", &kernel_infos, "Every kernel compiled into this build, ordered by name.");
  m.def("can_implement", &why_not<check>, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
        "None, or why the kernel cannot run the problem in this way.");
  m.def(
      "may_serve", &why_not<may_serve>, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
      "None, or why the planner does not take the kernel: can_implement's reason, or digits that its sums would lose.");
  m.def(
      "workspace_bytes",
      [](std::string const& name, GemmProblem const& p, Schedule const& s, Device const& device) {
        return kernel_that_runs(name, p, s, device).workspace_bytes(p, s, device);
      },
      "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
      "Bytes of workspace a launch needs; ValueError where can_implement says why not.");
  m.def("decomposition", &decomposition, "kernel"_a, "problem"_a, "schedule"_a, "device"_a,
        "For each worker, its pieces of work in order: (tile, first MAC iteration, MAC iterations, peer, peers). "
        "ValueError where can_implement says why not.");

  bind_planner(m);

  m.def("launch", &launch, "kernel"_a, "problem"_a, "schedule"_a, "device"_a, "a"_a, "b"_a, "d"_a, "workspace"_a,
        "stream"_a = 0, "bias"_a = 0, "residual"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
        "Runs a kernel on raw addresses, outside XLA: for tests that poison buffers and for measurements. On a GPU it "
        "returns once "
        "the launches are queued on the stream.");
  m.def("time_launches", &time_launches_at, "kernel"_a, "problem"_a, "schedule"_a, "device"_a, "sets"_a, "workspace"_a,
        "repeats"_a = 3, nb::call_guard<nb::gil_scoped_release>(),
        "Microseconds per launch, one number for each repeat, of launches on sets of raw addresses (A, B, D, bias, "
        "residual) in turn, "
        "on a GPU replayed as one CUDA graph. RuntimeError where a launch fails.");

  m.def(
      "host_handler", [] { return handlers(jax_streamk_host_instantiate, jax_streamk_host_execute); },
      "The stages of the handler for platform \"cpu\".");
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
      nb::call_guard<nb::gil_scoped_release>(), "Waits for the current GPU; raises what its kernels left behind.");
  m.def(
      "cuda_handler", [] { return handlers(jax_streamk_cuda_instantiate, jax_streamk_cuda_execute); },
      "The stages of the handler for platform \"CUDA\".");
#else
  m.attr("has_cuda") = false;
  m.attr("without_cuda") = JAX_STREAMK_WITHOUT_CUDA;
  m.attr("cuda_version") = 0;
#endif
}

}  // namespace jax_streamk
