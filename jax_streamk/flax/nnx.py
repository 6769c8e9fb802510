"""``flax.nnx.Linear`` as one kernel, gated MLPs as two, also those of experts, and ``accelerate`` for modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_streamk import api
from jax_streamk.accelerate.products import Products
from jax_streamk.accelerate.rewrite import Accelerated, P, R, Where, check_results, function_and_owner
from jax_streamk.accelerate.rewrite import accelerate as _accelerate
from jax_streamk.flax.experts import check_experts, mixture
from jax_streamk.flax.forward import check_fields, forward, promoted
from jax_streamk.product.epilogue import Activation, wide
from jax_streamk.schedules import PerPass, Schedule


class Linear(nnx.Linear):
    """``flax.nnx.Linear`` with an activation, as one call of ``jax_streamk.linear``.

    Arguments are those of Flax's class and the two below; parameters, their names, initial values and metadata are
    Flax's. The bias is added in float32 and the result rounded once; Flax rounds the product before it adds the bias.

    Args:
      activation: None, or one of those of ``jax_streamk.linear``.
      schedule: ``Auto()``, ``DataParallel()``, ``SplitK(...)``, ``StreamK(...)``, or a ``PerPass`` of them; None is
        ``Auto()``.
      dot_general: a product to use instead. Bias and activation then follow it, as in Flax's class.

    Raises:
      TypeError: schedule is not a schedule.
      ValueError: there is no such activation, both a schedule and a product to use instead are given, or (when called)
        no kernel can run the product under the schedule.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation | None = None,
        schedule: Schedule | PerPass | None = None,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, **kwargs)
        self.activation = activation
        self.schedule = schedule
        check_fields(self, self._own_dot_general())

    def __call__(self, inputs: ArrayLike, out_sharding: NamedSharding | PartitionSpec | None = None) -> jax.Array:
        """Array of shape (..., out_features) of inputs (..., in_features), sharded as ``out_sharding`` says."""
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = promoted(_separate(self.promote_dtype), inputs, kernel, bias, dtype=self.dtype)
        dtype = self.preferred_element_type
        return forward(self, self._own_dot_general(), inputs, kernel, bias, dtype, out_sharding=out_sharding)

    def _own_dot_general(self) -> Callable[..., Any] | None:
        return None if self.dot_general is lax.dot_general else self.dot_general


def _separate(promote: Callable[..., Any]) -> Callable[..., Any]:
    """nnx's ``promote_dtype`` as a function of separate arrays, as linen's is."""
    return lambda *arrays, dtype: promote(arrays, dtype=dtype)


class GatedMLP(nnx.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, as in Llama: ``jax_streamk.gated_linear`` and a ``linear``.

    The three attributes of these names are layers of the class ``Linear``.

    Args:
      in_features: the number of features of the input.
      hidden_features: the hidden width, between the projections.
      out_features: the number of features of the result; None for that of the input.
      activation: None, or one of those of ``jax_streamk.linear``.
      use_bias: whether every projection has a bias.
      schedule: as in ``Linear``, for every product.
      rngs: as in ``flax.nnx.Linear``.
      kwargs: other arguments of ``flax.nnx.Linear``, for every projection: dtype, param_dtype, precision, kernel_init,
        preferred_element_type, promote_dtype, bias_init, kernel_metadata, bias_metadata.

    Raises:
      TypeError: schedule is not a schedule, or (when called) input and parameters promote to complex numbers.
      ValueError: there is no such activation, dot_general is given, or (when called) no kernel can run a product under
        the schedule.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation | None = "silu",
        use_bias: bool = False,
        schedule: Schedule | PerPass | None = None,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        self.activation = activation
        self.schedule = schedule
        check_fields(self, None)
        if "dot_general" in kwargs:
            raise ValueError(
                "GatedMLP: a product of the user's own cannot replace its kernels: dot_general must not be given"
            )
        kwargs |= dict(use_bias=use_bias, schedule=schedule, rngs=rngs)
        self.gate_proj = Linear(in_features, hidden_features, **kwargs)
        self.up_proj = Linear(in_features, hidden_features, **kwargs)
        self.down_proj = Linear(hidden_features, in_features if out_features is None else out_features, **kwargs)

    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Array of shape (..., out_features) of inputs (..., in_features)."""
        gate, up = self.gate_proj, self.up_proj
        parameters = (None if x is None else x[...] for x in (gate.kernel, up.kernel, gate.bias, up.bias))
        operands = promoted(_separate(gate.promote_dtype), inputs, *parameters, dtype=gate.dtype)
        hidden = api.gated_linear(
            *operands, activation=self.activation, precision=gate.precision, schedule=self.schedule,
            preferred_element_type=gate.preferred_element_type,
        )  # fmt: skip
        return self.down_proj(hidden)


_LECUN_NORMAL = nnx.initializers.lecun_normal()  # Flax's default


class MoE(nnx.Module):
    """A mixture of experts, as in Mixtral and Qwen3: each token is the input of a few gated MLPs of many.

    The attribute ``gate`` is the router, a ``Linear`` of ``num_experts`` outputs without bias. Their softmax, in at
    least float32, tells each token's experts, those of the largest probabilities, and their weights. ``experts`` is a
    ``GatedMLP`` whose arrays have one more dimension in front, of experts. Every expert gets all of its tokens, by
    ``jax_streamk.ragged_gated`` and ``ragged_dot``.

    Tokens that are divided over devices are sorted by expert on all of them: in a ``jax.shard_map`` over tokens each
    device sorts its own, and the loss is that of its tokens.

    Args:
      in_features: the number of features of the input and of the result.
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
        ``kernel_init`` has by ``flax.nnx.with_partitioning``.
      schedule: ``Auto()`` or ``DataParallel()``, or a ``PerPass`` of them, for every product; None is ``Auto()``.
      rngs: as in ``flax.nnx.Linear``.

    Raises:
      TypeError: schedule is not a schedule, or (when called) input and parameters promote to complex numbers.
      ValueError: there is no such activation, a number of experts is not a positive integer, there are fewer experts
        than each token is routed to, or (when called) no kernel can run a product under the schedule.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        normalize: bool = True,
        activation: Activation | None = "silu",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Callable[..., Any] = _LECUN_NORMAL,
        router_init: Callable[..., Any] = _LECUN_NORMAL,
        partition_name: str | None = None,
        schedule: Schedule | PerPass | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.normalize, self.activation = normalize, activation
        self.dtype, self.precision, self.schedule = dtype, precision, schedule
        check_experts(self)
        fields: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, precision=precision, schedule=schedule)
        self.gate = Linear(
            in_features, self.num_experts, use_bias=False, kernel_init=router_init, rngs=rngs,
            preferred_element_type=wide(jnp.dtype(dtype or param_dtype)), **fields,
        )  # fmt: skip

        @nnx.split_rngs(splits=self.num_experts)
        @functools.partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: partition_name})
        def experts_of(rngs: nnx.Rngs) -> GatedMLP:
            return GatedMLP(
                in_features, hidden_features, activation=activation, kernel_init=kernel_init, rngs=rngs, **fields
            )

        self.experts = experts_of(rngs)

    def __call__(self, inputs: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """The result, (..., in_features) as ``inputs``, and the load-balancing loss, a scalar.

        The loss is that of Switch Transformers (Fedus et al., arXiv:2101.03961, equations 4 to 6) for any number of
        experts per token: ``num_experts`` times the sum over experts of the share of tokens that an expert gets and its
        mean probability. It is ``experts_per_token`` where all experts are chosen alike. Not yet scaled.
        """
        experts = self.experts
        arrays = (x.kernel[...] for x in (experts.gate_proj, experts.up_proj, experts.down_proj))
        x, *kernels = promoted(_separate(experts.gate_proj.promote_dtype), inputs, *arrays, dtype=self.dtype)
        return mixture(self, self.gate, x, *kernels)


@overload
def accelerate(
    fn: Callable[P, R], *, schedule: Schedule | PerPass | None = None, where: Where | None = None
) -> Accelerated[P, R]: ...
@overload
def accelerate(
    fn: None = None, *, schedule: Schedule | PerPass | None = None, where: Where | None = None
) -> Callable[[Callable[P, R]], Accelerated[P, R]]: ...
def accelerate(
    fn: Callable[..., Any] | None = None,
    *,
    schedule: Schedule | PerPass | None = None,
    where: Where | None = None,
) -> Any:
    """``jax_streamk.accelerate`` for functions that change modules: it updates its arguments as ``flax.nnx.jit`` does.

    Args:
      fn: a function, a module, or a method of one. Modules, and whatever else ``flax.nnx.split`` takes apart, may be
        among its arguments and results; a module that it only closes over must not change. Without it,
        ``accelerate(schedule=...)`` is a decorator.
      schedule, where: as in ``jax_streamk.accelerate``.

    Returns:
      A function like ``fn``. After a call modules among its arguments have the state that ``fn`` left: statistics of
      BatchNorm, counts of random numbers, caches of attention, what ``sow`` kept, and attributes that it added.

    Raises:
      TypeError, ValueError, RuntimeError: as ``jax_streamk.accelerate``.
    """
    _accelerate(fn, schedule=schedule, where=where)  # checks them
    if fn is None:
        return functools.partial(accelerate, schedule=schedule, where=where)
    function, owner = function_and_owner(fn)

    @functools.wraps(function, updated=())
    def functional(*args: Any, **kwargs: Any) -> Any:
        with nnx.merge_context(tag, inner=True) as context:
            args, kwargs = _merge(context, (args, kwargs))
        out = function(*args, **kwargs)
        check_results(out)
        with nnx.split_context(tag) as context:
            return _split(context, (args, kwargs, out))

    tag = functional
    pure = _accelerate(functional, schedule=schedule, where=where)

    @functools.wraps(fn, updated=())
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(tag):
            with nnx.split_context(tag) as context:
                args, kwargs = _split(context, ((*owner, *args), kwargs))
            out = pure(*args, **kwargs)
            with nnx.merge_context(tag, inner=False) as context:
                return _merge(context, out)[2]

    def explain(*args: Any, **kwargs: Any) -> Products:
        with nnx.update_context(tag):
            with nnx.split_context(tag) as context:
                args, kwargs = _split(context, ((*owner, *args), kwargs))
            return pure.explain(*args, **kwargs)

    cast(Any, accelerated).explain = explain
    return accelerated


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["graph"])
@dataclasses.dataclass
class _Node:
    """A module taken apart, in a context that knows what it shares with others."""

    graph: Any
    leaves: list[Any]


def _split(context: Any, tree: Any) -> Any:
    """``tree`` with its modules and variables as a ``_Node`` each."""
    is_node = lambda x: nnx.graph.is_graph_node(x) or isinstance(x, nnx.Variable)
    split = lambda x: _Node(*context.flatten(x, with_paths=False)) if is_node(x) else x
    return jax.tree.map(split, tree, is_leaf=is_node)


def _merge(context: Any, tree: Any) -> Any:
    is_node = lambda x: isinstance(x, _Node)
    merge = lambda x: context.unflatten(x.graph, x.leaves) if is_node(x) else x
    return jax.tree.map(merge, tree, is_leaf=is_node)
