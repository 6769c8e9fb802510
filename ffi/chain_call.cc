#include "ffi/chain_call.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace jax_streamk {

namespace ffi = xla::ffi;

namespace {

// A place below zero is that of a buffer of the call: -1 is the first argument, and results follow arguments. Others
// are bytes from the start of the workspace.
struct ChainStep {
  std::optional<GemmCall> product;  // or else rows
  RowProgram rows;
  std::vector<int64_t> places;  // of a product's operands in the order of their roles, D among them, and its workspace
};

ffi::Unexpected<ffi::Error> refuse(std::string const& why) {
  return ffi::Unexpected(to_error(Status::invalid("a chain " + why)));
}

ffi::ErrorOr<RowProgram> decode_rows(ffi::Dictionary attributes) {
  auto const rows = attributes.get<int64_t>("rows"), columns = attributes.get<int64_t>("columns"),
             values = attributes.get<int64_t>("values"), numbers = attributes.get<int64_t>("numbers");
  auto const steps = attributes.get<ffi::Span<int32_t const>>("steps");
  auto const operands = attributes.get<ffi::Span<int64_t const>>("operands");
  auto const constants = attributes.get<ffi::Span<float const>>("constants");
  if (!rows || !columns || !values || !numbers || !steps || !operands || !constants)
    return refuse("has a program of rows without one of its attributes");
  RowProgram program;
  // What fits shared memory was planned, and is checked where it is launched.
  Status const status = make(program,
                             {*rows,
                              *columns,
                              *values,
                              *numbers,
                              {steps->begin(), steps->end()},
                              {operands->begin(), operands->end()},
                              {constants->begin(), constants->end()}},
                             {});
  if (!status.ok()) return ffi::Unexpected(to_error(status));
  return program;
}

constexpr size_t kPlaceOfD = 2;  // after A and B; the workspace is last

ffi::ErrorOr<ChainStep> decode_step(ffi::Dictionary attributes) {
  ChainStep step;
  auto const places = attributes.get<ffi::Span<int64_t const>>("places");
  if (!places) return ffi::Unexpected(places.error());
  step.places.assign(places->begin(), places->end());
  size_t least = 0;
  if (attributes.contains("rows")) {
    auto const fields = attributes.get<ffi::Dictionary>("rows");
    if (!fields) return ffi::Unexpected(fields.error());
    auto const rows = decode_rows(*fields);
    if (!rows) return ffi::Unexpected(rows.error());
    step.rows = *rows;
  } else {
    auto const product = attributes.get<GemmCall>("product");
    if (!product) return ffi::Unexpected(product.error());
    step.product = *product;
    least = kPlaceOfD + 2;
  }
  if (step.places.size() < least) return refuse("has a product without operands");
  return step;
}

// The places of a chain's execution.
class Memory {
 public:
  Memory(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    for (size_t i = 0; i < arguments.size(); ++i) buffers_.emplace_back(*arguments.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < results.size(); ++i) buffers_.emplace_back(**results.get<ffi::AnyBuffer>(i));
    workspace_ = Place(buffers_.back().data, buffers_.back().count);
    buffers_.pop_back();
  }

  // Empty if there is none.
  std::optional<Place> at(int64_t place) const {
    if (place < 0) {
      auto const index = static_cast<uint64_t>(-(place + 1));
      return index < buffers_.size() ? std::optional(buffers_[index]) : std::nullopt;
    }
    if (place > workspace_.count) return std::nullopt;
    return Place(static_cast<char*>(workspace_.data) + place, workspace_.count - place);
  }

 private:
  std::vector<Place> buffers_;
  Place workspace_;
};

Status run_rows(RowProgram const& p, std::vector<Place> const& places, ChainRunner const& runner, RowOverlap overlap) {
  if (static_cast<int32_t>(places.size()) != p.operand_count)
    return Status::invalid("a program of rows has as many places as operands");
  void* operands[RowProgram::kMostOperands];
  for (int i = 0; i < p.operand_count; ++i) {
    int64_t const size = size_of(Format{p.operands[i].type});
    bool const is_typed = places[i].type != ffi::DataType::INVALID;
    if ((is_typed && places[i].type != data_type(p.operands[i].type)) ||
        places[i].count / (is_typed ? 1 : size) < p.span(i) || reinterpret_cast<uintptr_t>(places[i].data) % size != 0)
      return Status::invalid("a program of rows was given a buffer of another type, or smaller, than it says");
    operands[i] = places[i].data;
  }
  return runner.rows(p, operands, overlap);
}

// Whether a product's bias, residual or scales are at a place that `is_made`: kernels read these through a cache that
// need not see what is written while they are resident.
template <class IsMade>
bool reads_late(ChainStep const& step, IsMade const& is_made) {
  return step.product && std::any_of(step.places.begin() + kPlaceOfD + 1, step.places.end() - 1, is_made);
}

std::vector<int64_t> places_stored(ChainStep const& step) {
  if (step.product) return {step.places[kPlaceOfD]};
  std::vector<int64_t> places;
  for (RowStep const* x = step.rows.steps; x < step.rows.steps + step.rows.step_count; ++x)
    if (RowOp(x->op) == RowOp::store) places.push_back(step.places[x->out]);
  return places;
}

ffi::ErrorOr<std::vector<ChainStep>> decode_chain(ffi::Dictionary attributes) {
  std::vector<ChainStep> steps;
  for (auto name = attributes.begin(); name != attributes.end(); ++name) {
    auto const fields = attributes.get<ffi::Dictionary>(*name);
    if (!fields) return ffi::Unexpected(fields.error());
    auto step = decode_step(*fields);
    if (!step) return ffi::Unexpected(step.error());
    steps.push_back(std::move(*step));
  }
  return steps;
}

}  // namespace

ffi::Error instantiate_chain(ffi::Dictionary attributes) {
  auto const chain = decode_chain(attributes);
  if (!chain) return chain.error();
  for (ChainStep const& step : *chain) {
    if (!step.product) continue;
    if (ffi::Error const error = instantiate(*step.product); error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error run_chain(ffi::Dictionary attributes, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                     ChainRunner const& runner) {
  auto const chain = decode_chain(attributes);
  if (!chain) return chain.error();
  if (results.size() < 1) return to_error(Status::invalid("a chain has no result for its workspace"));
  Memory const memory(arguments, results);
  auto const is_argument = [&](int64_t place) {
    return place < 0 && static_cast<uint64_t>(-(place + 1)) < arguments.size();
  };
  auto const is_made = [&](int64_t place) { return !is_argument(place); };
  std::vector<int64_t> stored;  // by the step before
  for (auto step = chain->begin(); step != chain->end(); ++step) {
    auto const is_stored = [&](int64_t place) {
      return std::find(stored.begin(), stored.end(), place) != stored.end();
    };
    bool const overlaps = step != chain->begin() && !reads_late(*step, is_stored);
    std::vector<Place> places;
    for (int64_t const at : step->places) {
      std::optional<Place> const place = memory.at(at);
      if (!place) return to_error(Status::invalid("a chain has an operand outside its buffers"));
      places.push_back(*place);
    }
    if (!step->product) {
      bool const is_last = step + 1 == chain->end();
      RowOverlap const overlap{overlaps, !is_last && !reads_late(step[1], is_made)};
      if (Status status = run_rows(step->rows, places, runner, overlap); !status.ok()) return to_error(status);
    } else {
      Place const workspace = places.back();
      places.pop_back();
      auto const buffers = check_places(*step->product, places, workspace);
      if (!buffers) return buffers.error();
      Overlap overlap;
      if (overlaps) overlap = {true, is_argument(step->places[0]), is_argument(step->places[1])};
      if (Status status = runner.product(*step->product, *buffers, overlap); !status.ok()) return to_error(status);
    }
    stored = places_stored(*step);
  }
  return ffi::Error::Success();
}

}  // namespace jax_streamk
