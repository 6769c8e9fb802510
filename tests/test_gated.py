"""``gated_linear``: both sums and what follows in float32, in every form of weights; and its transformations."""

import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_linear import DTYPES, SCHEDULES, TARGET, normal

from jax_streamk import H200, DataParallel, PerPass, SplitK, gated_linear, kernels, plan, tuning
from jax_streamk.plan.problem import arrange
from jax_streamk.product.epilogue import ACTIVATIONS, Epilogue
from jax_streamk.tuning import contest, measure

ON_GPU = jax.default_backend() == "gpu"
TOLERANCE = dict(rtol=5e-2, atol=5e-2) if ON_GPU else dict(rtol=2e-5, atol=2e-5)


def formula(x, w_gate, w_up=None, b_gate=None, b_up=None, *, activation="silu"):
    if w_up is None:
        w_gate, w_up = w_gate[:, 0], w_gate[:, 1]
        b_gate, b_up = (None, None) if b_gate is None else b_gate
    gate, up = (x @ w if b is None else x @ w + b for w, b in ((w_gate, b_gate), (w_up, b_up)))
    return ACTIVATIONS[activation](gate) * up


def operands(m=40, k=72, n=56, dtype="float32", biases=True, stacked=False):
    """x of shape (m, k) or, if m is a tuple, (*m, k); weights, biases."""
    x = normal((*(m if isinstance(m, tuple) else (m,)), k), dtype)
    weights = [normal((k, n), dtype, seed) / np.sqrt(max(k, 1)).astype(dtype) for seed in (1, 2)]
    both = [normal((n,), dtype, seed) for seed in (3, 4)] if biases else [None, None]
    if not stacked:
        return x, *weights, *both
    return x, np.stack(weights, 1), None, np.stack(both) if biases else None


def in_float64(given, **kwargs):
    with jax.enable_x64(True):
        return np.asarray(formula(*(None if x is None else jnp.asarray(x, jnp.float64) for x in given), **kwargs))


def assert_as_exact(got, given, **kwargs):
    """The error against float64 is at most twice that of XLA's formula in the result's dtype, plus a few roundings."""
    exact = in_float64(given, **kwargs)
    wanted = formula(*(None if x is None else jnp.asarray(x, got.dtype) for x in given), **kwargs)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    if not exact.size:
        return
    ours, xlas = (np.abs(np.asarray(x).astype(np.float64) - exact) for x in (got, wanted))
    f32 = 2.0**-9 if ON_GPU else 2.0**-20
    if exact.size < 64:  # too few for the mean of rounding errors
        size = np.abs(exact).max() + np.abs(np.asarray(wanted, np.float64)).max() + 1e-6
        assert ours.max() <= 4 * max(float(jnp.finfo(got.dtype).eps), 2.0**-9 if ON_GPU else 0) * size
        return
    floor = (1 + np.abs(exact).max()) * {"float64": 2.0**-48, "float32": f32}.get(str(got.dtype), 2.0**-20)
    assert np.sqrt(np.mean(ours**2)) <= 2 * np.sqrt(np.mean(xlas**2)) + floor
    assert ours.max() <= 4 * xlas.max() + 8 * floor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("stacked", [False, True])
def test_every_activation(activation, dtype, stacked):
    with jax.enable_x64(dtype == "float64"):
        for biases in (False, True):
            given = operands(dtype=dtype, biases=biases, stacked=stacked)
            assert_as_exact(gated_linear(*given, activation=activation), given, activation=activation)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 37, 1), (65, 37, 1), (5, 1, 70), (129, 515, 300), (64, 0, 8), (3, 8, 0), (0, 4, 6), (16, 200, 137)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_and_empty(shape, dtype, stacked):
    m, k, n = shape
    for biases in (False, True):
        given = operands(m, k, n, dtype, biases, stacked)
        assert_as_exact(gated_linear(*given), given)


@pytest.mark.parametrize("stacked", [False, True])
def test_leading_dimensions_and_vectors(stacked):
    for lead in [(), (4,), (2, 3), (2, 1, 3)]:
        given = operands(lead, stacked=stacked)
        assert_as_exact(gated_linear(*given), given)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_an_explicit_schedule_is_that_of_each_product(schedule):
    given = operands(72, 1024, 136, "bfloat16")
    try:
        got = gated_linear(*given, schedule=schedule)
    except ValueError:
        assert ON_GPU and getattr(schedule, "reduction", "") in ("separate", "atomic")
        return
    assert_as_exact(got, given)


def test_views_of_transposed_weights():
    x, *weights = operands(biases=False)[:3]
    f = lambda x, gate, up: gated_linear(x, gate.T, up.T)
    transposed = [np.ascontiguousarray(w.T) for w in weights]
    np.testing.assert_allclose(jax.jit(f)(x, *transposed), formula(x, *weights), **TOLERANCE)
    compiled = jax.jit(f).lower(x, *transposed).compile().as_text()
    assert compiled.count(f'"{TARGET}"') == 2 and not re.search(r" (transpose|copy)\(", compiled)


def as_text(f, *given):
    return jax.jit(f).lower(*given).as_text()


def test_stacked_weights_are_not_taken_apart():
    """A slice of the weights would be copied before every call."""
    given = operands(8, 256, 128, "bfloat16", stacked=True)
    for f in (lambda *xs: gated_linear(*xs), jax.grad(lambda *xs: gated_linear(*xs).sum(), (0, 1))):
        sliced = re.findall(r"stablehlo\.slice .*: \(tensor<([^>]*)>", as_text(f, *given))
        assert all(not source.startswith("256x") for source in sliced)


def test_one_bias():
    x, gate, up, b_gate, b_up = operands()
    for biases in ((b_gate, None), (None, b_up)):
        assert_as_exact(gated_linear(x, gate, up, *biases), (x, gate, up, *biases))


def test_mixed_dtypes_and_conversion():
    x, gate, up, *biases = operands(dtype="bfloat16")
    assert gated_linear(x, gate.astype(np.float32), up, *biases).dtype == jnp.float32
    got = gated_linear(x, gate, up, *biases, preferred_element_type=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, in_float64((x, gate, up, *biases)), rtol=2e-2, atol=2e-2)
    weak = jax.jit(lambda: jnp.broadcast_to(2.0, (2, 3)))()
    assert gated_linear(weak, weak.T, weak.T).weak_type
    assert not gated_linear(weak, weak.T, weak.T, preferred_element_type=np.float32).weak_type


def test_nan_and_inf():
    x, gate, up, b_gate, b_up = operands(9, 16, 12)
    x[2, 3], b_gate[5], b_up[7], b_gate[8] = np.nan, np.inf, -np.inf, np.nan
    for activation in ACTIVATIONS:
        got = gated_linear(x, gate, up, b_gate, b_up, activation=activation)
        wanted = formula(*map(jnp.asarray, (x, gate, up, b_gate, b_up)), activation=activation)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), activation)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted), activation)


def test_products_that_no_kernel_runs():
    given = operands()
    got = gated_linear(*given, preferred_element_type=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), in_float64(given), rtol=5e-2, atol=5e-2)
    assert TARGET not in as_text(lambda *xs: gated_linear(*xs, preferred_element_type=jnp.bfloat16), *given)


@pytest.mark.parametrize("stacked", [False, True])
def test_plan(stacked):
    x, *weights = operands(stacked=stacked, biases=False)
    made = plan(x, weights[0], gate=True, activation="silu", bias=True)
    assert made.kernel is not None and "silu(gate) * up" in str(made)
    assert made.problem.n == (112 if stacked else 56) and made.problem.has_bias
    assert as_text(gated_linear, x, *weights).count(f"@{TARGET}") == (1 if stacked else 2)
    made = plan(x, weights[0], gate=True, schedule=SplitK(2), device="cpu")
    assert made.schedule == SplitK(2)
    weak = jax.ShapeDtypeStruct(weights[0].shape, np.float32, weak_type=True)
    assert plan(x.astype(jnp.bfloat16), weak, gate=True).problem.type_d.name == "bf16"  # as gated_linear's result
    with pytest.raises(ValueError, match="splits=1000"):
        plan(x, weights[0], gate=True, schedule=SplitK(1000), device="cpu")


@pytest.mark.parametrize("stacked", [False, True])
def test_plan_of_one_kernel(stacked):
    """For few rows a Hopper GPU has kernels that multiply by both matrices at once."""
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w = shaped(4096, 2, 14336) if stacked else shaped(4096, 14336)
    made = plan(shaped(16, 4096), w, gate=True, activation="silu", bias=True, device=H200)
    problem = made.problem
    assert problem.gated and problem.n == 14336 and problem.ldd == 14336
    assert (problem.ldb, problem.up_offset) == ((2 * 14336, 14336) if stacked else (14336, 0))
    assert "D = silu(A @ B + bias) * (A @ second B + second bias)" in str(made)
    assert made.limit.amount > 2 * 4096 * 14336 * 2 and 0.5 < made.efficiency <= 1
    assert "gated" in made.kernel and "tile" in str(made.explain())
    # What no kernel of the kind can run, or what is slower in one, is planned as a product of the usual kind.
    for lhs, rhs, why in (
        (shaped(8192, 4096), w, "is slower"),
        (shaped(16, 4096), shaped(4096, 2, 14332) if stacked else shaped(4096, 14332), "must start at multiples of 8"),
        (jax.ShapeDtypeStruct((16, 4096), jnp.float32), w, "no kernel multiplies such operands"),
    ):
        made = plan(lhs, rhs, gate=True, activation="silu", device=H200)
        assert not made.problem.gated and why in made.reasons[-1], made


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "gate, order",
    [("pair", (0, 1)), ("pair", (1, 0)), ("stacked", (0, 1, 2)), ("stacked", (1, 0, 2)), ("stacked", (1, 2, 0))],
)
def test_xlas_product_of_the_same_operands(gate, order, biases):
    """What tuning compares a gated kernel with, for every layout of the weights: ``order`` is that of (k, 2, n)."""
    given = operands(5, 24, 16, biases=biases, stacked=gate == "stacked")
    weights = [np.ascontiguousarray(w.transpose(order)) for w in given[1:3] if w is not None]
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    numbers = ((1,), (order.index(0),)), ((), ())
    epilogue = Epilogue("silu", has_bias=biases, gate=gate)
    problem = arrange(place(given[0]), place(weights[0]), numbers, None, np.dtype(np.float32), "cpu", epilogue).problem
    operands_ = [given[0], *weights, *(x for x in given[3:] if x is not None)]
    spans = [size for role, (_, size) in measure.spans(problem).items() if role != "d"]
    assert spans == [x.size for x in operands_]
    got = contest.xlas(types.SimpleNamespace(problem=problem))(*(x.reshape(-1) for x in operands_))
    np.testing.assert_allclose(got.reshape(5, 16), formula(*given), **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
def test_one_kernel_and_its_tuning(stacked, column_major, tmp_path):
    """On a Hopper GPU one call multiplies by both matrices, whatever their layout, and tuning measures it."""
    if not _has_gated_kernels():
        pytest.skip("this build or GPU has no gated kernel")
    given = x, *weights, b_gate, b_up = (*operands(8, 1024, 4096, "bfloat16", stacked=stacked), None)[:5]
    turn = lambda w, axis, to: w if w is None or not column_major else jnp.moveaxis(w, axis, to)
    stored = [turn(w, 0, -1) for w in weights]

    def f(x, gate, up, *biases):
        return gated_linear(x, turn(gate, -1, 0), turn(up, -1, 0), *biases)

    text = as_text(f, x, *stored, b_gate, b_up)
    assert text.count(f"@{TARGET}") == 1 and "gated = true" in text
    assert_as_exact(jax.jit(f)(x, *stored, b_gate, b_up), given)
    with tuning(tmp_path) as plans:
        assert_as_exact(jax.jit(f)(x, *stored, b_gate, b_up), given)
    assert [made.problem.gated for made in plans] == [True]


def _has_gated_kernels():
    return any(kernel.gated for kernel in kernels()) and jax.devices()[0].compute_capability == "9.0"


# ---- transforms ----


@pytest.mark.parametrize(
    "axes",
    [axes for axes in itertools.product((None, 0, 1), (None, 0, 1), (None, 0), (None, 0, 1)) if set(axes) != {None}],
)
def test_vmap(axes):
    given = operands(7, 24, 10)
    axes = (*axes[:3], axes[3], axes[3])
    mapped = [x if axis is None else np.stack([x + i for i in range(3)], axis) for x, axis in zip(given, axes)]
    f, g = (jax.vmap(f, axes) for f in (gated_linear, formula))
    np.testing.assert_allclose(f(*mapped), g(*mapped), **TOLERANCE)
    nested = [np.stack([x, -x]) for x in mapped]
    np.testing.assert_allclose(jax.vmap(f)(*nested), jax.vmap(g)(*nested), **TOLERANCE)


@pytest.mark.parametrize(
    "axes", [axes for axes in itertools.product((None, 0, 1), (None, 0, 2), (None, 1)) if set(axes) != {None}]
)
def test_vmap_of_stacked(axes):
    x, w, _, b = operands(7, 24, 10, stacked=True)
    mapped = [y if axis is None else np.stack([y + i for i in range(3)], axis) for y, axis in zip((x, w, b), axes)]
    f, g = (jax.vmap(lambda x, w, b, f=f: f(x, w, None, b), axes) for f in (gated_linear, formula))
    np.testing.assert_allclose(f(*mapped), g(*mapped), **TOLERANCE)
    nested = [np.stack([y, -y]) for y in mapped]
    np.testing.assert_allclose(jax.vmap(f)(*nested), jax.vmap(g)(*nested), **TOLERANCE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("stacked", [False, True])
def test_gradients(activation, stacked):
    given = operands(9, 24, 10, stacked=stacked)
    of = tuple(i for i, x in enumerate(given) if x is not None)
    loss = lambda f: jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs, activation=activation))), of))
    for ours, wanted in zip(loss(gated_linear)(*given), loss(formula)(*given)):
        np.testing.assert_allclose(ours, wanted, **TOLERANCE)


def test_second_derivatives_and_forward_mode():
    given = operands(5, 8, 3)
    ours, wanted = (lambda *xs, f=f: jnp.sum(f(*xs, activation="tanh") ** 2) for f in (gated_linear, formula))
    tolerance = TOLERANCE if ON_GPU else dict(rtol=1e-4, atol=1e-4)
    for transform in (
        lambda f: jax.hessian(f, (0, 3)),
        lambda f: jax.jacfwd(f, (0, 1, 2, 3, 4)),
        lambda f: jax.grad(f, 2),
        lambda f: jax.grad(lambda *xs: jax.grad(jax.checkpoint(f), 1)(*xs).sum(), 2),
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, **tolerance),
            transform(ours)(*given),
            transform(wanted)(*given),
        )


def test_transposes_without_a_derivative():
    x, gate, up = map(jnp.asarray, operands(6, 30, 9, biases=False)[:3])
    cotangent = jnp.asarray(normal((6, 9)))
    for function in (lambda f, up: f(x, gate, up), lambda f, gate: f(x, gate, up, activation=None)):
        got, wanted = (
            jax.linear_transpose(functools.partial(function, f), up)(cotangent) for f in (gated_linear, formula)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), got, wanted)
    errors = []
    for f in (gated_linear, formula):
        with pytest.raises(Exception) as error:
            jax.linear_transpose(lambda x, f=f: f(x, gate, up), x)(cotangent)
        errors.append(error.type)
    assert errors[0] is errors[1]


def test_schedules_of_the_backward_pass():
    given = operands(256, 512, 128, biases=False)[:3]
    schedule = PerPass(forward=SplitK(4), lhs=DataParallel(), rhs=SplitK(2))
    f = lambda *xs: jnp.sum(gated_linear(*xs, schedule=schedule))
    text = as_text(jax.grad(f, (0, 1, 2)), *given)
    assert [len(re.findall(f"splits = {splits}", text)) for splits in (4, 2)] == [2, 2]
    assert text.count(f"@{TARGET}") == 6


def test_jet_and_scan():
    from jax.experimental.jet import jet

    x, gate, up = operands(4, 8, 8, biases=False)[:3]
    series = [np.ones_like(x), np.zeros_like(x)]
    got, wanted = (
        jet(lambda x, f=f: f(x, gate, up, activation="tanh"), (x,), (series,)) for f in (gated_linear, formula)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3 if not ON_GPU else 0.1), got, wanted
    )
    stacks = np.stack([gate] * 3), np.stack([up] * 3)
    got, wanted = (
        jax.jit(lambda x, f=f: jax.lax.scan(lambda x, w: (f(x, *w), None), x, stacks)[0])(x)
        for f in (gated_linear, formula)
    )
    np.testing.assert_allclose(got, wanted, **TOLERANCE)


# ---- sharding ----

MESH_AXES = {
    "rows": (("a",), (None, None), ("a",), 0),
    "n": ((), (None, "b"), (None, "b"), 0),
    "k": ((None, "b"), ("b", None), (), 1),
    "rows and n": (("a",), (None, "b"), ("a", "b"), 0),
    "rows and k": (("a", "b"), ("b", None), ("a",), 1),
    "k, n wanted": ((None, "b"), ("b", None), (None, "b"), 1),
}


def mesh(kind=AxisType.Auto):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", MESH_AXES)
def test_sharding(case, stacked):
    """The sums over devices precede the activation, and the results are those of one device."""
    of_x, of_w, of_result, summed = MESH_AXES[case]
    x, *others = given = operands(8, 64, 32, stacked=stacked)
    place = lambda x, spec: jax.device_put(x, NamedSharding(on, PartitionSpec(*spec)))
    on = mesh()
    spec = (of_w[0], None, of_w[1]) if stacked else of_w
    placed = [place(x, of_x), *(None if y is None else place(y, spec[y.ndim < others[0].ndim :]) for y in others)]
    f = jax.jit(gated_linear, out_shardings=NamedSharding(on, PartitionSpec(*of_result)))
    np.testing.assert_allclose(f(*placed), formula(*given), **TOLERANCE)
    text = f.lower(*placed).compile().as_text()
    collectives = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", text)
    assert not set(collectives) & {"all-gather", "all-to-all", "collective-permute"}
    assert bool(collectives) == bool(summed)


@pytest.mark.parametrize("stacked", [False, True])
def test_explicit_sharding(stacked):
    x, *others = operands(8, 64, 32, stacked=stacked)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        last = lambda y: jax.device_put(y, PartitionSpec(*[None] * (y.ndim - 1), "b"))
        placed = [jax.device_put(x, PartitionSpec("a")), *(y if y is None else last(y) for y in others)]
        got = jax.jit(gated_linear)(*placed)
        assert jax.typeof(got).sharding.spec == PartitionSpec("a", "b")
        np.testing.assert_allclose(got, formula(x, *others), **TOLERANCE)
        got = jax.jit(functools.partial(gated_linear, out_sharding=PartitionSpec("a", None)))(*placed)
        assert jax.typeof(got).sharding.spec == PartitionSpec("a", None)
        np.testing.assert_allclose(got, formula(x, *others), **TOLERANCE)


def test_shard_map():
    given = operands(8, 64, 32)
    spec = PartitionSpec
    f = jax.shard_map(
        gated_linear,
        mesh=mesh(),
        in_specs=(spec("a"), spec(None, "b"), spec(None, "b"), spec("b"), spec("b")),
        out_specs=spec("a", "b"),
    )
    np.testing.assert_allclose(jax.jit(f)(*given), formula(*given), **TOLERANCE)


# ---- bad input ----


X, W = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(x=X, w_gate=W, w_up=W[:7]), ValueError, r"x has shape \(4, 8\), w_gate \(8, 6\) and w_up \(7, 6\); they"),
        (dict(x=X, w_gate=W, w_up=W[:, :5]), ValueError, r"they must be \(..., k\), \(k, n\) and \(k, n\)"),
        (dict(x=X, w_gate=W[:7], w_up=W[:7]), ValueError, "they must be"),
        (dict(x=X, w_gate=W), ValueError, r"without w_up they must be \(..., k\) and \(k, 2, n\)"),
        (dict(x=X, w_gate=np.ones((8, 3, 6))), ValueError, r"\(k, 2, n\)"),
        (dict(x=np.float32(3), w_gate=W, w_up=W), ValueError, "they must be"),
        (dict(x=X, w_gate=W, w_up=W, b_gate=np.ones(5)), ValueError, r"b_gate has shape \(5,\); it must be \(6,\)"),
        (dict(x=X, w_gate=W, w_up=W, b_up=np.ones((4, 6))), ValueError, r"b_up has shape \(4, 6\)"),
        (dict(x=X, w_gate=np.ones((8, 2, 6)), b_gate=np.ones(6)), ValueError, r"it must be \(2, 6\)"),
        (dict(x=X, w_gate=np.ones((8, 2, 6)), b_up=np.ones(6)), ValueError, "b_up must be None without w_up"),
        (dict(x=X, w_gate=W, w_up=W, activation="swish"), ValueError, "gated_linear: activation='swish'"),
        (dict(x=X, w_gate=W, w_up=W, b_gate=np.ones(6, complex)), TypeError, "b_gate has dtype complex"),
        (dict(x=X.astype(int), w_gate=W.astype(int), w_up=W.astype(int)), TypeError, "the result's dtype is int32"),
        (dict(x=X, w_gate="w", w_up=W), TypeError, "w_gate is str"),
        (dict(x=X, w_gate=W, w_up=W, schedule=3), TypeError, "schedule=3"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        gated_linear(**arguments)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(gate=1), TypeError, "gate is int; it must be True or False"),
        (dict(gate=True, residual=True), ValueError, "gate=True is without"),
        (dict(gate=True, alpha=2.0), ValueError, "gate=True is without"),
        (dict(gate=True, rhs=np.ones((8, 3, 6), np.float32)), ValueError, r"\(k, 2, n\)"),
    ],
)
def test_bad_plans(arguments, error, message):
    with pytest.raises(error, match=message):
        plan(X, arguments.pop("rhs", W), **arguments)
