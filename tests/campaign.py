"""Random products and programs of ours beside JAX's, both against float64; and the bits of rows in other batches.

python tests/campaign.py products --count 1000
python tests/campaign.py programs --count 200
python tests/campaign.py invariance --count 100
python tests/campaign.py programs --seed 123456    # one case again

A case is made of its seed. The error of ours may be twice that of XLA's on the same operands, or four times at the end
of a program, where each had errors of its own on the way. In ``invariance`` any number of rows of a batch-invariant
product, at any place, must have the bits that they have among all. Prints the text of each failure with its seed, then
how many there were, and ends with 1 if there was one.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_streamk as sk
from jax_streamk import DataParallel, SplitK, StreamK
from jax_streamk.quantized import VALUES, is_quantized

EXTENTS = [1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 33, 63, 64, 65, 100, 127, 128, 130, 200]
DEPTHS = [*EXTENTS, 256, 384, 512, 1000, 1025]
ACTIVATIONS = ["relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"]
SCHEDULES = [DataParallel(), SplitK(2), SplitK(3), SplitK(7, "separate"), StreamK(), StreamK(max_sms=2)]
EPS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22}
DTYPES = ["bfloat16", *EPS]


@dataclasses.dataclass
class Case:
    """Functions of the same operands: ours, and JAX's, which computes in the operands' dtype, whatever that is."""

    text: str
    ours: Callable[..., Any]
    jaxs: Callable[..., Any]
    operands: list[Any]
    dtype: str
    most: float = 2  # how many times XLA's error ours may be


class Draw(random.Random):
    """Random numbers, and arrays of them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.numpy = np.random.default_rng(seed)

    def maybe(self, values, odds=0.5):
        """One of these, or None."""
        return self.choice(values) if self.random() < odds else None

    def array(self, shape, dtype, scale=1.0):
        return jnp.asarray(self.numpy.normal(size=shape) * scale, dtype)

    def weights(self, shape, dtype):
        """A matrix (..., k, n), or numbers with scales for whole columns or groups along k."""
        if self.random() < 0.7:
            return self.array(shape, dtype, shape[-2] ** -0.5)
        return self.quantized(shape, dtype)

    def quantized(self, shape, dtype):
        *lead, k, _ = shape
        group = self.choice([k, *(x for x in (16, 32, 64, 128) if k % x == 0)])
        w = self.array(shape, dtype, k**-0.5)
        return sk.quantize(w, self.choice(VALUES), block=(*[1] * len(lead), group, 1))

    def groups(self, count, total):
        """Sizes of groups that have at most ``total`` rows."""
        return jnp.asarray(np.diff([0, *sorted(self.randint(0, total) for _ in range(count))]), jnp.int32)

    def permutation(self, count):
        return self.sample(range(count), count)


def activated(name, x):
    if name is None:
        return x
    return jax.nn.gelu(x, approximate=False) if name == "gelu" else getattr(jax.nn, name.removesuffix("_tanh"))(x)


def wide(x, rounds=False):
    """The dtype of sums that a kernel has before its epilogue; of products that are rounded first, theirs."""
    return x.dtype if rounds else jnp.promote_types(x.dtype, jnp.float32)


def fitting(w, like):
    """A matrix, or what numbers stand for, in the dtype of an operand."""
    return w.dequantize(like.dtype) if is_quantized(w) else w


# Products


def product(seed):
    """One product of any kind, plain, batched, or its derivatives."""
    draw = Draw(seed)
    dtype = draw.choice(DTYPES)
    text, ours, jaxs, operands = draw.choice([dense, dense, linear, gated, ragged, ragged_gated])(draw, dtype)
    schedule = draw.maybe(SCHEDULES, 0.4)
    ours = functools.partial(ours, schedule=schedule)
    how = draw.choice(["plain", "plain", "grad", "vmap"])
    floating = [at for at, x in enumerate(operands) if not is_quantized(x) and jnp.issubdtype(x.dtype, jnp.floating)]
    if how == "grad":
        jaxs = functools.partial(jaxs, rounds=True)
        ours, jaxs = (jax.grad(functools.partial(total, f), floating) for f in (ours, jaxs))
    if how == "vmap":
        at = draw.choice(floating)
        axes = [None] * len(operands)
        axes[at] = draw.randint(0, operands[at].ndim)
        operands[at] = jnp.stack([operands[at], operands[at] / 2, -operands[at]], axes[at])
        ours, jaxs = jax.vmap(ours, axes), functools.partial(one_by_one, jaxs, axes)
    shapes = ", ".join(str(x) if is_quantized(x) else f"{x.dtype}{[*x.shape]}" for x in operands)
    return Case(f"{text} of {shapes}, {how}, {schedule}", ours, jaxs, operands, dtype)


def total(f, *operands):
    """A weighted sum of results: its derivatives do not depend on how these are rounded."""
    out = f(*operands)
    return jnp.sum(out.astype(wide(out)) * jnp.cos(jnp.arange(out.size)).astype(wide(out)).reshape(out.shape))


def one_by_one(f, axes, *operands):
    """``vmap`` of a function, also where JAX has none of a ragged product."""
    take = lambda i: [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(operands, axes)]
    return jnp.stack([f(*take(i)) for i in range(3)])


def dense(draw, dtype):
    """``dot_general`` of dimensions in any order, or ``einsum``: batch, contracted, and free ones of lhs and rhs."""
    counts = [draw.choice(of) for of in ([0, 0, 1, 2], [1, 1, 2], [0, 1, 1, 2], [0, 1, 1, 2])]
    is_small = max(counts) > 1 or counts[0] > 0
    sizes = [
        [draw.choice(EXTENTS[:11] if is_small else whole) for _ in range(count)]
        for count, whole in zip(counts, ([1], DEPTHS, EXTENTS, EXTENTS))
    ]
    letters = iter("abcdefgh")
    names = ["".join(next(letters) for _ in of) for of in sizes]
    size = dict(zip("".join(names), itertools.chain(*sizes)))
    lhs, rhs = (
        "".join(x[i] for i in draw.permutation(len(x))) for x in (names[0] + names[1] + names[i] for i in (2, 3))
    )
    operands = [draw.array([size[x] for x in of], dtype) for of in (lhs, rhs)]
    out = draw.choice([dtype, dtype, "float32"])
    if draw.random() < 0.3:
        result = names[0] + names[2] + names[3]
        text = f"{lhs},{rhs}->{''.join(result[i] for i in draw.permutation(len(result)))}"

        def jaxs(x, y, einsum=jnp.einsum, rounds=False, **how):
            return einsum(text, x, y, preferred_element_type=jnp.promote_types(x.dtype, out), **how)

        return f"einsum {text} to {out}", functools.partial(jaxs, einsum=sk.einsum), jaxs, operands
    numbers = tuple(tuple(tuple(x.index(i) for i in of) for x in (lhs, rhs)) for of in (names[1], names[0]))

    def general(x, y, dot_general=lax.dot_general, rounds=False, **how):
        return dot_general(x, y, numbers, preferred_element_type=jnp.promote_types(x.dtype, out), **how)

    return f"dot_general {numbers} to {out}", functools.partial(general, dot_general=sk.dot_general), general, operands


def linear(draw, dtype):
    """``linear`` with any epilogue, by a matrix or numbers."""
    *lead, n = [draw.choice(EXTENTS) for _ in range(draw.choice([1, 2, 2]))]
    k = draw.choice(DEPTHS)
    activation, alpha, beta = draw.maybe(ACTIVATIONS), draw.choice([1, 1, 0.5, -2]), draw.choice([1, 1, 0.25])
    given = dict(bias=(n,), residual=(*lead, n))
    given = {name: draw.array(shape, dtype) for name, shape in given.items() if draw.random() < 0.5}
    operands = [draw.array((*lead, k), dtype), draw.weights((k, n), dtype), *given.values()]

    def ours(x, w, *others, schedule):
        given_ = dict(zip(given, others))
        return sk.linear(x, w, **given_, activation=activation, alpha=alpha, beta=beta, schedule=schedule)

    def jaxs(x, w, *others, rounds=False):
        out = alpha * jnp.matmul(x, fitting(w, x), preferred_element_type=wide(x, rounds))
        for name, y in zip(given, others):
            out = out + (beta * y.astype(out.dtype) if name == "residual" else y.astype(out.dtype))
        return activated(activation, out).astype(x.dtype)

    return f"linear, {activation}, alpha {alpha}, beta {beta}, {[*given]}", ours, jaxs, operands


def gated(draw, dtype):
    m, n, k = draw.choice(EXTENTS), draw.choice(EXTENTS), draw.choice(DEPTHS)
    activation = draw.maybe(ACTIVATIONS, 0.8)
    make = draw.array if draw.random() < 0.7 else draw.quantized
    operands = [draw.array((m, k), dtype), *(make((k, n), dtype) for _ in range(2))]

    def ours(x, gate, up, schedule):
        return sk.gated_linear(x, gate, up, activation=activation, schedule=schedule)

    def jaxs(x, gate, up, rounds=False):
        gate, up = (jnp.matmul(x, fitting(w, x), preferred_element_type=wide(x, rounds)) for w in (gate, up))
        return (activated(activation, gate) * up).astype(x.dtype)

    return f"gated_linear, {activation}", ours, jaxs, operands


def of_groups(draw, dtype, matrices):
    groups, m, n, k = draw.choice([1, 2, 5]), draw.choice(EXTENTS), draw.choice(EXTENTS), draw.choice(DEPTHS)
    make = draw.array if draw.random() < 0.7 else draw.quantized
    weights = [make((groups, k, n), dtype) for _ in range(matrices)]
    return [draw.array((m, k), dtype), *weights, draw.groups(groups, m)]


def by_group(x, w, sizes, rounds):
    return lax.ragged_dot(x, fitting(w, x), sizes, preferred_element_type=wide(x, rounds))


def ragged(draw, dtype):
    """``ragged_dot``, its rows gathered or not."""
    x, *others = of_groups(draw, dtype, 1)
    rows = draw.maybe([jnp.asarray(draw.numpy.integers(0, x.shape[0], x.shape[0]), jnp.int32)], 0.3)

    def ours(x, w, sizes, schedule):
        return sk.ragged_dot(x, w, sizes, lhs_indices=rows, schedule=schedule)

    def jaxs(x, w, sizes, rounds=False):
        return by_group(x if rows is None else x[rows], w, sizes, rounds).astype(x.dtype)

    return f"ragged_dot{' of gathered rows' * (rows is not None)}", ours, jaxs, [x, *others]


def ragged_gated(draw, dtype):
    activation = draw.maybe(ACTIVATIONS, 0.8)

    def ours(x, gate, up, sizes, schedule):
        return sk.ragged_gated(x, gate, up, sizes, activation=activation, schedule=schedule)

    def jaxs(x, gate, up, sizes, rounds=False):
        gate, up = (by_group(x, w, sizes, rounds) for w in (gate, up))
        return (activated(activation, gate) * up).astype(x.dtype)

    return f"ragged_gated, {activation}", ours, jaxs, of_groups(draw, dtype, 2)


# Programs: functions of a matrix of rows and of weights. Each step_...() adds a step, which may change the width.


class Program:
    """Steps, functions of (rows, weights, the rows before each step), and the weights that they take."""

    def __init__(self, draw, dtype, rows, width):
        self.draw, self.dtype, self.rows, self.width = draw, dtype, rows, width
        self.steps, self.words, self.weights = [], [], []

    def weight(self, shape, kinds=("array", "array", "quantized")):
        if self.draw.choice(kinds) == "quantized":
            self.weights.append(self.draw.quantized(shape, self.dtype))
        else:
            self.weights.append(self.draw.array(shape, self.dtype, shape[-2:][0] ** -0.5))
        return len(self.weights) - 1

    def add(self, word, step):
        self.words.append(word)
        self.steps.append(step)

    def run(self, x, weights):
        kept = [x]
        for step in self.steps:
            x = step(x, weights, kept)
            kept.append(x)
        return x


def times(x, w, how):
    w = fitting(w, x)
    if how == "@":
        return x @ w
    if how == "T":
        return x @ w.T
    if how == "f32":
        return jnp.matmul(x, w, preferred_element_type=wide(x)).astype(x.dtype)
    return lax.dot_general(w, x, (((0,), (x.ndim - 1,)), ((), ()))).T


def step_product(p):
    width, how = p.draw.choice(EXTENTS[6:]), p.draw.choice(["@", "@", "T", "f32", "turned"])
    at = p.weight((width, p.width) if how == "T" else (p.width, width))
    p.width = width
    p.add(f"{how} {width}", lambda x, weights, kept: times(x, weights[at], how))


def step_bias(p):
    at = p.weight((p.width,), ("array",))
    p.add("bias", lambda x, weights, kept: x + weights[at])


def step_activation(p):
    name = p.draw.choice(ACTIVATIONS)
    p.add(name, lambda x, weights, kept: activated(name, x))


def step_scale(p):
    by = p.draw.choice([0.5, -1.0, 3.0, 0.3])
    p.add(f"* {by}", lambda x, weights, kept: x * by)


def step_earlier(p):
    """Adds the first rows of the same shape, or multiplies by the last ones before these."""
    multiplies = p.draw.random() < 0.3

    def step(x, weights, kept):
        same = [y for y in kept[:-1] if y.shape == x.shape]
        if not same:
            return x
        return x * same[-1] if multiplies else x + same[0]

    p.add("* earlier" if multiplies else "+ earlier", step)


def step_norm(p):
    def step(x, weights, kept):
        y = x.astype(wide(x))
        return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    p.add("norm", step)


def step_gate(p):
    width, name = p.draw.choice(EXTENTS[6:]), p.draw.choice(ACTIVATIONS)
    gate, up = (p.weight((p.width, width)) for _ in range(2))
    p.width = width
    p.add(
        f"{name} gate {width}",
        lambda x, weights, kept: activated(name, times(x, weights[gate], "@")) * times(x, weights[up], "@"),
    )


def step_halves(p):
    if p.width % 2 == 0:
        p.width //= 2
        p.add("halves", lambda x, weights, kept: x[:, : x.shape[1] // 2] * jax.nn.sigmoid(x[:, x.shape[1] // 2 :]))


def step_attention(p):
    """Rows attend to rows, by heads where the width has some."""
    heads = p.draw.choice([1, *(h for h in (2, 4) if p.width % h == 0)])
    at = [p.weight((p.width, p.width), ("array",)) for _ in range(3)]

    def step(x, weights, kept):
        q, k, v = (times(x, weights[i], "@").reshape(len(x), heads, -1) for i in at)
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=wide(x)) * (x.shape[1] // heads) ** -0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)

    p.add(f"attention {heads}", step)


def step_scan(p):
    """Layers of a loop, each with its own weights."""
    layers = p.draw.choice([1, 2, 3])
    at, name = p.weight((layers, p.width, p.width), ("array",)), p.draw.choice(ACTIVATIONS)
    remat = jax.checkpoint if p.draw.random() < 0.3 else lambda f: f
    layer = remat(lambda x, w: (x + activated(name, x @ w) * 0.3, None))
    p.add(f"scan {layers} {name}", lambda x, weights, kept: lax.scan(layer, x, weights[at])[0])


def step_vmap(p):
    width = p.draw.choice(EXTENTS[6:])
    at = p.weight((p.width, width), ("array",))
    p.width = width
    p.add(f"vmap {width}", lambda x, weights, kept: jax.vmap(lambda row: jnp.tanh(row @ weights[at]))(x))


def step_cond(p):
    at = p.weight((p.width, p.width), ("array",))
    p.add("cond", lambda x, weights, kept: lax.cond(x[0, 0] < 100, lambda y: y @ weights[at], lambda y: y, x))


def step_cast(p):
    p.add("f32 and back", lambda x, weights, kept: (x.astype(wide(x)) * 1.5).astype(x.dtype))


STEPS = [step_product] * 5 + [step_bias, step_activation] * 2 + [
    step_scale, step_earlier, step_earlier, step_norm, step_gate, step_halves, step_attention, step_scan, step_vmap,
    step_cond, step_cast,
]  # fmt: skip


def program(seed):
    """A program as users write it, under ``accelerate``, or the gradient of one."""
    draw = Draw(seed)
    dtype = draw.choice(DTYPES)
    p = Program(draw, dtype, draw.choice(EXTENTS), draw.choice(EXTENTS[6:]))
    x = draw.array((p.rows, p.width), dtype)
    step_product(p)
    for _ in range(draw.randint(1, 9)):
        draw.choice(STEPS)(p)
    f = p.run
    how = draw.choice(["", "", ", grad"])
    if how:
        moving = [at for at, w in enumerate(p.weights) if not is_quantized(w)]

        def f(x, weights):
            def total(x, some):
                return jnp.mean(jnp.square(p.run(x, [some.get(at, w) for at, w in enumerate(weights)]).astype(wide(x))))

            return jax.grad(total, (0, 1))(x, {at: weights[at] for at in moving})

    schedule = draw.maybe([None, *SCHEDULES], 0.3)
    ours = sk.accelerate(f) if schedule is None else sk.accelerate(f, schedule=schedule)
    text = f"{dtype}{[p.rows, x.shape[1]]}: {', '.join(p.words)}{how}, {schedule}"
    return Case(text, ours, f, [x, p.weights], dtype, most=4)


# Rows of batch-invariant products


@dataclasses.dataclass
class Rows:
    """A function of a matrix of rows, whose results are rows, too."""

    text: str
    of: Callable[[Any], Any]
    matrix: Any
    draw: Draw


def rows(seed):
    """A product of any kind by matrices of many sizes, of as many rows as a batch may have."""
    draw = Draw(seed)
    on_gpu = jax.default_backend() == "gpu"
    dtype, many = draw.choice(DTYPES), draw.choice([1024, 1024, 8192]) if on_gpu else 300
    most = 4096 if on_gpu else 400
    sizes = [size for size in SIZES if size <= most]
    n, k = draw.choice([*sizes, draw.randint(1, most)]), draw.choice([*sizes, draw.randint(1, 2 * most)])
    kind = draw.choice(["matmul", "matmul", "linear", "gated", "ragged", "quantized"])
    out = draw.choice([dtype, "float32"])
    if kind == "quantized":
        k = max(k // 128 * 128, 128)
    (x_turned, w_turned), activation = (draw.random() < 0.3 for _ in range(2)), draw.maybe(ACTIVATIONS)
    x, w, up = (draw.array(shape, dtype, k**-0.5) for shape in ((many, k), (k, n), (k, n)))
    bias, how = draw.array((n,), dtype), dict(schedule=sk.Auto(batch_invariant=True))
    given = dict(matmul=w, quantized=draw.quantized((k, n), dtype) if kind == "quantized" else w)
    turned = lambda a: lax.optimization_barrier(a.mT).mT  # as another layout

    def of(x):
        x = turned(x) if x_turned else x
        if kind == "linear":
            return sk.linear(x, turned(w) if w_turned else w, bias, activation=activation, **how)
        if kind == "gated":
            return sk.gated_linear(x, w, up, activation=activation, **how)
        if kind == "ragged":  # one expert has some rows, and another the rest
            sizes = jnp.array([0, x.shape[0] // 3, 0, x.shape[0] - x.shape[0] // 3], jnp.int32)
            return sk.ragged_dot(x, jnp.stack([up, w, up, w]), sizes, **how)
        if kind == "quantized":
            return sk.matmul(x, given[kind], **how)
        return sk.matmul(x, turned(w) if w_turned else w, preferred_element_type=jnp.promote_types(dtype, out), **how)

    text = f"{kind} of {dtype}{[many, k]} by {[k, n]}, {x_turned=}, {w_turned=}, {activation}, {out}"
    return Rows(text, of, x, draw)


SIZES = [64, 100, 129, 256, 384, 1000, 1024, 1536, 2048, 4096]
COUNTS = [1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 100, 128, 129, 257, 1000, 1024, 4096, 8192]


def changed(case):
    """Which rows have other bits among fewer; None if none have."""
    matrix, of = case.matrix, jax.jit(case.of)
    whole = np.asarray(of(matrix)).view(np.uint8)
    for count in (count for count in COUNTS if count <= len(matrix)):
        first = case.draw.randint(0, len(matrix) - count)
        part = np.asarray(of(matrix[first : first + count])).view(np.uint8)
        if not np.array_equal(part, whole[first : first + count]):
            return f"{count} rows from {first} on have other bits than among {len(matrix)}"
    return None


# Judging


def failure(case, slack=1):
    """What is wrong with ours, None if nothing is; errors may be ``slack`` times as large as a case says."""
    want = [np.asarray(x) for x in jax.tree.leaves(exact(case))]
    got = jax.tree.leaves(jax.jit(case.ours)(*case.operands))
    try:
        xlas = jax.block_until_ready(jax.tree.leaves(jax.jit(case.jaxs)(*case.operands)))
    except jax.errors.JaxRuntimeError:  # XLA has no such product on this platform
        return None
    for at, (x, y, z) in enumerate(zip(got, xlas, want, strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"result {at} is {x.dtype}{[*x.shape]} instead of {y.dtype}{[*y.shape]}"
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return f"result {at} is finite in other places"
        good = np.isfinite(y) & np.isfinite(z)
        rms = lambda a, good=good: np.sqrt(np.mean(np.square(a[good]))) if good.any() else 0.0
        mine, theirs, least = rms(x - z), rms(y - z), EPS[case.dtype] * rms(z)
        if mine > slack * (case.most * theirs + least):
            return f"result {at} has an error of {mine:.2e}, XLA's of {theirs:.2e}, of {rms(z):.2e}"
    return None


def exact(case):
    with jax.enable_x64(True):
        of = lambda x: x.dequantize(jnp.float32).astype(jnp.float64) if is_quantized(x) else x
        wider = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        operands = jax.tree.map(lambda x: wider(of(x)), case.operands, is_leaf=is_quantized)
        return jax.jit(case.jaxs)(*operands)


KINDS = {"products": product, "programs": program, "invariance": rows}


def failed(kind, seed, slack=1):
    """The text of a failure of a case; None if it is right, or its schedule is refused."""
    case = KINDS[kind](seed)
    try:
        why = changed(case) if isinstance(case, Rows) else failure(case, slack)
    except ValueError as error:
        if "schedule=" in str(error) and kind != "invariance":
            return None
        why = f"ValueError: {error}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return why and f"{kind} --seed {seed}: {case.text}: {why}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--seed", type=int, help="of one case; without it they are new each time")
    arguments = parser.parse_args()
    seeds = [random.randrange(2**32) for _ in range(arguments.count)] if arguments.seed is None else [arguments.seed]
    started, done, failures = time.monotonic(), 0, 0
    for seed in seeds:
        if time.monotonic() - started > 60 * arguments.minutes:
            break
        done += 1
        if (why := failed(arguments.kind, seed)) is not None:
            failures += 1
            print(why, flush=True)
    print(f"{done} {arguments.kind}, {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
