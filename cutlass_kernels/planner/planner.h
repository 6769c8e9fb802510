// Which kernel runs a problem, and how: the search over every kernel, schedule and order of tiles.
#pragma once

#include <optional>

#include "cutlass_kernels/planner/cost_model.h"

namespace jax_streamk {

struct Candidate {
  Kernel const* kernel;
  Schedule schedule;
  LaunchPolicy policy;
  Cost cost;
};

struct Choice {
  // The cheapest candidate, then runners-up: the cheapest of another kernel, or of another kind of schedule, each.
  std::vector<Candidate> candidates;
  int64_t workspace_bytes = 0;
  std::string refusal;  // without candidates, why: what the kernel that came closest says
};

// Ok where choose() may take a kernel: it can run the problem, and truncates no digits of a float32 result that XLA's
// has; else why not.
Status may_serve(Kernel const&, GemmProblem const&, Schedule const&, Device const&);

// Chooses among kernels of the problem's types and majorness. A schedule that is wanted is the only one considered.
// Lists at most `listed` candidates: the more, the longer the search.
Choice choose(std::vector<Kernel const*> const& kernels, GemmProblem const&, std::optional<Schedule> const& wanted,
              Device const&, Machine const&, size_t listed);

}  // namespace jax_streamk
