#include "cutlass_kernels/core/gemm.h"

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

}  // namespace jax_streamk
