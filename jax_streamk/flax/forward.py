"""What a dense layer computes, and the checks of the fields that Flax's own layers do not have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_streamk import api, quantized
from jax_streamk.product.epilogue import ACTIVATIONS, check_activation
from jax_streamk.schedules import check_schedule


def check_fields(layer: Any, dot_general: Callable[..., Any] | None) -> None:
    """Raises what the layers' docstrings say about their fields; ``dot_general`` is the user's, or None."""
    check_schedule(layer.schedule)
    name = type(layer).__name__
    check_activation(name, layer.activation)
    if dot_general is not None and layer.schedule is not None:
        raise ValueError(
            f"{name}: schedule={layer.schedule} is for jax_streamk's product, which dot_general={dot_general} replaces"
        )


def promoted(promote: Callable[..., Any], *arrays: Any, dtype: DTypeLike | None) -> list[Any]:
    """What Flax's ``promote_dtype`` makes of arrays, where quantized ones keep their numbers."""
    arrays = tuple(map(quantized.ours, arrays))
    are_kept = [isinstance(x, quantized.QuantizedArray) for x in arrays]
    of_types = (jnp.zeros((), x.dtype) if is_kept else x for x, is_kept in zip(arrays, are_kept))
    out = promote(*of_types, dtype=dtype)
    return [quantized.astype(x, y.dtype) if is_kept else y for x, y, is_kept in zip(arrays, out, are_kept)]


def forward(
    layer: Any,
    dot_general: Callable[..., Any] | None,
    inputs: Any,
    kernel: Any,
    bias: Any,
    preferred_element_type: DTypeLike | None = None,
    **sharding: Any,
) -> jax.Array:
    """``activation(inputs @ kernel + bias)`` of promoted arrays, with the same dtype as from Flax's layers.

    This is one call of ``linear``. For complex numbers, or if ``dot_general`` is not None but the user's own, bias and
    activation follow the product.
    """
    # Interceptors such as qwix may pass weights of their own types.
    if dot_general is None and not api.is_intercepted():
        dtype = preferred_element_type or jnp.result_type(inputs, kernel.dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            # Flax adds the bias to the rounded product, in the dtype of both.
            dtype = dtype if bias is None else jnp.promote_types(dtype, bias.dtype)
            return api.linear(
                inputs, kernel, bias, activation=layer.activation, precision=layer.precision,
                preferred_element_type=dtype, schedule=layer.schedule, **sharding,
            )  # fmt: skip
    if dot_general is not None and isinstance(kernel, quantized.QuantizedArray):
        kernel = kernel.dequantize()
    dot_general = dot_general or functools.partial(api.dot_general, schedule=layer.schedule)
    # A user's dot_general need not accept arguments that are rarely given.
    if preferred_element_type is not None:
        sharding["preferred_element_type"] = preferred_element_type
    out = dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())), precision=layer.precision, **sharding)
    if bias is not None:
        out += jnp.expand_dims(bias, tuple(range(out.ndim - 1)))
    return ACTIVATIONS[layer.activation](out)
