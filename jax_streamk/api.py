"""The public functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum.parser
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_streamk import _ffi, compat, quantized
from jax_streamk.checks import check_static
from jax_streamk.device import Device, device_of
from jax_streamk.lower import lowering
from jax_streamk.plan import alternatives
from jax_streamk.plan.plan import Plan, unsupported
from jax_streamk.product import partition, ragged
from jax_streamk.product.dense import Dense
from jax_streamk.product.epilogue import Activation, Epilogue, check_activation
from jax_streamk.product.ragged import BASIC, Ragged
from jax_streamk.schedules import PerPass, Schedule, check_schedule
from jax_streamk.tuning import tuned

Dims = tuple[int, ...]
# ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, a ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def _dispatched(*operands: str, jaxs: Callable[..., Any] | None) -> Callable[[F], F]:
    """Decorates a public function.

    Its calls and their transformations are compiled once, as JAX's are, unless they become part of a jaxpr: preparing
    operands in Python takes several times as long as a small product, and op by op each constant is copied to the
    device. If a library has replaced ``lax.dot_general``, ``jaxs`` is called instead, which calls the replacement: this
    is how qwix finds what to quantize. None: it has no such replacement.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        variadic = any(x.kind is x.VAR_POSITIONAL for x in parameters.values())
        static = [name for name, x in parameters.items() if name not in operands and x.kind is not x.VAR_POSITIONAL]

        @functools.lru_cache(2)
        def compiled(generation: int, is_transformed: bool) -> Callable[..., Any]:
            """A new function whenever tuned plans change, since jit would find the old program of the old one.

            JAX 0.9 traces every call of a program that was first called in the course of a vmap.
            """
            del generation, is_transformed
            new = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
            return jax.jit(new, static_argnames=static)

        def is_for_compiled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            if not compat.is_eager() or (len(args) > len(positional) and not variadic):
                return False
            if not kwargs.keys() <= parameters.keys():
                return False  # the function itself raises a plain TypeError
            names = (*positional, *[operands[-1]] * (len(args) - len(positional)))
            for name, x in (*zip(names, args), *kwargs.items()):
                if name not in operands:
                    try:
                        hash(x)
                    except TypeError:
                        return False
                    if x != x or (x == 0 and str(x).startswith("-")):
                        return False  # jax.jit confuses -0.0 with 0.0, and never finds NaN again
                elif x is not None and not (
                    compat.is_concrete(x)
                    or (type(x) is np.ndarray and x.dtype.kind in "biufc" and x.dtype.isnative)
                    or isinstance(x, (jax.Array, quantized.QuantizedArray))
                ):
                    return False
            return True

        @functools.wraps(function)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if jaxs is not None and is_intercepted():
                kwargs.pop("schedule", None)
                return jaxs(*args, **kwargs)
            if is_for_compiled(args, kwargs):
                return compiled(tuned.generation(), not compat.outside_of_traces())(*args, **kwargs)
            return function(*args, **kwargs)

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
    lhs, rhs, weak = _promoted("matmul", preferred_element_type, a=_kept(a), b=_kept(b))
    dimension_numbers, squeeze, order = _matmul_dimensions("matmul", a=lhs, b=rhs)
    lhs, rhs = (lax.squeeze(quantized.dequantized(x), dims) if dims else x for x, dims in zip((lhs, rhs), squeeze))
    product = _dense(lhs, rhs, dimension_numbers, precision, preferred_element_type).replaced(permutation=order)
    out_sharding = compat.canonicalize_sharding(out_sharding, "matmul")
    out = quantized.bound(product, lhs, rhs, schedule=schedule, out_sharding=out_sharding)
    return compat.with_weak_type(out, weak)


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
    lhs, rhs = (_array("dot_general", name, _kept(x)) for name, x in (("lhs", lhs), ("rhs", rhs)))
    product = _dense(lhs, rhs, _dimension_numbers(dimension_numbers), precision, preferred_element_type)
    out_sharding = compat.canonicalize_sharding(out_sharding, "dot_general")
    return quantized.bound(product, lhs, rhs, schedule=schedule, out_sharding=out_sharding)


@_dispatched("operands", jaxs=lambda *args, **kwargs: jnp.einsum(*args, **kwargs))
def einsum(
    subscripts: Any,
    *operands: Any,
    out: None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | PerPass | None = None,
    optimize: Any = "auto",
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """``jax.numpy.einsum`` whose pairwise products use this library's ``dot_general``.

    Args:
      subscripts, operands, out, precision, preferred_element_type, optimize, out_sharding: as in ``jax.numpy.einsum``,
        which takes no ``out`` but None.
      schedule: as in ``matmul``, for every pairwise product.

    Returns:
      What ``jax.numpy.einsum`` returns.

    Raises:
      TypeError, ValueError: as ``jax.numpy.einsum`` and ``dot_general``.
    """
    schedule = check_schedule(schedule)
    is_simple = len(operands) == 2 and isinstance(subscripts, str) and out is None and out_sharding is None
    if is_simple and any(map(quantized.is_quantized, operands)):
        kept = {f"operands[{i}]": _kept(x) for i, x in enumerate(operands)}
        lhs, rhs, _ = _promoted("einsum", preferred_element_type, **kept)
        if (dimensions := _einsum_dimensions(subscripts, lhs, rhs)) is not None:
            product = _dense(lhs, rhs, dimensions[0], precision, preferred_element_type)
            return quantized.bound(product.replaced(permutation=dimensions[1]), lhs, rhs, schedule=schedule)
    operands = tuple(map(quantized.dequantized, operands))
    for i, x in enumerate(operands):
        _check_byte_order("einsum", f"operands[{i}]", x)
    return jnp.einsum(
        subscripts,
        *operands,
        out=out,
        optimize=optimize,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        _dot_general=_dot_general_under(schedule),
    )


def _einsum_dimensions(subscripts: str, lhs: Shaped, rhs: Shaped) -> tuple[DimensionNumbers, Dims] | None:
    """``jnp.einsum`` of two operands as a dot_general and the permutation of its result; None if it is more."""
    inputs, out, _ = opt_einsum.parser.parse_einsum_input((subscripts, lhs, rhs))
    a, b = inputs.split(",")
    both = [name for name in a if name in b]
    of_one = [name for name in (*a, *b) if name not in both]
    has_each_once = (len({*a}), len({*b})) == (len(a), len(b)) == (len(lhs.shape), len(rhs.shape))
    if (
        not has_each_once
        or not {*of_one} <= {*out}
        or any(lhs.shape[a.index(name)] != rhs.shape[b.index(name)] for name in both)
    ):
        return None
    contract, batch = ([name for name in both if (name in out) == stays] for stays in (False, True))
    numbers = tuple(tuple(tuple(map(side.index, names)) for side in (a, b)) for names in (contract, batch))
    return cast(DimensionNumbers, numbers), tuple(map([*batch, *of_one].index, out))


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
    residual = None if residual is None else jnp.broadcast_to(residual, product.shape)
    return epilogue.apply(product, bias=bias, residual=residual)


@_dispatched("x", "w", "bias", "residual", jaxs=_linear_apart)
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
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
    lhs, rhs, weak = _promoted("linear", preferred_element_type, x=_kept(x), w=_kept(w))
    if lhs.ndim == 0 or rhs.ndim != 2 or lhs.shape[-1] != rhs.shape[0]:
        raise ValueError(f"linear: x has shape {lhs.shape} and w {rhs.shape}; they must be (..., k) and (k, n)")
    product, out_sharding = _linear("linear", lhs, rhs, precision, preferred_element_type, out_sharding)
    dtype, shape = product.preferred_element_type, (*lhs.shape[:-1], rhs.shape[1])
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
    epilogue = Epilogue(activation, alpha, beta, bias is not None, has_residual=residual is not None)
    placed = _placed(product, out_sharding, others, lhs, rhs)
    product = product.replaced(epilogue=epilogue)
    out = quantized.bound(product, lhs, rhs, *placed, schedule=schedule, out_sharding=out_sharding)
    return compat.with_weak_type(out, weak)


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
    activation: Activation | None = "silu",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``activation(x @ w_gate + b_gate) * (x @ w_up + b_up)``: the first half of a gated MLP.

    Where a kernel multiplies by both matrices at once, and is expected to be faster, the two sums are multiplied in
    float32 and rounded once. Else the products run apart, stacked matrices as one, each with its bias and rounded to
    the result's dtype, and XLA applies activation and gate in float32 (float64 for float64): ``plan(x, w_gate,
    gate=True)`` tells. Under differentiation they run apart.

    Args:
      x: array of shape (..., k).
      w_gate: array of shape (k, n). Dtypes promote with each other.
      w_up: array of the same shape; or None, and then w_gate has shape (k, 2, n), with the matrix of the gate before
        that of the other product.
      b_gate, b_up: arrays of shape (n,), or None. For stacked weights b_gate has shape (2, n), and b_up is None.
      activation: None, or one of those of ``linear``.
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
    weights = dict(w_gate=w_gate) if w_up is None else dict(w_gate=_kept(w_gate), w_up=_kept(w_up))
    lhs, rhs, *second, weak = _promoted(
        "gated_linear", preferred_element_type, x=x if w_up is None else _kept(x), **weights
    )
    if not second and not (lhs.ndim and rhs.ndim == 3 and lhs.shape[-1] == rhs.shape[0] and rhs.shape[1] == 2):
        shapes = f"x has shape {lhs.shape} and w_gate {rhs.shape}"
        raise ValueError(f"gated_linear: {shapes}; without w_up they must be (..., k) and (k, 2, n)")
    if second and not (lhs.ndim and rhs.ndim == 2 and lhs.shape[-1] == rhs.shape[0] and second[0].shape == rhs.shape):
        shapes = f"x has shape {lhs.shape}, w_gate {rhs.shape} and w_up {second[0].shape}"
        raise ValueError(f"gated_linear: {shapes}; they must be (..., k), (k, n) and (k, n)")
    product, out_sharding = _linear("gated_linear", lhs, rhs, precision, preferred_element_type, out_sharding)
    dtype = product.preferred_element_type
    if not second and b_up is not None:
        raise ValueError("gated_linear: b_up must be None without w_up; b_gate then has both biases, as (2, n)")
    given = dict(b_gate=b_gate) if w_up is None else dict(b_gate=b_gate, b_up=b_up)
    biases = _biases("gated_linear", dtype, rhs.shape[1:], **given)
    if not second and out_sharding is not None:
        # It is that of one product's result: such a product has no dimension for the matrices.
        rhs, *second = (lax.index_in_dim(rhs, i, 1, keepdims=False) for i in range(2))
        biases = [bias[i] for bias in biases for i in range(2)]
    epilogue = Epilogue(activation, has_bias=bool(biases), gate="pair" if second else "stacked")
    if not any(isinstance(x, quantized.QuantizedArray) for x in (rhs, *second)):
        second = compat.sharded_alike(second, rhs)
    others = *second, *_placed(product, out_sharding, biases, lhs, rhs)
    product = product.replaced(epilogue=epilogue)
    out = quantized.bound(product, lhs, rhs, *others, schedule=schedule, out_sharding=out_sharding)
    return compat.with_weak_type(out, weak)


@_dispatched("lhs", "rhs", "group_sizes", "group_offset", "lhs_indices", "bias", jaxs=None)
def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    lhs_indices: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``jax.lax.ragged_dot``: consecutive groups of rows, each multiplied by a matrix of its own.

    Row i of the result is ``activation(lhs[i] @ rhs[g] + bias[g])`` for its group g, and zero if it is in no group. The
    group sizes are data: one compiled program serves all. Under differentiation bias and activation follow the product,
    which is rounded.

    Args:
      lhs: array of shape (m, k).
      rhs: array of shape (g, k, n). Mixed dtypes are handled as in lax.
      group_sizes: integers of shape (g,): the first group has the first ``group_sizes[0]`` rows, and so on. Groups may
        be empty. Rows beyond the sum are in no group. A size below 0 counts as 0, and groups end with the last row.
      precision, preferred_element_type: as in ``matmul``.
      group_offset: integer of shape (1,), or None: the first group of ``rhs`` is group ``group_offset[0]`` of
        ``group_sizes``, which then may have more groups than rhs. Rows of the others are in no group. It is clamped to
        groups that exist. lax has the argument, and refuses it.
      out_sharding: sharding of the result under explicit sharding; None: its rows are divided as those of lhs or as
        lhs_indices, its columns as those of rhs.
      lhs_indices: integers of shape (m,), or None: the product is of ``lhs.at[lhs_indices].get(mode="clip")``, where
        lhs has shape (rows, k). Indices from -rows to -1 count from the end; those out of bounds mean the nearest row,
        in derivatives too. As in JAX's indexing, the gradients of a row that is chosen more than once are added
        in an order that on a GPU depends on timing.
      bias: array of shape (g, n), or None. Sums, bias and activation are computed in float32 (float64 for float64).
      activation: None, or one of those of ``linear``.
      schedule: ``Auto()`` or ``DataParallel()``; as in ``matmul``.

    Returns:
      Array of shape (m, n), of the dtype of ``lax.ragged_dot``.

    Raises:
      TypeError: an operand is not an array of numbers, group_sizes, group_offset or lhs_indices is not one of integers,
        or, with a bias or an activation, the result's dtype is not a floating-point one.
      ValueError: shapes do not fit, the activation is unknown, or no kernel can run the product under an explicit
        schedule. Under ``Auto()`` ``lax.ragged_dot`` runs where there is no kernel; ``plan`` says so.
    """
    name, schedule = "ragged_dot", check_schedule(schedule)
    check_activation(name, activation)
    lhs, rhs = (_array(name, x, _kept(given)) for x, given in (("lhs", lhs), ("rhs", rhs)))
    indices = [] if lhs_indices is None else [_array(name, "lhs_indices", lhs_indices)]
    rows = _rows(name, lhs, indices)
    sizes, leading = _group_sizes(name, group_sizes, group_offset, rows, rhs=rhs)
    _check_ragged(name, rows, sizes, leading, rhs=rhs)
    dtype = _element_type(preferred_element_type, lhs, rhs)
    if bias is not None or activation is not None:
        dtype = _floating(name, lhs, rhs, dtype)
    biases = _biases(name, dtype, (rhs.shape[0], rhs.shape[2]), bias=bias)
    product = Ragged(
        BASIC, compat.canonicalize_precision(precision), dtype, Epilogue(activation, has_bias=bool(biases)),
        leading=leading, gathers="clip" if indices else None,
    )  # fmt: skip
    out_sharding = compat.canonicalize_sharding(out_sharding, name)
    return quantized.bound(product, lhs, rhs, *biases, sizes, *indices, schedule=schedule, out_sharding=out_sharding)


@_dispatched("lhs", "rhs", "group_sizes", "group_offset", jaxs=None)
def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``jax.lax.ragged_dot_general``: groups cut a free, a contracting or a batch dimension of lhs.

    Kernels run products whose groups cut the rows, (m, k) and (g, k, n) to (m, n), or what is contracted, (k, m) and
    (k, n) to (g, m, n), dimensions in any order. Groups of a batch change nothing: that is ``dot_general``. Every other
    product is lax's.

    Args:
      lhs, rhs, ragged_dot_dimension_numbers: as in ``lax.ragged_dot_general``.
      group_sizes, precision, preferred_element_type, schedule: as in ``ragged_dot``.
      group_offset: as in ``ragged_dot``, where groups cut the rows.
      out_sharding: sharding of the result under explicit sharding; None: its dimensions are divided as those of lhs and
        rhs that they come from.

    Returns:
      What ``lax.ragged_dot_general`` returns.

    Raises:
      TypeError: an operand is not an array of numbers, or dimensions do not match.
      ValueError: group_offset where groups do not cut the rows, or no kernel can run the product under an explicit
        schedule.
    """
    name, schedule, numbers = "ragged_dot_general", check_schedule(schedule), ragged_dot_dimension_numbers
    lhs, rhs = (_array(name, x, _kept(given)) for x, given in (("lhs", lhs), ("rhs", rhs)))
    kind = _check_numbers(name, numbers, lhs)
    out_sharding = compat.canonicalize_sharding(out_sharding, name)
    if group_offset is not None and (len(numbers.rhs_group_dimensions) != 1 or len(lhs.shape) != 2):
        raise ValueError(f"{name}: group_offset is for groups of rows of lhs, of shape (m, k) or (k, m)")
    groups = rhs.shape[numbers.rhs_group_dimensions[0]] if group_offset is not None else None
    sizes, leading = _group_sizes(
        name, group_sizes, group_offset, lhs, groups=groups, extent=lhs.shape[numbers.lhs_ragged_dimensions[0]]
    )
    _check_sizes(name, sizes)
    params = dict(
        precision=compat.canonicalize_precision(precision),
        preferred_element_type=_element_type(preferred_element_type, lhs, rhs),
    )
    shape = jax.ShapeDtypeStruct((*sizes.shape[:-1], sizes.shape[-1] - leading), sizes.dtype)
    laxs: Callable[..., jax.Array] = functools.partial(
        lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, **params
    )
    with partition.without_explicit_mesh():
        jax.eval_shape(laxs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)), shape)  # raises its errors
    if kind == "batch":
        dense = Dense(numbers.dot_dimension_numbers, **params)
        return quantized.bound(dense, lhs, rhs, schedule=schedule, out_sharding=out_sharding)
    if (why := ragged.why_not(lhs, rhs, sizes, numbers)) is not None:
        alternatives.refuse_schedule(schedule, " this product", why)
        if compat.has_explicit_axes(out_sharding):
            laxs = jax.sharding.auto_axes(laxs, out_sharding=out_sharding)
        return laxs(*map(quantized.dequantized, (lhs, rhs)), sizes)
    product = Ragged(numbers, **params, leading=leading)
    return quantized.bound(product, lhs, rhs, sizes, schedule=schedule, out_sharding=out_sharding)


@_dispatched("lhs", "w_gate", "w_up", "group_sizes", "b_gate", "b_up", "group_offset", "lhs_indices", jaxs=None)
def ragged_gated(
    lhs: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    group_sizes: ArrayLike,
    *,
    lhs_indices: ArrayLike | None = None,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    activation: Activation | None = "silu",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    schedule: Schedule | PerPass | None = None,
) -> jax.Array:
    """``activation(ragged_dot(lhs, w_gate) + b_gate[g]) * (ragged_dot(lhs, w_up) + b_up[g])`` for each row's group g.

    This is the first half of the MLPs of experts; rows in no group are zero. Where a kernel multiplies by both matrices
    at once, the two sums are multiplied in float32 and rounded once. Else each product is rounded first, as in two
    calls of ``ragged_dot``.

    Args:
      lhs: array of shape (m, k).
      w_gate, w_up: arrays of shape (g, k, n) and of one dtype.
      b_gate, b_up: arrays of shape (g, n), converted to the result's dtype; or None, which is zero.
      group_sizes, lhs_indices, precision, preferred_element_type, group_offset, out_sharding: as in ``ragged_dot``.
      activation: None, or one of those of ``linear``.
      schedule: ``Auto()`` or ``DataParallel()``; as in ``matmul``.

    Returns:
      Array of shape (m, n), of the dtype of ``lax.ragged_dot(lhs, w_gate)``.

    Raises:
      TypeError, ValueError: as ``ragged_dot``; ValueError if w_gate and w_up differ in shape or dtype, or a bias does
        not fit.
    """
    return gated_of_rows(
        lhs, w_gate, w_up, group_sizes, mode="clip", lhs_indices=lhs_indices, b_gate=b_gate, b_up=b_up,
        activation=activation, precision=precision, preferred_element_type=preferred_element_type,
        group_offset=group_offset, out_sharding=out_sharding, schedule=schedule,
    )  # fmt: skip


def gated_of_rows(
    lhs: ArrayLike, w_gate: ArrayLike, w_up: ArrayLike, group_sizes: ArrayLike, *, mode: str,
    activation: Activation | None, precision: PrecisionLike, schedule: Schedule | PerPass | None,
    lhs_indices: ArrayLike | None = None, b_gate: ArrayLike | None = None, b_up: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None, group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:  # fmt: skip
    """``ragged_gated`` with JAX's mode of gathers: ``"promise_in_bounds"`` saves a pass over the indices."""
    name, schedule = "ragged_gated", check_schedule(schedule)
    check_activation(name, activation)
    given = dict(lhs=lhs, w_gate=w_gate, w_up=w_up)
    lhs, rhs, up = (_array(name, x, _kept(operand)) for x, operand in given.items())
    if (rhs.shape, rhs.dtype) != (up.shape, up.dtype):
        kinds = f"w_gate is {rhs.dtype} of shape {rhs.shape} and w_up {up.dtype} of shape {up.shape}"
        raise ValueError(f"{name}: {kinds}; they must be alike")
    indices = [] if lhs_indices is None else [_array(name, "lhs_indices", lhs_indices)]
    rows = _rows(name, lhs, indices)
    sizes, leading = _group_sizes(name, group_sizes, group_offset, rows, w_gate=rhs)
    _check_ragged(name, rows, sizes, leading, w_gate=rhs)
    dtype = _floating(name, lhs, rhs, _element_type(preferred_element_type, lhs, rhs))
    biases = _biases(name, dtype, (rhs.shape[0], rhs.shape[2]), b_gate=b_gate, b_up=b_up)
    product = Ragged(
        BASIC, compat.canonicalize_precision(precision), dtype,
        Epilogue(activation, has_bias=bool(biases), gate="pair"), leading=leading, gathers=mode if indices else None,
    )  # fmt: skip
    out_sharding = compat.canonicalize_sharding(out_sharding, name)
    return quantized.bound(
        product, lhs, rhs, up, *biases, sizes, *indices, schedule=schedule, out_sharding=out_sharding
    )


def _rows(name: str, lhs: Shaped, indices: Sequence[Shaped]) -> Shaped:
    """The type of the rows of lhs that a product has: those that indices choose, or all."""
    if not indices or len(lhs.shape) != 2:
        return lhs
    (chosen,) = indices
    shape = tuple(chosen.shape)
    _check_integers(name, "lhs_indices", chosen)
    if len(shape) != 1:
        raise ValueError(f"{name}: lhs_indices has shape {shape}; it must be (m,), an index for each row of the result")
    if lhs.shape[0] == 0 and shape[0] > 0:
        raise ValueError(f"{name}: lhs_indices has shape {shape}, and lhs, of shape {tuple(lhs.shape)}, no rows")
    return jax.ShapeDtypeStruct((*shape, lhs.shape[1]), lhs.dtype)


def _group_sizes(
    name: str, group_sizes: Any, group_offset: Any, lhs: Shaped, *, groups: int | None = None, extent: int = 0,
    **rhs: jax.Array,
) -> tuple[jax.Array, bool]:  # fmt: skip
    """The sizes of the groups of rhs, and whether that of the rows before them precedes them."""
    sizes = _integers(name, "group_sizes", group_sizes)
    if group_offset is None:
        return sizes, False
    offset = _integers(name, "group_offset", group_offset)
    if offset.shape != (1,):
        raise ValueError(
            f"{name}: group_offset has shape {offset.shape}; it must be (1,), such as that of jnp.array([0])"
        )
    if groups is None:
        (of_rhs,) = rhs.values()
        groups, extent = (of_rhs.shape or (0,))[0], (lhs.shape or (0,))[0]
    if sizes.ndim != 1 or sizes.shape[0] < groups:
        needed = f"with group_offset it must be one-dimensional, with at least the {groups} groups"
        raise ValueError(f"{name}: group_sizes has shape {sizes.shape}; {needed} of {next(iter(rhs), 'rhs')}")
    first = jnp.clip(offset[0], 0, sizes.shape[0] - groups).astype(jnp.int32)
    sizes = ragged.as_int32(sizes)
    before = jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0)
    ends = partition.ends_of_groups(before, ragged.limit_of(extent))
    return jnp.concatenate([ends[-1:], lax.dynamic_slice_in_dim(sizes, first, groups)]), True


def _integers(function: str, name: str, given: Any) -> jax.Array:
    array = _array(function, name, given)
    _check_integers(function, name, array)
    return array


def _check_integers(function: str, name: str, given: Shaped) -> None:
    if not jnp.issubdtype(given.dtype, np.integer):
        raise TypeError(f"{function}: {name} has dtype {given.dtype}; it must be integers")


def _check_sizes(name: str, sizes: Shaped) -> None:
    if not sizes.shape:
        raise ValueError(f"{name}: group_sizes has shape (); it must have at least one dimension, of groups")


def _check_ragged(name: str, lhs: Shaped, sizes: Shaped, leading: bool, **rhs: Shaped) -> None:
    """Raises ValueError unless lhs is (m, k), the one other operand (g, k, n) and the sizes are (g,)."""
    ((what, of_rhs),) = rhs.items()
    if len(lhs.shape) != 2 or len(of_rhs.shape) != 3 or lhs.shape[1] != of_rhs.shape[1]:
        shapes = f"lhs has shape {tuple(lhs.shape)} and {what} {tuple(of_rhs.shape)}"
        raise ValueError(f"{name}: {shapes}; they must be (m, k) and (g, k, n)")
    if tuple(sizes.shape) != (of_rhs.shape[0] + leading,):
        must = f"it must be ({of_rhs.shape[0]},), a size for each matrix of {what}"
        raise ValueError(f"{name}: group_sizes has shape {tuple(sizes.shape)}; {must}")


def _check_numbers(name: str, numbers: Any, lhs: Shaped) -> str:
    """Which dimension of lhs the groups cut: "free", "contracting" or "batch"."""
    if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
        check_static("ragged_dot_dimension_numbers", numbers)
        raise TypeError(f"{name}: ragged_dot_dimension_numbers={numbers!r} must be a jax.lax.RaggedDotDimensionNumbers")
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    cut = numbers.lhs_ragged_dimensions
    if len(cut) != 1 or not 0 <= cut[0] < len(lhs.shape):
        dimensions = f"lhs_ragged_dimensions={tuple(cut)}"
        raise TypeError(f"{name}: {dimensions} must be one dimension of lhs, of shape {tuple(lhs.shape)}")
    return "contracting" if cut[0] in contract else "batch" if cut[0] in batch else "free"


def _floating(function: str, lhs: Shaped, rhs: Shaped, preferred_element_type: Any) -> Any:
    dtype = preferred_element_type
    if dtype is None:
        # lax's promotion is not jnp's.
        vectors = [jax.ShapeDtypeStruct((1,), x.dtype) for x in (lhs, rhs)]
        dtype = lhs.dtype if lhs.dtype == rhs.dtype else jax.eval_shape(lax.dot, *vectors).dtype
    _check_floating(function, dtype)
    return jnp.dtype(dtype)


def _check_floating(function: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, np.floating):
        other = f"set preferred_element_type=float32, and convert the result with .astype({dtype})"
        remedy = "apply it after the product" if jnp.issubdtype(dtype, np.complexfloating) else other
        raise TypeError(
            f"{function}: the result's dtype is {dtype}; an epilogue needs a floating-point dtype: {remedy}"
        )


def _dense(lhs: Shaped, rhs: Shaped, numbers: Any, precision: Any, preferred_element_type: Any) -> Dense:
    dtype = _element_type(preferred_element_type, lhs, rhs)
    return Dense(numbers, compat.canonicalize_precision(precision), dtype)


def _linear(
    function: str, lhs: jax.Array, rhs: jax.Array, precision: Any, preferred_element_type: Any, out_sharding: Any
) -> tuple[Dense, Any]:
    """The product without epilogue, and the sharding. Raises TypeError unless the result is floating."""
    product = _dense(lhs, rhs, (((lhs.ndim - 1,), (0,)), ((), ())), precision, preferred_element_type)
    dtype = product.preferred_element_type or lhs.dtype
    _check_floating(function, dtype)
    return product.replaced(preferred_element_type=dtype), compat.canonicalize_sharding(out_sharding, function)


def _placed(product: Dense, out_sharding: Any, others: Sequence[Any], lhs: Any, rhs: Any) -> Sequence[Any]:
    """Operands of the epilogue with the explicit sharding of the product's last dimensions."""
    if any(isinstance(x, quantized.QuantizedArray) for x in (lhs, rhs)):  # where types have no shardings
        return others
    return compat.sharded_like_product(others, lhs, rhs, out_sharding=out_sharding, **product.laxs)


def _epilogue_operand(function: str, name: str, given: Any, dtype: Any) -> jax.Array:
    operand = _array(function, name, given)
    if not jnp.can_cast(operand.dtype, dtype, "same_kind") and not jnp.issubdtype(operand.dtype, np.integer):
        remedy = "take its .real" if jnp.issubdtype(operand.dtype, np.complexfloating) else f"use .astype({dtype})"
        raise TypeError(
            f"{function}: {name} has dtype {operand.dtype}; it must convert to the result's, {dtype}: {remedy}"
        )
    return operand.astype(dtype)


def _biases(function: str, dtype: Any, shape: tuple[int, ...], **given: Any) -> list[jax.Array]:
    """The biases of a product or of two, all or none: what is not given is zero."""
    if all(bias is None for bias in given.values()):
        return []
    operands = []
    for name, bias in given.items():
        operand = jnp.zeros(shape, dtype) if bias is None else _epilogue_operand(function, name, bias, dtype)
        if operand.shape != shape:
            raise ValueError(f"{function}: {name} has shape {operand.shape}; it must be {shape}")
        operands.append(operand)
    return operands


def _factor(function: str, name: str, factor: Any) -> float:
    check_static(f"{function}: {name}", factor)
    if hasattr(factor, "dtype"):
        of_reals = _is_numeric(factor.dtype) and not jnp.issubdtype(factor.dtype, np.complexfloating)
        is_real = of_reals and factor.dtype != np.bool_ and np.ndim(factor) == 0
    else:
        is_real = isinstance(factor, Real) and not isinstance(factor, bool)
    if not is_real:
        raise TypeError(f"{function}: {name} is {_describe(factor)}; it must be a real number")
    try:
        return float(factor)
    except OverflowError:
        raise ValueError(f"{function}: {name}={factor} does not fit into a float") from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        check_static(f"plan: {name}", value)
        raise TypeError(
            f"plan: {name} is {_describe(value)}; it must be True or False: plan(..., {name}=True) plans for any value"
        )
    return bool(value)


class _Planning(Protocol[P]):
    @overload
    def __call__(
        self, fn: Callable[..., Any], /, *args: Any, device: jax.Device | Device | str | None = None
    ) -> Plan: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Plan: ...


def _or_of_a_function(of_product: Callable[P, Plan]) -> _Planning[P]:
    """Decorates ``plan``: given a function, it plans the one product in it."""

    @functools.wraps(of_product)
    def plan(*args: Any, **kwargs: Any) -> Plan:
        if args and callable(args[0]) and not hasattr(args[0], "shape"):  # a flax.nnx.Variable is callable, too
            return _plan_of_a_function(*args, **kwargs)
        operands = dict(zip(("lhs", "rhs"), args)) | kwargs
        notes = [quantized.note(name, x) for name, x in operands.items() if quantized.is_quantized(x)]
        return of_product(*args, **kwargs).with_notes(notes)

    return cast("_Planning[P]", plan)


def _plan_of_a_function(fn: Callable[..., Any], *args: Any, device: Any = None, **others: Any) -> Plan:
    for name, value in others.items():
        where = "give it where the function calls the product, or as a positional argument of the function"
        raise TypeError(f"plan: {name}={value!r} with a function, which goes with device= only: {where}")
    plans = lowering.plans_of(fn, *args, device=device_of(device))
    if len(plans) == 1:
        return plans[0]
    what = getattr(fn, "__name__", type(fn).__name__)
    if not plans:
        raise ValueError(
            f"plan: {what} has no product of jax_streamk; if it has JAX's, plan(jax_streamk.accelerate(fn), ...) plans "
            "ours in their place, and accelerate(fn).explain(...) says which are left to XLA"
        )
    listed = "".join(f"\n  {x.problem or x.reasons[0]}: {x.kernel or 'XLA'}" for x in plans)
    raise ValueError(
        f"plan: {what} has {len(plans)} products, and a plan is of one; plan a function of one, or print "
        f"jax_streamk.accelerate(fn).explain(...), which has all plans:{listed}"
    )


@_or_of_a_function
def plan(
    lhs: Shaped,
    rhs: Shaped,
    dimension_numbers: DimensionNumbers | lax.RaggedDotDimensionNumbers | None = None,
    *,
    schedule: Schedule | PerPass | None = None,
    device: jax.Device | Device | str | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    activation: Activation | None = None,
    bias: bool = False,
    residual: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    gate: bool = False,
    group_sizes: Shaped | None = None,
    lhs_indices: Shaped | None = None,
) -> Plan:
    """The ``Plan`` of a product on one device, without running it.

    ``plan(fn, *args, device=None)`` is the plan of the one product of this library in a function, as ``jax.jit`` lowers
    it for these arguments: arrays, shapes as below, and pytrees of them. It may be any product, with transposes before
    it, which kernels read through: ``plan(lambda x: matmul(x.T, x), x)``. ``plan(x.T, x)`` sees an operand as a call
    outside of ``jit`` does: an array in rows, which JAX has transposed.

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
      group_sizes: the integers of a ragged product, or anything with their shape and dtype: plans ``ragged_dot(lhs,
        rhs, group_sizes)``, or, with gate, ``ragged_gated``, or, with dimension_numbers, ``ragged_dot_general``. If it
        has more groups than rhs, it is for any group_offset. A plan does not depend on the sizes.
      lhs_indices: those of ``ragged_dot`` and ``ragged_gated``, or anything with their shape and dtype.

    Raises:
      TypeError, ValueError: as ``matmul``, ``dot_general``, ``linear`` and ``gated_linear``.
      TypeError: bias, residual or gate is not a bool, device is not a device, or others come with a function.
      ValueError: a function has no product of this library, or several; gate with dimension_numbers, residual, alpha or
        beta; or lhs_indices without group_sizes or with dimension_numbers.
    """
    schedule = check_schedule(schedule)
    check_activation("plan", activation)
    lhs, rhs = (_shaped(name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    permutation, gate = None, _flag("gate", gate)
    bias, residual = _flag("bias", bias), _flag("residual", residual)
    alpha, beta = _factor("plan", "alpha", alpha), _factor("plan", "beta", beta)
    indices = [] if lhs_indices is None else [_shaped("lhs_indices", lhs_indices)]
    if indices and (group_sizes is None or dimension_numbers is not None):
        raise ValueError(
            "plan: lhs_indices without group_sizes, or with dimension_numbers: give group_sizes, and leave those out"
        )
    if group_sizes is not None:
        if residual or alpha != 1 or beta != 1 or (dimension_numbers is not None and (gate or bias or activation)):
            raise ValueError(
                "plan: with group_sizes there is neither residual, alpha nor beta, nor an epilogue with "
                "dimension_numbers"
            )
        epilogue = Epilogue(activation, has_bias=bias, gate="pair" if gate else None)
        return _plan_ragged(
            lhs, rhs, _shaped("group_sizes", group_sizes), indices, dimension_numbers, epilogue=epilogue,
            schedule=schedule, device=device_of(device), precision=compat.canonicalize_precision(precision),
            preferred_element_type=_element_type(preferred_element_type, lhs, rhs),
        )  # fmt: skip
    if gate:
        if dimension_numbers is not None or residual or alpha != 1 or beta != 1:
            raise ValueError("plan: gate=True is without dimension_numbers, residual, alpha and beta")
        if (
            not lhs.shape
            or len(rhs.shape) not in (2, 3)
            or lhs.shape[-1] != rhs.shape[0]
            or (len(rhs.shape) == 3 and rhs.shape[1] != 2)
        ):
            shapes = f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
            raise ValueError(f"plan: {shapes}; with gate=True they must be (..., k) and (k, n) or (k, 2, n)")
        lhs, rhs = _promoted_shapes(lhs, rhs, preferred_element_type)
        dimension_numbers = (((len(lhs.shape) - 1,), (0,)), ((), ()))
    elif dimension_numbers is None:
        lhs, rhs = _promoted_shapes(lhs, rhs, preferred_element_type)
        dimension_numbers, (drop_lhs, drop_rhs), permutation = _matmul_dimensions("plan", lhs=lhs, rhs=rhs)
        lhs, rhs = (_drop(x, dims) for x, dims in ((lhs, drop_lhs), (rhs, drop_rhs)))
    product = _dense(lhs, rhs, _dimension_numbers(dimension_numbers), precision, preferred_element_type)
    result = jax.eval_shape(functools.partial(lax.dot_general, **product.laxs), lhs, rhs)  # raises lax's errors
    epilogue = Epilogue(
        activation, alpha, beta, bias, has_residual=residual,
        gate=None if not gate else "stacked" if len(rhs.shape) == 3 else "pair",
    )  # fmt: skip
    if epilogue != Epilogue():
        _check_floating("plan", result.dtype)
    product = product.replaced(epilogue=epilogue, permutation=permutation)
    return alternatives.plan(product, dict(lhs=lhs, rhs=rhs), schedule, device_of(device)).plan


def _plan_ragged(
    lhs: Shaped, rhs: Shaped, sizes: Shaped, indices: list[jax.ShapeDtypeStruct], numbers: Any, *, epilogue: Epilogue,
    schedule: Any, device: Device, **params: Any,
) -> Plan:  # fmt: skip
    _check_integers("plan", "group_sizes", sizes)
    leading, rows = False, _rows("plan", lhs, indices)
    if numbers is None:
        groups = rhs.shape[0] if rhs.shape else 0
        if len(sizes.shape) == 1 and sizes.shape[0] > groups:
            leading, sizes = True, jax.ShapeDtypeStruct((groups + 1,), sizes.dtype)
        _check_ragged("plan", rows, sizes, leading, rhs=rhs)
        numbers = BASIC
    kind = _check_numbers("plan", numbers, lhs)
    _check_sizes("plan", sizes)
    laxs = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, **params)
    of_groups = jax.ShapeDtypeStruct((*sizes.shape[:-1], sizes.shape[-1] - leading), sizes.dtype)
    result = jax.eval_shape(laxs, rows, rhs, of_groups)  # raises lax's errors about dimensions
    if epilogue != Epilogue():
        _check_floating("plan", result.dtype)
    types = dict(lhs=lhs, rhs=rhs)
    if kind == "batch":
        return alternatives.plan(Dense(numbers.dot_dimension_numbers, **params), types, schedule, device).plan
    if (why := ragged.why_not(lhs, rhs, sizes, numbers)) is not None:
        alternatives.refuse_schedule(schedule, " this product", why)
        return unsupported(lhs, rhs, device, why)
    gathers = "clip" if indices else None
    product = Ragged(numbers, **params, epilogue=epilogue, leading=leading, gathers=gathers)
    types |= dict(group_sizes=sizes) | dict(zip(("indices",), indices))
    return alternatives.plan(product, types, schedule, device).plan


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
    - gated: whether it multiplies by two matrices at once, for ``gated_linear``;
    - ragged: the dimension, m or k, that groups cut in its products, or none. CPU kernels run all.
    """
    return _ffi.kernels()


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A ``QuantizedArray`` that kernels may read as it is."""

    array: quantized.QuantizedArray


def _kept(x: Any) -> Any:
    """An operand of a product, as ``_array`` takes it. Where types have shardings, arrays are made first."""
    if not quantized.is_quantized(x) or compat.is_explicit(jax.sharding.get_abstract_mesh()):
        return x
    return _Kept(quantized.ours(x))


def _array(function: str, name: str, x: Any) -> jax.Array:
    """An operand as an array: a ``QuantizedArray`` as what it stands for, unless it is to be kept."""
    if isinstance(x, _Kept):
        return cast(jax.Array, x.array)
    x = quantized.dequantized(x)
    _check_byte_order(function, name, x)
    try:
        x = jnp.asarray(x)
    except OverflowError as error:
        raise OverflowError(f"{function}: {name}: {error}; give it as an array of a dtype that holds it") from None
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {name} is {_describe(x)}; it must be an array of numbers") from None
    if not _is_numeric(x.dtype):
        raise TypeError(f"{function}: {name} is {_describe(x)}; it must be an array of numbers")
    return x


def _check_byte_order(function: str, name: str, x: Any) -> None:
    if not getattr(getattr(x, "dtype", None), "isnative", True):
        remedy = f"convert it with .astype({name}.dtype.newbyteorder('='))"
        raise TypeError(f"{function}: {name} is {_describe(x)}, which is not this machine's byte order: {remedy}")


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _promoted(function: str, preferred_element_type: Any, **operands: Any) -> tuple[Any, ...]:
    """The operands as arrays, promoted to one dtype unless the result's is given, and whether that dtype is weak."""
    out: list[Any] = [_array(function, name, x) for name, x in operands.items()]
    if preferred_element_type is not None:
        return *out, False
    types = (x.dtype if isinstance(x, quantized.QuantizedArray) else x for x in out)
    dtype, weak = jax.dtypes.result_type(*types, return_weak_type_flag=True)
    return *(x if x.dtype == dtype else quantized.astype(x, dtype) for x in out), weak


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
    _check_byte_order("plan", name, x)
    if not _is_numeric(x.dtype):
        raise TypeError(f"plan: {name} is {_describe(x)}; it must have a numeric dtype")
    if any(isinstance(size, (int, np.integer)) and size < 0 for size in x.shape):  # others are symbolic
        raise ValueError(f"plan: {name} has shape {tuple(x.shape)}; no size may be negative")
    return jax.ShapeDtypeStruct(
        x.shape, jax.dtypes.canonicalize_dtype(x.dtype), weak_type=getattr(x, "weak_type", False)
    )


def _promoted_shapes(
    lhs: jax.ShapeDtypeStruct, rhs: jax.ShapeDtypeStruct, preferred_element_type: Any
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """``_promoted`` of shapes and dtypes."""
    if preferred_element_type is not None:
        return lhs, rhs
    # Traced: promotion respects weak types of values and tracers, but not of ShapeDtypeStructs.
    dtype = jax.eval_shape(lambda *xs: jnp.zeros((), jnp.result_type(*xs)), lhs, rhs).dtype
    return jax.ShapeDtypeStruct(lhs.shape, dtype), jax.ShapeDtypeStruct(rhs.shape, dtype)


def _drop(x: jax.ShapeDtypeStruct, dims: Dims) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([size for i, size in enumerate(x.shape) if i not in dims], x.dtype)


def _shapes(operands: Mapping[str, Shaped]) -> str:
    return " and ".join(f"{name} of shape {tuple(x.shape)}" for name, x in operands.items())


def _matmul_dimensions(
    function: str, **operands: Shaped
) -> tuple[tuple[tuple[Dims, Dims], tuple[Dims, Dims]], tuple[Dims, Dims], Dims | None]:
    """``jnp.matmul`` of two operands as a dot_general.

    Returns:
      dimension_numbers of the squeezed operands; the dimensions to squeeze from each (leading dimensions of size 1 that
      broadcast); and the permutation of the result, or None.
    """
    a, b = (tuple(x.shape) for x in operands.values())
    for name, x in operands.items():
        if not x.shape:
            raise ValueError(f"{function}: {name} has shape (); it must have at least one dimension")
    k_a, k_b = a[-1], b[-2] if len(b) > 1 else b[0]
    if k_a != k_b:
        raise ValueError(f"{function}: {_shapes(operands)} contract sizes {k_a} and {k_b}; they must be equal")
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
            raise ValueError(f"{function}: leading dimensions of {_shapes(operands)} do not broadcast")

    def renumbered(dims: Iterable[int], squeezed: Iterable[int]) -> Dims:
        return tuple(d - sum(s < d for s in squeezed) for d in dims)

    contract_a = renumbered([len(a) - 1], squeeze_a)
    contract_b = renumbered([max(len(b) - 2, 0)], squeeze_b)
    numbers = ((contract_a, contract_b), (renumbered(batch_a, squeeze_a), renumbered(batch_b, squeeze_b)))
    # dot_general returns (shared, only a, m, only b, n); matmul wants leading dimensions in place.
    groups = {owner: [i for i, o in enumerate(owners) if o == owner] for owner in ("ab", "a", "b")}
    has_m, has_n = len(a) > 1, len(b) > 1
    produced = groups["ab"] + groups["a"] + ["m"] * has_m + groups["b"] + ["n"] * has_n
    wanted = list(range(rank)) + ["m"] * has_m + ["n"] * has_n
    order = tuple(produced.index(d) for d in wanted)
    return numbers, (tuple(squeeze_a), tuple(squeeze_b)), None if order == tuple(range(len(order))) else order
