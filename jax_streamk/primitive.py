"""The primitive behind every product: its type, and what transformations do with it."""

import functools

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_streamk import compat, schedules

# Parameters are those of lax.dot_general's primitive, and the schedule.
dot_general_p = Primitive("streamk_dot_general")
dot_general_p.def_impl(functools.partial(compat.apply_primitive, dot_general_p))


def bind(lhs, rhs, dimension_numbers, *, precision, preferred_element_type, out_sharding=None, schedule=schedules.Auto()):
    """``lax.dot_general`` by our kernels. Operands are arrays; all else is canonical, as lax's primitive carries it."""
    lhs, rhs = compat.match_varying(lhs, rhs)
    return dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        schedule=schedule,
    )


@dot_general_p.def_effectful_abstract_eval
def _abstract_eval(lhs, rhs, *, schedule, **params):
    del schedule
    return compat.dot_general_p.abstract_eval(lhs, rhs, **params)


def _transpose(of, cotangent, lhs, rhs, *, dimension_numbers, precision, preferred_element_type, out_sharding, schedule):
    """The cotangent of operand ``of``: the output's times the other operand, over the output dimensions that came from the other.

    Of the two orders of that product, one may give the operand's dimensions in their places, and no transpose follows.
    """
    del out_sharding
    contract, batch = dimension_numbers
    x, other = ((lhs, rhs), (rhs, lhs))[of]
    x_contract, other_contract = contract[of], contract[1 - of]
    x_batch, other_batch = batch[of], batch[1 - of]
    x_free, other_free = (
        [i for i in range(ndim) if i not in used]
        for ndim, used in ((x.aval.ndim, (*x_contract, *x_batch)), (other.ndim, (*other_contract, *other_batch)))
    )
    in_output = range(len(batch[0]), len(batch[0]) + len(x_free) + len(other_free))
    from_other = in_output[len(x_free) :] if of == 0 else in_output[: len(other_free)]
    # The product's dimensions as those of x: its batch, and what is left of the two operands.
    from_product = [x_contract[i] for i in np.argsort(other_contract)]
    cotangent_first = [*x_batch, *x_free, *from_product]
    other_first = [*x_batch, *from_product, *x_free]
    output_batch = tuple(range(len(batch[0])))
    if other_first == sorted(other_first):
        order, operands = other_first, (other, cotangent)
        numbers = ((tuple(other_free), tuple(from_other)), (tuple(other_batch), output_batch))
    else:
        order, operands = cotangent_first, (cotangent, other)
        numbers = ((tuple(from_other), tuple(other_free)), (output_batch, tuple(other_batch)))
    out = bind(
        *operands,
        numbers,
        precision=precision[::-1] if isinstance(precision, tuple) and operands[0] is other else precision,
        preferred_element_type=preferred_element_type,
        out_sharding=compat.cotangent_sharding(x.aval, order),
        schedule=schedules.of_cotangent(schedule, of),
    )
    if order != sorted(order):
        out = lax.transpose(out, np.argsort(order))
    return out if out.dtype == x.aval.dtype else compat.convert_cotangent(out, x.aval)


ad.defbilinear(dot_general_p, functools.partial(_transpose, 0), functools.partial(_transpose, 1))


def _batch(axis_data, operands, dims, *, schedule, **params):
    return compat.batch_dot_general(functools.partial(bind, schedule=schedule), axis_data, operands, dims, **params)


compat.def_batching(dot_general_p, _batch)


def dots_saveable(primitive, *avals, **params):
    """A policy for ``jax.checkpoint``: saves the results of matrix products, JAX's and this library's, and recomputes the rest."""
    return primitive is dot_general_p or jax.checkpoint_policies.dots_saveable(primitive, *avals, **params)


def dots_with_no_batch_dims_saveable(primitive, *avals, **params):
    """A policy for ``jax.checkpoint``: as ``dots_saveable``, of products without batch dimensions only."""
    if primitive is dot_general_p:
        primitive, params = compat.dot_general_p, {k: v for k, v in params.items() if k != "schedule"}
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)
