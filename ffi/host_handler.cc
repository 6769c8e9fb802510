// The handler for platform "cpu".
#include <algorithm>
#include <string>
#include <vector>

#include "ffi/chain_call.h"
#include "ffi/pool_executor.h"

namespace jax_streamk {

namespace ffi = xla::ffi;

namespace {

ffi::Error execute(GemmCall call, ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs others,
                   ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  auto buffers = check_buffers(call, a, b, others, d, workspace);
  if (buffers.has_error()) return buffers.error();
  PoolExecutor executor(pool);
  return to_error(
      call.kernel->run(call.problem, call.schedule, call.policy, call.device, *buffers, {nullptr, &executor}));
}

Status run_rows(RowProgram const& p, void* const* operands, Executor& executor) {
  struct Shares {
    RowProgram const& program;
    void* const* operands;
    int64_t count;
  } shares{p, operands, std::min<int64_t>(p.rows, 64)};
  auto const run = [](void* context, int32_t at) {
    auto const& [p, operands, count] = *static_cast<Shares*>(context);
    std::vector<float> values(static_cast<size_t>(p.values) * p.columns + p.numbers);
    for (int64_t row = at * p.rows / count; row < (at + 1) * p.rows / count; ++row)
      run_row(p, operands, row, values.data());
  };
  executor.parallel(static_cast<int32_t>(shares.count), run, &shares);
  return {};
}

ffi::Error execute_chain(ffi::Dictionary attributes, ffi::ThreadPool pool, ffi::RemainingArgs arguments,
                         ffi::RemainingRets results) {
  PoolExecutor executor(pool);
  return run_chain(
      attributes, arguments, results,
      {[&](GemmCall const& call, Buffers const& buffers, Overlap const&) {
         return call.kernel->run(call.problem, call.schedule, call.policy, call.device, buffers, {nullptr, &executor});
       },
       [&](RowProgram const& p, void* const* operands, RowOverlap) { return run_rows(p, operands, executor); }});
}

// Writes the decoded attributes into a float64 result, for tests.
ffi::Error echo(GemmCall call, ffi::Result<ffi::BufferR1<ffi::F64>> out) {
  std::vector<double> const numbers = numbers_of(call);
  if (out->element_count() != numbers.size())
    return to_error(Status::invalid("a call has " + std::to_string(numbers.size()) + " numbers"));
  std::copy(numbers.begin(), numbers.end(), out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_echo, echo,
                              ffi::Ffi::Bind().Attrs<GemmCall>().Ret<ffi::BufferR1<ffi::F64>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_host_instantiate, instantiate, ffi::Ffi::BindInstantiate().Attrs<GemmCall>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_host_execute, execute,
                              ffi::Ffi::Bind()
                                  .Attrs<GemmCall>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_host_chain_instantiate, instantiate_chain,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_streamk_host_chain_execute, execute_chain,
                              ffi::Ffi::Bind().Attrs().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());

}  // namespace jax_streamk
