"""``flax.linen.Dense`` as one kernel, and gated MLPs as two, also those of experts."""

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
from jax_streamk.flax.experts import check_experts, mixture
from jax_streamk.flax.forward import check_fields, forward, promoted
from jax_streamk.product.epilogue import Activation, wide
from jax_streamk.schedules import PerPass, Schedule


class Dense(linen.Dense):
    """``flax.linen.Dense`` with an activation, as one call of ``jax_streamk.linear``.

    Fields are those of Flax's class and the two below; parameters, their names, initial values and metadata are Flax's.
    The bias is added in float32 and the result rounded once; Flax rounds the product before it adds the bias.

    Attributes:
      activation: None, or one of those of ``jax_streamk.linear``.
      schedule: ``Auto()``, ``DataParallel()``, ``SplitK(...)``, ``StreamK(...)``, or a ``PerPass`` of them; None is
        ``Auto()``.
      dot_general: a product to use instead. Bias and activation then follow it, as in Flax's class.
      dot_general_cls: a class of such products.

    Raises:
      TypeError: schedule is not a schedule.
      ValueError: there is no such activation, both a schedule and a product to use instead are given, or no kernel can
        run the product under the schedule.
    """

    activation: Activation | None = None
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
        return forward(self, dot_general, *promoted(self.promote_dtype, inputs, kernel, bias, dtype=self.dtype))


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
      hidden_features: the hidden width, between the projections.
      features: the number of features of the result; None for that of the input.
      activation: None, or one of those of ``jax_streamk.linear``.
      use_bias: whether every projection has a bias.
      dtype: of the computation; None for what input and parameters promote to.
      param_dtype: as in ``flax.linen.Dense``, for every projection, like the next three.
      precision: of the products.
      kernel_init: of the kernels.
      bias_init: of the biases.
      schedule: as in ``Dense``, for every product.

    Raises:
      TypeError: schedule is not a schedule, or input and parameters promote to complex numbers.
      ValueError: there is no such activation, or no kernel can run a product under the schedule.
    """

    hidden_features: int
    features: int | None = None
    activation: Activation | None = "silu"
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
        x, gate, up, b_gate, b_up = promoted(promote_dtype, inputs, gate, up, b_gate, b_up, dtype=self.dtype)
        hidden = api.gated_linear(
            x, gate, up, b_gate, b_up, activation=self.activation, precision=self.precision, schedule=self.schedule
        )
        down = Dense(
            in_features if self.features is None else self.features,
            name="down_proj", dtype=self.dtype, precision=self.precision, schedule=self.schedule, **fields,
        )  # fmt: skip
        return down(hidden)


class _Expert(linen.Module):
    """The kernels of a ``GatedMLP``, without its products."""

    hidden_features: int
    kernel_init: Callable[..., Any]
    param_dtype: DTypeLike

    @linen.compact
    def __call__(self, in_features: int) -> tuple[jax.Array, ...]:
        kernels = []
        for name, k, n in (
            ("gate_proj", in_features, self.hidden_features),
            ("up_proj", in_features, self.hidden_features),
            ("down_proj", self.hidden_features, in_features),
        ):
            projection = _Projection(n, False, self.param_dtype, self.kernel_init, linen.Dense.bias_init, name=name)
            kernels.append(projection(k)[0])
        return tuple(kernels)


class MoE(linen.Module):
    """A mixture of experts, as in Mixtral and Qwen3: each token is the input of a few gated MLPs of many.

    The router, ``gate``, has the parameters of a ``flax.linen.Dense`` of ``num_experts`` outputs without bias. Their
    softmax, in at least float32, tells each token's experts, those of the largest probabilities, and their weights.
    ``experts`` has the parameters of a ``GatedMLP`` with one more dimension in front, of experts. Every expert gets all
    of its tokens, by ``jax_streamk.ragged_gated`` and ``ragged_dot``.

    Tokens that are divided over devices are sorted by expert on all of them: in a ``jax.shard_map`` over tokens each
    device sorts its own, and the loss is that of its tokens.

    Attributes:
      hidden_features: the hidden width of an expert.
      num_experts: the number of experts.
      experts_per_token: the number of experts that each token is routed to.
      normalize: whether a token's weights are divided by their sum.
      activation: None, or one of those of ``jax_streamk.linear``.
      dtype: of the computation; None for what input and parameters promote to.
      param_dtype: of the parameters.
      precision: of the products.
      kernel_init: of each expert's kernels, as in ``GatedMLP``.
      router_init: of the router's kernel.
      partition_name: the name of the dimension of experts in the parameters' partitioning, beside those that
        ``kernel_init`` has by ``flax.linen.with_partitioning``.
      schedule: ``Auto()`` or ``DataParallel()``, or a ``PerPass`` of them, for every product; None is ``Auto()``.

    Raises:
      TypeError: schedule is not a schedule, or (when called) input and parameters promote to complex numbers.
      ValueError: there is no such activation, a number of experts is not a positive integer, there are fewer experts
        than each token is routed to, or no kernel can run a product under the schedule.
    """

    hidden_features: int
    num_experts: int
    experts_per_token: int
    normalize: bool = True
    activation: Activation | None = "silu"
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Callable[..., Any] = linen.Dense.kernel_init
    router_init: Callable[..., Any] = linen.Dense.kernel_init
    partition_name: str | None = None
    schedule: Schedule | PerPass | None = None

    def __post_init__(self) -> None:
        check_experts(self)
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """The result, (..., k) as ``inputs``, and the load-balancing loss, a scalar.

        The loss is that of Switch Transformers (Fedus et al., arXiv:2101.03961, equations 4 to 6) for any number of
        experts per token: ``num_experts`` times the sum over experts of the share of tokens that an expert gets and its
        mean probability. It is ``experts_per_token`` where all experts are chosen alike. Not yet scaled.
        """
        features = jnp.shape(inputs)[-1]
        router, _ = _Projection(
            self.num_experts, False, self.param_dtype, self.router_init, linen.Dense.bias_init, name="gate"
        )(features)
        experts: Any = linen.vmap(
            _Expert, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=self.num_experts,
            metadata_params={linen.PARTITION_NAME: self.partition_name},
        )  # fmt: skip
        kernels = experts(self.hidden_features, self.kernel_init, self.param_dtype, name="experts")(features)
        x, router, *kernels = promoted(promote_dtype, inputs, router, *kernels, dtype=self.dtype)
        params: Any = dict(precision=self.precision, preferred_element_type=wide(x.dtype), schedule=self.schedule)
        return mixture(self, lambda x: api.matmul(x, router, **params), x, *kernels)
