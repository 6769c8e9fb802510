"""Products of float8 by float8 for bench: their scales, and the sides that are compared."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import jax_streamk
from jax_streamk.plan.problem import FLOAT8
from jax_streamk.tools import shapes, sides

SCALES = "none", "tensor", "row", "128x128"
NAMES = tuple(dtype.name for dtype in FLOAT8)
# XLA's product of the numbers alone, beside products with scales.
UNSCALED = "XLA without scales"


def add_arguments(parser):
    parser.add_argument(
        "--scales",
        choices=SCALES,
        default=SCALES[0],
        metavar="BLOCK",
        help="of --dtype float8_e4m3fn or float8_e5m2: none, one per tensor, one for each row of A and column of B "
        "(row), or one for 1 x 128 of A and for 128 x 128 of B; shapes that they do not divide are left out "
        "(%(default)s)",
    )


def chosen(arguments):
    """As ``shapes.chosen``: the products that the scales divide.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a file, other arguments are not for float8, or no product is left.
    """
    if arguments.linear or arguments.gated or arguments.weights:
        raise ValueError("float8 is of plain products, without --linear, --gated and --weights")
    todo = shapes.chosen(arguments)
    if arguments.scales == "128x128":
        todo = [shape for shape in todo if shape.k % 128 == shape.n % 128 == 0]
    if not todo:
        raise ValueError("--scales 128x128: no product has k and n that are multiples of 128")
    return todo


def name_of(task):
    """The scales of a task as a result has it, in words."""
    return f"with scales per {task['scales']}"


@dataclasses.dataclass(frozen=True)
class Task(sides.Task):
    """What is computed for every shape: a product of bfloat16 of float8 by float8.

    Attributes:
      scales: one of ``SCALES``.
    """

    scales: str = SCALES[0]

    @classmethod
    def of(cls, arguments, **fields):
        return super().of(arguments, scales=arguments.scales, **fields)

    def _scales(self, shape):
        """The shapes of the scales of operands that lie as (m, k) and (k, n), or their transposes."""
        k = shape.k // 128 if self.scales == "128x128" else 1
        rows, columns = {"tensor": (1, 1), "row": (shape.m, shape.n), "128x128": (shape.m, shape.n // 128)}[self.scales]
        batch = (shape.batch,) if shape.batch > 1 else ()
        order = lambda extents, transposed: (*batch, *(extents[::-1] if transposed else extents))
        return order((rows, k), shape.trans_a), order((k, columns), shape.trans_b)

    def operands(self, shape, count):
        numbers = super().operands(shape, count)
        if self.scales == "none":
            return numbers
        return [(*xs, *(jnp.full(extents, 0.5, jnp.float32) for extents in self._scales(shape))) for xs in numbers]

    def plan(self, shape):
        types = jax.eval_shape(lambda: self.operands(shape, 1)[0])
        return jax_streamk.plan(self.functions(shape)[sides.OURS], *types)

    def functions(self, shape):
        if self.scales == "none":
            return super().functions(shape)
        numbers, out = shape.dimension_numbers(), dict(preferred_element_type=self.preferred)

        def product(function, of):
            def call(a, b, of_a, of_b):
                lhs, rhs = (jax_streamk.QuantizedArray(*x, dtype=self.preferred) for x in ((a, of_a), (b, of_b)))
                return function(of(lhs), of(rhs), numbers, **out)

            return call

        return {
            sides.XLA: product(lax.dot_general, lambda x: x.dequantize()),
            sides.OURS: product(jax_streamk.dot_general, lambda x: x),
            UNSCALED: product(lax.dot_general, lambda x: x.values),
        }


def peers(task):
    """As ``sides.peers``: no other library multiplies float8 under JAX on Hopper."""
    return {}, {}
