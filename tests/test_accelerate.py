"""``accelerate``: the products of unedited functions, wherever JAX keeps them, and everything else as it was."""

import functools
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys

import cloudpickle
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.compute_on import compute_on

from jax_streamk import PerPass, SplitK, StreamK, accelerate, linear
from jax_streamk.plan import problem
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.tuning import tuned

TARGET = "jax_streamk_cuda_gemm" if jax.default_backend() == "gpu" else "jax_streamk_host_gemm"
TOLERANCE = 1e-5 if jax.default_backend() == "cpu" else 1e-2  # on a GPU both multiply in TF32, each in its own order


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32)


def products(fn, *args):
    """(number of our products in the program, number of XLA's)."""
    text = jax.jit(fn).lower(*args).as_text()
    return text.count(f"custom_call @{TARGET}("), text.count("stablehlo.dot_general")


def assert_close(got, wanted):
    def close(got, wanted):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE * max(1, np.abs(wanted).max()))

    jax.tree.map(close, got, wanted)


def assert_accelerated(ours, theirs, *args):
    """``ours`` is ``theirs`` with every product replaced."""
    count, none = products(theirs, *args)[::-1]
    assert none == 0 and count > 0
    assert products(ours, *args) == (count, 0)
    # Operation by operation: XLA's CPU backend miscompiles one of the programs below as a whole (jaxlib 0.11 and
    # 0.12).
    assert_close(jax.jit(ours)(*args), theirs(*args))


# Functions of x (6, 16) and w (16, 16), each with its products inside one of JAX's primitives.


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


@with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return with_jvp(x, w), dx @ w + x @ dw


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_symbolic_jvp(act, x, w):
    return act(x @ w)


@functools.partial(with_symbolic_jvp.defjvp, symbolic_zeros=True)
def _(act, primals, tangents):
    x, w = primals
    zero = type(tangents[1]) is jax.custom_derivatives.SymbolicZero
    return act(x @ w), tangents[0] @ w if zero else tangents[0] @ w + x @ tangents[1]


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (jnp.tanh(x) @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, 2 * kept[0].T @ ct))


@jax.custom_vjp
def with_symbolic_vjp(x, w):
    return x @ w, x


def _symbolic_forward(x, w):
    assert x.perturbed
    return (x.value @ w.value, x.value), (x.value, w.value)


def _symbolic_backward(kept, cts):
    assert type(cts[1]) is jax.custom_derivatives.SymbolicZero
    return cts[0] @ kept[1].T, kept[0].T @ cts[0]


with_symbolic_vjp.defvjp(_symbolic_forward, _symbolic_backward, symbolic_zeros=True)


@custom_vmap
def with_vmap(x, w):
    return x @ w


@with_vmap.def_vmap
def _(axis_size, batched, x, w):
    x, w = (a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape)) for a, is_batched in zip((x, w), batched))
    return 3 * jnp.einsum("bmk,bkn->bmn", x, w), True


def in_scan(x, w):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), (c @ w).sum()), x, jnp.stack([w, w.T]))


def in_while(x, w):
    return lax.while_loop(lambda c: (c @ c.T).trace() < 100, lambda c: 1.5 * (c @ w) + 1, x)


def in_cond(x, w):
    return lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ w.T, x), lax.switch(
        1, [jnp.dot, lambda x, w: x @ w @ w], x, w
    )


def in_shard_map(x, w):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    P = jax.sharding.PartitionSpec
    product = lambda x, w: lax.psum(x @ w, "i")
    return jax.shard_map(product, mesh=mesh, in_specs=(P(None, "i"), P("i", None)), out_specs=P())(x, w)


def in_linear_solve(x, w):
    a = w @ w.T + 4 * jnp.eye(16)
    solve = lambda matvec, b: jnp.linalg.inv(a) @ b + 0 * matvec(b)
    return lax.custom_linear_solve(lambda v: a @ v, x.T, solve, symmetric=True)


def nested(x, w):
    @jax.checkpoint
    def layer(x, w):
        return lax.cond(x.sum() > -1e9, jax.jit(lambda x: with_vjp(with_jvp(x, w), w)), lambda x: x, x)

    return lax.scan(lambda c, w: (jnp.tanh(layer(c, w)), None), x, jnp.stack([w, w.T]))[0]


FUNCTIONS = {
    "plain": lambda x, w: jnp.einsum("mk,kn->nm", x, w),
    "jit": lambda x, w: jax.jit(jnp.matmul)(x, w),
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w)),
    "custom_jvp": with_jvp,
    "custom_jvp with symbolic zeros": lambda x, w: with_symbolic_jvp(jnp.abs, x, w),
    "custom_vjp": with_vjp,
    "custom_vjp with symbolic zeros": lambda x, w: with_symbolic_vjp(x, w)[0],
    "custom_vmap": with_vmap,
    "composite": lambda x, w: lax.composite(lambda x, w: x @ w, "some.product")(x, w),
    "shard_map": in_shard_map,
    "custom_linear_solve": in_linear_solve,
    "nested": nested,
}
TRANSFORMABLE = [name for name in FUNCTIONS if name != "composite"]  # it has neither derivatives nor batching


def gradient(fn):
    """The gradient for both arguments."""
    return jax.grad(lambda x, w: sum(jnp.cos(y).sum() for y in jax.tree.leaves(fn(x, w))), argnums=(0, 1))


def forward_derivative(fn):
    return lambda x, w: jax.jvp(fn, (x, w), (jnp.cos(x), jnp.sin(w)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_every_primitive(name):
    fn, x, w = FUNCTIONS[name], normal(6, 16), normal(16, 16)
    assert_accelerated(accelerate(fn), fn, x, w)
    assert_close(accelerate(fn)(x, w), fn(x, w))  # not compiled


@pytest.mark.parametrize("name", TRANSFORMABLE)
def test_derivatives_on_either_side(name):
    fn, x, w = FUNCTIONS[name], normal(6, 16), normal(16, 16)
    backward_alone, forward_alone = "custom_vjp" in name or name == "nested", name in ("while", "custom_vmap")
    for derivative in [gradient] * (not forward_alone) + [forward_derivative] * (not backward_alone):
        assert_accelerated(derivative(accelerate(fn)), derivative(fn), x, w)
        assert_accelerated(accelerate(derivative(fn)), derivative(fn), x, w)


@pytest.mark.parametrize("name", TRANSFORMABLE)
def test_vmap_on_either_side(name):
    fn, x, w = FUNCTIONS[name], normal(3, 6, 16), normal(16, 16)
    for axes in ((0, None), (0, 0)):
        args = (x, w if axes[1] is None else normal(3, 16, 16))
        batched = lambda fn: jax.vmap(fn, axes)
        assert_accelerated(batched(accelerate(fn)), batched(fn), *args)
        assert_accelerated(accelerate(batched(fn)), batched(fn), *args)


@pytest.fixture
def hi_primitives():
    """Lets JAX make calls, rules and scans of its "hi" primitives, as later versions will by default."""
    flags = {f"jax_{name}3" for name in ("remat", "custom_jvp", "custom_vjp", "scan")} & jax.config.values.keys()
    for flag in flags:
        jax.config.update(flag, True)
    yield
    for flag in flags:
        jax.config.update(flag, False)


def in_custom_root(x, w):
    a = w @ w.T + 4 * jnp.eye(16)
    solve = lambda f, x0: jnp.linalg.inv(a) @ x.T + 0 * f(x0)
    tangent_solve = lambda g, y: jnp.linalg.inv(a) @ y + 0 * g(y)
    return lax.custom_root(lambda v: a @ v - x.T, jnp.zeros((16, 6)), solve, tangent_solve)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "nested"])
def test_inside_hi_primitives(name, hi_primitives):
    fn, x, w = FUNCTIONS[name], normal(6, 16), normal(16, 16)
    assert_accelerated(accelerate(fn), fn, x, w)
    assert_close(accelerate(fn)(x, w), fn(x, w))  # not compiled
    count = sum(row.count for row in accelerate(fn).explain(x, w).rows)
    assert count == 4 if name == "scan" else count > 0
    if name in TRANSFORMABLE and name != "scan":  # JAX's new scan has no transposition yet
        derivative = forward_derivative if name in ("while", "custom_vmap") else gradient
        assert_accelerated(derivative(accelerate(fn)), derivative(fn), x, w)
        assert_accelerated(accelerate(derivative(fn)), derivative(fn), x, w)


def test_a_root_and_what_finds_it():
    args = normal(6, 16), normal(16, 16)
    assert_accelerated(accelerate(in_custom_root), in_custom_root, *args)
    assert_close(jax.jit(gradient(accelerate(in_custom_root)))(*args), gradient(in_custom_root)(*args))


def test_activations_made_of_hi_primitives_are_fused(hi_primitives):
    x, w = normal(6, 16), normal(16, 16)
    fn = lambda x, w: jax.nn.relu(jax.nn.silu(x @ w) @ w)
    assert {row.fused for row in accelerate(fn).explain(x, w).rows} == {"silu(A @ B)", "relu(A @ B)"}
    for derivative in (lambda fn: fn, gradient, forward_derivative, lambda fn: jax.vmap(fn, (0, None))):
        args = (x, w) if derivative in (gradient, forward_derivative) else (normal(3, 6, 16), w)
        assert_close(jax.jit(derivative(accelerate(fn)))(*args), derivative(fn)(*args))


def test_transformations_of_transformations():
    def fn(x, w):
        return jnp.tanh(with_jvp(x, w)) @ w

    args = jnp.stack([normal(6, 16), normal(6, 16).T.reshape(6, 16)]), normal(16, 16)
    for transform in (
        lambda fn: jax.vmap(gradient(fn), (0, None)),
        lambda fn: gradient(jax.vmap(fn, (0, None))),
        lambda fn: jax.vmap(jax.jacrev(jax.jacfwd(lambda x, w: fn(x, w).sum())), (0, None)),
        lambda fn: lambda x, w: jax.linearize(fn, x[0], w)[1](x[1], w),
        lambda fn: gradient(jax.checkpoint(lambda x, w: fn(x[0], w))),
    ):
        assert_accelerated(transform(accelerate(fn)), transform(fn), *args)


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"])
def test_checkpoint_policies_see_products(policy):
    fn = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), policy=getattr(jax.checkpoint_policies, policy))
    args = normal(6, 16), normal(16, 16)
    with_value = lambda fn: jax.value_and_grad(lambda x, w: fn(x, w).sum(), argnums=(0, 1))
    assert products(with_value(fn), *args)[1] == (8 if policy == "nothing_saveable" else 6)
    assert_accelerated(with_value(accelerate(fn)), with_value(fn), *args)


def in_pallas(x, w):
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), interpret=True)(x, w)


def on_host(x, w):
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:
        return compute_on(jnp.matmul, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(x, w)
    with compute_on("device_host"):  # up to JAX 0.10
        return x @ w


@pytest.mark.parametrize(
    "fn, dtype",
    [
        (jnp.matmul, np.int32),
        (jnp.matmul, np.uint8),
        (jnp.matmul, np.complex64),
        (functools.partial(jnp.matmul, precision="BF16_BF16_F32"), np.float32),
        (functools.partial(jnp.matmul, preferred_element_type=np.float32), jnp.float8_e5m2fnuz),
        (lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME"), np.float32),
        (in_pallas, np.float32),
        (on_host, np.float32),
    ],
)
def test_what_no_kernel_serves_is_untouched(fn, dtype):
    args = jnp.asarray(10 * normal(6, 16), dtype), jnp.asarray(10 * normal(16, 16), dtype)
    asked = []
    accelerated = accelerate(fn, where=asked.append)
    unaccelerated = functools.wraps(accelerated)(lambda *args: fn(*args))  # of the same name
    assert jax.jit(accelerated).lower(*args).as_text() == jax.jit(unaccelerated).lower(*args).as_text()
    assert not asked


def test_float8_operands_of_two_kinds_are_multiplied():
    args = jnp.ones((6, 16), jnp.float8_e4m3fn), jnp.ones((16, 16), jnp.float8_e5m2)
    fn = lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert products(accelerate(fn), *args)[0] == 1


def test_empty_products_are_untouched():
    assert products(accelerate(jnp.matmul), jnp.ones((4, 0)), jnp.ones((0, 4)))[0] == 0


def test_where_chooses():
    x, w, narrow = normal(6, 16), normal(16, 16), normal(16, 5)
    fn = lambda x, w, narrow: lax.scan(lambda c, _: (c @ w, c @ narrow), x, None, length=3)
    seen = []

    def where(problem):
        seen.append(problem)
        return problem.n == 5

    assert products(accelerate(fn, where=where), x, w, narrow) == (1, 1)
    assert {type(p) for p in seen} == {problem.GemmProblem} and {(p.m, p.n, p.k) for p in seen} == {
        (6, 16, 16),
        (6, 5, 16),
    }
    assert products(accelerate(fn, where=lambda problem: False), x, w, narrow) == (0, 2)
    # An outer accelerate may take what an inner one leaves.
    assert products(accelerate(accelerate(fn, where=where), schedule=StreamK()), x, w, narrow) == (2, 0)


def splits(fn, *args):
    return sorted(map(int, re.findall(r"[^_]splits = (\d+)", jax.jit(fn).lower(*args).as_text())))


def test_schedule_where_a_kernel_can_run_it():
    fn = lambda x, w, thin: ((x @ w) @ thin, thin @ thin.T)
    args = normal(64, 1024), normal(1024, 8), normal(8, 1)  # with K = 8 or 1, no kernel has three k-tiles
    accelerated = accelerate(fn, schedule=SplitK(3))
    assert splits(accelerated, *args) == [3] and products(accelerated, *args) == (1, 2)
    assert_close(accelerated(*args), fn(*args))
    per_pass = accelerate(jnp.matmul, schedule=PerPass(forward=SplitK(3), lhs=SplitK(2)))
    assert splits(jax.value_and_grad(lambda x, w: per_pass(x, w).sum()), normal(128, 512), normal(512, 512)) == [2, 3]


def test_arguments_and_results_of_every_kind():
    class Layer:
        def __init__(self, w):
            self.w = w

        @accelerate
        def __call__(self, x, *, act, times, mask):
            for _ in range(times):
                x = act(x @ self.w["kernel"])
            return {"x": x[mask], "times": times, "act": act, "nothing": None, "w": self.w}

    x, w, mask = normal(6, 16), normal(16, 16), np.arange(6) % 2 == 0
    layer = Layer({"kernel": w, "name": "dense"})
    out = layer(x, act=jnp.tanh, times=2, mask=mask)
    assert_close(out["x"], jnp.tanh(jnp.tanh(x @ w) @ w)[mask])
    assert out["act"] is jnp.tanh and type(out["times"]) is int and out["nothing"] is None
    assert out["w"]["kernel"] is w and out["w"]["name"] == "dense"
    jitted = jax.jit(lambda x: layer(x, act=jnp.tanh, times=2, mask=mask)["x"])
    assert products(jitted, x) == (2, 0)
    # jit finds the parameters of fn by name.
    power = jax.jit(accelerate(lambda x, times: functools.reduce(jnp.matmul, [x] * times)), static_argnames="times")
    assert products(functools.partial(power, times=3), w) == (2, 0)


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit, jax.grad, jax.checkpoint])
def test_arguments_that_fn_changes_are_its_own(around):
    def fn(batch):
        batch["h"] = batch["x"] @ batch.pop("w")
        batch["layers"].append(batch["h"])
        batch["counts"] += 1
        return (batch["layers"].pop() @ batch["layers"][0]).sum() + batch["counts"].sum()

    def given():
        return {"x": normal(6, 16), "w": normal(16, 16), "layers": [normal(16, 3)], "counts": np.zeros(2, np.float32)}

    batch, untouched = given(), given()
    wanted = around(fn)(given())
    for _ in range(2):
        assert_close(around(accelerate(fn))(batch), wanted)
        assert_close(batch, untouched)
    assert_close(jax.jit(lambda batch: (accelerate(fn)(batch), batch))(batch)[1], untouched)


def test_arrays_among_arguments_are_traced():
    class Static:
        pass

    static, seen = Static(), {}

    def fn(x, ref, **others):
        seen.update(x=x, **others)
        return x @ x.T + ref[...]

    ref = jax.new_ref(jnp.ones((6, 6)))
    out = accelerate(fn)(normal(6, 16), ref, static=static, number=3, flag=True, name="x", rows=np.arange(3))
    assert isinstance(seen.pop("x"), jax.core.Tracer) and type(seen.pop("rows")) is np.ndarray
    assert seen == dict(static=static, number=3, flag=True, name="x") and seen["flag"] is True
    assert_close(out, normal(6, 16) @ normal(6, 16).T + 1)


class Box:
    def __init__(self, content):
        self.content = content


@pytest.mark.parametrize(
    "fn, kind",
    [
        (lambda x: Box(x @ x.T), "Box"),
        (lambda x: (x, {"box": Box([{1: x @ x.T}])}), "Box"),
        (lambda x: lambda y=x @ x.T: y, "function"),
        (lambda x: Box(x @ x.T).__init__, "method"),
        (lambda x: functools.partial(jnp.add, Box(x @ x.T)), "partial"),
        (lambda x: {1: {Box(x @ x.T)}}, "set"),
    ],
)
def test_results_that_hide_arrays_are_refused(fn, kind):
    remedy = ".*register_dataclass.*Partial"
    with pytest.raises(TypeError, match=f"a result of type {kind} holds arrays and is not a pytree{remedy}"):
        accelerate(fn)(normal(6, 16))


def test_results_may_hold_arrays_from_elsewhere():
    def fn(x):
        box = Box(2 * x)
        kept, product = accelerate(lambda x: (box, x @ x.T))(x)
        assert kept is box
        return product + kept.content.sum()

    x = normal(6, 16)
    assert_close(jax.jit(fn)(x), x @ x.T + 2 * x.sum())
    assert_close(accelerate(lambda x: jax.tree_util.Partial(jnp.matmul, x @ x.T))(x)(x), x @ x.T @ x)


def test_as_a_decorator():
    @accelerate(schedule=SplitK(3), where=lambda problem: problem.n == 16)
    def fn(x, w, thin):
        """Of x."""
        return x @ w, x @ thin

    args = normal(6, 512), normal(512, 16), normal(512, 8)
    assert splits(fn, *args) == [3] and products(fn, *args) == (1, 1)
    assert (fn.__name__, fn.__doc__) == ("fn", "Of x.")
    with pytest.raises(TypeError, match="schedule='split'"):
        accelerate(schedule="split")


def test_pickling():
    w = normal(16, 16)
    accelerated = accelerate(lambda x: jnp.tanh(x @ w), schedule=StreamK(), where=lambda problem: problem.k > 1)
    accelerated(normal(6, 16))
    again = pickle.loads(cloudpickle.dumps(accelerated))
    assert products(again, normal(6, 16)) == (1, 0)
    assert_close(again(normal(6, 16)), jnp.tanh(normal(6, 16) @ w))


def test_effects_and_references():
    x, w = normal(6, 16), normal(16, 16)
    heard = []

    def fn(ref, x):
        jax.debug.callback(lambda y: heard.append(np.asarray(y)), x @ w)
        ref[...] += x @ w
        return ref[...]

    ref = jax.new_ref(jnp.ones((6, 16)))
    assert_close(accelerate(fn)(ref, x), 1 + x @ w)
    assert_close(jax.jit(accelerate(fn))(ref, x), 1 + 2 * x @ w)
    jax.effects_barrier()
    assert_close(heard, [x @ w] * 2)


def test_names_are_kept():
    @jax.jit
    def attention(x, w):
        with jax.named_scope("scores"):
            return x @ w

    def model(x, w):
        with jax.named_scope("outside"):
            return accelerate(attention)(x, w)

    text = jax.jit(model).lower(normal(6, 16), normal(16, 16)).compile().as_text()
    (call,) = (line for line in text.splitlines() if f'custom_call_target="{TARGET}"' in line)
    assert re.search(r'op_name="jit\(model\)/outside/jit\(attention\)/scores/', call), call
    assert accelerate(attention).__name__ == "attention"


def copies(fn, *args):
    return len(re.findall(r"= \S+ (?:transpose|copy)\(", jax.jit(fn).lower(*args).compile().as_text()))


@pytest.mark.parametrize(
    "fn, shape_x, shape_w",
    [
        (gradient(lambda x, w: jnp.tanh(x @ w)), (6, 16), (16, 12)),
        (lambda x, w: jnp.tanh((x @ w).T), (6, 16), (16, 12)),
        (jax.jit(lambda x, w: jnp.einsum("etd,edf->tef", x, w)), (3, 6, 16), (3, 16, 12)),
        (jnp.matmul, (6, 16), (3, 16, 12)),
    ],
)
def test_a_transpose_that_follows_costs_no_copy(fn, shape_x, shape_w):
    args = normal(*shape_x), normal(*shape_w)
    assert_accelerated(accelerate(fn), fn, *args)
    assert copies(accelerate(fn), *args) == 0


def test_a_transpose_that_a_schedule_cannot_take():
    """On a GPU atomic kernels store aligned rows only, and those of the transposed result are not."""
    x, w = normal(129, 512), normal(512, 128) / 32  # small enough that tanh is not flat
    fn, schedule = lambda x, w: jnp.tanh((x @ w).T), SplitK(4, "atomic")
    assert products(accelerate(fn, schedule=schedule), x, w) == products(
        accelerate(jnp.matmul, schedule=schedule), x, w
    )
    assert_close(accelerate(fn, schedule=schedule)(x, w), fn(x, w))


def test_a_product_and_its_transpose():
    def fn(x, w):
        product = x @ w
        return product, product.T, jnp.sin(product).T, (w @ x).T.T

    x, w = normal(6, 16), normal(16, 6)
    assert_accelerated(accelerate(fn), fn, x, w)


def test_called_again_nothing_compiles_and_what_is_closed_over_may_change():
    w = [normal(16, 16)]
    inner = jax.jit(lambda x, w: jax.nn.relu(x @ w))

    def body(c, w):
        return jnp.tanh(with_jvp(c, w)), None

    # A new function at every call, as where a model accelerates its layers.
    accelerated = lambda x: accelerate(lambda x: lax.scan(body, inner(x, w[0]), w[0][None])[0])(x)
    with compilations() as compiled:
        x = normal(6, 16)
        first = accelerated(x)
        assert compiled
        w[0] = jax.block_until_ready(2 * w[0])  # compiles a product with 2
        compiled.clear()
        second = accelerated(x)
        assert not compiled
    assert_close(first, jnp.tanh(jax.nn.relu(x @ w[0] / 2) @ w[0] / 2))
    assert_close(second, jnp.tanh(jax.nn.relu(x @ w[0]) @ w[0]))


def traced(*calls, **options):
    """How often each of some calls, of arguments each, traces an accelerated function; results are checked."""
    counts = []

    def fn(x, *others, **kwargs):
        counts[-1] += 1
        return others, x @ x.T, kwargs

    accelerated = accelerate(fn, **options)
    for args in calls:
        counts.append(0)
        others, product, kwargs = accelerated(*args, key=3)
        assert_close(product, args[0] @ args[0].T)
        assert list(map(repr, others)) == list(map(repr, args[1:])) and kwargs == {"key": 3}
    return counts


def test_outside_of_traces_calls_are_compiled_once():
    x, wide = normal(6, 16), normal(6, 32)
    assert traced((x,), (2 * x,), (x,), (x,)) == [1, 1, 0, 0]
    assert traced((x,), (wide,), (x,), (wide,), (x,), (wide,)) == [1, 1, 1, 0, 0, 0]
    assert traced((x, jax.nn.relu, "same"), (x, jax.nn.gelu, "same"), (x, jax.nn.relu, "same")) == [1, 1, 1]
    assert traced(*[(x, jax.nn.relu, jnp.tanh, len, np.float32, traced, None)] * 3) == [1, 1, 0]
    # Equal, and not the same; the same, and not equal.
    assert traced(*[(x, value) for value in (0, 0.0, -0.0, False, np.float32(0), 0j)] * 2) == [1] * 12
    assert traced(*[(x, float("nan"))] * 3) == [1, 1, 0]
    # Of NumPy's arrays, and of objects that may change without a trace, each call must look again.
    assert traced(*[(x, np.zeros(3))] * 4) == [1] * 4
    assert traced(*[(x, Box("content"))] * 4) == [1] * 4
    assert traced(*[(x, [Box])] * 3, where=lambda problem: True) == [1, 1, 0]
    with compilations() as compiled:
        accelerated = accelerate(lambda x: jnp.tanh(x @ x.T) @ x)
        for _ in range(2):
            accelerated(x)
        compiled.clear()
        accelerated(2 * x)
        assert len(compiled) <= 1  # of 2 * x


def test_what_compiled_calls_return_is_their_own():
    constant, ref = np.zeros(3), jax.new_ref(jnp.ones((6, 6)))

    @accelerate
    def fn(x, ref):
        ref[...] += x @ x.T
        return {"constant": constant, "x": x, "ref": ref, "sum": x.sum() + 1, "number": 3, "again": ref}

    x = normal(6, 16)
    for calls in range(1, 5):
        out = fn(calls * x, ref)
        assert out["ref"] is ref and out["again"] is ref and out["number"] == 3
        np.testing.assert_array_equal(out["constant"], np.zeros(3))
        out["constant"] += 1  # or the next call would return what this one changed
        assert_close(out["x"], calls * x)
    assert_close(ref[...], 1 + 30 * x @ x.T)


def test_a_module_that_is_called_is_an_argument():
    import equinox as eqx

    layer = eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0))
    weight = layer.weight
    layers = {"module": flax.nnx.Linear(16, 16, use_bias=False, rngs=flax.nnx.Rngs(0)), "equinox": layer}
    bound = accelerate(layers["module"].__call__)
    for scale in (1, 2, 3):  # values that a compiled program must not keep
        layers["module"].kernel[...] = scale * weight.T
        assert_close(bound(weight), scale * weight @ weight.T)
    assert_close(jax.vmap(accelerate(layer))(weight), weight @ weight.T)
    partial = accelerate(jax.tree_util.Partial(jnp.matmul, weight))
    for _ in range(3):
        assert_close(partial(weight), weight @ weight)


@pytest.mark.parametrize("around", [accelerate, lambda fn: accelerate(fn).explain, lambda fn: jax.jit(accelerate(fn))])
def test_messages_name_the_function_and_its_arguments(around):
    def my_loss(params, x, *, scale):
        return 1.0 if (params["w"] @ x * scale).sum() > 0 else 0.0

    for _ in range(2):
        with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
            around(my_loss)({"w": normal(6, 16)}, normal(16, 4), scale=jnp.ones(()))
        line = my_loss.__code__.co_firstlineno
        assert f"the function my_loss at {__file__}:{line}" in str(raised.value)
        assert "arguments params['w'], x, and scale" in str(raised.value)


def test_messages_name_rules():
    @jax.custom_vjp
    def fn(x):
        return x @ x.T

    def my_rule(kept, ct):
        return (ct @ kept if (ct @ kept).sum() > 0 else kept,)

    fn.defvjp(lambda x: (fn(x), x), my_rule)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="the function my_rule at "):
        jax.jit(jax.grad(lambda x: accelerate(fn)(x).sum()))(normal(6, 16))


def test_results_of_hi_types():
    """A value of such a type is a tracer and no array; up to JAX 0.11 jit itself does not return the one below."""
    with flax.nnx.var_defaults(hijax=True):
        model = flax.nnx.Linear(16, 16, rngs=flax.nnx.Rngs(0))
        fn = lambda model, x: flax.nnx.Param(model(x))
        try:
            wanted = jax.jit(fn)(model, normal(6, 16))[...]
        except (AssertionError, TypeError):
            return
        for around in (accelerate(fn), jax.jit(accelerate(fn))):
            for _ in range(3):
                assert_close(around(model, normal(6, 16))[...], wanted)


def test_what_was_rewritten_is_rewritten_again_for_other_tuned_plans(monkeypatch):
    inner = jax.jit(jnp.matmul)
    args = normal(6, 16), normal(16, 16)
    fn = lambda x, w: inner(x, w)
    assert products(accelerate(fn), *args) == (1, 0)
    times = dict(microseconds=1.0, planned_microseconds=1.0, xla_ratio=0.5)
    left = tuned.Tuned("", "", 0, "", LaunchPolicy(), **times, jaxlib=jax.lib.__version__, date="")
    monkeypatch.setattr(tuned, "lookup", lambda problem, device: left)
    monkeypatch.setattr(tuned, "digest", lambda device: 1)
    assert products(accelerate(fn), *args) == (0, 1)


def test_rewritten_programs_are_not_kept():
    w = normal(16, 16)

    class Large:
        alive = 0

        def __init__(self):
            Large.alive += 1

        def __del__(self):
            Large.alive -= 1

    def once():
        large = Large()

        @jax.jit
        def inner(x):
            assert large
            return x @ w

        accelerate(inner)(normal(6, 16))

    for _ in range(3):
        once()
    jax.clear_caches()
    gc.collect()
    assert Large.alive == 0


def test_compiled_program_is_that_of_linear():
    x, w = normal(6, 16), normal(16, 16)

    def program(fn):
        text = jax.jit(fn).lower(x, w).compile().as_text()
        return re.sub(r"metadata=\{.*?\}", "", re.search(r"^ENTRY.*", text, flags=re.S | re.M)[0])

    ours, by_hand = accelerate(lambda x, w: jnp.tanh(x @ w)), lambda x, w: linear(x, w, activation="tanh")
    assert TARGET in program(ours) and program(ours) == program(by_hand)


def test_no_tracer_outlives_its_trace():
    with jax.checking_leaks():
        np.testing.assert_array_equal(
            accelerate(lambda x: (x @ x.T, 3))(np.ones((2, 4), np.float32))[0], np.full((2, 2), 4.0)
        )


def test_debug_nans_sees_inside():
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        accelerate(lambda x: jnp.log(x @ x - 1e6))(normal(16, 16))


@pytest.mark.parametrize("kwargs", [dict(fn=3), dict(fn=jnp.dot, where="all"), dict(fn=jnp.dot, schedule="stream_k")])
def test_bad_arguments(kwargs):
    with pytest.raises(TypeError, match="3|'all'|schedule='stream_k'"):
        accelerate(**kwargs)


SHARDINGS = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_streamk import accelerate

assert jax.device_count() == 4, jax.devices()
rng = np.random.default_rng(0)
x, up, down = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((8, 64), (64, 128), (128, 64)))
wanted = np.maximum(x @ up, 0) @ down

def collectives(compiled):
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return sorted(re.findall(rf"= \\S+ ({names})(?:-start)?\\(", compiled.as_text()))

def compare(ours, theirs, *args, **kwargs):
    ours, theirs = (jax.jit(fn, **kwargs).lower(*args).compile() for fn in (ours, theirs))
    assert "jax_streamk_host_gemm" in ours.as_text() and " dot(" not in ours.as_text()
    assert collectives(ours) == collectives(theirs), (collectives(ours), collectives(theirs))
    got, wanted = ours(*args), theirs(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    return got

auto = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
def on(mesh, *spec): return NamedSharding(mesh, P(*spec))

def constrained(x, up, down):
    hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up), on(auto, "data", "model"))
    return hidden @ down

def loss(fn): return jax.grad(lambda *args: jnp.cos(fn(*args)).sum(), argnums=(1, 2))

shardings = on(auto, "data", None), on(auto, None, "model"), on(auto, "model", None)
placed = dict(in_shardings=shardings, out_shardings=on(auto, "data", None))
out = compare(accelerate(constrained), constrained, x, up, down, **placed)
np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)
placed = dict(in_shardings=shardings, out_shardings=shardings[1:])
compare(loss(accelerate(constrained)), loss(constrained), x, up, down, **placed)
placed = jax.device_put((x, up, down), shardings)
accelerated = accelerate(constrained)
for _ in range(3):  # from the second call on compiled
    assert accelerated(*placed).sharding.is_equivalent_to(constrained(*placed).sharding, 2)

specs = dict(mesh=auto, in_specs=(P("data", None), P(None, "model"), P("model", None)), out_specs=P("data", None))
for check in (True, False):
    def mlp(x, up, down): return jax.lax.psum(jax.nn.relu(x @ up) @ down, "model")
    mapped = jax.shard_map(mlp, check_vma=check, **specs)
    inside = jax.shard_map(accelerate(mlp), check_vma=check, **specs)
    for ours in (accelerate(mapped), inside):
        np.testing.assert_allclose(compare(ours, mapped, x, up, down), wanted, rtol=1e-4, atol=1e-4)
        compare(loss(ours), loss(mapped), x, up, down)
    compare(accelerate(loss(mapped)), loss(mapped), x, up, down)

explicit = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(explicit):
    specs = P("data", None), P(None, "model"), P("model", None)
    placed = [jax.device_put(a, spec) for a, spec in zip((x, up, down), specs)]
    def typed(x, up, down):
        hidden = jax.nn.relu(x @ up)
        assert jax.typeof(hidden).sharding.spec == P("data", "model")
        return jnp.einsum("mk,kn->mn", hidden, down, out_sharding=P("data", None))
    compare(accelerate(typed), typed, *placed)
    compare(loss(accelerate(typed)), loss(typed), *placed)
    compare(accelerate(loss(typed)), loss(typed), *placed)
"""


def test_shardings_are_kept():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SHARDINGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd="/")
    assert done.returncode == 0, done.stderr


def test_equinox():
    import equinox as eqx

    class Model(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        cell: eqx.nn.GRUCell
        mlp: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[0])
            self.cell = eqx.nn.GRUCell(16, 16, key=keys[1])
            self.mlp = eqx.nn.MLP(16, 4, 32, 2, activation=jax.nn.gelu, key=keys[2])

        def __call__(self, x):
            h, _ = lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(16), self.attention(x, x, x))
            return self.mlp(h)

    model, x = Model(jax.random.key(0)), normal(3, 7, 16)

    def loss(model, x):  # the model, with functions among its leaves, is an argument
        return (jax.vmap(model)(x) ** 2).sum()

    params, static = eqx.partition(model, eqx.is_inexact_array)
    of_params = lambda loss: lambda params, x: loss(eqx.combine(params, static), x)
    for derivative in (lambda loss: loss, eqx.filter_value_and_grad):
        assert_accelerated(of_params(derivative(accelerate(loss))), of_params(derivative(loss)), params, x)
        assert_accelerated(of_params(accelerate(derivative(loss))), of_params(derivative(loss)), params, x)
    assert_close(jax.vmap(accelerate(model))(x), jax.vmap(model)(x))
    assert_close(eqx.filter_jit(accelerate(loss))(model, x), loss(model, x))


def noinline(x, w):
    """Equinox keeps a copy of the jaxpr of such a closure, and compares the two."""
    import equinox as eqx
    import equinox.internal as eqxi

    inner = eqx.filter_closure_convert(lambda v: jnp.tanh(v @ w), x)
    outer = eqx.filter_closure_convert(lambda g, v: g(v) @ w, inner, x)
    return eqxi.noinline(outer)(inner, x) @ w


def checkpointed_loop(x, w):
    import equinox.internal as eqxi

    loop = functools.partial(eqxi.while_loop, kind="checkpointed", checkpoints=2, max_steps=3)
    return loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))[0] @ w


@pytest.mark.parametrize("fn", [noinline, checkpointed_loop])
@pytest.mark.parametrize("where", [None, lambda problem: False])
def test_primitives_of_other_libraries(fn, where):
    if fn is noinline and jax.default_backend() == "gpu":
        pytest.skip("Equinox's callback compiles a GPU program while the GPU waits for it: JAX alone hangs, too")
    args = normal(6, 16), normal(16, 16)
    batched = lambda fn: jax.vmap(fn, (0, None))
    for transform, x in ((lambda fn: fn, args[0]), (gradient, args[0]), (batched, normal(2, 6, 16))):
        wanted = transform(fn)(x, args[1])
        assert_close(accelerate(transform(fn), where=where)(x, args[1]), wanted)
        assert_close(jax.jit(transform(accelerate(fn, where=where)))(x, args[1]), wanted)
    if where is None:
        assert products(accelerate(fn), *args)[0] >= 1


def test_haiku():
    import haiku as hk

    @hk.transform
    def model(x):
        x = hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling())(x, x, x)
        x, _ = hk.dynamic_unroll(hk.LSTM(16), x.swapaxes(0, 1), hk.LSTM(16).initial_state(3))
        return hk.nets.MLP([32, 4])(x[-1])

    x, key = normal(3, 7, 16), jax.random.key(0)
    params = model.init(key, x)
    assert_close(accelerate(model.init)(key, x), params)
    ours, theirs = (
        lambda params, x, apply=apply: apply(params, key, x) for apply in (accelerate(model.apply), model.apply)
    )
    assert_accelerated(ours, theirs, params, x)
    loss = lambda apply: jax.value_and_grad(lambda params, x: (apply(params, x) ** 2).sum())
    assert_accelerated(loss(ours), loss(theirs), params, x)
    assert_accelerated(accelerate(loss(theirs)), loss(theirs), params, x)


def test_flax_linen():
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            return nn.Dense(16)(nn.gelu(nn.DenseGeneral((2, 16))(x).reshape(*x.shape[:-1], 32))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return nn.RNN(nn.LSTMCell(16))(blocks()(x, None)[0])

    model, x = Model(), normal(4, 7, 16)
    params = model.init(jax.random.key(0), x)
    assert_accelerated(accelerate(model.apply), model.apply, params, x)
    loss = lambda apply: jax.value_and_grad(lambda params, x: (apply(params, x) ** 2).sum())
    assert_accelerated(loss(accelerate(model.apply)), loss(model.apply), params, x)
    assert_accelerated(accelerate(loss(model.apply)), loss(model.apply), params, x)


def test_flax_nnx():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 16, rngs=rngs, decode=False)
            self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.LinearGeneral(32, (2, 2), rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(self.attention(x))))

    model, x = Model(nnx.Rngs(0)), normal(3, 7, 16)

    def loss(model, x):
        return (model(x) ** 2).sum()

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    of_params = lambda loss: lambda params, x: loss(nnx.merge(graph, params, rest), x)
    for derivative in (lambda loss: loss, jax.value_and_grad):
        assert_accelerated(derivative(of_params(accelerate(loss))), derivative(of_params(loss)), params, x)
        assert_accelerated(accelerate(derivative(of_params(loss))), derivative(of_params(loss)), params, x)
    assert_close(nnx.jit(nnx.grad(accelerate(loss)))(model, x), nnx.grad(loss)(model, x))
    assert_close(nnx.jit(accelerate(loss))(model, x), loss(model, x))


class Stateful(flax.nnx.Module):
    def __init__(self):
        rngs = flax.nnx.Rngs(0)
        self.linear, self.norm = flax.nnx.Linear(16, 16, rngs=rngs), flax.nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.rnn = flax.nnx.Dropout(0.5, rngs=rngs), flax.nnx.RNN(flax.nnx.LSTMCell(16, 16, rngs=rngs))
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        self.last = flax.nnx.Cache(x)
        return self.rnn(self.dropout(self.norm(self.linear(x))))


def test_a_pure_function_of_an_nnx_state():
    graph, state = flax.nnx.split(Stateful())

    def fn(state, x):
        model = flax.nnx.merge(graph, state)
        return model(x), flax.nnx.state(model, flax.nnx.BatchStat)

    x = normal(3, 7, 16)
    assert_accelerated(accelerate(fn), fn, state, x)


def test_changes_to_modules_are_not_lost():
    x = normal(3, 7, 16)
    model, twin = Stateful(), Stateful()
    returned = accelerate(lambda model, x: (model(x), model))(model, x)[1]
    twin(x)
    statistics = lambda model: jax.tree.leaves(flax.nnx.state(model, flax.nnx.BatchStat))
    assert_close(statistics(returned), statistics(twin))
    for fn, args in ((Stateful.__call__, (model, x)), (lambda models, x: models["a"](x), ({"a": model}, x))):
        with pytest.raises(ValueError, match="fn changes Stateful.*jax_streamk.flax.nnx.accelerate"):
            accelerate(fn)(*args)
    with pytest.raises(ValueError, match="fn changes Stateful.*jax_streamk.flax.nnx.accelerate"):
        accelerate(model)(x)  # the function is the module
    with pytest.raises(Exception) as raised:  # the function closes over it
        accelerate(lambda x: model(x))(x)
    assert "jax_streamk.flax.nnx.accelerate" in "".join(raised.value.__notes__)
