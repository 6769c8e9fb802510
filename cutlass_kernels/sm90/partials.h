// The fix-up of a tile that several CTAs share.
//
// In CUTLASS's Stream-K scheduler each peer of a tile waits for the previous one. Here every peer draws a ticket when
// its accumulators are ready. All but the last store their partials and leave; the last adds them in the order of K. It
// waits only for peers that are already storing, never for a CTA that may not have started.
#pragma once

#include <cuda_runtime.h>

#include "cutlass/arch/barrier.h"

namespace jax_streamk::sm90 {

// The threads of a CTA that have a tile's accumulators: all of its consumers.
template <int kWarpgroups>
struct TileThreads {
  static constexpr uint32_t kCount = kWarpgroups * cutlass::NumThreadsPerWarpGroup;
  uint32_t own;

  CUTLASS_DEVICE explicit TileThreads(uint32_t warpgroup)
      : own(warpgroup * cutlass::NumThreadsPerWarpGroup + threadIdx.x % cutlass::NumThreadsPerWarpGroup) {}

  CUTLASS_DEVICE static void sync() {
    cutlass::arch::NamedBarrier::sync(kCount, cutlass::arch::ReservedNamedBarriers::StreamkBarrier0);
  }

  // Whether `value` is true in any of them. Called by all.
  CUTLASS_DEVICE static bool any(bool value) {
    uint32_t result;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.u32 in, %1, 0;\n"
        "barrier.cta.red.or.pred out, %2, %3, in;\n"
        "selp.u32 %0, 1, 0, out;\n"
        "}\n"
        : "=r"(result)
        : "r"(static_cast<uint32_t>(value)),
          "r"(static_cast<uint32_t>(cutlass::arch::ReservedNamedBarriers::StreamkBarrier0)), "r"(kCount)
        : "memory");
    return result != 0;
  }

  // `slot` has the values of all threads in register order, so that accesses are coalesced: the first of each thread,
  // then the second.
  template <class Accumulators>
  CUTLASS_DEVICE void store(float* slot, Accumulators const& x) const {
    auto* const to = reinterpret_cast<typename Accumulators::Value*>(slot) + own;
#pragma unroll
    for (int v = 0; v < Accumulators::kValues; ++v) __stcg(to + v * kCount, x(v));
  }
  template <class Accumulators>
  CUTLASS_DEVICE void add(float const* slot, Accumulators& x) const {
    auto const* const from = reinterpret_cast<typename Accumulators::Value const*>(slot) + own;
#pragma unroll
    for (int v = 0; v < Accumulators::kValues; ++v) x(v) += __ldcg(from + v * kCount);
  }
  // As store(), where other CTAs add too.
  template <class Accumulators>
  CUTLASS_DEVICE void add_to(float* slot, Accumulators const& x) const {
    auto* const to = reinterpret_cast<typename Accumulators::Value*>(slot) + own;
#pragma unroll
    for (int v = 0; v < Accumulators::kValues; ++v) atomicAdd(to + v * kCount, x(v));
  }
};

// The CTAs that share a tile.
struct Peers {
  int32_t own, count;
  uint32_t* arrival;    // zero before the launch
  bool atomic = false;  // whether all add to one slot instead of having one each
};

// Called by all threads of a tile with their accumulators. Returns true to the one peer that runs the epilogue, the
// last to arrive; its accumulators then hold the whole sum. `slot`: where a peer's sums are.
template <class Threads, class Slot, class Accumulators>
CUTLASS_DEVICE bool fix_up(Threads const& threads, Peers const& peers, Slot const& slot, Accumulators& accumulators) {
  // An arrival word counts tickets drawn in its low half and partials stored in its high half.
  constexpr uint32_t kTickets = 0xffff, kPartial = 0x10000;
  bool last = false;
  if (threads.own == 0) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(peers.arrival) : "memory");
    last = (before & kTickets) + 1 == static_cast<uint32_t>(peers.count);
  }
  if (!threads.any(last)) {
    float* const to = slot(peers.own);
    if (peers.atomic) {
      threads.add_to(to, accumulators);
    } else {
      threads.store(to, accumulators);
    }
    threads.sync();
    // Releases what all threads stored before the barrier.
    if (threads.own == 0)
      asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(peers.arrival), "n"(kPartial) : "memory");
    return false;
  }

  if (threads.own == 0) {
    uint32_t now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(now) : "l"(peers.arrival) : "memory");
    } while (now / kPartial + 1 != static_cast<uint32_t>(peers.count));
  }
  threads.sync();
  if (peers.atomic || peers.count == 2) {
    // One partial needs no order: a + b = b + a.
    threads.add(slot(1 - peers.own), accumulators);
    return true;
  }
  // Several are added in the order of K, whichever peer is last. Its own goes through memory too, as there are no
  // registers for a second tile.
  threads.store(slot(peers.own), accumulators);
  accumulators.clear();
  for (int32_t peer = 0; peer < peers.count; ++peer) threads.add(slot(peer), accumulators);
  return true;
}

}  // namespace jax_streamk::sm90
