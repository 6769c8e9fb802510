"""Chains that ``accelerate`` finds, in programs planned for an H200 where these pay, and run on any platform."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streamk as sk
from jax_streamk.accelerate import grouping
from jax_streamk.product.chain import chain_p

D, F = 2048, 2048


@pytest.fixture(autouse=True)
def as_on_h200(monkeypatch):
    monkeypatch.setattr(sys.modules["jax_streamk.accelerate.rewrite"], "device_of", lambda _: sk.H200)
    monkeypatch.setattr(grouping, "most_rows", lambda device: 128)


def array(seed, *shape, dtype="bfloat16", scale=1.0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) * scale, dtype)


def norm(x, gamma):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * gamma


def attention(q, k, v):
    scores = jnp.where(jnp.arange(k.shape[0]) < 7, (q.astype(jnp.float32) * k.sum(-1)), -jnp.inf)
    return (jax.nn.softmax(scores, -1) * v.sum()).astype(q.dtype)


def layer(x, w):
    q = norm(x, w["n1"]) @ w["q"]
    x = x + attention(q, w["k"], w["v"]) @ w["o"]
    h = norm(x, w["n2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def weights(seed=0):
    shapes = dict(q=(D, D), o=(D, D), gate=(D, F), up=(D, F), down=(F, D))
    drawn = {name: array(16 * seed + at, *s, scale=s[0] ** -0.5) for at, (name, s) in enumerate(shapes.items())}
    return drawn | dict(n1=1 + array(8, D) / 8, n2=1 + array(9, D) / 8, k=array(10, D, 4), v=array(11, 16))


def model(x, layers):
    for w in layers:
        x = layer(x, w)
    return x


def chains(f, *args):
    """The equations of chains, also in loops."""

    def found(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive is chain_p:
                yield eqn
            elif "jaxpr" in eqn.params:
                yield from found(eqn.params["jaxpr"])

    return [*found(jax.make_jaxpr(sk.accelerate(f))(*args))]


def products(f, *args):
    """The numbers of products that chains have."""
    rows = sk.accelerate(f).explain(*args).rows
    return sorted({int(row.chain.split()[4]) for row in rows if row.chain})


def check(f, *args, wanted=None):
    """Values of the program as written, up to the rounding of 16 bits."""
    got, written = jax.jit(sk.accelerate(f))(*args), jax.jit(f)(*args)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(written), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        theirs = np.asarray(theirs, np.float32)
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0.04, atol=0.04 * np.abs(theirs).max())


@pytest.mark.parametrize("rows", [(1,), (2, 3), (128,)], ids=str)
def test_a_decoders_layers(rows):
    """Between attentions: output projection, residual, norm, gate and up, down, residual, norm, the next queries."""
    args = array(1, *rows, D), [weights(i) for i in range(3)]
    found = chains(model, *args)
    assert [len(eqn.outvars) for eqn in found] == [2, 2, 1]  # the residual stream and the queries
    assert products(model, *args)[-1] == 4
    gammas = [x.aval.shape for eqn in found for x in eqn.invars if x.aval.size == D and x.aval.ndim == 1]
    assert len(gammas) == 5, "norms read their weights as they are"
    check(model, *args)


def test_in_a_scan_and_under_grad():
    layers = jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(1))

    def scanned(x, layers):
        return lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0]

    x = array(2, 4, D)
    assert len(chains(scanned, x, layers)) == 1
    check(scanned, x, layers)
    loss = lambda x, layers: jnp.sum(jnp.sin(scanned(x, layers).astype("float32")))
    ours, theirs = (jax.jit(jax.grad(f))(x, layers) for f in (sk.accelerate(loss), loss))
    error = np.linalg.norm(np.asarray(ours - theirs, "float32")) / np.linalg.norm(np.asarray(theirs, "float32"))
    assert error < 0.05


def test_what_is_no_chain():
    x, w = array(0, 4, D), array(1, D, D, scale=D**-0.5)
    assert chains(lambda x, w: jnp.tanh(x @ w), x, w) == []
    assert chains(lambda x, w: (x @ w, jnp.sin(x) @ w), x, w) == []
    assert chains(lambda x, w: jnp.sin(x @ w) @ w, x, w) == []
    assert chains(lambda x, w: jnp.tanh(x @ w) @ w, array(2, 129, D), w) == []
    assert len(chains(lambda x, w: jnp.tanh(x @ w) @ w, x, w)) == 1


def test_what_comes_between_products_of_a_chain():
    """What a chain cannot have is before it, after it, or ends it; results keep their order and their values."""
    x, y, w = array(0, 4, D), array(1, 4, D), array(2, D, D, scale=D**-0.5)

    def beside(x, y, w):
        a = x @ w
        b = jnp.sin(a)  # after
        c = jnp.cumsum(y, -1)  # before
        d = (a + c) @ w
        e = jnp.sort(b, -1)
        return e, d, d @ w, b

    assert products(beside, x, y, w) == [3] and len(chains(beside, x, y, w)) == 1
    check(beside, x, y, w)

    def in_turns(x, y, w):
        a = (x @ w) @ w
        b = jnp.sin(a)
        c = jnp.tanh(b @ w) @ w
        return a, c + a

    assert len(chains(in_turns, x, y, w)) == 2
    check(in_turns, x, y, w)


def test_columns_that_others_read_too():
    def f(x, w, v):
        y = x @ w
        left, right = y[:, :D], y[:, D:]
        return jnp.sort(right, -1), (jnp.tanh(left) * right) @ v, left

    args = array(0, 4, D), array(1, D, 2 * D, scale=D**-0.5), array(2, D, D, scale=D**-0.5)
    assert products(f, *args) == [2]
    check(f, *args)


def test_effects_keep_their_order(capfd):
    def f(x, w):
        y = x @ w
        jax.debug.print("first {}", y[0, 0], ordered=True)
        z = y @ w
        jax.debug.print("second {}", z[0, 0], ordered=True)
        return z @ w

    x, w = array(0, 4, D), array(1, D, D, scale=D**-0.5)
    jax.block_until_ready(jax.jit(sk.accelerate(f))(x, w))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.index("first") < out.index("second")


def test_explain_says_why_a_chain_ends():
    x, w = array(0, 4, D), array(1, D, D, scale=D**-0.5)
    said = str(sk.accelerate(lambda x, w: jnp.sin((x @ w) @ w) @ w).explain(x, w))
    assert "in a chain of 2 products, which ends there: sin is not one of a row's operations" in said
    assert products(lambda x, w: (x @ w) @ w, x, w) == [2]


def test_products_of_xla_end_chains():
    """One whose type no kernel has."""
    x, w = array(0, 4, D), array(1, D, D, scale=D**-0.5)

    def f(x, w):
        y = (x @ w) @ w
        return y, y.astype("complex64") @ w.astype("complex64")

    assert products(f, x, w) == [2]
    check(lambda x, w: jax.tree.map(jnp.real, f(x, w)), x, w)
