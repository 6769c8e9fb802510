"""The bounds of docs/numerics.md on inputs that are hard for a sum, and IEEE's NaN, infinities and overflow."""

import functools
import math

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_streamk as sk
from jax_streamk import Auto, DataParallel, SplitK, StreamK, matmul

ON_GPU = jax.default_backend() == "gpu"
SPLITS = 7
SCHEDULES = [
    Auto(),
    DataParallel(),
    SplitK(SPLITS),
    SplitK(SPLITS, "atomic"),
    SplitK(SPLITS, "separate"),
    StreamK(),
    StreamK("separate"),
]
WORKERS = 1024  # no machine here cuts the k of one tile into more runs
BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
# (operands, result, precision)
KINDS = [
    (BF16, np.float32, None),
    (BF16, BF16, None),
    (np.float16, np.float32, None),
    (np.float16, np.float16, None),
    (np.float32, np.float32, None),
    (np.float32, np.float32, "high"),
    (np.float64, np.float64, None),
    (F8, np.float32, None),
]
NAMES = [f"{np.dtype(a).name} {np.dtype(d).name} {precision or ''}".strip() for a, d, precision in KINDS]
of_every_kind = pytest.mark.parametrize("operand, result, precision", KINDS, ids=NAMES)


@pytest.fixture(autouse=True)
def x64(request):
    params = getattr(request.node, "callspec", None)
    with jax.enable_x64(params is not None and params.params.get("operand") is np.float64):
        yield


def largest_exponent(dtype):
    """Of operands whose products and sums stay finite in every result."""
    return {np.dtype(np.float16): 3, np.dtype(F8): 3, np.dtype(np.float64): 200}.get(np.dtype(dtype), 30)


def normal(rng, m, k, n, dtype):
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def positive(rng, m, k, n, dtype):
    """Partial sums that keep growing."""
    return rng.random((m, k)), rng.random((k, n))


def cancelling(rng, m, k, n, dtype):
    """Ill-conditioned: the second half of k cancels what the first sums up to, except a part in 2^6."""
    a, b = rng.random((m, k)), rng.random((k, n))
    half = k // 2
    a[:, half : 2 * half], b[half : 2 * half] = a[:, :half], -b[:half] * (1 - 2.0**-6)
    return a, b


def wide(rng, m, k, n, dtype):
    """A large dynamic range."""
    most = largest_exponent(dtype)
    return tuple(rng.standard_normal(shape) * 2.0 ** rng.integers(-most, most + 1, shape) for shape in ((m, k), (k, n)))


def tiny(rng, m, k, n, dtype):
    """Subnormal numbers among others, of the operands' type."""
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    return np.where(rng.random((m, k)) < 0.5, a * least / 4, a), b


def with_types(pair, dtype):
    return tuple(x.astype(dtype) for x in pair)


def accumulator(operand):
    return np.float64 if operand is np.float64 else np.float32


def exact(a, b):
    """The product, and the sum of the absolute values of what is added; of float64, as long double."""
    high = np.longdouble if a.dtype == np.float64 else np.float64
    a, b = a.astype(high), b.astype(high)
    return a @ b, np.abs(a) @ np.abs(b)


def bound(a, b, product, absolute, made, result, precision):
    """docs/numerics.md: what an element of the result may be off by."""
    k, kind = a.shape[1], np.dtype(accumulator(a.dtype.type))
    unit = float(np.finfo(kind).eps) / 2
    runs = getattr(made.schedule, "splits", 1 if isinstance(made.schedule, DataParallel) else WORKERS)
    is_of_host = made.kernel is not None and made.kernel.startswith("host_")
    if is_of_host:
        relative = unit * (min(k, 4096) + math.ceil(k / 4096) + runs)
    elif made.kernel is None or kind == np.float64:  # XLA's may be one chain
        relative = unit * (k + runs)
    else:  # tensor cores truncate what they add
        chain = {x.name: x for x in sk.kernels()}[made.kernel].promotion_k or k
        relative = 4 * unit * min(chain, k) + unit * (k / chain + runs)
    if ON_GPU and a.dtype == np.float32:
        # Operands rounded to TF32, by XLA perhaps cut off, or in two parts of it.
        relative += 2.0**-20 if precision == "high" else 2.0**-10 if made.kernel else 2.0**-9
    if ON_GPU and a.dtype == F8:
        relative += 2.0**-9
    # XLA's threads take subnormal numbers of float32 and float64 as zero, and flush what they compute.
    least = float(np.finfo(kind).tiny)
    wide = [x.astype(np.float64) for x in (a, b)]
    flushed = [np.where(np.abs(x) < least, np.abs(x), 0) for x in wide]
    lost = flushed[0] @ np.abs(wide[1]) + np.abs(wide[0]) @ flushed[1] + (2 * k + runs) * least
    info = ml_dtypes.finfo(result)
    rounding = float(info.eps) / 2 * (np.abs(product) + relative * absolute) + float(info.smallest_normal)
    return relative * absolute + lost + rounding * (np.dtype(result) != kind)


def planned(a, b, schedule, **params):
    """The plan, or None where the kernels of this device do not take the schedule."""
    try:
        return sk.plan(a, b, schedule=schedule, **params)
    except ValueError:
        return None


def check(a, b, result, precision, schedules=SCHEDULES):
    params = dict(precision=precision, preferred_element_type=result)
    (product, absolute), served = exact(a, b), 0
    for schedule in schedules:
        made = planned(a, b, schedule, **params)
        if made is None:
            continue
        served += 1
        got = np.asarray(jax.jit(functools.partial(matmul, schedule=schedule, **params))(a, b))
        assert got.dtype == result
        error = np.abs(got.astype(product.dtype) - product)
        most = bound(a, b, product, absolute, made, result, precision)
        assert (error <= most).all(), f"{schedule}, {made.kernel}: {np.max(error / most)} of the bound"
    assert served


@pytest.mark.parametrize("draw", [normal, positive, cancelling, wide, tiny], ids=lambda draw: draw.__name__)
@of_every_kind
def test_bounds(operand, result, precision, draw):
    rng = np.random.default_rng()
    a, b = with_types(draw(rng, 19, int(rng.integers(900, 1100)), 24, operand), operand)
    check(a, b, result, precision)


@pytest.mark.parametrize("draw", [positive, cancelling], ids=lambda draw: draw.__name__)
@of_every_kind
def test_bounds_of_long_sums(operand, result, precision, draw):
    if result is np.float16 and draw is positive:
        pytest.skip("sums of a million positive numbers are beyond float16")
    a, b = with_types(draw(np.random.default_rng(), 4, 2**20, 8, operand), operand)
    check(a, b, result, precision, [Auto(), SplitK(SPLITS)])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_integers_are_exact(schedule):
    rng = np.random.default_rng()
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((19, 70000), (70000, 24)))
    if planned(a, b, schedule, preferred_element_type=np.int32) is not None:
        got = matmul(a, b, schedule=schedule, preferred_element_type=np.int32)
        np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64))


@of_every_kind
def test_nan_and_infinities_are_where_ieee_says(operand, result, precision):
    """Small integers, whose other sums are exact."""
    rng = np.random.default_rng()
    a, b = (rng.integers(-3, 4, shape).astype(np.float64) for shape in ((19, 1000), (1000, 24)))
    a[2, 900], a[3, 0], a[4, 5], a[4, 999] = np.nan, np.inf, np.inf, -np.inf
    b[17, 7] = np.nan
    if operand is F8:  # which has no infinities
        a[np.isinf(a)] = 3
    if ON_GPU and precision == "high":  # infinity minus infinity: docs/numerics.md
        a[np.isinf(a)] = 3
    with np.errstate(invalid="ignore"):
        # BLAS may skip products with zero.
        wanted = np.stack([(row[:, None] * b).sum(0) for row in a])
    assert np.isnan(wanted).any()
    a, b = with_types((a, b), operand)
    for schedule in SCHEDULES:
        params = dict(precision=precision, preferred_element_type=result)
        if planned(a, b, schedule, **params) is not None:
            got = matmul(a, b, schedule=schedule, **params)
            np.testing.assert_array_equal(np.asarray(got, np.float64), wanted.astype(result).astype(np.float64))


@of_every_kind
def test_what_no_result_holds_is_infinite(operand, result, precision):
    """And what just fits is finite, whatever the sum was on its way."""
    exponent = ml_dtypes.finfo(result).maxexp - 1
    if 2.0 ** (exponent // 2) > float(ml_dtypes.finfo(operand).max):
        pytest.skip("no sum of few of these products is beyond the result")
    a, b = np.zeros((19, 640)), np.zeros((640, 24))
    a[:3, 0], b[[0, 1, 639]] = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)  # the largest power of two
    a[0, 1], a[1, 639] = a[0, 0], -a[0, 0]  # twice that, and nothing left
    a, b = with_types((a, b), operand)
    got = matmul(a, b, precision=precision, preferred_element_type=result, schedule=SplitK(3))
    np.testing.assert_array_equal(np.asarray(got, np.float64)[:3], np.repeat([[np.inf], [0], [2.0**exponent]], 24, 1))


@pytest.mark.parametrize("operand", [BF16, np.float16], ids=lambda x: np.dtype(x).name)
def test_a_result_is_rounded_once(operand):
    """After the epilogue: of sums in float32, half a unit in the last place of the result, to even."""
    rng = np.random.default_rng()
    # Integers that float32 sums exactly in any order.
    a, b = with_types((rng.integers(-8, 9, (19, 777)), rng.integers(-8, 9, (777, 24))), operand)
    bias, residual = (rng.integers(-8, 9, shape).astype(operand) for shape in ((24,), (19, 24)))
    wanted = a.astype(np.float64) @ b.astype(np.float64) + residual.astype(np.float64) + bias.astype(np.float64)
    for schedule in SCHEDULES:
        if planned(a, b, schedule) is not None:
            got = sk.linear(a, b, bias, residual=residual, schedule=schedule)
            np.testing.assert_array_equal(np.asarray(got), wanted.astype(np.float32).astype(operand))
