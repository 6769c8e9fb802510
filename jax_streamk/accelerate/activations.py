"""Recognizes activations in equations: a function of one variable as a polynomial, whatever way it was written.

``x * sigmoid(x)`` and ``x / (1 + exp(-x))`` are the same polynomial in x and 1 / (1 + exp(-x)).
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_streamk import compat
from jax_streamk.product.epilogue import Activation

# A polynomial maps monomials to coefficients. A monomial is a set of (factor, power); a factor is "x", or the name of
# a function and the polynomial that it is taken of.
Polynomial = dict[frozenset, float]

_ONE: frozenset = frozenset()
X: Polynomial = {frozenset({("x", 1)}): 1.0}
_MOST_TERMS = 8
LONGEST = 16  # equations


class _Unlike(Exception):
    """An expression that is no polynomial, or whose infinities differ from the polynomial's."""


def constant(value: float) -> Polynomial:
    return {_ONE: float(value)} if value else {}


def value_of(poly: Polynomial) -> float | None:
    """The value of a constant; None for anything else."""
    if not poly:
        return 0.0
    return poly.get(_ONE) if len(poly) == 1 else None


def number_in(x: Any) -> float | None:
    """The number that a literal is; None if it is not real."""
    dtype = x.aval.dtype
    return float(x.val) if (is_float(dtype) or dtype.kind in "iu") and np.ndim(x.val) == 0 else None


# JAX's answers about dtypes take as long as all else that is asked about an equation.
@functools.cache
def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.floating)


@functools.cache
def holds(wide: Any, narrow: Any) -> bool:
    """Whether one floating-point dtype holds every value of another."""
    if not (is_float(wide) and is_float(narrow)):
        return False
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return wide == narrow or (a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    out = dict(a)
    for monomial, coefficient in b.items():
        out[monomial] = out.get(monomial, 0.0) + coefficient
        if not out[monomial] and monomial != _ONE:
            raise _Unlike  # infinity less infinity
    return {monomial: coefficient for monomial, coefficient in out.items() if coefficient}


def _scaled(factor: float, a: Polynomial) -> Polynomial:
    if not factor and value_of(a) is None:
        raise _Unlike  # zero times infinity
    return {monomial: factor * coefficient for monomial, coefficient in a.items()} if factor else {}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    for factor, other in ((a, b), (b, a)):
        if (number := value_of(factor)) is not None:
            return _scaled(number, other)
    out: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            powers = dict(left)
            for factor, power in right:
                powers[factor] = powers.get(factor, 0) + power
            out = _sum(out, {frozenset(powers.items()): x * y})
    return out


def _of(name: str, a: Polynomial) -> Polynomial:
    return {frozenset({((name, frozenset(a.items())), 1)}): 1.0}


def _odd(name: str, a: Polynomial) -> Polynomial:
    """One form for f(-a) and -f(a) of an odd function."""
    negative = _form(a)[1][:1] < [0.0]
    return _scaled(-1.0, _of(name, _scaled(-1.0, a))) if negative else _of(name, a)


def _quotient(a: Polynomial, b: Polynomial) -> Polynomial:
    divisor = value_of(b)
    if divisor is None:
        return _product(a, _of("inverse", b))
    if not divisor:
        raise _Unlike
    return _scaled(1 / divisor, a)


def _power(a: Polynomial, exponent: float | None) -> Polynomial:
    if exponent == -1:
        return _quotient(constant(1), a)
    if exponent not in (1, 2, 3, 4):
        raise _Unlike
    return functools.reduce(_product, [a] * int(exponent))


def _larger(a: Polynomial, b: Polynomial) -> Polynomial:
    for x, y in ((a, b), (b, a)):
        if value_of(y) == 0:
            return _of("relu", x)
    raise _Unlike


def _logistic(a: Polynomial) -> Polynomial:
    return _of("inverse", _sum(constant(1), _of("exp", _scaled(-1.0, a))))


# Rules by the names of primitives. Numbers have those of _OF_NUMBERS before these.
_RULES: Mapping[str, Any] = {
    "add": _sum,
    "add_any": _sum,
    "sub": lambda a, b: _sum(a, _scaled(-1.0, b)),
    "mul": _product,
    "div": _quotient,
    "neg": functools.partial(_scaled, -1.0),
    "max": _larger,
    "tanh": functools.partial(_odd, "tanh"),
    "erf": functools.partial(_odd, "erf"),
    "erfc": lambda a: _sum(constant(1), _scaled(-1.0, _odd("erf", a))),
    "exp": functools.partial(_of, "exp"),
    "logistic": _logistic,
    "square": lambda a: _product(a, a),
    "pow": lambda a, b: _power(a, value_of(b)),
}
_OF_NUMBERS = {"sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "log": math.log, "exp": math.exp}
_SAME = ("copy", "copy_p", "pvary")


def result_of(eqn: Any, operands: Sequence[Polynomial]) -> Polynomial | None:
    """What an equation makes of polynomials; None if that is none, a long one, or rounded more than its dtype says."""
    dtype = eqn.outvars[0].aval.dtype
    if not is_float(dtype) or eqn.params.get("out_dtype") is not None:
        return None
    try:
        out = _applied(eqn, operands)
        if out is not None and (number := value_of(out)) is not None:
            return constant(float(np.asarray(number, dtype)))
    except (_Unlike, ValueError, ZeroDivisionError, OverflowError):
        return None
    return out if out is not None and len(out) <= _MOST_TERMS else None


def _applied(eqn: Any, operands: Sequence[Polynomial]) -> Polynomial | None:
    name, body = eqn.primitive.name, compat.called(eqn)
    if body is not None:
        return _result_of_call(body, operands) if compat.is_plain_call(eqn) else None
    numbers = [value_of(x) for x in operands]
    if name in _SAME:
        return operands[0]
    if name == "convert_element_type":
        is_kept = numbers[0] is not None or holds(eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype)
        return operands[0] if is_kept else None
    if name == "broadcast_in_dim":
        return None if numbers[0] is None else operands[0]
    if name == "integer_pow":
        return _power(operands[0], eqn.params["y"])
    if name in _OF_NUMBERS and numbers[0] is not None:
        return constant(_OF_NUMBERS[name](numbers[0]))
    return _RULES[name](*operands) if name in _RULES else None


def _result_of_call(body: Any, operands: Sequence[Polynomial]) -> Polynomial | None:
    if len(body.eqns) > LONGEST or len(operands) != len(body.invars) or len(body.outvars) != 1:
        return None
    values = dict(zip(body.invars, operands))
    for eqn in body.eqns:
        given = [_operand(x, values) for x in eqn.invars]
        is_known = len(eqn.outvars) == 1 and not eqn.effects and None not in given
        out = result_of(eqn, [x for x in given if x is not None]) if is_known else None
        if out is None:
            return None
        values[eqn.outvars[0]] = out
    return _operand(body.outvars[0], values)


def _operand(x: Any, values: Mapping[Any, Polynomial]) -> Polynomial | None:
    if isinstance(x, Literal):
        number = number_in(x)
        return None if number is None else constant(number)
    return values.get(x)


def _form(poly: Polynomial) -> tuple[str, list[float]]:
    """A text that does not depend on coefficients, and the coefficients in its order."""
    terms = []
    for monomial, coefficient in poly.items():
        factors = []
        for factor, power in monomial:
            text, inner = ("x", []) if factor == "x" else _form(dict(factor[1]))
            factors.append((f"{text}^{power}" if factor == "x" else f"{factor[0]}({text})^{power}", inner))
        factors.sort()
        terms.append(
            ("*".join(text for text, _ in factors), [coefficient, *(c for _, inner in factors for c in inner)])
        )
    terms.sort()
    return " + ".join(text for text, _ in terms), [c for _, inner in terms for c in inner]


@functools.cache
def _forms(inner: Any, outer: Any) -> dict[str, tuple[Activation, list[float]]]:
    """The activations with their constants rounded to these dtypes: (name, coefficients) by form."""
    rounded = lambda x, dtype: constant(float(np.asarray(x, dtype)))
    cubic = _sum(X, _product(rounded(0.044715, inner), _power(X, 3)))
    of_erf = _odd("erf", _product(rounded(math.sqrt(0.5), outer), X))
    of_tanh = _odd("tanh", _product(rounded(math.sqrt(2 / math.pi), outer), cubic))
    activations: dict[Activation, Polynomial] = {
        "relu": _of("relu", X),
        "gelu": _product(_scaled(0.5, X), _sum(constant(1), of_erf)),
        "gelu_tanh": _product(_scaled(0.5, X), _sum(constant(1), of_tanh)),
        "silu": _product(X, _logistic(X)),
        "sigmoid": _logistic(X),
        "tanh": _odd("tanh", X),
    }
    return {text: (name, values) for name, poly in activations.items() for text, values in [_form(poly)]}


def activation_of(poly: Polynomial, dtype: Any) -> Activation | None:
    """The activation that a polynomial of ``X`` is, with constants as a program of this dtype has them; or None."""
    text, values = _form(poly)
    tolerance = 4 * float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    # NumPy's constants keep their own dtype, Python's take the program's.
    for constants in itertools.product((np.dtype(dtype), np.dtype(np.float64)), repeat=2):
        name, wanted = _forms(*constants).get(text, (None, []))
        if name is not None and all(_is_same(*pair, tolerance) for pair in zip(values, wanted)):
            return name
    return None


def _is_same(value: float, wanted: float, tolerance: float) -> bool:
    """Numbers that all floating-point dtypes have must be equal; others were rounded, some of them twice."""
    return value == wanted if abs(wanted) in (0.5, 1) else abs(value - wanted) <= tolerance * abs(wanted)
