"""Arrays of four and eight bits with scales: ``value = (values - zero_point) * scale + offset``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_streamk.checks import check_static
from jax_streamk.plan.problem import FLOAT8
from jax_streamk.product import scaled
from jax_streamk.product.dense import Dense
from jax_streamk.product.epilogue import wide
from jax_streamk.product.primitive import bind
from jax_streamk.product.ragged import Ragged
from jax_streamk.product.spec import Product

INTEGERS = ("int4", "uint4", "int8", "uint8")
VALUES = (*INTEGERS, "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
WIDE = ("float32", "bfloat16", "float16")
SCALES = (*WIDE, "float8_e8m0fnu", "float8_e4m3fn")

Array: TypeAlias = "jax.Array | QuantizedArray"


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """An array of narrow numbers with scales, and perhaps zero points or offsets, each shared by a block of numbers.

    It stands for the array ``(values - zero_point) * scale + offset``, computed in float32 and rounded to ``dtype``,
    and goes wherever this library takes an operand of a product. It is a pytree of its arrays: ``jit``, ``vmap`` over
    leading dimensions, ``scan`` over layers, ``jax.device_put`` and checkpoints take it as such. ``values`` have no
    derivative; scale, zero_point and offset have. The arguments are attributes; ``shape``, ``ndim`` and ``size`` are
    those of the array that it stands for.

    Args:
      values: array of dtype int4, uint4, int8, uint8, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      scale: array of the rank of ``values``, each of whose sizes divides that of ``values``: of weights (k, n), shape
        (1, 1) is a scale per tensor, (1, n) per column, (k / 128, n) per group of 128 along k, (k / 128, n / 128) per
        block. Its dtype is float32, bfloat16, float16, float8_e8m0fnu (MX) or float8_e4m3fn; or it is a
        ``QuantizedArray`` of such scales, which have a second scale (NVFP4).
      zero_point: integers, or floating-point numbers, of such a shape, or None.
      offset: floating-point numbers of such a shape, or None.
      dtype: of the array that it stands for: float32, bfloat16 or float16. None: that of the scale if it is one of
        them, else bfloat16.

    Raises:
      TypeError: an argument is not an array, or its dtype is none of these.
      ValueError: a shape does not fit.
    """

    values: jax.Array
    scale: Array
    zero_point: jax.Array | None
    offset: jax.Array | None
    dtype: np.dtype[Any]

    def __init__(
        self,
        values: ArrayLike,
        scale: ArrayLike | QuantizedArray,
        zero_point: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        *,
        dtype: DTypeLike | None = None,
    ):
        self.values = _checked("values", values, VALUES)
        if isinstance(scale, QuantizedArray):
            self.scale: Array = scale
        else:
            self.scale = _checked("scale", scale, SCALES)
        self.zero_point = (
            None if zero_point is None else _checked("zero_point", zero_point, (*INTEGERS, "int32", *WIDE))
        )
        self.offset = None if offset is None else _checked("offset", offset, WIDE)
        of_scale = self.scale.dtype.name
        check_static("QuantizedArray: dtype", dtype)
        self.dtype = jnp.dtype(dtype if dtype is not None else of_scale if of_scale in WIDE else "bfloat16")
        if self.dtype.name not in WIDE:
            raise TypeError(f"QuantizedArray: dtype={self.dtype.name} must be {_listed(WIDE)}")
        for name in ("scale", "zero_point", "offset"):
            _check_blocks(name, getattr(self, name), self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def block(self) -> tuple[int, ...]:
        """How many values share a scale, along each dimension."""
        return tuple(x // of for x, of in zip(self.shape, self.scale.shape))

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """The array that it stands for, of its dtype or another one."""
        parts = self.parts()
        scale, zero, offset = (parts.get(part) for part in scaled.PARTS)
        return scaled.dequantize(self.values, scale, zero, offset, self.dtype if dtype is None else dtype)

    def parts(self) -> dict[str, jax.Array]:
        """What kernels read besides the values, by name."""
        scale = self.scale.dequantize(jnp.float32) if isinstance(self.scale, QuantizedArray) else self.scale
        parts = dict(scale=scale, zero=self.zero_point, offset=self.offset)
        return {name: x for name, x in parts.items() if x is not None}

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __repr__(self) -> str:
        given = {"zero_point": self.zero_point, "offset": self.offset}
        others = [f"{name}={_type_of(x)}" for name, x in given.items() if x is not None]
        parts = ", ".join([_type_of(self.values), _type_of(self.scale), *others])
        return f"QuantizedArray({parts}, dtype={self.dtype.name})"

    def __getitem__(self, index: Any) -> QuantizedArray:
        """The arrays at an index, slice, or array of indices of the first dimension, if each has its own scales."""
        if index is ...:
            return self
        if any(x.shape[:1] != self.shape[:1] for x in self.parts().values()) or isinstance(index, tuple):
            raise IndexError(
                f"{self!r}[{index!r}]: only the first dimension can be indexed, and only if each has scales of its own"
            )
        return jax.tree.map(lambda x: x[index], self)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        names = "values", "scale", "zero_point", "offset"
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], self.dtype

    @classmethod
    def tree_unflatten(cls, dtype: Any, children: Any) -> QuantizedArray:
        self = object.__new__(cls)  # JAX unflattens what are no arrays, too
        self.values, self.scale, self.zero_point, self.offset = children
        self.dtype = dtype
        return self


def is_quantized(x: Any) -> bool:
    """Whether x is a ``QuantizedArray``, or another library's, such as qwix's ``QArray``, which its attributes tell."""
    return isinstance(x, QuantizedArray) or all(hasattr(x, name) for name in ("qvalue", "scale", "zero_point"))


def dequantized(x: Any) -> Any:
    """What a quantized array stands for; any other x itself."""
    if not is_quantized(x):
        return x
    return ours(x).dequantize()


def ours(x: Any) -> Any:
    """Any quantized array as a ``QuantizedArray``; any other x itself."""
    if not is_quantized(x) or isinstance(x, QuantizedArray):
        return x
    return QuantizedArray(x.qvalue, x.scale, x.zero_point)


def astype(x: Any, dtype: DTypeLike) -> Any:
    """An array, or what a ``QuantizedArray`` stands for, in another dtype."""
    if isinstance(x, QuantizedArray) and jnp.dtype(dtype).name in WIDE:
        return QuantizedArray(x.values, x.scale, x.zero_point, x.offset, dtype=dtype)
    return dequantized(x).astype(dtype)


def note(name: str, x: Any) -> str:
    """What a plan of shapes says of a quantized operand."""
    what = "planned as the array that it stands for: plan(fn, ...), of a function of products, tells of kernels that"
    return f"{name} is {what} read {ours(x).values.dtype.name} with scales"


def bound(product: Product, lhs: Any, *operands: Any, **params: Any) -> jax.Array:
    """``bind`` of a product whose operands may be quantized.

    What each matrix needs besides its numbers follows the other operands. One kind of numbers is multiplied by one
    kernel: of two matrices of different kinds arrays are made first. Kernels read numbers on the right, or, of eight
    bits, on both sides.
    """
    matrices = [x for x in operands if isinstance(x, QuantizedArray)]
    if isinstance(lhs, QuantizedArray) and not matrices and isinstance(product, Dense) and product.epilogue.is_plain:
        (rhs,) = operands
        return bound(product.exchanged(lhs.ndim, rhs.ndim), rhs, lhs, **params)
    if not matrices:
        return bind(product, dequantized(lhs), *operands, **params)
    of_both = isinstance(lhs, QuantizedArray) and _multiply_as_they_are(lhs, *matrices)
    if of_both and isinstance(product, Ragged) and product.gathers:
        lhs, operands, product = _rows(product, lhs, operands[-1]), operands[:-1], product.of_rows
    operands = (lhs if of_both else dequantized(lhs), *operands)
    if not of_both and isinstance(product, Dense) and _is_factor_of_result(product, *operands):
        return _scaled_after(product, *operands, **params)
    each = [x.parts() for x in matrices]
    kinds = {(tuple(parts), x.values.dtype, x.values.shape, x.dtype) for x, parts in zip(matrices, each)}
    is_stacked = product.epilogue.gate == "stacked"
    if len(kinds) > 1 or is_stacked or len(matrices) != 1 + product.epilogue.is_pair:
        return bind(product, *map(dequantized, operands), **params)
    of = scaled.Scaled.by(product, matrices[0].dtype, tuple(each[0]), of_both)
    numbers = [x.values if isinstance(x, QuantizedArray) else x for x in operands]
    of_lhs = [lhs.scale] if of_both else []
    return bind(of, *numbers, *(x for parts in each for x in parts.values()), *of_lhs, **params)


def _rows(product: Ragged, x: QuantizedArray, indices: Any) -> QuantizedArray:
    """The rows of x that indices choose, for kernels that gather none of a matrix with scales."""
    scale = x.parts()["scale"]
    if scale.shape[0] > 1:
        scale = product.chosen(jnp.repeat(scale, x.shape[0] // scale.shape[0], 0), indices)
    return QuantizedArray(product.chosen(x.values, indices), scale, dtype=x.dtype)


def _multiply_as_they_are(*arrays: QuantizedArray) -> bool:
    """Whether all are float8, or all int8, with scales and nothing else: kernels scale sums of their products."""
    of_scales = all(x.zero_point is x.offset is None and not isinstance(x.scale, QuantizedArray) for x in arrays)
    dtypes = {x.values.dtype for x in arrays}
    return of_scales and (dtypes <= {*FLOAT8} or dtypes == {jnp.dtype("int8")})


def _is_factor_of_result(product: Dense, lhs: Any, rhs: Any, *others: Any) -> bool:
    """Whether the scales of rhs have one scale for all (NVFP4), and are more than the elements of the result."""
    is_plain = product.epilogue.is_plain and not others
    if not is_plain or not isinstance(rhs.scale, QuantizedArray) or rhs.offset is not None or rhs.size == 0:
        return False
    contracted = math.prod(lhs.shape[i] for i in product.numbers[0][0])
    is_one = rhs.scale.scale.size == 1 and not {"zero", "offset"} & {*rhs.scale.parts()}
    return is_one and lhs.size * rhs.size // contracted**2 < rhs.scale.size


def _scaled_after(product: Dense, lhs: jax.Array, rhs: Any, **params: Any) -> jax.Array:
    """The product by the numbers with their own scales, then multiplied by the scale of all."""
    dtype = jnp.dtype(product.preferred_element_type or lhs.dtype)
    own = QuantizedArray(rhs.values, rhs.scale.values, rhs.zero_point, dtype=rhs.dtype)
    out = bound(product.replaced(preferred_element_type=wide(dtype)), lhs, own, **params)
    return (out * rhs.scale.parts()["scale"].reshape(())).astype(dtype)


def quantize(x: ArrayLike, dtype: DTypeLike, *, block: int | Sequence[int | None] | None = None) -> QuantizedArray:
    """The nearest ``QuantizedArray`` whose scales make the largest number of a block the largest of the dtype.

    Unsigned dtypes get zero points too, so that a block's smallest number is zero.

    Args:
      x: array of float32, bfloat16 or float16, which becomes the dtype of scales and of the result.
      dtype: of the values, one of those of ``QuantizedArray``.
      block: how many numbers share a scale along each dimension, None for all of it; or one number for the last but one
        dimension, that is, groups along k of weights (..., k, n), each column having its own. None: whole columns.

    Raises:
      TypeError: a dtype is none of these, or x is not an array.
      ValueError: a block does not divide x.
    """
    check_static("quantize: dtype", dtype)
    dtype = jnp.dtype(dtype)
    if dtype.name not in VALUES:
        raise TypeError(f"quantize: dtype={dtype.name} must be {_listed(VALUES)}")
    x = _checked("x", x, WIDE, "quantize")
    sizes = _blocks_of(x.shape, block)
    split = x.reshape([n for size, of in zip(x.shape, sizes) for n in (size // of, of)]).astype(jnp.float32)
    within = tuple(range(1, 2 * x.ndim, 2))
    least, most = (limit(split, within, keepdims=True) for limit in (jnp.min, jnp.max))
    is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    info: Any = jnp.iinfo(dtype) if dtype.name in INTEGERS else jnp.finfo(dtype)
    largest = float(info.max)
    if is_unsigned:
        least, most = jnp.minimum(least, 0), jnp.maximum(most, 0)
    extent = most - least if is_unsigned else jnp.maximum(-least, most)
    scale = (extent / largest).astype(x.dtype).astype(jnp.float32)
    scale = jnp.where(scale > 0, scale, 1)
    zero_point = jnp.round(-least / scale) if is_unsigned else None
    values = split / scale + (0 if zero_point is None else zero_point)
    values = jnp.round(values) if dtype.name in INTEGERS else values
    values = jnp.clip(values, 0 if is_unsigned else -largest, largest).astype(dtype).reshape(x.shape)
    shape = [size // of for size, of in zip(x.shape, sizes)]
    zeros = None if zero_point is None else zero_point.reshape(shape).astype(dtype)
    return QuantizedArray(values, scale.reshape(shape).astype(x.dtype), zeros)


def from_words(
    words: ArrayLike, bits: int, *, axis: int = -1, order: Sequence[int] | None = None, signed: bool = False
) -> jax.Array:
    """The numbers of four or eight bits that 32-bit words hold, as an array of uint4, int4, uint8 or int8.

    Args:
      words: array of uint32 or int32, each word with 32 / bits neighbours of a dimension.
      bits: 4 or 8.
      axis: the dimension of ``words`` that has them side by side.
      order: which of its neighbours each part of a word is, from the low bits up; None: in order. AWQ's is
        (0, 2, 4, 6, 1, 3, 5, 7).
      signed: whether the numbers are signed, in two's complement.

    Raises:
      TypeError: words are not integers of 32 bits.
      ValueError: bits or order is none of these.
    """
    words = _checked("words", words, ("uint32", "int32"), "from_words")
    check_static("from_words: bits", bits)
    if bits not in (4, 8):
        raise ValueError(f"from_words: bits={bits!r} must be 4 or 8")
    count = 32 // bits
    order = tuple(range(count)) if order is None else tuple(order)
    if sorted(order) != list(range(count)):
        raise ValueError(f"from_words: order={order} must have each of the {count} parts of a word once")
    if words.ndim == 0:
        raise ValueError("from_words: words has shape (); it must have at least one dimension")
    axis = range(words.ndim)[axis]
    parts = words.astype(jnp.uint32)[..., None] >> jnp.arange(0, 32, bits, dtype=jnp.uint32) & (2**bits - 1)
    parts = parts[..., np.argsort(order)]
    parts = jnp.moveaxis(parts, -1, axis + 1)
    parts = parts.reshape(*words.shape[:axis], words.shape[axis] * count, *words.shape[axis + 1 :])
    if signed:
        parts = parts.astype(jnp.int32)
        parts = jnp.where(parts >= 2 ** (bits - 1), parts - 2**bits, parts)
    return parts.astype(f"{'' if signed else 'u'}int{bits}")


def _checked(name: str, x: Any, dtypes: Sequence[str], function: str = "QuantizedArray") -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {name} is {type(x).__name__}; it must be an array") from None
    if x.dtype.name not in dtypes:
        raise TypeError(f"{function}: {name} has dtype {x.dtype.name}; it must be {_listed(dtypes)}")
    return x


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_blocks(name: str, x: Any, values: jax.Array) -> None:
    if x is None:
        return
    if x.ndim != values.ndim or any(size % of if of else size for size, of in zip(values.shape, x.shape)):
        raise ValueError(
            f"QuantizedArray: {name} has shape {x.shape} and values {values.shape}; it must have as many dimensions, "
            "and each of its sizes must divide that of values"
        )


def _blocks_of(shape: tuple[int, ...], block: Any) -> list[int]:
    """How many numbers share a scale along each dimension of an array of this shape."""
    check_static("quantize: block", block)
    if block is None or isinstance(block, (int, np.integer)):
        block = [block if i == max(len(shape) - 2, 0) else 1 for i in range(len(shape))]
    block = tuple(block)
    sizes = [max(size, 1) if of is None else of for size, of in zip(shape, block)]
    if len(block) != len(shape) or any(of < 1 or size % of for size, of in zip(shape, sizes)):
        raise ValueError(f"quantize: block={block} must have a number that divides each size of x, of shape {shape}")
    return sizes


def _type_of(x: Any) -> str:
    """Of anything that a pytree may hold in the place of an array."""
    return repr(x) if isinstance(x, QuantizedArray) or not hasattr(x, "dtype") else f"{x.dtype}{list(x.shape)}"
