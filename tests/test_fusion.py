"""What ``accelerate`` fuses into products: every form of it, nothing that something else needs, and equal results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_accelerate import TARGET, assert_close, gradient, normal, products

from jax_streamk import SplitK, accelerate

P = jax.sharding.PartitionSpec


@pytest.fixture(autouse=True)
def products_are_tf32_on_gpus():
    """Also those of a vector, which XLA would compute in float32, and no kernel."""
    with jax.default_matmul_precision("TF32_TF32_F32" if jax.default_backend() == "gpu" else None):
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
    "scaled bias": (lambda x, w, b, r: (x @ w + b) / 8, "0.125 A @ B + bias"),
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
def test_activations_however_they_are_written(name, act, dtype):
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


def test_a_scalar_that_is_closed_over():
    scale = jnp.asarray(0.3)
    fn = lambda x, w: (x @ w) * scale
    text = jax.jit(accelerate(fn)).lower(X, W).as_text()
    assert "alpha = 3.0" in text.replace("alpha = 0.3", "alpha = 3.0") and "stablehlo.multiply" not in text
    assert_close(jax.jit(accelerate(fn))(X, W), fn(X, W))
    # Outside of a trace its next value would be another program.
    assert_close(accelerate(fn)(X, W), fn(X, W))


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
    "a rounded factor after a bias": (lambda x, w, b, r: (x @ w + b) * 0.3, "A @ B + bias"),
    "a select, whose NaN is another": (lambda x, w, b, r: jnp.where(x @ w > 0, x @ w, 0), ["", ""]),
    "another constant": (lambda x, w, b, r: (lambda y: y * jax.nn.sigmoid(1.702 * y))(x @ w), ""),
    "a custom JVP": (lambda x, w, b, r: with_rule(x @ w), ""),
    "a custom VJP": (lambda x, w, b, r: straight_through(x @ w), ""),
    "what XLA merges with a gate": (lambda x, w, b, r: jax.nn.silu(x @ w) * r, ""),
    "what XLA merges with a sum": (lambda x, w, b, r: jnp.tanh(x @ w).sum(-1), ""),
    "a residual that is not there yet": (lambda x, w, b, r: x @ w + jnp.sin(r), ""),
    "a sum that nothing stores": (lambda x, w, b, r: jnp.sin(x @ w + r), ""),
    "a factor of zero": (lambda x, w, b, r: (x @ w) * 0.0, ""),
    "integers": (lambda x, w, b, r: lax.dot_general(
        x.astype(jnp.int8), w.astype(jnp.int8), (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32
    ) + 1, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", KEPT)
def test_what_is_not_fused(what):
    fn, wanted = KEPT[what]
    assert fused(fn, X, W, B, R) == ([wanted] if isinstance(wanted, str) else wanted)
    assert_close(jax.jit(accelerate(fn))(X, W, B, R), fn(X, W, B, R))


def test_custom_derivatives_stay():
    for fn in (with_rule, straight_through):
        layer = lambda x, w, fn=fn: fn(x @ w)
        assert_close(gradient(accelerate(layer))(X, W), gradient(layer)(X, W))


def narrow(x, w, act=lambda y: y):
    return act(jnp.einsum("btk,kn->btn", x, w, preferred_element_type=jnp.float32)).astype(x.dtype)


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
    assert ours.mean() <= theirs.mean() and ours.max() <= theirs.max()


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


def test_derivatives_of_a_wide_activation():
    """The activation's derivative sees what it was given, in float32, though the result is bfloat16."""
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    fn = functools.partial(narrow, act=jax.nn.silu)
    assert fused(fn, x, w) == ["silu(A @ B)"]
    exact = gradient(lambda x, w: jax.nn.silu(jnp.einsum("btk,kn->btn", x, w)))(
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
