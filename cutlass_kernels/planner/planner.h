// Which kernel runs a problem, and how: the search over every kernel, schedule and order of tiles.
#pragma once

#include <map>
#include <optional>

#include "cutlass_kernels/launch/kernel.h"
#include "cutlass_kernels/planner/cost_model.h"

namespace jax_streamk {

struct Candidate {
  Kernel const* kernel;
  Schedule schedule;
  LaunchPolicy policy;
  Cost cost;
};

struct Choice {
  // Cheapest first, one for each kernel and kind of schedule.
  std::vector<Candidate> candidates;
  std::optional<int64_t> workspace_bytes = 0;  // empty where only a build that has the kernel knows
  std::string refusal;                         // if there are no candidates: the reason of the kernel that came closest
};

// Ok if choose() may take a kernel, else why not: it must run the problem, and its float32 results must be as accurate
// as XLA's.
Status may_serve(Kernel const&, GemmProblem const&, Schedule const&, Device const&);

// Chooses among kernels of the problem's types and majorness, and only the wanted schedule, if there is one, and the
// wanted sum order (sum_order.h), unless it is empty. The search takes longer the more candidates are `listed`.
Choice choose(std::vector<Kernel const*> const& kernels, GemmProblem const&, std::optional<Schedule> const& wanted,
              Device const&, Machine const&, size_t listed, std::string const& order);

// The least time, in microseconds, in each sum order that some kernel has.
std::map<std::string, double> costs_by_sum_order(std::vector<Kernel const*> const& kernels, GemmProblem const&,
                                                 std::optional<Schedule> const& wanted, Device const&, Machine const&);

}  // namespace jax_streamk
