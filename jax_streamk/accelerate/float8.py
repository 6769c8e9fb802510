"""Finds products of two arrays of float8 or int8 whose result a program scales, by rows, columns or one number."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_streamk import compat
from jax_streamk.accelerate.equations import is_exact
from jax_streamk.plan.problem import FLOAT8
from jax_streamk.product import kinds, scaled
from jax_streamk.product.primitive import bind


@dataclasses.dataclass(frozen=True)
class Found:
    """A product whose result is scaled: a jaxpr, the call of it, and the values that it takes the place of.

    ``plain`` is the equation of the program's own product of the numbers.
    """

    body: Any
    call: Any
    made: list[Any]
    plain: Any


_Scales = list[tuple[Any, tuple[int, ...]]]  # each with its sizes in the dimensions of what it scales


def by_result(program: Any, eqn: Any, schedule: Any) -> Found | None:
    """The product whose result an equation scales, the last of such equations; ``program`` knows what makes a value."""
    (out,) = eqn.outvars
    if (found := _scaled(program, out, out.aval.dtype)) is None:
        return None
    plain, scales, made = found
    avals = [x.aval for x in plain.invars]
    is_placed = plain.params.get("out_sharding") is not None or compat.explicit_mesh(*avals) is not None
    is_symbolic = not all(isinstance(size, int) for aval in avals for size in aval.shape)
    if is_placed or is_symbolic or compat.varying(out.aval):
        return None
    product, rank = kinds.of(plain).replaced(preferred_element_type=out.aval.dtype), out.aval.ndim
    contract, batch = product.numbers
    columns = avals[0].ndim - len(contract[0])
    places = slice(len(batch[0]), columns), slice(columns, rank)  # of the operands' own dimensions in the result
    changes = [[math.prod(sizes[place]) > 1 for place in places] for _, sizes in scales]
    if any(map(all, changes)):
        return None

    def multiplied(*operands: Any) -> Any:
        of_sides: tuple[list[Any], list[Any]] = ([], [])
        for x, (_, sizes), (_, is_of_columns) in zip(operands[2:], scales, changes):
            of_sides[is_of_columns].append(x.reshape(sizes))
        of_lhs, of_rhs = (
            _of_operand(_joint(of_sides[i], rank), avals[i].shape, contract[i], batch[i], places[i]) for i in (0, 1)
        )
        of_both = scaled.Scaled.by(product, out.aval.dtype, ("scale",), of_both=True)
        return bind(of_both, *operands[:2], of_rhs, of_lhs, schedule=schedule)

    operands = [*plain.invars, *(x for x, _ in scales)]
    body = jax.make_jaxpr(multiplied)(*(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in operands)).jaxpr
    return Found(body, plain.replace(invars=operands, outvars=[out]), made[1:], plain)


def _scaled(program: Any, x: Any, dtype: Any) -> tuple[Any, _Scales, list[Any]] | None:
    """The product of such numbers that a value is a multiple of, the scales, and the values since; None if none is.

    What the program rounds to fewer bits than ``dtype`` has, other than the product, is rounded.
    """
    if (eqn := program.maker(x)) is None:
        return None
    if eqn.primitive is compat.dot_general_p:
        dtypes = {y.aval.dtype for y in eqn.invars}
        is_of_float8 = dtypes <= {*FLOAT8} and x.aval.dtype not in FLOAT8
        is_of_integers = dtypes == {np.dtype("int8")} and x.aval.dtype == np.int32
        return (eqn, [], [x]) if is_of_float8 or is_of_integers else None
    if eqn.primitive.name == "convert_element_type" and (is_exact(eqn) or x.aval.dtype == dtype):
        found = _scaled(program, eqn.invars[0], dtype)
        return None if found is None else (*found[:2], [x, *found[2]])
    for y, z in (eqn.invars, eqn.invars[::-1]) if eqn.primitive.name == "mul" else ():
        scales = _scales(program, z, x.aval.shape) if y.aval.shape == x.aval.shape else None
        found = None if scales is None else _scaled(program, y, dtype)
        if scales is not None and found is not None:
            plain, others, made = found
            return plain, [*scales, *others], [x, *made]
    return None


def _scales(program: Any, x: Any, shape: tuple[int, ...]) -> _Scales | None:
    """The arrays of fewer numbers whose product is a factor of what has this shape; None if there are none."""
    if isinstance(x, Literal):
        return None
    if x.aval.shape != shape:
        return [(x, x.aval.shape or (1,) * len(shape))] if x.aval.ndim in (0, len(shape)) else None
    if (spread := _spread(program, x)) is not None:
        return [spread]
    eqn = program.maker(x)
    if eqn is None or not (eqn.primitive.name == "mul" or is_exact(eqn)):
        return None
    scales: _Scales = []
    for y in eqn.invars:
        if (more := _scales(program, y, shape)) is None:
            return None
        scales += more
    return scales


def _joint(scales: Sequence[Any], rank: int) -> Any:
    """The product of scales, each of this rank."""
    if len(scales) == 1:
        return scales[0]
    return math.prod((x.astype(jnp.float32) for x in scales), start=jnp.ones((1,) * rank, jnp.float32))


def _of_operand(scale: Any, shape: Any, contract: Any, batch: Any, place: slice) -> Any:
    """A scale of a result as one of the operand of this shape, whose own dimensions the result has at ``place``."""
    free = [i for i in range(len(shape)) if i not in (*contract, *batch)]
    own = scale.shape[place]
    whole = own if math.prod(own) == 1 else [shape[i] for i in free]
    sizes = [*(shape[i] for i in batch), *whole, *[1] * len(contract)]
    spread = jnp.broadcast_to(scale.reshape(*scale.shape[: len(batch)], *own, *[1] * len(contract)), sizes)
    return spread.transpose(np.argsort([*batch, *free, *contract]))


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
