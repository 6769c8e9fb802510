"""Kernels that scale sums, of float8 and int8, launched outside XLA on poisoned buffers, against float64."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from test_kernels import DTYPES, activated, device_of, launched, make_schedule, poisoned, round_up, runs_here

from jax_streamk import _ffi
from jax_streamk.plan.problem import TYPES

KERNELS = {kernel.name: kernel for kernel in _ffi.kernels() if kernel.scales_sums}


def is_tested(kernel):
    """Of the host's, which are one program, those of one tile, and each type, result and majorness once."""
    is_host, is_mixed = kernel.family == _ffi.Family.host, kernel.type_a != kernel.type_b
    is_integer = kernel.type_a == _ffi.Type.s8
    few = kernel.tile_n == 64 and (is_integer or (kernel.type_d == _ffi.Type.bf16) == is_mixed)
    few &= (kernel.major_a == kernel.major_b) != is_mixed
    return runs_here(kernel) and (not is_host or few)


TESTED = [name for name, kernel in KERNELS.items() if is_tested(kernel)]
HERE = [name for name in TESTED if KERNELS[name].ragged == _ffi.Ragged.none]
IS_HOST = lambda name: KERNELS[name].family == _ffi.Family.host
OF_ROWS = [name for name in TESTED if KERNELS[name].ragged == _ffi.Ragged.m or IS_HOST(name)]
OF_K = [name for name in TESTED if KERNELS[name].ragged == _ffi.Ragged.k or IS_HOST(name)]
LEADING = 5  # rows before the first group
WHOLE = make_schedule(_ffi.ScheduleKind.data_parallel)
SCALES = "float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    block_a: tuple[int, int] = (0, 0)  # rows, and neighbours along k, that share a scale; 0: none do
    block_b: tuple[int, int] = (0, 0)  # neighbours along k, and columns
    scale: str = "float32"
    batch: int = 1
    pad: int = 0  # lines are longer than their contents by this multiple of 16 bytes
    has_epilogue: bool = False
    sizes: tuple[int, ...] = ()  # of groups of rows, or of K
    cuts_k: bool = False


def random_numbers(rng, dtype, shape):
    """Any integers, or finite float8 of at most 16, whose products differ by 2^20 and more."""
    if dtype == np.int8:
        return rng.integers(-128, 128, shape, dtype)
    every = np.arange(256, dtype=np.uint8).view(dtype)
    return rng.choice(every[np.abs(every.astype(np.float64)) <= 16], shape)


def spread(scale, block):
    return np.repeat(np.repeat(scale.astype(np.float64), block[0], 1), block[1], 2)


def schedules_of(kernel, case):
    kinds, k_tiles = _ffi.ScheduleKind, -(-case.k // kernel.tile_k)
    yield WHOLE
    for reduction in kernel.split_k_reductions:
        # A slice of K is a part of what shares a scale if all of K does.
        if reduction != _ffi.Reduction.separate or case.k not in (case.block_a[1], case.block_b[0]):
            for splits in {min(3, k_tiles), k_tiles}:
                yield make_schedule(kinds.split_k, splits, reduction)
    if _ffi.Reduction.ordered in kernel.stream_k_reductions:
        yield make_schedule(kinds.stream_k)


def in_memory(matrices, major, align, pad):
    """(matrices as lines with poison behind each, the leading dimension)"""
    lines = matrices if major == _ffi.Major.row else matrices.swapaxes(1, 2)
    ld = round_up(lines.shape[2], align) + align * pad
    stored = poisoned((*lines.shape[:2], ld), matrices.dtype)
    stored[..., : lines.shape[2]] = lines
    return stored, ld


def make(rng, kernel, case):
    """Operands by role, their fields of the problem, and what they stand for in float64."""
    groups = len(case.sizes)
    of_a, of_b = (1, 1 if case.cuts_k else groups) if groups else (case.batch, case.batch)
    shapes = dict(a=(of_a, case.m, case.k), b=(of_b, case.k, case.n))
    operands, fields, exact = {}, {}, {}
    for role, suffix, block in (("a", "_of_a", case.block_a), ("b", "", case.block_b)):
        dtype, major = getattr(kernel, f"type_{role}").dtype, getattr(kernel, f"major_{role}")
        values = random_numbers(rng, dtype, shapes[role])
        align = max(getattr(kernel, f"align_{role}"), 16)
        operands[role], fields[f"ld{role}"] = in_memory(values, major, align, case.pad)
        fields[f"batch_stride_{role}"] = 0 if groups and (role == "a" or case.cuts_k) else operands[role][0].size
        exact[role] = values.astype(np.float64)
        if 0 in block:
            continue
        batch, rows, columns = shapes[role]
        scale = (2.0 ** rng.uniform(-3, 3, (batch, rows // block[0], columns // block[1]))).astype(case.scale)
        of_blocks = scale if major == _ffi.Major.row else scale.swapaxes(1, 2)
        operands[f"scale{suffix}"] = np.ascontiguousarray(of_blocks).reshape(-1)
        fields |= {f"scale_rows{suffix}": block[0], f"scale_columns{suffix}": block[1]}
        fields[f"scale_type{suffix}"] = TYPES[scale.dtype]
        exact[role] *= spread(scale, block)
    return operands, fields, exact


def runs(sizes):
    return itertools.pairwise(LEADING + np.cumsum((0, *sizes)))


def product(a, b, sizes, cuts_k):
    """Of matrices in float64. Rows in no group are zero."""
    if not sizes:
        return a @ b
    if cuts_k:
        return np.stack([a[0, :, begin:end] @ b[0, begin:end] for begin, end in runs(sizes)])
    out = np.zeros((1, a.shape[1], b.shape[2]))
    for matrix, (begin, end) in zip(b, runs(sizes)):
        out[0, begin:end] = a[0, begin:end] @ matrix
    return out


def launch(rng, kernel, case, schedule, change=lambda operands: None):
    """D, the exact one, and the sums of the absolute values of products."""
    operands, fields, exact = make(rng, kernel, case)
    change(operands)
    dtype_d = DTYPES[kernel.type_d]
    groups = len(case.sizes)
    bias = rng.standard_normal((max(groups, 1), round_up(case.n, 8))).astype(dtype_d)
    activation = _ffi.Activation.silu if case.has_epilogue else _ffi.Activation.none
    sums, absolute = (product(f(exact["a"]), f(exact["b"]), case.sizes, case.cuts_k) for f in (np.asarray, np.abs))
    if case.has_epilogue:
        biases = bias[:, None, : case.n].astype(np.float64)
        if groups and not case.cuts_k:
            of_rows = np.zeros((1, case.m, case.n))
            for of_group, (begin, end) in zip(biases, runs(case.sizes)):
                of_rows[0, begin:end] = of_group
            biases = of_rows
        sums = activated(activation, sums + biases)
        operands["bias"] = bias
    if groups:
        operands["group_sizes"] = np.array([LEADING, *case.sizes], np.int32)
        fields |= dict(ragged=_ffi.Ragged.k if case.cuts_k else _ffi.Ragged.m, leading_rows=True)
        fields |= dict(batch_stride_bias=bias.shape[1]) if case.has_epilogue else {}
    ldd = round_up(case.n, 8) + 8 * case.pad
    problem = _ffi.GemmProblem(
        batch=groups or case.batch, m=case.m, n=case.n, k=case.k, type_a=kernel.type_a, type_b=kernel.type_b,
        type_d=kernel.type_d, math=kernel.math, major_a=kernel.major_a, major_b=kernel.major_b, ldd=ldd,
        batch_stride_d=0 if groups and not case.cuts_k else case.m * ldd, activation=activation,
        has_bias=case.has_epilogue, **fields,
    )  # fmt: skip
    device = device_of(kernel)
    assert (why := _ffi.can_implement(kernel.name, problem, schedule, device)) is None, why
    shape = (groups if case.cuts_k else 1) if groups else case.batch, case.m, case.n
    got = launched(kernel, problem, schedule, device, shape, ldd, dtype_d, **operands)
    return got.astype(np.float64), sums, absolute


def check(name, case, schedule=None, change=lambda kernel, case, operands: None):
    """Products are exact. Tensor cores truncate sums of float8; 2^-10.2 of all products was the most of 500."""
    kernel, rng = KERNELS[name], np.random.default_rng()
    if kernel.major_a == _ffi.Major.column:
        case = dataclasses.replace(case, m=round_up(case.m, 16))
    is_integer = kernel.type_a == _ffi.Type.s8
    changes = 0 < case.block_a[1] < case.k or 0 < case.block_b[0] < case.k
    if changes and kernel.family == _ffi.Family.sm90 and (is_integer or kernel.tile_m == 256):
        if not is_integer:
            return  # it has scales for all of K only, and blocks of columns that its tiles divide
        blocks = (case.block_a[0], case.k), (case.k, case.block_b[1])
        case = dataclasses.replace(case, block_a=blocks[0], block_b=blocks[1])
    rounding = np.finfo(np.float32).eps if kernel.type_d == _ffi.Type.f32 else 2.0**-8
    for each in [schedule] if schedule else schedules_of(kernel, case):
        got, exact, absolute = launch(rng, kernel, case, each, functools.partial(change, kernel, case))
        bound = 2.0 ** (-20 if is_integer else -9) * absolute + rounding * np.abs(exact)
        assert (np.abs(got - exact) <= bound).all(), (each, np.max(np.abs(got - exact) / bound))


@pytest.mark.parametrize("name", HERE)
class TestSums:
    def test_schedules(self, name):
        check(name, Case(45, 272, 1040))
        check(name, Case(208, 384, 1024, (1, 128), (128, 128), pad=1))

    def test_small(self, name):
        check(name, Case(16, 16, 16))
        check(name, Case(16, 144, 144, pad=1))

    def test_scales_of_rows_and_columns(self, name):
        check(name, Case(160, 272, 640, (1, 640), (640, 1)))
        check(name, Case(144, 144, 400, (144, 400), (400, 144), scale="bfloat16"))
        check(name, Case(144, 144, 400, (1, 400)), WHOLE)
        check(name, Case(144, 144, 400, (0, 0), (400, 1)), WHOLE)

    def test_scales_of_blocks(self, name):
        check(name, Case(144, 384, 1024, (1, 128), (128, 128)))
        check(name, Case(144, 384, 1024, (1, 128), (128, 1), pad=1))
        check(name, Case(272, 160, 768, (1, 256), (128, 1)), WHOLE)
        check(name, Case(272, 160, 768, (1, 768), (128, 160)), WHOLE)

    @pytest.mark.parametrize("scale", SCALES)
    def test_types_of_scales(self, name, scale):
        check(name, Case(32, 144, 512, (1, 128), (512, 1), scale=scale), WHOLE)

    def test_batches(self, name):
        check(name, Case(48, 144, 512, (1, 128), (128, 1), batch=3, pad=1))

    def test_epilogue(self, name):
        check(name, Case(144, 272, 512, (1, 512), (512, 1), has_epilogue=True))


def poison(kernel, case, operands):
    """NaN for the scales of rows in no group, and for those of the matrices of empty groups."""
    by_row = kernel.major_a == _ffi.Major.row
    of_a = operands["scale_of_a"].reshape((case.m, -1) if by_row else (-1, case.m))
    is_used = np.zeros(case.m, bool)
    for begin, end in runs(case.sizes):
        is_used[begin:end] = True
    (of_a if by_row else of_a.T)[~is_used] = np.nan
    operands["scale"].reshape(len(case.sizes), -1)[np.array(case.sizes) == 0] = np.nan


@pytest.mark.parametrize("name", OF_ROWS)
class TestGroupsOfRows:
    def test_groups(self, name):
        check(name, Case(120, 160, 288, sizes=(3, 0, 70, 1, 33)), WHOLE)
        check(name, Case(64 + LEADING, 176, 272, sizes=(1,) * 64), WHOLE)
        check(name, Case(230, 96, 640, sizes=(17, 200), has_epilogue=True), WHOLE)

    def test_scales(self, name):
        check(name, Case(512, 416, 1120, (1, 1120), (1120, 1), sizes=(300, 5, 0, 129), pad=1), WHOLE)
        check(name, Case(512, 416, 1120, (512, 1120), (1120, 416), "bfloat16", sizes=(300, 5, 0, 129)), WHOLE)
        check(name, Case(300, 384, 1024, (1, 128), (128, 128), sizes=(100, 129, 1, 65), has_epilogue=True), WHOLE)
        check(name, Case(300, 384, 1024, (0, 0), (1024, 1), sizes=(0, 0, 290)), WHOLE)

    def test_scales_of_rows_in_no_group_are_not_multiplied(self, name):
        for block_a, block_b in (((1, 1024), (1024, 1)), ((1, 128), (128, 128))):
            for sizes in ((100, 0, 60), (0, 0)):
                case = Case(304, 384, 1024, block_a, block_b, sizes=sizes, has_epilogue=True)
                check(name, case, WHOLE, poison)


@pytest.mark.parametrize("name", OF_K)
def test_groups_of_k(name):
    whole = dict(cuts_k=True)
    check(name, Case(160, 144, 300, sizes=(3, 0, 200, 1, 33), **whole), WHOLE)
    check(name, Case(272, 400, 1000, (1, 1000), (1000, 1), sizes=(1, 128, 129, 0, 700), pad=1, **whole), WHOLE)
    check(name, Case(272, 144, 512, (272, 512), (512, 144), "bfloat16", sizes=(500,), **whole), WHOLE)
    # Long tiles are split where there are many CTAs.
    check(name, Case(256, 128, 6000, (1, 6000), (6000, 1), sizes=(5000, 0, 3, 900), **whole), WHOLE)


@pytest.mark.parametrize("name", OF_K)
def test_scales_of_empty_groups_of_k_are_not_multiplied(name):
    case = Case(160, 144, 304, (1, 304), (304, 1), sizes=(3, 0, 200, 0), cuts_k=True, has_epilogue=True)

    def change(operands):
        operands["scale"][:] = operands["scale_of_a"][:] = np.nan

    got, exact, _ = launch(np.random.default_rng(), KERNELS[name], case, WHOLE, change)
    is_empty = np.array(case.sizes) == 0
    assert np.isnan(got[~is_empty]).all()
    assert (np.abs(got - exact)[is_empty] <= 2.0**-7 * np.abs(exact[is_empty])).all()


@pytest.mark.parametrize("name", [name for name in HERE if KERNELS[name].type_a != _ffi.Type.s8])
def test_nan_and_infinity(name):
    """They reach their row or column of the result, and no other."""
    kernel, case = KERNELS[name], Case(48, 144, 272)
    is_e5m2 = kernel.type_b == _ffi.Type.e5m2  # e4m3 has no infinity

    def change(operands):
        for role, at, code in (("a", (5, 7), 0x7F), ("b", (9, 11), 0x7C if is_e5m2 else 0x7F)):
            line = at if getattr(kernel, f"major_{role}") == _ffi.Major.row else at[::-1]
            operands[role].view(np.uint8)[(0, *line)] = code

    got, _, _ = launch(np.random.default_rng(), kernel, case, WHOLE, change)
    assert np.isnan(got[0, 5]).all()
    assert not np.isfinite(got[0, :, 11]).any()
    assert np.isfinite(np.delete(np.delete(got[0], 5, 0), 11, 1)).all()
