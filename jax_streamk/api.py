"""The public functions."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_streamk import _ffi, compat, lowering, primitive
from jax_streamk.checks import check_static
from jax_streamk.device import Device, device_of
from jax_streamk.epilogue import Epilogue, check_activation
from jax_streamk.planner import Plan
from jax_streamk.schedules import PerPass, Schedule, check_schedule
from jax_streamk.tuning import tuned

Dims = tuple[int, ...]
# ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
F = TypeVar("F", bound=Callable[..., Any])


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, a ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def _dispatched(*operands: str, jaxs: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a public function.

    Outside traces its calls are compiled once, as JAX's are: preparing operands in Python takes several times as long
    as a small product. If a library has replaced ``lax.dot_general``, ``jaxs`` is called instead, which calls the
    replacement: this is how qwix finds what to quantize.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        variadic = any(x.kind is x.VAR_POSITIONAL for x in parameters.values())
        static = [name for name, x in parameters.items() if name not in operands and x.kind is not x.VAR_POSITIONAL]

        @functools.lru_cache(1)
        def compiled(generation: int) -> Callable[..., Any]:
            """A new function whenever tuned plans change, since jit would find the old program of the old one."""
            del generation
            new = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
            return jax.jit(new, static_argnames=static)

        def is_for_compiled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            if not compat.outside_of_traces() or (len(args) > len(positional) and not variadic):
                return False
            names = (*positional, *[operands[-1]] * (len(args) - len(positional)))
            for name, x in (*zip(names, args), *kwargs.items()):
                if name not in operands:
                    try:
                        hash(x)
                    except TypeError:
                        return False
                    if x != x or (x == 0 and not isinstance(x, int)):
                        return False  # jax.jit confuses -0.0 with 0.0, and never finds NaN again
                elif x is not None and not (
                    compat.is_concrete(x) or (type(x) is np.ndarray and x.dtype.kind in "biufc")
                ):
                    return False
            return True

        @functools.wraps(function)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if is_intercepted():
                kwargs.pop("schedule", None)
                return jaxs(*args, **kwargs)
            call = compiled(tuned.generation()) if is_for_compiled(args, kwargs) else function
            return call(*args, **kwargs)

        return cast(F, dispatch)

    return decorate


_jaxs_dot_general, _jaxs_code = lax.dot_general, lax.dot_general.__code__


def is_intercepted() -> bool:
    """Whether a library, such as qwix, has replaced ``lax.dot_general``."""
    return lax.dot_general is not _jaxs_dot_general or lax.dot_general.__code__ is not _jaxs_code


@_dispatched("a", "b", jaxs=lambda *args, **kwargs: jnp.matmul(*args, **kwargs))
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``jax.numpy.matmul`` with split-K and Stream-K kernels.

    Args:
      a: array of shape (k,), (m, k) or (..., m, k).
      b: array of shape (k,), (k, n) or (..., k, n). Leading dimensions broadcast with those of ``a``; dtypes promote.
      precision: as in ``jax.numpy.matmul``. On a GPU float32 products use TF32 by default and three TF32 products at
        HIGH, and are left to XLA at HIGHEST; on a CPU they use float32.
      preferred_element_type: dtype of the result. Sums are always float32 (float64 for float64, int32 for int8).
      out_sharding: sharding of the result under explicit sharding, as in ``jax.numpy.matmul``.
      schedule: ``Auto()`` (the default), ``DataParallel()``, ``SplitK(...)`` or ``StreamK(...)``. An explicit
        schedule is used as given, or refused.

    Returns:
      What ``jax.numpy.matmul`` returns, with shape (..., m, n).

    Raises:
      TypeError: an operand is not an array of numbers, or schedule is not a schedule.
      ValueError: an operand is a scalar, contracted sizes differ, leading dimensions do not broadcast, or no kernel can
        run the product under an explicit schedule.
    """
    schedule = check_schedule(schedule)
    lhs, rhs, weak = _promoted("matmul", preferred_element_type, a=a, b=b)
    dimension_numbers, squeeze, order = _matmul_dimensions(lhs.shape, rhs.shape)
    lhs, rhs = (lax.squeeze(x, dims) if dims else x for x, dims in zip((lhs, rhs), squeeze))
    out = primitive.bind(
        lhs,
        rhs,
        dimension_numbers,
        precision=compat.canonicalize_precision(precision),
        preferred_element_type=_element_type(preferred_element_type, lhs, rhs),
        out_sharding=compat.canonicalize_sharding(out_sharding, "matmul"),
        schedule=schedule,
        permutation=order,
    )
    return compat.as_weak_type(out) if weak else out


@_dispatched("lhs", "rhs", jaxs=lambda *args, **kwargs: lax.dot_general(*args, **kwargs))
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``jax.lax.dot_general`` with split-K and Stream-K kernels: a drop-in wherever one is expected.

    Args:
      lhs, rhs: arrays. Mixed dtypes are handled as in lax.
      dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
      precision: as in ``lax.dot_general``, a ``Precision``, a pair of them, or a ``DotAlgorithm``; see ``matmul``.
      preferred_element_type: dtype of the result.
      out_sharding: sharding of the result under explicit sharding.
      schedule: as in ``matmul``.

    Returns:
      What ``lax.dot_general`` returns: an array whose dimensions are batch, free of lhs, free of rhs.

    Raises:
      TypeError: an operand is not an array of numbers, dimensions do not match, or schedule is not a schedule.
      ValueError: no kernel can run the product under an explicit schedule. Under ``Auto()`` XLA's own product runs if
        there is no kernel (integers, complex numbers, some algorithms) or XLA's was measured to be faster; ``plan``
        says so.
    """
    schedule = check_schedule(schedule)
    lhs, rhs = (_array("dot_general", name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    return primitive.bind(
        lhs,
        rhs,
        _dimension_numbers(dimension_numbers),
        precision=compat.canonicalize_precision(precision),
        preferred_element_type=_element_type(preferred_element_type, lhs, rhs),
        out_sharding=compat.canonicalize_sharding(out_sharding, "dot_general"),
        schedule=schedule,
    )


@_dispatched("operands", jaxs=lambda *args, **kwargs: jnp.einsum(*args, **kwargs))
def einsum(
    subscripts: Any,
    *operands: Any,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | PerPass | None = None,
    optimize: Any = "auto",
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """``jax.numpy.einsum`` whose pairwise products use this library's ``dot_general``.

    Args:
      subscripts, operands, precision, preferred_element_type, optimize, out_sharding: as in ``jax.numpy.einsum``.
      schedule: as in ``matmul``, for every pairwise product.

    Returns:
      What ``jax.numpy.einsum`` returns.

    Raises:
      TypeError, ValueError: as ``jax.numpy.einsum`` and ``dot_general``.
    """
    return jnp.einsum(
        subscripts,
        *operands,
        optimize=optimize,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        _dot_general=_dot_general_under(check_schedule(schedule)),
    )


@functools.cache
def _dot_general_under(schedule: Schedule | PerPass) -> Callable[..., jax.Array]:
    # One object per schedule: jnp.einsum recompiles for every new _dot_general.
    return functools.partial(dot_general, schedule=schedule)


def _dimension_numbers(numbers: Any) -> tuple[tuple[Dims, Dims], tuple[Dims, Dims]]:
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
        return (_dims(lhs_contract), _dims(rhs_contract)), (_dims(lhs_batch), _dims(rhs_batch))
    except (TypeError, ValueError):
        check_static("dimension_numbers", numbers)
        form = "((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), each a sequence of dimensions"
        raise TypeError(f"dimension_numbers={numbers!r}: must be {form}") from None


def _dims(dims: Any) -> Dims:
    return (operator.index(dims),) if isinstance(dims, (int, np.integer)) else tuple(map(operator.index, dims))


def _linear_apart(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: Any = None,
    residual: Any = None,
    alpha: Any = 1.0,
    beta: Any = 1.0,
    **params: Any,
) -> jax.Array:
    check_activation("linear", activation)
    alpha, beta = _factor("linear", "alpha", alpha), _factor("linear", "beta", beta)
    if isinstance(x, jax.Array) and isinstance(w, jax.Array):  # interceptors may pass weights of other types
        x, w, _ = _promoted("linear", params.get("preferred_element_type"), x=x, w=w)
    epilogue = Epilogue(activation, alpha, beta, bias is not None, has_residual=residual is not None)
    product = lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), **params)
    others = [] if bias is None else [bias]
    if residual is not None:
        others.append(jnp.broadcast_to(residual, product.shape))
    return epilogue.apply(product, *others)


@_dispatched("x", "w", "bias", "residual", jaxs=_linear_apart)
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``activation(alpha * (x @ w) + beta * residual + bias)`` in one kernel.

    Sums and epilogue are computed in float32 (float64 for float64) and rounded once, to the result's dtype. If k is
    partitioned over devices, each device's sum is rounded first. Under differentiation XLA applies the activation,
    because the derivative needs the (rounded) value before it.

    Args:
      x: array of shape (..., k).
      w: array of shape (k, n). Dtypes promote with x's.
      bias: array of shape (n,), or None.
      activation: None, "relu", "gelu" (exact, by erf), "gelu_tanh", "silu", "sigmoid" or "tanh".
      residual: array that broadcasts to (..., n), or None.
      alpha, beta: static real numbers.
      precision, preferred_element_type, out_sharding, schedule: as in ``matmul``.

    Returns:
      Array of shape (..., n) and dtype preferred_element_type, by default that of ``x @ w``. Bias and residual are
      converted to it.

    Raises:
      TypeError: an operand is not an array of real numbers, the result's dtype is not a floating-point one, or alpha or
        beta is not a number.
      ValueError: shapes do not fit, the activation is unknown, or no kernel can run the product under an explicit
        schedule.
    """
    schedule = check_schedule(schedule)
    check_activation("linear", activation)
    alpha, beta = _factor("linear", "alpha", alpha), _factor("linear", "beta", beta)
    lhs, rhs, weak = _promoted("linear", preferred_element_type, x=x, w=w)
    if lhs.ndim == 0 or rhs.ndim != 2 or lhs.shape[-1] != rhs.shape[0]:
        raise ValueError(f"linear: x has shape {lhs.shape} and w {rhs.shape}; they must be (..., k) and (k, n)")
    params = _linear_params("linear", lhs, rhs, precision, preferred_element_type, out_sharding)
    dtype, shape = params["preferred_element_type"], (*lhs.shape[:-1], rhs.shape[1])
    others = []
    for name, given, fits in (("bias", bias, shape[-1:]), ("residual", residual, shape)):
        if given is None:
            continue
        operand = _epilogue_operand("linear", name, given, dtype)
        if operand.shape != fits:
            broadcasts = operand.ndim <= len(fits) and all(
                size in (1, to) for size, to in zip(operand.shape[::-1], fits[::-1])
            )
            if name == "bias" or not broadcasts:
                must = "be" if name == "bias" else "broadcast to"
                raise ValueError(f"linear: {name} has shape {operand.shape}; it must {must} {fits}")
            operand = jnp.broadcast_to(operand, fits)
        others.append(operand)
    out = primitive.bind_linear(
        lhs,
        rhs,
        *compat.sharded_like_product(others, lhs, rhs, **params),
        epilogue=Epilogue(activation, alpha, beta, bias is not None, has_residual=residual is not None),
        schedule=schedule,
        **params,
    )
    return compat.as_weak_type(out) if weak else out


def _gated_apart(
    x: Any,
    w_gate: Any,
    w_up: Any = None,
    b_gate: Any = None,
    b_up: Any = None,
    *,
    activation: Any = "silu",
    **params: Any,
) -> jax.Array:
    check_activation("gated_linear", activation)
    if isinstance(x, jax.Array) and isinstance(w_gate, jax.Array):  # interceptors may pass weights of other types
        x, w_gate, _ = _promoted("gated_linear", params.get("preferred_element_type"), x=x, w_gate=w_gate)
    if w_up is None:
        w_gate, w_up = w_gate[:, 0], w_gate[:, 1]
        b_gate, b_up = (None, None) if b_gate is None else b_gate
    gate = _linear_apart(x, w_gate, b_gate, activation=activation, **params)
    return gate * _linear_apart(x, w_up, b_up, **params)


@_dispatched("x", "w_gate", "w_up", "b_gate", "b_up", jaxs=_gated_apart)
def gated_linear(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike | None = None,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    *,
    activation: str | None = "silu",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``activation(x @ w_gate + b_gate) * (x @ w_up + b_up)``: the first half of a gated MLP.

    The products run apart, each with its bias and rounded to the result's dtype, and XLA applies activation and gate in
    float32 (float64 for float64), as ``plan(x, w_gate, gate=True)`` tells. Stacked matrices are one product.

    Args:
      x: array of shape (..., k).
      w_gate: array of shape (k, n). Dtypes promote with each other.
      w_up: array of the same shape; or None, and then w_gate has shape (k, 2, n), with the matrix of the gate before
        that of the other product.
      b_gate, b_up: arrays of shape (n,), or None. Of stacked weights b_gate has shape (2, n), and b_up is None.
      activation: None, "relu", "gelu" (exact, by erf), "gelu_tanh", "silu", "sigmoid" or "tanh".
      precision, preferred_element_type, out_sharding, schedule: as in ``matmul``. An explicit schedule is that of
        each product.

    Returns:
      Array of shape (..., n) and dtype preferred_element_type, by default that of ``x @ w_gate``. Biases are converted
      to it.

    Raises:
      TypeError: an operand is not an array of real numbers, or the result's dtype is not a floating-point one.
      ValueError: shapes do not fit, the activation is unknown, or no kernel can run the product under an explicit
        schedule.
    """
    schedule = check_schedule(schedule)
    check_activation("gated_linear", activation)
    weights = dict(w_gate=w_gate) if w_up is None else dict(w_gate=w_gate, w_up=w_up)
    lhs, rhs, *second, weak = _promoted("gated_linear", preferred_element_type, x=x, **weights)
    if not second and not (lhs.ndim and rhs.ndim == 3 and lhs.shape[-1] == rhs.shape[0] and rhs.shape[1] == 2):
        shapes = f"x has shape {lhs.shape} and w_gate {rhs.shape}"
        raise ValueError(f"gated_linear: {shapes}; without w_up they must be (..., k) and (k, 2, n)")
    if second and not (lhs.ndim and rhs.ndim == 2 and lhs.shape[-1] == rhs.shape[0] and second[0].shape == rhs.shape):
        shapes = f"x has shape {lhs.shape}, w_gate {rhs.shape} and w_up {second[0].shape}"
        raise ValueError(f"gated_linear: {shapes}; they must be (..., k), (k, n) and (k, n)")
    params = _linear_params("gated_linear", lhs, rhs, precision, preferred_element_type, out_sharding)
    dtype = params["preferred_element_type"]
    if not second and b_up is not None:
        raise ValueError("gated_linear: b_up must be None without w_up; b_gate then has both biases, as (2, n)")
    biases = []
    for name, given in (("b_gate", b_gate), ("b_up", b_up))[: 1 + len(second)]:
        if given is None:
            if b_gate is None and b_up is None:
                continue
            given = jnp.zeros(rhs.shape[1:], dtype)
        operand = _epilogue_operand("gated_linear", name, given, dtype)
        if operand.shape != rhs.shape[1:]:
            raise ValueError(f"gated_linear: {name} has shape {operand.shape}; it must be {rhs.shape[1:]}")
        biases.append(operand)
    if not second and out_sharding is not None:
        # It is that of one product's result: such a product has no dimension for the matrices.
        rhs, *second = (lax.index_in_dim(rhs, i, 1, keepdims=False) for i in range(2))
        biases = [bias[i] for bias in biases for i in range(2)]
    out = primitive.bind_linear(
        lhs,
        rhs,
        *compat.sharded_alike(second, rhs),
        *compat.sharded_like_product(biases, lhs, rhs, **params),
        epilogue=Epilogue(activation, has_bias=bool(biases), gate="pair" if second else "stacked"),
        schedule=schedule,
        **params,
    )
    return compat.as_weak_type(out) if weak else out


def _linear_params(
    function: str, lhs: jax.Array, rhs: jax.Array, precision: Any, preferred_element_type: Any, out_sharding: Any
) -> dict[str, Any]:
    """The parameters of the primitive, except epilogue and schedule. Raises TypeError unless the result is floating."""
    dtype = _element_type(preferred_element_type, lhs, rhs) or lhs.dtype
    if not jnp.issubdtype(dtype, np.floating):
        other = f"set preferred_element_type=float32, and convert the result with .astype({dtype})"
        remedy = "apply it after matmul" if jnp.issubdtype(dtype, np.complexfloating) else other
        raise TypeError(
            f"{function}: the result's dtype is {dtype}; an epilogue needs a floating-point dtype: {remedy}"
        )
    return dict(
        dimension_numbers=(((lhs.ndim - 1,), (0,)), ((), ())),
        precision=compat.canonicalize_precision(precision),
        preferred_element_type=dtype,
        out_sharding=compat.canonicalize_sharding(out_sharding, function),
    )


def _epilogue_operand(function: str, name: str, given: Any, dtype: Any) -> jax.Array:
    operand = _array(function, name, given)
    if not jnp.can_cast(operand.dtype, dtype, "same_kind") and not jnp.issubdtype(operand.dtype, np.integer):
        raise TypeError(f"{function}: {name} has dtype {operand.dtype}; it must convert to the result's, {dtype}")
    return operand.astype(dtype)


def _factor(function: str, name: str, factor: Any) -> float:
    try:
        if isinstance(factor, (bool, complex, str)):
            raise TypeError
        return float(factor)
    except OverflowError:
        raise ValueError(f"{function}: {name}={factor} does not fit into a float") from None
    except (TypeError, ValueError):  # tracers raise a TypeError of their own
        check_static(f"{function}: {name}", factor)
        raise TypeError(
            f"{function}: {name} is {_describe(factor)}; it must be a real number, known before tracing"
        ) from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        check_static(f"plan: {name}", value)
        raise TypeError(
            f"plan: {name} is {_describe(value)}; it must be True or False: plan(..., {name}=True) plans for any value"
        )
    return bool(value)


def plan(
    lhs: Shaped,
    rhs: Shaped,
    dimension_numbers: DimensionNumbers | None = None,
    *,
    schedule: Schedule | PerPass | None = None,
    device: jax.Device | Device | str | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    activation: str | None = None,
    bias: bool = False,
    residual: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    gate: bool = False,
) -> Plan:
    """The ``Plan`` of a product on one device, without running it.

    If XLA partitions a product over devices, each device plans its own part. A build without CUDA kernels plans for
    GPUs from a description of the kernels in a full build.

    Args:
      lhs, rhs: arrays, or anything with ``shape`` and ``dtype`` such as ``jax.ShapeDtypeStruct``.
      dimension_numbers: as in ``lax.dot_general``; None plans ``matmul(lhs, rhs)``.
      schedule: as in ``matmul``.
      device: a ``jax.Device``, a ``jax_streamk.Device`` such as ``jax_streamk.H200`` (which need not be present), a JAX
        platform such as "cpu", or None for the default device.
      precision, preferred_element_type: as in ``matmul``.
      activation, alpha, beta: as in ``linear``.
      bias, residual: True if ``linear`` adds one.
      gate: True to plan ``gated_linear(lhs, rhs, w_up)``, for any ``w_up`` of the shape of rhs, or, if rhs has shape
        (k, 2, n), of stacked weights. ``bias`` then means both biases.

    Raises:
      TypeError, ValueError: as ``matmul``, ``dot_general``, ``linear`` and ``gated_linear``.
      TypeError: bias, residual or gate is not a bool, or device is not a device.
      ValueError: gate with dimension_numbers, residual, alpha or beta.
    """
    schedule = check_schedule(schedule)
    lhs, rhs = (_shaped(name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    permutation, gate = None, _flag("gate", gate)
    if gate:
        if dimension_numbers is not None or residual or alpha != 1 or beta != 1:
            raise ValueError("plan: gate=True is without dimension_numbers, residual, alpha and beta")
        if not lhs.shape or len(rhs.shape) not in (2, 3) or (len(rhs.shape) == 3 and rhs.shape[1] != 2):
            shapes = f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
            raise ValueError(f"plan: {shapes}; with gate=True they must be (..., k) and (k, n) or (k, 2, n)")
        dimension_numbers = (((len(lhs.shape) - 1,), (0,)), ((), ()))
    elif dimension_numbers is None:
        if preferred_element_type is None:
            # Traced: promotion respects weak types of values and tracers, but not of ShapeDtypeStructs.
            dtype = jax.eval_shape(lambda *xs: jnp.zeros((), jnp.result_type(*xs)), lhs, rhs).dtype
            lhs, rhs = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (lhs, rhs))
        dimension_numbers, (drop_lhs, drop_rhs), permutation = _matmul_dimensions(lhs.shape, rhs.shape)
        lhs, rhs = (_drop(x, dims) for x, dims in ((lhs, drop_lhs), (rhs, drop_rhs)))
    check_activation("plan", activation)
    bias, residual = _flag("bias", bias), _flag("residual", residual)
    alpha, beta = _factor("plan", "alpha", alpha), _factor("plan", "beta", beta)
    params: dict[str, Any] = dict(
        dimension_numbers=_dimension_numbers(dimension_numbers),
        precision=compat.canonicalize_precision(precision),
        preferred_element_type=_element_type(preferred_element_type, lhs, rhs),
    )
    jax.eval_shape(functools.partial(lax.dot_general, **params), lhs, rhs)  # raises lax's errors about dimensions
    made, _ = lowering.plan(
        lhs,
        rhs,
        schedule=schedule,
        device=device_of(device),
        epilogue=Epilogue(
            activation,
            alpha,
            beta,
            bias,
            has_residual=residual,
            gate=None if not gate else "stacked" if len(rhs.shape) == 3 else "pair",
        ),
        permutation=permutation,
        **params,
    )
    return made


def kernels() -> list[_ffi.KernelInfo]:
    """Every kernel compiled into this build, ordered by name.

    Each has these attributes, and a method ``resources()``, which needs a GPU and returns registers per thread and CTAs
    per SM:

    - name, family, type_a, type_b, type_d, math, major_a, major_b;
    - align_a, align_b, align_d: in elements;
    - tile_m, tile_n, tile_k, cluster_m, cluster_n, stages, warp_schedule, swap_ab, threads;
    - split_k_reductions, stream_k_reductions;
    - shared_memory: bytes per CTA;
    - promotion_k: the length of K that tensor cores sum before the sum is added in float32, 0 for all of K;
    - gated: whether it multiplies by two matrices at once, for ``gated_linear``.
    """
    return _ffi.kernels()


def _array(function: str, name: str, x: Any) -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {name} is {_describe(x)}; it must be an array of numbers") from None
    if not _is_numeric(x.dtype):
        raise TypeError(f"{function}: {name} is {_describe(x)}; it must be an array of numbers")
    return x


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _promoted(function: str, preferred_element_type: Any, **operands: Any) -> tuple[Any, ...]:
    """The operands as arrays, promoted to one dtype unless the result's is given, and whether that dtype is weak."""
    out = [_array(function, name, x) for name, x in operands.items()]
    if preferred_element_type is not None:
        return *out, False
    dtype, weak = jax.dtypes.result_type(*out, return_weak_type_flag=True)
    return *(x.astype(dtype) for x in out), weak


def _describe(x: Any) -> str:
    return type(x).__name__ + (f" of dtype {x.dtype}" if hasattr(x, "dtype") else "")


def _element_type(dtype: Any, lhs: Shaped, rhs: Shaped) -> Any:
    """The requested dtype of the result. Raises TypeError if lax has no such product of these operands."""
    try:
        dtype = None if dtype is None else compat.canonicalize_dtype(dtype, "preferred_element_type")
    except (TypeError, ValueError) as error:
        check_static("preferred_element_type", dtype)
        raise TypeError(f"preferred_element_type={dtype!r}: {error}") from None
    integers = dtype is not None and lhs.dtype == rhs.dtype and jnp.issubdtype(lhs.dtype, np.integer)
    if integers and dtype.itemsize < lhs.dtype.itemsize:
        remedy = (
            f"set it to a dtype of at least {8 * lhs.dtype.itemsize} bits, or to None, "
            f"and convert the result with .astype({dtype})"
        )
        raise TypeError(
            f"preferred_element_type={dtype} is narrower than {lhs.dtype}, the dtype of the operands: {remedy}"
        )
    return dtype


def _shaped(name: str, x: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"plan: {name} is {type(x).__name__}; it must have a shape and a dtype")
    if not _is_numeric(x.dtype):
        raise TypeError(f"plan: {name} is {_describe(x)}; it must have a numeric dtype")
    return jax.ShapeDtypeStruct(
        x.shape, jax.dtypes.canonicalize_dtype(x.dtype), weak_type=getattr(x, "weak_type", False)
    )


def _drop(x: jax.ShapeDtypeStruct, dims: Dims) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([size for i, size in enumerate(x.shape) if i not in dims], x.dtype)


def _matmul_dimensions(
    a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[tuple[tuple[Dims, Dims], tuple[Dims, Dims]], tuple[Dims, Dims], Dims | None]:
    """``jnp.matmul`` of shapes a and b as a dot_general.

    Returns:
      dimension_numbers of the squeezed operands; the dimensions to squeeze from each (leading dimensions of size 1 that
      broadcast); and the permutation of the result, or None.
    """
    if not a or not b:
        which, shape = ("a", a) if not a else ("b", b)
        raise ValueError(f"matmul: {which} has shape {shape}; it must have at least one dimension")
    k_a, k_b = a[-1], b[-2] if len(b) > 1 else b[0]
    if k_a != k_b:
        raise ValueError(
            f"matmul: a of shape {a} and b of shape {b} contract sizes {k_a} and {k_b}; they must be equal"
        )
    lead_a, lead_b = a[:-2], b[:-2]
    rank = max(len(lead_a), len(lead_b))
    # Leading dimensions, aligned on the right, by owner: both operands, or one of them.
    squeeze_a, squeeze_b, batch_a, batch_b, owners = [], [], [], [], []
    for i in range(rank):
        at_a, at_b = i - rank + len(lead_a), i - rank + len(lead_b)
        size_a, size_b = (lead[at] if at >= 0 else None for lead, at in ((lead_a, at_a), (lead_b, at_b)))
        if size_a == size_b:
            batch_a.append(at_a)
            batch_b.append(at_b)
            owners.append("ab")
        elif size_b is None or (size_b == 1 and size_a is not None):
            owners.append("a")
            if size_b == 1:
                squeeze_b.append(at_b)
        elif size_a in (None, 1):
            owners.append("b")
            if size_a == 1:
                squeeze_a.append(at_a)
        else:
            raise ValueError(f"matmul: leading dimensions of a of shape {a} and b of shape {b} do not broadcast")

    def kept(dims: Iterable[int], squeezed: Iterable[int]) -> Dims:
        return tuple(d - sum(s < d for s in squeezed) for d in dims)

    contract_a = kept([len(a) - 1], squeeze_a)
    contract_b = kept([max(len(b) - 2, 0)], squeeze_b)
    numbers = ((contract_a, contract_b), (kept(batch_a, squeeze_a), kept(batch_b, squeeze_b)))
    # dot_general returns (shared, only a, m, only b, n); matmul wants leading dimensions in place.
    groups = {owner: [i for i, o in enumerate(owners) if o == owner] for owner in ("ab", "a", "b")}
    has_m, has_n = len(a) > 1, len(b) > 1
    produced = groups["ab"] + groups["a"] + ["m"] * has_m + groups["b"] + ["n"] * has_n
    wanted = list(range(rank)) + ["m"] * has_m + ["n"] * has_n
    order = tuple(produced.index(d) for d in wanted)
    return numbers, (tuple(squeeze_a), tuple(squeeze_b)), None if order == tuple(range(len(order))) else order
