"""Recognizes activations in equations: a function of one variable as a polynomial, whatever way it was written.

``x * sigmoid(x)`` and ``x / (1 + exp(-x))`` are the same polynomial in x and 1 / (1 + exp(-x)).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

# A polynomial maps monomials to coefficients. A monomial is a set of (factor, power); a factor is "x", or the name of
# a function and the polynomial that it is taken of.
Polynomial = dict[frozenset, float]

_ONE: frozenset = frozenset()
X: Polynomial = {frozenset({("x", 1)}): 1.0}
_MOST_TERMS = 8


def constant(value: float) -> Polynomial:
    return {_ONE: float(value)} if value else {}


def value_of(poly: Polynomial) -> float | None:
    """The value of a constant; None for anything else."""
    if not poly:
        return 0.0
    return poly.get(_ONE) if len(poly) == 1 else None


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    out = dict(a)
    for monomial, coefficient in b.items():
        out[monomial] = out.get(monomial, 0.0) + coefficient
    return {monomial: coefficient for monomial, coefficient in out.items() if coefficient}


def _scaled(factor: float, a: Polynomial) -> Polynomial:
    return {monomial: factor * coefficient for monomial, coefficient in a.items()} if factor else {}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
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
    """Of an odd function: one form for f(-a) and -f(a)."""
    negative = _form(a)[1][:1] < [0.0]
    return _scaled(-1.0, _of(name, _scaled(-1.0, a))) if negative else _of(name, a)


def _quotient(a: Polynomial, b: Polynomial) -> Polynomial | None:
    divisor = value_of(b)
    if divisor is None:
        return _product(a, _of("inverse", b))
    return _scaled(1 / divisor, a) if divisor else None


def _power(a: Polynomial, exponent: float) -> Polynomial | None:
    if exponent == -1:
        return _quotient(constant(1), a)
    if exponent not in (1, 2, 3, 4):
        return None
    return functools.reduce(_product, [a] * int(exponent))


def _larger(a: Polynomial, b: Polynomial) -> Polynomial | None:
    for x, y in ((a, b), (b, a)):
        if value_of(y) == 0:
            return _of("relu", x)
    return None


def _logistic(a: Polynomial) -> Polynomial:
    return _of("inverse", _sum(constant(1), _of("exp", _scaled(-1.0, a))))


# By the names of primitives. Of numbers alone, _OF_NUMBERS too.
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
}
_OF_NUMBERS = {"sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "log": math.log, "exp": math.exp}
# They change no value, or only its precision.
_SAME = ("convert_element_type", "copy", "copy_p", "pvary", "optimization_barrier")


def applied(primitive: str, params: Mapping[str, Any], *operands: Polynomial) -> Polynomial | None:
    """What a primitive makes of polynomials; None if that is no polynomial, or a long one."""
    if primitive in _SAME or (primitive == "broadcast_in_dim" and value_of(operands[0]) is not None):
        return operands[0]
    if params.get("out_dtype") is not None:
        return None
    if primitive in ("integer_pow", "pow"):
        exponent = params["y"] if primitive == "integer_pow" else value_of(operands[1])
        out = None if exponent is None else _power(operands[0], exponent)
    elif primitive in _OF_NUMBERS and (number := value_of(operands[0])) is not None:
        try:
            out = constant(_OF_NUMBERS[primitive](number))
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
    elif primitive in _RULES:
        out = _RULES[primitive](*operands)
    else:
        return None
    return out if out is not None and len(out) <= _MOST_TERMS else None


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


def _templates():
    of = _product
    half, inverse_root = constant(0.5), constant(1 / math.sqrt(2))
    cubic = of(constant(math.sqrt(2 / math.pi)), _sum(X, of(constant(0.044715), of(X, of(X, X)))))
    return {
        "relu": _of("relu", X),
        "gelu": of(of(half, X), _sum(constant(1), _odd("erf", of(inverse_root, X)))),
        "gelu_tanh": of(of(half, X), _sum(constant(1), _odd("tanh", cubic))),
        "silu": of(X, _logistic(X)),
        "sigmoid": _logistic(X),
        "tanh": _odd("tanh", X),
    }


_FORMS = {text: (name, values) for name, poly in _templates().items() for text, values in [_form(poly)]}


def activation_of(poly: Polynomial, eps: float) -> str | None:
    """The activation that a polynomial of ``X`` is, with constants as a dtype of this ``eps`` rounds them; or None."""
    text, values = _form(poly)
    if text not in _FORMS:
        return None
    name, wanted = _FORMS[text]
    # A coefficient may be the product of two constants, each rounded.
    is_same = all(abs(value - rounded) <= 2 * eps * abs(rounded) for value, rounded in zip(values, wanted))
    return name if is_same else None
