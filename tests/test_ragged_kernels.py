"""Kernels of ragged products, launched outside XLA on poisoned buffers, against float64."""

import dataclasses
import zlib

import ml_dtypes
import numpy as np
import pytest
from test_kernels import (
    DTYPES,
    KERNELS,
    activated,
    device_of,
    error,
    launched,
    make_schedule,
    poisoned,
    round_up,
    runs_here,
)
from test_ragged import ROUTINGS, group_of

from jax_streamk import _ffi

NOBODY_READS = {"f": np.nan, "V": np.nan, "i": -128}
WHOLE_TILES = make_schedule(_ffi.ScheduleKind.data_parallel)

# The host's kernels, which run all problems, are in test_ragged.py; here they gather.
HERE = [name for name, kernel in KERNELS.items() if kernel.ragged != _ffi.Ragged.none and runs_here(kernel)]
GATHER = [name for name, kernel in KERNELS.items() if kernel.gathers and runs_here(kernel)]


def pytest_generate_tests(metafunc):
    of_k = [name for name in HERE if KERNELS[name].ragged == _ffi.Ragged.k]
    for argument, names in (("name", HERE), ("of_k", of_k)):
        if argument in metafunc.fixturenames:
            found = [pytest.param(name, marks=pytest.mark.gpu) for name in names or ["no kernel in this build"]]
            metafunc.parametrize(argument, found)
    if "gathers" in metafunc.fixturenames:
        metafunc.parametrize("gathers", GATHER)


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups of rows, or of what is contracted, and what comes before them and after."""

    sizes: tuple[int, ...]
    rows: int  # in groups or not
    n: int
    k: int  # of a product in groups of what is contracted its m
    leading: int | None = None
    pad: int = 0  # leading dimensions exceed the extents by this multiple of the kernel's alignment
    activation: _ffi.Activation = _ffi.Activation.none
    bias: bool = False
    gathered: int = 0  # rows of A, if those of the product are gathered


def align_of(kernel):
    """What the extents and strides of all operands must be multiples of, in elements."""
    return max(kernel.align_a, kernel.align_b, kernel.align_d)


def may_cut(kernel):
    """Whether it cuts tiles along K, into other parts with fewer CTAs."""
    return kernel.ragged == _ffi.Ragged.k and kernel.warp_schedule.name == "cooperative"


def rows_of_tile(kernel):
    return kernel.tile_n if kernel.swap_ab else kernel.tile_m


def columns_of_tile(kernel):
    return kernel.tile_m if kernel.swap_ab else kernel.tile_n


def matrices(rng, dtype, batch, rows, columns, column_major, pad, align):
    """(stored with poison between lines, the matrices, leading dimension, batch stride)"""
    lines, length = (columns, rows) if column_major else (rows, columns)
    ld = round_up(length, align) + align * pad
    stored = poisoned((batch, lines, ld), dtype)
    drawn = (
        rng.integers(-9, 10, (batch, lines, length))
        if dtype == np.int8
        else rng.standard_normal((batch, lines, length)) / 4
    )
    stored[..., :length] = drawn.astype(dtype)
    values = stored[..., :length]
    return stored, values.swapaxes(1, 2) if column_major else values, ld, lines * ld


def launch(name, case, device=None, special=None):
    """Runs a kernel. Returns D, after checking that nothing around it was written, and the exact D.

    ``special`` changes (A, the B of every group) before the launch.
    """
    kernel = KERNELS[name]
    of_rows, gated = kernel.ragged != _ffi.Ragged.k, kernel.gated
    dtype, dtype_d, groups = DTYPES[kernel.type_a], DTYPES[kernel.type_d], len(case.sizes)
    padding = case.pad, align_of(kernel)
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    group = group_of(case.sizes, case.rows, case.leading or 0)
    column_major = kernel.major_b == _ffi.Major.column
    of_a = (case.gathered or case.rows, case.k, kernel.major_a == _ffi.Major.column and of_rows, *padding)
    stored_a, a, lda, _ = matrices(rng, dtype, 1, *of_a)
    # Of rows that indices are outside of A, the nearest is meant.
    indices = rng.integers(-2, case.gathered + 2, case.rows, np.int32) if case.gathered else np.arange(case.rows)
    if case.gathered:
        indices[:2] = (np.iinfo(np.int32).min, np.iinfo(np.int32).max)[: len(indices)]
    row_of_a = np.clip(indices, 0, len(a[0]) - 1)
    a[0, np.setdiff1d(np.arange(len(a[0])), row_of_a[group >= 0])] = NOBODY_READS[dtype.kind]
    others = [
        matrices(rng, dtype, groups, case.k, case.n, column_major, *padding)
        if of_rows
        else matrices(rng, dtype, 1, case.rows, case.n, False, *padding)
        for _ in range(1 + gated)
    ]
    if not of_rows:
        others[0][1][0, group < 0] = np.nan
    if special is not None:
        special(a, *(x[1] for x in others))
    biases = [rng.standard_normal((groups, round_up(case.n, 8) + 8)).astype(dtype_d) for _ in others]
    results, d_rows = (1, case.rows) if of_rows else (groups, case.k)
    exact = np.zeros((results, d_rows, case.n))
    for i in range(groups):
        rows = a[0, row_of_a[group == i]].astype(np.float64)
        left, right = (rows, i) if of_rows else (rows.T, (0, group == i))
        sums = [
            left @ x[1][right].astype(np.float64) + (bias[i, : case.n].astype(np.float64) if case.bias else 0)
            for x, bias in zip(others, biases)
        ]
        with np.errstate(all="ignore"):
            exact[(0, group == i) if of_rows else i] = activated(case.activation, sums[0]) * (sums[1] if gated else 1)
    _, _, ldb, stride_b = others[0]
    ldd = round_up(case.n, align_of(kernel)) + align_of(kernel) * case.pad
    m, k = (case.rows, case.k) if of_rows else (case.k, case.rows)
    problem = _ffi.GemmProblem(
        groups, m, case.n, k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b,
        lda, ldb, ldd, 0, stride_b if of_rows else 0, 0 if of_rows else m * ldd,
        activation=case.activation, has_bias=case.bias, batch_stride_bias=biases[0].shape[1] if case.bias else 0,
        gated=gated, ragged=_ffi.Ragged.m if of_rows else _ffi.Ragged.k, leading_rows=case.leading is not None,
        gathered_rows=case.gathered,
    )  # fmt: skip
    device = device or device_of(kernel)
    assert (why := _ffi.can_implement(name, problem, WHOLE_TILES, device)) is None, why
    sizes = np.array([*([] if case.leading is None else [case.leading]), *case.sizes], np.int32)
    both = [(x[0], bias if case.bias else None) for x, bias in zip(others, biases)]
    (b, bias), (up, up_bias) = both[0], both[1] if gated else (None, None)
    out = launched(
        kernel, problem, WHOLE_TILES, device, (results, d_rows, case.n), ldd, dtype_d,
        a=stored_a, b=b, up=up, bias=bias, up_bias=up_bias, group_sizes=sizes,
        indices=indices if case.gathered else None,
    )  # fmt: skip
    assert not of_rows or not out[0, group < 0].astype(np.float64).any(), "rows in no group are not zero"
    return out, exact


def check(name, case):
    """Also with many tiles for each of a few CTAs, which give the same bits if no tile is cut; else the same again."""
    got, exact = launch(name, case)
    few = launch(name, case, _ffi.Device(device_of(KERNELS[name]).arch, 2))[0]
    for out in (got, few):
        check_values(name, out, exact)
    if may_cut(KERNELS[name]):
        few = launch(name, case)[0]
    assert got.tobytes() == few.tobytes(), "the bits depend on which worker has a tile"


def check_values(name, got, exact):
    """Against float64, rounded once."""
    values = got.astype(np.float64)
    assert not np.isnan(values).any(), f"{np.isnan(values).sum()} elements unwritten or poisoned"
    scale = float(np.sqrt(np.mean(exact**2))) + 1e-30
    with np.errstate(over="ignore"):
        rounding, largest = error(exact.astype(got.dtype).astype(np.float64), exact, scale)
    rms, most = error(values, exact, scale)
    wide = got.dtype.itemsize >= 4  # no tensor core's: rounded at every addition
    floor = 0 if got.dtype.kind == "i" else float(ml_dtypes.finfo(got.dtype).eps) * (16 if wide else 1 / 16)
    if KERNELS[name].math == _ffi.Math.tf32:
        floor = 2.0**-10
    assert rms <= 2 * rounding + floor and most <= 2 * largest + 16 * floor, (rms, rounding, most, largest)


@pytest.mark.parametrize("leading", [None, 0, 37])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_against_float64(name, routing, leading):
    rows, k, n, sizes = ROUTINGS[routing]
    k = min(k, 200) if KERNELS[name].ragged == _ffi.Ragged.k else k
    align = align_of(KERNELS[name])
    check(name, Case(tuple(map(int, sizes)), rows, round_up(n, align), round_up(k, align), leading, pad=len(sizes) % 3))


def test_tiles_of_every_width(name):
    """Groups of 0 to a few tiles and a row more."""
    tile = max(KERNELS[name].tile_m, KERNELS[name].tile_n)
    sizes = tuple(range(0, 2 * tile + 2, 7)) + tuple(x * tile + y for x in (1, 2, 5) for y in (-1, 0, 1))
    check(name, Case(sizes, sum(sizes) + 5, 2 * tile + 24, 136))


def test_many_tiles_for_each_cta(name):
    kernel = KERNELS[name]
    k = (kernel.stages + 2) * kernel.tile_k + 8
    if kernel.ragged == _ffi.Ragged.m:
        rows, columns = rows_of_tile(kernel), columns_of_tile(kernel)
        check(name, Case((3 * rows, 9, 9 * rows + 3), 13 * rows, 20 * columns, k))
        check(name, Case((3,) * 70, 210, 5 * columns, 16))
    else:
        check(name, Case((k, 0, 3, 1, 2 * k, 5), 4 * k, 5 * kernel.tile_n, 5 * kernel.tile_m))


@pytest.mark.parametrize("ctas", [None, 2, 7])
@pytest.mark.parametrize(
    "sizes, tiles",
    [
        ((9000,), (1, 1)),
        ((0, 5003, 0), (2, 3)),
        ((2000, 2000, 2000), (3, 2)),
        ((20, 30, 0, 6000, 1, 900), (1, 4)),
        (tuple(3000 // (i + 1) for i in range(40)), (1, 1)),
    ],
    ids=["one_tile", "one_group", "alike", "one_long", "zipf"],
)
def test_few_long_tiles(of_k, sizes, tiles, ctas):
    """Several CTAs sum a tile, in an order that depends on no time."""
    kernel = KERNELS[of_k]
    device = None if ctas is None else _ffi.Device(device_of(kernel).arch, ctas)
    case = Case(sizes, sum(sizes) + 70, tiles[1] * kernel.tile_n - 8, tiles[0] * kernel.tile_m - 8, 3, bias=True)
    got, exact = launch(of_k, case, device)
    largest = np.abs(exact).max()
    # In float32 that of TF32; in float64 the sums of both sides are rounded thousands of times.
    eps = {4: 2.0**-10, 8: 2.0**-44}.get(got.dtype.itemsize) or float(ml_dtypes.finfo(got.dtype).eps)
    assert np.abs(got.astype(np.float64) - exact).max() <= eps * largest
    assert all(got.tobytes() == launch(of_k, case, device)[0].tobytes() for _ in range(3)), "the bits depend on time"


@pytest.mark.parametrize("activation", _ffi.Activation, ids=lambda x: x.name)
@pytest.mark.parametrize("bias", [False, True])
def test_epilogues(name, activation, bias):
    check(name, Case((13, 0, 70, 150), 240, 136, 72, 3, activation=activation, bias=bias))


def test_nan_and_inf_stay_in_their_group(name):
    def special(a, b, *_):
        a[0, 5, 3], a[0, 20, 1] = np.nan, np.inf
        b[0, 2 if KERNELS[name].ragged == _ffi.Ragged.m else 9, 7] = np.inf

    got, exact = launch(name, Case((8, 9, 30), 50, 24, 40), special=special)
    if KERNELS[name].math == _ffi.Math.tf32x3:  # infinity - infinity in the small part
        exact[~np.isfinite(exact)] = np.nan
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), np.isnan(exact))
    assert not np.isnan(exact).all()


def test_what_sizes_may_not_be(name):
    """Negative sizes are none, and groups end with the last row."""
    for sizes in ((-5, 20, 2**31 - 1, 7), (2**31 - 1,) * 3):
        got, exact = launch(name, Case(sizes, 60, 24, 40))
        assert np.isfinite(got.astype(np.float64)).all()
        assert np.abs(got.astype(np.float64) - exact).max() < 0.1


def test_gathered_rows(gathers):
    """Rows that are read twice and rows that are not, K's tail, and groups of 0 to a few tiles."""
    kernel = KERNELS[gathers]
    tile = min(rows_of_tile(kernel), 128)
    sizes = (tile, 0, 3, 2 * tile + 5, 1, 0, tile // 2 + 1, 33)
    for leading, k, gathered in ((None, kernel.tile_k, 1000), (37, 3 * kernel.tile_k + 8, 50), (0, 8, 1)):
        rows = sum(sizes) + (leading or 0) + 21
        check(gathers, Case(sizes, rows, 136, k, leading, pad=1, bias=kernel.gated, gathered=gathered))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_gathered_rows_of_any_routing(name, routing):
    if not KERNELS[name].gathers:
        pytest.skip("it gathers no rows")
    rows, k, n, sizes = ROUTINGS[routing]
    align = align_of(KERNELS[name])
    check(name, Case(tuple(map(int, sizes)), rows, round_up(n, align), round_up(k, align), gathered=rows // 3 + 1))


def test_gathered_rows_of_many_tiles_for_each_cta(gathers):
    kernel = KERNELS[gathers]
    tile = min(rows_of_tile(kernel), 128)
    k = (kernel.stages + 2) * kernel.tile_k + 8
    sizes = (3 * tile, 9, 5 * tile + 3)
    check(gathers, Case(sizes, 9 * tile, 10 * kernel.tile_m, k, gathered=300))
    check(gathers, Case((3,) * 70, 210, 5 * kernel.tile_m, 16, gathered=99))
    # Tiles of one k-tile, taken from a counter; a CPU has fewer threads than a GPU has CTAs.
    rows = (4 if kernel.platform == "cpu" else 40) * tile
    check(gathers, Case((rows,), rows, 10 * kernel.tile_m, 16, gathered=300))
    check(gathers, Case((5, 0, 30), 40, 24, 5000, gathered=30))


def test_who_gathers_no_rows(name):
    """A kernel that cannot refuses."""
    if not KERNELS[name].gathers:
        with pytest.raises(AssertionError, match="gather"):
            launch(name, Case((3, 4), 8, 16, 16, gathered=5))
