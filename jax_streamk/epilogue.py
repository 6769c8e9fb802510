"""What a kernel does to an output tile before it stores it: ``activation(alpha * product + beta * residual + bias)``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The static part of it, and which operands follow lhs and rhs: the bias, then the residual.

    Attributes:
      activation: a key of ``ACTIVATIONS``.
      alpha, beta: factors of the product and of the residual.
      has_bias: there is one, with the free dimensions of rhs.
      batched_bias: and the batch dimensions before them.
      has_residual: there is one, with the result's dimensions.
    """

    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    has_bias: bool = False
    batched_bias: bool = False
    has_residual: bool = False

    def split(self, extras):
        """(bias, residual) of the operands that follow lhs and rhs; None for absent ones."""
        extras = list(extras)
        return extras.pop(0) if self.has_bias else None, extras.pop(0) if self.has_residual else None

    def bias_dims(self, batch, rank):
        """The dimensions of a result of this rank, with so many batch dimensions, that the bias has."""
        raise NotImplementedError

    def apply(self, product, bias, residual):
        """The epilogue of XLA's making, for products that no kernel finishes: in float32 at least, and rounded once."""
        dtype = jnp.promote_types(product.dtype, jnp.float32)
        out = self.alpha * product.astype(dtype)
        if residual is not None:
            out += self.beta * residual.astype(dtype)
        if bias is not None:
            out += bias.astype(dtype)
        return ACTIVATIONS[self.activation](out).astype(product.dtype)
