"""What a kernel does to an output tile before storing it: ``activation(alpha * product + beta * residual + bias)``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_streamk.checks import check_static

ACTIVATIONS: dict[str | None, Callable[..., Any]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def check_activation(function, activation):
    """Raises ValueError if ``activation`` is not one of ``ACTIVATIONS``, TypeError if it is traced."""
    check_static(f"{function}: activation", activation)
    if activation not in list(ACTIVATIONS):  # a list: activation may have no hash
        raise ValueError(
            f"{function}: activation={activation!r}; it must be one of {', '.join(map(repr, ACTIVATIONS))}"
        )


def wide(dtype):
    """The dtype that the epilogue is computed in, for results of this dtype."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def scaled(factor, x):
    """``factor * x``, rounded once."""
    return x if factor == 1 else (factor * x.astype(wide(x.dtype))).astype(x.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class ByBits:
    """Bitwise equality, for dataclasses that key programs and plans: NaN equals itself, and -0.0 differs from 0.0."""

    @functools.cached_property
    def _key(self):
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(value.hex() if isinstance(value, float) else value for value in values)

    def __eq__(self, other):
        return self._key == other._key if type(other) is type(self) else NotImplemented

    def __hash__(self):
        return hash(self._key)


@dataclasses.dataclass(frozen=True, eq=False)
class Epilogue(ByBits):
    """The static part of an epilogue. Its operands follow lhs and rhs: the bias, then the residual.

    Attributes:
      activation: a key of ``ACTIVATIONS``.
      alpha, beta: factors of the product and of the residual.
      has_bias: whether there is a bias. Its last dimensions are the free dimensions of rhs.
      bias_batch: number of batch dimensions before them: all of the product's, or 0.
      has_residual: whether there is a residual, of the result's shape.
    """

    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    has_bias: bool = False
    bias_batch: int = 0
    has_residual: bool = False

    @property
    def is_plain(self):
        return self == Epilogue(beta=self.beta)

    def split(self, others):
        """(bias, residual) of the operands that follow lhs and rhs; None for absent ones."""
        bias, residual = others[: self.has_bias], others[self.has_bias :]
        return *(bias or (None,)), *(residual or (None,))

    def apply(self, product, *others, dtype=None):
        """The epilogue in XLA, where no kernel applies it: in at least float32, rounded once to ``dtype``."""
        if self.is_plain:
            return product
        bias, residual = self.split(others)
        out = self.alpha * product.astype(wide(product.dtype))
        if residual is not None:
            out += self.beta * residual.astype(out.dtype)
        if bias is not None:
            out += self.spread_bias(bias, out.ndim).astype(out.dtype)
        return ACTIVATIONS[self.activation](out).astype(dtype or product.dtype)

    def spread_bias(self, bias, rank):
        """The bias with dimensions of size 1 between its batch dimensions, if any, and the free ones of rhs."""
        return jnp.expand_dims(bias, tuple(range(self.bias_batch, self.bias_batch + rank - bias.ndim)))
