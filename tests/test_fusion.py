"""What ``accelerate`` fuses into products: every form of it, nothing that something else needs, and equal results."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_accelerate import TARGET, assert_close, gradient, normal, products

from jax_streamk import H200, PerPass, SplitK, StreamK, accelerate, ragged_dot
from jax_streamk.accelerate import fusion

P = jax.sharding.PartitionSpec


@pytest.fixture(autouse=True)
def gpus_decide_as_cpus(monkeypatch):
    """Products of a vector are TF32, which XLA would compute in float32, and no kernel; and every epilogue pays.

    In kernels this small it takes a GPU longer than it saves, unless that is a launch (test_products.py has such).
    """
    if jax.default_backend() != "gpu":
        yield
        return
    monkeypatch.setattr(fusion._Fusion, "_is_faster", lambda self, time: time is not None)
    with jax.default_matmul_precision("TF32_TF32_F32"):
        yield


@pytest.fixture
def of_16_bits():
    """For bfloat16 and float16, which no kernel multiplies in TF32."""
    with jax.default_matmul_precision(None):
        yield


def fused(fn, *args):
    """What was fused into the products of ``fn``, in order of their expected time."""
    return sorted(row.fused for row in accelerate(fn).explain(*args).rows for _ in range(row.count) if row.is_ours)


def assert_fused(fn, wanted, *args):
    """These epilogues, in as many kernels as XLA has products, and the same results."""
    wanted = [wanted] if isinstance(wanted, str) else sorted(wanted)
    assert fused(fn, *args) == wanted
    assert products(accelerate(fn), *args) == (products(fn, *args)[1], 0)
    got, expected = jax.jit(accelerate(fn))(*args), fn(*args)
    types = [
        jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), jax.eval_shape(f, *args)) for f in (accelerate(fn), fn)
    ]
    assert types[0] == types[1]
    assert_close(got, expected)


X, W, B, R = normal(3, 5, 16), normal(16, 24), normal(24), normal(3, 5, 24)

SUMS = {
    "bias": (lambda x, w, b, r: x @ w + b, "A @ B + bias"),
    "bias before": (lambda x, w, b, r: b + x @ w, "A @ B + bias"),
    "bias subtracted": (lambda x, w, b, r: x @ w - b, "A @ B + bias"),
    "bias less product": (lambda x, w, b, r: b - x @ w, "-1 A @ B + bias"),
    "bias reshaped": (lambda x, w, b, r: x @ w + b.reshape(1, 1, 24), "A @ B + bias"),
    "bias broadcast": (lambda x, w, b, r: x @ w + jnp.broadcast_to(b, (3, 5, 24)), "A @ B + bias"),
    "bias of heads": (lambda x, w, b, r: (x @ w).reshape(3, 5, 4, 6) + b.reshape(4, 6), "A @ B + bias"),
    "bias of heads of w": (
        lambda x, w, b, r: jnp.einsum("btk,khd->bthd", x, w.reshape(16, 4, 6)) + b.reshape(4, 6), "A @ B + bias",
    ),
    "bias of flat rows": (lambda x, w, b, r: (x.reshape(15, 16) @ w + b).reshape(3, 5, 24), "A @ B + bias"),
    "bias of a product's transpose": (lambda x, w, b, r: (w.T @ x[0].T).T + b, "A @ B + bias"),
    "bias of matrix times vector": (lambda x, w, b, r: w.T @ x[0, 0] + b, "A @ B + bias"),
    "bias of each of a batch": (
        lambda x, w, b, r: jnp.einsum("etk,ekn->etn", x, jnp.stack([w] * 3)) + r[:, :1], "A @ B + bias",
    ),
    "residual": (lambda x, w, b, r: r + x @ w, "A @ B + residual"),
    "residual less product": (lambda x, w, b, r: r - x @ w, "-1 A @ B + residual"),
    "product less residual": (lambda x, w, b, r: x @ w - r, "A @ B + -1 residual"),
    "BLAS": (lambda x, w, b, r: 2 * (x @ w) + 0.5 * r, "2 A @ B + 0.5 residual"),
    "scale": (lambda x, w, b, r: (x @ w) * 0.3, "0.3 A @ B"),
    "scale of an array": (lambda x, w, b, r: jnp.float32(0.3) * (x @ w), "0.3 A @ B"),
    "quotient": (lambda x, w, b, r: x @ w / jnp.sqrt(64.0), "0.125 A @ B"),
    "negative": (lambda x, w, b, r: -(x @ w), "-1 A @ B"),
    "bias and residual": (lambda x, w, b, r: r + (x @ w + b), "A @ B + residual + bias"),
    "residual and bias": (lambda x, w, b, r: (x @ w + r) + b, "A @ B + residual + bias"),
    "scale, bias, residual": (lambda x, w, b, r: r + ((x @ w) / 4 + b), "0.25 A @ B + residual + bias"),
    "sum of products": (lambda x, w, b, r: x @ w + (2 * x) @ w, ["A @ B", "A @ B + residual"]),
    "sum of three": (
        lambda x, w, b, r: x @ w + (2 * x) @ w + jnp.sin(x) @ w, ["A @ B + residual", "A @ B + residual", "A @ B"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", SUMS)
def test_scales_biases_and_residuals(form):
    fn, wanted = SUMS[form]
    wanted = [wanted] if isinstance(wanted, str) else wanted
    assert_fused(fn, ["" if text == "A @ B" else text for text in wanted], X, W, B, R)


ACTIVATIONS = {
    "relu": [jax.nn.relu, lambda x: jnp.maximum(x, 0), lambda x: jnp.maximum(0.0, x), jax.jit(jax.nn.relu)],
    "gelu": [
        functools.partial(jax.nn.gelu, approximate=False),
        lambda x: 0.5 * x * (1 + lax.erf(x / np.float32(np.sqrt(2)))),
        lambda x: x * (lax.erfc(-x * np.float32(np.sqrt(0.5))) / 2),
    ],
    "gelu_tanh": [
        jax.nn.gelu,
        jax.jit(jax.nn.gelu),
        lambda x: 0.5 * x * (1 + jnp.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3))),
        lambda x: x * (0.5 * jnp.tanh(jnp.sqrt(2 / jnp.pi) * x * (1 + 0.044715 * x * x)) + 0.5),
    ],
    "silu": [jax.nn.silu, jax.nn.swish, lambda x: x * jax.nn.sigmoid(x), lambda x: x / (1 + jnp.exp(-x))],
    "sigmoid": [jax.nn.sigmoid, lambda x: 1 / (1 + jnp.exp(-x)), lax.logistic],
    "tanh": [jnp.tanh, lax.tanh, lambda x: -jnp.tanh(-x)],
}
FORMS = [(name, form) for name, forms in ACTIVATIONS.items() for form in forms]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name, act", FORMS)
def test_activations_however_they_are_written(name, act, dtype, request):
    if dtype == jnp.bfloat16:
        request.getfixturevalue("of_16_bits")
    x, w, b = (a.astype(dtype) for a in (X, W, B))
    fn = lambda x, w, b: act(x @ w + b)
    assert fused(fn, x, w, b) == [f"{name}(A @ B + bias)"]
    exact = [np.asarray(a, np.float64) for a in (x, w, b)]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        exact = np.asarray(act(jnp.asarray(exact[0] @ exact[1] + exact[2])))
    ours, theirs = (np.abs(np.asarray(jax.jit(f)(x, w, b), np.float64) - exact) for f in (accelerate(fn), fn))
    # Of constants rounded to bfloat16, XLA's result has the error too.
    assert ours.mean() <= 2 * theirs.mean() and ours.max() <= 2 * theirs.max() + float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("act", [forms[0] for forms in ACTIVATIONS.values()])
def test_infinities_and_nan(act):
    x = jnp.asarray([[np.nan, 1], [np.inf, 0], [-np.inf, 0], [1e30, 1e30], [0, 0]], jnp.float32)
    w = jnp.asarray([[1, 0], [1, 1]], jnp.float32)
    fn = lambda x, w, b: act(x @ w + b)
    b = jnp.asarray([0, 1], jnp.float32)
    ours, theirs = (np.asarray(jax.jit(f)(x, w, b)) for f in (accelerate(fn), fn))
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_numbers_become_part_of_a_kernel_and_arrays_do_not():
    """Reading an array would wait for it, and each of its values would be another program."""
    scale = jnp.asarray(0.3)
    text = lambda fn: jax.jit(accelerate(fn)).lower(X, W).as_text()
    assert "stablehlo.multiply" not in text(lambda x, w: (x @ w) * 0.3)
    assert "stablehlo.multiply" in text(lambda x, w: (x @ w) * scale)
    assert_close(jax.jit(accelerate(lambda x, w: (x @ w) * scale))(X, W), (X @ W) * scale)


def with_another_use(x, w, b, r):
    p = x @ w
    return p, jnp.tanh(p)


def biased_with_another_use(x, w, b, r):
    p = x @ w + b
    return jnp.sin(p), jax.nn.relu(p)


@jax.custom_jvp
def with_rule(x):
    return jnp.maximum(x, 0)


with_rule.defjvps(lambda tangent, out, x: 2 * tangent)


@jax.custom_vjp
def straight_through(x):
    return jnp.tanh(x)


straight_through.defvjp(lambda x: (jnp.tanh(x), None), lambda kept, ct: (ct,))

KEPT = {
    "a product with another use": (with_another_use, ""),
    "a sum with another use": (biased_with_another_use, "A @ B + bias"),
    "a rounding": (lambda x, w, b, r: lax.reduce_precision(x @ w, 8, 7) + b, ""),
    "a sum of all rows": (lambda x, w, b, r: x @ w + b[:1], ""),
    "a bias of rows": (lambda x, w, b, r: x @ w + r[:, :, :1], ""),
    "a factor of columns": (lambda x, w, b, r: (x @ w) * b, ""),
    "a factor after a sum": (lambda x, w, b, r: (x @ w + b) * 4, "A @ B + bias"),
    "a second factor": (lambda x, w, b, r: x @ w * 2 * 2, ""),
    "a factor that XLA merges": (lambda x, w, b, r: jnp.sin(0.3 * (x @ w)), ""),
    "a residual that is rounded on the way": (lambda x, w, b, r: x @ w + 0.3 * r, ""),
    "a residual that only XLA can make": (lambda x, w, b, r: x @ w + (jnp.cos(x) @ w + jnp.sin(r)), ["", ""]),
    "a residual that is converted on the way": (
        lambda x, w, b, r: x @ w + r.astype(jnp.bfloat16).astype(jnp.float32), "",
    ),
    "what a barrier holds": (lambda x, w, b, r: lax.optimization_barrier(x @ w) + b, ""),
    "terms that cancel, but not infinities": (lambda x, w, b, r: (lambda y: y + jnp.maximum(y, 0) - y)(x @ w), ""),
    "infinity times zero": (lambda x, w, b, r: (lambda y: jnp.maximum(y, 0) + 0 * y)(x @ w), ""),
    "a select, whose NaN is another": (lambda x, w, b, r: jnp.where(x @ w > 0, x @ w, 0), ["", ""]),
    "another constant": (lambda x, w, b, r: (lambda y: y * jax.nn.sigmoid(1.702 * y))(x @ w), ""),
    "a custom VJP": (lambda x, w, b, r: straight_through(x @ w), ""),
    "what XLA merges with a gate": (lambda x, w, b, r: jax.nn.silu(x @ w) * r, ""),
    "what XLA merges with a sum": (lambda x, w, b, r: jnp.tanh(x @ w).sum(-1), ""),
    "a residual that is not there yet": (lambda x, w, b, r: x @ w + jnp.sin(r), ""),
    "a sum that nothing stores": (lambda x, w, b, r: jnp.sin(x @ w + r), ""),
    "a factor of zero": (lambda x, w, b, r: (x @ w) * 0.0, ""),
    "integers": (lambda x, w, b, r: lax.dot_general(
        x.astype(jnp.int8), w.astype(jnp.int8), (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32
    ) + 1, [""] * (jax.default_backend() == "cpu")),
}  # fmt: skip


@pytest.mark.parametrize("what", KEPT)
def test_what_is_not_fused(what):
    fn, wanted = KEPT[what]
    assert fused(fn, X, W, B, R) == ([wanted] if isinstance(wanted, str) else wanted)
    assert_close(jax.jit(accelerate(fn))(X, W, B, R), fn(X, W, B, R))


def test_custom_derivatives_stay():
    assert fused(lambda x, w: with_rule(x @ w), X, W) == ["relu(A @ B)"]
    for fn in (with_rule, straight_through):
        layer = lambda x, w, fn=fn: fn(x @ w)
        assert_close(gradient(accelerate(layer))(X, W), gradient(layer)(X, W))
        batches = jnp.stack([X, X]), W
        assert_close(gradient(jax.vmap(accelerate(layer), (0, None)))(*batches), gradient(layer)(*batches))


Q, S = normal(16, 16), normal(16)
SHARED = {
    "a multiple of another product": lambda q, s: 2.5 * (q @ jnp.sin(q)) + q @ jnp.cos(q),
    "a multiple of another sum": lambda q, s: 2 * (q @ jnp.sin(q) + s) + q @ jnp.cos(q),
    "sums of gradients": jax.grad(lambda q, s: jnp.sin(q @ (q * 2)).sum()),
    "an operand that is the residual": lambda q, s: q @ q + q,
    "a product that is its own residual": lambda q, s: (lambda p: p + p)(q @ q),
    "products in a row": lambda q, s: ((q @ jnp.sin(q) + q) @ q + s) @ q + q,
    "mapped rows": lambda q, s: jax.vmap(lambda r: jnp.tanh(r @ q + s) @ q + r)(q),
    "mapped columns": lambda q, s: jax.vmap(lambda r: jnp.tanh(q @ r + s), 1, 1)(q),
    "a bias of two products": lambda q, s: (lambda b: (q @ q + b, jnp.sin(q) @ q + b))(jnp.broadcast_to(s, q.shape)),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED)
def test_what_another_equation_reads_stays(what):
    fn = SHARED[what]
    assert_close(jax.jit(accelerate(fn))(Q, S), fn(Q, S))
    assert_close(gradient(accelerate(fn))(Q, S), gradient(fn)(Q, S))


def error(got, wanted):
    return np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64)).max()


@pytest.mark.usefixtures("of_16_bits")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "act, wanted",
    [
        (lambda y: jax.nn.relu(0.99 * y), "relu"),
        (lambda y: jnp.tanh(1.01 * y), "tanh"),
        (lambda y: y * jax.nn.sigmoid(1.01 * y), ""),
        (lambda y: 0.496 * y * (1 + lax.erf(y * 0.7071)), ""),
        (lambda y: 0.5 * y * (1 + jnp.tanh(0.81 * (y + 0.044715 * y**3))), ""),
    ],
)
def test_constants_near_those_of_an_activation(act, wanted, dtype):
    x, w = 4 * X.astype(dtype), W.astype(dtype)
    fn = lambda x, w: act(x @ w)
    assert [text.partition("(")[0] for text in fused(fn, x, w)] == [wanted]
    exact = act(jnp.asarray(np.asarray(x, np.float64) @ np.asarray(w, np.float64), jnp.float32))
    errors = [error(jax.jit(f)(x, w), exact) for f in (accelerate(fn), fn)]
    assert errors[0] <= 2 * errors[1] + float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize(
    "act",
    [lambda y: jnp.maximum(y, 0), lambda y: jnp.maximum(0.0, y), jax.nn.relu, with_rule, lambda y: lax.max(y, 0.0)],
)
def test_derivatives_at_kinks(act):
    fn = lambda x, w: act(x @ w)
    assert fused(fn, X, 0 * W) == ["relu(A @ B)"]
    for transform in (gradient, lambda fn: gradient(jax.jit(fn)), lambda fn: gradient(jax.checkpoint(fn))):
        assert_close(transform(accelerate(fn))(X, 0 * W), gradient(fn)(X, 0 * W))
    ones = jnp.ones_like(X), jnp.ones_like(W)
    assert_close(jax.jvp(accelerate(fn), (X, 0 * W), ones), jax.jvp(fn, (X, 0 * W), ones))
    batched = lambda fn: gradient(jax.vmap(fn, (0, None)))
    assert_close(batched(accelerate(fn))(jnp.stack([X, X]), 0 * W), batched(fn)(jnp.stack([X, X]), 0 * W))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y, to: y.astype(to).astype(jnp.float32) + B,
        lambda y, to: jnp.tanh(y.astype(to).astype(jnp.float32)),
        lambda y, to: y.astype(to).astype(jnp.float32) * 3,
        lambda y, to: jax.nn.relu(y).astype(to).astype(jnp.float32),
        lambda y, to: jnp.tanh(lax.optimization_barrier(y.astype(to)).astype(jnp.float32)),
        lambda y, to: jax.jit(lambda y: jnp.tanh(y.astype(to).astype(jnp.float32)))(y),
    ],
)
def test_roundings_that_the_program_asks_for(fn, dtype):
    """Exactly: what is rounded has few values. XLA drops roundings after a call if it may."""
    whole = [jnp.round(4 * a).astype(jnp.float32) for a in (X, W)]
    layer = lambda x, w: fn(x @ w, dtype)
    strict = dict(compiler_options={"xla_allow_excess_precision": False})
    ours, theirs = (jax.jit(f).lower(*whole).compile(**strict)(*whole) for f in (accelerate(layer), layer))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_residual_that_cancels_the_product():
    x, w = jnp.round(8 * normal(24, 16)), jnp.round(8 * normal(16, 24))
    r = x @ w
    for scale in (0.1, 1 / 3, 0.7, 4.0):
        for fn in (lambda x, w, r: (x @ w - r) * scale, lambda x, w, r: scale * (x @ w) - scale * r):
            assert not accelerate(fn)(x, w, r).any()


HUGE = 1e30
SCALES = {
    "overflow of the factors": lambda p, b: p * HUGE * HUGE,
    "underflow of the factors": lambda p, b: p / HUGE / HUGE,
    "one that float32 lacks": lambda p, b: p * 1e-40,
    "a bias that would overflow": lambda p, b: (p + b) * 2.0**100,
    "a residual that would overflow": lambda p, b: (p + jnp.zeros_like(p) + b) * HUGE * HUGE,
}


@pytest.mark.parametrize("value", [0.0, 1.0, np.inf])
@pytest.mark.parametrize("what", SCALES)
def test_factors_beyond_what_a_dtype_holds(what, value):
    fn = lambda x, w, b: SCALES[what](x @ w, b)
    args = jnp.full((8, 16), value), jnp.full((16, 8), 1.0), jnp.full(8, 2.0**-20)
    np.testing.assert_array_equal(accelerate(fn)(*args), fn(*args))


def schedules_in(jaxpr):
    """{(shape of lhs, shape of rhs): schedule} of our products."""
    found = {}
    for eqn in jaxpr.eqns:
        if "schedule" in eqn.params:
            found[tuple(x.aval.shape for x in eqn.invars[:2])] = eqn.params["schedule"]
        for value in eqn.params.values():
            found |= schedules_in(getattr(value, "jaxpr", value)) if hasattr(value, "eqns") else {}
    return found


def test_schedules_and_precisions_stay_with_their_operands():
    """A bias of rows makes the kernel's lhs the rhs."""
    w, x, b = normal(24, 16), normal(16, 20), normal(24)
    turned = lambda w, x, b: (w @ x).T + b
    schedule = PerPass(forward=SplitK(1), lhs=SplitK(2), rhs=StreamK())
    assert fused(turned, w, x, b) == ["A @ B + bias"]
    wanted, got = (
        schedules_in(jax.make_jaxpr(gradient(accelerate(fn, schedule=schedule)))(w, x).jaxpr)
        for fn in (lambda w, x: (w @ x).T, lambda w, x: turned(w, x, b))
    )
    assert got == wanted and {*got.values()} == {schedule, SplitK(2), StreamK()}
    precise = lambda w, x, b: jnp.matmul(w, x, precision=("high", "default")).T + b
    (eqn,) = jax.make_jaxpr(accelerate(precise))(w, x, b).eqns
    (kernel,) = [e for e in eqn.params["call_jaxpr"].eqns if "product" in e.params]
    assert [p.name for p in kernel.params["product"].precision] == ["DEFAULT", "HIGH"]


@pytest.mark.usefixtures("of_16_bits")
@pytest.mark.parametrize("act", [lambda y: y, jax.nn.silu])
def test_gradients_of_a_bias_are_summed_as_they_were(act):
    x, w, b = jnp.ones((4096, 16), jnp.bfloat16), W[:, :8].astype(jnp.bfloat16), jnp.zeros(8, jnp.bfloat16)
    fn = lambda b: act(jnp.matmul(x, w, preferred_element_type=jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)
    loss = lambda fn: lambda b: fn(b).astype(jnp.float32).sum()
    np.testing.assert_array_equal(jax.grad(loss(accelerate(fn)))(b), jax.grad(loss(fn))(b))


@pytest.mark.parametrize("fn", [lambda w: (w @ w) * 2.5, lambda w: w @ w + w[0], lambda w: jnp.maximum(w @ w + w, 0)])
def test_weak_types(fn):
    w = lax.full((8, 8), 0.3)
    weak = lambda fn: jax.tree.map(lambda x: x.weak_type, fn(w))
    for transform in (lambda fn: fn, jax.jit, lambda fn: lambda w: jax.jvp(fn, (w,), (w,))):
        assert weak(transform(accelerate(fn))) == weak(transform(fn)) == weak(accelerate(transform(fn)))


def test_shardings_that_a_call_asks_for():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("i"), P()))
    x, w = jax.device_put((normal(8, 16), W), whole)
    for act in (jax.jit(jnp.tanh, out_shardings=rows), lambda y: jnp.tanh(lax.with_sharding_constraint(y, rows))):
        fn = lambda x, w, act=act: act(x @ w)
        got, wanted = jax.jit(accelerate(fn))(x, w), jax.jit(fn)(x, w)
        assert got.sharding.is_equivalent_to(wanted.sharding, 2)
    donated = lambda x, w: jax.jit(jnp.tanh, donate_argnums=0)(x @ w)
    assert fused(donated, X, W) == [""]


def test_batches_that_lie_elsewhere_in_the_derivative():
    """A kernel may leave a mapped dimension where the equations that it replaces do not."""
    fn = jax.jit(lambda x, w, b: jax.jit(jnp.tanh)(jax.jit(lambda x, w, b: x @ w + b)(x, w, b)))
    args = X[0], jnp.stack([W, jnp.cos(W)]), B
    for outer in (lambda fn: fn, jax.jit):
        ours, theirs = (gradient_of_mean(outer(jax.vmap(f, (None, 0, None)))) for f in (accelerate(fn), fn))
        assert_close(jax.jit(ours)(*args), theirs(*args))


def test_operands_are_read_in_either_order():
    """No transpose is left before a fused product."""
    fn = lambda x, w, b: jnp.tanh(x.T @ w.T + b)
    x, w = normal(16, 8), normal(24, 16)
    assert "tanh" in fused(fn, x, w, B)[0]
    compiled = jax.jit(accelerate(fn)).lower(x, w, B).compile().as_text()
    assert " transpose(" not in compiled and " copy(" not in compiled


def test_values_of_an_outer_trace():
    def fn(act, x):
        shifted = jnp.sin(x)
        return act(lambda y: jax.nn.relu(y @ W + shifted[0, 0, 0]) + (shifted @ W))(x)

    for outer in (jax.jit, lambda fn: fn, jax.vmap, jax.grad):
        ours, theirs = (outer(lambda x, act=act: jnp.cos(fn(act, x)).sum()) for act in (accelerate, lambda fn: fn))
        x = jnp.stack([X, X]) if outer is jax.vmap else X
        assert_close(ours(x), theirs(x))


def test_transposing_a_linear_function():
    fn = lambda x: 2.5 * (x @ W) + 0.5 * x[..., :1]
    transposed = lambda fn: jax.linear_transpose(fn, X)(R)[0]
    assert_close(transposed(accelerate(fn)), transposed(fn))


def test_nothing_runs_twice_and_scopes_stay():
    def fn(x, w):
        with jax.named_scope("layer"):
            return jax.nn.relu(x @ w + B)

    lowered = jax.jit(accelerate(fn)).lower(X, W)
    assert lowered.as_text().count(f"custom_call @{TARGET}(") == 1
    names = [line for line in lowered.compile().as_text().splitlines() if TARGET in line]
    assert len(names) == 1 and "layer/" in names[0]


def narrow(x, w, act=lambda y: y):
    return act(jnp.einsum("btk,kn->btn", x, w, preferred_element_type=jnp.float32)).astype(x.dtype)


@pytest.mark.usefixtures("of_16_bits")
def test_conversions_of_the_result():
    x, w, b = (a.astype(jnp.bfloat16) for a in (X, W, B))
    text = jax.jit(accelerate(narrow)).lower(x, w).as_text()
    assert f"custom_call @{TARGET}" in text and "f32" not in text.split("custom_call")[1].split("->")[1].split("\n")[0]
    assert fused(functools.partial(narrow, act=lambda y: jax.nn.silu(y + b)), x, w) == ["silu(A @ B + bias)"]
    # Rounding a float32 bias would lose more than the conversion of the sum.
    assert fused(functools.partial(narrow, act=lambda y: y + B), x, w) == ["A @ B + bias"]
    rows = accelerate(functools.partial(narrow, act=lambda y: y + B)).explain(x, w).rows
    assert [row.plan.problem.type_d.name for row in rows] == ["f32"]
    # A residual stream in float32.
    wide = lambda x, w, r: r + (x @ w).astype(jnp.float32)
    assert fused(wide, x, w, R) == ["A @ B + residual"]
    assert accelerate(wide).explain(x, w, R).rows[0].plan.problem.type_d.name == "f32"
    # Twice the bytes for nothing.
    assert accelerate(lambda x, w: (x @ w).astype(jnp.float32)).explain(x, w).rows[0].plan.problem.type_d.name == "bf16"
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b, np.float64)
    fn = lambda x, w, b: x @ w + b
    ours, theirs = (np.abs(np.asarray(jax.jit(f)(x, w, b), np.float64) - exact) for f in (accelerate(fn), fn))
    # XLA may round once, too, and add in another order.
    assert ours.mean() <= 1.01 * theirs.mean() and ours.max() <= 1.01 * theirs.max()


@pytest.mark.usefixtures("of_16_bits")
def test_a_result_that_is_widened_is_not_rounded(monkeypatch):
    """If it is small: routers choose by it, and XLA does not round it where it splits K."""
    widened = accelerate(lambda x, w: jax.nn.softmax((x @ w).astype(jnp.float32)))
    x, w = normal(24, 400).astype(jnp.bfloat16), (normal(400, 16) / 20).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    np.testing.assert_allclose(widened(x, w), exact / exact.sum(-1, keepdims=True), rtol=1e-4, atol=1e-7)
    monkeypatch.setattr(sys.modules["jax_streamk.accelerate.rewrite"], "device_of", lambda device: H200)
    relu = accelerate(lambda x, w: jax.nn.relu((x @ w).astype(jnp.float32)).astype(x.dtype))
    for f, k, n, type_d in (
        (widened, 2048, 128, "f32"),
        (widened, 768, 50304, "bf16"),
        (widened, 8192, 128256, "bf16"),
        (relu, 8192, 8192, "bf16"),
    ):
        operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, k), (k, n)))
        (row,) = f.explain(*operands).rows
        assert row.plan.problem.type_d.name == type_d


def dense(x, w, b, r):
    return r + jax.nn.gelu(x @ w + b) @ w.T


def gradient_of_mean(fn):
    loss = lambda *args: sum(jnp.cos(y).mean() for y in jax.tree.leaves(fn(*args)))
    return jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_derivatives(order):
    args = X, W, B, normal(3, 5, 16)
    functions = dense, accelerate(dense)
    for _ in range(order):
        functions = [gradient_of_mean(fn) for fn in functions]
    theirs, ours = functions
    assert_close(jax.jit(ours)(*args), theirs(*args))
    assert_close(jax.jit(accelerate(theirs))(*args), theirs(*args))
    count, rest = products(ours, *args)
    assert rest == 0 and count > 0


def test_what_the_backward_pass_needs_is_kept():
    loss = lambda x, w, b: (jax.nn.gelu(x @ w + b) ** 2).sum()
    assert fused(loss, X, W, B) == ["A @ B + bias"]
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    assert fused(step, X, W, B) == ["", "", "A @ B + bias"]
    assert_close(jax.jit(accelerate(step))(X, W, B), step(X, W, B))
    # Gradients of what three products read are sums of three products.
    shared = jax.grad(lambda x, w: sum(jnp.sin(x @ (i * w)).sum() for i in (1.0, 2.0, 3.0)))
    assert fused(shared, X, W).count("A @ B + residual") == 2


@pytest.mark.usefixtures("of_16_bits")
def test_derivatives_of_a_wide_activation():
    """The activation's derivative sees what it was given, in float32, though the result is bfloat16."""
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    fn = functools.partial(narrow, act=jax.nn.silu)
    assert fused(fn, x, w) == ["silu(A @ B)"]
    exact = gradient(lambda x, w: jax.nn.silu(jnp.matmul(x, w, precision="highest")))(
        x.astype(jnp.float32), w.astype(jnp.float32)
    )
    for ours, theirs, wanted in zip(gradient(accelerate(fn))(x, w), gradient(fn)(x, w), exact):
        assert ours.dtype == theirs.dtype
        errors = [np.abs(np.asarray(a, np.float64) - wanted).mean() for a in (ours, theirs)]
        assert errors[0] <= 2 * errors[1]
    again = gradient(lambda x, w: sum(y.sum() for y in gradient(accelerate(fn))(x, w)))(x, w)
    assert all(np.isfinite(np.asarray(y, np.float32)).all() for y in again)


@pytest.mark.parametrize("axes", [(0, None, None, 0), (None, 0, None, None), (0, 0, 0, 0), (None, None, 0, None)])
def test_vmap_on_either_side(axes):
    args = [a if axis is None else jnp.stack([a, jnp.cos(a)]) for a, axis in zip((X, W, B, normal(3, 5, 16)), axes)]
    wanted = jax.vmap(dense, axes)(*args)
    assert_close(jax.jit(jax.vmap(accelerate(dense), axes))(*args), wanted)
    assert_close(jax.jit(accelerate(jax.vmap(dense, axes)))(*args), wanted)


def test_inside_other_primitives():
    def body(x, w):
        return lax.cond(
            x.sum() > -1e9, jax.checkpoint(lambda x: x + jax.nn.relu(x @ w + B[:16]) @ w), lambda x: x, x
        ), ()

    fn = lambda x, w: lax.scan(body, x, jnp.stack([w, w.T]))[0]
    x, w = X, normal(16, 16)
    assert fused(fn, x, w) == ["A @ B + residual"] * 2 + ["relu(A @ B + bias)"] * 2
    assert_close(jax.jit(accelerate(fn))(x, w), fn(x, w))
    assert_close(jax.jit(gradient(accelerate(fn)))(x, w), gradient(fn)(x, w))
    looped = lambda x, w: lax.while_loop(lambda c: c.sum() < 1e3, lambda c: 2 + jnp.abs(c + c @ w), x)
    assert_close(jax.jit(accelerate(looped))(x, w), looped(x, w))


def test_an_explicit_schedule():
    fn, x, w = lambda x, w, b: jax.nn.relu(x @ w + b), normal(8, 1024), normal(1024, 24)
    accelerated = accelerate(fn, schedule=SplitK(3))
    (row,) = accelerated.explain(x, w, B).rows
    assert (row.fused, row.schedule) == ("relu(A @ B + bias)", SplitK(3))
    assert_close(accelerated(x, w, B), fn(x, w, B))


def test_under_jit_inside_and_outside():
    layer = jax.jit(lambda x, w, b: x @ w + b)
    fn = jax.jit(lambda x, w, b: jnp.tanh(layer(x, w, b) @ w.T))
    assert fused(fn, X, W, B) == ["A @ B + bias", "tanh(A @ B)"]
    assert_close(jax.jit(accelerate(fn))(X, W, B), fn(X, W, B))


def test_flax_linen():
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.DenseGeneral((2, 8))(nn.LayerNorm()(x))
            x = x + nn.DenseGeneral(16, axis=(-2, -1))(h)
            h = nn.gelu(nn.Dense(24)(nn.LayerNorm()(x)))
            return x + nn.Dense(16)(h)

    model = Model()
    params = model.init(jax.random.key(0), X)
    wanted = ["A @ B + bias", "A @ B + residual + bias", "A @ B + residual + bias", "gelu_tanh(A @ B + bias)"]
    assert_fused(model.apply, wanted, params, X)
    loss = jax.value_and_grad(lambda params, x: (model.apply(params, x) ** 2).sum())
    assert_close(jax.jit(accelerate(loss))(params, X), loss(params, X))


def test_flax_nnx():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 24, rngs=rngs), nnx.Linear(24, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.silu(self.up(x)))

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    assert_fused(lambda s, x: nnx.merge(graph, s)(x), ["A @ B + residual + bias", "silu(A @ B + bias)"], state, X)
    import jax_streamk.flax.nnx as ours

    explained = ours.accelerate(lambda model, x: model(x)).explain(Model(nnx.Rngs(0)), X)
    assert sorted(row.fused for row in explained.rows) == ["A @ B + residual + bias", "silu(A @ B + bias)"]


def test_haiku():
    import haiku as hk

    model = hk.without_apply_rng(hk.transform(lambda x: x + hk.nets.MLP([24, 16])(x)))
    params = model.init(jax.random.key(0), X)
    assert_fused(model.apply, ["A @ B + residual + bias", "relu(A @ B + bias)"], params, X)


def test_equinox():
    import equinox as eqx

    mlp = eqx.nn.MLP(16, 4, 24, 1, activation=jax.nn.sigmoid, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    model = lambda params, x: eqx.combine(params, static)(x)
    wanted = ["A @ B + bias", "sigmoid(A @ B + bias)"]
    assert_fused(model, wanted, params, X[0, 0])
    assert_fused(jax.vmap(model, (None, 0)), wanted, params, X[0])


def collectives(compiled):
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return [compiled.as_text().count(f" {name}(") for name in names]


@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map", "shard_map, unchecked"])
def test_shardings_are_kept(kind):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    axis = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis,) * 2, devices=jax.devices()[:4])
    specs = P("data", None), P(None, "model"), P("model"), P("model", None), P()
    arrays = normal(8, 16), normal(16, 24), normal(24), normal(24, 16), normal(16)
    on = tuple(jax.sharding.NamedSharding(mesh, spec) for spec in specs)
    args = jax.device_put(arrays, on)

    def mlp(x, up, b, down, c, out=lambda y: y, **kwargs):
        return x + (out(jnp.matmul(jax.nn.gelu(x @ up + b), down, **kwargs)) + c)

    if kind.startswith("shard_map"):
        inner = functools.partial(mlp, out=lambda y: lax.psum(y, "model"))
        fn = jax.shard_map(
            inner, mesh=mesh, in_specs=specs, out_specs=P("data", None), check_vma="unchecked" not in kind
        )
    elif kind == "explicit":
        fn = functools.partial(mlp, out_sharding=on[0])
    else:
        fn = lambda *args: lax.with_sharding_constraint(mlp(*args), on[0])
    with jax.set_mesh(mesh):
        for transform in (lambda fn: fn, lambda fn: jax.grad(lambda *args: jnp.cos(fn(*args)).sum(), (1, 2, 3, 4))):
            theirs, ours = transform(fn), transform(accelerate(fn))
            compiled = [jax.jit(f).lower(*args).compile() for f in (theirs, ours, accelerate(theirs))]
            assert collectives(compiled[0]) == collectives(compiled[1]) == collectives(compiled[2])
            wanted, *got = (f(*args) for f in compiled)
            for out in got:
                assert_close(jax.tree.map(np.asarray, out), jax.tree.map(np.asarray, wanted))
                for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(wanted)):
                    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert any("gelu" in text for text in fused(fn, *args))


@pytest.fixture
def as_on_h200(monkeypatch, of_16_bits):
    """CPUs have no gated kernels: there a program that was fused for an H200 multiplies twice."""
    monkeypatch.setattr(sys.modules["jax_streamk.accelerate.rewrite"], "device_of", lambda device: H200)


NARROW = jnp.bfloat16


def row_of_another_product(x, w, c, d):
    """Its rounded row is the last value of a kernel, with a reshape."""
    row = jnp.einsum("k,kn->n", c, d, preferred_element_type=jnp.float32).astype(NARROW)
    return x @ w + row[None, :]


@pytest.mark.usefixtures("of_16_bits")
def test_steps_of_another_kernel_are_not_undone():
    args = [normal(*shape).astype(NARROW) for shape in ((8, 16), (16, 24), (16,), (16, 24))]
    assert fused(row_of_another_product, *args) == ["", "A @ B + bias"]
    assert error(accelerate(row_of_another_product)(*args), row_of_another_product(*args)) <= 0.125


def test_a_transposed_product_of_a_vector_keeps_its_shape():
    fn = lambda x, w, b: (x @ w).T + b
    assert_fused(fn, "A @ B + bias", X[0, :1], W, B[:, None])
    assert accelerate(fn)(X[0, :1], W, B[:, None]).shape == (24, 1)
    mapped = jax.vmap(accelerate(fn))(X[:, :1], jnp.stack([W] * 3), jnp.stack([B[:, None]] * 3))
    assert mapped.shape == (3, 24, 1)


def test_what_a_kernel_reads_and_its_residual_have_in_common():
    """The jaxpr of what it replaces must not make a value that it is given."""
    q = normal(16, 16).astype(NARROW)
    fn = lambda q: (lambda c: c @ jnp.cos(c) + c)(q.astype(jnp.float32))
    with jax.enable_checks(True):
        assert fused(fn, q) == ["A @ B + residual"]
        assert_close(jax.jit(accelerate(fn))(q), fn(q))
        loss = lambda fn: jax.grad(lambda q: jnp.cos(fn(q)).sum())
        assert_close(loss(accelerate(fn))(q), loss(fn)(q))


@pytest.mark.usefixtures("of_16_bits")
def test_equal_products_cancel_where_the_program_rounds_them():
    x, w = X[0].astype(NARROW), W.astype(NARROW)
    for fn in (
        lambda x, w: x @ w - x @ w,
        lambda x, w: (x @ w).astype(jnp.float32) - (x @ w).astype(jnp.float32),
        lambda x, w: -(x @ w) + x @ w,
        lambda x, w: x[:1] @ w - x[:1] @ w,
    ):
        assert not accelerate(fn)(x, w).any()


def test_deep_programs():
    """Deeper than Python's stack, in time that grows as their length does."""

    def layers(x, w, n=1200):
        for _ in range(n):
            x = x + x @ w
        return x

    assert len(fused(layers, Q, Q)) == 1200
    summed = lambda x, w: sum((i * x) @ w for i in range(1200))
    assert fused(summed, Q, Q).count("A @ B + residual") == 1199


def test_descriptions_of_arrays_pass_through():
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert accelerate(lambda x, spec: (x @ x, spec))(Q, spec)[1] is spec


silu = jax.nn.silu
GATE_OPERANDS = [normal(*shape) for shape in ((2, 4, 256), (256, 512), (512, 256), (512,))]
GATE_OPERANDS = [
    a.astype(NARROW) for a in (*GATE_OPERANDS[:2], GATE_OPERANDS[2].T, GATE_OPERANDS[3], -GATE_OPERANDS[3])
]
SILU, BIASED = "silu(A @ B) * (A @ second B)", "silu(A @ B + bias) * (A @ second B + second bias)"
GATES = {
    "silu": (lambda x, v, w, b, c: silu(x @ v) * (x @ w), SILU),
    "up first": (lambda x, v, w, b, c: (lambda up: up * silu(x @ v))(x @ w), SILU),
    "up as first factor": (lambda x, v, w, b, c: (x @ w) * silu(x @ v), SILU),
    "biases": (lambda x, v, w, b, c: silu(x @ v + b) * (x @ w + c), BIASED),
    "biases, up first": (lambda x, v, w, b, c: (lambda up: silu(b + x @ v) * up)(x @ w + c), BIASED),
    "exact gelu": (
        lambda x, v, w, b, c: jax.nn.gelu(x @ v, approximate=False) * (x @ w), "gelu(A @ B) * (A @ second B)",
    ),
    "gelu": (lambda x, v, w, b, c: jax.nn.gelu(x @ v) * (x @ w), "gelu_tanh(A @ B) * (A @ second B)"),
    "relu": (lambda x, v, w, b, c: jnp.maximum(x @ v, 0) * (x @ w), "relu(A @ B) * (A @ second B)"),
    "sigmoid": (lambda x, v, w, b, c: jax.jit(jax.nn.sigmoid)(x @ v) * (x @ w), "sigmoid(A @ B) * (A @ second B)"),
    "tanh": (lambda x, v, w, b, c: jnp.tanh(x @ v) * (x @ w), "tanh(A @ B) * (A @ second B)"),
    "bilinear": (lambda x, v, w, b, c: (x @ v) * (x @ w), "(A @ B) * (A @ second B)"),
    "by hand": (lambda x, v, w, b, c: (lambda g: g / (1 + jnp.exp(-g)) * (x @ w))(x @ v), SILU),
    "a vector": (lambda x, v, w, b, c: (lambda x: silu(v.T @ x + b) * (w.T @ x + c))(x[0, 0]), BIASED),
    "flat rows": (
        lambda x, v, w, b, c: (lambda x, to: silu(x @ v).reshape(to) * (x @ w).reshape(to))(
            x.reshape(8, 256), (2, 4, 512)
        ), SILU,
    ),
    "an activation in float32": (
        lambda x, v, w, b, c: silu((x @ v).astype(jnp.float32)).astype(NARROW) * (x @ w), SILU,
    ),
    "a gate in float32": (
        lambda x, v, w, b, c: (silu((x @ v + b).astype(jnp.float32)) * (x @ w + c)).astype(NARROW), BIASED,
    ),
    "products in float32": (
        lambda x, v, w, b, c: (lambda dot: (silu(dot(x, v)) * dot(x, w)).astype(NARROW))(
            functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        ), SILU,
    ),
    "an argument that each layer converts": (
        lambda x, v, w, b, c: (lambda x: silu(x.astype(NARROW) @ v) * (x.astype(NARROW) @ w))(
            x.astype(jnp.float32)
        ), SILU,
    ),
    "a residual after it": (lambda x, v, w, b, c: x[..., :1] + silu(x @ v) * (x @ w), SILU),
}  # fmt: skip


def assert_as_exact(fn, *args):
    """What ``accelerate`` computes is as close to float32's result as what XLA does."""
    exact = fn(*(a.astype(jnp.float32) if a.dtype == NARROW else a for a in args))
    got, wanted = jax.jit(accelerate(fn))(*args), jax.jit(fn)(*args)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    eps = float(jnp.finfo(NARROW).eps) * np.abs(exact).max()
    assert error(got, exact) <= 2 * error(wanted, exact) + eps


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("form", GATES)
def test_gates(form):
    fn, wanted = GATES[form]
    assert fused(fn, *GATE_OPERANDS) == [wanted]
    assert_as_exact(fn, *GATE_OPERANDS)


def slices(h):
    n = h.shape[-1] // 2
    return silu(h[..., :n]) * h[..., n:]


def columns(h):
    """Of a product with matrices (k, 2, n)."""
    return silu(h[..., 0, :]) * h[..., 1, :]


def of_parts(of):
    """A gate of the parts of a split."""
    return lambda h: of(*jnp.split(h, 2, -1))


STACKED = jnp.stack(GATE_OPERANDS[1:3], 1)
WIDE_OPERANDS = GATE_OPERANDS[0], STACKED.reshape(256, 1024), jnp.concatenate(GATE_OPERANDS[3:])
WIDE = {
    "a split": (lambda x, w, b: of_parts(lambda g, up: silu(g) * up)(x @ w), SILU),
    "a split, up first": (lambda x, w, b: of_parts(lambda g, up: up * silu(g))(x @ w + b), BIASED),
    "slices": (lambda x, w, b: slices(x @ w), SILU),
    "slices of a sum": (lambda x, w, b: slices(b + x @ w), BIASED),
    "slices in float32": (lambda x, w, b: slices((x @ w + b).astype(jnp.float32)).astype(NARROW), BIASED),
    "bilinear": (lambda x, w, b: of_parts(jnp.multiply)(x @ w), "(A @ B) * (A @ second B)"),
    "by hand": (lambda x, w, b: of_parts(lambda g, up: g * jax.nn.sigmoid(g) * up)(x @ w), SILU),
    "a transposed matrix": (lambda x, w, b: slices(x @ w.T.reshape(1024, 256).T), SILU),
    "a view of two": (lambda x, w, b: columns((x @ w + b).reshape(2, 4, 2, 512)), BIASED),
    "two stacked": (
        lambda x, w, b: columns(jnp.einsum("abk,kjn->abjn", x, w.reshape(256, 2, 512)) + b.reshape(2, 512)), BIASED,
    ),
    "a vector": (lambda x, w, b: slices(x[0, 0] @ w), SILU),
    "each of a batch": (lambda x, w, b: slices(jnp.einsum("abk,akn->abn", x, jnp.stack([w, -w]))), SILU),
}  # fmt: skip


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("form", WIDE)
def test_gates_of_one_wide_product(form):
    fn, wanted = WIDE[form]
    assert fused(fn, *WIDE_OPERANDS) == [wanted]
    assert_as_exact(fn, *WIDE_OPERANDS)


NOT_HALVES = {
    "the second half's activation": lambda x, w, b: jax.nn.glu(x @ w),
    "the second slice's activation": lambda x, w, b: of_parts(lambda up, g: silu(g) * up)(x @ w),
    "halves of the rows": lambda x, w, b: (lambda g, up: silu(g) * up)(*jnp.split(x @ w, 2, 1)),
    "columns in turn": lambda x, w, b: (lambda h: silu(h[..., ::2]) * h[..., 1::2])(x @ w),
    "every second column": lambda x, w, b: (lambda h: silu(h[..., ::2]) * h[..., 512:])(x @ w),
    "heads": lambda x, w, b: slices((x @ w).reshape(2, 4, 4, 256)),
    "one half twice": lambda x, w, b: (lambda h: silu(h[..., :512]) * h[..., :512])(x @ w),
    "a half with another use": lambda x, w, b: of_parts(lambda g, up: silu(g) * up + up)(x @ w),
    "a whole with another use": lambda x, w, b: (lambda h: slices(h) + h.max())(x @ w),
    "three parts": lambda x, w, b: (lambda h: silu(h[..., :512]) * h[..., 512:] + h[..., 256:768])(x @ w),
    "other sizes": lambda x, w, b: (lambda h: silu(h[..., :256]) * h[..., 256:512])(x @ w),
    "a factor": lambda x, w, b: of_parts(lambda g, up: silu(g) * (2 * up))(x @ w),
    "a bias of one": lambda x, w, b: of_parts(lambda g, up: silu(g + b[:512]) * up)(x @ w),
}


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("what", NOT_HALVES)
def test_what_is_no_gate_of_a_wide_product(what):
    fn = NOT_HALVES[what]
    assert not any("second" in text for text in fused(fn, *WIDE_OPERANDS))
    assert_as_exact(fn, *WIDE_OPERANDS)


APART = {
    "a product with another use": lambda x, v, w, b, c: (lambda up: (silu(x @ v) * up).sum() + up.max())(x @ w),
    "an activation with another use": lambda x, v, w, b, c: (lambda g: g * (x @ w) + g)(silu(x @ v)),
    "two activations": lambda x, v, w, b, c: silu(x @ v) * jnp.tanh(x @ w),
    "another operand": lambda x, v, w, b, c: silu(x @ v) * (jnp.sin(x) @ w),
    "another dtype": lambda x, v, w, b, c: silu(x @ v) * (x.astype(jnp.float32) @ w.astype(jnp.float32)),
    "another precision": lambda x, v, w, b, c: silu(x @ v) * jnp.matmul(x, w, precision="highest"),
    "one product": lambda x, v, w, b, c: (lambda up: silu(up) * up)(x @ w),
    "one bias": lambda x, v, w, b, c: silu(x @ v + b) * (x @ w),
    "a factor": lambda x, v, w, b, c: silu(x @ v) * (0.5 * (x @ w)),
    "a sum": lambda x, v, w, b, c: silu(x @ v) + x @ w,
    "rows of another": lambda x, v, w, b, c: silu(x @ v) * (x @ w)[:, :1],
    "transposed factors": lambda x, v, w, b, c: silu(x[0, :4] @ v[:, :4]) * (x[0, :4] @ w[:, :4]).T,
    "products that the program rounds": lambda x, v, w, b, c: (
        lambda dot: silu(dot(x, v)).astype(NARROW) * dot(x, w).astype(NARROW)
    )(functools.partial(jnp.matmul, preferred_element_type=jnp.float32)),
    "what a barrier holds": lambda x, v, w, b, c: silu(x @ v) * lax.optimization_barrier(x @ w),
}


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("what", APART)
def test_what_is_no_gate(what):
    fn = APART[what]
    assert not any("second" in text for text in fused(fn, *GATE_OPERANDS))
    assert_as_exact(fn, *GATE_OPERANDS)


# The last two rows are in no group.
ROUTED = [x.astype(NARROW) for x in (normal(40, 256), *normal(2, 3, 256, 512))] + [jnp.array([13, 0, 25], jnp.int32)]
rows_by = lax.ragged_dot
OF_GROUPS = {
    "silu": (lambda x, v, w, s: silu(rows_by(x, v, s)) * rows_by(x, w, s), SILU),
    "up first": (lambda x, v, w, s: (lambda up: up * silu(rows_by(x, v, s)))(rows_by(x, w, s)), SILU),
    "sigmoid": (
        lambda x, v, w, s: jax.nn.sigmoid(rows_by(x, v, s)) * rows_by(x, w, s), "sigmoid(A @ B) * (A @ second B)",
    ),
    "a gate in float32": (
        lambda x, v, w, s: (silu(rows_by(x, v, s).astype(jnp.float32)) * rows_by(x, w, s)).astype(NARROW), SILU,
    ),
    "an activation": (lambda x, v, w, s: jnp.tanh(rows_by(x, v, s)), "tanh(A @ B)"),
}  # fmt: skip
OF_OTHER_GROUPS = {
    "other sizes": lambda x, v, w, s: silu(rows_by(x, v, s)) * rows_by(x, w, s[::-1]),
    "other rows": lambda x, v, w, s: silu(rows_by(x, v, s)) * rows_by(jnp.sin(x), w, s),
    "other rows by the same matrices": lambda x, v, w, s: silu(rows_by(x, v, s)) * rows_by(jnp.sin(x), v, s),
    "what is not zero where no group is": lambda x, v, w, s: jax.nn.sigmoid(rows_by(x, v, s)),
    "a factor": lambda x, v, w, s: silu(2 * rows_by(x, v, s)) * rows_by(x, w, s),
    "a sum": lambda x, v, w, s: silu(rows_by(x, v, s) + w[0, :1]) * rows_by(x, w, s),
    "halves": lambda x, v, w, s: slices(rows_by(x, jnp.concatenate([v, w], -1), s)),
    "groups of what is contracted": lambda x, v, w, s: (lambda dw: silu(dw) * dw[:, :1])(
        jax.grad(lambda v: (rows_by(x, v, s) ** 2).sum())(v)
    ),
}


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("form", OF_GROUPS)
def test_gates_of_groups(form):
    fn, wanted = OF_GROUPS[form]
    assert fused(fn, *ROUTED) == [wanted]
    assert_as_exact(fn, *ROUTED)
    for i in range(2):
        assert_as_exact(jax.grad(lambda *args: jnp.sin(fn(*args).astype(jnp.float32)).sum(), i), *ROUTED)


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("what", OF_OTHER_GROUPS)
def test_what_is_no_gate_of_groups(what):
    fn = OF_OTHER_GROUPS[what]
    assert not any("second" in text or "sigmoid" in text or "silu" in text for text in fused(fn, *ROUTED))
    assert_as_exact(fn, *ROUTED)


@pytest.mark.usefixtures("of_16_bits")
def test_a_gate_that_no_kernel_takes_stays_as_it_is():
    if jax.default_backend() == "gpu":
        pytest.skip("GPUs have such kernels")
    assert fused(GATES["silu"][0], *GATE_OPERANDS) == ["", ""]
    assert fused(GATES["biases"][0], *GATE_OPERANDS) == ["A @ B + bias", "A @ B + bias"]


@pytest.mark.usefixtures("as_on_h200")
def test_gates_one_after_another():
    """Each pair is one; the factors of a longer product are taken from its end."""
    x, v, w, *_ = GATE_OPERANDS
    assert fused(lambda x, v, w: silu(x @ v) * (x @ w) * (x @ (v + w)), x, v, w).count("") <= 2

    def layers(x, v, w, n=100):
        for _ in range(n):
            x = x + (silu(x @ v) * (x @ w)) @ v.T
        return x

    assert fused(layers, x, v, w).count(SILU) == 100
    chained = lambda x, v, w: functools.reduce(lax.mul, [x @ (v + i * w) for i in range(300)])
    assert len(fused(chained, x, v, w)) < 300


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("form", ["silu", "biases", "a gate in float32", "slices of a sum", "a split", "two stacked"])
def test_gates_in_other_transformations(form):
    fn, wanted = (WIDE | GATES)[form]
    given = WIDE_OPERANDS if form in WIDE and form not in GATES else GATE_OPERANDS
    close = functools.partial(np.testing.assert_allclose, rtol=0.05, atol=0.05)
    loss = lambda fn: jax.grad(lambda *args: jnp.cos(fn(*args).astype(jnp.float32)).sum(), tuple(range(len(given))))
    as_f32 = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    ours = accelerate(fn)
    for transform in (loss, lambda fn: jax.jit(loss(fn)), lambda fn: loss(jax.checkpoint(fn))):
        jax.tree.map(close, as_f32(transform(ours)(*given)), as_f32(loss(fn)(*given)))
    tangents = [jnp.cos(a) for a in given]
    got, wanted_too = (as_f32(jax.jvp(f, list(given), tangents)) for f in (ours, fn))
    np.testing.assert_allclose(got[0], wanted_too[0], rtol=0.05, atol=0.05)
    np.testing.assert_allclose(got[1], wanted_too[1], rtol=0.05, atol=0.05 * np.abs(wanted_too[1]).max())
    for axes in ((0, None, None, None, None), (None, 0, 0, None, None), (0, 0, 0, 0, 0), (None, 0, None, None, 0)):
        axes = axes[: len(given)]
        many = [a if axis is None else jnp.stack([a, a[::-1], 2 * a]) for a, axis in zip(given, axes)]
        expected = jax.vmap(fn, axes)(*many)
        close(*map(as_f32, (jax.jit(jax.vmap(ours, axes))(*many), expected)))
        close(*map(as_f32, (jax.jit(accelerate(jax.vmap(fn, axes)))(*many), expected)))
    scanned = lambda fn: lambda x, *args: lax.scan(lambda c, _: (fn(c, *args)[..., :256], ()), x, length=3)[0]
    assert fused(scanned(fn), *given) == [wanted] * 3
    close(*map(as_f32, (accelerate(scanned(fn))(*given), scanned(fn)(*given))))
    assert fused(jax.jit(fn), *given) == [wanted]


def by_index(x, w, sizes, indices):
    return ragged_dot(x, w, sizes, lhs_indices=indices)


OF_ROWS_BY_INDEX = {
    "a gate": (lambda x, v, w, s, i: silu(by_index(x, v, s, i)) * by_index(x, w, s, i), [SILU]),
    "an activation": (lambda x, v, w, s, i: jnp.tanh(by_index(x, v, s, i)), ["tanh(A @ B)"]),
    "other indices": (lambda x, v, w, s, i: silu(by_index(x, v, s, i)) * by_index(x, w, s, i[::-1]), ["", ""]),
    "no indices": (lambda x, v, w, s, i: silu(by_index(x, v, s, i)) * ragged_dot(x, w, s), ["", ""]),
}


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("form", OF_ROWS_BY_INDEX)
def test_gates_of_rows_by_index(form):
    fn, wanted = OF_ROWS_BY_INDEX[form]
    operands = *ROUTED, jnp.arange(40) // 2
    # Programs without products of JAX's stay as they are.
    with_another = lambda x, v, w, s, i: (fn(x, v, w, s, i), x @ v[0])
    assert fused(with_another, *operands) == sorted(["", *wanted])
    got, want = (np.asarray(f(*operands)[0], np.float32) for f in (accelerate(with_another), with_another))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.usefixtures("as_on_h200")
def test_gates_of_rows_by_index_are_planned_by_their_number():
    """Few rows are multiplied by both matrices at once, many one after the other."""
    x, v, w = (jax.ShapeDtypeStruct(shape, NARROW) for shape in ((64, 4096), (8, 4096, 14336), (8, 4096, 14336)))
    fn = lambda x, v, w, s, *indices: ([silu(by_index(x, v, s, i)) * by_index(x, w, s, i) for i in indices], x @ x.T)
    for counts in ((512, 16384), (16384, 512)):
        assert fused(fn, x, v, w, jnp.full(8, 8), *map(jnp.zeros_like, map(jnp.arange, counts))).count(SILU) == 1


@pytest.mark.usefixtures("as_on_h200")
def test_what_the_backward_pass_needs_of_a_gate_is_kept():
    loss = jax.value_and_grad(lambda *args: GATES["silu"][0](*args).astype(jnp.float32).sum(), (0, 1, 2))
    assert not any("second" in text for text in fused(loss, *GATE_OPERANDS))


@pytest.mark.usefixtures("as_on_h200")
def test_gates_of_flax():
    from flax import linen as nn
    from flax import nnx

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = functools.partial(nn.Dense, dtype=NARROW)
            return dense(256)(nn.silu(dense(512)(x)) * dense(512)(x))

    x = GATE_OPERANDS[0].astype(jnp.float32)
    params = Linen().init(jax.random.key(0), x)
    params = jax.tree.map(lambda a: a.astype(NARROW), params)
    assert fused(Linen().apply, params, x) == ["A @ B + bias", BIASED]

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs, param_dtype=NARROW)
            self.gate, self.up, self.down = linear(256, 512), linear(256, 512), linear(512, 256)

        def __call__(self, x):
            return x + self.down(nnx.silu(self.gate(x)) * self.up(x))

    graph, state = nnx.split(Nnx(nnx.Rngs(0)))
    assert fused(lambda s, x: nnx.merge(graph, s)(x), state, GATE_OPERANDS[0]) == ["A @ B + residual", SILU]


@pytest.mark.usefixtures("as_on_h200")
@pytest.mark.parametrize("form", ["silu", "biases", "slices", "slices of a sum", "two stacked"])
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_shardings_of_gates_are_kept(kind, form):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    axis = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis,) * 2, devices=jax.devices()[:4])
    specs = P("data"), P(None, "model"), P(None, "model"), P("model"), P("model")
    if is_wide := form in WIDE:
        specs = P("data"), P(), P()
    on = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    args = [jax.device_put(a, sharding) for a, sharding in zip(WIDE_OPERANDS if is_wide else GATE_OPERANDS, on)]
    fn, wanted = (WIDE if is_wide else GATES)[form]
    if kind == "shard_map":
        fn = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("data", None, None if is_wide else "model"))
    with jax.set_mesh(mesh):
        assert fused(fn, *args) == [wanted]
        ours, theirs = (jax.jit(f).lower(*args).compile() for f in (accelerate(fn), fn))
        assert collectives(ours) == collectives(theirs)
        got, expected = ours(*args), theirs(*args)
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, expected)), rtol=0.05, atol=0.05)
