"""``flax.linen.Dense`` as one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jax_streamk.flax.forward import check_fields, forward
from jax_streamk.schedules import PerPass, Schedule


class Dense(linen.Dense):
    """``flax.linen.Dense`` with an activation, as one call of ``jax_streamk.linear``.

    Fields are those of Flax's class and the two below; parameters, their names, initial values and metadata are Flax's.
    The bias is added in float32 and the result rounded once; Flax rounds the product before it adds the bias.

    Attributes:
      activation: None, "relu", "gelu" (the exact one, by erf), "gelu_tanh", "silu", "sigmoid" or "tanh".
      schedule: ``Auto()``, ``DataParallel()``, ``SplitK(...)``, ``StreamK(...)``, or a ``PerPass`` of them; None is
        ``Auto()``.
      dot_general: a product to use instead. Bias and activation then follow it, as in Flax's class.
      dot_general_cls: a class of such products.

    Raises:
      TypeError: schedule is not a schedule.
      ValueError: there is no such activation, both a schedule and a product to use instead are given, or no kernel can
        run the product under the schedule.
    """

    activation: str | None = None
    schedule: Schedule | PerPass | None = None

    def __post_init__(self) -> None:
        check_fields(self, self.dot_general_cls or self.dot_general)
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Array of shape (..., features) of inputs of shape (..., k)."""
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        dot_general = self.dot_general if self.dot_general_cls is None else self.dot_general_cls()
        return forward(self, dot_general, *self.promote_dtype(inputs, kernel, bias, dtype=self.dtype))
