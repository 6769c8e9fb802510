#include "ffi/timing.h"

#include <chrono>
#include <unsupported/Eigen/CXX11/ThreadPool>

#include "ffi/pool_executor.h"

#ifdef JAX_STREAMK_WITH_CUDA
#include "cutlass_kernels/core/cuda.h"
#endif

namespace jax_streamk {
namespace {

// Stands in for XLA's thread pool, which is Eigen's too.
struct Threads : Eigen::ThreadPool {
  using Eigen::ThreadPool::ThreadPool;
  int64_t num_threads() const { return NumThreads(); }
};

Status time_on_host(Kernel const& kernel, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                    Device const& device, std::vector<Buffers> const& sets, int32_t repeats,
                    std::vector<double>& microseconds) {
  Threads threads(device.sms);
  PoolExecutor executor(threads);
  Status status = kernel.run(p, s, policy, device, sets[0], {nullptr, &executor});  // to warm up
  for (int32_t i = 0; i < repeats && status.ok(); ++i) {
    auto const started = std::chrono::steady_clock::now();
    for (Buffers const& buffers : sets)
      if (status.ok()) status = kernel.run(p, s, policy, device, buffers, {nullptr, &executor});
    std::chrono::duration<double, std::micro> const took = std::chrono::steady_clock::now() - started;
    microseconds.push_back(took.count() / static_cast<double>(sets.size()));
  }
  return status;
}

#ifdef JAX_STREAMK_WITH_CUDA

// Makes a GPU current, and restores the previous one at the end.
class CurrentDevice {
 public:
  ~CurrentDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }

  Status set(int device) {
    int before = 0;
    if (Status status = from_cuda(cudaGetDevice(&before), "cudaGetDevice"); !status.ok()) return status;
    before_ = before;
    return from_cuda(cudaSetDevice(device), "cudaSetDevice");
  }

 private:
  int before_ = -1;
};

// Owns what a measurement creates.
struct Recording {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;

  Recording() = default;
  Recording(Recording const&) = delete;

  ~Recording() {
    if (stream != nullptr) cudaStreamSynchronize(stream);  // after a failed step, work may be left on it
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  // A launch per set, as one graph.
  Status capture(Kernel const& kernel, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                 Device const& device, std::vector<Buffers> const& sets) {
    // In this mode other threads, such as XLA's, neither fail because of the capture nor invalidate it.
    Status status =
        from_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    if (!status.ok()) return status;
    for (Buffers const& buffers : sets)
      if (status.ok()) status = kernel.run(p, s, policy, device, buffers, {stream});
    Status const ended = from_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    if (!status.ok()) return status;
    if (!ended.ok()) return ended;
    return from_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  }

  Status replay(float& milliseconds) {
    Status status = from_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
    if (status.ok()) status = from_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    if (status.ok()) status = from_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    if (status.ok()) status = from_cuda(cudaEventSynchronize(end), "replaying the launches");
    if (status.ok()) status = from_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    return status;
  }
};

Status time_on_gpu(Kernel const& kernel, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                   Device const& device, std::vector<Buffers> const& sets, int32_t repeats,
                   std::vector<double>& microseconds) {
  cudaPointerAttributes where{};
  Status status = from_cuda(cudaPointerGetAttributes(&where, sets[0].d), "cudaPointerGetAttributes");
  if (!status.ok()) return status;
  if (where.type != cudaMemoryTypeDevice && where.type != cudaMemoryTypeManaged)
    return Status::invalid(kernel.info.name + " was given buffers that are not a GPU's");
  CurrentDevice current;
  Recording recording;  // destroyed while its GPU is current
  if (status = current.set(where.device); !status.ok()) return status;
  status = from_cuda(cudaStreamCreateWithFlags(&recording.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  if (status.ok()) status = from_cuda(cudaEventCreate(&recording.begin), "cudaEventCreate");
  if (status.ok()) status = from_cuda(cudaEventCreate(&recording.end), "cudaEventCreate");
  // Once without a graph: a capture does not allow the loading of code by a first launch.
  if (status.ok()) status = kernel.run(p, s, policy, device, sets[0], {recording.stream});
  if (status.ok()) status = from_cuda(cudaStreamSynchronize(recording.stream), kernel.info.name);
  if (status.ok()) status = recording.capture(kernel, p, s, policy, device, sets);
  for (int32_t i = -1; i < repeats && status.ok(); ++i) {
    float milliseconds = 0;
    status = recording.replay(milliseconds);
    if (i >= 0) microseconds.push_back(1e3 * milliseconds / static_cast<double>(sets.size()));  // the first warms up
  }
  if (!status.ok()) cudaGetLastError();  // clears the error, which somebody else would find
  return status;
}

#endif

}  // namespace

Status time_launches(Kernel const& kernel, GemmProblem const& p, Schedule const& s, LaunchPolicy const& policy,
                     Device const& device, std::vector<Buffers> const& sets, int32_t repeats,
                     std::vector<double>& microseconds) {
  if (sets.empty()) return Status::invalid("there must be at least one set of buffers");
#ifdef JAX_STREAMK_WITH_CUDA
  if (device.arch != 0) return time_on_gpu(kernel, p, s, policy, device, sets, repeats, microseconds);
#endif
  return time_on_host(kernel, p, s, policy, device, sets, repeats, microseconds);
}

}  // namespace jax_streamk
