"""The primitive of every product: its rules ask the ``Product`` that it carries."""

import functools
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_streamk import compat
from jax_streamk.product.spec import of_some

# Operands: those of the roles of ``product``, in order. Parameters: product, schedule, and out_sharding, the explicit
# sharding of the result, or None.
product_p = Primitive("streamk_dot_general")
product_p.def_impl(functools.partial(compat.apply_primitive, product_p))
compat.check_nan(product_p)


def bind(product, *operands, schedule, out_sharding=None):
    """A ``Product`` of arrays, the other arguments being canonical."""
    know_sparse()
    product, operands, out_sharding = product.canonical(operands, out_sharding)
    operands = compat.match_varying(*operands)
    return product_p.bind(*operands, product=product, schedule=schedule, out_sharding=out_sharding)


@product_p.def_effectful_abstract_eval
def _abstract_eval(*avals, product, schedule, out_sharding):
    del schedule
    return product.result(avals, out_sharding)


def _jvp(primals, tangents, *, product, **params):
    if not product.is_bilinear:
        return product.jvp(primals, tangents, **params)
    out = bind(product, *primals, **params)
    terms = [
        bind(product, *primals[:i], tangents[i], *primals[i + 1 :], **params)
        for i in range(2)
        if type(tangents[i]) is not ad.Zero
    ]
    return out, functools.reduce(lax.add, terms) if terms else compat.no_tangent(out)


def _transpose(cotangent, *operands, product, schedule, out_sharding):
    if not product.is_bilinear:
        apart = functools.partial(product.apart, schedule=schedule, out_sharding=out_sharding)
        return transposed(apart, cotangent, operands)
    unknown = [ad.is_undefined_primal(x) for x in operands]
    assert unknown.count(True) == 1  # as JAX's own product
    of = unknown.index(True)
    aval = operands[of].aval
    out = product.cotangent(of, cotangent, operands, schedule)
    out = out if out.dtype == aval.dtype else compat.convert_cotangent(out, aval)
    return [out if i == of else None for i in range(len(operands))]


def transposed(function, cotangent, operands):
    """The cotangents of those operands of a function that are not known, None for the others."""
    is_linear = [ad.is_undefined_primal(x) for x in operands]
    unknown = [x.aval for x in operands if ad.is_undefined_primal(x)]
    cotangents = iter(jax.linear_transpose(of_some(function, operands, is_linear), *unknown)(cotangent))
    return [next(cotangents) if free else None for free in is_linear]


def batched(axis_data, operands, dims, *, product, **params):
    """(the results of a product of operands that are mapped over ``dims``, their mapped dimension)"""
    if all(dim is None for dim in dims):
        return bind(product, *operands, **params), None
    return product.batched(axis_data, operands, dims, **params)


def _apart(*operands, product, **params):
    return product.apart(*operands, **params)


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
compat.def_batching(product_p, batched)
compat.def_jet(product_p, _apart, is_bilinear=lambda product, **_: product.is_bilinear)
compat.ask_policies(product_p, lambda *avals, product, out_sharding, **_: product.asked(avals, out_sharding))

# Aliases for programs written before JAX's own policies recognized our products.
dots_saveable = jax.checkpoint_policies.dots_saveable
dots_with_no_batch_dims_saveable = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def _by_xla(*operands, product, schedule, out_sharding):
    """Kernels multiply dense matrices only."""
    del schedule
    return product.by_xla(*operands, out_sharding=out_sharding)


# What ``sparsify`` calls in the place of our primitives.
of_sparse: dict[Any, Any] = {product_p: _by_xla}


def know_sparse():
    """Gives ``sparsify`` its rules for our primitives, if this process has imported it. Call it before binding one."""
    compat.def_sparse(of_sparse)
