"""The products that tools measure, from CSV files or named sets."""

import argparse
import csv
import dataclasses
import itertools
import keyword
import random
from typing import Any, ClassVar

import jax.numpy as jnp

from jax_streamk.plan.problem import TYPES

_FLAG = {"0": False, "1": True}


@dataclasses.dataclass(frozen=True)
class Shape:
    """``D[m,n] = A[m,k] @ B[k,n]``, ``batch`` times, row-major; A is stored (k, m) if trans_a, B (n, k) if trans_b.

    ``COLUMNS`` are those of a file: the value of an empty cell (None: it must not be empty), and what values may be
    there (None: positive integers).
    """

    COLUMNS: ClassVar[dict[str, tuple[str | None, dict[str, Any] | None]]] = dict(
        m=(None, None), n=(None, None), k=(None, None), trans_a=("0", _FLAG), trans_b=("0", _FLAG), batch=("1", None)
    )

    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False
    batch: int = 1
    source: str = ""

    def stored(self):
        """The shapes of A and B as stored, with a leading batch dimension if ``batch`` is more than 1."""
        lead = (self.batch,) if self.batch > 1 else ()
        a = (self.k, self.m) if self.trans_a else (self.m, self.k)
        b = (self.n, self.k) if self.trans_b else (self.k, self.n)
        return lead + a, lead + b

    def dimension_numbers(self):
        """The dimension numbers of the product as a ``lax.dot_general``."""
        batch = tuple(range(self.batch > 1))
        return (((len(batch) + (not self.trans_a),), (len(batch) + self.trans_b,)), (batch, batch))

    def __str__(self):
        text = f"{self.batch} x " * (self.batch > 1) + f"{self.m} x {self.n} x {self.k}"
        return text + " A^T" * self.trans_a + " B^T" * self.trans_b


def read(path, column_major=False, kind=Shape):
    """The shapes of a CSV file with a header, in its order, without duplicates.

    Args:
      path: a file with the columns m, n and k, and optionally trans_a and trans_b (0 or 1), batch and source, in upper
        or lower case, separated by commas, semicolons or tabs. Other columns are ignored.
      column_major: whether the file's operands are column-major, as in BLAS and DeepBench: m and n, and trans_a and
        trans_b, are exchanged.
      kind: ``Shape``, or a subclass with columns of its own.

    Returns:
      A list of ``kind``.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a file; the message names path and line.
    """
    shapes: dict[Shape, Shape] = {}
    needed = [name for name, (default, _) in kind.COLUMNS.items() if default is None]
    with open(path, newline="", encoding="utf-8-sig") as file:
        line = 0
        try:
            header = file.readline()
            rows = csv.DictReader(
                itertools.chain([header], file), delimiter=max(",;\t", key=header.count), skipinitialspace=True
            )
            names = [name.strip().lower() for name in rows.fieldnames or ()]
            if twice := [
                name for name in dict.fromkeys(names) if name in (*kind.COLUMNS, "source") and names.count(name) > 1
            ]:
                raise ValueError(f"{path}:1: the header has column {', '.join(twice)} more than once")
            missing = [name for name in needed if name not in names]
            if missing:
                must = f"{', '.join(needed[:-1])} and {needed[-1]}"
                raise ValueError(
                    f"{path}:1: the header has no column {', '.join(missing)}; it must have {must}, and has {names}"
                )
            rows.fieldnames = names
            for row in rows:
                line = rows.line_num
                shape = _shape(f"{path}:{line}", row, kind)
                if column_major:
                    shape = dataclasses.replace(
                        shape, m=shape.n, n=shape.m, trans_a=shape.trans_b, trans_b=shape.trans_a
                    )
                shapes.setdefault(dataclasses.replace(shape, source=""), shape)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{line + 1}: not a CSV file: {error}") from None
    if not shapes:
        raise ValueError(f"{path}: it has no shapes")
    return list(shapes.values())


def _shape(where, row, kind):
    values: dict[str, Any] = {}
    for name, (default, choices) in kind.COLUMNS.items():
        text = row.get(name) or default
        value = _integer(text) if choices is None else choices.get(text.strip())
        if value is None:
            allowed = "an integer from 1 to 2^31 - 1" if choices is None else " or ".join(choices)
            raise ValueError(f"{where}: {name} is {'missing' if text is None else repr(text)}; it must be {allowed}")
        values[name + "_" * keyword.iskeyword(name)] = value
    return kind(**values, source=row.get("source") or "")


def _integer(text):
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if 0 < value < 2**31 else None


# (hidden, heads, key and value heads, head size, intermediate), as published in each model's configuration.
_MODELS = {
    "Llama-3.1-8B": (4096, 32, 8, 128, 14336),
    "Llama-3.1-70B": (8192, 64, 8, 128, 28672),
    "Llama-2-13B": (5120, 40, 40, 128, 13824),
    "Mistral-Nemo-12B": (5120, 32, 8, 128, 14336),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944),
    "Qwen2.5-32B": (5120, 40, 8, 128, 27648),
    "Gemma-2-9B": (3584, 16, 8, 256, 14336),
    "Phi-3-mini": (3072, 32, 32, 96, 8192),
}


def _decode_llm():
    """Every weight of a layer, on one GPU or split over four, times the hidden states of a decoding batch."""
    for (model, sizes), ways in itertools.product(_MODELS.items(), (1, 4)):
        hidden, heads, kv_heads, head, intermediate = sizes
        weights = [
            ((heads + 2 * kv_heads) * head // ways, hidden),
            (hidden, heads * head // ways),
            (2 * intermediate // ways, hidden),
            (hidden, intermediate // ways),
        ]
        for (n, k), m in itertools.product(weights, (1, 2, 4, 8, 16, 32, 64, 128, 200)):
            yield Shape(m, n, k, source=model)


def _deepbench_train():
    """DeepBench's training set: recurrent and output layers, forward, with transposed weights, and weight gradients."""
    layers = [(batch, h, h) for h in (1760, 2048, 2560, 4096) for batch in (16, 32, 64, 128, 7000)]
    layers += [(batch, n, h) for h in (1760, 2048, 2560, 4096) for batch, n in ((9124, 5124), (8457, 35))]
    layers += [(batch, 3 * h, h) for h in (1024, 2560) for batch in (16, 32, 64, 128)]
    layers += [(batch, 3 * h, h) for h in (1536, 2048, 2816) for batch in (16, 32)]
    layers += [(batch, 3 * h, h) for h in (1024, 1536, 2048, 2560, 2816) for batch in (24000, 48000)]
    layers += [(batch, n, h) for h in (1536, 2048, 2560, 2816) for batch in (24000, 48000) for n in (512, 1024)]
    layers += [(batch, n, 500000) for batch in (8, 16) for n in (512, 1024)] + [(700, 1024, 512)]
    for (m, n, k), trans_b in itertools.product(layers, (False, True)):
        yield Shape(m, n, k, trans_b=trans_b, source="layer")
    for n, batch, k in [(h, 7133, h) for h in (1760, 2048, 2560, 4096)] + [(3072, 7435, 1024), (7680, 5481, 2560)]:
        yield Shape(batch, n, k, trans_a=True, source="gradient")
    for m, n in itertools.product((16, 32), (512, 1024)):
        yield Shape(m, n, 512, source="output")
        yield Shape(m, n, 512, trans_a=True, source="output")


def _streamk_sample():
    """256 draws, log-uniform in [128, 8192] per extent; in three quarters all extents are multiples of 8."""
    rng = random.Random(2023)
    for i in range(256):
        unit, source = (1, "any") if i % 4 == 3 else (8, "aligned")
        m, n, k = (unit * round(128 * 64 ** rng.random() / unit) for _ in range(3))
        yield Shape(m, n, k, source=source)


def _strong_scaling():
    """64 draws of small results with a long K."""
    rng = random.Random(2024)

    def extent(low, high):
        size = 2 ** rng.randint(low, high)
        return size + rng.choice((0, 0, 8, size // 8))

    for _ in range(64):
        yield Shape(extent(4, 10), extent(6, 10), 2 ** rng.randint(12, 17), source="small output, long K")


def _weights():
    """Matrices of decoders that are often quantized, stored (k, n) and (n, k), by 1 to 256 rows."""
    small = [(4096, 12288), (4096, 4096), (4096, 21504), (10752, 4096), (5120, 15360), (2048, 6144)]
    large = [(8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)]
    for (k, n), trans_b, m in itertools.product(small + large, (False, True), (1, 4, 16, 64, 256)):
        yield Shape(m, n, k, trans_b=trans_b)


SETS = {
    "decode_llm": _decode_llm,
    "deepbench_train": _deepbench_train,
    "streamk_sample": _streamk_sample,
    "strong_scaling": _strong_scaling,
    "weights": _weights,
}


def named(name):
    """The shapes of a set in ``SETS``, in a fixed order, without duplicates.

    Raises:
      ValueError: there is no such set.
    """
    if name not in SETS:
        raise ValueError(f"no set {name!r}; there are {', '.join(SETS)}")
    return list({dataclasses.replace(shape, source=""): shape for shape in reversed(list(SETS[name]()))}.values())[::-1]


def sample(shapes, count):
    """At most ``count`` shapes, always the same, in their order: one from each of ``count`` equal parts.

    Sets are periodic, for example in the batch size: with a fixed step all shapes might have the same one.
    """
    rng, count = random.Random(0), min(count, len(shapes))
    bounds = [i * len(shapes) // count for i in range(count + 1)]
    return [shapes[rng.randrange(begin, end)] for begin, end in itertools.pairwise(bounds)]


def positive(text):
    """Parses a positive integer, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def not_negative(text):
    """Parses a time that is 0 or more, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of 0 or more")
    return value


def dtype(text):
    """Parses a dtype by its name in jax.numpy or the short one that plans print, for argparse; returns the former."""
    names = {type_.name: known.name for known, type_ in TYPES.items()}
    try:
        return jnp.dtype(names.get(text, text)).name
    except TypeError:
        known = ", ".join(f"{name} ({short})" for short, name in names.items())
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: {known} or another one of jax.numpy") from None


def result_dtype(operands):
    """The dtype of a result for which none is named, which JAX's choice for eight bits is not; None: that choice."""
    return "int32" if operands == "int8" else "bfloat16" if operands.startswith("float8") else None


def add_arguments(parser):
    """Adds the arguments that ``chosen`` reads; returns the exclusive group, to which a command may add its own."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "file",
        nargs="?",
        metavar="FILE.csv",
        help="columns m, n, k and optionally trans_a, trans_b, batch, source, as in examples/shapes.csv",
    )
    what.add_argument(
        "--set", choices=SETS, metavar="SET", help=f"shapes that come with the library: {', '.join(SETS)}"
    )
    parser.add_argument(
        "--column-major", action="store_true", help="the file's operands are column-major, as DeepBench's are"
    )
    parser.add_argument(
        "--sample", type=positive, metavar="N", help="only N of the shapes, one from each of N equal parts"
    )
    return what


def chosen(arguments):
    """The shapes that a command line asks for. Raises as ``read`` does."""
    shapes = named(arguments.set) if arguments.set else read(arguments.file, arguments.column_major)
    return sample(shapes, arguments.sample) if arguments.sample else shapes
