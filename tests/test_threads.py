"""Many threads of one process: kernels launched outside XLA, and programs that are traced, compiled and run.

CI runs those of the first kind under ThreadSanitizer, which sees nothing of what XLA's own code synchronizes.
"""

import concurrent.futures
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import jax_streamk as sk
from jax_streamk import DataParallel, Device, SplitK, StreamK, _ffi
from jax_streamk.tuning import measure

THREADS = 4
DEVICE = Device("cpu", 0, THREADS)
REDUCTIONS = "ordered", "atomic", "separate"
SCHEDULES = [DataParallel(), *(SplitK(3, how) for how in REDUCTIONS), *(StreamK(how) for how in REDUCTIONS)]


def shaped(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul_of(dtype, *, out=None):
    product = lambda schedule: lambda x, w: sk.matmul(x, w, schedule=schedule, preferred_element_type=out)
    return product, [shaped(dtype, 150, 300), shaped(dtype, 300, 90)]


def linear(schedule):
    return lambda x, w, bias, y: sk.linear(x, w, bias, residual=y, activation="gelu", schedule=schedule)


def of_numbers(dtype, has_zeros=False):
    """A product with weights of a narrow dtype, a scale and perhaps a zero point for every 32 of k."""
    weights = [shaped(dtype, 288, 90), shaped("bfloat16", 9, 90)] + [shaped(dtype, 9, 90)] * has_zeros
    product = lambda schedule: lambda x, *w: sk.matmul(x, sk.QuantizedArray(*w), schedule=schedule)
    return product, [shaped("bfloat16", 150, 288), *weights]


def ragged(x, w, sizes, **options):
    return sk.ragged_dot(x, w, sizes, schedule=DataParallel(), **options)


ROWS_BY_GROUP = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
GROUPS = [shaped("float32", 4, 64, 40), shaped("int32", 4)]
# By name: a function of the schedule that returns one of a product, and the shapes of its operands.
PRODUCTS = {
    "f32": matmul_of("float32"),
    "f64": matmul_of("float64"),
    "bf16": matmul_of("bfloat16", out="float32"),
    "f16": matmul_of("float16"),
    "s8": matmul_of("int8", out="int32"),
    "float8": matmul_of("float8_e4m3fn", out="float32"),
    "fused": (linear, [shaped("bfloat16", *s) for s in ((40, 512), (512, 64), (64,), (40, 64))]),
    "batched": (matmul_of("float32")[0], [shaped("float32", 3, 9, 400), shaped("float32", 3, 400, 24)]),
    "int4": of_numbers("int4", has_zeros=True),
    "fp8 weights": of_numbers("float8_e4m3fn"),
    "ragged": (lambda _: ragged, [shaped("float32", 150, 64), *GROUPS]),
    "gathered": (
        lambda _: lambda x, w, sizes, rows: ragged(x, w, sizes, lhs_indices=rows),
        [shaped("float32", 30, 64), *GROUPS, shaped("int32", 150)],
    ),
    "ragged k": (
        lambda _: lambda x, y, sizes: sk.ragged_dot_general(x, y, sizes, ROWS_BY_GROUP, schedule=DataParallel()),
        [shaped("float32", 300, 70), shaped("float32", 300, 90), shaped("int32", 5)],
    ),
}  # fmt: skip

IN_EVERY_SCHEDULE = "f32", "f16"  # of results that are the accumulators, and of others


class Launches:
    """Launches of one plan on the same operands, outside XLA."""

    def __init__(self, made):
        self.made, self.native, self.device = made, made.problem.native(), DEVICE.native()
        (_, self.size), self.operands = measure.spans(made.problem)["d"], {}
        for role, (type_, count) in measure.spans(made.problem).items():
            if role in ("group_sizes", "indices"):
                make = measure.group_sizes if role == "group_sizes" else measure.lhs_indices
                self.operands[role] = make(made.problem)
            elif role != "d":
                dtype = type_.dtype if type_.bits >= 8 else np.dtype(np.uint8)
                self.operands[role] = measure.random_bytes(dtype, -(-type_.bits * count // 8))

    def launch(self, timed=False):
        """D, from memory and a workspace of its own."""
        what = self.made.kernel, self.native, self.made.native_schedule()
        d = np.full(self.size, -1).astype(self.made.problem.type_d.dtype)
        workspace = np.full(_ffi.workspace_bytes(*what, self.device) + 64, 0xFF, np.uint8)
        addresses = {role: x.ctypes.data for role, x in self.operands.items()} | dict(d=d.ctypes.data)
        places = tuple(addresses.get(role, 0) for role in _ffi.roles)
        args = *what, self.made.policy.native(), self.device
        aligned = -(-workspace.ctypes.data // 64) * 64
        _ffi.time_launches(*args, [places] * 2, aligned, 2) if timed else _ffi.launch(*args, places, aligned)
        return d


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_at_once(name):
    """Each launch has the bits of one alone, by threads of its own and by those of a pool, as XLA's are."""
    product, operands = PRODUCTS[name]
    schedules = SCHEDULES if name in IN_EVERY_SCHEDULE else [SplitK(3, "separate"), StreamK()]
    if "ragged" in name or name == "gathered":
        schedules = [DataParallel()]
    with jax.enable_x64(name == "f64"):
        plans = [sk.plan(product(schedule), *operands, device=DEVICE) for schedule in schedules]
    for made in plans:
        assert made.kernel.startswith("host_"), made
        launches = Launches(made)
        alone, begin = launches.launch(), threading.Barrier(THREADS)

        def several(timed):
            begin.wait()
            return [launches.launch(timed) for _ in range(2)]

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            together = [d for found in pool.map(several, [False, True] * (THREADS // 2)) for d in found]
        if getattr(made.schedule, "reduction", None) == "atomic":
            together = [np.asarray(d, np.float64) for d in together]
            largest = np.abs(np.asarray(alone, np.float64)).max()
            assert max(np.abs(d - np.asarray(alone, np.float64)).max() for d in together) <= 0.02 * largest
        else:
            assert {d.tobytes() for d in together} == {alone.tobytes()}


IN_A_NEW_PROCESS = """
import concurrent.futures, sys, threading
import jax, jax.numpy as jnp, numpy as np
import jax_streamk as sk

sys.setswitchinterval(1e-5)
rng = np.random.default_rng()
A, B = (rng.integers(-3, 4, s).astype(np.float32) for s in ((70, 520), (520, 90)))
WANT = A @ B
sizes = np.array([30, 0, 40], np.int32)
stacked = np.stack([B, B, B])
accelerated = sk.accelerate(lambda x, y: jnp.maximum(jnp.matmul(x, y), 0), schedule=sk.SplitK(2))
begin = threading.Barrier(8)

def work(i):
    begin.wait()
    for turn in range(3):
        rows = 40 + 5 * turn + i % 2  # half of the shapes are another thread's, too
        x, want = A[:rows], WANT[:rows]
        for schedule in (sk.Auto(), sk.SplitK(3), sk.StreamK("separate")):
            product = lambda x, y: sk.matmul(x, y, schedule=schedule)
            np.testing.assert_array_equal(jax.jit(product)(x, B), want)
            np.testing.assert_array_equal(product(x, B), want)
            assert sk.plan(x, B, schedule=schedule).problem.m == rows
        np.testing.assert_array_equal(accelerated(x, B), np.maximum(want, 0))
        np.testing.assert_array_equal(jax.grad(lambda x: sk.linear(x, B, activation="relu").sum())(x), (want > 0) @ B.T)
        np.testing.assert_array_equal(sk.ragged_dot(A, stacked, sizes), WANT)
        assert "host_" in str(accelerated.explain(x, B))

with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))
"""


def test_threads_trace_compile_and_run():
    """From the first use of the library on, which fills its caches."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", IN_A_NEW_PROCESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, cwd="/")
    assert done.returncode == 0, done.stderr
