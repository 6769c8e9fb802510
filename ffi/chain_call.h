// What the custom call of a chain carries: its steps, products or programs of rows, in order, and where each one's
// operands are.
#pragma once

#include <functional>
#include <vector>

#include "cutlass_kernels/passes/rows.h"
#include "ffi/gemm_call.h"

namespace jax_streamk {

// A place below zero is that of a buffer of the call: -1 is the first argument, and results follow arguments. Others
// are bytes from the start of the workspace.
struct ChainStep {
  std::optional<GemmCall> product;  // or else rows
  RowProgram rows;
  std::vector<int64_t> places;  // of a product's operands in the order of their roles, D among them, and its workspace
};

struct ChainCall {
  std::vector<ChainStep> steps;
};

xla::ffi::ErrorOr<ChainCall> decode_chain(xla::ffi::Dictionary attributes);

xla::ffi::Error instantiate_chain(xla::ffi::Dictionary attributes);

// How a platform runs a step; the second argument is whether the step before may still be running.
struct ChainRunner {
  std::function<Status(GemmCall const&, Buffers const&, bool)> product;
  std::function<Status(RowProgram const&, void* const* operands, bool)> rows;
};

// Checks the buffers of one execution and runs the steps. The last result is the workspace.
xla::ffi::Error run_chain(xla::ffi::Dictionary attributes, xla::ffi::RemainingArgs arguments,
                          xla::ffi::RemainingRets results, ChainRunner const& runner);

}  // namespace jax_streamk
