#include "cutlass_kernels/core/family.h"

namespace jax_streamk {

FamilyTraits const& traits_of(Family family) {
  switch (family) {
    case Family::kHost: return host::kTraits;
    case Family::kSm80: return sm80::kTraits;
    case Family::kSm90: return sm90::kTraits;
    case Family::kSkinny: return skinny::kTraits;
  }
  return host::kTraits;
}

}  // namespace jax_streamk
