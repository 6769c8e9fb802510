"""Chains: values against float64 and the program as written, what makes them, and what breaks them."""

import functools
import random

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streamk as sk
from jax_streamk import DataParallel, SplitK, StreamK
from jax_streamk.device import device_of
from jax_streamk.lower.chain import chain_of
from jax_streamk.product import rows

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "host"
DTYPES = ["bfloat16", "float16", "float32"]


@pytest.fixture(autouse=True)
def full_precision():
    """Of float32 as far as our kernels have it."""
    with jax.default_matmul_precision("high" if PLATFORM == "cuda" else "highest"):
        yield


def array(seed, *shape, dtype="bfloat16", scale=1.0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) * scale, dtype)


def calls(f, *args):
    """(chains, our products, XLA's products) of a program."""
    text = jax.jit(f).lower(*args).as_text()
    names = f"@jax_streamk_{PLATFORM}_chain(", f"@jax_streamk_{PLATFORM}_gemm(", "stablehlo.dot_general"
    return tuple(map(text.count, names))


def steps(f, *args):
    """What a chain is lowered to."""
    (eqn,) = jax.make_jaxpr(sk.chain(f))(*args).eqns
    return chain_of(eqn.params["jaxpr"], eqn.params["schedule"], device_of(None))


def exact(f, *args):
    """The results in float64; f's first argument is the dtype in which it computes norms."""
    with jax.enable_x64(True):
        args = [x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
        return jax.jit(functools.partial(f, "float64"))(*args)


def check(f, *args, schedule=None, most=2.0):
    """One call, and errors at most ``most`` times as large as those of the program as written."""
    f32 = functools.partial(f, "float32")
    chained = sk.chain(f32, schedule=schedule)
    assert calls(chained, *args) == (1, 0, 0)
    got, written, wanted = jax.jit(chained)(*args), jax.jit(f32)(*args), exact(f, *args)
    for ours, theirs, value in zip(*map(jax.tree.leaves, (got, written, wanted)), strict=True):
        assert (ours.dtype, ours.shape, ours.weak_type) == (theirs.dtype, theirs.shape, theirs.weak_type)
        largest = np.abs(value).max()
        errors = [np.abs(np.asarray(x, np.float64) - value).max() for x in (ours, theirs)]
        assert errors[0] <= most * max(errors[1], float(jnp.finfo(ours.dtype).eps) * largest / 8), errors


def assert_close(got, wanted, what="", exact=None):
    """Arrays of float32 that were rounded here and there; XLA's products of such on a GPU are of TF32.

    Where ``exact`` values are known, errors may also be twice those of ``wanted``.
    """
    part = 4e-3 if PLATFORM == "cuda" else 1e-4
    values = jax.tree.leaves(wanted if exact is None else exact)
    for ours, theirs, value in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), values, strict=True):
        atol = part * np.abs(theirs).max() + 3 * np.abs(theirs - np.asarray(value)).max()
        np.testing.assert_allclose(ours, theirs, rtol=10 * part, atol=atol, err_msg=what)


def rms_norm(wide, x, gamma):
    w = x.astype(wide)
    return (w * lax.rsqrt(jnp.mean(w * w, -1, keepdims=True) + 1e-5)).astype(x.dtype) * gamma


def layer_norm(wide, x, gamma, beta):
    w = x.astype(wide)
    mean = w.mean(-1, keepdims=True)
    variance = ((w - mean) ** 2).mean(-1, keepdims=True)
    return ((w - mean) / jnp.sqrt(variance + 1e-6)).astype(x.dtype) * gamma + beta


def decoder(wide, x, mixed, o, gamma, gate, up, down, gamma_2, q):
    """What follows a layer's attention, up to the next layer's."""
    x = x + mixed @ o
    normed = rms_norm(wide, x, gamma)
    x = x + (jax.nn.silu(normed @ gate) * (normed @ up)) @ down
    return x, rms_norm(wide, x, gamma_2) @ q


def encoder(wide, x, o, gamma, beta, w1, b1, w2, b2):
    """With a norm after the residual, as BERT's."""
    x = layer_norm(wide, x @ o + x, gamma, beta)
    return layer_norm(wide, jax.nn.gelu(x @ w1 + b1) @ w2 + b2 + x, gamma, beta)


def of_decoder(*lead, d=72, f=104, q=56, dtype="bfloat16"):
    make = functools.partial(array, dtype=dtype)
    weights = [make(i, k, n, scale=k**-0.5) for i, (k, n) in enumerate([(d, d), (d, f), (d, f), (f, d), (d, q)])]
    x, mixed, gamma, gamma_2 = make(5, *lead, d), make(6, *lead, d), 1 + make(7, d) / 8, 1 + make(8, d) / 8
    return x, mixed, weights[0], gamma, *weights[1:4], gamma_2, weights[4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(1,), (1, 1), (7,), (3, 5), (130,)], ids=str)
def test_a_decoders_layer(dtype, lead):
    if PLATFORM == "cuda" and dtype == "float32" and np.prod(lead) == 1:
        pytest.skip("XLA computes products of one row in float32, and no GPU kernel does")
    check(decoder, *of_decoder(*lead, dtype=dtype))


@pytest.mark.parametrize("d, f", [(2, 2), (3, 8), (64, 64), (129, 257), (1000, 40)])
def test_rows_of_any_length(d, f):
    check(decoder, *of_decoder(5, d=d, f=f))


@pytest.mark.parametrize("rows", [1 if PLATFORM == "host" else 8, 64, 512])
def test_as_many_rows_as_columns_and_more(rows):
    check(decoder, *of_decoder(rows, d=64, dtype="float32"))


@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(3), SplitK(2, "separate"), StreamK()], ids=str)
def test_schedules(schedule):
    check(decoder, *of_decoder(4, d=256, f=512, dtype="float32"), schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoders_layer(dtype):
    make = functools.partial(array, dtype=dtype)
    x, (o, w1, w2) = make(0, 2, 6, 96), (make(k, k, n, scale=0.1) for k, n in ((96, 96), (96, 160), (160, 96)))
    check(encoder, x, o, 1 + make(4, 96) / 8, make(5, 96), w1, make(6, 160), w2, make(7, 96))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_chains_of_many_products(count):
    def f(wide, x, w, gamma):
        for _ in range(count):
            x = rms_norm(wide, x @ w, gamma)
        return x @ w

    check(f, array(0, 3, 80), array(1, 80, 80), array(2, 80))


BETWEEN = {
    "softmax": lambda wide, y, r, v: jax.nn.softmax(y.astype(wide), -1).astype(y.dtype),
    "log of a sum": lambda wide, y, r, v: y - jnp.log(jnp.exp(y - y.max(-1, keepdims=True)).sum(-1, keepdims=True)),
    "row scaled by another array": lambda wide, y, r, v: y * r[:, :1] + r[:, 1:2],
    "vector of each row": lambda wide, y, r, v: y * v - v / 2,
    "columns of rows": lambda wide, y, r, v: y * jnp.broadcast_to(v, y.shape) + r,
    "halves and thirds": lambda wide, y, r, v: 0.5 * y / 3.0 + 2.0,
    "norm of heads": lambda wide, y, r, v: rms_norm(wide, y.reshape(*y.shape[:-1], 4, -1), v[:16]).reshape(y.shape),
    "two programs": lambda wide, y, r, v: rms_norm(wide, rms_norm(wide, y.reshape(-1, 16), v[:16]).reshape(y.shape), v),
    "clipped": lambda wide, y, r, v: jnp.minimum(jnp.maximum(y, -0.5), 0.5),
    "largest": lambda wide, y, r, v: y / jnp.abs(y).max(-1, keepdims=True),
    "powers": lambda wide, y, r, v: sum(lax.integer_pow(1 + abs(y), power) for power in (3, -1, -2)),
    "tanh and erf": lambda wide, y, r, v: jnp.tanh(y) + lax.erf(y) - lax.logistic(-y),
    "a view": lambda wide, y, r, v: y.reshape(1, *y.shape).squeeze(0),
    "gemma's norm": lambda wide, y, r, v: rms_norm(wide, y, 1 + v),
    "a jitted function": lambda wide, y, r, v: jax.jit(functools.partial(rms_norm, wide))(y, v),
    "converted": lambda wide, y, r, v: (y.astype(wide) + r.astype(wide)).astype(y.dtype),
    "nothing": lambda wide, y, r, v: y,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_lies_between(between, dtype):
    def f(wide, x, w, r, v, w2):
        return BETWEEN[between](wide, x @ w, r, v) @ w2

    make = functools.partial(array, dtype=dtype)
    check(f, make(0, 6, 40), make(1, 40, 64, scale=0.2), make(2, 6, 64), make(3, 64), make(4, 64, 24), most=3)


SQUARE = {  # as many rows as columns, so that shapes alone do not tell them apart
    "a dimension more": lambda y, r, v: (y @ v, jnp.tanh(y)[..., None].sum(-1)),
    "rows that become columns": lambda y, r, v: (y @ v, y.sum(-1)[None, :] * y),
    "a vector of columns and of rows": lambda y, r, v: (y @ v, y * r[0][None, :] + r[0][:, None]),
    "a number of rows in another shape": lambda y, r, v: ((y := jnp.tanh(y)) @ v, y.sum(-1), y.sum(-1)[None, :] * 2.0),
    "rows cut and joined": lambda y, r, v: (jnp.tanh(y).reshape(32, 128).reshape(64, 64) * 2.0) @ v,
    "negative zero": lambda y, r, v: (jnp.maximum(y, 0.0) @ v, 1.0 / ((y * y + 1.0) * -0.0)),
    "broadcast in the middle": lambda y, r, v: (y @ v, y[:, :, None] + r[0][None, :, None]),
}


@pytest.mark.parametrize("case", SQUARE)
def test_as_many_rows_as_columns(case):
    """One chain with the values of the program as written, or an error; never other values."""
    f = lambda x, w, r, v: SQUARE[case](x @ w, r, v)
    args = [array(at, 64, 64, dtype="float32", scale=0.2) for at in range(4)]
    try:
        got = jax.jit(sk.chain(f))(*args)
    except ValueError as why:
        assert "it breaks at" in str(why)
    else:
        assert_close(got, jax.jit(f)(*args))


def test_a_thousand_steps():
    f = lambda x, w: functools.reduce(lambda y, i: y @ w + i % 3, range(1003), x)
    x, w = array(0, 8, 8, dtype="float32"), array(1, 8, 8, dtype="float32", scale=0.2)
    assert_close(jax.jit(sk.chain(f))(x, w), f(x, w))


def test_random_programs_of_rows():
    """Any operations, in any order, on what a product makes: as XLA computes them, one by one."""
    unary = [jnp.abs, jnp.negative, jnp.tanh, lax.logistic, lambda y: y * y, lambda y: lax.rsqrt(1 + y * y)]
    unary += [lambda y: jnp.exp(-jnp.abs(y)), lambda y: jnp.log(1 + jnp.abs(y)), lambda y: jnp.sqrt(jnp.abs(y))]
    binary = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lambda a, b: a / (1 + jnp.abs(b))]
    seed = random.randrange(1 << 30)

    def f(draw, x, w, r, v, w2):
        values = [x @ w, r, v]
        for _ in range(draw.randint(1, 14)):
            made = draw.choice(values[:1] + values[3:])
            what = draw.randrange(4)
            if what == 0:
                values.append(draw.choice(unary)(made))
            elif what == 1:
                values.append(made / (1 + jnp.abs(made).sum(-1, keepdims=True)) * 3)
            elif what == 2:
                values.append(made - made.max(-1, keepdims=True))
            else:
                values.append(draw.choice(binary)(made, draw.choice(values)))
        y = values[-1] + made
        return y, y @ w2

    for case in range(12):
        sizes = [(8, 64), (9, 33), *[(1, 5), (2, 700)] * (PLATFORM == "host")]
        rows, columns = random.Random(seed + case).choice(sizes)
        shapes = (rows, 24), (24, columns), (rows, columns), (columns,), (columns, 8)
        args = [array(at, *shape, dtype="float32", scale=0.3) for at, shape in enumerate(shapes)]
        written = lambda *x, case=case: f(random.Random(seed + case), *x)
        assert calls(sk.chain(written), *args) == (1, 0, 0), seed + case
        value = exact(lambda _, *x, g=written: g(*x), *args)  # fourteen operations may amplify rounding
        assert_close(jax.jit(sk.chain(written))(*args), written(*args), str(seed + case), value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(value):
    x, *rest = of_decoder(6)
    x, f = x.at[2, 3].set(value), functools.partial(decoder, "float32")
    chained, written = (jax.jit(g)(x, *rest) for g in (sk.chain(f), f))
    for ours, theirs in zip(chained, written):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs))


def test_weights_of_other_layouts():
    def f(wide, x, w, gamma):
        return rms_norm(wide, x @ w.T, gamma) @ w

    check(f, array(0, 5, 48), array(1, 96, 48, scale=0.1), array(2, 96))
    check(lambda wide, x, w: (x @ w.T * 2 + 1) @ w, array(0, 5, 48), array(1, 96, 48, scale=0.1))


def test_batches_of_matrices():
    def f(wide, x, w, gamma, v):
        return jnp.einsum("bmn,bnk->bmk", rms_norm(wide, jnp.einsum("bmk,bkn->bmn", x, w), gamma), v)

    check(f, array(0, 3, 4, 32), array(1, 3, 32, 40, scale=0.2), array(2, 40), array(3, 3, 40, 16))


def test_weights_of_four_bits():
    x, gamma = array(0, 4, 64), array(1, 96)
    w, v = (sk.quantize(array(2, k, n, scale=0.1), "int4", block=(32, 1)) for k, n in ((64, 96), (96, 64)))

    def f(x, gamma, w, v):
        return sk.matmul(rms_norm("float32", sk.matmul(x, w), gamma), v)

    assert calls(sk.chain(f), x, gamma, w, v) == (1, 0, 0)
    np.testing.assert_allclose(
        *(jax.jit(g)(x, gamma, w, v).astype("float32") for g in (sk.chain(f), f)), rtol=0.05, atol=0.05
    )


def test_operands_and_results_of_pytrees():
    def f(params, x):
        y = x @ params["w"]
        return dict(sum=y.astype("float32").sum(-1), out=(y + 1) @ params["v"], y=y)

    params, x = dict(w=array(0, 16, 24), v=array(1, 24, 8)), array(2, 3, 16)
    got, wanted = jax.jit(sk.chain(f))(params, x), jax.jit(f)(params, x)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(ours.astype("float32"), theirs.astype("float32"), rtol=0.02, atol=0.1)


def loss(f, *args):
    return sum(jnp.sum(jnp.sin(y.astype("float32"))) for y in f(*args))


def test_derivatives_are_those_of_the_program_as_written():
    args = of_decoder(3, dtype="float32")
    f = functools.partial(decoder, "float32")
    which = tuple(range(len(args)))
    got, wanted = (jax.jit(jax.grad(functools.partial(loss, g), which))(*args) for g in (sk.chain(f), f))
    assert_close(got, wanted)
    tangents = [array(20 + i, *x.shape, dtype="float32") for i, x in enumerate(args)]
    got, wanted = (jax.jvp(g, args, tuple(tangents))[1] for g in (sk.chain(f), f))
    assert_close(got, wanted)


def test_a_linear_chain_is_transposed():
    w, v, x = (array(i, 16, 16, dtype="float32") for i in range(3))
    f = lambda x: (x @ w * 2) @ v
    transposed = [jax.linear_transpose(g, x)(x)[0] for g in (sk.chain(f), f)]
    assert_close(*transposed)


@pytest.mark.parametrize("axes", [(0, 0, *[None] * 7), (1, 1, *[None] * 7), (None, 0, *[None] * 7)], ids=str)
def test_vmap_over_rows_is_a_chain(axes):
    f = functools.partial(decoder, "float32")
    args = list(of_decoder(4, dtype="float32"))
    for at, axis in enumerate(axes):
        if axis is not None:
            args[at] = jnp.stack([args[at]] * 3, axis)
    got, wanted = (jax.jit(jax.vmap(g, axes))(*args) for g in (sk.chain(f), f))
    assert_close(got, wanted)
    if axes[0] == 0:
        assert calls(jax.vmap(sk.chain(f), axes), *args) == (1, 0, 0)


def test_vmap_over_weights():
    f = functools.partial(decoder, "float32")
    args = [jnp.stack([x, x / 2]) for x in of_decoder(4, dtype="float32")]
    got, wanted = (jax.jit(jax.vmap(g))(*args) for g in (sk.chain(f), f))
    assert_close(got, wanted)


def test_in_loops_and_other_functions():
    f = functools.partial(decoder, "float32")
    x, mixed, *weights = of_decoder(3, dtype="float32")
    stacked = [jnp.stack([w, w]) for w in weights]

    def loop(g, x, mixed, stacked):
        return lax.scan(lambda x, w: (jax.checkpoint(g)(x, mixed, *w)[0], None), x, stacked)[0]

    chained, written = (functools.partial(loop, g) for g in (sk.chain(f), f))
    assert calls(chained, x, mixed, stacked) == (1, 0, 0)
    assert_close(*(jax.jit(g)(x, mixed, stacked) for g in (chained, written)))
    gradients = [jax.jit(jax.grad(lambda *args: g(*args).sum(), 2))(x, mixed, stacked) for g in (chained, written)]
    assert_close(*gradients)


def test_operation_by_operation():
    f, args = functools.partial(decoder, "float32"), of_decoder(3, dtype="float32")
    assert_close(sk.chain(f)(*args), f(*args))


def test_export():
    f, args = sk.chain(functools.partial(decoder, "float32")), of_decoder(3)
    exported = jax.export.export(jax.jit(f), disabled_checks=sk.EXPORT_CHECKS)(*args)
    again = jax.export.deserialize(exported.serialize())
    for ours, theirs in zip(again.call(*args), jax.jit(f)(*args)):
        np.testing.assert_array_equal(ours, theirs)


def test_devices_that_divide_its_operands():
    mesh = jax.sharding.Mesh(jax.devices(), "d")
    count = len(jax.devices())
    f, (x, mixed, *weights) = functools.partial(decoder, "float32"), of_decoder(2 * count, dtype="float32")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    divided = jax.device_put(x, rows), jax.device_put(mixed, rows), *weights
    wanted = jax.jit(f)(x, mixed, *weights)
    assert_close(jax.jit(sk.chain(f))(*divided), wanted)
    by_hand = jax.shard_map(
        sk.chain(f),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec("d"),) * 2 + (jax.sharding.PartitionSpec(),) * 7,
        out_specs=jax.sharding.PartitionSpec("d"),
    )
    assert calls(by_hand, x, mixed, *weights) == (1, 0, 0)
    assert_close(jax.jit(by_hand)(x, mixed, *weights), wanted)


X, W, V = array(0, 5, 32), array(1, 32, 48), array(2, 48, 32)
BROKEN = {
    "nothing": (lambda x, w, v: x, "has 0 products; a chain has at least two"),
    "no result": (lambda x, w, v: ((x @ w) @ v, None)[1], "a result is not made by a product"),
    "a number as result": (lambda x, w, v: ((x @ w) @ v, jnp.float32(0)), "a result is not made by a product"),
    "an array that a function has": (
        lambda x, w, v: jax.jit(lambda y: jnp.tanh(y) * np.arange(48, dtype="bfloat16"))(x @ w) @ v,
        "closes over|float",
    ),
    "an effect": (lambda x, w, v: (jax.debug.print("{}", x[0, 0]), (x @ w) @ v)[1], "has effects"),
    "too long rows": (
        lambda x, w, v: jnp.tanh(x @ jnp.tile(w, 2000)).astype("float32").sum(-1, keepdims=True) * (x @ w) @ v,
        "bytes of",
    ),
    "one product": (lambda x, w, v: x @ w, "has 1 products; a chain has at least two"),
    "no product": (lambda x, w, v: x + 1, "a result is not made by a product"),
    "an operation of its own": (lambda x, w, v: jnp.sin(x @ w) @ v, "at test_chain.py:.*: sin is not one of a row's"),
    "a sum over rows": (lambda x, w, v: (y := x @ w, (y - y.mean(0)) @ v)[1], "reduce_sum makes an array of other"),
    "a sum along rows from the left": (lambda x, w, v: jnp.cumsum(x @ w, -1) @ v, "cumsum is not one of a row's"),
    "an argument as result": (lambda x, w, v: ((x @ w) @ v, x), "a result is not made by a product"),
    "integers between": (lambda x, w, v: (x @ w).astype("int32").astype(x.dtype) @ v, "int32; rows are of float32"),
    "a loop": (lambda x, w, v: lax.scan(lambda y, _: (y @ v @ w, None), x @ w, None, 3)[0] @ v, "scan is not one"),
    "another type": (lambda x, w, v: (x @ w).astype("int16") @ v.astype("int16"), "int16; rows are"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_breaks_a_chain(broken):
    f, why = BROKEN[broken]
    with pytest.raises(ValueError, match="chain: fn .*" + why):
        jax.jit(sk.chain(f))(X, W, V)


def test_what_nothing_reads():
    def f(x, w, v):
        y = x @ w
        jnp.tanh(y) @ v
        return (y * 2) @ v

    assert calls(sk.chain(f), X, W, V) == (1, 0, 0)
    assert_close(jax.jit(sk.chain(f))(X, W, V).astype("float32"), f(X, W, V).astype("float32"))


def test_an_explicit_schedule_that_no_kernel_has():
    with pytest.raises(ValueError, match="chain: fn is not one chain"):
        jax.jit(sk.chain(lambda x, w, v: (x @ w) @ v, schedule=SplitK(10**6)))(X, W, V)


@pytest.mark.parametrize("arguments, error", [((3,), "fn is 3"), ((len, 3), "positional"), (("f",), "fn is 'f'")])
def test_bad_arguments(arguments, error):
    with pytest.raises(TypeError, match=error):
        sk.chain(*arguments)
    with pytest.raises(TypeError, match="schedule"):
        sk.chain(len, schedule="fast")


def test_a_decorator():
    @sk.chain(schedule=DataParallel())
    def f(x, w, v):
        """Its text."""
        return (x @ w) @ v

    assert f.__doc__ == "Its text." and calls(f, X, W, V) == (1, 0, 0)


def test_some_columns_of_a_product():
    """The halves of one product as a gate, an odd cut, and columns that two programs read."""

    def f(wide, x, both, down):
        y = x @ both
        half = y.shape[-1] // 2
        h = (jnp.tanh(y[..., :half]) * y[..., half:]) @ down
        return h, (h + y[..., 3 : 3 + h.shape[-1]].astype(wide).sum(-1, keepdims=True).astype(h.dtype)) @ both

    check(f, array(0, 2, 3, 32), array(1, 32, 80, scale=0.2), array(2, 40, 32, scale=0.2))
    broken = {
        "is of some columns only": lambda x, w, v: (x @ w)[:, :32] @ w[:, :32],
        "slice is of some columns only": lambda x, w, v: jnp.tanh((x @ w)[:, 8:][:, 2:34]) @ w,
        "reshape is of some columns only": lambda x, w, v: (
            jnp.tanh((x @ w)[:, 8:40].reshape(5, 4, 8)).reshape(5, 32) @ w
        ),
        "a result is not made": lambda x, w, v: ((x @ w @ v)[:, 4:],),
        "slice is not one of a row": lambda x, w, v: jnp.tanh((x @ w)[1:, :32]) @ w,
    }
    for why, g in broken.items():
        with pytest.raises(ValueError, match=why):
            jax.jit(sk.chain(g))(X, W, V)


def test_the_only_place():
    def f(wide, x, w, gamma, v):
        return rms_norm(wide, lax.index_in_dim(x @ w, 0, 1, keepdims=False), gamma) @ v

    check(f, array(0, 4, 1, 32), array(1, 32, 48, scale=0.2), array(2, 48), array(3, 48, 8, scale=0.2))


def test_a_gate_of_two_products_is_one_program():
    def f(x, gate, up, down):
        return (jnp.tanh(x @ gate) * (x @ up)) @ down

    args = X, W, array(3, 32, 48), V
    is_fused = PLATFORM == "cuda"  # CPUs have no gated kernels
    of_rows = [isinstance(step, rows.Program) for step in steps(f, *args).steps]
    assert of_rows == ([False] * 2 if is_fused else [False, False, True, False])
    assert_close(jax.jit(sk.chain(f))(*args).astype("float32"), jax.jit(f)(*args).astype("float32"))


def test_values_between_take_memory_once_at_a_time():
    """A chain of many products keeps two values, not all of them."""
    make = lambda count: lambda x, w: functools.reduce(lambda x, _: x @ w * 0.5 + 1, range(count), x)
    x, w = array(0, 16, 256, dtype="float32"), array(1, 256, 256, dtype="float32")

    assert steps(make(12), x, w).workspace_bytes == steps(make(4), x, w).workspace_bytes > 0
