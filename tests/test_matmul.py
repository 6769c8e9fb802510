"""``matmul`` against ``jnp.matmul``, NumPy and float64, on whatever backend JAX has."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout

import jax_streamk
from jax_streamk import Auto, DataParallel, PerPass, SplitK, StreamK, _ffi, dot_general, matmul, plan

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
BF16, F16, F32, F64 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
FLOATS = [F32, F64, BF16, F16]
REDUCTIONS = ("ordered", "atomic", "separate")
SCHEDULES = [
    DataParallel(),
    *(SplitK(splits, reduction) for splits in (1, 2, 3, 7) for reduction in REDUCTIONS),
    *(StreamK(reduction) for reduction in REDUCTIONS),
    StreamK(max_sms=1),
    StreamK(max_sms=2),
]
KINDS = {
    DataParallel: _ffi.ScheduleKind.data_parallel,
    SplitK: _ffi.ScheduleKind.split_k,
    StreamK: _ffi.ScheduleKind.stream_k,
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def normal(shape, dtype, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def small_integers(shape, dtype=np.float32, seed=0):
    """Integers that every type multiplies and adds exactly."""
    return np.random.default_rng([seed, *shape]).integers(-3, 4, shape).astype(dtype)


def custom_calls(lowered):
    """The attributes of every call of ours in a lowered program."""
    target = "jax_streamk_cuda_gemm" if PLATFORM == "cuda" else "jax_streamk_host_gemm"
    found = re.findall(rf"custom_call @{target}\(.*?backend_config = \{{(.*?)\}}", lowered.as_text())
    return [{name: value.strip('"') for name, value in re.findall(r'(\w+) = ("[^"]*"|-?\d+)', text)} for text in found]


def is_served(a, b, schedule, **kwargs):
    """Whether some kernel runs the product under the schedule: on GPUs not all have every reduction or cut batches."""
    try:
        jax_streamk.plan(a, b, schedule=schedule, **kwargs)
    except ValueError as error:
        assert PLATFORM == "cuda", schedule
        if "in float32 at this precision" in str(error):
            return False
        assert not isinstance(schedule, (Auto, DataParallel)), schedule
        assert schedule.reduction != "ordered" or max(np.ndim(a), np.ndim(b)) > 2, schedule
        return False
    return True


def assert_as_exact_as_xla(got, a, b, label="", precision=None):
    """Root mean square error against a wider type of at most twice XLA's own, and a rounding of the accumulator."""
    wider = np.longdouble if got.dtype == F64 else F64
    exact = np.matmul(a.astype(wider), b.astype(wider, order="F"))
    k = a.shape[-1]
    scale = math.sqrt(max(k * np.mean(a.astype(F64) ** 2) * np.mean(b.astype(F64) ** 2), 1e-300))
    xla = np.asarray(jnp.matmul(a, b, precision=precision, preferred_element_type=got.dtype))
    ours, xlas = (math.sqrt(np.mean((x.astype(wider) - exact) ** 2)) / scale for x in (np.asarray(got), xla))
    # XLA's sum of a few products may be exact by chance, and another order may round once.
    floor = 2.0**-53 if got.dtype == F64 else 2.0**-24
    few = exact.size < 64  # too few for a mean
    if PLATFORM == "cuda" and a.dtype == F32:
        floor = 2.0**-22  # three TF32 are nearly float32
    if few or (PLATFORM == "cuda" and got.dtype == F64):
        floor *= math.sqrt(k)  # what one chain of k sums loses, where cuBLAS has several
    assert ours <= 2 * xlas + floor, f"{label}: error {ours:.3g}, XLA's {xlas:.3g}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("m, n, k", [(97, 203, 1000), (128, 256, 1024), (1, 1, 1033), (8, 600, 521), (17, 5, 449)])
def test_every_schedule_is_obeyed_and_exact(dtype, m, n, k, x64):
    a, b = normal((m, k), dtype, 1), normal((k, n), dtype, 2)
    for schedule in SCHEDULES:
        if not is_served(a, b, schedule):
            continue
        lowered = jax.jit(functools.partial(matmul, schedule=schedule)).lower(a, b)
        (call,) = custom_calls(lowered)
        assert int(call["schedule"]) == KINDS[type(schedule)].value
        assert int(call["splits"]) == getattr(schedule, "splits", 1)
        assert int(call["reduction"]) == REDUCTIONS.index(getattr(schedule, "reduction", "ordered"))
        assert int(call["max_sms"]) == (getattr(schedule, "max_sms", None) or 0)
        got = lowered.compile()(a, b)
        assert got.dtype == dtype and got.shape == (m, n)
        assert_as_exact_as_xla(got, a, b, schedule)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("m, n", [(1, 1), (5, 300), (129, 1), (64, 64)])
def test_outer_product(dtype, m, n, x64):
    """K = 1: one k-tile, nearly all of it padding."""
    a, b = normal((m, 1), dtype, 1), normal((1, n), dtype, 2)
    for schedule in (Auto(), DataParallel(), SplitK(1), StreamK()):
        if is_served(a, b, schedule):
            assert_as_exact_as_xla(matmul(a, b, schedule=schedule), a, b, schedule)
    with pytest.raises(ValueError, match=r"splits=2 exceeds its 1 k-tiles|in float32 at this precision"):
        matmul(a, b, schedule=SplitK(2))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrow_operands_with_float32_result(dtype):
    a, b = normal((65, 777), dtype, 1), normal((777, 130), dtype, 2)
    for schedule in (Auto(), *SCHEDULES):
        if is_served(a, b, schedule, preferred_element_type=F32):
            got = matmul(a, b, preferred_element_type=jnp.float32, schedule=schedule)
            assert got.dtype == F32
            assert_as_exact_as_xla(got, a, b, schedule)


@pytest.mark.parametrize("operand, result", [(F32, F32), (BF16, F32), (F16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize(
    "k, n, rows",
    [
        (1000, 72, (1, 2, 8, 9, 16, 32, 33, 40)),
        (4096, 72, (1, 5, 13, 40)),
        (16384, 72, (2, 12, 33)),
        (65536, 72, (3, 16)),
        (2**20, 16, (9,)),
    ],
)
def test_long_sums_are_exact(operand, result, k, n, rows):
    """For any number of rows. Sums of positive numbers have the largest errors, since partial sums keep growing."""
    rng = np.random.default_rng()
    rows = *rows, *rng.integers(1, 41, 2)
    for draw in (rng.standard_normal, rng.random):
        a, b = (draw(shape, F32).astype(operand) for shape in ((max(rows), k), (k, n)))
        for m in rows:
            got = matmul(a[:m], b, preferred_element_type=result)
            assert got.dtype == result
            assert_as_exact_as_xla(got, a[:m], b, f"{m} rows, {draw.__name__}")


@pytest.mark.parametrize("schedule", [Auto(), *SCHEDULES], ids=str)
def test_int8_sums_in_int32(schedule):
    rng = np.random.default_rng(0)
    k, n = (1008, 96) if PLATFORM == "cuda" else (1000, 90)  # rows of whole 16 bytes
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((67, k), (k, n)))
    if PLATFORM == "cuda" and getattr(schedule, "reduction", "") == "separate" and getattr(schedule, "splits", 2) > 1:
        with pytest.raises(ValueError, match="cannot run"):
            matmul(a, b, preferred_element_type=jnp.int32, schedule=schedule)
        return
    got = matmul(a, b, preferred_element_type=jnp.int32, schedule=schedule)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))


SHAPES = [
    ((3,), (3,)), ((3,), (3, 5)), ((4, 3), (3,)), ((1,), (1,)), ((2, 4, 3), (3,)), ((3,), (2, 3, 5)),
    ((3,), (2, 1, 3, 5)), ((4, 3), (3, 5)),
    ((2, 4, 3), (3, 5)), ((4, 3), (2, 3, 5)), ((4, 3), (7, 2, 3, 5)), ((2, 4, 3), (2, 3, 5)),
    # Sizes of 1 that broadcast, and dimensions that only one operand has.
    ((4, 3), (1, 3, 5)), ((1, 4, 3), (3, 5)), ((1, 4, 3), (2, 3, 5)), ((2, 4, 3), (1, 3, 5)), ((1, 4, 3), (1, 3, 5)),
    ((4, 3), (1, 1, 3, 5)), ((1, 4, 3), (1, 1, 3, 5)), ((2, 1, 4, 3), (1, 5, 3, 6)), ((1, 5, 4, 3), (2, 1, 3, 6)),
    ((7, 1, 4, 3), (5, 3, 6)), ((5, 4, 3), (7, 1, 3, 6)), ((1, 1, 4, 3), (2, 5, 3, 6)), ((2, 5, 4, 3), (2, 1, 3, 6)),
    ((2, 5, 4, 3), (1, 5, 3, 6)), ((2, 1, 2, 4, 3), (1, 3, 1, 3, 6)), ((2, 3, 1, 4, 3), (3, 2, 3, 6)),
    ((1, 3), (2, 3, 5)), ((2, 3, 1, 7), (7, 1)), ((1, 1), (1, 1)), ((2, 1, 1), (2, 1, 1)),
    # Empty in the batch, m, n or k.
    ((0,), (0,)), ((0,), (0, 5)), ((4, 0), (0,)), ((0, 3), (3, 5)), ((4, 3), (3, 0)), ((4, 0), (0, 5)),
    ((1, 0), (0, 1)), ((0, 4, 3), (3, 5)),
    ((0, 4, 3), (1, 3, 5)), ((1, 4, 3), (0, 3, 5)), ((4, 3), (0, 3, 5)), ((0, 4, 3), (0, 3, 5)),
    ((2, 4, 0), (0, 5)), ((2, 0, 3), (2, 3, 5)), ((0, 0), (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("schedule", [Auto(), StreamK()], ids=str)
@pytest.mark.parametrize("shape_a, shape_b", SHAPES, ids=str)
def test_shapes_of_numpy(shape_a, shape_b, schedule):
    a, b = small_integers(shape_a, seed=1), small_integers(shape_b, seed=2)
    if not is_served(a, b, schedule):
        pytest.skip("no kernel cuts this batch")
    wanted = np.matmul(a, b)
    f = functools.partial(matmul, schedule=schedule)
    assert jax.eval_shape(f, a, b).shape == wanted.shape
    np.testing.assert_array_equal(jax.jit(f)(a, b), wanted)


def test_batches_that_cut_tiles():
    """Stream-K over many batches: a worker's run of iterations crosses from one batch into the next."""
    a, b = small_integers((3, 5, 70, 200)), small_integers((5, 200, 66))
    for schedule in SCHEDULES:
        if getattr(schedule, "splits", 1) <= 3 and is_served(a, b, schedule):
            np.testing.assert_array_equal(matmul(a, b, schedule=schedule), np.matmul(a, b))


PAIRS = [
    (BF16, F32), (F16, BF16), (F32, F16), (np.int8, np.float32), (np.int8, BF16), (np.int32, np.int32),
    (np.uint8, np.int16), (np.int8, np.int8), (bool, bool), (bool, np.int8), (bool, F32), (np.complex64, np.float32),
    (np.complex64, np.complex64), (F64, F32), (np.int64, np.int32), (np.uint32, np.uint32),
    (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
]  # fmt: skip


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("dtype_a, dtype_b", PAIRS, ids=lambda t: np.dtype(t).name)
def test_dtypes_promote_as_in_jax(dtype_a, dtype_b, wide):
    a, b = small_integers((9, 20)).astype(dtype_a), small_integers((20, 33)).astype(dtype_b)
    with jax.enable_x64(wide):
        wanted, got = jnp.matmul(a, b), matmul(a, b)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize(
    "result", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, "float32", np.dtype("float32")], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_preferred_element_type(dtype, result):
    a, b = small_integers((9, 20), dtype), small_integers((20, 33), dtype)
    wanted, got = (f(a, b, preferred_element_type=result) for f in (jnp.matmul, matmul))
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize(
    "dtypes",
    [(np.int32, BF16), (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2), (ml_dtypes.float8_e4m3fn, BF16)],
    ids=str,
)
def test_with_a_preferred_element_type_operands_are_not_promoted(dtypes):
    """257 is not a bfloat16 number, and two kinds of float8 have no common type."""
    a, b = (np.full((4, 4), 257 if dtype == np.int32 else 2, dtype) for dtype in dtypes)
    wanted, *got = (f(a, b, preferred_element_type=np.float32) for f in (jnp.matmul, matmul, jax_streamk.linear))
    for out in got:
        assert out.dtype == wanted.dtype
        np.testing.assert_array_equal(out, wanted)
    assert jax_streamk.plan(a, b, preferred_element_type=np.float32).reasons


def test_weak_types_promote_as_in_jax():
    weak, narrow = jnp.full((8, 8), 2.0), jnp.ones((8, 8), jnp.bfloat16)
    for a, b in [
        (weak, weak),
        (weak, narrow),
        (narrow, weak),
        (jnp.ones((8, 8), np.int32), weak),
        (weak, jnp.ones((8, 8), bool)),
    ]:
        for params in ({}, dict(preferred_element_type=np.float32)):
            wanted, compiled = jnp.matmul(a, b, **params), jax.jit(lambda a, b: matmul(a, b, **params))
            for out in (matmul(a, b, **params), compiled(a, b)):
                assert (out.dtype, out.weak_type) == (wanted.dtype, wanted.weak_type)


def test_operands_need_not_be_jax_arrays():
    a, b = [[1.0, 2.0], [3.0, 4.0]], np.arange(2.0)
    assert matmul(a, b).dtype == jnp.asarray(b).dtype
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))


PRESETS = lax.DotAlgorithmPreset
PRECISIONS = [
    None, "default", "high", "highest", "float32", "bfloat16", "tensorfloat32", lax.Precision.DEFAULT,
    lax.Precision.HIGH, lax.Precision.HIGHEST, (lax.Precision.HIGH, lax.Precision.HIGHEST), ("default", "high"),
    "F32_F32_F32", PRESETS.F32_F32_F32,
]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision(precision):
    a, b = normal((130, 500), F32, 1), normal((500, 70), F32, 2)
    assert_as_exact_as_xla(matmul(a, b, precision=precision), a, b, precision=precision)


@pytest.mark.parametrize(
    "precision, math_on_gpu",
    [
        (None, _ffi.Math.tf32),
        (lax.Precision.DEFAULT, _ffi.Math.tf32),
        (lax.Precision.HIGH, _ffi.Math.tf32x3),
        ((lax.Precision.DEFAULT, lax.Precision.HIGH), _ffi.Math.tf32x3),
        (lax.Precision.HIGHEST, None),
        (PRESETS.TF32_TF32_F32, _ffi.Math.tf32),
        (PRESETS.TF32_TF32_F32_X3, _ffi.Math.tf32x3),
        (PRESETS.F32_F32_F32, None),
    ],
    ids=str,
)
def test_precision_chooses_what_a_float32_product_is(precision, math_on_gpu):
    a, b = normal((130, 500), F32, 1), normal((500, 70), F32, 2)
    if PLATFORM == "cpu" and precision in (PRESETS.TF32_TF32_F32, PRESETS.TF32_TF32_F32_X3):
        pytest.skip("JAX refuses TF32 on a CPU")
    wanted = math_on_gpu if PLATFORM == "cuda" else _ffi.Math.native
    f = functools.partial(matmul, precision=precision)
    calls = custom_calls(jax.jit(f).lower(a, b))
    assert [int(call["math"]) for call in calls] == ([] if wanted is None else [wanted.value])
    if wanted is None:
        with pytest.raises(ValueError, match="schedule=StreamK.*cannot run this product: no kernel .*(?i:precision)"):
            f(a, b, schedule=StreamK())


def test_precision_of_the_configuration():
    a, b = normal((33, 50), F32), normal((50, 70), F32)
    with jax.default_matmul_precision("highest"):
        (equation,) = jax.make_jaxpr(matmul)(a, b).eqns
    assert equation.params["product"].precision == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def test_presets_of_narrow_types():
    for dtype, preset in ((BF16, PRESETS.BF16_BF16_F32), (F16, PRESETS.F16_F16_F32)):
        a, b = small_integers((40, 100), dtype), small_integers((100, 24), dtype)
        lowered = jax.jit(functools.partial(matmul, precision=preset, preferred_element_type=jnp.float32)).lower(a, b)
        assert len(custom_calls(lowered)) == 1
        np.testing.assert_array_equal(lowered.compile()(a, b), np.matmul(a.astype(F32), b.astype(F32)))


def test_the_primitive_shows_in_a_jaxpr():
    a, b = jnp.ones((8, 16)), jnp.ones((16, 4))
    (equation,) = jax.make_jaxpr(functools.partial(matmul, schedule=SplitK(2)))(a, b).eqns
    assert equation.primitive.name == "streamk_dot_general"
    assert equation.params["schedule"] == SplitK(2)
    assert equation.outvars[0].aval.shape == (8, 4)


def test_ahead_of_time_compilation():
    a, b = small_integers((30, 40)), small_integers((40, 50))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)]
    compiled = jax.jit(functools.partial(matmul, schedule=StreamK())).lower(*shapes).compile()
    np.testing.assert_array_equal(compiled(a, b), a @ b)


def test_inside_control_flow():
    a = small_integers((16, 16))

    @jax.jit
    def power(x):
        step = jax.jit(functools.partial(matmul, schedule=StreamK()))
        scanned, _ = lax.scan(lambda y, _: (step(y, x) % 7, None), x, length=3)
        return lax.cond(x[0, 0] > 100, lambda: x, lambda: matmul(scanned, x, schedule=SplitK(1)))

    wanted = a
    for _ in range(3):
        wanted = np.mod(wanted @ a, 7)
    np.testing.assert_array_equal(power(a), wanted @ a)


def test_eager_and_jitted_bits_agree():
    a, b = normal((70, 300), F32, 1), normal((300, 90), F32, 2)
    for schedule in (Auto(), SplitK(3), StreamK()):
        f = functools.partial(matmul, schedule=schedule)
        assert np.asarray(f(a, b)).tobytes() == np.asarray(jax.jit(f)(a, b)).tobytes()


@pytest.mark.parametrize(
    "shape_a, shape_b", [((70, 300), (300, 90)), ((3, 70, 300), (300, 90)), ((3, 70, 300), (3, 300, 90))], ids=str
)
def test_layouts_of_operands(shape_a, shape_b):
    """Operands whose memory order is not row-major give the same bits."""
    a, b = jnp.asarray(normal(shape_a, F32, 1)), jnp.asarray(normal(shape_b, F32, 2))
    f = jax.jit(functools.partial(matmul, schedule=StreamK() if is_served(a, b, StreamK()) else DataParallel()))
    wanted = np.asarray(f(a, b))
    for x in ("a", "b", "ab"):
        stored = [reversed_layout(v) if name in x else v for name, v in (("a", a), ("b", b))]
        assert np.asarray(f(*stored)).tobytes() == wanted.tobytes()


def reversed_layout(x):
    stored = jax.device_put(x, Format(Layout(tuple(reversed(range(x.ndim)))), x.sharding))
    assert stored.format.layout.major_to_minor == tuple(reversed(range(x.ndim)))
    return stored


@pytest.mark.parametrize(
    "view", [lambda x: x.T, lambda x: x[::2, 1:], lambda x: x[:, ::-1], lambda x: jnp.broadcast_to(x[:1], x.shape)]
)
def test_operands_computed_in_the_same_program(view):
    a, b = small_integers((96, 97)), small_integers((97, 96))
    got = jax.jit(lambda a, b: matmul(view(a), view(b.T).T, schedule=StreamK()))(a, b)
    np.testing.assert_array_equal(got, np.asarray(view(a)) @ np.asarray(view(b.T).T))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_operands():
    """A result as large as a donated operand must not be written over it while the kernel still reads."""
    a, b = small_integers((256, 256), seed=1), small_integers((256, 256), seed=2)
    wanted = a @ b
    for donated in ((0,), (1,), (0, 1)):
        f = jax.jit(functools.partial(matmul, schedule=StreamK()), donate_argnums=donated)
        np.testing.assert_array_equal(f(jnp.array(a), jnp.array(b)), wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_deterministic_schedules_repeat_their_bits(dtype, x64):
    a, b = normal((150, 2000), dtype, 1), normal((2000, 100), dtype, 2)
    for schedule in SCHEDULES:
        if getattr(schedule, "reduction", "ordered") == "atomic" or not is_served(a, b, schedule):
            continue
        f = jax.jit(functools.partial(matmul, schedule=schedule))
        runs = {np.asarray(f(a, b)).tobytes() for _ in range(10)}
        assert len(runs) == 1, schedule


def test_one_split_has_the_bits_of_the_unsplit_product():
    a, b = normal((70, 500), F32, 1), normal((500, 90), F32, 2)
    kernels, bits = set(), set()
    for schedule in (DataParallel(), SplitK(1), StreamK(max_sms=1)):
        kernels.add(jax_streamk.plan(a, b, schedule=schedule).kernel)
        bits.add(np.asarray(matmul(a, b, schedule=schedule)).tobytes())
    assert len(kernels) == 1 and len(bits) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_inf_propagate(dtype, x64):
    """Into their row or column and nowhere else; ragged extents, so that padding is near."""
    a, b = normal((70, 500), dtype, 1), normal((500, 67), dtype, 2)
    a[3, 499], a[69, 250], b[0, 5], b[311, 66] = np.nan, np.inf, -np.inf, np.nan
    wanted = np.matmul(a.astype(F64), b.astype(F64))
    for schedule in (Auto(), *SCHEDULES):
        if is_served(a, b, schedule):
            got = np.asarray(matmul(a, b, schedule=schedule)).astype(F64)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), str(schedule))
            np.testing.assert_array_equal(np.sign(got[np.isinf(wanted)]), np.sign(wanted[np.isinf(wanted)]))
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted), str(schedule))


def test_overflow_is_inf():
    a = np.full((3, 40), 60000, np.float16)
    assert np.isposinf(np.asarray(matmul(a, a.T, schedule=StreamK()))).all()


@pytest.mark.parametrize("schedule", [Auto(), DataParallel(), SplitK(1), StreamK()], ids=str)
def test_a_sum_of_nothing_is_zero(schedule):
    got = jax.jit(functools.partial(matmul, schedule=schedule))(jnp.ones((4, 0)), jnp.ones((0, 5)))
    np.testing.assert_array_equal(got, np.zeros((4, 5), np.float32))


# What is refused, and how.

A, B = np.ones((4, 8), np.float32), np.ones((8, 5), np.float32)


@pytest.mark.parametrize(
    "a, b, error, message",
    [
        (np.float32(1), B, ValueError, r"matmul: a has shape \(\); it must have at least one dimension"),
        (A, 2.0, ValueError, r"matmul: b has shape \(\); it must have at least one dimension"),
        (A, A, ValueError, r"a of shape \(4, 8\) and b of shape \(4, 8\) contract sizes 8 and 4; they must be equal"),
        (A, np.ones(7), ValueError, r"a of shape \(4, 8\) and b of shape \(7,\) contract sizes 8 and 7"),
        (
            np.ones((2, 4, 8)),
            np.ones((3, 8, 5)),
            ValueError,
            r"a of shape \(2, 4, 8\) and b of shape \(3, 8, 5\) do not broadcast",
        ),
        (
            np.ones((0, 4, 8)),
            np.ones((3, 8, 5)),
            ValueError,
            r"a of shape \(0, 4, 8\) and b of shape \(3, 8, 5\) do not broadcast",
        ),
        (A, None, TypeError, "matmul: b is NoneType; it must be an array of numbers"),
        ("text", B, TypeError, "matmul: a is str; it must be an array of numbers"),
        (A, np.full((8, 5), None), TypeError, "matmul: b is ndarray of dtype object; it must be an array of numbers"),
        (np.full((4, 8), "x"), B, TypeError, "matmul: a is ndarray of dtype <U1; it must be an array of numbers"),
        ([[object()]], B, TypeError, "matmul: a is list; it must be an array of numbers"),
        (
            A,
            B.astype(">f4"),
            TypeError,
            r"matmul: b is ndarray of dtype >f4, .* byte order: convert it with .astype\(b\.",
        ),
        (np.zeros((4, 8), "datetime64[s]"), B, TypeError, r"matmul: a is ndarray of dtype datetime64\[s\]; it must be"),
        (jax.ShapeDtypeStruct((4, 8), F32), B, TypeError, "matmul: a is ShapeDtypeStruct of dtype float32; it must be"),
    ],
    ids=lambda x: None if not isinstance(x, str) else x[:40],
)
def test_refused_operands(a, b, error, message):
    with pytest.raises(error, match=message):
        matmul(a, b)


@pytest.mark.parametrize(
    "dtype, asked, message",
    [
        (
            np.int32,
            F16,
            r"float16 is narrower than int32, .*: set it to a dtype of at least 32 bits, or to None, "
            r"and convert .* with \.astype\(float16\)",
        ),
        (np.int32, np.int8, r"int8 is narrower than int32, .* with \.astype\(int8\)"),
    ],
    ids=str,
)
def test_results_narrower_than_integers_are_no_more_than_laxs(dtype, asked, message):
    a, b = A.astype(dtype), B.astype(dtype)
    numbers = (((1,), (0,)), ((), ()))
    with pytest.raises(TypeError):
        lax.dot_general(a, b, numbers, preferred_element_type=asked)
    for product in (matmul, functools.partial(dot_general, dimension_numbers=numbers), plan):
        with pytest.raises(TypeError, match=f"preferred_element_type={message}"):
            product(a, b, preferred_element_type=asked)


def test_refused_keys():
    with pytest.raises(TypeError, match=r"matmul: a is \w+ of dtype key<\w+>; it must be an array of numbers"):
        matmul(jax.random.split(jax.random.key(0), 8), B)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: SplitK(0), ValueError, "splits=0: must be an integer from 1 to"),
        (lambda: SplitK(-3), ValueError, "splits=-3: must be an integer from 1 to"),
        (lambda: SplitK(2**40), ValueError, r"splits=1099511627776: must be an integer from 1 to 2\^31 - 1"),
        (
            lambda: StreamK(max_sms=2**31),
            ValueError,
            r"max_sms=2147483648: must be an integer from 1 to 2\^31 - 1",
        ),
        (lambda: SplitK(2.0), ValueError, r"splits=2\.0: must be an integer"),
        (lambda: SplitK(True), ValueError, "splits=True: must be an integer"),
        (lambda: SplitK(2, "fast"), ValueError, "reduction='fast': must be one of 'ordered', 'atomic', 'separate'"),
        (lambda: StreamK("tree"), ValueError, "reduction='tree': must be one of 'ordered', 'atomic', 'separate'"),
        (lambda: StreamK(max_sms=0), ValueError, "max_sms=0: must be an integer from 1 to"),
        (lambda: StreamK(max_sms="all"), ValueError, "max_sms='all': must be an integer"),
        (lambda: SplitK(np.array([2])), ValueError, r"splits=array\(\[2\]\): must be an integer"),
        (lambda: SplitK(np.bool_(True)), ValueError, "splits=.*True.*: must be an integer"),
        (lambda: SplitK(jnp.float32(2)), ValueError, "splits=.*: must be an integer"),
        (
            lambda: matmul(A, B, schedule="stream_k"),
            TypeError,
            r"schedule='stream_k': must be None, Auto\(\), DataParallel\(\)",
        ),
        (lambda: matmul(A, B, schedule=SplitK), TypeError, "schedule=.*SplitK.*: must be None"),
        (lambda: matmul(A, B, schedule=4), TypeError, "schedule=4: must be None"),
    ],
)
def test_refused_schedules(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), np.array(2), jnp.int32(2)], ids=lambda x: type(x).__name__)
def test_integers_of_any_type_are_ints_of_a_schedule(two):
    for schedule, value in ((SplitK(two), SplitK(2)), (StreamK(max_sms=two), StreamK(max_sms=2))):
        assert schedule == value and hash(schedule) == hash(value) and repr(schedule) == repr(value)


STATIC = (
    "is traced; it must be static, .*: close over its value, or name it in jax.jit's static_argnums or static_argnames"
)


@pytest.mark.parametrize(
    "name, product, value",
    [
        ("splits", lambda x: matmul(A, B, schedule=SplitK(x)), 2),
        ("max_sms", lambda x: matmul(A, B, schedule=StreamK(max_sms=x)), 2),
        ("reduction", lambda x: matmul(A, B, schedule=StreamK(x)), 2),
        ("schedule", lambda x: matmul(A, B, schedule=x), 2),
        ("PerPass: lhs", lambda x: matmul(A, B, schedule=PerPass(lhs=x)), 2),
        ("dimension_numbers", lambda x: dot_general(A, B, (((x,), (0,)), ((), ()))), 1),
        ("preferred_element_type", lambda x: matmul(A, B, preferred_element_type=x), 2),
        ("plan: bias", lambda x: plan(A, B, bias=x), True),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_makes_a_program_is_static(name, product, value):
    with pytest.raises(TypeError, match=f"^{name} {STATIC}"):
        jax.jit(product)(value)


@pytest.mark.parametrize(
    "dtype, kwargs, message",
    [
        (np.int32, {}, "int32 x int32: no kernel multiplies int32"),
        (np.complex64, {}, "complex64 x complex64: no kernel multiplies complex64"),
        (bool, {}, "bool x bool: no kernel multiplies bool"),
        (
            np.int8,
            {},
            "int8 x int8 -> int8: the result of int8 operands must be int32: "
            "set preferred_element_type to that, and convert the result",
        ),
        (
            F32,
            {"preferred_element_type": np.int32},
            r"float32 x float32 -> int32: the result of float32 operands must be float32: .* with .astype\(int32\)",
        ),
        (
            F32,
            {"preferred_element_type": BF16},
            "float32 x float32 -> bfloat16: the result of float32 operands must be float32",
        ),
        (
            BF16,
            {"preferred_element_type": F16},
            "bfloat16 x bfloat16 -> float16: the result of bfloat16 operands must be bfloat16 or float32",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(1), StreamK()], ids=str)
def test_a_schedule_for_types_without_kernels(dtype, kwargs, message, schedule):
    a, b = A.astype(dtype), B.astype(dtype)
    with pytest.raises(ValueError, match=f"schedule={re.escape(str(schedule))} cannot run this product: {message}"):
        matmul(a, b, schedule=schedule, **kwargs)
    assert not custom_calls(jax.jit(functools.partial(matmul, **kwargs)).lower(a, b)), "Auto leaves it to XLA"


@pytest.mark.parametrize("k, splits", [(1, 2), (64, 65), (1797, 1000)])
def test_more_splits_than_k_tiles(k, splits):
    a, b = np.ones((64, k), BF16), np.ones((k, 64), BF16)
    f = jax.jit(functools.partial(matmul, schedule=SplitK(splits)))
    exceeds = rf"splits={splits} exceeds its (\d+) k-tiles of \d+: it must be at most \1\b"
    with pytest.raises(ValueError, match=rf"schedule=SplitK\(splits={splits}.*64.*{exceeds}"):
        f.lower(a, b)  # before any compilation


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_sum_of_nothing_has_no_splits(platform):
    """K = 0 has no k-tiles; without rows or columns there are k-tiles, and no tile that they would be of."""
    device = jax_streamk.Device("cuda", 90, 132) if platform == "cuda" else jax_streamk.plan(A, B, device="cpu").device
    shaped = lambda m, n, k: (jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((k, n), BF16))
    for schedule in (SplitK(2), SplitK(2, "separate")):
        with pytest.raises(ValueError, match="cannot run .*: splits=2 exceeds its 0 k-tiles: it must be 1"):
            jax_streamk.plan(*shaped(8, 4, 0), schedule=schedule, device=device)
        for extents in ((0, 4, 8), (8, 0, 8)):
            assert jax_streamk.plan(*shaped(*extents), schedule=schedule, device=device).is_empty
    for schedule in (SplitK(1), StreamK(), DataParallel(), Auto()):
        assert jax_streamk.plan(*shaped(8, 4, 0), schedule=schedule, device=device).is_empty
    with pytest.raises(ValueError, match="splits=2 exceeds its 0 k-tiles"):
        matmul(np.ones((8, 0), BF16), np.ones((0, 4), BF16), schedule=SplitK(2))
    assert not matmul(np.ones((8, 0), BF16), np.ones((0, 4), BF16), schedule=SplitK(1)).any()


def test_arrays_of_another_byte_order_are_refused_everywhere():
    x, w, sizes = np.ones((8, 16), ">f4"), np.ones((16, 4), np.float32), np.array([8])
    refused = {
        "dot_general: lhs": lambda: jax_streamk.dot_general(x, w, (((1,), (0,)), ((), ()))),
        "einsum: operands.0.": lambda: jax_streamk.einsum("ij,jk", x, w),
        "linear: bias": lambda: jax_streamk.linear(w.T, w, np.ones(4, ">f4")),
        "gated_linear: x": lambda: jax_streamk.gated_linear(x, w, w),
        "ragged_dot: group_sizes": lambda: jax_streamk.ragged_dot(w.T, w[None], sizes.astype(">i4")),
        "plan: lhs": lambda: jax_streamk.plan(x, w),
    }
    for name, call in refused.items():
        with pytest.raises(
            TypeError, match=rf"^{name} is ndarray of dtype >.4, which is not this machine's byte order"
        ):
            call()


@pytest.mark.skipif(not _ffi.has_cuda, reason="every kernel of a CPU-only build has every reduction")
def test_stream_k_reductions_that_no_kernel_has():
    with pytest.raises(
        ValueError, match=r"schedule=StreamK\(reduction='separate'.*it has no Stream-K with reduction \"separate\""
    ):
        jax_streamk.plan(
            A.astype(BF16), B.astype(BF16), schedule=StreamK("separate"), device=jax_streamk.Device("cuda", 90, 132)
        )


@pytest.mark.parametrize("schedule", [Auto(), StreamK()], ids=str)
def test_lowering_for_a_gpu_needs_a_build_with_cuda(schedule):
    traced = jax.jit(functools.partial(matmul, schedule=schedule)).trace(A.astype(BF16), B.astype(BF16))
    if _ffi.has_cuda:
        assert "jax_streamk_cuda_gemm" in traced.lower(lowering_platforms=("cuda",)).as_text()
        return
    why = re.escape(_ffi.without_cuda)
    with pytest.raises(RuntimeError, match=f"no CUDA kernels, and the product is for a GPU: when it was built, {why}"):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_run_xlas_product(platform):
    text = jax.jit(matmul).trace(A, B).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.dot_general" in text and "jax_streamk" not in text


def test_out_sharding_is_refused_as_in_jax():
    a, b = normal((8, 16), F32, 1), normal((16, 8), F32, 2)
    spec = jax.sharding.PartitionSpec("x", None)
    with pytest.raises(Exception) as jax_says:
        jnp.matmul(a, b, out_sharding=spec)
    with pytest.raises(type(jax_says.value)):
        matmul(a, b, out_sharding=spec)


def test_a_given_schedule_is_refused_where_there_are_no_kernels():
    a, b = normal((8, 16), F32, 1), normal((16, 8), F32, 2)
    with pytest.raises(
        ValueError, match="schedule=StreamK.* cannot run: there are kernels for CPUs and for NVIDIA GPUs only"
    ):
        jax.jit(lambda a, b: matmul(a, b, schedule=StreamK())).trace(a, b).lower(lowering_platforms=("tpu",))
