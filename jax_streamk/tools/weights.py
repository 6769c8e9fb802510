"""Products by quantized weights for bench: their formats, and the sides that are compared."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_streamk
from jax_streamk.plan.problem import TYPES
from jax_streamk.quantized import VALUES
from jax_streamk.tools import shapes, sides

COLUMN = "column"  # all of k
# Which side of another task bounds those of this one, by its name here.
BOUNDS = {f"unquantized {side}": side for side in (sides.XLA, sides.OURS)}


@dataclasses.dataclass(frozen=True)
class Format:
    """How weights are stored.

    Attributes:
      values: the dtype of the numbers.
      scale: that of the scales; None for that of the product.
      group: how many numbers along k share one, unless ``--group`` says otherwise.
      has_zero: whether there is a zero point for each scale.
      is_nested: whether the scales have one of their own.
    """

    values: str
    scale: str | None = None
    group: int = 128
    has_zero: bool = False
    is_nested: bool = False


FORMATS = {name: Format(name, has_zero=name.startswith("uint")) for name in VALUES if "float4" not in name} | {
    "mxfp8": Format("float8_e4m3fn", "float8_e8m0fnu", 32),
    "mxfp4": Format("float4_e2m1fn", "float8_e8m0fnu", 32),
    "nvfp4": Format("float4_e2m1fn", "float8_e4m3fn", 16, is_nested=True),
}


def add_arguments(parser):
    parser.add_argument(
        "--weights",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"products by quantized weights, also beside those by weights of --dtype: {', '.join(FORMATS)}",
    )
    parser.add_argument(
        "--group",
        type=lambda text: text if text == COLUMN else shapes.positive(text),
        metavar="K",
        help="how many of --weights along k share a scale, or column for all of them; without it 128, for mxfp8 and "
        "mxfp4 32, for nvfp4 16. Shapes whose k is no multiple of it are left out",
    )


def chosen(arguments):
    """As ``shapes.chosen``: the products whose k is a multiple of the group.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a file, other arguments are not for quantized weights, or no product is left.
    """
    if arguments.linear or arguments.gated:
        raise ValueError("--weights are of plain products, without --linear and --gated")
    if arguments.dtype in ("int8", "float64"):
        raise ValueError(f"--weights are multiplied by float32, bfloat16 or float16, not by {arguments.dtype}")
    group, todo = _group(arguments), shapes.chosen(arguments)
    todo = [shape for shape in todo if group == COLUMN or shape.k % group == 0]
    if not todo:
        raise ValueError(f"--weights {arguments.weights}: no k is a multiple of {group}")
    return todo


def _group(arguments):
    return arguments.group or FORMATS[arguments.weights].group


def name_of(task):
    """The weights of a task as a result has it, in words."""
    return f"{task['weights']} with scales per {task['group']}"


@dataclasses.dataclass(frozen=True)
class Task(sides.Task):
    """What is computed for every shape: a product by a ``QuantizedArray``.

    Attributes:
      weights: a key of ``FORMATS``.
      group: how many numbers along k share a scale, or ``COLUMN``.
    """

    weights: str = "int4"
    group: int | str = 128

    @classmethod
    def of(cls, arguments, **fields):
        return super().of(arguments, weights=arguments.weights, group=_group(arguments), **fields)

    @property
    def unquantized(self):
        """The task of the same products by arrays."""
        return sides.Task(self.dtype, self.precision)

    def types(self, shape):
        return jax.eval_shape(lambda: self.operands(shape, 1)[0])

    def bytes(self, shape):
        """The bytes of operands and result."""
        read = sum(x.size * TYPES[x.dtype].bits for x in jax.tree.leaves(self.types(shape))) // 8
        return read + shape.batch * shape.m * shape.n * self.result_size

    def stored_bytes(self, shape):
        """The bytes that a set of operands and a result take in memory, those of the bounds included."""
        return self.bytes(shape) + len(BOUNDS) * self.unquantized.stored_bytes(shape)

    def operands(self, shape, count):
        """``count`` tuples of normally distributed rows and random weights."""
        rows, numbers = shape.stored()

        @jax.jit
        def draw(key):
            of_rows, of_weights = jax.random.split(key)
            weights = self._drawn(of_weights, numbers, len(numbers) - 2 + shape.trans_b)
            return jax.random.normal(of_rows, rows).astype(self.dtype), weights

        return [draw(key) for key in jax.random.split(jax.random.key(0), count)]

    def _drawn(self, key, shape, along):
        """Random weights, whose groups lie along this dimension."""
        stored, (of_values, of_scale, of_zero) = FORMATS[self.weights], jax.random.split(key, 3)
        blocks = list(shape)
        blocks[along] = 1 if self.group == COLUMN else shape[along] // self.group
        scale: Any = jax.random.uniform(of_scale, blocks, minval=0.5, maxval=2).astype(stored.scale or self.dtype)
        if stored.is_nested:
            scale = jax_streamk.QuantizedArray(scale, jnp.ones([1] * len(shape)))
        zero = _numbers(of_zero, blocks, stored.values) if stored.has_zero else None
        return jax_streamk.QuantizedArray(_numbers(of_values, shape, stored.values), scale, zero, dtype=self.dtype)

    def plan(self, shape):
        return jax_streamk.plan(self.functions(shape)[sides.OURS], *self.types(shape))

    def functions(self, shape):
        numbers = shape.dimension_numbers()
        xlas = lambda x, w: lax.dot_general(x, w.dequantize(), numbers, precision=self.xla_precision)
        ours = lambda x, w: jax_streamk.dot_general(x, w, numbers, precision=self.precision)
        return {sides.XLA: xlas, sides.OURS: ours}

    def builders(self, shape):
        # A chain of calls goes through rows, however few the weights are.
        of_weights = {
            name: functools.partial(sides.jax_programs, function, link=0)
            for name, function in self.functions(shape).items()
        }
        return of_weights | {name: self.unquantized.alone(shape, side) for name, side in BOUNDS.items()}


def _numbers(key, shape, dtype):
    """Uniform integers, or normally distributed numbers."""
    if not dtype.endswith(("int4", "int8")):
        return jax.random.normal(key, shape).astype(dtype)
    info = jnp.iinfo(dtype)
    drawn = "uint8" if info.min == 0 else "int8"
    return jax.random.randint(key, shape, int(info.min), int(info.max) + 1, drawn).astype(dtype)


def peers(task):
    """As ``sides.peers``."""
    why = sides.why_absent("tokamax")
    return ({}, {"tokamax": why}) if why else ({"tokamax": _tokamax_programs}, {})


def _tokamax_programs(shape, operands, in_program):
    """Programs of its ragged product, which multiplies by qwix's arrays, with all rows in one group."""
    import qwix
    import tokamax

    if shape.batch > 1:
        raise ValueError("only products without a batch")
    sizes = jnp.full(1, shape.m, jnp.int32)

    def product(x, w):
        parts = w.parts()
        of_group = lambda y: None if y is None else (y.mT if shape.trans_b else y)[None]
        array = qwix.QArray(of_group(w.values), of_group(parts["scale"]), of_group(parts.get("zero")))
        return tokamax.ragged_dot(x.mT if shape.trans_a else x, array, sizes, implementation="mosaic")

    return sides.jax_programs(product, operands, in_program, link=0)
