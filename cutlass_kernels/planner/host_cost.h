// What a problem costs CPU threads.
#pragma once

#include "cutlass_kernels/planner/cost_model.h"

namespace jax_streamk {

Cost host_cost(Workload const&, Schedule const&);

}  // namespace jax_streamk
