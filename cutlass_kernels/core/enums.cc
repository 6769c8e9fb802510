#include "cutlass_kernels/core/enums.h"

namespace jax_streamk {

#define JAX_STREAMK_TYPE(type, name, bits, numpy, xla) \
  case Type::type: return name;
char const* name_of(Type x) {
  switch (x) {
#include "cutlass_kernels/core/types.def"
  }
  return "?";
}

#define JAX_STREAMK_VALUE(value, name) \
  case Enum::value: return name;
#define JAX_STREAMK_ENUM(type, values, doc)  \
  char const* name_of(type x) {              \
    using Enum = type;                       \
    switch (x) { values(JAX_STREAMK_VALUE) } \
    return "?";                              \
  }
JAX_STREAMK_ENUMS(JAX_STREAMK_ENUM)

}  // namespace jax_streamk
