#pragma once

#include <nanobind/nanobind.h>

namespace jax_streamk {

// Adds work_units() to the Python module: what each worker of a launch does, as pictures and explanations of plans show
// it.
void bind_work_units(nanobind::module_&);

}  // namespace jax_streamk
