#include "cutlass_kernels/launch/kernel.h"

#include "cutlass_kernels/core/family.h"

namespace jax_streamk {
namespace {

// The GEMM of a separate split-K. It writes partial sums, slices x batches x m x (n rounded up to 16 bytes), and leaves
// the epilogue to the reduction.
GemmProblem into_partials(GemmProblem p) {
  p.d.format = accumulator_of(p.a.format);
  p.epilogue = {};
  int64_t const vector = 16 / size_of(p.d.format);
  p.d.ld = (p.n + vector - 1) / vector * vector;
  p.d.batch_stride = p.m * p.d.ld;
  return p;
}

}  // namespace

Launch::Launch(KernelInfo const& info, GemmProblem const& p, Schedule const& s)
    : copies(repack_of(info, p)), separate(is_separate(s) && !traits_of(info).is_host()) {
  problem = separate ? into_partials(copies.problem) : copies.problem;
  slices = separate ? Slices::of(problem.k, info.tile_k, s.splits) : Slices{1, problem.k};
  schedule = separate ? data_parallel(s) : s;
}

std::optional<int64_t> Kernel::workspace_bytes(GemmProblem const& p, Schedule const& s, Device const& device) const {
  Launch const launch(info, p, s);
  GemmProblem const q = launch.as_batch();
  if (launch.separate) return launch.copies.bytes() + align_workspace(q.batch * q.d.batch_stride * size_of(q.d.format));
  auto const own = launch_workspace_bytes(q, s, device);
  return own ? std::optional(launch.copies.bytes() + *own) : std::nullopt;
}

std::optional<int64_t> Kernel::launch_workspace_bytes(GemmProblem const& p, Schedule const& s,
                                                      Device const& device) const {
  return traits_of(info).workspace_bytes(info, p, s, device);
}

Decomposition Kernel::decomposition(GemmProblem const& p, Schedule const& s, Device const& device) const {
  return traits_of(info).decomposition(info, p, s, device);
}

Status Kernel::run(GemmProblem const&, Schedule const&, LaunchPolicy const&, Device const&, Buffers const&,
                   Queue const&) const {
  return Status::precondition(info.name + " is not compiled into this build");
}

Status Kernel::resources(Resources&) const { return Status::precondition(info.name + " does not run on a GPU"); }

}  // namespace jax_streamk
