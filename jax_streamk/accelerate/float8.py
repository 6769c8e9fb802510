"""Finds products of two dequantized arrays of float8, as fp8 training has them, with a scale for each row, or for all.

Other than weights, such numbers may be computed by the program: where both sides are float8, tensor cores multiply them
twice as fast.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jax_streamk.plan.problem import FLOAT8
from jax_streamk.product import kinds, scaled
from jax_streamk.product.dense import Dense
from jax_streamk.product.primitive import bind
from jax_streamk.product.ragged import Ragged


@dataclasses.dataclass(frozen=True)
class Found:
    """A product of float8: a jaxpr, the call of it, and the values from the numbers to the dequantized arrays."""

    body: Any
    call: Any
    made: list[Any]


@dataclasses.dataclass(frozen=True)
class _Side:
    """An operand: its numbers, a scale or None, the scale's shape with a size for each dimension, and what is made."""

    numbers: Any
    scale: Any
    shape: tuple[int, ...]
    made: list[Any]


def by_numbers(program: Any, eqn: Any, schedule: Any) -> Found | None:
    """The product of an equation of two matrices, if both were float8; ``program`` knows what makes a value."""
    product = kinds.of(eqn)
    if not isinstance(product, (Dense, Ragged)):
        return None
    lhs, rhs = (_side(program, x) for x in eqn.invars[:2])
    if lhs is None or rhs is None:
        return None
    dtype = jnp.promote_types(*(x.aval.dtype for x in eqn.invars[:2]))
    others = eqn.invars[2:]
    has_scale = lhs.scale is not None or rhs.scale is not None

    def multiplied(*operands: Any) -> Any:
        given = iter(operands)
        arrays = [next(given) for _ in (lhs, rhs, *others)]
        if not has_scale:
            return bind(product, *arrays, schedule=schedule)
        scales = [
            jnp.ones(side.shape, jnp.float32)
            if side.scale is None
            else next(given).astype(jnp.float32).reshape(side.shape)
            for side in (lhs, rhs)
        ]
        of_both = scaled.Scaled.by(product, dtype, ("scale",), of_both=True)
        return bind(of_both, *arrays, *scales[::-1], schedule=schedule)

    operands = [x for x in (lhs.numbers, rhs.numbers, *others, lhs.scale, rhs.scale) if x is not None]
    body = jax.make_jaxpr(multiplied)(*(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in operands)).jaxpr
    return Found(body, eqn.replace(invars=operands), [*lhs.made, *rhs.made])


def _side(program: Any, x: Any) -> _Side | None:
    made, scale, shape = [x], None, (1,) * x.aval.ndim
    eqn = program.maker(x)
    if eqn is not None and eqn.primitive.name == "mul":
        for at in (0, 1):
            if (of := _spread(program, eqn.invars[1 - at])) is not None and _is_conversion(program, eqn.invars[at]):
                (scale, shape), x = of, eqn.invars[at]
                made.append(x)
                eqn = program.maker(x)
                break
    if eqn is None or not _is_conversion(program, x):
        return None
    return _Side(eqn.invars[0], scale, shape, made)


def _is_conversion(program: Any, x: Any) -> bool:
    eqn = program.maker(x)
    return eqn is not None and eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype in FLOAT8


def _spread(program: Any, x: Any) -> tuple[Any, tuple[int, ...]] | None:
    """The array of fewer numbers that a value repeats, and its shape with all dimensions of the value."""
    if isinstance(x, Literal):
        return None
    eqn = program.maker(x)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
        return None
    (source,), dims = eqn.invars, eqn.params["broadcast_dimensions"]
    if isinstance(source, Literal) or source.aval.size == x.aval.size:
        return None
    shape = [1] * x.aval.ndim
    for size, dim in zip(source.aval.shape, dims):
        shape[dim] = size
    return source, tuple(shape)
