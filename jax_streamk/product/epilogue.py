"""What a kernel does to an output tile before storing it: ``activation(alpha * product + beta * residual + bias)``.

With a gate it is ``activation(product + bias) * (second product + second bias)``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_streamk.checks import check_static

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"]

ACTIVATIONS: dict[Activation | None, Callable[..., Any]] = {
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


class ShortRepr:
    """For dataclasses that programs print: fields with their defaults are left out."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __repr__(self):
        given = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        shown = ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
        return f"{type(self).__name__}({shown})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Epilogue(ShortRepr, ByBits):
    """The static part of an epilogue. Its operands have the roles ``up`` (the second rhs), bias, up_bias and residual.

    Attributes:
      activation: a key of ``ACTIVATIONS``.
      alpha, beta: factors of the product and of the residual; 1 with a gate.
      has_bias: whether there is a bias. Its last dimensions are the free dimensions of rhs.
      bias_batch: number of batch dimensions before them: all of the product's, or 0.
      has_residual: whether there is a residual, of the result's shape. Not with a gate.
      gate: None, or where the two matrices of a gated product are: ``"pair"``, the operands rhs (whose product passes
        the activation) and second rhs, with a bias for each; ``"stacked"``, along the first of the two free dimensions
        of rhs, which the result lacks, and of the bias.
    """

    activation: Activation | None = None
    alpha: float = 1.0
    beta: float = 1.0
    has_bias: bool = False
    bias_batch: int = 0
    has_residual: bool = False
    gate: str | None = None

    @property
    def is_plain(self):
        return self == Epilogue(beta=self.beta)

    @property
    def is_pair(self):
        """Whether there is a second rhs."""
        return self.gate == "pair"

    @property
    def before_gate(self):
        """The epilogue of each product of a gated one, if these run apart."""
        return dataclasses.replace(self, activation=None, gate=None)

    @property
    def roles(self):
        """The roles of its operands, in order."""
        present = dict(
            up=self.is_pair,
            bias=self.has_bias,
            up_bias=self.has_bias and self.is_pair,
            residual=self.has_residual,
        )
        return tuple(role for role, is_there in present.items() if is_there)

    def apply(self, product, *, up=None, bias=None, up_bias=None, residual=None, dtype=None):
        """The epilogue in XLA, where no kernel applies it: in at least float32, rounded once to ``dtype``.

        Args:
          up: the second product.
        """
        if self.is_plain:
            return product
        dtype = dtype or product.dtype
        if self.gate:
            before = functools.partial(self.before_gate.apply, dtype=wide(dtype))
            if self.is_pair:
                products = before(product, bias=bias), before(up, bias=up_bias)
            else:
                both = before(product, bias=bias)
                first, last = (lax.index_in_dim(both, i, both.ndim - 2, keepdims=False) for i in range(2))
                products = first, last
            gate, factor = (x.astype(wide(dtype)) for x in products)
            return (ACTIVATIONS[self.activation](gate) * factor).astype(dtype)
        out = product.astype(wide(product.dtype))
        if self.alpha != 1:
            out *= self.alpha
        if residual is not None:
            out += scaled(self.beta, residual.astype(out.dtype))
        if bias is not None:
            out += self.spread_bias(bias, out.ndim).astype(out.dtype)
        return ACTIVATIONS[self.activation](out).astype(dtype)

    def spread_bias(self, bias, rank):
        """The bias with dimensions of size 1 between its batch dimensions, if any, and the free ones of rhs."""
        return jnp.expand_dims(bias, tuple(range(self.bias_batch, self.bias_batch + rank - bias.ndim)))
