"""The sides that bench compares: our product, XLA's, and those of other installed libraries.

A side makes the ``Program``s that are measured, from a ``Shape`` and operands.
"""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_streamk
from jax_streamk.device import device_of
from jax_streamk.product.epilogue import ACTIVATIONS
from jax_streamk.tools import shapes
from jax_streamk.tuning.measure import ROTATED_BYTES
from jax_streamk.tuning.programs import Program, dependent, repeat
from jax_streamk.tuning.timing import device_samples, summary

OURS, XLA, OUR_MATMUL = "jax_streamk", "XLA", "jax_streamk.matmul"
INVARIANT = "jax_streamk, batch invariant"
DENSE, EVEN = "dense", "even groups"  # what bounds a ragged product
MOST_CALLS, MOST_CALLS_IN_PROGRAM = 256, 64
_HOST_MEMORY = 3 << 30  # at a size of this order XLA's products on a CPU take too long to wait for
NOT_COMPARED = XLA, OUR_MATMUL, DENSE, EVEN  # the reference, and other results
MEASURES = {
    "device": "kernels, memsets and copies of a call on the GPU",
    "dependent": "wall time of a program whose calls each wait for the previous one",
    "independent": "wall time of a program of independent calls",
}


def memory():
    """The bytes that programs may take on the default GPU; on a CPU a few that are soon computed."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", _HOST_MEMORY)


def calls_of(size, stored):
    """How many calls that read and write ``size`` bytes evict the first one's from L2, and how many a program makes.

    Operands and result of a call take ``stored`` bytes, those of all calls at most a fifth of a GPU's memory, if that
    is enough for two.
    """
    if jax.default_backend() != "gpu":
        return 2, 2
    count = max(8, min(MOST_CALLS, math.ceil(ROTATED_BYTES["cuda"] / size)))
    count = min(count, max(2, memory() // 5 // stored))
    return count, min(count, MOST_CALLS_IN_PROGRAM)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is computed for every shape: a product, or a linear layer with bias if activation is not None.

    Attributes:
      dtype: the dtype of operands and result; the result of int8 is int32.
      precision: as in ``jax_streamk.matmul``.
      activation: a key of ``ACTIVATIONS`` or "none"; None for a plain product.
      gated: whether it is a gated product with this activation and without biases, instead of a linear layer.
      batch_invariant: whether ours is also measured under ``Auto(batch_invariant=True)``.
    """

    dtype: str
    precision: str | None = None
    activation: str | None = None
    gated: bool = False
    batch_invariant: bool = False

    @classmethod
    def of(cls, arguments, **fields):
        """The task of a command line."""
        precision = None if arguments.precision == "default" else arguments.precision
        activation, given = arguments.linear or arguments.gated, (bool(arguments.gated), arguments.batch_invariant)
        return cls(arguments.dtype, precision, activation, *given, **fields)

    @property
    def preferred(self):
        """The ``preferred_element_type`` of a product."""
        return shapes.result_dtype(self.dtype)

    @property
    def linear(self):
        return dict(activation=None if self.activation == "none" else self.activation)

    @property
    def result_size(self):
        """Bytes of an element of the result."""
        return jnp.dtype(self.preferred or self.dtype).itemsize

    def operand_shapes(self, shape):
        a, b = shape.stored()
        return [a, b, b] if self.gated else [a, b] + [(shape.n,)] * (self.activation is not None)

    def flops(self, shape):
        """Multiplications and additions of every product."""
        return (4 if self.gated else 2) * shape.batch * shape.m * shape.n * shape.k

    def bytes(self, shape):
        """The bytes of operands and result."""
        read, written = sum(map(math.prod, self.operand_shapes(shape))), shape.batch * shape.m * shape.n
        return read * jnp.dtype(self.dtype).itemsize + written * self.result_size

    def stored_bytes(self, shape):
        """The bytes that a set of operands and a result take in memory."""
        return self.bytes(shape)

    def operands(self, shape, count):
        """``count`` tuples of random operands: normal, or for int8 uniform."""
        extents, dtype = self.operand_shapes(shape), jnp.dtype(self.dtype)

        def drawn(key, extents):
            if dtype == jnp.int8:
                return jax.random.randint(key, extents, -127, 128, dtype)
            return jax.random.normal(key, extents, jnp.float64 if dtype == jnp.float64 else jnp.float32).astype(dtype)

        @jax.jit
        def draw(key):
            return tuple(map(drawn, jax.random.split(key, len(extents)), extents))

        return [draw(key) for key in jax.random.split(jax.random.key(0), count)]

    def plan(self, shape):
        """The ``Plan`` of our call, on the default device."""
        a, b = (jax.ShapeDtypeStruct(x, self.dtype) for x in shape.stored())
        if self.gated:
            b = jax.ShapeDtypeStruct((shape.k, shape.n), self.dtype)
            return jax_streamk.plan(a, b, precision=self.precision, gate=True, **self.linear)
        epilogue = dict(self.linear, bias=True) if self.activation is not None else {}
        params = dict(precision=self.precision, preferred_element_type=self.preferred)
        return jax_streamk.plan(a, b, shape.dimension_numbers(), **params, **epilogue)

    @property
    def xla_precision(self):
        """The precision of XLA's products. At "high" XLA would multiply TF32 once, and we multiply three times."""
        if self.precision == "high" and self.dtype == "float32" and jax.default_backend() == "gpu":
            return lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return self.precision

    def skipped(self, shape):
        """Why sides are not measured, by name."""
        return {}

    def builders(self, shape):
        """For each side, a function that makes its ``Program``s from a list of operands and the number in a program."""
        return {name: functools.partial(jax_programs, function) for name, function in self.functions(shape).items()}

    def alone(self, shape, side):
        """A builder of a side of this task beside those of another, on operands of its own."""

        def build(_, in_program):
            count, in_program = calls_of(self.bytes(shape), self.stored_bytes(shape))
            return jax_programs(self.functions(shape)[side], self.operands(shape, count), in_program)

        return build

    def functions(self, shape):
        """For each side, a function of the operands."""
        functions = self.functions_under(None, shape)
        if self.batch_invariant:
            functions[INVARIANT] = self.functions_under(jax_streamk.Auto(batch_invariant=True), shape)[OURS]
        return functions

    def functions_under(self, schedule, shape):
        """The same, ours under a schedule."""

        def stored(function, precision=self.precision):
            def call(a, b, *others):
                a, b = (x.mT if transposed else x for x, transposed in ((a, shape.trans_a), (b, shape.trans_b)))
                return function(a, b, *others, precision=precision)

            return call

        if self.activation is None:
            result: dict[str, Any] = dict(preferred_element_type=self.preferred)
            return {
                XLA: stored(functools.partial(jnp.matmul, **result), self.xla_precision),
                OURS: stored(functools.partial(jax_streamk.matmul, **result, schedule=schedule)),
            }
        activation = ACTIVATIONS[self.linear["activation"]]
        if self.gated:

            def formula(matmul):
                return lambda x, w, up, precision: (
                    activation(matmul(x, w, precision=precision))
                    * matmul(x, up.mT if shape.trans_b else up, precision=precision)
                )

            def ours(x, w, up, precision):
                up = up.mT if shape.trans_b else up
                return jax_streamk.gated_linear(x, w, up, precision=precision, schedule=schedule, **self.linear)

            return {
                XLA: stored(formula(jnp.matmul), self.xla_precision),
                OURS: stored(ours),
                OUR_MATMUL: stored(formula(jax_streamk.matmul)),
            }
        return {
            XLA: stored(
                lambda x, w, bias, precision: activation(jnp.matmul(x, w, precision=precision) + bias),
                self.xla_precision,
            ),
            OURS: stored(functools.partial(jax_streamk.linear, **self.linear, schedule=schedule)),
            OUR_MATMUL: stored(lambda x, w, bias, precision: jax_streamk.matmul(x, w, precision=precision)),
        }


def jax_programs(function, operands, in_program, link=None):
    """``Program``s by measure. Those of wall time call the first ``in_program`` operands, linked as by ``chain``."""
    one = jax.jit(function)
    several = jax.jit(lambda products: [function(*xs) for xs in products])
    few = operands[:in_program]
    return {
        "device": Program(lambda: [one(*xs) for xs in operands], jax.block_until_ready, len(operands)),
        "dependent": dependent(function, few, link),
        "independent": Program(lambda: several(few), jax.block_until_ready, len(few)),
    }


def fastest(candidates):
    """The ``Program``s, by measure, of the configuration that takes least on a device; None if there are none."""

    def median_us(programs):
        repeat(programs["device"], 1)
        return summary(device_samples(programs["device"])[0])["median_us"]

    return min(candidates, key=median_us, default=None)


def link_program():
    """The ``Program`` of the kernels that ``chain`` adds to its calls, without the calls."""
    return dependent(lambda a, b: b, [(jnp.zeros((8, 8)), jnp.ones((8, 8)))] * 64)


def why_absent(package):
    """Why another library's products cannot be measured; None if they can."""
    if jax.default_backend() != "gpu":
        return "needs a GPU"
    return f"needs the package {package}" if importlib.util.find_spec(package) is None else None


def peers(task):
    """(builders of programs by name, why others are absent, by name)."""
    here, absent = {}, {}
    known = ("cuBLAS by torch", "torch", torch_programs, False), ("Pallas Mosaic GPU", "absl", pallas_programs, True)
    for name, module, build, hopper in known:
        if task.activation is not None:
            absent[name] = "plain products only"
        elif task.dtype == "int8":
            absent[name] = "floating-point products only"
        elif why := why_absent(module):
            absent[name] = why
        elif hopper and device_of(None).arch != 90:
            absent[name] = "needs a Hopper GPU"
        else:
            here[name] = functools.partial(build, task)
    return here, absent


def torch_programs(task, shape, operands, in_program):
    import torch

    # TF32, XLA's default for float32, is called "high" in torch.
    torch.set_float32_matmul_precision("high" if task.precision is None else "highest")
    products = [tuple(map(torch.from_dlpack, xs)) for xs in operands]

    def multiply(a, b):
        return torch.matmul(a.mT if shape.trans_a else a, b.mT if shape.trans_b else b)

    def independent():
        for a, b in products[:in_program]:
            multiply(a, b)

    link = min((0, 1), key=lambda i: products[0][i].numel())
    linked = products[0][link].clone()

    def dependent():
        for xs in products[:in_program]:
            out = multiply(*(linked if i == link else x for i, x in enumerate(xs)))
            linked.view(-1)[:1].copy_(out.view(-1)[:1])

    def captured(body):
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return Program(graph.replay, wait, min(in_program, len(products)))

    def wait(_):
        torch.cuda.synchronize()

    return {
        "device": Program(lambda: [multiply(*xs) for xs in products], wait, len(products)),
        "dependent": captured(dependent),
        "independent": captured(independent),
    }


def pallas_programs(task, shape, operands, in_program):
    """Programs of the fastest among some configurations that can run the shape."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as mgpu

    if shape.trans_a or shape.trans_b or shape.batch > 1 or task.dtype not in ("bfloat16", "float16"):
        raise ValueError("only row-major products of bfloat16 or float16 without a batch")
    # Since JAX 0.10 it has an argument for an array to add.
    none = {"c": None} if "c" in inspect.signature(mgpu.matmul).parameters else {}

    def candidates():
        for rows, columns, wide in itertools.product((128, 64), (128, 64), mgpu.MatmulDimension):
            across = wide == mgpu.MatmulDimension.N
            if shape.m % (rows * (1 + (not across))) or shape.n % (columns * (1 + across)) or shape.k % 64:
                continue
            config = mgpu.TuningConfig(rows, columns, 64, 4, grid_tile_width=8, wg_dimension=wide)
            call = functools.partial(mgpu.matmul, config=config, **none)
            yield jax_programs(call, operands, in_program)

    best = fastest(candidates())
    if best is None:
        raise ValueError("no tile divides this shape: m and n must be multiples of 64 or 128, and k of 64")
    return best
