"""What a mixture of experts computes, and the checks of the fields that only these layers have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_streamk import api
from jax_streamk.checks import integer
from jax_streamk.flax.forward import check_fields
from jax_streamk.product.epilogue import wide


def check_experts(layer: Any) -> None:
    """Raises what the layers' docstrings say about their fields, and makes numbers of experts ints."""
    check_fields(layer, None)
    name = type(layer).__name__
    for what in ("num_experts", "experts_per_token"):
        object.__setattr__(layer, what, integer(f"{name}: {what}", getattr(layer, what)))  # linen's are frozen
    if layer.experts_per_token > layer.num_experts:
        raise ValueError(
            f"{name}: experts_per_token is {layer.experts_per_token}; it must be from 1 to num_experts, "
            f"{layer.num_experts}"
        )


def mixture(
    layer: Any,
    router: Callable[[jax.Array], jax.Array],
    inputs: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
) -> tuple[jax.Array, jax.Array]:
    """The layers' result and load-balancing loss, of promoted arrays."""
    params: dict[str, Any] = dict(precision=layer.precision, schedule=layer.schedule)
    experts, top_k = layer.num_experts, layer.experts_per_token
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise TypeError(f"{type(layer).__name__}: input and parameters promote to {inputs.dtype}; it must be floating")
    tokens = inputs.reshape(-1, inputs.shape[-1])
    dtype = wide(inputs.dtype)
    probabilities = jax.nn.softmax(router(inputs).reshape(-1, experts).astype(dtype))
    weights, chosen = lax.top_k(probabilities, top_k)
    if layer.normalize:
        weights /= weights.sum(-1, keepdims=True)

    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    group_sizes = jnp.sum(expert[:, None] == jnp.arange(experts)[None], 0, dtype=jnp.int32)
    product = functools.partial(api.gated_of_rows, mode="promise_in_bounds", activation=layer.activation, **params)
    hidden = _hidden(product, top_k, order, group_sizes, tokens, gate, up)
    parts = _permuted(api.ragged_dot(hidden, down, group_sizes, **params), place)
    parts = parts.reshape(-1, top_k, parts.shape[-1])
    out = jnp.sum(parts.astype(dtype) * weights[:, :, None], 1).astype(parts.dtype)

    scale = top_k / jnp.maximum(group_sizes.sum(), 1).astype(dtype)  # one over the number of tokens
    loss = experts * jnp.sum(scale * group_sizes.astype(dtype) * (scale * probabilities.sum(0)))
    return out.reshape(*inputs.shape[:-1], out.shape[-1]), loss


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _hidden(
    product: Callable[..., jax.Array], top_k: int, order: jax.Array, group_sizes: jax.Array, tokens: jax.Array,
    gate: Any, up: Any,
) -> jax.Array:  # fmt: skip
    """The first half of each expert's MLP, of rows in an order of experts."""
    return product(tokens, gate, up, group_sizes, lhs_indices=order // top_k)


@functools.partial(_hidden.defjvp, symbolic_zeros=True)
def _hidden_jvp(product: Callable[..., jax.Array], top_k: int, primals: Any, tangents: Any) -> Any:
    order, group_sizes, *operands = primals
    structure: Any
    operands, structure = jax.tree.flatten(operands)  # quantized matrices have several arrays
    tangents = structure.flatten_up_to(list(tangents[2:]))
    moves = [type(x) is not jax.custom_derivatives.SymbolicZero for x in tangents]

    def of_moved(*moved: jax.Array) -> jax.Array:
        taken = iter(moved)
        given = [next(taken) if moves_ else x for x, moves_ in zip(operands, moves)]
        tokens, gate, up = structure.unflatten(given)
        return product(_rows_of_experts(top_k, tokens, order), gate, up, group_sizes)

    moved: Any = [[x for x, moves_ in zip(xs, moves) if moves_] for xs in (operands, tangents)]
    return jax.jvp(of_moved, *moved)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rows_of_experts(top_k: int, tokens: jax.Array, order: jax.Array) -> jax.Array:
    """Each token once for each of its experts, in an order of these."""
    return tokens.at[order // top_k].get(mode="promise_in_bounds")


@_rows_of_experts.defjvp
def _rows_jvp(top_k: int, primals: Any, tangents: Any) -> Any:
    tokens, order = primals
    # Copied first, or the transpose would add to a token's rows in an order that timing decides.
    return _rows_of_experts(top_k, tokens, order), _permuted(jnp.repeat(tangents[0], top_k, 0), order)


def _permuted(rows: jax.Array, order: jax.Array) -> jax.Array:
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
