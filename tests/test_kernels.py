"""Every compiled kernel, launched outside XLA on poisoned buffers, against float64."""

import ctypes
import dataclasses
import functools
import itertools
import math
import re
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_streamk import _ffi, machines
from jax_streamk.device import HOPPER
from jax_streamk.plan.launch_policy import LaunchPolicy

DTYPES = {
    _ffi.Type.f64: np.dtype(np.float64),
    _ffi.Type.f32: np.dtype(np.float32),
    _ffi.Type.bf16: np.dtype(ml_dtypes.bfloat16),
    _ffi.Type.f16: np.dtype(np.float16),
    _ffi.Type.s8: np.dtype(np.int8),
    _ffi.Type.s32: np.dtype(np.int32),
}
GUARD = 256  # bytes of poison before D, and at least after it
POISON = 0xFF  # NaN in every floating-point type, -1 in the integers
# Set explicitly: by default XLA does not use TF32 for some small products, and at HIGH it uses one TF32, not three.
PRECISIONS = {
    "native": None,
    "tf32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
    "tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
}

ON_GPU = jax.default_backend() == "gpu"
# Those of numbers with scales are in test_scaled.py, those that scale sums in test_sums_kernels.py.
KERNELS = {kernel.name: kernel for kernel in _ffi.kernels() if not (kernel.scaled or kernel.scales_sums)}


def runs_here(kernel):
    if kernel.family == _ffi.Family.host:
        return True
    capability = jax.devices()[0].compute_capability if ON_GPU else "0.0"
    return ON_GPU and (kernel.family != _ffi.Family.sm90 or capability == "9.0")


# See test_gated_kernels.py, test_joined.py and test_ragged_kernels.py for the others.
HERE = [
    name
    for name, kernel in KERNELS.items()
    if runs_here(kernel) and not kernel.gated and not kernel.joined and kernel.ragged == _ffi.Ragged.none
]


def device_of(kernel):
    if kernel.family == _ffi.Family.host:
        return _ffi.Device(0, 3)  # threads need not be cores
    gpu = jax.devices()[0]
    return _ffi.Device(int(gpu.compute_capability.replace(".", "")), gpu.core_count)


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    batch: int = 1
    broadcast: str = ""  # operands with batch stride 0: "a", "b" or ""
    pad: int = 0  # leading dimensions exceed the extents by this multiple of the alignment
    woven: bool = False  # the rows, or columns, of B's batches are interleaved


@dataclasses.dataclass(frozen=True)
class Epilogue:
    activation: _ffi.Activation = _ffi.Activation.none
    bias: str = ""  # "", "shared" by all batches, or "batched"
    residual: bool = False
    alpha: float = 1.0  # relative to the typical size of sums of k products, unless the epilogue is plain
    beta: float = 1.0


PLAIN = Epilogue()


def activated(activation, x):
    """The activation in float64."""
    with np.errstate(all="ignore"):
        sigmoid = lambda v: np.where(v < 0, np.exp(v) / (1 + np.exp(v)), 1 / (1 + np.exp(-v)))
        return {
            "none": lambda: x,
            "relu": lambda: np.maximum(x, 0),
            "gelu": lambda: x * 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)),
            "gelu_tanh": lambda: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
            "silu": lambda: x * sigmoid(x),
            "sigmoid": lambda: sigmoid(x),
            "tanh": lambda: np.tanh(x),
        }[activation.name]()


def round_up(x, to):
    return -(-x // to) * to


def poisoned(shape, dtype):
    return np.full(math.prod(shape) * dtype.itemsize, POISON, np.uint8).view(dtype).reshape(shape)


def exact_product(a, b):
    """The product in float64; for float64, in long double: a BLAS that adds in XLA's order would hide XLA's error."""
    if a.dtype != np.float64:
        return np.matmul(a.astype(np.float64), b.astype(np.float64))
    # The high parts are multiples of 2^-18 below 2^3, so float64 adds their products without rounding.
    high_a, high_b = (np.rint(x * 2.0**18) / 2.0**18 for x in (a, b))
    return np.matmul(high_a, high_b) + (np.matmul(high_a, b - high_b) + np.matmul(a - high_a, b)).astype(np.longdouble)


@functools.lru_cache(maxsize=64)
def operands(case, type_ab, major_a, major_b, align_a, align_b, math_name, type_d):
    """Operands with NaN between their rows, the exact product, and the error of XLA's product of the same values."""
    rng = np.random.default_rng(zlib.crc32(repr((case, type_ab, major_a, major_b)).encode()))
    dtype = DTYPES[type_ab]

    def matrix(rows, columns, major, align, batch, woven=False):
        shape = (rows, columns) if major == _ffi.Major.row else (columns, rows)
        ld = round_up(shape[1], align) + case.pad * align
        stored = poisoned((shape[0], batch, ld) if woven else (batch, shape[0], ld), dtype)
        buffer = stored.swapaxes(0, 1) if woven else stored
        values = rng.integers(-128, 128, (batch, *shape)) if dtype == np.int8 else rng.standard_normal((batch, *shape))
        buffer[:, :, : shape[1]] = values.astype(dtype)
        logical = buffer[:, :, : shape[1]]
        strides = (batch * ld, ld) if woven else (ld, 0 if batch < case.batch else shape[0] * ld)
        return stored, logical if major == _ffi.Major.row else logical.swapaxes(1, 2), strides

    a, a_values, strides_a = matrix(case.m, case.k, major_a, align_a, 1 if "a" in case.broadcast else case.batch)
    b, b_values, strides_b = matrix(
        case.k, case.n, major_b, align_b, 1 if "b" in case.broadcast else case.batch, case.woven
    )
    exact = exact_product(a_values, b_values)
    with jax.enable_x64(bool(dtype == np.float64)):
        xla = jnp.matmul(
            jnp.asarray(a_values),
            jnp.asarray(b_values),
            precision=PRECISIONS[math_name],
            preferred_element_type=DTYPES[type_d],
        )
        xla = np.asarray(xla).astype(np.float64)
    scale = math.sqrt(case.k * np.mean(a_values.astype(np.float64) ** 2) * np.mean(b_values.astype(np.float64) ** 2))
    return a, b, strides_a, strides_b, exact, scale, error(xla, exact, scale)


def error(got, exact, scale):
    """Root mean square and largest absolute error, relative to the typical size of a sum of k random products."""
    return math.sqrt(np.mean((got - exact) ** 2)) / scale, np.max(np.abs(got - exact)) / scale


class Memory:
    """Poisoned memory of the kernel's device, by address."""

    def __init__(self, kernel, array_or_bytes):
        self.host = kernel.family == _ffi.Family.host
        if isinstance(array_or_bytes, int):
            array = np.full(array_or_bytes + 4096, POISON, np.uint8)
        else:
            array = np.ascontiguousarray(array_or_bytes).reshape(-1).view(np.uint8)
        if self.host:
            self.array = np.empty(array.size + 4096, np.uint8)
            self.start = -self.array.ctypes.data % 4096
            self.size = array.size
            self.array[self.start : self.start + array.size] = array
            self.address = self.array.ctypes.data + self.start
        else:
            self.array = jax.device_put(array)
            self.array.block_until_ready()
            self.address = self.array.unsafe_buffer_pointer()

    def read(self):
        return self.array[self.start : self.start + self.size] if self.host else np.asarray(self.array)


def with_epilogue(epilogue, case, sums, dtype, align, ldd):
    """For sums of about 1: D in float64, a bias followed by poison, and a residual with poison between its rows."""
    rng = np.random.default_rng(zlib.crc32(repr((case, epilogue)).encode()))
    # If rows of D are aligned to TMA's 16 bytes, a batched bias is too, and so does not rule out a store by TMA.
    stride_bias = round_up(case.n, align) + (8 if ldd % 8 == 0 else align)
    bias = poisoned((case.batch if epilogue.bias == "batched" else 1, stride_bias), dtype)
    residual = poisoned((case.batch, case.m, ldd), dtype)
    for buffer in (bias, residual):
        buffer[..., : case.n] = rng.standard_normal(buffer[..., : case.n].shape).astype(dtype)
    exact = epilogue.alpha * sums
    if epilogue.residual:
        exact = exact + epilogue.beta * residual[..., : case.n].astype(np.float64)
    if epilogue.bias:
        exact = exact + bias[:, None, : case.n].astype(np.float64)
    return (
        activated(epilogue.activation, exact),
        bias if epilogue.bias else None,
        residual if epilogue.residual else None,
    )


# What kernels read, in the order in which they take addresses (gemm_fields.h); D is among them.
ROLES = _ffi.roles


def launched(kernel, problem, schedule, device, shape, ldd, dtype, changes=None, **operands):
    """Runs a kernel. Returns D, of ``shape``, after checking that nothing around it was written.

    ``operands``: arrays or ``Memory`` by role; None for those that the problem has not.
    """
    policy = policy_of(kernel, problem, schedule, device, changes or {})
    held = {role: x if x is None or hasattr(x, "address") else Memory(kernel, x) for role, x in operands.items()}
    *outer, columns = shape
    body_bytes = math.prod(outer) * ldd * dtype.itemsize
    # Tiles beyond D must not be stored: poison the space of the next two.
    beyond = 2 * max(kernel.tile_m, kernel.tile_n) * ldd * dtype.itemsize
    d = Memory(kernel, GUARD * 2 + body_bytes + beyond)
    workspace = Memory(kernel, _ffi.workspace_bytes(kernel.name, problem, schedule, device))
    addresses = {role: x.address for role, x in held.items() if x is not None} | dict(d=d.address + GUARD)
    in_order = tuple(addresses.get(role, 0) for role in ROLES)
    _ffi.launch(kernel.name, problem, schedule, policy, device, in_order, workspace.address)
    if not d.host:
        _ffi.synchronize()
    raw = d.read()
    body = raw[GUARD : GUARD + body_bytes].view(dtype).reshape(*outer, ldd)
    assert (raw[:GUARD] == POISON).all() and (raw[GUARD + body_bytes :] == POISON).all(), "wrote outside D"
    assert (np.ascontiguousarray(body[..., columns:]).view(np.uint8) == POISON).all(), "wrote between the rows of D"
    return np.ascontiguousarray(body[..., :columns])


def launch(
    kernel,
    case,
    schedule,
    epilogue=PLAIN,
    type_d=None,
    ldd=None,
    aligned=True,
    majors=None,
    device=None,
    place=Memory,
    changes=None,
):
    """Runs a kernel, with operands of majornesses `majors` if these are not its own.

    Returns:
      D, after checking that nothing around it was written; the exact D; and (scale, XLA's errors).
    """
    type_d = kernel.type_d if type_d is None else type_d
    align_a, align_b, align_d = (kernel.align_a, kernel.align_b, kernel.align_d) if aligned else (1, 1, 1)
    major_a, major_b = majors or (kernel.major_a, kernel.major_b)
    a, b, (lda, batch_stride_a), (ldb, batch_stride_b), exact, scale, xla_error = operands(
        case, kernel.type_a, major_a, major_b, align_a, align_b, kernel.math.name, type_d
    )
    dtype = DTYPES[type_d]
    if ldd is None:
        ldd = round_up(case.n, align_d) + case.pad * align_d
    arguments = [
        case.batch, case.m, case.n, case.k, kernel.type_a, kernel.type_b, type_d, kernel.math, major_a, major_b,
        lda, ldb, ldd, batch_stride_a, batch_stride_b, case.m * ldd,
    ]  # fmt: skip
    bias = residual = None
    if epilogue != PLAIN:
        exact, bias, residual = with_epilogue(epilogue, case, exact / scale, dtype, align_d, ldd)
        stride_bias = bias[0].size if epilogue.bias == "batched" else 0
        arguments += [
            epilogue.activation,
            bool(epilogue.bias),
            epilogue.residual,
            epilogue.alpha / scale,
            epilogue.beta,
            stride_bias,
        ]
        scale = 1.0
    problem = _ffi.GemmProblem(*arguments)
    device = device or device_of(kernel)
    why = _ffi.can_implement(kernel.name, problem, schedule, device)
    if why is not None:
        return why, None, None
    out = launched(
        kernel, problem, schedule, device, (case.batch, case.m, case.n), ldd, dtype, changes,
        a=place(kernel, a), b=place(kernel, b), bias=bias, residual=residual,
    )  # fmt: skip
    return out, exact, (scale, *xla_error)


def check(kernel, case, schedule, twice=True, epilogue=PLAIN, **kwargs):
    got, exact, xla = launch(kernel, case, schedule, epilogue, **kwargs)
    if exact is None:
        return got
    label = f"{kernel.name} {case} {describe(schedule)} {epilogue}"
    values = got.astype(np.float64)
    assert not np.isnan(values).any(), f"{label}: {np.isnan(values).sum()} elements unwritten or poisoned"
    scale, xla_rms, xla_largest = xla
    rms, largest = error(values, exact, scale)
    # A few roundings of the accumulator. XLA may round a few elements better than a chain of k additions can, and
    # multiplies tiny float32 matrices without TF32. For small and misaligned matrices it adds in shorter chains than
    # wgmma, and than skinny kernels whose warps do not share K: these have one accumulator, which truncates after every
    # 16 products.
    few = exact.size < 64
    floor = 2.0**-51 if kernel.type_d == _ffi.Type.f64 else 2.0**-22
    floor *= math.sqrt(case.k) if few else 1
    if few and kernel.math != _ffi.Math.native:
        floor = 2.0**-10 if kernel.math == _ffi.Math.tf32 else 2.0**-20
    one_chain = kernel.family == _ffi.Family.sm90 or (kernel.family == _ffi.Family.skinny and kernel.tile_m == 256)
    if one_chain and (exact.size < 4096 or not kwargs.get("aligned", True)):
        floor += 2.0**-25 * case.k / 16
    if epilogue != PLAIN:
        # Values of D are larger than sums, and activations have slopes above 1 and f32 errors of about 1e-6.
        xla_rms, xla_largest = 2 * xla_rms, 3 * xla_largest
        floor = 2 * floor + max(
            float(ml_dtypes.finfo(got.dtype).eps), 2.0**-48 if kernel.type_d == _ffi.Type.f64 else 2.0**-20
        )
    assert rms <= 2 * xla_rms + floor, f"{label}: error {rms:.3g}, XLA's {xla_rms:.3g}"
    assert largest <= 4 * xla_largest + 8 * floor, f"{label}: largest error {largest:.3g}, XLA's {xla_largest:.3g}"
    if twice and REDUCTION_OF[schedule] != _ffi.Reduction.atomic:
        again, _, _ = launch(kernel, case, schedule, epilogue, **kwargs)
        assert got.tobytes() == again.tobytes(), f"{label}: two runs differ"
    return None


REDUCTION_OF, ORDER_OF, TEXT_OF = {}, {}, {}


def make_schedule(kind, splits=1, reduction=_ffi.Reduction.ordered, max_sms=0, raster=_ffi.Raster.along_m, swizzle=1):
    schedule = _ffi.Schedule(kind, splits, reduction, max_sms)
    REDUCTION_OF[schedule] = reduction
    ORDER_OF[schedule] = raster, swizzle
    TEXT_OF[schedule] = (
        f"{kind.name} splits={splits} {reduction.name} max_sms={max_sms} {raster.name} swizzle={swizzle}"
    )
    return schedule


def policy_of(kernel, problem, schedule, device, changes):
    """The planner's launch policy for the schedule's order of tiles, with changes."""
    machine = machines.machine_of(HOPPER).native
    planned = LaunchPolicy.of(_ffi.launch_policy(kernel, problem, schedule, *ORDER_OF[schedule], device, machine))
    return dataclasses.replace(planned, **changes).native()


def describe(schedule):
    return TEXT_OF[schedule]


def has_clusters(kernel):
    """Whether build and device have clusters, which skinny kernels need to split K."""
    row_b, k = kernel.major_b == _ffi.Major.row, 2 * kernel.tile_k
    strides = k, 8 if row_b else k, 8
    problem = _ffi.GemmProblem(
        1,
        8,
        8,
        k,
        kernel.type_a,
        kernel.type_b,
        kernel.type_d,
        kernel.math,
        kernel.major_a,
        kernel.major_b,
        *strides,
        0,
        0,
        0,
        gated=kernel.gated,
    )
    return (
        _ffi.can_implement(kernel.name, problem, _ffi.Schedule(_ffi.ScheduleKind.split_k, 2), device_of(kernel)) is None
    )


def all_schedules(kernel, k):
    """Every kind of schedule the kernel claims, with split counts that do and do not divide the k-tiles."""
    k_tiles = -(-k // kernel.tile_k)
    yield make_schedule(_ffi.ScheduleKind.data_parallel)
    yield make_schedule(_ffi.ScheduleKind.data_parallel, raster=_ffi.Raster.along_n, swizzle=2)
    for reduction in kernel.split_k_reductions:
        if kernel.family == _ffi.Family.skinny and reduction == _ffi.Reduction.ordered and not has_clusters(kernel):
            continue
        for splits in sorted({2, 3, k_tiles}):
            if splits <= k_tiles:
                yield make_schedule(_ffi.ScheduleKind.split_k, splits, reduction, swizzle=3)
    for reduction in kernel.stream_k_reductions:
        yield make_schedule(_ffi.ScheduleKind.stream_k, reduction=reduction)
        yield make_schedule(_ffi.ScheduleKind.stream_k, reduction=reduction, max_sms=5)


def admissible(kernel, case):
    """The case with contiguous extents rounded up to the kernel's alignments."""
    row_a, row_b = kernel.major_a == _ffi.Major.row, kernel.major_b == _ffi.Major.row
    return dataclasses.replace(
        case,
        m=round_up(case.m, 1 if row_a else kernel.align_a),
        n=round_up(case.n, math.lcm(kernel.align_d, kernel.align_b if row_b else 1)),
        k=round_up(case.k, math.lcm(kernel.align_a if row_a else 1, 1 if row_b else kernel.align_b)),
    )


@pytest.mark.parametrize("name", HERE)
def test_ragged_tiny_and_deep(name):
    kernel = KERNELS[name]
    cases = [
        Case(1, 1, 1),
        Case(1, 1, 3 * kernel.tile_k + 1),
        Case(kernel.tile_m + 3, kernel.tile_n + 5, 2 * kernel.tile_k + 9, pad=1),
        Case(kernel.tile_m + 5, round_up(kernel.tile_n + 3, 8), kernel.tile_k + 7, pad=8),  # TMA can store D
        Case(17, 33, 5 * kernel.tile_k, batch=2, broadcast="a"),
        Case(33, 9, kernel.tile_k + 3, batch=3, broadcast="b", pad=2),
        Case(
            kernel.tile_n + 3, 2 * kernel.tile_m + 57, kernel.tile_k + 9, batch=2, pad=1
        ),  # several tiles of B if operands are swapped
        Case(9, 2 * kernel.tile_m + 3, 2 * kernel.tile_k + 8, batch=3, woven=True),  # batches at any address
    ]
    for case in (admissible(kernel, case) for case in cases):
        served = 0
        for schedule in all_schedules(kernel, case.k):
            why = check(kernel, case, schedule)
            assert why is None or case.batch > 1 or "batch" in why, why
            served += why is None
        assert served > 0, f"{name} runs {case} in no way"


@pytest.mark.parametrize("name", HERE)
def test_many_waves(name):
    kernel = KERNELS[name]
    large = ON_GPU and kernel.family != _ffi.Family.host
    m, n, k = (2112, 1736, 1016) if large else (290, 270, 200)
    for schedule in all_schedules(kernel, k):
        assert check(kernel, admissible(kernel, Case(m, n, k)), schedule, twice=False) is None


A = _ffi.Activation
# Every activation and every kind of bias, with and without a residual. Neighbours in the list differ in most fields.
EPILOGUES = [
    Epilogue(A.silu, "shared", False, 1.5, 1.0),
    Epilogue(A.none, "batched", True, -0.75, 0.5),
    Epilogue(A.gelu, "", True, 1.25, -1.5),
    Epilogue(A.relu, "batched", False, 1.0, 1.0),
    Epilogue(A.gelu_tanh, "shared", True, 0.5, 2.0),
    Epilogue(A.sigmoid, "batched", True, -1.5, 1.0),
    Epilogue(A.tanh, "shared", True, 2.0, -0.5),
    Epilogue(A.none, "", False, -3.0, 1.0),
    Epilogue(A.silu, "", False, 1.0, 1.0),
    Epilogue(A.none, "shared", True, 0.25, -1.5),
]
IN_FLOATING_POINT = [name for name in HERE if KERNELS[name].type_d != _ffi.Type.s32]


@pytest.mark.parametrize("name", IN_FLOATING_POINT)
def test_epilogue(name):
    """It is applied once to each element of D, whatever the schedule. Kernels start at different EPILOGUES."""
    kernel = KERNELS[name]
    first = zlib.crc32(name.encode()) % len(EPILOGUES)
    cases = [
        Case(1, 1, 1),
        Case(kernel.tile_m + 3, kernel.tile_n + 5, 3 * kernel.tile_k + 9, pad=1),
        Case(kernel.tile_m + 3, round_up(kernel.tile_n + 5, 8), 3 * kernel.tile_k + 9, pad=8),  # TMA can store D
        Case(33, 49, 2 * kernel.tile_k + 3, batch=3, broadcast="b", pad=2),
        Case(33, 56, 2 * kernel.tile_k + 3, batch=2, broadcast="b", pad=8),
    ]
    for i, case in enumerate(cases):
        epilogue, case = EPILOGUES[(first + i) % len(EPILOGUES)], admissible(kernel, case)
        served = [check(kernel, case, schedule, False, epilogue) is None for schedule in all_schedules(kernel, case.k)]
        assert any(served) and (all(served) or case.batch > 1), f"{name} {case} {epilogue}: {served}"


def one_kernel_of(*of):
    """The first kernel for each combination of values of the members ``of``."""
    first = {}
    for name in IN_FLOATING_POINT:
        first.setdefault(tuple(getattr(KERNELS[name], member) for member in of), name)
    return list(first.values())


def one_of_each_sm90_epilogue():
    """The first kernel for each range of accumulators per thread: with more, the epilogue takes fewer at a time."""
    first = {}
    for name in IN_FLOATING_POINT:
        kernel = KERNELS[name]
        if kernel.family != _ffi.Family.sm90:
            continue
        warpgroups = {"cooperative": 3 if kernel.tile_m == 192 else 2}.get(kernel.warp_schedule.name, 1)
        accumulators = kernel.tile_m * kernel.tile_n // (128 * warpgroups)
        several = [accumulators > bound for bound in (32, 64, 72, 127, 128, 159)]
        first.setdefault((kernel.type_d, kernel.swap_ab, warpgroups == 3, *several), name)
    return list(first.values())


@pytest.mark.parametrize("name", sorted({*one_kernel_of("family", "type_d"), *one_of_each_sm90_epilogue()}))
def test_every_epilogue_in_every_schedule(name):
    kernel = KERNELS[name]
    for epilogue, (n, pad) in itertools.product(
        EPILOGUES, ((130, 1), (136, 8))
    ):  # TMA stores rows of D that are aligned to 16 bytes
        case = admissible(kernel, Case(70, n, 4 * kernel.tile_k + 1, pad=pad))
        for schedule in all_schedules(kernel, case.k):
            assert check(kernel, case, schedule, False, epilogue) is None


SEPARATE = [
    name for name in one_kernel_of("family", "type_a", "type_d", "major_b") if "host" not in name and "16_f32" in name
]
SEPARATE_F64 = [name for name in one_kernel_of("family", "type_d") if "_f64_f64" in name and "host" not in name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEPARATE or ["no CUDA kernel in this build"])
def test_a_separate_reduction_converts(name):
    """The kernels write f32; the reduction applies the epilogue and converts, in whole vectors or by element."""
    kernel = KERNELS[name]
    case = admissible(kernel, Case(37, 60, 5 * kernel.tile_k, batch=2))
    if kernel.major_b == _ffi.Major.column:
        case = dataclasses.replace(case, n=61)  # partials are padded
    schedule = make_schedule(_ffi.ScheduleKind.split_k, 3, _ffi.Reduction.separate)
    for epilogue in (PLAIN, *EPILOGUES):
        for ldd in (case.n, case.n + 1, case.n + 8):
            assert check(kernel, case, schedule, True, epilogue, type_d=kernel.type_a, ldd=ldd) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEPARATE + SEPARATE_F64 or ["no CUDA kernel in this build"])
def test_a_separate_reduction_of_many_slices(name):
    """Up to 32 threads share an output: lanes of a warp, and warps of a block."""
    kernel = KERNELS[name]
    for m, n, splits, batch in (
        (1, 1, 35, 1),
        (37, 60, 128, 1),
        (64, 64, 97, 1),
        (13, 9, 6, 1),
        (37, 60, 20, 3),
        (260, 520, 33, 1),
    ):
        case = admissible(kernel, Case(m, n, splits * kernel.tile_k - 8, batch=batch))
        schedule = make_schedule(_ffi.ScheduleKind.split_k, splits, _ffi.Reduction.separate)
        for epilogue in (PLAIN, EPILOGUES[4]):
            assert check(kernel, case, schedule, True, epilogue, type_d=kernel.type_a) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEPARATE[:1] + SEPARATE_F64[:1] or ["no CUDA kernel in this build"])
@pytest.mark.parametrize(
    "m, n, splits",
    [
        (3, 20, [*range(2, 34), 48, 49, 64, 65, 96, 97, 128, 129, 150, 260]),
        (100, 520, [8, 11, 13, 14, 16, 17]),
        (65, 408, [13, 24, 25, 27, 29, 32, 33]),
        (5, 19, [2, 7, 13, 25, 33, 65, 129]),  # no whole vectors in a row
        (190, 520, [5, 6, 7, 8, 9, 15]),
    ],
)
def test_a_separate_reduction_of_any_number_of_slices(name, m, n, splits):
    """Each number of slices per thread has a kernel, and with more slices more threads share an output."""
    kernel = KERNELS[name]
    for count in splits:
        case = admissible(kernel, Case(m, n, count * kernel.tile_k))
        schedule = make_schedule(_ffi.ScheduleKind.split_k, count, _ffi.Reduction.separate)
        for epilogue in (PLAIN, EPILOGUES[4]):
            assert check(kernel, case, schedule, True, epilogue, type_d=kernel.type_a) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in HERE if name.startswith("skinny")] or ["no CUDA kernel in this build"]
)
def test_nested_batches(name):
    """Matrices lie as heads of texts do in a cache: (text, row, head, element)."""
    kernel = KERNELS[name]
    m, n = (5, 72) if kernel.swap_ab else (72, 5)
    texts, heads, k = 3, 2, 3 * kernel.tile_k + kernel.align_a
    rng = np.random.default_rng(zlib.crc32(name.encode()))

    def filled(lines, length):
        """An array with poison behind every line, and its matrices."""
        stored = poisoned((texts, lines, heads, length + 16), DTYPES[kernel.type_a])
        values = rng.standard_normal((texts, lines, heads, length)).astype(stored.dtype)
        stored[..., :length] = values
        return stored, values.swapaxes(1, 2).reshape(texts * heads, lines, length).astype(np.float64)

    row_a, row_b = kernel.major_a == _ffi.Major.row, kernel.major_b == _ffi.Major.row
    a, values_a = filled(*((m, k) if row_a else (k, m)))
    b, values_b = filled(*((k, n) if row_b else (n, k)))
    exact = (values_a if row_a else values_a.swapaxes(1, 2)) @ (values_b if row_b else values_b.swapaxes(1, 2))
    d = poisoned((texts, m, heads, n + 16), DTYPES[kernel.type_d])
    strides = [(heads * x.shape[3], x[0].size, x.shape[3]) for x in (a, b, d)]
    ld, outer, inner = zip(*strides)
    problem = _ffi.GemmProblem(
        texts * heads, m, n, k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a,
        kernel.major_b, *ld, *outer, inner_batch=heads, inner_stride_a=inner[0], inner_stride_b=inner[1],
        inner_stride_d=inner[2],
    )  # fmt: skip
    for splits in (1, 3) if has_clusters(kernel) else (1,):
        schedule = make_schedule(_ffi.ScheduleKind.split_k, splits, _ffi.Reduction.ordered)
        device = device_of(kernel)
        policy = policy_of(kernel, problem, schedule, device, {})
        memory = [Memory(kernel, x) for x in (a, b, d)]
        addresses = [x.address for x in memory]
        _ffi.launch(kernel.name, problem, schedule, policy, device, (*addresses, 0, 0, 0, 0), 0)
        _ffi.synchronize()
        got = memory[2].read()[: d.nbytes].view(d.dtype).reshape(d.shape)
        assert (np.ascontiguousarray(got[..., n:]).view(np.uint8) == POISON).all(), "wrote between the rows of D"
        got = got[..., :n].swapaxes(1, 2).reshape(exact.shape).astype(np.float64)
        rounding = {"tf32": 2**-9, "tf32x3": 2**-17}.get(kernel.math.name, 8 * float(ml_dtypes.finfo(d.dtype).eps))
        assert np.max(np.abs(got - exact)) <= rounding * math.sqrt(k) * 4, f"splits={splits}"


@pytest.mark.gpu
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize(
    "name", [name for name in HERE if name.endswith("_narrow")] or ["no CUDA kernel in this build"]
)
def test_narrow_results(name, n):
    """A row-major B of few columns has rows at any address, whose first element may be half of a 4-byte word."""
    kernel = KERNELS[name]
    cases = [
        Case(3 * kernel.tile_m + 7, n, 2 * kernel.tile_k + 31, pad=1),
        Case(kernel.tile_m - 1, n, 37),
        Case(kernel.tile_m + 1, n, 4 * kernel.tile_k + 1, batch=3, woven=True),
        Case(2 * kernel.tile_m, n, 9 * kernel.tile_k + 3, batch=2, broadcast="b"),
    ]
    for case in (admissible(kernel, case) for case in cases):
        for schedule in all_schedules(kernel, case.k):
            why = check(kernel, case, schedule)
            assert why is None or case.batch > 1, why
        schedule = make_schedule(_ffi.ScheduleKind.data_parallel)
        for epilogue in (EPILOGUES[1], EPILOGUES[4]):
            assert check(kernel, case, schedule, epilogue=epilogue) is None


TMA = [
    name
    for name in one_kernel_of("family", "type_a", "type_d", "major_a", "major_b", "swap_ab")
    if name.startswith("sm90")
]
# Threads transpose B in shared memory.
TRANSPOSING = [name for name in HERE if re.match("sm90_f32_f32_cr_.*_tf32$", name)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted({*TMA, *TRANSPOSING}) or ["no kernel in this build"])
def test_misaligned_matrices(name):
    """TMA kernels copy operands whose rows are not aligned to 16 bytes, and store such a D without TMA."""
    kernel = KERNELS[name]
    cases = [
        Case(1, 1, 1),
        Case(13, 67, 3 * kernel.tile_k + 5, pad=1),
        Case(130, 72, 2 * kernel.tile_k + 3, batch=3, broadcast="b", pad=2),
        Case(72, 131, 4 * kernel.tile_k, batch=2, broadcast="a"),
        Case(37, 70, 2 * kernel.tile_k),
        Case(72, 136, 3 * kernel.tile_k + 5),  # D is aligned
        Case(73, 136, 3 * kernel.tile_k + 5, batch=2),
        Case(1001, 1003, 1005),
        Case(3, 513, 1025),  # pieces of rows that are one element
    ]
    for case in cases:
        served = 0
        for schedule in all_schedules(kernel, case.k):
            for epilogue, type_d in (
                (PLAIN, kernel.type_d),
                (PLAIN, kernel.type_a),
                *((e, kernel.type_d) for e in EPILOGUES[:2]),
            ):
                served += check(kernel, case, schedule, True, epilogue, type_d=type_d, aligned=False) is None
        assert served > 0, f"{name} runs {case} in no way"


COLUMN, ROW = _ffi.Major.column, _ffi.Major.row
# Of TF32 operands that lie along m and n, kernels with equal majors read one transposed; three TF32 always use copies.
# Of a row-major B with 16 bits, fewer than 8 columns are transposed: TMA cannot load them.
COPIED = [
    *(name for name in TMA if KERNELS[name].math == _ffi.Math.native and KERNELS[name].major_b == COLUMN),
    *(name for name in TMA if KERNELS[name].math == _ffi.Math.tf32 and KERNELS[name].major_a == KERNELS[name].major_b),
    *(name for name in HERE if name.startswith("sm90") and KERNELS[name].math == _ffi.Math.tf32x3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", COPIED or ["no kernel in this build"])
def test_copied_operands_have_other_majors(name):
    kernel = KERNELS[name]
    own = kernel.major_a, kernel.major_b
    others = {
        _ffi.Math.tf32x3: [x for x in itertools.product((ROW, COLUMN), repeat=2) if x != own],
        _ffi.Math.tf32: [(COLUMN, ROW)],
        _ffi.Math.native: [(kernel.major_a, ROW)],
    }[kernel.math]
    few = kernel.math == _ffi.Math.native
    cases = [
        Case(1, 1, 1),
        Case(13, 6 if few else 67, 3 * kernel.tile_k + 5, pad=1),
        Case(130, 3 if few else 72, 2 * kernel.tile_k + 3, batch=3, broadcast="b", pad=2),
        Case(72, 7 if few else 131, 4 * kernel.tile_k, batch=2, broadcast="a"),
        Case(1001, 5 if few else 1003, 1005),
    ]
    for case, majors in itertools.product(cases, others):
        served = 0
        for schedule in all_schedules(kernel, case.k):
            for epilogue in (PLAIN, EPILOGUES[0]):
                served += check(kernel, case, schedule, True, epilogue, aligned=False, majors=majors) is None
        assert served > 0, f"{name} runs {case} in no way"


GRAM = [name for name in TMA if KERNELS[name].major_a == COLUMN and KERNELS[name].major_b == ROW]


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [(37, 37), (37, 21)], ids=str)
@pytest.mark.parametrize("name", GRAM or ["no kernel in this build"])
def test_operands_at_one_address_may_share_a_copy(name, columns):
    """Of x.T @ x, one copy is both operands, but not of two operands that only begin in one place."""
    kernel, (m, n) = KERNELS[name], columns
    k, dtype = 3 * kernel.tile_k + 5, DTYPES[kernel.type_a]
    values = np.random.default_rng().standard_normal((k, max(m, n))).astype(dtype)
    types = kernel.type_a, kernel.type_b, kernel.type_d, kernel.math
    problem = _ffi.GemmProblem(1, m, n, k, *types, COLUMN, ROW, m, n, n, 0, 0, 0)
    a, b = (values.reshape(-1)[: k * x].reshape(k, x) for x in (m, n))
    for schedule in all_schedules(kernel, k):
        memory = Memory(kernel, values)
        run = functools.partial(
            launched, kernel, problem, schedule, device_of(kernel), (m, n), n, DTYPES[kernel.type_d]
        )
        shared, apart = run(a=memory, b=memory), run(a=a.copy(), b=b.copy())
        np.testing.assert_allclose(shared.astype(float), exact_product(a.T, b), rtol=0.02, atol=0.1)
        assert shared.tobytes() == apart.tobytes() or REDUCTION_OF[schedule] == _ffi.Reduction.atomic


@pytest.mark.parametrize("activation", list(A), ids=lambda activation: activation.name)
@pytest.mark.parametrize("n", (126, 128))  # TMA stores rows of 128
@pytest.mark.parametrize("name", one_kernel_of("family", "type_d", "swap_ab"))
def test_activations_are_accurate_in_their_tails_and_propagate_nan_and_inf(name, n, activation):
    kernel = KERNELS[name]
    dtype = DTYPES[kernel.type_d]
    special = [np.nan, np.inf, -np.inf, 0.0, 1e4, -1e4]
    logarithmic = np.logspace(-6, 1.9, 500)
    x = np.concatenate([special, np.linspace(-13, 13, 4000), logarithmic, -logarithmic]).astype(dtype)
    m = 40
    case = admissible(kernel, Case(m, n, 1))
    n, k = case.n, case.k
    assert x.size <= m * n
    x = np.resize(x, (m, n))
    zeros = Memory(kernel, np.zeros(max(m, n) * k, DTYPES[kernel.type_a]))
    row_a, row_b = kernel.major_a == _ffi.Major.row, kernel.major_b == _ffi.Major.row
    problem = _ffi.GemmProblem(
        1, m, n, k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b,
        k if row_a else m, n if row_b else k, n, 0, 0, 0, activation, False, True,
    )  # fmt: skip
    schedule, device = make_schedule(_ffi.ScheduleKind.data_parallel), device_of(kernel)
    got = launched(kernel, problem, schedule, device, (m, n), n, dtype, a=zeros, b=zeros, residual=x).astype(np.float64)
    expected = activated(activation, x.astype(np.float64))
    # In an exponential tail the relative error grows with the exponent.
    exponential = activation in (A.silu, A.sigmoid, A.gelu_tanh)
    relative = 1e-11 if kernel.type_d == _ffi.Type.f64 else 2e-5 if exponential else 3e-6
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    relative += float(ml_dtypes.finfo(dtype).eps) * (dtype.itemsize == 2)
    with np.errstate(invalid="ignore"):
        close = np.abs(got - expected) <= relative * np.abs(expected) + 100 * smallest
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    worst = np.unravel_index(np.argmax(~(close | same)), x.shape)
    assert (close | same).all(), f"{name}: {activation.name}({x[worst]}) = {got[worst]}, exactly {expected[worst]}"


@pytest.mark.parametrize("name", [name for name in HERE if KERNELS[name].type_d == _ffi.Type.s32][:1])
def test_integers_have_no_epilogue(name):
    kernel = KERNELS[name]
    for epilogue in (Epilogue(A.relu), Epilogue(bias="shared"), Epilogue(residual=True), Epilogue(alpha=2.0)):
        why, _, _ = launch(kernel, Case(8, 8, 8), make_schedule(_ffi.ScheduleKind.data_parallel), epilogue)
        assert "an epilogue needs D in floating point" in why


@pytest.mark.parametrize("name", HERE)
def test_one_split_is_the_unsplit_product_bit_for_bit(name):
    kernel = KERNELS[name]
    case = admissible(kernel, Case(70, 40, 4 * kernel.tile_k + 1))
    unsplit, _, _ = launch(kernel, case, make_schedule(_ffi.ScheduleKind.data_parallel))
    ways = [make_schedule(_ffi.ScheduleKind.split_k, splits=1), make_schedule(_ffi.ScheduleKind.stream_k, max_sms=1)]
    for schedule in ways:
        same, exact, _ = launch(kernel, case, schedule)
        assert exact is not None, same
        assert same.tobytes() == unsplit.tobytes(), describe(schedule)


@pytest.mark.parametrize("name", [name for name in HERE if KERNELS[name].family == _ffi.Family.sm90])
def test_stages_that_loads_leave_empty_change_no_bit(name):
    """Few rows, but enough columns that the CTAs of a small GPU have several tiles, with more k-tiles than stages."""
    kernel = KERNELS[name]
    case = admissible(kernel, Case(13, 2600, (kernel.stages + 2) * kernel.tile_k + 1))
    ways = [make_schedule(_ffi.ScheduleKind.data_parallel)]
    if _ffi.Reduction.separate in kernel.split_k_reductions:
        ways.append(make_schedule(_ffi.ScheduleKind.split_k, 2, _ffi.Reduction.separate))
    for schedule in ways:
        # Loads fill all stages; three; and, for most kernels, three in whole waves and more in the last.
        ways_to_load = 0, 1, 16 * 3 * kernel.tile_m * kernel.tile_k * DTYPES[kernel.type_a].itemsize
        products = [
            launch(kernel, case, schedule, device=_ffi.Device(90, 16, under_way))[0] for under_way in ways_to_load
        ]
        assert len({product.tobytes() for product in products}) == 1, describe(schedule)


@pytest.mark.parametrize(
    "name", [name for name in HERE if KERNELS[name].family in (_ffi.Family.sm90, _ffi.Family.skinny)]
)
def test_choices_of_the_launch_change_no_bit(name):
    """For any launch policy that a kernel accepts, in one order of tiles and without Stream-K."""
    kernel = KERNELS[name]
    case = admissible(kernel, Case(70, 1500, 5 * kernel.tile_k + 1, batch=2))
    changes = [dict(evict_first_a=a, evict_first_b=b) for a, b in itertools.product((False, True), repeat=2)]
    if kernel.family == _ffi.Family.skinny:
        for_a, for_b = not kernel.swap_ab, kernel.swap_ab and kernel.align_b > 1
        changes = [each for each in changes if each["evict_first_a"] <= for_a and each["evict_first_b"] <= for_b]
    else:
        changes += [dict(extend_a=x, extend_b=x) for x in (False, True)] + [dict(idle_clusters=0)]
        held = max(kernel.stages - 3, 0)
        changes += [dict(held_back=held, held_back_last=last) for last in {0, held}]
        if kernel.warp_schedule.name != "single":
            changes += [dict(cluster_order=order) for order in ("as_launched", "by_gpc", "spread")]
    schedule = make_schedule(_ffi.ScheduleKind.data_parallel)
    products = [launch(kernel, case, schedule, changes=each)[0].tobytes() for each in ({}, *changes)]
    assert len(set(products)) == 1


@pytest.mark.parametrize("name", [name for name in HERE if KERNELS[name].type_a not in (_ffi.Type.s8,)])
def test_nan_and_inf_propagate(name):
    kernel = KERNELS[name]
    case = admissible(kernel, Case(9, 11, 3 * kernel.tile_k))
    a, b, (lda, _), (ldb, _), _, _, _ = operands(
        case,
        kernel.type_a,
        kernel.major_a,
        kernel.major_b,
        kernel.align_a,
        kernel.align_b,
        kernel.math.name,
        kernel.type_d,
    )
    a, b = a.copy(), b.copy()
    row = kernel.major_a == _ffi.Major.row
    a[(0, 2, 2 * kernel.tile_k) if row else (0, 2 * kernel.tile_k, 2)] = np.nan
    a[(0, 5, 1) if row else (0, 1, 5)] = np.inf
    b[(0, 1, 10) if kernel.major_b == _ffi.Major.row else (0, 10, 1)] = -np.inf
    device = device_of(kernel)
    ldd = round_up(case.n, kernel.align_d)
    problem = _ffi.GemmProblem(
        1, case.m, case.n, case.k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math,
        kernel.major_a, kernel.major_b,
        lda, ldb, ldd, 0, 0, 0,
    )  # fmt: skip
    for schedule in all_schedules(kernel, case.k):
        assert _ffi.can_implement(kernel.name, problem, schedule, device) is None
        on_a, on_b = Memory(kernel, a), Memory(kernel, b)
        d = Memory(kernel, case.m * ldd * DTYPES[kernel.type_d].itemsize)
        workspace = Memory(kernel, _ffi.workspace_bytes(kernel.name, problem, schedule, device))
        addresses = (on_a.address, on_b.address, d.address, 0, 0, 0, 0)
        policy = policy_of(kernel, problem, schedule, device, {})
        _ffi.launch(kernel.name, problem, schedule, policy, device, addresses, workspace.address)
        if not d.host:
            _ffi.synchronize()
        got = d.read()[: case.m * ldd * DTYPES[kernel.type_d].itemsize].view(DTYPES[kernel.type_d]).reshape(case.m, ldd)
        finite = np.isfinite(got[:, : case.n].astype(np.float64))
        assert np.isnan(got[2, : case.n].astype(np.float64)).all()
        assert not finite[5].any()
        assert not finite[:, 10].any()
        assert finite[[0, 1, 3, 4, 6, 7, 8], :10].all()


def test_registry_describes_every_kernel():
    assert list(KERNELS) == sorted(KERNELS)
    for kernel in KERNELS.values():
        assert kernel.tile_m > 0 and kernel.tile_n > 0 and kernel.tile_k > 0 and kernel.stages >= 1
        assert min(kernel.align_a, kernel.align_b, kernel.align_d) >= 1
        assert kernel.threads >= 1


def test_resources_need_a_gpu():
    host = next(kernel for kernel in KERNELS.values() if kernel.family == _ffi.Family.host)
    with pytest.raises(RuntimeError, match=f"{host.name} does not run on a GPU"):
        host.resources()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [name for name in KERNELS if runs_here(KERNELS[name]) and not name.startswith("host")]
    or ["no CUDA kernel in this build"],
)
def test_resources_on_a_gpu(name):
    registers, ctas_per_sm = KERNELS[name].resources()
    assert 16 <= registers <= 255
    assert ctas_per_sm >= (4 if KERNELS[name].warp_schedule.name == "single" else 1)


class Apart:
    """An array at the beginning or the end of its own poisoned allocation."""

    def __init__(self, at_the_end, kernel, array):
        self.cuda, context, self.start, size = (
            ctypes.CDLL("libcuda.so.1"),
            ctypes.c_void_p(),
            ctypes.c_uint64(),
            2 << 20,
        )
        assert (
            self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            and self.cuda.cuCtxSetCurrent(context) == 0
        )
        assert self.cuda.cuMemAlloc_v2(ctypes.byref(self.start), ctypes.c_size_t(size)) == 0
        content = np.full(size, POISON, np.uint8)
        at = size - array.nbytes if at_the_end else 0
        content[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        to, from_ = self.start, ctypes.c_void_p(content.ctypes.data)
        assert self.cuda.cuMemcpyHtoD_v2(to, from_, ctypes.c_size_t(size)) == 0
        self.address = self.start.value + at

    def __del__(self):
        self.cuda.cuMemFree_v2(self.start)


BEYOND = [
    *(name for name in HERE if re.match("sm90_bf16_(bf16|f32)_.._(64x16x128|64x128x64|128x160x64|256x152x64)_", name)),
    *TRANSPOSING,
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(72, 904, 200), Case(904, 72, 200, batch=2), Case(20, 72, 200)])
@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("name", BEYOND or ["no CUDA kernel in this build"])
def test_what_a_tile_has_beyond_an_operand(name, at_the_end, case):
    """Whole tiles are loaded, even beyond an operand, whatever is there, but not beyond its allocation."""
    if name not in KERNELS:
        pytest.skip("this build or GPU has no kernel of the sm90 family")
    schedule = make_schedule(_ffi.ScheduleKind.data_parallel)
    assert check(KERNELS[name], case, schedule, place=functools.partial(Apart, at_the_end)) is None
