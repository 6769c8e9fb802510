"""Fragments of programs that ``accelerate`` traces inside ``tuning()``: what is measured, decided, stored and found."""

import concurrent.futures
import dataclasses
import functools
import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_streamk
from jax_streamk import Auto, StreamK, accelerate
from jax_streamk.accelerate import decisions
from jax_streamk.accelerate import fragments as program_fragments
from jax_streamk.accelerate.equations import Equations
from jax_streamk.device import HOPPER, device_of
from jax_streamk.tuning import measure, tune, tuned
from jax_streamk.tuning.tuned import FragmentTimes, Store

X, W, BIAS = jnp.ones((32, 48)), jnp.ones((48, 40)), jnp.ones(40)
SQUARE = jnp.ones((48, 48))


def layer(x, w, bias=BIAS):
    return jax.nn.relu(x @ w + bias)


def here():
    return device_of(None)


def targets(f, *operands):
    """How many products of the lowered program are ours."""
    return jax.jit(lambda *xs: f(*xs)).lower(*operands).as_text().count("custom_call @jax_streamk_")


@pytest.fixture
def clock(monkeypatch):
    """Microseconds by variant, in place of measured ones; it keeps the variants that it was asked about."""

    class Clock:
        def __init__(self):
            self.times, self.asked = dict(xla=30.0, apart=20.0, fused=10.0), []

        def __call__(self, variants, memory):
            self.asked.append(variants)
            # Outside of the trace that asks.
            assert not isinstance(jnp.zeros(3), jax.core.Tracer)
            return {name: [us] * 5 if np.isscalar(us) else us for name, us in self.times.items() if name in variants}

    clock = Clock()
    monkeypatch.setattr(tune, "fragment_rounds", clock)
    monkeypatch.setattr(tune, "tuned_if_asked", lambda plan: plan)  # lone products are not the matter here
    return clock


@pytest.mark.parametrize("winner", tuned.VARIANTS)
def test_the_fastest_decides(store, clock, winner):
    clock.times[winner] = 5.0
    f = accelerate(layer)
    wanted = layer(X, W)
    with jax_streamk.tuning():
        np.testing.assert_allclose(jax.jit(f)(X, W), wanted)
        assert targets(f, X, W) == (winner != "xla")
    (variants,) = clock.asked
    assert list(variants) == list(tuned.VARIANTS)
    (row,) = f.explain(X, W).rows
    assert row.is_ours == (winner != "xla") and bool(row.fused) == (winner == "fused")
    text = " ".join(str(f.explain(X, W)).split())
    shown = dict(fused=10.0, apart=20.0, xla=30.0) | {winner: 5.0}
    assert (
        f"measured with the equations around it: fused {shown['fused']} us, ours without fusion {shown['apart']} us, "
        f"XLA {shown['xla']} us"
    ) in text
    assert targets(f, X, W) == (winner != "xla") and len(clock.asked) == 1
    np.testing.assert_allclose(jax.jit(f)(X, W), wanted)
    # Each variant computes what the program does.
    for closed in variants.values():
        operands = [next(x for x in (X, W, BIAS) if x.shape == aval.shape) for aval in closed.in_avals]
        np.testing.assert_allclose(jax.extend.core.jaxpr_as_fun(closed)(*operands)[0], wanted)


def test_what_was_measured_decides_before_the_rules(monkeypatch):
    """On a GPU, a rule leaves to XLA what its GEMM fusion merges."""
    monkeypatch.setattr(decisions, "merged_by_xla", lambda eqn, program: "XLA merges it")
    closed = jax.make_jaxpr(jnp.matmul)(*[jnp.ones((256, 256), jnp.bfloat16)] * 2)
    (eqn,) = closed.eqns
    decide = functools.partial(decisions.decide, eqn, Equations(closed.eqns, closed.jaxpr.outvars), Auto())
    assert decide(None, HOPPER).why == "XLA merges it" and not decide(None, HOPPER).is_ours
    for winner in tuned.VARIANTS:
        times = FragmentTimes.now(winner, dict(xla=31.0, apart=34.0))
        found = decide(None, HOPPER, times)
        assert found.is_ours == (winner != "xla") and found.why.endswith(": ours without fusion 34.0 us, XLA 31.0 us")


@pytest.mark.parametrize("xla", [9.95, [1.0, 1.0, 1.0, 1.0, 11.0]])
def test_the_rules_choice_stays_unless_beaten_by_more_than_noise(store, clock, xla):
    clock.times["xla"] = xla
    with jax_streamk.tuning():
        assert targets(accelerate(layer), X, W) == 1
    (row,) = accelerate(layer).explain(X, W).rows
    assert row.fused and [x.winner for x in store.fragments(here()).values()] == ["fused"]


def test_a_gate_is_one_fragment(store, clock):
    def gated(x, w, v):
        return jax.nn.silu(x @ w) * (x @ v)

    for winner, ours in (("xla", 0), ("fused", 2)):
        clock.times = dict(xla=30.0, apart=20.0, fused=10.0) | {winner: 1.0}
        with jax_streamk.tuning(store.directory / winner), tuned.using(tuned.store_of(store.directory / winner)):
            rows = accelerate(gated).explain(X, W, W).rows
        assert sum(row.is_ours for row in rows for _ in range(row.count)) in (ours, min(ours, 1))
        assert all("measured with" in row.why for row in rows)
    assert len(clock.asked) == 2
    names = [eqn.primitive.name for eqn in clock.asked[0]["xla"].eqns]
    assert names.count("dot_general") == 2 and "mul" in names


def test_what_makes_an_operand_is_part_of_it(store, clock):
    def dequantized(x, w, scale):
        return x @ (w.astype(x.dtype) * scale)

    with jax_streamk.tuning():
        accelerate(dequantized).explain(X, W.astype(jnp.int8), BIAS)
    (variants,) = clock.asked
    assert sorted(str(x.dtype) for x in variants["xla"].in_avals) == ["float32", "float32", "int8"]
    assert list(variants) == ["xla", "apart"]  # there is nothing to fuse


def test_what_others_read_is_stored(store, clock):
    """The sum is a result of the fragment, or the kernel would seem to save storing it."""

    def two(x, w):
        y = x @ w + 1.0
        return jnp.cumsum(y), jnp.tanh(y) * y

    with jax_streamk.tuning():
        accelerate(two).explain(X, W)
    for variants in clock.asked:
        assert (32, 40) in [x.shape for x in variants["xla"].out_avals]


def test_another_process_decides_alike(store, clock):
    clock.times["xla"] = 1.0
    with jax_streamk.tuning():
        accelerate(gelu).explain(X, W)
    program = f"""
import sys
sys.path.insert(0, {str(store.directory.parent)!r})
import jax, jax.numpy as jnp, jax_streamk
from jax_streamk.tuning import tune
from jax_streamk.plan import left_to_xla
left_to_xla.too_small = lambda *_: None
def gelu(x, w):
    return jax.nn.gelu(jax.nn.silu(x @ w) + 1)
f = jax_streamk.accelerate(gelu)
xs = jnp.ones({X.shape}), jnp.ones({W.shape})
for folder in sys.argv[1:]:
    jax_streamk.use_tuned_plans(folder)
    (row,) = f.explain(*xs).rows
    text = jax.jit(lambda *xs: f(*xs)).lower(*xs).as_text()
    print(row.is_ours, "custom_call @jax_streamk" in text, row.why)
"""
    empty = store.directory.parent / "empty"
    empty.mkdir()
    process = [sys.executable, "-c", program, str(empty), str(store.directory)]
    done = subprocess.run(process, cwd=empty, capture_output=True, text=True, timeout=300)
    without, with_it = done.stdout.splitlines()
    assert without.strip() == "True True", done.stderr
    assert with_it.startswith("False False measured with the equations around it: "), done.stderr


def gelu(x, w):
    return jax.nn.gelu(jax.nn.silu(x @ w) + 1)


@pytest.mark.parametrize("change", ["device", "kernels", "jaxlib", "corrupt"])
def test_what_was_measured_elsewhere_is_ignored(store, clock, change):
    clock.times["xla"] = 1.0
    with jax_streamk.tuning():
        assert targets(accelerate(layer), X, W) == 0
    (line,) = store.path(here()).read_text().splitlines()
    record = json.loads(line)
    record |= dict(
        device=dict(device=dataclasses.asdict(dataclasses.replace(here(), sms=here().sms + 1))),
        kernels=dict(kernels="0" * 16),
        jaxlib=dict(jaxlib="0.0.1"),
        corrupt=dict(xla=0.0),
    )[change]
    store.path(here()).write_text(json.dumps(record) + "\n")
    read = Store(store.directory).read(here())
    assert (read.stale, read.corrupt, len(read.fragments)) == {
        "jaxlib": (0, 0, 1),
        "corrupt": (0, 1, 0),
    }.get(change, (1, 0, 0))
    with tuned.using(Store(store.directory)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert targets(accelerate(layer), X, W) == 1
        with jax_streamk.tuning():
            assert targets(accelerate(layer), X, W) == 0
    assert len(clock.asked) == 2


def test_digests_tell_what_fragments_decide(store):
    digests = [store.digest(here())]
    for winner in tuned.VARIANTS:
        times = FragmentTimes.now(winner, dict(xla=1.0, apart=2.0, fused=3.0))
        store.add_fragment(here(), "a fragment", times)
        assert Store(store.directory).read(here()).fragments == {"a fragment": times}
        digests.append(store.digest(here()))
    store.add_fragment(here(), "a fragment", dataclasses.replace(times, jaxlib="0.0.1"))
    assert store.digest(here()) == tuned._digest({}, {})
    assert len(set(digests)) == 4 and jaxlib.__version__ == times.jaxlib


def many():
    """Functions with a product in each kind of body, and their operands."""

    @jax.custom_vjp
    def custom(x):
        return layer(x, SQUARE, jnp.ones(48))

    custom.defvjp(lambda x: (layer(x, SQUARE, jnp.ones(48)), x), lambda x, g: (jnp.tanh(g @ SQUARE) * x,))
    one = lambda x: layer(x, SQUARE, SQUARE[0])
    step = lambda x, _: (one(x), None)
    return {
        "twelve layers": (lambda x: functools.reduce(lambda y, _: one(y), range(12), x), 1),
        "scan": (lambda x: jax.lax.scan(step, x, None, 3)[0], 1),
        "while": (lambda x: jax.lax.fori_loop(0, x.shape[0], lambda _, y: one(y), x), 1),
        "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, one, lambda x: jnp.tanh(x @ SQUARE), x), 2),
        "jit": (jax.jit(one), 1),
        "checkpoint": (jax.checkpoint(one), 1),
        "custom_vjp": (lambda x: custom(x) + jax.grad(lambda x: custom(x).sum())(x), 2),
        "vmap": (jax.vmap(lambda x: layer(x[None], SQUARE, jnp.ones(48))), 1),
    }


@pytest.mark.parametrize("name", many())
def test_fragments_in_bodies_are_measured_once(store, clock, name):
    f, fragments = many()[name]
    x = jnp.full((6, 48), 0.01)
    wanted = jax.jit(lambda x: f(x))(x)
    for winner in ("xla", "fused"):
        clock.times = dict(xla=30.0, apart=20.0, fused=10.0) | {winner: 1.0}
        folder = store.directory / winner
        clock.asked.clear()
        with tuned.using(Store(folder)):
            with jax_streamk.tuning():
                np.testing.assert_allclose(jax.jit(lambda x: accelerate(f)(x))(x), wanted, rtol=1e-5)
            assert len(clock.asked) == fragments
            assert (targets(accelerate(f), x) == 0) == (winner == "xla")
            assert len(clock.asked) == fragments


def test_transformations_of_what_was_measured(store, clock):
    f = lambda x, w: accelerate(layer)(x, w).sum()
    wanted = jax.grad(lambda x, w: layer(x, w).sum(), (0, 1))(X, W)
    for winner in tuned.VARIANTS:
        clock.times = dict(xla=30.0, apart=20.0, fused=10.0) | {winner: 1.0}
        with tuned.using(Store(store.directory / winner)), jax_streamk.tuning():
            got = jax.jit(jax.grad(f, (0, 1)), donate_argnums=0)(X.copy(), W)
            batched = jax.vmap(accelerate(layer), (0, None))(jnp.stack([X, X]), W)
        jax.tree.map(np.testing.assert_allclose, got, wanted)
        np.testing.assert_allclose(batched[1], layer(X, W))


def printing(x, w):
    y = x @ w
    jax.debug.print("{}", y[0, 0])
    return y


def on_two_devices(mapped):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("x", None)
    parts = jax.shard_map(layer, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    return accelerate(parts if mapped else layer), jax.device_put(X, NamedSharding(mesh, spec))


NOT_MEASURED = {
    "explicit schedule": lambda: (accelerate(layer, schedule=StreamK()), X),
    "where": lambda: (accelerate(layer, where=lambda problem: True), X),
    "nothing around it": lambda: (accelerate(lambda x, w: x @ w), X),
    "views around it": lambda: (accelerate(lambda x, w: (x @ w).reshape(-1, 8)), X),
    "an effect": lambda: (accelerate(printing), X),
    "an unused product": lambda: (
        accelerate(lambda x, w: (jnp.tanh(x @ w), x.sum() + jnp.zeros(X.shape[0] * 40))[1]),
        X,
    ),
    "no kernel": lambda: (accelerate(lambda x, w: jnp.tanh(x.astype(jnp.complex64) @ w)), X),
    "partitioned": lambda: on_two_devices(mapped=False),
    "shard_map": lambda: on_two_devices(mapped=True),
}


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_what_is_not_measured(store, clock, name):
    f, x = NOT_MEASURED[name]()
    with jax_streamk.tuning():
        got = jax.jit(lambda x, w: f(x, w))(x, W)
    assert not clock.asked and not store.fragments(here()) and got.size == X.shape[0] * W.shape[1]


@pytest.mark.parametrize("has_others", [False, True])
def test_outside_of_tuning_nothing_is_looked_for(store, clock, monkeypatch, has_others):
    if has_others:
        with jax_streamk.tuning():
            accelerate(layer).explain(X[:5], W)
        assert store.fragments(here())
    monkeypatch.setattr(program_fragments, "_fragments", None)
    assert targets(accelerate(layer), X, W) == 1


def test_constants_may_be_tracers(store, clock):
    def outer(x, w, b):
        @jax.custom_jvp
        def shifted(y):
            return jnp.tanh(y) + b.sum()

        shifted.defjvp(lambda primals, tangents: (shifted(*primals), tangents[0]))
        return accelerate(lambda x: shifted(x @ w) * 2)(x)

    wanted = outer(X, W, BIAS)
    with jax_streamk.tuning():
        np.testing.assert_allclose(jax.jit(outer)(X, W, BIAS), wanted)


def test_a_fragment_that_cannot_be_measured_is_tried_once(store, clock, monkeypatch):
    tried = []

    def fails(variants, memory):
        tried.append(variants)
        raise MemoryError("too large")

    monkeypatch.setattr(tune, "fragment_rounds", fails)
    with (
        jax_streamk.tuning(),
        pytest.warns(UserWarning, match="could not measure a fragment .*MemoryError: too large") as warned,
    ):
        for _ in range(3):
            assert targets(accelerate(layer), X, W) == 1
    assert len(tried) == len(warned) == 1 and not store.fragments(here())


def test_threads_do_not_wait_for_each_other(store, clock):
    def program(rows):
        with tuned.using(store), jax_streamk.tuning():
            return targets(accelerate(layer), X[:rows], W)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(program, (1, 2, 3, 4))) == [1] * 4
    assert len(store.fragments(here())) == 4


def test_measured_on_this_device(store, monkeypatch):
    """With a real clock, on random operands that rotate."""
    monkeypatch.setitem(measure.ROTATED_BYTES, here().platform, 1e5)
    bf16 = jnp.bfloat16

    def f(x, w, mask, scale):
        y = jnp.where(mask, x @ ((w + 1).astype(bf16) * scale), 0)
        return jax.nn.silu(y) + 1, y.sum()

    operands = jnp.ones((64, 256), bf16), jnp.ones((256, 96), jnp.int8), jnp.ones((64, 96), bool), jnp.ones(96, bf16)
    with jax_streamk.tuning() as plans:
        jax.jit(lambda *xs: accelerate(f)(*xs))(*operands)
    (times,) = store.fragments(here()).values()
    assert 0 < times.xla < 1e6 and 0 < times.apart < 1e6 and times.winner in tuned.VARIANTS
    assert plans and not any("could not" in str(x) for x in plans)
    assert Store(store.directory).read(here()).fragments == store.fragments(here())
