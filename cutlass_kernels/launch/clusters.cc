#include "cutlass_kernels/launch/clusters.h"

#include <numeric>

namespace jax_streamk {

void number_clusters(ClusterOrder order, int32_t clusters, int32_t idle, int32_t ctas, uint8_t* numbers) {
  bool const spread = order == ClusterOrder::kSpread;
  if (order == ClusterOrder::kAsLaunched) ctas = 1;  // single CTAs stay in order
  int32_t const apart = ctas == 2 ? kApart / ctas : 0, turns = ctas == 1 ? 0 : kSmallest / ctas, all = turns * kGpcs;
  std::fill_n(numbers, idle, kIdle);
  // The number of each place in the order of GPCs. In the order of reversed bits (van der Corput), any first few places
  // are spread evenly.
  constexpr int32_t kBits = 8;
  int32_t const places = clusters - idle;
  uint8_t at[1 << kBits];
  std::iota(at, at + places, uint8_t{0});
  for (int32_t i = 0, number = 0; spread && i < 1 << kBits; ++i) {
    int32_t reversed = 0;
    for (int32_t bit = 0; bit < kBits; ++bit) reversed |= (i >> bit & 1) << (kBits - 1 - bit);
    if (reversed < places) at[reversed] = static_cast<uint8_t>(number++);
  }
  int32_t next = 0;
  auto const add = [&](int32_t cluster) {
    if (cluster >= idle && cluster < clusters) numbers[cluster] = at[next++];
  };
  for (int32_t gpc = 0; gpc < kGpcs; ++gpc) {
    for (int32_t turn = 0; turn < turns; ++turn) add(apart + turn * kGpcs + gpc);
    for (int32_t turn = 0; turn < turns && gpc < kGpcs - 1; ++turn) add(apart + all + turn * (kGpcs - 1) + gpc);
  }
  for (int32_t cluster = apart + all + turns * (kGpcs - 1); cluster < clusters; ++cluster) add(cluster);
  for (int32_t cluster = 0; cluster < apart; ++cluster) add(cluster);
}

}  // namespace jax_streamk
