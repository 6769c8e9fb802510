"""Products of every kind over two devices, GPUs if there are two: values, shardings, collectives and memory as XLA's.

    python tests/test_several_devices.py 600

multiplies for 600 seconds: results keep their bits, and the devices' memory stays as it is.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import assert_as_exact, collectives, compiled, in_float64

import jax_streamk as sk

DEVICES = (jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu"))[:2]
ON_GPUS = DEVICES[0].platform == "gpu"
MESH = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=DEVICES)
EXTENTS = dict(b=4, m=520, n=768, k=1056, g=6)
SIZES = np.array([100, 0, 7, 300, 40, 60], np.int32)


def gated(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def three(x, q, k, v):
    return x @ q, x @ k, x @ v


def quantized(w):
    return sk.quantize(lax.stop_gradient(w).astype(np.float32), jnp.int4, block=(16, 1))


def float8(x, block):
    return sk.quantize(lax.stop_gradient(x).astype(np.float32), jnp.float8_e4m3fn, block=block)


def by_float8(product):
    """Of rows with a scale each and of columns with a scale each, whose derivatives are those of their scales."""

    def of(x, w):
        x, w = float8(x, (1, None)), float8(w, (*[1] * (w.ndim - 2), None, 1))
        return product(x, w)

    return of


# The extents of each operand by letters, ours and XLA's.
PRODUCTS = {
    "matmul": ("bmk bkn", sk.matmul, jnp.matmul),
    "transposed": ("mk nk", lambda x, w: sk.matmul(x, w.T), lambda x, w: x @ w.T),
    "linear": (
        "mk kn n mn",
        lambda x, w, bias, y: sk.linear(x, w, bias, residual=y, activation="gelu"),
        lambda x, w, bias, y: jax.nn.gelu(x @ w + y + bias, approximate=False),
    ),
    "gated": ("mk kn kn", lambda *xs: sk.gated_linear(*xs, activation="silu"), gated),
    "ragged": ("mk gkn", lambda x, w: sk.ragged_dot(x, w, SIZES), lambda x, w: lax.ragged_dot(x, w, SIZES)),
    "joined": ("mk kn kn kn", sk.accelerate(three), three),
    "float8": ("mk kn", by_float8(sk.matmul), by_float8(lambda x, w: x.dequantize() @ w.dequantize())),
    "float8_groups": (
        "mk gkn",
        by_float8(lambda x, w: sk.ragged_dot(x, w, SIZES)),
        by_float8(lambda x, w: lax.ragged_dot(x.dequantize(), w.dequantize(), SIZES)),
    ),
    "int4": ("mk kn", lambda x, w: sk.matmul(x, quantized(w)), lambda x, w: x @ quantized(w).dequantize()),
}


def normal(letters, seed=0):
    x = np.random.default_rng([seed, len(letters)]).standard_normal([EXTENTS[letter] for letter in letters])
    return x.astype(np.float32) / (EXTENTS["k"] ** 0.5 if "kn" in letters or "nk" in letters else 1)


def operands(name, division):
    """The operands of a product, divided along the extent ``division``."""
    put = lambda letters, seed: jax.device_put(
        normal(letters, seed), NamedSharding(MESH, P(*("x" if letter == division else None for letter in letters)))
    )
    return [put(letters, seed) for seed, letters in enumerate(PRODUCTS[name][0].split())]


def with_gradients(function):
    loss = lambda *xs: sum(jnp.sum(jnp.tanh(y)) for y in jax.tree.leaves(function(*xs)))
    return lambda *xs: (function(*xs), jax.grad(loss, tuple(range(len(xs))))(*xs))


@pytest.mark.parametrize(
    "name, division", [(name, x) for name, (letters, *_) in PRODUCTS.items() for x in sorted({*letters, "-"} - {" "})]
)
def test_as_xla(name, division):
    functions, xs = [with_gradients(f) for f in PRODUCTS[name][1:]], operands(name, division)
    mine, theirs = programs = [compiled(f, *xs) for f in functions]
    got, want = (program(*xs) for program in programs)
    assert_as_exact(got, want, in_float64(functions[1], *xs))
    assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(want)]
    assert collectives(mine).total() <= collectives(theirs).total()
    temporary = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert temporary[0] <= 1.02 * temporary[1] + (8 << 20), temporary  # and workspace


def soak(seconds):
    """Multiplies until then, at least twice; returns how often."""
    made = {}
    for name, (letters, ours, _) in PRODUCTS.items():
        for division in {*letters} & {*"mnk"}:
            made[name, division] = jax.jit(ours), operands(name, division)
    read = lambda outs: [np.asarray(x).tobytes() for x in jax.tree.leaves(outs)]
    first = {key: read(f(*xs)) for key, (f, xs) in made.items()}
    used = lambda: [device.memory_stats()["bytes_in_use"] if ON_GPUS else 0 for device in DEVICES]
    before, until, rounds = used(), time.monotonic() + seconds, 0
    while rounds < 2 or time.monotonic() < until:
        outs = {key: f(*xs) for key, (f, xs) in made.items()}  # none waits for another
        for key, out in outs.items():
            assert read(out) == first[key], key
        del outs, out
        rounds += 1
    assert used() == before
    return rounds


def test_the_same_bits_under_load():
    soak(0)


if __name__ == "__main__":
    print(f"{soak(float(sys.argv[1]))} rounds on {DEVICES}, equal bits, memory flat")
