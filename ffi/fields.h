// Binds a struct by its list of fields (gemm_fields.h): a constructor, a property for each field, and `fields`.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cutlass_kernels/core/gemm_fields.h"

namespace jax_streamk {

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

template <class T>
nanobind::object python_type() {
  namespace nb = nanobind;
  auto const builtin = [](PyTypeObject& type) { return nb::borrow(reinterpret_cast<PyObject*>(&type)); };
  if constexpr (std::is_enum_v<T>) {
    return nb::borrow(nb::type<T>());
  } else if constexpr (std::is_same_v<T, bool>) {
    return builtin(PyBool_Type);
  } else if constexpr (std::is_integral_v<T>) {
    return builtin(PyLong_Type);
  } else if constexpr (std::is_floating_point_v<T>) {
    return builtin(PyFloat_Type);
  } else if constexpr (IsVector<T>::value) {
    return builtin(PyList_Type)[python_type<typename T::value_type>()];
  } else {
    static_assert(std::is_same_v<T, std::string>);
    return builtin(PyUnicode_Type);
  }
}

// The dtype of an attribute; "" for types that no attribute has. The FFI takes an enumeration as its underlying number.
template <class T>
char const* dtype_of() {
  if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else if constexpr (std::is_floating_point_v<T>) {
    return "float64";
  } else if constexpr (std::is_enum_v<T> || std::is_integral_v<T>) {
    return sizeof(T) == 8 ? "int64" : "int32";
  } else {
    return "";
  }
}

template <class T>
nanobind::tuple field(char const* name, nanobind::object default_value) {
  namespace nb = nanobind;
  // Python looks up interned names faster.
  nb::object const interned = nb::steal(PyUnicode_InternFromString(name));
  return nb::make_tuple(interned, python_type<T>(), dtype_of<T>(), std::move(default_value));
}

// In all of these, Struct is the struct of the list, `self` points to one, and `fresh` is a default-constructed one.
#define JAX_STREAMK_PARAMETER(name, place) , decltype(Struct::place) name
#define JAX_STREAMK_SET(name, place) self->place = std::move(name);
#define JAX_STREAMK_REQUIRED_ARGUMENT(name, place) , nb::arg(#name)
#define JAX_STREAMK_OPTIONAL_ARGUMENT(name, place) , nb::arg(#name) = fresh.place
#define JAX_STREAMK_PROPERTY(name, place) \
  bound.def_prop_ro(#name, [](Struct const& self) -> decltype(Struct::place) { return self.place; });
#define JAX_STREAMK_REQUIRED_FIELD(name, place) fields.append(field<decltype(Struct::place)>(#name, nb::none()));
#define JAX_STREAMK_OPTIONAL_FIELD(name, place) \
  fields.append(field<decltype(Struct::place)>(#name, nb::cast(fresh.place)));

// `fields` has, in order, a tuple for each: name, type, dtype of the attribute, default (None if it is required).
#define JAX_STREAMK_BIND_FIELDS(type, FIELDS)                                                     \
  [](auto& bound) {                                                                               \
    using Struct = typename std::decay_t<decltype(bound)>::Type;                                  \
    Struct const fresh{};                                                                         \
    bound.def("__init__", [](Struct* self FIELDS(JAX_STREAMK_PARAMETER, JAX_STREAMK_PARAMETER)) { \
      new (self) Struct{};                                                                        \
      FIELDS(JAX_STREAMK_SET, JAX_STREAMK_SET)                                                    \
    } FIELDS(JAX_STREAMK_REQUIRED_ARGUMENT, JAX_STREAMK_OPTIONAL_ARGUMENT));                      \
    FIELDS(JAX_STREAMK_PROPERTY, JAX_STREAMK_PROPERTY)                                            \
    nb::list fields;                                                                              \
    FIELDS(JAX_STREAMK_REQUIRED_FIELD, JAX_STREAMK_OPTIONAL_FIELD)                                \
    bound.attr("fields") = nb::tuple(fields);                                                     \
  }(type)

}  // namespace jax_streamk
