"""Kernels by numbers with scales, launched outside XLA on poisoned buffers, against float64."""

import dataclasses
import itertools

import numpy as np
import pytest
from test_kernels import DTYPES, activated, device_of, launched, make_schedule, poisoned, round_up, runs_here
from test_scaled import INTEGERS, numbers

from jax_streamk import QuantizedArray, _ffi
from jax_streamk.plan.problem import TYPES

KERNELS = {kernel.name: kernel for kernel in _ffi.kernels() if kernel.scaled}
LEADING = 3  # rows before those of the first group


def is_tested(kernel):
    """Of the host's, which are one program whose tiles test_scaled.py tests, a few."""
    types = _ffi.Type.s4, _ffi.Type.s8, _ffi.Type.e2m1
    few = kernel.type_a == kernel.type_d == _ffi.Type.bf16 and kernel.type_b in types and kernel.tile_n == 64
    is_host = kernel.family == _ffi.Family.host
    return runs_here(kernel) and (not is_host or (few and kernel.major_a == _ffi.Major.row))


HERE = [name for name, kernel in KERNELS.items() if is_tested(kernel)]
DENSE = [name for name in HERE if KERNELS[name].ragged == _ffi.Ragged.none]
RAGGED = [name for name in HERE if KERNELS[name].ragged != _ffi.Ragged.none]


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    block: tuple[int, int]  # neighbours along k, and columns, that share a scale
    scale: str = ""  # a dtype, else A's
    zero: bool = False  # of integers
    offset: bool = False
    batch: int = 1
    pad: int = 0  # rows are longer than their contents by this multiple of 16 bytes
    has_epilogue: bool = False
    sizes: tuple[int, ...] = ()  # of groups of rows
    gathered: int = 0  # rows of A, if those of the product are gathered


def schedules_of(kernel, case):
    kinds = _ffi.ScheduleKind
    yield make_schedule(kinds.data_parallel)
    for reduction in kernel.split_k_reductions:
        # A slice of K is a part of what shares a scale if all of K does.
        if reduction != _ffi.Reduction.separate or case.block[0] < case.k:
            yield make_schedule(kinds.split_k, 3, reduction)
    if _ffi.Reduction.ordered in kernel.stream_k_reductions:
        yield make_schedule(kinds.stream_k)


def in_memory(matrices, align, pad=0):
    """(bytes of matrices as rows with poison behind each, the leading dimension), numbers of four bits two to a byte"""
    *lead, lines, length = matrices.shape
    ld = round_up(length, align) + align * pad
    stored = poisoned((*lead, lines, ld), matrices.dtype)
    stored[..., :length] = matrices
    if TYPES[matrices.dtype].bits == 4:
        codes = stored.view(np.uint8) & 15
        stored = codes[..., 0::2] | codes[..., 1::2] << 4
    return stored, ld


def launch(rng, name, case, schedule):
    """D, the exact one, and that of XLA's way: dequantized to A's type and multiplied in float32."""
    kernel, is_ragged = KERNELS[name], bool(case.sizes)
    dtype, dtype_d, format_b = DTYPES[kernel.type_a], DTYPES[kernel.type_d], kernel.type_b
    column_major = kernel.major_b == _ffi.Major.column
    matrices = len(case.sizes) if is_ragged else case.batch
    random = lambda shape: np.asarray(numbers(rng, format_b.dtype.name, shape))
    values = random((matrices, case.k, case.n))
    of_blocks = matrices, case.k // case.block[0], case.n // case.block[1]
    scale = (2.0 ** rng.integers(-6, 0, of_blocks)).astype(case.scale or dtype)
    zero = random(of_blocks) if case.zero and values.dtype.name in INTEGERS else None
    offset = rng.standard_normal(of_blocks).astype(dtype) if case.offset else None
    weights = QuantizedArray(values, scale, zero, offset)

    rows = case.gathered or case.m
    a = rng.standard_normal((1 if is_ragged else case.batch, rows, case.k)).astype(dtype)
    indices = rng.integers(0, rows, case.m, np.int32) if case.gathered else None
    bias = rng.standard_normal((matrices, round_up(case.n, 8))).astype(dtype_d)
    activation = _ffi.Activation.silu if case.has_epilogue else _ffi.Activation.none
    bounds = LEADING + np.cumsum((0, *case.sizes))

    def product(b, wide_dtype):
        """By matrices in one dtype; rows in no group are zero."""
        x, b = a.astype(wide_dtype), b.astype(wide_dtype)
        if not is_ragged:
            sums = x @ b + (bias[:, None, : case.n] if case.has_epilogue else 0)
            return activated(activation, sums)
        out = np.zeros((1, case.m, case.n), wide_dtype)
        x = x[0] if indices is None else x[0, indices]
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            sums = x[begin:end] @ b[i] + (bias[i, : case.n] if case.has_epilogue else 0)
            out[0, begin:end] = activated(activation, sums)
        return out

    exact = product(np.asarray(weights.dequantize(np.float32)), np.float64)
    by_xla = product(np.asarray(weights.dequantize(dtype)), np.float32).astype(dtype_d).astype(np.float64)

    of_b = (lambda x: None if x is None else x.swapaxes(1, 2)) if column_major else (lambda x: x)
    align = max(kernel.align_b, 128 // format_b.bits)
    b, ldb = in_memory(of_b(values), align, case.pad)
    stored_a, lda = in_memory(a, 8, case.pad)
    parts = {"scale": of_b(scale), "zero": of_b(zero), "offset": of_b(offset)}
    stored = {role: None if x is None else in_memory(x.reshape(1, 1, -1), 2)[0] for role, x in parts.items()}
    ldd = round_up(case.n, 8) + 8 * case.pad
    problem = _ffi.GemmProblem(
        matrices, case.m, case.n, case.k, kernel.type_a, format_b, kernel.type_d, kernel.math, kernel.major_a,
        kernel.major_b, lda, ldb, ldd, 0 if is_ragged else rows * lda, values.shape[2 if column_major else 1] * ldb,
        0 if is_ragged else case.m * ldd, activation=activation, has_bias=case.has_epilogue,
        batch_stride_bias=bias.shape[1] if case.has_epilogue else 0,
        ragged=_ffi.Ragged.m if is_ragged else _ffi.Ragged.none, leading_rows=is_ragged, gathered_rows=case.gathered,
        scale_rows=case.block[0], scale_columns=case.block[1], scale_type=TYPES[scale.dtype], has_zero=zero is not None,
        zero_type=format_b if zero is not None else _ffi.Type.f32, has_offset=offset is not None,
        offset_type=TYPES[offset.dtype] if offset is not None else _ffi.Type.f32,
    )  # fmt: skip
    device = device_of(kernel)
    assert (why := _ffi.can_implement(name, problem, schedule, device)) is None, why
    got = launched(
        kernel, problem, schedule, device, (1 if is_ragged else case.batch, case.m, case.n), ldd, dtype_d,
        a=stored_a, b=b, bias=bias if case.has_epilogue else None, indices=indices,
        group_sizes=np.array([LEADING, *case.sizes], np.int32) if is_ragged else None, **stored,
    )  # fmt: skip
    return got.astype(np.float64), exact, by_xla


def check(name, case, schedule=None):
    """The error is at most twice that of XLA's way. Rows in no group are zero."""
    rng = np.random.default_rng()
    if DTYPES[KERNELS[name].type_a] == np.float16 and case.scale not in ("", "float8_e4m3fn"):
        case = dataclasses.replace(case, scale="")  # factors of float16 are its own, or smaller
    for each in [schedule] if schedule else schedules_of(KERNELS[name], case):
        got, exact, by_xla = launch(rng, name, case, each)
        assert np.isfinite(got).all()
        of = lambda x: np.sqrt(np.mean((x - exact) ** 2))
        # Tensor cores truncate float32 sums, which the planner lets only large products do.
        least = 1e-5 if DTYPES[KERNELS[name].type_d] == np.float32 else 1e-6
        assert of(got) <= 2 * of(by_xla) + least * np.abs(exact).max(), (of(got), of(by_xla))
        if case.sizes:
            assert not got[0, :LEADING].any() and not got[0, LEADING + sum(case.sizes) :].any()


WHOLE = make_schedule(_ffi.ScheduleKind.data_parallel)


@pytest.mark.parametrize("name", DENSE)
class TestDense:
    def test_schedules(self, name):
        check(name, Case(45, 256, 1024, (128, 1)))
        check(name, Case(200, 416, 1120, (1120, 1), scale="float32", zero=True, pad=1))
        check(name, Case(129, 224, 416, (32, 1), has_epilogue=True))

    def test_blocks_and_scales(self, name):
        check(name, Case(17, 160, 288, (32, 1), zero=True), WHOLE)
        check(name, Case(33, 96, 640, (128, 32), scale="float8_e4m3fn", pad=1), WHOLE)
        check(name, Case(65, 1024, 2048, (32, 1), scale="float8_e8m0fnu"), WHOLE)
        check(name, Case(3, 32, 96, (96, 32)), WHOLE)
        if KERNELS[name].type_b == _ffi.Type.e2m1:
            check(name, Case(40, 128, 640, (16, 1), scale="float8_e4m3fn"), WHOLE)

    def test_numbers_are_added(self, name):
        check(name, Case(70, 256, 512, (32, 1), offset=True), WHOLE)

    def test_batches(self, name):
        check(name, Case(31, 96, 256, (64, 1), batch=3, zero=True, pad=1), WHOLE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RAGGED or ["no kernel in this build"])
class TestRagged:
    def test_groups(self, name):
        check(name, Case(120, 160, 288, (32, 1), zero=True, sizes=(3, 0, 70, 1, 33)), WHOLE)
        check(name, Case(64 + LEADING, 384, 1024, (64, 1), sizes=(1,) * 64), WHOLE)
        check(name, Case(500, 416, 1120, (1120, 1), scale="float32", sizes=(300, 5, 0, 129), pad=1), WHOLE)
        check(name, Case(230, 96, 640, (32, 1), offset=True, sizes=(17, 200), has_epilogue=True), WHOLE)

    def test_gathers(self, name):
        if not KERNELS[name].gathers:
            return
        check(name, Case(64 + LEADING, 384, 1024, (64, 1), sizes=(1,) * 64, gathered=50), WHOLE)
        check(name, Case(270, 1024, 2048, (32, 1), "float8_e8m0fnu", sizes=(9, 130, 64), gathered=77), WHOLE)
