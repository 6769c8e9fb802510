#pragma once

#include <nanobind/nanobind.h>

namespace jax_streamk {

// Adds the search for a plan, and its cost model, to the Python module.
void bind_planner(nanobind::module_&);

}  // namespace jax_streamk
