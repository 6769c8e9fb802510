"""Batch invariance: a row's bits depend neither on how many rows are computed with it nor on its place."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streamk as sk
from jax_streamk import Auto, DataParallel, PerPass, SplitK, StreamK, _ffi, schedules
from jax_streamk.device import device_of
from jax_streamk.plan import left_to_xla
from jax_streamk.plan.plan import native_schedule
from jax_streamk.tuning import tuned

INVARIANT = Auto(batch_invariant=True)
ON_GPU = jax.default_backend() == "gpu"
ROWS = [1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 100, 128, 129, 257, 1000, 1024, *[4096, 8192] * ON_GPU]
FEW = [1, 2, 7, 16, 17, 33, 65, 130, 257]  # a quick choice, with remainders of every tile
FLOATS = ["float32", "bfloat16", "float16"]
TYPES = [*FLOATS, "float64", "int8"]


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def normal(rng, shape, dtype):
    if dtype == "int8":
        return jnp.asarray(rng.integers(-128, 128, shape), dtype)
    return jnp.asarray(rng.normal(size=shape), dtype)


def bits(x):
    return np.asarray(x).view(np.uint8)


def assert_invariant(f, x, rng, rows=ROWS, axis=0):
    """``f`` of some rows of x, at any place, has the bits that these have in ``f`` of all rows."""
    whole = np.asarray(jax.jit(f)(x))
    assert np.isfinite(whole.astype(np.float64)).all() and whole.any()
    for m in rows:
        first = rng.integers(x.shape[axis] - m + 1)
        part = jax.jit(f)(lax.slice_in_dim(x, first, first + m, axis=axis))
        assert np.array_equal(bits(part), bits(whole[first : first + m])), (m, first)


def by(w, **how):
    """The product by a matrix."""
    return lambda x: sk.matmul(x, w, **how)


def extents(rng):
    """(n, k), small ones, misaligned ones, and those of layers."""
    sizes = [1, 2, 7, 8, 24, 64, 100, 129, 256, 384, 1000, 1024]
    return int(rng.choice(sizes)), int(rng.choice([*sizes, 4097, 5000]))


@pytest.mark.parametrize("layouts", ["rr", "rc", "cr", "cc"])
@pytest.mark.parametrize("dtype", TYPES)
def test_any_number_of_rows(dtype, layouts, rng, x64):
    (n, k), (by_columns, turned) = extents(rng), (x == "c" for x in layouts)
    if dtype == "int8" and ON_GPU:
        if by_columns:
            pytest.skip("no kernel on a GPU has an int8 A by columns")
        n, k = (-(-x // 16) * 16 for x in (n, k))  # rows of whole 16 bytes
    x, w = normal(rng, (max(ROWS), k), dtype), normal(rng, (n, k) if turned else (k, n), dtype)
    out = {"int8": "int32", "float32": "float32", "float64": "float64"}.get(dtype, rng.choice([dtype, "float32"]))

    def product(x):
        x = lax.optimization_barrier(x.T).T if by_columns else x
        return sk.matmul(x, w.T if turned else w, preferred_element_type=out, schedule=INVARIANT)

    assert_invariant(product, x, rng)


@pytest.mark.parametrize("precision", ["default", "high"])
def test_float32_of_each_precision(precision, rng):
    n, k = extents(rng)
    x, w = normal(rng, (257, k), "float32"), normal(rng, (k, n), "float32")
    assert_invariant(by(w, precision=precision, schedule=INVARIANT), x, rng, FEW)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("reduction", ["ordered", "separate"])
def test_a_number_of_splits(splits, reduction, rng):
    dtype = rng.choice(FLOATS[ON_GPU:])  # not every cut of TF32 has kernels for all rows
    x, w = normal(rng, (257, 1024), dtype), normal(rng, (1024, 136), dtype)
    schedule = SplitK(splits, reduction, batch_invariant=True)
    assert_invariant(by(w, schedule=schedule), x, rng, FEW)


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_epilogues(dtype, activation, rng):
    n, k = extents(rng)
    x, y = normal(rng, (257, k), dtype), normal(rng, (257, n), dtype)
    w, bias = normal(rng, (k, n), dtype), normal(rng, n, dtype)

    def layer(both):
        x, y = both[:, :k], both[:, k:]
        return sk.linear(
            x, w, bias, residual=y, alpha=0.3, beta=0.7, activation=activation, schedule=INVARIANT
        )  # fmt: skip

    assert_invariant(layer, jnp.concatenate([x, y], 1), rng, FEW)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gated_products(dtype, rng):
    n, k = extents(rng)
    x, w, up = (normal(rng, shape, dtype) for shape in ((257, k), (k, n), (k, n)))
    assert_invariant(lambda x: sk.gated_linear(x, w, up, schedule=INVARIANT), x, rng, FEW)


def test_batches_of_any_size(rng):
    """Batched matrices, rows of several dimensions, and mapped functions have the bits of one product."""
    n, k = extents(rng)
    dtype = rng.choice(FLOATS)
    x, w = normal(rng, (6, 33, k), dtype), normal(rng, (6, k, n), dtype)
    product = functools.partial(sk.matmul, schedule=INVARIANT)
    for batch in (1, 2, 5):
        together = jax.jit(product)(x[:batch], w[:batch])
        mapped = jax.jit(jax.vmap(product))(x[:batch], w[:batch])
        of_rows = jax.jit(product)(x[:batch], w[0])
        mapped_rows = jax.jit(jax.vmap(product, (0, None)))(x[:batch], w[0])
        for at in range(batch):
            for rows in (1, 16, 33):
                alone = bits(jax.jit(product)(x[at, :rows], w[at]))
                assert np.array_equal(alone, bits(together[at, :rows]))
                assert np.array_equal(alone, bits(mapped[at, :rows]))
                shared = bits(jax.jit(product)(x[at, :rows], w[0]))
                assert np.array_equal(shared, bits(of_rows[at, :rows]))
                assert np.array_equal(shared, bits(mapped_rows[at, :rows]))


@pytest.mark.parametrize("equation", ["bshd,hdn->bsn", "bshd,hdn->bns", "bshd,bthd->bhst", "bshd,nhd->nbs"])
def test_einsum_of_several_dimensions(equation, rng):
    """The first and the second dimension of lhs are of batches."""
    dtype = rng.choice(FLOATS)
    x = normal(rng, (3, 40, 2, 24), dtype)
    sizes = dict(h=2, d=24, n=56, t=19, b=3)
    y = normal(rng, [sizes[name] for name in equation.split("->")[0].split(",")[1]], dtype)
    result = equation.split("->")[1]

    def product(x):
        return sk.einsum(equation, x, y[: x.shape[0]] if "b" in equation.split(",")[1][:1] else y, schedule=INVARIANT)

    at = lambda out, name, size: lax.slice_in_dim(out, 0, size, axis=result.index(name))
    whole = jax.jit(product)(x)
    for b, s in ((1, 40), (3, 1), (1, 1), (2, 17)):
        part = jax.jit(product)(x[:b, :s])
        assert np.array_equal(bits(part), bits(at(at(whole, "b", b), "s", s))), (b, s)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_of_any_sizes(dtype, gathers, is_gated, rng):
    """A token's row depends neither on its expert's other tokens nor on which other experts have some."""
    n, k = extents(rng)
    groups, tokens = 4, 150
    x, w, up = (normal(rng, shape, dtype) for shape in ((tokens, k), (groups, k, n), (groups, k, n)))

    def product(x, sizes, indices):
        indices = indices if gathers else None
        if is_gated:
            return sk.ragged_gated(x, w, up, sizes, lhs_indices=indices, schedule=INVARIANT)
        return sk.ragged_dot(x, w, sizes, lhs_indices=indices, schedule=INVARIANT)

    known = {}
    for sizes in ([150, 0, 0, 0], [1, 1, 1, 1], [0, 100, 17, 33], [70, 3, 60, 17], [0, 0, 1, 0]):
        chosen = rng.permutation(tokens)[: sum(sizes)]
        experts = np.repeat(np.arange(groups), sizes)
        rows = jnp.asarray(x if gathers else x[chosen])
        out = jax.jit(product)(rows, jnp.asarray(sizes, jnp.int32), jnp.asarray(chosen, jnp.int32))
        for row, token, expert in zip(bits(out), chosen, experts):
            assert np.array_equal(known.setdefault((token, expert), row), row), (sizes, token, expert)
    assert len({token for token, _ in known}) == tokens


@pytest.mark.parametrize("values", ["int4", "int8", "float4_e2m1fn", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantized_weights(dtype, values, rng):
    k, n = 384, int(rng.choice([16, 72, 256]))
    w = sk.quantize(normal(rng, (k, n), "float32"), values, block=(int(rng.choice([32, 128, k])), 1))
    x = normal(rng, (257, k), dtype)
    assert_invariant(by(w, schedule=INVARIANT), x, rng, FEW)
    assert_invariant(lambda x: sk.gated_linear(x, w, w, schedule=INVARIANT), x, rng, FEW)


def test_quantized_weights_where_k_is_not_cut(rng):
    w = sk.quantize(normal(rng, (384, 72), "float32"), "int8", block=(384, 1))
    x = normal(rng, (130, 384), "bfloat16")
    assert_invariant(by(w, schedule=DataParallel(batch_invariant=True)), x, rng, [1, 16, 17, 65])


def test_a_vector_has_the_bits_of_a_row(rng):
    n, k = extents(rng)
    x, w = normal(rng, (33, k), "bfloat16"), normal(rng, (k, n), "bfloat16")
    product = jax.jit(functools.partial(sk.matmul, schedule=INVARIANT))
    assert np.array_equal(bits(product(x[5], w)), bits(product(x, w)[5]))


def test_rows_of_several_devices(rng):
    """Rows that XLA divides over devices have the bits that they have on one."""
    devices = jax.devices()[: 4 if len(jax.devices()) >= 4 else 1]
    mesh = jax.make_mesh((len(devices),), ("rows",), devices=devices)
    x, w = normal(rng, (64, 300), "float32"), normal(rng, (300, 72), "float32")
    product = jax.jit(by(w, schedule=INVARIANT))
    divided = product(jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows"))))
    assert np.array_equal(bits(divided), bits(product(x)))


def test_float8(rng):
    n, k = 136, 1024
    x, w = (normal(rng, shape, "float8_e4m3fn") for shape in ((257, k), (k, n)))
    product = by(w, preferred_element_type="bfloat16", schedule=INVARIANT)
    assert_invariant(product, x, rng, FEW)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients(dtype, rng):
    """Those of rows have their bits in any batch; those of weights, whatever rows of zeros follow."""
    n, k, rows = 72, 200, 130
    x, ct, w = (normal(rng, shape, dtype) for shape in ((rows, k), (rows, n), (k, n)))

    def cotangents(x, ct):
        return jax.vjp(functools.partial(sk.matmul, schedule=INVARIANT), x, w)[1](ct)

    of_x, of_w = jax.jit(cotangents)(x, ct)
    for m in (1, 7, 16, 65):
        assert np.array_equal(bits(jax.jit(cotangents)(x[:m], ct[:m])[0]), bits(of_x[:m])), m
        padded = (jnp.pad(a, ((0, m), (0, 0))) for a in (x, ct))
        assert np.array_equal(bits(jax.jit(cotangents)(*padded)[1]), bits(of_w)), m


def test_gradients_of_groups(rng):
    """Those of a group's matrix follow from its own rows."""
    n, k, rows = 72, 200, 60
    x, ct, w = (normal(rng, shape, "bfloat16") for shape in ((rows, k), (rows, n), (3, k, n)))

    def cotangents(x, ct, sizes):
        return jax.vjp(lambda x, w: sk.ragged_dot(x, w, sizes, schedule=INVARIANT), x, w)[1](ct)

    of_x, of_w = jax.jit(cotangents)(x, ct, jnp.array([20, 10, 30]))
    alone, alone_w = jax.jit(cotangents)(x[20:30], ct[20:30], jnp.array([0, 10, 0]))
    assert np.array_equal(bits(alone), bits(of_x[20:30])) and np.array_equal(bits(alone_w[1]), bits(of_w[1]))


def mlp(rng, dtype, k=96, n=160):
    w, up, down, bias = (normal(rng, shape, dtype) for shape in ((k, n), (k, n), (n, k), n))

    def program(x):
        h = jax.nn.silu(x @ w + bias) * (x @ up)
        return x + h @ (down / n).astype(x.dtype)

    return program


@pytest.mark.parametrize("dtype", FLOATS)
def test_accelerate(dtype, rng):
    program = mlp(rng, dtype)
    x = normal(rng, (257, 96), dtype)
    fast = sk.accelerate(program, schedule=INVARIANT)
    assert_invariant(fast, x, rng, FEW)
    fused = {}
    for rows in (2, 16, 257):
        found = fast.explain(x[:rows])
        assert all(row.is_ours and row.plan.batch_invariant for row in found.rows)
        fused[rows] = sorted((row.fused, row.plan.sum_order) for row in found.rows)
    assert fused[2] == fused[16] == fused[257]


def test_flax(rng):
    linen, nnx = (pytest.importorskip(f"jax_streamk.flax.{name}") for name in ("linen", "nnx"))
    from flax import nnx as flax_nnx

    x = normal(rng, (130, 64), "float32")
    rows = [1, 7, 16, 33]
    for layer in (linen.Dense(40, schedule=INVARIANT), linen.GatedMLP(96, schedule=INVARIANT)):
        params = layer.init(jax.random.key(0), x)
        assert_invariant(functools.partial(layer.apply, params), x, rng, rows)
    rngs = flax_nnx.Rngs(0)
    assert_invariant(nnx.Linear(64, 40, schedule=INVARIANT, rngs=rngs), x, rng, rows)


def test_zeros_appended_along_k_change_nothing_where_k_is_not_cut(rng):
    x, w = normal(rng, (17, 300), "bfloat16"), normal(rng, (300, 40), "bfloat16")
    product = functools.partial(sk.matmul, schedule=DataParallel(batch_invariant=True))
    longer = jax.jit(product)(jnp.pad(x, ((0, 0), (0, 900))), jnp.pad(w, ((0, 900), (0, 0))))
    assert np.array_equal(bits(longer), bits(jax.jit(product)(x, w)))


# Plans, on GPUs that need not be here


def random_product(rng):
    """Shapes of x and w for a number of rows, and the product of them; rows may be of a column-major matrix."""
    dtype = rng.choice(["bfloat16", "float16", "float32", "float64"])
    out = rng.choice([dtype, "float32"]) if dtype in ("bfloat16", "float16") else dtype
    sizes = [1, 2, 8, 24, 64, 100, 129, 1024, 1536, 4096, 5120, 14336]
    n, k, turned = rng.choice(sizes), rng.choice(sizes), rng.random() < 0.5
    by_columns = n > 8 and rng.random() < 0.2  # of few columns no kernel takes such rows
    kind = rng.choice(["matmul", "matmul", "linear", "gated", "batch"])

    def operands(m):
        shape = (k, m) if by_columns else (m, k)
        x = jax.ShapeDtypeStruct((*[m % 5 + 1] * (kind == "batch"), *shape), dtype)
        w = jax.ShapeDtypeStruct((*x.shape[:-2], *((n, k) if turned else (k, n))), dtype)
        return [x, w, *[w] * (kind == "gated")]

    def product(x, w, *up):
        x, w = (jnp.matrix_transpose(a) if is_turned else a for a, is_turned in ((x, by_columns), (w, turned)))
        if kind == "linear":
            return sk.linear(x, w, jnp.zeros(n, dtype), activation="gelu", schedule=INVARIANT)
        if kind == "gated":
            up = jnp.matrix_transpose(up[0]) if turned else up[0]
            return sk.gated_linear(x, w, up, schedule=INVARIANT)
        return sk.matmul(x, w, preferred_element_type=out, schedule=INVARIANT)

    return operands, product, (kind, dtype, out, n, k, by_columns, turned)


@pytest.mark.parametrize("device", [sk.H200, sk.H100], ids=["h200", "h100"])
@pytest.mark.parametrize("seed", range(5))
def test_plans_have_one_sum_order_for_all_rows(seed, device):
    draw = random.Random()
    operands, product, text = random_product(draw)
    orders = set()
    for m in [*draw.sample(ROWS, 5), 1, 4096]:
        plans = sk.plan(product, *operands(m), device=device)
        plans = plans if isinstance(plans, (list, tuple)) else [plans]
        for plan in plans:
            assert plan.kernel is not None and plan.batch_invariant and plan.sum_order, (text, m, plan)
            assert plan.sum_order in str(plan)
        orders.add(tuple(plan.sum_order for plan in plans))
    assert len(orders) == 1, (text, orders)


def test_sum_order_follows_from_n_and_k():
    """Whatever the epilogue, the batch, and how the rows lie."""
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 5120), (5120, 1536)))
    order = functools.partial(sk.plan, schedule=INVARIANT, device=sk.H200)
    first = order(x, w).sum_order
    bias, residual = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1536,), (64, 1536)))

    def layer(x, w, bias, residual):
        return sk.linear(x, w, bias, residual=residual, activation="relu", schedule=INVARIANT)

    assert sk.plan(layer, x, w, bias, residual, device=sk.H200).sum_order == first
    batched = (jax.ShapeDtypeStruct((7, *a.shape), "bfloat16") for a in (x, w))
    assert order(*batched).sum_order == first
    turned = jax.ShapeDtypeStruct((5120, 64), "bfloat16")
    assert sk.plan(lambda x, w: sk.matmul(x.T, w, schedule=INVARIANT), turned, w, device=sk.H200).sum_order == first


def test_rows_may_lose_little_on_an_h200():
    """Plans of one order are not much slower than the fastest; a product of decoding, and of a prompt."""
    for m in (1, 16, 128, 4096):
        x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, 4096), (4096, 4096)))
        free, bound = (sk.plan(x, w, schedule=schedule, device=sk.H200) for schedule in (Auto(), INVARIANT))
        assert bound.microseconds < 1.5 * free.microseconds


def test_plans_say_in_which_order_they_add():
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((512, 4096), (4096, 4096)))
    of = lambda schedule: sk.plan(x, w, schedule=schedule, device=sk.H200)
    assert of(SplitK(4)).sum_order == of(SplitK(4, "separate")).sum_order
    assert "4 x 1024" in of(SplitK(4)).sum_order and not of(SplitK(4)).batch_invariant
    assert of(SplitK(4, batch_invariant=True)).batch_invariant
    assert of(StreamK()).sum_order == "" and of(DataParallel()).sum_order
    assert of(DataParallel()).sum_order in str(of(DataParallel()).explain())
    assert "with any number of rows" in str(of(INVARIANT).explain())
    assert "depends on how many rows" in str(of(StreamK()).explain())
    host = sk.plan(x, w, schedule=DataParallel(), device=dataclasses.replace(device_of("cpu"), sms=8))
    assert host.sum_order == ""  # other kernels multiply few rows


# What cannot keep the promise


def test_atomic_sums_are_refused():
    with pytest.raises(ValueError, match="order of arrival"):
        SplitK(4, "atomic", batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant"):
        StreamK(batch_invariant=True)
    with pytest.raises(TypeError, match="True or False"):
        Auto(batch_invariant=1)


def test_products_that_only_xla_computes_are_refused():
    x = jnp.ones((8, 8), jnp.complex64)
    with pytest.raises(ValueError, match=r"batch_invariant=True.*complex64"):
        jax.jit(functools.partial(sk.matmul, schedule=INVARIANT))(x, x)
    with pytest.raises(ValueError, match=r"complex64\[8,8\] @ complex64\[8,8\]"):
        sk.accelerate(lambda x: x @ x, schedule=INVARIANT)(x)
    with pytest.raises(ValueError, match="complex64"):
        sk.plan(x, x, schedule=INVARIANT)
    numbers = jnp.arange(64).reshape(8, 8)  # integers are exact in any order
    assert np.array_equal(sk.accelerate(lambda x: x @ x, schedule=INVARIANT)(numbers), numbers @ numbers)


@pytest.mark.left_to_xla
def test_no_rule_leaves_a_product_to_xla(rng):
    x, w = normal(rng, (9, 3), "float32"), normal(rng, (3, 5), "float32")
    assert sk.plan(x, w).kernel is None and left_to_xla.why(sk.plan(x, w, schedule=INVARIANT).problem, device_of(None))
    assert_invariant(by(w, schedule=INVARIANT), x, rng, [1, 2, 7])
    a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 4096), (4096, 4096)))
    assert sk.plan(a, b, schedule=INVARIANT, device=sk.H200).problem.math == _ffi.Math.tf32


def test_tuned_plans_of_another_order_are_not_used(store):
    """Those of one order are, also where XLA's product was faster."""
    a, b = jnp.ones((64, 1024), "bfloat16"), jnp.ones((1024, 512), "bfloat16")
    made = sk.plan(a, b, schedule=INVARIANT)
    assert made.problem != sk.plan(a, b).problem  # tuned apart
    other = sk.plan(a, b, schedule=SplitK(3, "separate", batch_invariant=True))
    alike = next(candidate for candidate in made.candidates if candidate.kernel != made.kernel)
    assert other.sum_order != made.sum_order
    for kernel, schedule, is_used in ((other.kernel, other.schedule, False), (alike.kernel, alike.schedule, True)):
        trial = tuned.Trial.of(kernel, native_schedule(schedule), made.policy)
        entry = dataclasses.replace(tuned.Tuned.now(trial, 1.0, 2.0), xla_ratio=0.5)
        store.add(made.device, made.problem, entry)
        again = sk.plan(a, b, schedule=INVARIANT)
        assert again.kernel == (kernel if is_used else made.kernel) and again.sum_order == made.sum_order


def test_tuning_keeps_the_order(store):
    a, b = jnp.ones((40, 512), "bfloat16"), jnp.ones((512, 136), "bfloat16")
    with sk.tuning() as plans:
        jax.jit(by(b, schedule=INVARIANT)).lower(a)
    (tuned_plan,) = plans
    assert tuned_plan.batch_invariant and tuned_plan.sum_order == sk.plan(a, b, schedule=INVARIANT).sum_order


def test_schedules_of_passes():
    of = schedules.of_cotangent
    assert of(INVARIANT, 0) == INVARIANT and of(INVARIANT, 1) == DataParallel(batch_invariant=True)
    assert of(PerPass(forward=INVARIANT, rhs=SplitK(2)), 1) == SplitK(2)
    assert of(PerPass(forward=INVARIANT), 0) == Auto() and of(Auto(), 1) == Auto()
    assert repr(INVARIANT) == "Auto(batch_invariant=True)" and repr(Auto()) == "Auto()"
    assert eval(repr(SplitK(3, batch_invariant=True))) == SplitK(3, batch_invariant=True)
