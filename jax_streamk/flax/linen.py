"""``flax.linen.Dense`` as one kernel, and a gated MLP as two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from jax_streamk import api
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


class _Projection(linen.Module):
    """The parameters of a ``flax.linen.Dense``, without its product."""

    features: int
    use_bias: bool
    param_dtype: DTypeLike
    kernel_init: Callable[..., Any]
    bias_init: Callable[..., Any]

    @linen.compact
    def __call__(self, in_features: int) -> tuple[jax.Array, jax.Array | None]:
        """The kernel, and the bias or None."""
        kernel = self.param("kernel", self.kernel_init, (in_features, self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return kernel, bias


class GatedMLP(linen.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, as in Llama: ``jax_streamk.gated_linear`` and a ``linear``.

    The three projections have the parameters of ``flax.linen.Dense``, ``kernel`` and with use_bias ``bias``, under
    these names, with the same initial values.

    Attributes:
      hidden_features: the number of features between the projections.
      features: that of the result; None for that of the input.
      activation: None, "relu", "gelu" (the exact one, by erf), "gelu_tanh", "silu", "sigmoid" or "tanh".
      use_bias: whether every projection has a bias.
      dtype: of the computation; None for what input and parameters promote to.
      param_dtype: as in ``flax.linen.Dense``, for every projection, like the next three.
      precision: of the products.
      kernel_init: of the kernels.
      bias_init: of the biases.
      schedule: as in ``Dense``, for every product.

    Raises:
      TypeError: schedule is not a schedule.
      ValueError: there is no such activation, or no kernel can run a product under the schedule.
    """

    hidden_features: int
    features: int | None = None
    activation: str | None = "silu"
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Callable[..., Any] = linen.Dense.kernel_init
    bias_init: Callable[..., Any] = linen.Dense.bias_init
    schedule: Schedule | PerPass | None = None

    def __post_init__(self) -> None:
        check_fields(self, None)
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Array of shape (..., features) of inputs of shape (..., k)."""
        fields: dict[str, Any] = dict(
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        in_features = jnp.shape(inputs)[-1]
        projections = (_Projection(self.hidden_features, name=name, **fields) for name in ("gate_proj", "up_proj"))
        (gate, b_gate), (up, b_up) = (projection(in_features) for projection in projections)
        x, gate, up, b_gate, b_up = promote_dtype(inputs, gate, up, b_gate, b_up, dtype=self.dtype)
        hidden = api.gated_linear(
            x, gate, up, b_gate, b_up, activation=self.activation, precision=self.precision, schedule=self.schedule
        )
        down = Dense(
            in_features if self.features is None else self.features,
            name="down_proj", dtype=self.dtype, precision=self.precision, schedule=self.schedule, **fields,
        )  # fmt: skip
        return down(hidden)
