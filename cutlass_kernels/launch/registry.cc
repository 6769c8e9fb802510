#include <algorithm>

#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {
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
