"""``linear``: the epilogue is applied once, at the end, in float32; and its transformations."""

import functools
import itertools
import re
import typing

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiling import compilations

from jax_streamk import DataParallel, SplitK, StreamK, _ffi, linear, matmul, plan
from jax_streamk.product.epilogue import ACTIVATIONS, Activation

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGET = "jax_streamk_cuda_gemm" if PLATFORM == "cuda" else "jax_streamk_host_gemm"
SCHEDULES = [
    DataParallel(),
    SplitK(2),
    SplitK(5, "atomic"),
    SplitK(3, "separate"),
    StreamK(),
    StreamK("atomic"),
    StreamK(max_sms=3),
]
DTYPES = ["float32", "float64", "bfloat16", "float16"]


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def formula(x, w, bias=None, residual=None, *, activation=None, alpha=1.0, beta=1.0):
    out = alpha * (x @ w)
    if residual is not None:
        out = out + beta * residual
    if bias is not None:
        out = out + bias
    return ACTIVATIONS[activation](out)


def in_float64(*operands, **kwargs):
    with jax.enable_x64(True):
        return np.asarray(formula(*(None if x is None else jnp.asarray(x, jnp.float64) for x in operands), **kwargs))


def assert_as_exact(got, operands, **kwargs):
    """The error against float64 is at most twice that of XLA's formula in the result's dtype, plus a few roundings."""
    exact = in_float64(*operands, **kwargs)
    wanted = formula(*(None if x is None else jnp.asarray(x, got.dtype) for x in operands), **kwargs)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    ours, xlas = (np.abs(np.asarray(x).astype(np.float64) - exact) for x in (got, wanted))
    k = operands[0].shape[-1]
    size = np.sqrt(k) * abs(kwargs.get("alpha", 1)) + 1
    floor = size * {"float64": 2.0**-48}.get(
        str(got.dtype), 2.0**-9 if PLATFORM == "cuda" and got.dtype == np.float32 else 2.0**-20
    )
    if not ours.size:
        return
    assert np.sqrt(np.mean(ours**2)) <= 2 * np.sqrt(np.mean(xlas**2)) + floor
    assert ours.max() <= 4 * xlas.max() + 8 * floor


def programs(f, *operands):
    text = jax.jit(f).lower(*operands).as_text()
    return text.count(f"@{TARGET}"), len(re.findall(r"stablehlo\.(?!custom_call|constant|return)\w+", text))


def test_annotations_kernels_and_xla_have_the_same_activations():
    """``tests/annotations.py`` is what mypy refuses."""
    assert (None, *typing.get_args(Activation)) == tuple(ACTIVATIONS)
    assert ["none", *typing.get_args(Activation)] == [value.name for value in _ffi.Activation]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, w, bias, residual = (
            normal((40, 72), dtype),
            normal((72, 56), dtype),
            normal((56,), dtype),
            normal((40, 56), dtype),
        )
        got = linear(x, w, bias, activation=activation, residual=residual, alpha=0.25, beta=-1.5)
        assert_as_exact(got, (x, w, bias, residual), activation=activation, alpha=0.25, beta=-1.5)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_every_schedule_has_the_epilogue_once(schedule, has_bias, has_residual):
    """Exact for small integers: a bias added by every split would show."""
    integers = lambda shape, seed: np.random.default_rng(seed).integers(-3, 4, shape).astype(ml_dtypes.bfloat16)
    x, w = integers((72, 1024), 1), integers((1024, 136), 2)
    bias, residual = integers((136,), 3) if has_bias else None, integers((72, 136), 4) if has_residual else None
    kwargs = dict(activation="relu", alpha=2.0, beta=-4.0)
    try:
        got = linear(x, w, bias, residual=residual, preferred_element_type=jnp.float32, schedule=schedule, **kwargs)
    except ValueError:
        assert PLATFORM == "cuda" and getattr(schedule, "reduction", "") in ("separate", "atomic")
        return
    np.testing.assert_array_equal(got, in_float64(x, w, bias, residual, **kwargs))


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 37, 1), (65, 37, 1), (5, 1, 70), (129, 515, 300), (64, 0, 8), (3, 8, 0), (0, 4, 6)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_and_empty(shape, dtype):
    m, k, n = shape
    x, w, residual = normal((m, k), dtype), normal((k, n), dtype), normal((m, n), dtype)
    for bias in (normal((n,), dtype), None):
        got = linear(x, w, bias, activation="silu", residual=residual, beta=2.0)
        assert_as_exact(got, (x, w, bias, residual), activation="silu", beta=2.0)


def test_leading_dimensions_and_vectors():
    w, bias = normal((30, 20)), normal((20,))
    for shape in [(30,), (4, 30), (2, 3, 30), (2, 1, 3, 30)]:
        x = normal(shape)
        assert_as_exact(linear(x, w, bias, activation="tanh"), (x, w, bias), activation="tanh")
        # Residuals broadcast.
        residual = normal((*shape[-2:-1], 1))
        assert_as_exact(linear(x, w, residual=residual), (x, w, None, residual))


def test_one_rounding():
    """The sum is rounded after the activation, not before: bfloat16 results are nearest to float64's, ties apart."""
    x, w, bias = normal((64, 256), "bfloat16"), normal((256, 64), "bfloat16"), normal((64,), "bfloat16")
    got = np.asarray(linear(x, w, bias, activation="gelu", alpha=0.1)).astype(np.float64)
    exact = in_float64(x, w, bias, activation="gelu", alpha=0.1)
    assert np.mean(got == exact.astype(ml_dtypes.bfloat16).astype(np.float64)) > 0.99


def test_mixed_dtypes_and_conversion():
    x, w, bias = normal((8, 40), "bfloat16"), normal((40, 24)), normal((24,), "float16")
    got = linear(x, w, bias)
    assert got.dtype == jnp.float32
    assert_as_exact(got, (x, w, bias))
    got = linear(x, w.astype(jnp.bfloat16), bias, preferred_element_type=jnp.float32, residual=np.arange(24))
    assert got.dtype == jnp.float32
    assert linear(x, w.astype(jnp.bfloat16), bias).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rounding_without_a_fused_kernel(dtype):
    """With only the bias mapped, and in a product that XLA computes, the epilogue gets the sum before it is rounded."""
    x, w, biases = normal((8, 512), dtype), normal((512, 24), dtype), normal((3, 24), dtype)
    f = lambda x, bias: linear(x, w, bias, activation="silu", alpha=0.3)
    assert "epilogue=Epilogue(" not in str(jax.make_jaxpr(jax.vmap(f))(np.stack([x] * 3), biases))
    np.testing.assert_array_equal(jax.vmap(f)(np.stack([x] * 3), biases), np.stack([f(x, bias) for bias in biases]))
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(x, biases), np.stack([f(x, bias) for bias in biases]))


def test_weak_types_give_way():
    x = jax.jit(lambda: jnp.broadcast_to(2.0, (2, 3)))()
    assert (
        x.weak_type
        and linear(x, x.T, activation="relu").weak_type
        and not linear(x, np.ones((3, 2), np.float32)).weak_type
        and not linear(x, x.T, preferred_element_type=np.float32).weak_type
    )


def test_plan_of_a_linear():
    made = plan(normal((8, 40)), normal((40, 24)), activation="silu", bias=True, residual=True, alpha=0.5, beta=2.0)
    assert "D = silu(0.5 A @ B + 2 residual + bias)" in str(made)
    with pytest.raises(ValueError, match="plan: activation='swish'"):
        plan(normal((8, 40)), normal((40, 24)), activation="swish")


def test_nan_and_inf():
    x, w, bias, residual = normal((9, 16)), normal((16, 12)), normal((12,)), normal((9, 12))
    x[2, 3], bias[5], residual[7, 1], residual[8, 2] = np.nan, np.inf, -np.inf, np.nan
    for activation in ACTIVATIONS:
        got = linear(x, w, bias, activation=activation, residual=residual)
        wanted = formula(
            jnp.asarray(x), jnp.asarray(w), jnp.asarray(bias), jnp.asarray(residual), activation=activation
        )
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), activation)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted), activation)


def test_inference_is_one_call():
    x, w, bias, residual = (
        normal((8, 40), "bfloat16"),
        normal((40, 24), "bfloat16"),
        normal((24,), "bfloat16"),
        normal((8, 24), "bfloat16"),
    )
    f = lambda x, w, bias, residual: linear(x, w, bias, activation="silu", residual=residual, alpha=0.5)
    assert programs(f, x, w, bias, residual) == (1, 0)
    assert programs(lambda x, w: linear(x, w, alpha=3.0), x, w) == (1, 0)
    # Without an epilogue it is the same product, bit for bit.
    assert np.array_equal(linear(x, w), matmul(x, w))
    # beta is the factor of the residual: without one it is no part of a plan.
    assert plan(lambda x, w: linear(x, w, beta=2.0), x, w) == plan(x, w) == plan(x, w, beta=2.0)
    assert "streamk_dot_general" in str(jax.make_jaxpr(linear)(x, w))


def test_products_that_no_kernel_runs():
    """XLA's product has the same epilogue."""
    x, w = normal((4, 8), "float32"), normal((8, 6), "float32")
    kwargs = dict(activation="gelu", alpha=2.0)
    got = linear(x, w, np.ones(6, np.float32), preferred_element_type=jnp.bfloat16, **kwargs)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float32), in_float64(x, w, np.ones(6), **kwargs), rtol=2e-2, atol=2e-2
    )
    assert programs(lambda x, w: linear(x, w, preferred_element_type=jnp.bfloat16, **kwargs), x, w)[0] == 0


# ---- transforms ----


@pytest.mark.parametrize(
    "axes",
    [axes for axes in itertools.product((None, 0, 1), (None, 0, 1), (None, 0), (None, 1)) if set(axes) != {None}],
)
def test_vmap(axes):
    operands = [normal((7, 24)), normal((24, 10)), normal((10,)), normal((7, 10))]
    operands = [x if axis is None else np.stack([x + i for i in range(3)], axis) for x, axis in zip(operands, axes)]
    f = lambda x, w, bias, residual: linear(x, w, bias, activation="silu", residual=residual, alpha=0.5, beta=2.0)
    g = functools.partial(formula, activation="silu", alpha=0.5, beta=2.0)
    tolerance = dict(rtol=2e-2, atol=5e-2) if PLATFORM == "cuda" else dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(f, axes)(*operands), jax.vmap(g, axes)(*operands), **tolerance)
    # One kernel if w is mapped, or x and not the bias.
    one_kernel = axes[1] is not None or (axes[0] is not None and axes[2] is None)
    assert ("epilogue=Epilogue(" in str(jax.make_jaxpr(jax.vmap(f, axes))(*operands))) == one_kernel
    nested = [np.stack([x, -x]) for x in operands]
    np.testing.assert_allclose(jax.vmap(jax.vmap(f, axes))(*nested), jax.vmap(jax.vmap(g, axes))(*nested), **tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation):
    operands = [normal((9, 24)) / 5, normal((24, 10)), normal((10,)), normal((9, 10))]
    kwargs = dict(activation=activation, alpha=0.5, beta=-2.0)
    loss = lambda f: jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2, 3)))
    got = loss(lambda x, w, bias, residual: linear(x, w, bias, residual=residual, **kwargs))(*operands)
    tolerance = dict(rtol=5e-2, atol=5e-2) if PLATFORM == "cuda" else dict(rtol=1e-5, atol=1e-5)
    for ours, wanted in zip(got, loss(functools.partial(formula, **kwargs))(*operands)):
        np.testing.assert_allclose(ours, wanted, **tolerance)


def test_second_derivatives_and_forward_mode():
    operands = [normal((5, 8)) / 3, normal((8, 3)), normal((3,))]
    f = lambda f: lambda *xs: jnp.sum(f(*xs) ** 2)
    ours, wanted = f(functools.partial(linear, activation="tanh")), f(functools.partial(formula, activation="tanh"))
    tolerance = dict(rtol=5e-2, atol=5e-2) if PLATFORM == "cuda" else dict(rtol=1e-4, atol=1e-4)
    for transform in (lambda f: jax.hessian(f, (0, 2)), lambda f: jax.jacfwd(f, (0, 1, 2)), lambda f: jax.grad(f, 2)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, **tolerance),
            transform(ours)(*operands),
            transform(wanted)(*operands),
        )


def test_transposes_without_a_derivative():
    x, w, residual, cotangent = (jnp.asarray(normal(shape)) for shape in ((6, 130), (130, 9), (6, 9), (6, 9)))
    functions = {
        "x": (lambda f, x: f(x, w, alpha=0.5), x),
        "w": (lambda f, w: f(x, w, alpha=-2.0), w),
        "x and residual": (lambda f, xs: f(xs[0], w, residual=xs[1], alpha=0.5, beta=3.0), (x, residual)),
        "bias": (lambda f, bias: f(jnp.zeros_like(x), w, bias), w[0]),
    }
    for name, (function, operand) in functions.items():
        got, wanted = (
            jax.linear_transpose(functools.partial(function, f), operand)(cotangent) for f in (linear, formula)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=0.2, err_msg=name), got, wanted)

    def solution(f, b):
        return jax.scipy.sparse.linalg.bicgstab(lambda v: f(v, w[:9] / 20 + jnp.eye(9), alpha=2.0), b)[0].sum()

    got, wanted = (jax.vmap(jax.grad(functools.partial(solution, f)))(cotangent) for f in (linear, formula))
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=0.02)
    for what_is_not_linear in (lambda f, x: f(x, w, activation="silu"), lambda f, x: f(x, x.T)):
        errors = []
        for f in (linear, formula):
            with pytest.raises(Exception) as error:
                jax.linear_transpose(functools.partial(what_is_not_linear, f), x)(what_is_not_linear(f, x))
            errors.append(error.type)
        assert errors[0] is errors[1]


def test_schedule_of_the_backward_pass():
    x, w = normal((64, 512)), normal((512, 128))
    f = lambda x, w: jnp.sum(linear(x, w, activation="silu", schedule=SplitK(4)))
    text = jax.jit(jax.grad(f, (0, 1))).lower(x, w).as_text()
    assert len(re.findall(r"splits = 4", text)) == 1 and text.count(f"@{TARGET}") == 3


# ---- bad input ----


X, W = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(x=X, w=W[:7]), ValueError, r"x has shape \(4, 8\) and w \(7, 6\); they must be \(..., k\) and \(k, n\)"),
        (dict(x=X, w=np.ones((2, 8, 6))), ValueError, "they must be"),
        (dict(x=np.float32(3), w=W), ValueError, "they must be"),
        (dict(x=X, w=W, bias=np.ones(5)), ValueError, r"bias has shape \(5,\); it must be \(6,\)"),
        (dict(x=X, w=W, bias=np.ones((4, 6))), ValueError, r"bias has shape \(4, 6\)"),
        (
            dict(x=X, w=W, residual=np.ones((3, 6))),
            ValueError,
            r"residual has shape \(3, 6\); it must broadcast to \(4, 6\)",
        ),
        (dict(x=X, w=W, residual=np.ones((2, 4, 6))), ValueError, "residual has shape"),
        (dict(x=X, w=W, activation="swish"), ValueError, "activation='swish'; it must be one of None, 'relu', 'gelu'"),
        (dict(x=X, w=W, activation=jax.nn.relu), ValueError, "activation=.*it must be one of"),
        (dict(x=X, w=W, alpha="1"), TypeError, "alpha is str; it must be a real number"),
        (dict(x=X, w=W, beta=1j), TypeError, "beta is complex"),
        (dict(x=X, w=W, alpha=True), TypeError, "alpha is bool"),
        (dict(x=X, w=W, alpha=np.bool_(True)), TypeError, "alpha is bool"),
        (dict(x=X, w=W, alpha=np.complex64(1)), TypeError, "alpha is complex64"),
        (dict(x=X, w=W, alpha=np.array("2", object)), TypeError, "alpha is ndarray of dtype object"),
        (dict(x=X, w=W, alpha=np.ones(3)), TypeError, "alpha is ndarray of dtype float64; it must be a real number"),
        (dict(x=X, w=W, alpha=10**400), ValueError, "does not fit into a float"),
        (dict(x=X, w=W, activation=["silu"]), ValueError, "activation=.'silu'.; it must be one of"),
        (dict(x=X, w=W, preferred_element_type="x"), TypeError, "preferred_element_type='x'"),
        (dict(x=X, w=W, bias=np.ones(6, complex)), TypeError, "bias has dtype complex"),
        (
            dict(x=X.astype(int), w=W.astype(int)),
            TypeError,
            r"the result's dtype is int32; .* floating-point dtype: "
            r"set preferred_element_type=float32, and convert .*astype\(int32\)",
        ),
        (
            dict(x=X, w=W, preferred_element_type=jnp.int32),
            TypeError,
            "the result's dtype is int32; .*: set preferred_element_type=float32",
        ),
        (dict(x=X.astype(complex), w=W), TypeError, "the result's dtype is complex64; .*: apply it after the product"),
        (dict(x="x", w=W), TypeError, "x is str"),
        (dict(x=X, w=W, bias=["a"] * 6), TypeError, "bias is list"),
        (dict(x=X, w=W, schedule=3), TypeError, "schedule=3"),
        (
            dict(x=X, w=W, schedule=SplitK(2)),
            ValueError,
            "splits=2 exceeds its 1 k-tiles|in float32 at this precision",
        ),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        linear(**arguments)


def test_traced_factors_are_refused():
    for name in ("alpha", "beta", "activation"):
        with pytest.raises(
            TypeError,
            match=f"linear: {name} is traced; it must be static, .*close over its value, or name it in .*static_arg",
        ):
            jax.jit(lambda value: linear(X, W, **{name: value}))(2.0)


def test_factors_that_give_other_results_are_other_programs_and_nan_is_one():
    jax.block_until_ready([linear(X, W, alpha=alpha) for alpha in (0.0, np.nan)])
    with compilations() as compiled:
        zeros = [np.asarray(linear(np.abs(X), np.abs(W), alpha=alpha)) for alpha in (0.0, -0.0, 0.0, -0.0)]
        assert len(compiled) <= 1
        for _ in range(3):
            assert np.isnan(linear(X, W, alpha=float("nan"))).all()
        assert len(compiled) <= 1
    assert [np.signbit(x).all() for x in zeros] == [False, True, False, True]
    large = np.ones((16, 16), np.float32)
    problems = [plan(large, large, alpha=alpha).problem for alpha in (0.0, -0.0, np.nan, np.float32("nan"))]
    assert problems[0] != problems[1] and problems[2] == problems[3] and len(set(problems)) == 3


def test_factors_of_numpy_are_told_apart_by_their_bits():
    zeros = [np.asarray(linear(np.abs(X), np.abs(W), alpha=np.float32(alpha))) for alpha in (0.0, -0.0)]
    assert [np.signbit(x).all() for x in zeros] == [False, True]
