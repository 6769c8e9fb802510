// What the custom call of a chain carries: its steps, products or programs of rows, in order, and where each one's
// operands are.
#pragma once

#include <functional>

#include "cutlass_kernels/passes/rows.h"
#include "ffi/gemm_call.h"

namespace jax_streamk {

xla::ffi::Error instantiate_chain(xla::ffi::Dictionary attributes);

// How a platform runs a step; the last argument is how it may overlap its neighbours.
struct ChainRunner {
  std::function<Status(GemmCall const&, Buffers const&, Overlap const&)> product;
  std::function<Status(RowProgram const&, void* const* operands, RowOverlap)> rows;
};

// Checks the buffers of one execution and runs the steps. The last result is the workspace.
xla::ffi::Error run_chain(xla::ffi::Dictionary attributes, xla::ffi::RemainingArgs arguments,
                          xla::ffi::RemainingRets results, ChainRunner const& runner);

}  // namespace jax_streamk
