"""Kernels of gated products, launched outside XLA on poisoned buffers, against float64."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_kernels import (
    DTYPES,
    KERNELS,
    activated,
    describe,
    device_of,
    error,
    has_clusters,
    launched,
    make_schedule,
    poisoned,
    round_up,
    runs_here,
)

from jax_streamk import _ffi

HERE = [
    name for name, kernel in KERNELS.items() if kernel.gated and kernel.ragged == _ffi.Ragged.none and runs_here(kernel)
]
WHOLE_TILES = make_schedule(_ffi.ScheduleKind.data_parallel)
ORDERS = [WHOLE_TILES, make_schedule(_ffi.ScheduleKind.data_parallel, raster=_ffi.Raster.along_n, swizzle=2)]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", HERE or ["no kernel in this build"])]


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    batch: int = 1
    broadcast: bool = False  # all batches share both B
    pad: int = 0  # leading dimensions exceed the extents by this multiple of 8
    stacked: bool = False  # both B in one buffer, row by row (or column by column)
    activation: _ffi.Activation = _ffi.Activation.silu
    bias: str = ""  # "", "shared" by all batches, or "batched"


def launch(name, case, schedule=WHOLE_TILES, changes=None, special=None, device=None):
    """Runs a kernel. Returns D, after checking that nothing around it was written; the exact D; and XLA's D.

    ``special`` changes (a, both b, both biases) before the launch.
    """
    kernel = KERNELS[name]
    dtype, row_b = DTYPES[kernel.type_a], kernel.major_b == _ffi.Major.row
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    batches_b = 1 if case.broadcast else case.batch
    lda = round_up(case.k, 8) + 8 * case.pad
    a = poisoned((case.batch, case.m, lda), dtype)
    a[..., : case.k] = rng.standard_normal((case.batch, case.m, case.k)).astype(dtype)
    # Lines of both B, each followed by poison: beside each other if stacked, else one after the other.
    lines, length = (case.k, case.n) if row_b else (case.n, case.k)
    line = round_up(length, 8) + 8 * case.pad
    shape = (batches_b, lines, 2, line) if case.stacked else (2, batches_b, lines, line)
    stored = poisoned(shape, dtype)
    both = np.moveaxis(stored, 2, 0) if case.stacked else stored
    values = rng.standard_normal((2, batches_b, lines, length)) / math.sqrt(case.k)
    both[..., :length] = values.astype(dtype)
    stride_bias = round_up(case.n, 8) + 8
    biases_of = case.batch if case.bias == "batched" else 1
    bias = poisoned((biases_of, 2, case.n) if case.stacked else (2, biases_of, stride_bias), dtype)
    two = np.moveaxis(bias, 1, 0) if case.stacked else bias
    two[..., : case.n] = rng.standard_normal((2, biases_of, case.n)).astype(dtype)
    if special is not None:
        special(a, both if row_b else both.swapaxes(2, 3), two)

    matrices = [(x[..., :length] if row_b else x[..., :length].swapaxes(1, 2)) for x in both]
    added = [x[:, None, : case.n] if case.bias else 0 for x in two]

    def gated(as_type):
        with np.errstate(all="ignore"):
            sums = [
                as_type(a[..., : case.k]) @ as_type(b) + (as_type(c) if case.bias else 0)
                for b, c in zip(matrices, added)
            ]
            return sums

    gate, up = gated(lambda x: np.asarray(x).astype(np.float64))
    with np.errstate(all="ignore"):
        exact = activated(case.activation, gate) * up
    xlas = {"none": lambda x: x, "tanh": jnp.tanh, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}
    of_xla = xlas.get(case.activation.name) or getattr(jax.nn, case.activation.name.removesuffix("_tanh"))
    gate, up = gated(jnp.asarray)
    xla = np.asarray(of_xla(gate) * up).astype(np.float64)

    ldd = round_up(case.n, 8) + 8 * case.pad
    ldb = 2 * line if case.stacked else line
    batch_stride_b = 0 if case.broadcast or case.batch == 1 else lines * ldb
    batch_stride_bias = (2 * case.n if case.stacked else stride_bias) if case.bias == "batched" else 0
    problem = _ffi.GemmProblem(
        case.batch, case.m, case.n, case.k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math,
        kernel.major_a, kernel.major_b, lda, ldb, ldd, case.m * lda, batch_stride_b, case.m * ldd,
        activation=case.activation, has_bias=bool(case.bias), batch_stride_bias=batch_stride_bias,
        gated=True, up_offset=line if case.stacked else 0,
    )  # fmt: skip
    device = device or device_of(kernel)
    assert (why := _ffi.can_implement(name, problem, schedule, device)) is None, why
    b, up = (stored, None) if case.stacked else stored
    first_bias, up_bias = (None, None) if not case.bias else (bias, None) if case.stacked else bias
    out = launched(
        kernel, problem, schedule, device, (case.batch, case.m, case.n), ldd, dtype, changes,
        a=a, b=b, up=up, bias=first_bias, up_bias=up_bias,
    )  # fmt: skip
    return out, exact, xla


def check(name, case, schedule=WHOLE_TILES):
    got, exact, xla = launch(name, case, schedule)
    label, values = f"{name} {case} {describe(schedule)}", got.astype(np.float64)
    assert not np.isnan(values).any(), f"{label}: {np.isnan(values).sum()} elements unwritten or poisoned"
    scale = float(np.sqrt(np.mean(exact**2))) + 1e-30
    rms, largest = error(values, exact, scale)
    xla_rms, xla_largest = error(xla, exact, scale)
    floor = float(ml_dtypes.finfo(got.dtype).eps) / 2
    assert rms <= 2 * xla_rms + floor, f"{label}: error {rms:.3g}, XLA's {xla_rms:.3g}"
    assert largest <= 4 * xla_largest + 16 * floor, f"{label}: largest error {largest:.3g}, XLA's {xla_largest:.3g}"
    again, _, _ = launch(name, case, schedule)
    assert got.tobytes() == again.tobytes(), f"{label}: two runs differ"
    return values, exact


CASES = [
    Case(1, 8, 8),
    Case(1, 64, 8, bias="shared"),
    Case(3, 72, 200, pad=1, bias="shared", activation=_ffi.Activation.gelu),
    Case(16, 1000, 520, stacked=True, activation=_ffi.Activation.relu),
    Case(17, 136, 1032, pad=3, stacked=True, bias="shared", activation=_ffi.Activation.gelu_tanh),
    Case(33, 56, 264, batch=3, bias="batched", activation=_ffi.Activation.tanh),
    Case(70, 200, 392, batch=2, broadcast=True, activation=_ffi.Activation.none),
    Case(9, 128, 136, batch=2, stacked=True, bias="batched", activation=_ffi.Activation.sigmoid),
    Case(130, 264, 72, batch=2, broadcast=True, stacked=True, bias="shared"),
]


def schedules(name, k):
    """Orders of tiles, and numbers of splits that do and do not divide the k-tiles."""
    kernel = KERNELS[name]
    k_tiles = -(-k // kernel.tile_k)
    splits = {2, 3, k_tiles} if _ffi.Reduction.ordered in kernel.split_k_reductions and has_clusters(kernel) else ()
    at_most = [x for x in sorted(splits) if 1 < x <= min(k_tiles, 8)]  # the CTAs of a cluster
    return [*ORDERS, *(make_schedule(_ffi.ScheduleKind.split_k, x) for x in at_most)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(name, case):
    for schedule in schedules(name, case.k):
        check(name, case, schedule)


def test_many_waves(name):
    """Every CTA has several tiles, with more k-tiles than stages."""
    k = (KERNELS[name].stages + 2) * KERNELS[name].tile_k + 8
    for case in (Case(30, 33000, k), Case(200, 9000, 1016, stacked=True, bias="shared")):
        for schedule in schedules(name, case.k)[2:] or [WHOLE_TILES]:
            check(name, case, schedule)


def test_small_integers_are_exact(name):
    """A sum of another column, of the other matrix or of another batch would show."""

    def integers(a, both, biases):
        rng = np.random.default_rng(0)
        for x in (a, both, biases):
            x[...] = np.where(np.isnan(x.astype(np.float32)), np.nan, rng.integers(-1, 2, x.shape)).astype(x.dtype)

    case = Case(20, 328, 136, batch=2, bias="batched", activation=_ffi.Activation.relu)
    for each in (case, dataclasses.replace(case, stacked=True)):
        for schedule in schedules(name, each.k):
            got, exact, _ = launch(name, each, schedule, special=integers)
            np.testing.assert_array_equal(got, exact.astype(got.dtype))


def test_choices_of_the_launch_change_no_bit(name):
    kernel = KERNELS[name]
    case = Case(40, 6000, 5 * kernel.tile_k + 8, batch=2)
    changes = [dict(evict_first_b=b) for b in (False, True)]
    if kernel.family == _ffi.Family.sm90:
        held = max(kernel.stages - 3, 0)
        changes += [dict(evict_first_a=True, evict_first_b=b) for b in (False, True)]
        changes += [dict(idle_clusters=0), *(dict(held_back=held, held_back_last=last) for last in {0, held})]
    if kernel.family == _ffi.Family.sm90 and kernel.warp_schedule.name != "single":
        changes += [dict(cluster_order=order) for order in ("as_launched", "by_gpc", "spread")]
    products = [launch(name, case, changes=each)[0].tobytes() for each in ({}, *changes)]
    assert len(set(products)) == 1


def test_nan_and_inf_propagate(name):
    def special(a, both, biases):
        a[0, 2, 9], a[0, 5, 1] = np.nan, np.inf
        both[1, 0, :, 7] = np.nan
        biases[0, 0, 3] = np.inf
        biases[1, 0, 4] = np.nan

    got, exact, _ = launch(name, Case(9, 24, 40, bias="shared"), special=special)
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), np.isnan(exact))
    np.testing.assert_array_equal(np.isinf(got.astype(np.float64)), np.isinf(exact))


def test_what_is_refused(name):
    kernel = KERNELS[name]
    device = device_of(kernel)

    def refusal(n=64, k=64, schedule=WHOLE_TILES, **fields):
        ldb = n if kernel.major_b == _ffi.Major.row else k
        problem = _ffi.GemmProblem(
            1, 16, n, k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b,
            k, ldb, n, 0, 0, 0, **(dict(gated=True) | fields),
        )  # fmt: skip
        return _ffi.can_implement(name, problem, schedule, device)

    assert refusal() is None
    assert "two matrices at once" in refusal(gated=False)
    assert "neither residual nor alpha" in refusal(has_residual=True)
    assert "neither residual nor alpha" in refusal(alpha=2.0)
    assert "must start at multiples of 8" in refusal(n=60)
    assert "must start at multiples of 8" in refusal(up_offset=4)
    assert "no Stream-K" in refusal(schedule=make_schedule(_ffi.ScheduleKind.stream_k), k=4 * kernel.tile_k)
