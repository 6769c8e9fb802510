// A kernel, whether this build has it or only its description, and the registry of those it has.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cutlass_kernels/launch/launch.h"

namespace jax_streamk {

struct Resources {
  int32_t registers = 0;  // per thread
  int32_t ctas_per_sm = 0;
};

// Runs work(0) ... work(count - 1), possibly concurrently, and returns when all are done.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void parallel(int32_t count, void (*work)(void* context, int32_t index), void* context) = 0;
};

// Where a call runs.
struct Queue {
  void* stream = nullptr;        // of CUDA families: a cudaStream_t
  Executor* executor = nullptr;  // of the host family
  Overlap overlap = {};          // whether the kernel before on the stream, which may have made operands, may still run
};

// By itself it is one that this build lacks: all but running it, and sometimes its workspace, follows from KernelInfo.
class Kernel {
 public:
  explicit Kernel(KernelInfo info) : info(std::move(info)) {}
  virtual ~Kernel() = default;

  // Empty if only a build that has the kernel knows.
  std::optional<int64_t> workspace_bytes(GemmProblem const&, Schedule const&, Device const&) const;
  // The grid of output tiles and MAC iterations, and which worker does which, without copies and separate reduction.
  Decomposition decomposition(GemmProblem const&, Schedule const&, Device const&) const;
  // CUDA families launch, and never synchronize or allocate.
  virtual Status run(GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&, Buffers const&,
                     Queue const&) const;
  // CUDA families query the current device, so this needs a GPU.
  virtual Status resources(Resources&) const;

  KernelInfo const info;

 protected:
  // Of one launch.
  virtual std::optional<int64_t> launch_workspace_bytes(GemmProblem const&, Schedule const&, Device const&) const;
};

// Every kernel that was compiled into this build, ordered by name.
std::vector<std::unique_ptr<Kernel>> const& kernels();
Kernel const* find_kernel(std::string_view name);

// A translation unit generated from a table registers its kernels by defining these at namespace scope.
struct Registration {
  explicit Registration(std::unique_ptr<Kernel> kernel);
};

// Ok, or why the kernel cannot run the problem under this schedule. InvalidArgument names the kernel, the shape and the
// limit; FailedPrecondition names a device that it is not compiled for. To be called before any other function.
Status check(Kernel const&, GemmProblem const&, Schedule const&, Device const&);
// Whether check() is ok, for frequent calls: refusals make no message.
bool can_run(Kernel const&, GemmProblem const&, Schedule const&, Device const&);
// The beginning of every refusal: the kernel and the shape.
std::string cannot_run(KernelInfo const&, GemmProblem const&);

}  // namespace jax_streamk
