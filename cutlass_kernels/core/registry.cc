#include "cutlass_kernels/core/registry.h"

#include <algorithm>

namespace jax_streamk {

int32_t Format::bits() const {
  switch (type) {
#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) \
  case Type::type: return bits;
#include "cutlass_kernels/core/types.def"
  }
  return 0;
}

Type accumulator_of(Format const& operand) {
  return operand == Type::kF64 ? Type::kF64 : operand == Type::kS8 ? Type::kS32 : Type::kF32;
}

char const* name_of(Role role) {
  switch (role) {
#define JAX_STREAMK_ROLE(role, member, words) \
  case Role::role: return words;
    JAX_STREAMK_ROLES(JAX_STREAMK_ROLE)
#undef JAX_STREAMK_ROLE
  }
  return "?";
}

char const* name_of(Family family) {
  switch (family) {
    case Family::kHost: return "host";
    case Family::kSm80: return "sm80";
    case Family::kSm90: return "sm90";
    case Family::kSkinny: return "skinny";
  }
  return "?";
}

char const* name_of(Type type) {
  switch (type) {
#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) \
  case Type::type: return name;
#include "cutlass_kernels/core/types.def"
  }
  return "?";
}

char const* name_of(Major major) { return major == Major::kRow ? "row" : "column"; }

char const* name_of(Math math) {
  switch (math) {
    case Math::kNative: return "native";
    case Math::kTF32: return "tf32";
    case Math::kTF32x3: return "tf32x3";
  }
  return "?";
}

char const* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kOrdered: return "ordered";
    case Reduction::kAtomic: return "atomic";
    case Reduction::kSeparate: return "separate";
  }
  return "?";
}

char const* name_of(Ragged ragged) {
  switch (ragged) {
    case Ragged::kNone: return "none";
    case Ragged::kM: return "m";
    case Ragged::kK: return "k";
  }
  return "?";
}

char const* name_of(Activation activation) {
  switch (activation) {
    case Activation::kNone: return "none";
    case Activation::kRelu: return "relu";
    case Activation::kGelu: return "gelu";
    case Activation::kGeluTanh: return "gelu_tanh";
    case Activation::kSilu: return "silu";
    case Activation::kSigmoid: return "sigmoid";
    case Activation::kTanh: return "tanh";
  }
  return "?";
}

char const* name_of(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kDataParallel: return "data_parallel";
    case ScheduleKind::kSplitK: return "split_k";
    case ScheduleKind::kStreamK: return "stream_k";
  }
  return "?";
}

char const* name_of(Raster raster) { return raster == Raster::kAlongM ? "along_m" : "along_n"; }

char const* name_of(ClusterOrder order) {
  switch (order) {
    case ClusterOrder::kAsLaunched: return "as_launched";
    case ClusterOrder::kByGpc: return "by_gpc";
    case ClusterOrder::kSpread: return "spread";
  }
  return "?";
}

namespace {

std::vector<std::unique_ptr<Kernel>>& registry() {
  static std::vector<std::unique_ptr<Kernel>> kernels;
  return kernels;
}

}  // namespace

Registration::Registration(std::unique_ptr<Kernel> kernel) { registry().push_back(std::move(kernel)); }

std::vector<std::unique_ptr<Kernel>> const& kernels() {
  static bool const sorted = [] {
    std::sort(registry().begin(), registry().end(),
              [](auto const& x, auto const& y) { return x->info.name < y->info.name; });
    return true;
  }();
  (void)sorted;
  return registry();
}

Kernel const* find_kernel(std::string_view name) {
  auto const& all = kernels();
  auto const at = std::lower_bound(all.begin(), all.end(), name,
                                   [](auto const& kernel, std::string_view key) { return kernel->info.name < key; });
  return at != all.end() && (*at)->info.name == name ? at->get() : nullptr;
}

}  // namespace jax_streamk
