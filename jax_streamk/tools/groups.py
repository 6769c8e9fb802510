"""Ragged products for bench: their files and sets, and the sides that are compared."""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_streamk
from jax_streamk.product import ragged
from jax_streamk.product.epilogue import ACTIVATIONS
from jax_streamk.tools import shapes, sides


@dataclasses.dataclass(frozen=True)
class Groups(shapes.Shape):
    """m rows in groups, each group with a (k, n) matrix of its own.

    Attributes:
      groups: how many.
      routing: how likely a row is of a group: all alike if "uniform"; as 1 / rank, ranks in random order, if "zipf".
      pass_: "forward", (m, k) by (groups, k, n); "lhs", the gradient of lhs, (m, n) by these transposed; or "rhs", the
        gradient of rhs, for each group its rows of (m, k) transposed by those of (m, n).
    """

    COLUMNS: ClassVar[dict[str, tuple[str | None, dict[str, Any] | None]]] = {
        **dict.fromkeys(("groups", "m", "n", "k"), (None, None)),
        "routing": ("uniform", {name: name for name in ("uniform", "zipf")}),
        "pass": ("forward", {name: name for name in ("forward", "lhs", "rhs")}),
    }

    groups: int = 1
    routing: str = "uniform"
    pass_: str = "forward"

    def stored(self):
        """The shapes of the operands."""
        lhs, rhs, result = (self.m, self.k), (self.groups, self.k, self.n), (self.m, self.n)
        return dict(forward=(lhs, rhs), lhs=(result, rhs), rhs=(lhs, result))[self.pass_]

    def dimension_numbers(self):
        """The dimension numbers of the product as a ``lax.ragged_dot_general``."""
        lhs, rhs = ragged.numbers_of(1, 2, 0, (0,)), ragged.numbers_of(0, 0, 0)
        return dict(forward=ragged.BASIC, lhs=lhs, rhs=rhs)[self.pass_]

    def sizes(self):
        """The rows of each group: drawn, always the same."""
        rng = np.random.default_rng(0)
        chances = np.ones(self.groups) if self.routing == "uniform" else 1 / np.arange(1, self.groups + 1)
        return rng.multinomial(self.m, rng.permutation(chances / chances.sum())).astype(np.int32)

    def dense(self, batch=1):
        """The dense product with this arithmetic, or as many of them as ``batch``, each of as many rows."""
        rows = self.m // batch
        if self.pass_ == "rhs":
            return shapes.Shape(self.k, self.n, rows, trans_a=True, batch=batch)
        if self.pass_ == "lhs":
            return shapes.Shape(rows, self.k, self.n, trans_b=True, batch=batch)
        return shapes.Shape(rows, self.n, self.k, batch=batch)

    def __str__(self):
        return name_of(dataclasses.asdict(self))


def name_of(row):
    """A shape, as a row of a result has it, in words."""
    gradient = "" if row["pass_"] == "forward" else f", gradient of {row['pass_']}"
    return f"{row['m']} x {row['n']} x {row['k']} in {row['groups']} groups, {row['routing']}{gradient}"


# (experts, experts for each token, (k, n) of their matrices), as published in each model's configuration.
_MODELS = {
    "Mixtral-8x7B": (8, 2, [(4096, 14336)]),
    "DeepSeek-V3": (256, 8, [(7168, 2048), (2048, 7168)]),
    "Qwen3-30B-A3B": (128, 8, [(2048, 768), (768, 2048)]),
    "Qwen3-235B-A22B": (128, 8, [(4096, 1536)]),
    "gpt-oss-120b": (128, 4, [(2880, 2880)]),
}
_ROUTINGS, _PASSES = (tuple(Groups.COLUMNS[name][1] or ()) for name in ("routing", "pass"))


def _moe_train():
    """Every matrix of an expert, forward and backward."""
    for (model, (experts, _, matrices)), m in itertools.product(_MODELS.items(), (8192, 32768, 65536)):
        for (k, n), routing, pass_ in itertools.product(matrices, _ROUTINGS, _PASSES):
            yield Groups(m, n, k, source=model, groups=experts, routing=routing, pass_=pass_)


def _moe_decode():
    """Every matrix of an expert, for 1 to 256 tokens."""
    for (model, (experts, top, matrices)), tokens in itertools.product(_MODELS.items(), (1, 4, 16, 64, 256)):
        for (k, n), routing in itertools.product(matrices, _ROUTINGS):
            yield Groups(tokens * top, n, k, source=model, groups=experts, routing=routing)


SETS = {"moe_train": _moe_train, "moe_decode": _moe_decode}


def add_argument(group):
    group.add_argument(
        "--groups",
        nargs="?",
        const=",".join(SETS),
        metavar="FILE.csv",
        help="ragged products: columns groups, m (of all groups together), n, k and optionally routing "
        f"({', '.join(_ROUTINGS)}) and pass ({', '.join(_PASSES)}: the product or a gradient); or the set "
        f"{' or '.join(SETS)}; both without a name",
    )


def chosen(arguments):
    """The ragged products that a command line asks for.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a file, or other arguments are not for ragged products.
    """
    for name in ("linear", "column_major", "weights"):
        if getattr(arguments, name, False):
            raise ValueError(f"--{name.replace('_', '-')} is not for --groups")
    names = arguments.groups.split(",")
    if all(name in SETS for name in names):
        todo = [shape for name in names for shape in SETS[name]()]
    else:
        todo = shapes.read(arguments.groups, kind=Groups)
    if arguments.gated:
        todo = [shape for shape in todo if shape.pass_ == "forward"]
        if not todo:
            raise ValueError(f"{arguments.groups}: --gated is for forward passes, and there is none")
    return shapes.sample(todo, arguments.sample) if arguments.sample else todo


@dataclasses.dataclass(frozen=True)
class Task(sides.Task):
    """What is computed for every shape: a ragged product, or a gated one."""

    groups: bool = True

    def _bytes(self, shape, matrices):
        extents = dict(lhs=shape.m * shape.k, rhs=(1 + self.gated) * matrices * shape.k * shape.n)
        extents["forward"] = shape.m * shape.n
        written = extents.pop(shape.pass_)
        return sum(extents.values()) * jnp.dtype(self.dtype).itemsize + written * self.result_size

    def bytes(self, shape):
        """The bytes of operands and result, without the matrices of groups that have no rows."""
        return self._bytes(shape, shape.groups if shape.pass_ == "rhs" else np.count_nonzero(shape.sizes()).item())

    def stored_bytes(self, shape):
        return self._bytes(shape, shape.groups)

    def operands(self, shape, count):
        """``count`` tuples of random normal operands and the same sizes of groups."""
        sizes = jnp.asarray(shape.sizes())
        return [(*xs, sizes) for xs in super().operands(shape, count)]

    def plan(self, shape):
        lhs, rhs = (jax.ShapeDtypeStruct(x, self.dtype) for x in shape.stored())
        params: dict[str, Any] = dict(
            group_sizes=jax.ShapeDtypeStruct((shape.groups,), jnp.int32), precision=self.precision
        )
        if self.gated:
            return jax_streamk.plan(lhs, rhs, gate=True, **params, **self.linear)
        return jax_streamk.plan(lhs, rhs, shape.dimension_numbers(), preferred_element_type=self.preferred, **params)

    def functions(self, shape):
        numbers = shape.dimension_numbers()
        result: dict[str, Any] = dict(preferred_element_type=self.preferred)
        laxs = functools.partial(lax.ragged_dot_general, precision=self.xla_precision, **result)
        ours = functools.partial(jax_streamk.ragged_dot_general, precision=self.precision, **result)
        products = {name: lambda *xs, f=f: f(*xs, numbers) for name, f in ((sides.XLA, laxs), (sides.OURS, ours))}
        out = {name: self._formula(product) for name, product in products.items()}
        if self.gated:
            out[sides.OURS] = functools.partial(jax_streamk.ragged_gated, precision=self.precision, **self.linear)
        return out

    def _formula(self, product):
        """A function of the operands, from one of lhs, rhs and sizes."""
        if not self.gated:
            return product
        activation = ACTIVATIONS[self.linear["activation"]]
        return lambda x, w, up, sizes: activation(product(x, w, sizes)) * product(x, up, sizes)

    def skipped(self, shape):
        """lax's product, if its temporary, every group's copy of lhs, takes more than a third of the memory."""
        size = shape.groups * np.prod(shape.stored()[0]).item() * jnp.dtype(self.dtype).itemsize
        return {sides.XLA: f"a temporary of {size / 1e9:.0f} GB"} if size > sides.memory() / 3 else {}

    def reference(self, shape):
        """What XLA's side computes, by a dense product for each group, one after the other."""

        def product(lhs, rhs, sizes):
            ends, at = jnp.cumsum(sizes), jnp.arange(shape.m)[:, None]
            inside = lambda g: (ends[g] - sizes[g] <= at) & (at < ends[g])
            multiply = functools.partial(
                jnp.matmul, precision=self.xla_precision, preferred_element_type=self.preferred
            )
            if shape.pass_ == "rhs":
                return lax.map(lambda g: multiply(jnp.where(inside(g), lhs, 0).T, rhs), jnp.arange(shape.groups))
            of = lambda g: multiply(lhs, rhs[g].T if shape.pass_ == "lhs" else rhs[g])
            out = jax.eval_shape(of, 0)
            step = lambda g, sum_: jnp.where(inside(g), of(g), sum_)
            return lax.fori_loop(0, shape.groups, step, jnp.zeros(out.shape, out.dtype))

        return self._formula(product)

    def builders(self, shape):
        plain = sides.Task(self.dtype, self.precision, self.activation, self.gated)
        dense, even = shape.dense(), shape.dense(shape.groups)

        def of_even_groups(operands, in_program):
            stored = plain.operand_shapes(even)
            split = [tuple(x.reshape(shape) for x, shape in zip(xs, stored)) for xs in operands]
            return sides.jax_programs(plain.functions(even)[sides.XLA], split, in_program)

        out = super().builders(shape) | {sides.DENSE: plain.alone(dense, sides.OURS)}
        return out | ({} if shape.m % shape.groups else {sides.EVEN: of_even_groups})


def peers(task):
    """As ``sides.peers``."""
    if task.gated:
        why = "no gated products"
    elif task.dtype == "int8":
        why = "floating-point products only"
    elif not (why := sides.why_absent("tokamax")):
        return {"tokamax": functools.partial(_tokamax_programs, task)}, {}
    return {}, {"tokamax": why}


# Rows of a tile, stages, whether CTAs are persistent, which dimension tiles follow and the width of a panel: what
# tokamax's tables have for training on an H100, and tiles of as few rows as Hopper's kernels allow.
_TOKAMAX = (128, 4, True, 1, 4), (128, 4, True, 1, 8), (128, 4, True, 0, 1), (64, 4, False, 0, 1)


def _tokamax_programs(task, shape, operands, in_program):
    """Programs of the fastest among some configurations: without a table of the GPU it takes one for few rows."""
    import tokamax
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu, pallas_mosaic_gpu_common

    ((lhs,), (rhs,)), _ = shape.dimension_numbers().dot_dimension_numbers
    numbers = lax.RaggedDotDimensionNumbers((([lhs], [rhs]), ([], [])), [0], [] if shape.pass_ == "rhs" else [0])

    def of(rows, stages, persistent, along, width):
        config = pallas_mosaic_gpu_common.Config(
            block_m=rows,
            block_n=64,
            block_k=128,
            num_stages=stages,
            split_k=1,
            persistent=persistent,
            grid_minor_dim=pallas_mosaic_gpu_common.MatmulDimension(along),
            grid_tile_width=width,
        )
        op = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config)
        call = functools.partial(tokamax.ragged_dot_general, precision=task.precision, implementation=(op,))
        return sides.jax_programs(lambda x, y, sizes: call(x, y, sizes, numbers), operands, in_program)

    return sides.fastest(of(*configuration) for configuration in _TOKAMAX)
