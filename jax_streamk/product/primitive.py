"""The primitives behind every product, with and without an epilogue: types, derivatives, batching, transposes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad

from jax_streamk import compat, schedules
from jax_streamk.product.epilogue import ACTIVATIONS, Epilogue, scaled, wide

# Parameters: those of lax.dot_general's primitive, the schedule, and the permutation that transposes the result, or
# None. XLA folds a transpose into the dot before it, but not into a custom call.
dot_general_p = Primitive("streamk_dot_general")
# Has an epilogue instead of the permutation. Operands: lhs, rhs, then the epilogue's.
linear_p = Primitive("streamk_linear")
for _primitive in (dot_general_p, linear_p):
    _primitive.def_impl(functools.partial(compat.apply_primitive, _primitive))
    compat.check_nan(_primitive)


def bind(
    lhs,
    rhs,
    dimension_numbers,
    *,
    precision,
    preferred_element_type,
    out_sharding=None,
    schedule=schedules.Auto(),
    permutation=None,
):
    """``lax.dot_general`` by our kernels, with sharding ``out_sharding``, then transposed by ``permutation``.

    Operands are arrays; the other arguments are canonical, as lax's primitive carries them.
    """
    know_sparse()
    lhs, rhs = compat.match_varying(lhs, rhs)
    return dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        schedule=schedule,
        permutation=permutation,
    )


def bind_linear(lhs, rhs, *others, epilogue, **params):
    """``epilogue`` of ``bind(lhs, rhs, **params)`` in one kernel. Its operands ``others`` have the result's dtype."""
    if epilogue.is_plain:
        return bind(lhs, rhs, **params)
    know_sparse()
    return linear_p.bind(*compat.match_varying(lhs, rhs, *others), epilogue=epilogue, **params)


def xlas_product(lhs, rhs, *others, preferred_element_type, epilogue=Epilogue(), permutation=None, **params):
    """What our primitives compute, by XLA's own dot."""
    dtype = preferred_element_type
    params["preferred_element_type"] = dtype if epilogue.is_plain else wide(dtype)
    second, *more = epilogue.split(others)
    products = (compat.dot_general_p.bind(lhs, x, **params) for x in (rhs, *second))
    out = epilogue.apply(*products, *itertools.chain(*more), dtype=dtype)
    return out if permutation is None else lax.transpose(out, permutation)


@dot_general_p.def_effectful_abstract_eval
def _abstract_eval(lhs, rhs, *, schedule, permutation, **params):
    del schedule
    product, effects = compat.dot_general_p.abstract_eval(lhs, rhs, **params)
    return product if permutation is None else lax.transpose_p.abstract_eval(product, permutation=permutation)[
        0
    ], effects


@linear_p.def_effectful_abstract_eval
def _linear_abstract_eval(lhs, rhs, *others, epilogue, schedule, **params):
    del schedule, others
    product, effects = compat.dot_general_p.abstract_eval(lhs, rhs, **params)
    if epilogue.gate == "stacked":
        *sizes, _, last = product.shape
        limits = dict(start_indices=(0,) * product.ndim, limit_indices=(*sizes, 1, last), strides=None)
        product = lax.slice_p.abstract_eval(product, **limits)[0]
        product = lax.squeeze_p.abstract_eval(product, dimensions=(product.ndim - 2,))[0]
    if compat.is_unreduced(product):
        raise ValueError(
            f"linear: out_sharding={params['out_sharding']} leaves the sum over devices open, but the epilogue needs it"
        )
    return product, effects


def _transpose(
    of,
    cotangent,
    lhs,
    rhs,
    *,
    dimension_numbers,
    precision,
    preferred_element_type,
    out_sharding,
    schedule,
    permutation,
):
    """The cotangent of operand ``of``: the output's, contracted with the other operand over its free dimensions."""
    del out_sharding
    if permutation is not None:
        cotangent = lax.transpose(cotangent, np.argsort(permutation))
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
    # For each dimension of the product, the dimension of x that it becomes.
    order = [*x_batch, *x_free, *(x_contract[i] for i in np.argsort(other_contract))]
    out = bind(
        cotangent,
        other,
        ((tuple(from_other), tuple(other_free)), (tuple(range(len(batch[0]))), tuple(other_batch))),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=compat.cotangent_sharding(x.aval, order),
        schedule=schedules.of_cotangent(schedule, of),
        permutation=None if order == sorted(order) else tuple(map(order.index, range(x.aval.ndim))),
    )
    return out if out.dtype == x.aval.dtype else compat.convert_cotangent(out, x.aval)


ad.defbilinear(dot_general_p, functools.partial(_transpose, 0), functools.partial(_transpose, 1))


def _batch(axis_data, operands, dims, *, dimension_numbers, out_sharding, permutation=None, **params):
    lhs, rhs = operands
    if tuple(dims) == (None, None):
        return bind(lhs, rhs, dimension_numbers, out_sharding=out_sharding, permutation=permutation, **params), None
    ndims = lhs.ndim, rhs.ndim
    numbers, out_dim, out_sharding = compat.batched_dimensions(
        axis_data, ndims, tuple(dims), dimension_numbers, out_sharding
    )
    if permutation is not None:
        permutation = (out_dim, *(dim + (dim >= out_dim) for dim in permutation))
    out = bind(lhs, rhs, numbers, out_sharding=out_sharding, permutation=permutation, **params)
    return out, out_dim if permutation is None else 0


compat.def_batching(dot_general_p, _batch)


def _linear_jvp(primals, tangents, *, epilogue, **params):
    """Applies the activation in XLA: its derivative needs the value before it."""
    if epilogue.gate:
        moves = [type(x) is not ad.Zero for x in tangents]
        function = _of_some(functools.partial(linear_apart, epilogue=epilogue, **params), primals, moves)
        moving, velocities = ([x for x, moved in zip(xs, moves) if moved] for xs in (primals, tangents))
        return jax.jvp(function, moving, velocities)
    lhs, rhs, *_ = primals
    before = bind_linear(*primals, epilogue=dataclasses.replace(epilogue, activation=None), **params)
    product: Callable[..., Any] = functools.partial(bind, **params)
    _, biases, residuals = epilogue.split(tangents[2:])
    terms = []
    if type(tangents[0]) is not ad.Zero:
        terms.append(product(tangents[0], rhs))
    if type(tangents[1]) is not ad.Zero:
        terms.append(product(lhs, tangents[1]))
    if terms:
        # One scaling of the sum: its transpose then scales the cotangent once. Two scaled copies would each be moved
        # between devices.
        terms = [scaled(epilogue.alpha, functools.reduce(lax.add, terms))]
    terms += [scaled(epilogue.beta, x) for x in residuals if type(x) is not ad.Zero]
    for bias in biases:
        if type(bias) is not ad.Zero:
            terms.append(jnp.zeros_like(before) + epilogue.spread_bias(bias, before.ndim))
    return jax.jvp(ACTIVATIONS[epilogue.activation], (before,), (functools.reduce(lax.add, terms),))


ad.primitive_jvps[linear_p] = _linear_jvp


def _linear_transpose(cotangent, *operands, epilogue, **params):
    """Transposes a ``linear`` that was not differentiated first, as linear solvers do with their matrix."""
    return _transposed(functools.partial(linear_apart, epilogue=epilogue, **params), cotangent, operands)


def _transposed(function, cotangent, operands):
    """The cotangents of those operands of a function that are not known, None for the others."""
    is_linear = [ad.is_undefined_primal(x) for x in operands]
    unknown = [x.aval for x in operands if ad.is_undefined_primal(x)]
    transposed = iter(jax.linear_transpose(_of_some(function, operands, is_linear), *unknown)(cotangent))
    return [next(transposed) if free else None for free in is_linear]


def _of_some(function, operands, is_free):
    """A function of those operands that are free."""

    def of_free(*given):
        taken = iter(given)
        return function(*(next(taken) if free else x for x, free in zip(operands, is_free)))

    return of_free


ad.primitive_transposes[linear_p] = _linear_transpose


def _linear_batch(axis_data, operands, dims, *, epilogue, dimension_numbers, out_sharding, **params):
    """One kernel if the mapped axis is a batch, or free in the only matrix that has it; else a separate epilogue."""
    (lhs, rhs, *others), (lhs_dim, rhs_dim, *other_dims) = operands, dims
    second, biases, residuals = epilogue.split(others)
    second_dims, bias_dims, residual_dims = epilogue.split(other_dims)
    if all(dim is None for dim in dims):
        params |= dict(epilogue=epilogue, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
        return bind_linear(*operands, **params), None
    one_bias_for_all = all(dim is None for dim in bias_dims)
    separate = rhs_dim is None and (lhs_dim is None or not one_bias_for_all)
    if epilogue.is_pair:
        separate |= (rhs_dim is None) != (second_dims[0] is None)
    elif epilogue.gate:
        separate |= rhs_dim is not None and lhs_dim is None  # rhs has two free dimensions only
    if separate and epilogue.gate:
        params |= dict(epilogue=epilogue, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
        apart = functools.partial(linear_apart, **params)
        return jax.vmap(apart, dims, axis_size=axis_data.size, spmd_axis_name=axis_data.spmd_name)(*operands), 0
    if separate:
        dtype = params["preferred_element_type"]
        params |= dict(
            preferred_element_type=wide(dtype), dimension_numbers=dimension_numbers, out_sharding=out_sharding
        )
        out, out_dim = _batch(axis_data, (lhs, rhs), (lhs_dim, rhs_dim), **params)
        return jax.vmap(functools.partial(epilogue.apply, dtype=dtype), in_axes=(out_dim, *other_dims))(out, *others), 0

    numbers, out_dim, out_sharding = compat.batched_dimensions(
        axis_data, (lhs.ndim, rhs.ndim), (lhs_dim, rhs_dim), dimension_numbers, out_sharding
    )

    def mapped(x, dim, to):
        return jnp.moveaxis(x, dim, to) if dim is not None else jnp.repeat(jnp.expand_dims(x, to), axis_data.size, to)

    bias_batch = epilogue.bias_batch
    if lhs_dim is None:
        # The mapped axis is a free dimension of rhs, and these come last in the result as in the bias.
        rank = lhs.ndim + rhs.ndim - 2 * len(numbers[0][0]) - len(numbers[1][0])
        biases = [mapped(x, dim, out_dim - rank + x.ndim + (dim is None)) for x, dim in zip(biases, bias_dims)]
    elif biases and rhs_dim is not None and not (one_bias_for_all and not bias_batch):
        # A bias with one of the batch dimensions must have all of them.
        sizes = [lhs.shape[i] for i in numbers[1][0]]
        biases = [mapped(x, dim, 0) for x, dim in zip(biases, bias_dims)]
        biases = [jnp.expand_dims(x, tuple(range(1 + bias_batch, len(sizes)))) for x in biases]
        biases = [jnp.broadcast_to(x, (*sizes, *x.shape[len(sizes) :])) for x in biases]
        bias_batch = len(sizes)
    if rhs_dim is not None:
        second = [jnp.moveaxis(x, dim, rhs_dim) for x, dim in zip(second, second_dims)]
    residuals = [mapped(x, dim, out_dim) for x, dim in zip(residuals, residual_dims)]
    out = bind_linear(
        lhs,
        rhs,
        *second,
        *biases,
        *residuals,
        epilogue=dataclasses.replace(epilogue, bias_batch=bias_batch),
        dimension_numbers=numbers,
        out_sharding=out_sharding,
        **params,
    )
    return out, out_dim


compat.def_batching(linear_p, _linear_batch)


def linear_apart(lhs, rhs, *others, epilogue, **params):
    """Product and epilogue one after the other; the products of a gated one with their biases, each rounded."""
    if not epilogue.gate:
        return epilogue.apply(bind(lhs, rhs, **params), *others)
    second, biases, _ = epilogue.split(others)
    of_each = zip((rhs, *second), [biases[i : i + 1] for i in range(1 + epilogue.is_pair)])
    products = [bind_linear(lhs, x, *bias, epilogue=epilogue.before_gate, **params) for x, bias in of_each]
    return dataclasses.replace(epilogue, has_bias=False, bias_batch=0).apply(*products)


compat.def_jet(dot_general_p)
compat.def_jet(linear_p, linear_apart)

# What ``accelerate`` fused: the closed jaxprs ``call_jaxpr``, one of our products with what its operands need, and
# ``written``, the equations that it replaces. Each device runs the former; derivatives are those of the latter.
fused_p = Primitive("streamk_fused")
fused_p.def_abstract_eval(lambda *operands, call_jaxpr, written: written.out_avals[0])
compat.check_nan(fused_p)


@fused_p.def_impl
def _fused(*operands, call_jaxpr, written):
    """Equation by equation: a program for each new jaxpr would have to be compiled."""
    is_divided = any(compat.is_concrete(x) and x.sharding.num_devices > 1 for x in operands)
    return jaxpr_as_fun(written if is_divided else call_jaxpr)(*operands)[0]


def _evaluated(*operands, written, call_jaxpr):
    del call_jaxpr
    return jaxpr_as_fun(written)(*operands)[0]


def _fused_jvp(primals, tangents, *, written, call_jaxpr):
    del call_jaxpr
    (out,), (tangent,) = compat.jvp_of(written, primals, tangents)
    return out, tangent


def _fused_transpose(cotangent, *operands, **params):
    return _transposed(functools.partial(_evaluated, **params), cotangent, operands)


def _fused_batch(axis_data, operands, dims, *, call_jaxpr, written):
    (call_jaxpr, written), (out_dim,) = compat.batched_alike(axis_data, dims, call_jaxpr, written)
    return fused_p.bind(*operands, call_jaxpr=call_jaxpr, written=written), out_dim


ad.primitive_jvps[fused_p] = _fused_jvp
ad.primitive_transposes[fused_p] = _fused_transpose
compat.def_batching(fused_p, _fused_batch)
compat.def_expansion(fused_p, "call_jaxpr", "written")
compat.def_jet(fused_p, _evaluated)


def _sparse_product(*operands, schedule, **params):
    """Kernels multiply dense matrices only."""
    del schedule
    return xlas_product(*operands, **params)


def know_sparse():
    """Gives ``sparsify`` its rules for our primitives, if this process has imported it. Call it before binding one."""
    compat.def_sparse({dot_general_p: _sparse_product, linear_p: _sparse_product, fused_p: _evaluated})


def _question(lhs, rhs, *_, **params):
    """What ``jax.checkpoint`` asks its policies about our products: the same as about JAX's."""
    ours = ("schedule", "permutation", "epilogue")
    return (compat.dot_general_p, lhs, rhs), {name: value for name, value in params.items() if name not in ours}


for _primitive in (dot_general_p, linear_p):
    compat.ask_policies(_primitive, _question)

# Aliases for programs written before JAX's own policies recognized our products.
dots_saveable = jax.checkpoint_policies.dots_saveable
dots_with_no_batch_dims_saveable = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
