"""``plan(fn, *args)`` is the plan of the one product in a function, exactly as ``jit`` lowers it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_plan import emitted_attributes, shaped

import jax_streamk
from jax_streamk import (
    H200,
    SplitK,
    StreamK,
    dot_general,
    einsum,
    gated_linear,
    linear,
    matmul,
    plan,
    ragged_dot,
    ragged_dot_general,
    ragged_gated,
)
from jax_streamk.plan import custom_call
from jax_streamk.tuning import tune

WIDE, TALL, BATCH = shaped((48, 320)), shaped((320, 48)), shaped((3, 320, 48))
GROUPS, GROUPS_T, SIZES = shaped((4, 320, 64)), shaped((4, 64, 320)), shaped((4,), jnp.int32)
OF_K = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def last_two(x):
    return jnp.swapaxes(x, 1, 2)


@jax.custom_jvp
def with_its_own_derivative(x, y):
    return matmul(x, y)


with_its_own_derivative.defjvp(lambda primals, tangents: (matmul(*primals), matmul(tangents[0], primals[1])))

FUNCTIONS = {
    "as they come": (matmul, WIDE, TALL),
    "lhs": (lambda x: matmul(x.T, x), TALL),
    "rhs": (lambda x: matmul(x, x.T), WIDE),
    "both": (lambda x, y: matmul(x.T, y.T), TALL, WIDE),
    "twice": (lambda x: matmul(x.T.T, x.T), WIDE),
    "copied": (lambda x: matmul(jnp.array(x.T, copy=True), x), TALL),
    "the result": (lambda x, y: matmul(x, y).T, WIDE, TALL),
    "by a caller of jit": (lambda x: jax.jit(matmul)(x.T, x), TALL),
    "by a caller of custom_jvp": (lambda x: with_its_own_derivative(x.T, x), TALL),
    "before a branch": (lambda x: lax.cond(x[0, 0] > 0, matmul, lambda x, y: jnp.ones((48, 48)), x.T, x), TALL),
    "before a loop": (lambda x: lax.fori_loop(0, x.shape[0], lambda i, y: matmul(y, x), x.T[:, :48]), shaped((48, 48))),
    "in a scan": (
        lambda x, y: lax.scan(lambda c, x: (matmul(x.T, c), None), y, x)[0], shaped((2, 48, 48)), shaped((48, 48)),
    ),
    "in checkpoint": (jax.checkpoint(lambda x: matmul(x.T, x)), TALL),
    "of one platform": (
        lambda x: lax.platform_dependent(x, tpu=lambda x: matmul(x, x), default=lambda x: matmul(x.T, x)),
        shaped((48, 48)),
    ),
    "of a batch": (lambda x: matmul(last_two(x), x), BATCH),
    "in vmap": (jax.vmap(lambda x: matmul(x.T, x)), BATCH),
    "in vmap over the last axis": (jax.vmap(lambda x: matmul(x.T, x), 2, 1), shaped((320, 48, 3))),
    "in a gradient": (jax.grad(lambda w, x: matmul(x, w).sum()), TALL, WIDE),
    "dot_general": (lambda x, y: dot_general(x, y, (((0,), (0,)), ((), ()))), TALL, TALL),
    "dot_general of a batch": (
        lambda x, y: dot_general(x.transpose(2, 0, 1), y, (((2,), (1,)), ((1,), (0,)))), BATCH, BATCH,
    ),
    "einsum": (lambda x, y: einsum("bki,bkj->jbi", x, y), BATCH, BATCH),
    "linear": (lambda x, w, b: linear(x, w.T, b, activation="silu"), WIDE, WIDE, shaped((48,))),
    "gated": (gated_linear, WIDE, TALL, TALL),
    "gated, both": (lambda x, v, w: gated_linear(x, v.T, w.T), WIDE, WIDE, WIDE),
    "gated, one": (lambda x, v, w: gated_linear(x, v, w.T), WIDE, TALL, WIDE),
    "gated, stacked": (gated_linear, WIDE, shaped((320, 2, 64))),
    "groups": (ragged_dot, WIDE, GROUPS, SIZES),
    "groups, matrices": (lambda x, w, n: ragged_dot(x, last_two(w), n), WIDE, GROUPS_T, SIZES),
    "groups of gathered rows": (
        lambda x, w, n, at: ragged_dot(x, w, n, lhs_indices=at), WIDE, GROUPS, SIZES, shaped((100,), jnp.int32),
    ),
    "groups, linear": (
        lambda x, w, n, b: ragged_dot(x, w, n, bias=b, activation="relu"), WIDE, GROUPS, SIZES, shaped((4, 64)),
    ),
    "groups of k": (lambda x, y, n: ragged_dot_general(x, y, n, OF_K), TALL, TALL, SIZES),
    "groups, gated": (ragged_gated, WIDE, GROUPS, GROUPS, SIZES),
    "groups, gated, matrices": (
        lambda x, v, w, n: ragged_gated(x, last_two(v), last_two(w), n), WIDE, GROUPS_T, GROUPS_T, SIZES,
    ),
    "accelerate": (jax_streamk.accelerate(lambda x, w, b: jax.nn.relu(x.T @ w + b)), TALL, TALL, shaped((48,))),
    "a schedule": (lambda x: matmul(x.T, x, schedule=SplitK(3)), TALL),
    "a pytree": (lambda tree: matmul(tree["x"].T, tree["x"]), dict(x=TALL)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_plan_that_jit_lowers(name):
    fn, *args = FUNCTIONS[name]
    made = plan(fn, *args)
    as_text = {np.float64: "{:.6e}".format, np.bool_: lambda value: str(value).lower()}
    attributes = {x: as_text.get(type(value), str)(value) for x, value in custom_call.attributes(made).items()}
    assert attributes in emitted_attributes(fn, *args)
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), args)
    assert plan(fn, *arrays) == made, "arrays and shapes"
    assert plan(fn, *jax.tree.map(np.asarray, arrays)) == made, "NumPy's arrays are arguments of jit, too"


def test_an_array_transposed_before_is_one_in_rows():
    x = jnp.ones((320, 48))
    of_jit, of_call = plan(lambda x: matmul(x.T, x), x), plan(x.T, x)
    assert "_cr_" in of_jit.kernel and "_rr_" in of_call.kernel


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_device(name):
    """Kernels of other devices read through the same transposes."""
    fn, *args = FUNCTIONS[name]
    made, here = plan(fn, *args, device=H200), plan(fn, *args)
    assert made.device == H200 and made.kernel is not None
    is_nested = made.problem.inner_batch > 1
    assert is_nested or (made.problem.major_a, made.problem.major_b) == (here.problem.major_a, here.problem.major_b)


def test_a_plan_on_another_device_lowers_nothing_else_for_it():
    fn, x = jax.jit(lambda x: matmul(x.T, x)), jnp.ones((320, 48))
    before = fn.lower(x).as_text()
    assert plan(fn, x, device=H200).device == H200
    assert fn.lower(x).as_text() == before
    assert jnp.array_equal(fn(x), jnp.full((48, 48), 320.0))


def test_arguments_on_several_devices_are_planned_as_on_one():
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    x = jax.device_put(jnp.ones((320, 48)), jax.NamedSharding(mesh, jax.P("x")))
    fn = lambda x: matmul(x.T, x)
    assert plan(fn, x) == plan(fn, shaped((320, 48)))
    local = jax.shard_map(lambda x: lax.psum(fn(x), "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    assert plan(local, x).problem.k == 40, "each device's own part"


def test_plans_are_not_tuned(store):
    with tune.tuning() as tuned:
        plan(lambda x: matmul(x.T, x), shaped((320, 48)))
    assert not tuned


def test_a_product_that_xla_computes():
    made = plan(lambda x: matmul(x.T, x), shaped((320, 48), jnp.complex64))
    assert made.kernel is None and "complex64" in made.reasons[0]


def test_functions_of_no_product_and_of_several():
    def mlp(x, v, w):
        return matmul(linear(x, v, activation="relu"), w)

    x, v, w = shaped((48, 320)), shaped((320, 64)), shaped((64, 48))
    with pytest.raises(ValueError, match=r"mlp has 2 products.*\n.*relu.*: host|sm.*\n.*48, 64") as error:
        plan(mlp, x, v, w)
    assert "accelerate(fn).explain" in str(error.value)
    with pytest.raises(ValueError, match="has 2 products"):
        plan(lambda x: matmul(matmul(x, x), x), shaped((48, 48)))
    with pytest.raises(ValueError, match=r"has no product of jax_streamk.*accelerate\(fn\)"):
        plan(lambda x, y: x @ y, x, v)


@pytest.mark.parametrize(
    "option", [dict(schedule=StreamK()), dict(activation="relu"), dict(gate=True), dict(rhs=WIDE)], ids=str
)
def test_what_a_function_says_itself_is_refused(option):
    (name,) = option
    with pytest.raises(TypeError, match=rf"plan: {name}=.*with a function, which goes with device= only"):
        plan(lambda x: matmul(x.T, x), TALL, **option)


def test_errors_of_a_trace_name_the_users_function():
    def gram(samples):
        return matmul(samples.T, samples)

    with pytest.raises(TypeError, match=r"(?s)gram.*samples"):
        plan(gram, "text")
    with pytest.raises(ValueError, match="schedule=SplitK.* cannot run"):
        plan(lambda x: matmul(x, x, schedule=SplitK(3)), shaped((48, 48), jnp.complex64))
