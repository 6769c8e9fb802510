"""Products by numbers of four and eight bits with scales, in kernels, against float64."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jax_streamk as sk
from jax_streamk import DataParallel, QuantizedArray, SplitK, StreamK, quantized
from jax_streamk.tuning import contest, measure

ON_GPU = jax.default_backend() == "gpu"
KERNELS = ("scaled_", "sm90_") if ON_GPU else "host_"
INTEGERS = ("int4", "uint4", "int8", "uint8")
TRANSPOSED, AS_IS = ((((1,), (i,)), ((), ())) for i in (1, 0))


@pytest.fixture
def rng():
    return np.random.default_rng()


def numbers(rng, dtype, shape):
    """Random bits: every number of the dtype except those too large for float16 once scaled."""
    bits = (ml_dtypes.iinfo if dtype in INTEGERS else ml_dtypes.finfo)(dtype).bits
    every = np.arange(2**bits, dtype=np.uint8).view(dtype)
    return jnp.asarray(rng.choice(every[np.abs(every.astype(np.float64)) <= 448], shape))


def random_array(rng, dtype, k, n, block, dtype_x, *, scale=None, zero=False, offset=False, transposed=False):
    shape = k // block[0], n // block[1]
    scales = jnp.asarray(2.0 ** rng.integers(-3, 3, shape), scale or dtype_x)
    zeros = numbers(rng, dtype, shape) if zero else None
    offsets = jnp.asarray(rng.normal(size=shape), dtype_x) if offset else None
    parts = numbers(rng, dtype, (k, n)), scales, zeros, offsets
    parts = (x if x is None or not transposed else x.T for x in parts)
    return QuantizedArray(*parts, dtype=dtype_x)


def check(rng, m, w, dtype_x, *, transposed=False, out=None, schedule=None, kernels=KERNELS):
    """The error is at most twice that of XLA's product of the dequantized array."""
    sizes = TRANSPOSED if transposed else AS_IS
    k = w.shape[1 if transposed else 0]
    x = jnp.asarray(rng.normal(size=(m, k)), dtype_x)
    product = lambda x, w: sk.dot_general(x, w, sizes, preferred_element_type=out or dtype_x, schedule=schedule)
    plan = sk.plan(product, x, w)
    assert not kernels or (plan.problem.scale_rows and plan.kernel.startswith(kernels))
    by_xla = lax.dot_general(x, w.dequantize(), sizes, preferred_element_type=jnp.float32).astype(out or dtype_x)
    wide = np.asarray(w.dequantize(jnp.float32), np.float64)
    want = np.asarray(x, np.float64) @ (wide.T if transposed else wide)
    error = lambda got: np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2))
    got = jax.jit(product)(x, w)
    assert got.dtype == (out or dtype_x)
    assert error(got) <= 2 * error(by_xla) + 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("transposed", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype_x", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", quantized.VALUES)
def test_values_and_layouts(rng, dtype, dtype_x, transposed):
    zero = dtype in INTEGERS
    for m, k, n, block, options in (
        (1, 512, 256, (128, 1), {}),
        (7, 288, 160, (32, 1), dict(zero=zero)),
        (16, 1024, 320, (64, 1), {}),
        (17, 384, 192, (384, 1), dict(zero=zero, scale="float32")),
        (5, 1152, 128, (384, 128), dict(scale="float8_e8m0fnu")),
        (3, 256, 96, (256, 96), {}),
    ):
        w = random_array(rng, dtype, k, n, block, dtype_x, transposed=transposed, **options)
        check(rng, m, w, dtype_x, transposed=transposed, schedule=DataParallel())
        check(rng, m, w, dtype_x, transposed=transposed, schedule=SplitK(2))


def test_short_k_and_blocks_that_slices_cut(rng):
    for k in (8, 16, 24, 40):
        check(
            rng,
            5,
            random_array(rng, "int4", k, 128, (k, 1), "bfloat16", zero=True),
            "bfloat16",
            schedule=DataParallel(),
        )
    w = random_array(rng, "int4", 800, 64, (400, 1), "bfloat16")
    check(rng, 3, w, "bfloat16", schedule=SplitK(3, "separate"), kernels="")


@pytest.mark.parametrize("transposed", [False, True], ids=["kn", "nk"])
def test_numbers_that_are_rounded(rng, transposed):
    w = random_array(rng, "float4_e2m1fn", 640, 96, (16, 1), "bfloat16", scale="float8_e4m3fn", transposed=transposed)
    check(rng, 9, w, "bfloat16", transposed=transposed, schedule=DataParallel())
    w = random_array(rng, "uint4", 512, 128, (64, 1), "bfloat16", offset=True, transposed=transposed)
    check(rng, 9, w, "bfloat16", transposed=transposed, schedule=DataParallel())


@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(3), SplitK(8), SplitK(3, "separate")], ids=str)
def test_schedules(rng, schedule):
    w = random_array(rng, "int4", 1152, 128, (128, 1), "bfloat16")
    check(rng, 6, w, "bfloat16", schedule=schedule)
    check(rng, 6, w, "bfloat16", out="float32", schedule=DataParallel())


@pytest.mark.skipif(ON_GPU, reason="of the host's kernels")
def test_any_blocks_on_a_cpu(rng):
    for dtype in quantized.VALUES:
        w = random_array(rng, dtype, 51, 35, (17, 5), "float32", zero=dtype in INTEGERS, offset=True)
        check(rng, 3, w, "float32", schedule=StreamK())
        check(rng, 1, random_array(rng, dtype, 1, 1, (1, 1), "bfloat16"), "bfloat16", schedule=DataParallel())


on_cpu = pytest.mark.skipif(
    ON_GPU, reason="of the host's kernels, which multiply few rows by numbers as they read them"
)


@on_cpu
@pytest.mark.parametrize("transposed", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype", quantized.VALUES)
def test_each_number_on_a_cpu(dtype, transposed):
    """Subnormal numbers, infinities and NaN too, in whole vectors and in what is left of one."""
    bits = (ml_dtypes.iinfo if dtype in INTEGERS else ml_dtypes.finfo)(dtype).bits
    every = np.arange(2**bits, dtype=np.uint8)
    every = every.view(dtype) if bits == 8 else np.asarray(lax.bitcast_convert_type(every.astype("uint4"), dtype))
    for row in (3, 44):
        values = jnp.zeros((46, every.size), dtype).at[row].set(every)
        w = QuantizedArray(values.T if transposed else values, jnp.ones((1, 1), "float32"))
        x = jnp.zeros((1, 46), "float32").at[0, row].set(1)
        sizes = TRANSPOSED if transposed else AS_IS
        got = jax.jit(lambda x, w: sk.dot_general(x, w, sizes, schedule=DataParallel()))(x, w)
        np.testing.assert_array_equal(got[0], every.astype(np.float32))


@on_cpu
@pytest.mark.parametrize("transposed", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn", "uint8", "float8_e4m3fn"])
def test_few_rows_on_a_cpu(rng, dtype, transposed):
    """Rests of vectors, lines and blocks that begin within a byte, long sums, and more blocks than are read at once."""
    zero = dtype in INTEGERS
    for m, k, n, block, options in (
        (1, 120, 77, (24, 1), dict(zero=zero)),
        (2, 75, 64, (15, 1), dict(zero=zero)),
        (3, 77, 33, (77, 1), {}),
        (4, 90, 1040, (30, 520), dict(zero=zero, offset=True)),
        (5, 1200, 6, (2, 1), dict(offset=True)),
        (1, 8400, 20, (8400, 1), dict(zero=zero)),
        (16, 96, 40, (32, 1), dict(scale="float8_e8m0fnu")),
        (17, 96, 40, (32, 1), {}),
    ):
        for dtype_x in ("float32", "bfloat16"):
            w = random_array(rng, dtype, k, n, block, dtype_x, transposed=transposed, **options)
            check(rng, m, w, dtype_x, transposed=transposed, schedule=DataParallel())
            if k > 64:
                check(rng, m, w, dtype_x, transposed=transposed, schedule=SplitK(2, "separate"))


@on_cpu
def test_batches_of_few_rows_on_a_cpu(rng):
    """Matrices that begin within a byte, and a left operand whose rows are not contiguous."""
    w = [random_array(rng, "int4", 9, 13, (9, 1), "float32") for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(3, 9, 5)), "float32")
    product = lambda x, w: sk.dot_general(x, w, (((0,), (0,)), ((), ())), schedule=DataParallel())
    got = jax.vmap(product)(x, jax.tree.map(lambda *xs: jnp.stack(xs), *w))
    wide = np.stack([np.asarray(each.dequantize(), np.float64) for each in w])
    np.testing.assert_allclose(got, np.einsum("bkm,bkn->bmn", np.asarray(x, np.float64), wide), rtol=1e-4, atol=1e-4)


def test_infinity_and_nan(rng):
    w = random_array(rng, "float8_e5m2", 128, 64, (64, 1), "bfloat16")
    values = w.values.at[3, 5].set(jnp.inf).at[70, 6].set(jnp.nan)
    w = QuantizedArray(values, w.scale, dtype="bfloat16")
    x = jnp.asarray(rng.uniform(1, 2, size=(4, 128)), jnp.bfloat16)
    got = np.asarray(sk.matmul(x, w, schedule=DataParallel()), np.float64)
    assert np.isposinf(got[:, 5]).all() and np.isnan(got[:, 6]).all()
    assert np.isfinite(np.delete(got, [5, 6], 1)).all()


def test_extreme_scales(rng):
    for exponent in (-126, 100):
        scales = jnp.full((4, 64), 2.0**exponent, jnp.float8_e8m0fnu)
        # Without signs: sums that cancel may be subnormal, which XLA's threads flush.
        values = jnp.abs(numbers(rng, "float4_e2m1fn", (128, 64)).astype(jnp.float32)).astype("float4_e2m1fn")
        w = QuantizedArray(values, scales, dtype="bfloat16")
        x = jnp.ones((4, 128), jnp.bfloat16)
        want = np.asarray(w.values, np.float64).sum(0) * 2.0**exponent
        got = np.asarray(sk.matmul(x, w, schedule=DataParallel()), np.float64)
        np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=2**-7)


def test_transformations(rng):
    w = [random_array(rng, "int4", 128, 64, (32, 1), "bfloat16") for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(3, 128)), jnp.bfloat16)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *w)
    both = jnp.stack([sk.matmul(x, each) for each in w])
    close = lambda got, want: np.testing.assert_allclose(
        *(np.asarray(a, np.float64) for a in (got, want)), rtol=0.02, atol=0.05
    )
    close(jax.vmap(sk.matmul, (None, 0))(x, stacked), both)
    close(jax.vmap(sk.matmul)(jnp.stack([x, x]), stacked), both)
    close(jax.vmap(sk.matmul, (0, None))(jnp.stack([x, x]), w[0]), jnp.stack([both[0]] * 2))
    close(lax.scan(lambda _, w: (None, sk.matmul(x, w)), None, stacked)[1], both)
    loss = lambda x, scale: sk.matmul(x, QuantizedArray(w[0].values, scale)).astype(jnp.float32).sum()
    of_arrays = lambda x, scale: (x @ QuantizedArray(w[0].values, scale).dequantize()).astype(jnp.float32).sum()
    for got, want in zip(*(jax.grad(f, (0, 1))(x, w[0].scale) for f in (loss, of_arrays))):
        close(got, want)


def test_epilogues_and_gates(rng):
    w, up = (random_array(rng, "int4", 128, 64, (32, 1), "bfloat16") for _ in range(2))
    x, bias = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 128), (64,)))
    close = lambda got, want: np.testing.assert_allclose(
        *(np.asarray(a, np.float64) for a in (got, want)), rtol=0.05, atol=0.5
    )
    got = sk.linear(x, w, bias, activation="silu", schedule=DataParallel())
    close(got, sk.linear(x, w.dequantize(), bias, activation="silu"))
    close(sk.gated_linear(x, w, up), sk.gated_linear(x, w.dequantize(), up.dequantize()))


def shaped_numbers(k, n, dtype="int4", block=128, groups=()):
    of = lambda rows: (*groups, rows, n)
    return jax.eval_shape(lambda: QuantizedArray(jnp.zeros(of(k), dtype), jnp.zeros(of(k // block), "bfloat16")))


def test_gated_products_are_two_or_of_arrays():
    """Of numbers that kernels read, and of others, which keep the kernel for both products."""
    plan = lambda block: sk.plan(
        lambda x, *w: sk.gated_linear(x, *w),
        jax.ShapeDtypeStruct((8, 4096), "bfloat16"),
        *[shaped_numbers(4096, 8192, block=block)] * 2,
        device=sk.H200,
    )
    assert plan(128).kernel.startswith("scaled_") and "twice" in plan(128).reasons[-1]
    of_arrays = sk.plan(
        *[jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8, 4096), (4096, 8192))],
        gate=True,
        activation="silu",
        device=sk.H200,
    )
    assert plan(4).problem == of_arrays.problem and plan(4).reasons[-1].startswith("XLA dequantizes first: ")


def planned_on_h200(m, k, n, dtype="int4", block=128, product=sk.matmul, groups=()):
    w = shaped_numbers(k, n, dtype, block, groups)
    sizes = [jax.ShapeDtypeStruct(groups, "int32")] if groups else []
    return sk.plan(product, jax.ShapeDtypeStruct((m, k), "bfloat16"), w, *sizes, device=sk.H200)


def test_rows_on_hopper():
    """Few rows, more, and enough that dequantizing pays."""
    for m, family in (1, "scaled_"), (64, "sm90_"), (256, "sm90_"):
        plan = planned_on_h200(m, 4096, 12288)
        assert plan.kernel.startswith(family) and plan.problem.scale_rows == 128
    many = planned_on_h200(4096, 4096, 12288)
    assert not many.problem.scale_rows and many.reasons[-1].startswith("XLA dequantizes first: sm90_")


def test_groups_on_hopper():
    plan = planned_on_h200(256, 2048, 1024, groups=(16,), product=lambda x, w, sizes: sk.ragged_dot(x, w, sizes))
    assert plan.kernel.startswith("sm90_") and plan.problem.is_ragged and plan.problem.scale_rows == 128


@pytest.mark.parametrize("m", [8, 64])
def test_numbers_are_never_copied(m):
    """Kernels that copy operands whose rows start anywhere read numbers as they lie."""
    plan = planned_on_h200(m, 4096, 50257, "int8", 4096)
    assert not plan.problem.scale_rows and "multiples of 16 elements" in plan.reasons[-1]


def test_what_no_kernel_reads_is_dequantized():
    shape = lambda dtype, *shape: jnp.ones(shape, dtype)
    x = shape("bfloat16", 4, 64)
    of_rank = QuantizedArray(shape("int4", 64, 32), shape("bfloat16", 2, 32), shape("int4", 1, 32))
    plan = sk.plan(sk.matmul, x, of_rank)
    assert any("XLA dequantizes first: " in reason for reason in plan.reasons)


def close(got, want, rtol=0.02):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * np.abs(want).max())


def of_groups(rng, groups, k, n, block):
    each = [random_array(rng, "int4", k, n, block, "bfloat16", zero=True) for _ in range(groups)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


TOKENS, GROUPS, SIZES = 23, 5, (3, 0, 11, 1, 6)
RAGGED = {
    "plain": lambda x, w, up, sizes, at: sk.ragged_dot(x, w, sizes),
    "epilogue": lambda x, w, up, sizes, at: sk.ragged_dot(x, w, sizes, bias=jnp.ones((GROUPS, 40)), activation="silu"),
    "gathered": lambda x, w, up, sizes, at: sk.ragged_dot(x, w, sizes, lhs_indices=at),
    "gated": lambda x, w, up, sizes, at: sk.ragged_gated(x, w, up, sizes, b_gate=jnp.ones((GROUPS, 40))),
    "gated and gathered": lambda x, w, up, sizes, at: sk.ragged_gated(x, w, up, sizes, lhs_indices=at),
    "offset": lambda x, w, up, sizes, at: sk.ragged_dot(
        x, w, jnp.pad(sizes, (1, 0), constant_values=2), group_offset=jnp.array([1])
    ),
}


@pytest.mark.parametrize("kind", RAGGED)
def test_groups(rng, kind):
    x = jnp.asarray(rng.normal(size=(TOKENS, 96)), jnp.bfloat16)
    w, up = (of_groups(rng, GROUPS, 96, 40, (32, 1)) for _ in range(2))
    product = lambda x, w, up: RAGGED[kind](x, w, up, jnp.array(SIZES), jnp.arange(TOKENS)[::-1] // 2)
    plan = sk.plan(product, x, w, up)
    if not ON_GPU:
        assert "bf16 x s4" in str(plan.problem)
    arrays = w.dequantize(), up.dequantize()
    close(jax.jit(product)(x, w, up), product(x, *arrays))
    loss = lambda x, *w: (product(x, *w).astype(jnp.float32) ** 2).sum()
    close(jax.grad(loss)(x, w, up), jax.grad(loss)(x, *arrays))
    of_each = jax.vmap(product, (0, None, None))(jnp.stack([x, 2 * x]), w, up)
    close(of_each[1], product(2 * x, *arrays))


def test_what_groups_cut_has_other_scales(rng):
    """Groups of (k, n), whose matrices lie as (n, k); and groups of k, which no kernel reads."""
    x, w = jnp.asarray(rng.normal(size=(8, 64)), jnp.bfloat16), of_groups(rng, 3, 64, 24, (32, 1))
    sizes, turned = jnp.array([2, 0, 6]), jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), w)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    got = sk.ragged_dot_general(x, turned, sizes, numbers)
    close(got, sk.ragged_dot(x, w.dequantize(), sizes))
    of_k = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    right = random_array(rng, "int4", 8, 24, (4, 1), "bfloat16")
    product = lambda x, w: sk.ragged_dot_general(x, w, sizes, of_k)
    close(product(x, right), product(x, right.dequantize()))
    assert any("XLA dequantizes first: " in reason for reason in sk.plan(product, x, right).reasons)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("is_nk", [False, True])
@pytest.mark.parametrize("has_groups", [False, True])
def test_matrices_anywhere_in_memory(rng, dtype, is_nk, has_groups):
    """With the dimension of groups, or of a batch, between those of matrices."""
    zero = dtype in INTEGERS
    each = [random_array(rng, dtype, 128, 48, (32, 1), "bfloat16", zero=zero, transposed=is_nk) for _ in range(3)]
    w = jax.tree.map(lambda *xs: jnp.stack(xs, 1), *each)
    x = jnp.asarray(rng.normal(size=(3, 8, 128)), jnp.bfloat16)
    contract = 2 if is_nk else 0
    if has_groups:
        numbers = lax.RaggedDotDimensionNumbers((((1,), (contract,)), ((), ())), (0,), (1,))
        product = lambda x, w: sk.ragged_dot_general(x.reshape(24, 128), w, jnp.full(3, 8), numbers).reshape(3, 8, 48)
    else:
        product = lambda x, w: sk.dot_general(x, w, (((2,), (contract,)), ((0,), (1,))))
    plan = sk.plan(product, x, w)
    copies = "scale is transposed by (1, 0, 2) first: kernels need that of each matrix in one piece"
    assert ON_GPU or (plan.problem.scale_rows == 32 and copies in plan.reasons)
    matrices = np.stack([np.asarray(x.dequantize(jnp.float32).T if is_nk else x.dequantize(jnp.float32)) for x in each])
    close(jax.jit(product)(x, w), np.asarray(x, np.float64) @ matrices.astype(np.float64))


BY_EITHER_SIDE = {
    "lhs of dot_general": lambda w, x: sk.dot_general(w, x, (((0,), (1,)), ((), ()))),
    "lhs of matmul": lambda w, x: sk.matmul(w.dequantize().T if ON_GPU else transposed(w), x.T),
    "einsum": lambda w, x: sk.einsum("kn,bk->bn", w, x),
    "einsum with a name for no dimension": lambda w, x: sk.einsum("...k,kn->n...", x, w),
    "transposed before": lambda w, x: sk.matmul(x, transposed(jax.lax.optimization_barrier(transposed(w)))),
}


def transposed(w):
    return QuantizedArray(*(None if part is None else part.T for part in (w.values, w.scale, w.zero_point)))


@pytest.mark.parametrize("kind", BY_EITHER_SIDE)
def test_numbers_on_either_side(rng, kind):
    w = random_array(rng, "int4", 256, 96, (64, 1), "bfloat16", zero=True)
    x = jnp.asarray(rng.normal(size=(7, 256)), jnp.bfloat16)
    product = BY_EITHER_SIDE[kind]
    if not ON_GPU:
        plan = sk.plan(product, w, x)
        assert "bf16 x s4" in str(plan.problem) and not any("rhs" in reason for reason in plan.reasons)
    got, want = jax.jit(product)(w, x), jnp.asarray(x @ w.dequantize())
    close(got if got.shape == want.shape else got.T, want)


def test_einsums_that_are_no_product_are_of_arrays(rng):
    w = random_array(rng, "int8", 32, 32, (8, 1), "bfloat16")
    x = jnp.asarray(rng.normal(size=(5, 32)), jnp.bfloat16)
    for subscripts in ("bk,kk->bk", "bk,kn->b", "bk,kn->k"):
        close(sk.einsum(subscripts, x, w), jnp.einsum(subscripts, x, w.dequantize()))
    close(sk.einsum("bk,kn,nm->bm", x, w, w), jnp.einsum("bk,kn,nm->bm", x, w.dequantize(), w.dequantize()), 0.05)


def test_bad_einsums_are_refused_as_jaxs(rng):
    w = random_array(rng, "int4", 32, 16, (8, 1), "bfloat16")
    x = jnp.ones((2, 3, 32), jnp.bfloat16)
    for subscripts, operand in (("bk,kn->bn", x), ("bkj,kn->bjn", x), ("bk,kn->bnn", x[0]), ("bk,kn->bm", x[0])):
        with pytest.raises((ValueError, TypeError)):
            sk.einsum(subscripts, operand, w)
    with pytest.raises(NotImplementedError):
        sk.einsum("bk,kn->bn", x[0], w, out=x[0])


def test_layers_by_index(rng):
    w = of_groups(rng, 4, 64, 32, (16, 1))
    np.testing.assert_array_equal(w[2].dequantize(), w.dequantize()[2])
    np.testing.assert_array_equal(w[1:3].dequantize(), w.dequantize()[1:3])
    assert w[...] is w
    for array, index in ((w, (0, 1)), (w[0], 0)):
        with pytest.raises(IndexError, match="first dimension"):
            array[index]


@pytest.mark.skipif(len(jax.devices()) < 8, reason="this process has fewer devices")
@pytest.mark.parametrize("block", [(32, 1), (256, 1), (32, 24), (64, 96)], ids=str)
@pytest.mark.parametrize("axes", [(None, "x"), ("x", None), ("x", "y"), (("x", "y"), None)], ids=str)
def test_devices_divide_numbers_and_scales_alike(rng, axes, block):
    """What a device has of the scales is that of its numbers: nothing is gathered, and nothing dequantized first."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    named = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    w = random_array(rng, "int4", 256, 96, block, "bfloat16", zero=True)
    x = jnp.asarray(rng.normal(size=(8, 256)), jnp.bfloat16)
    spec_of = lambda part: [
        axis if size % 8 == 0 or (size % 4 == 0 and axis == "x") else None for axis, size in zip(axes, part.shape)
    ]
    placed = jax.tree.map(lambda part: jax.device_put(part, named(*spec_of(part))), w)
    rows = jax.device_put(x, named(None, axes[0]))
    close(jax.jit(sk.matmul)(rows, placed), x @ w.dequantize())
    text = jax.jit(sk.matmul).lower(rows, placed).compile().as_text()
    has_blocks_for_all = axes[0] != ("x", "y") or block[0] != 64
    assert has_blocks_for_all != bool(re.search(r"s4\[.*all-gather", text))
    assert "_s4_" in text


@pytest.mark.skipif(len(jax.devices()) < 8, reason="this process has fewer devices")
@pytest.mark.parametrize("axis", range(3))
def test_devices_divide_groups(rng, axis):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    spec = [None] * 3
    spec[axis] = "x"
    x, sizes = jnp.asarray(rng.normal(size=(16, 64)), jnp.bfloat16), jnp.array([3, 0, 9, 2])
    w, up = (of_groups(rng, 4, 64, 32, (16, 1)) for _ in range(2))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    placed = [jax.device_put(each, jax.tree.map(lambda _: sharding, each)) for each in (w, up)]
    product = jax.jit(lambda x, w, up: sk.ragged_gated(x, w, up, sizes, lhs_indices=jnp.arange(16)[::-1]))
    close(product(x, *placed), product(x, w.dequantize(), up.dequantize()), 0.05)


@pytest.mark.parametrize("second", [2.0**-9, 1 / 3, 300.0])
def test_a_scale_of_all_scales(rng, second):
    """NVFP4: few rows are multiplied by it afterwards, many have it in their scales."""
    scales = QuantizedArray(numbers(rng, "float8_e4m3fn", (24, 64)), jnp.full((1, 1), second, jnp.float32))
    w = QuantizedArray(numbers(rng, "float4_e2m1fn", (384, 64)), scales, dtype="bfloat16")
    for m in (3, 40):
        x = jnp.asarray(rng.normal(size=(m, 384)), jnp.bfloat16)
        plan = sk.plan(sk.matmul, x, w)
        if m == 3 or not ON_GPU:
            assert f"scale {'e4m3' if m == 3 else 'f32'} per 16 x 1" in str(plan.problem)
        got = jax.jit(sk.matmul)(x, w)
        want = np.asarray(x, np.float64) @ np.asarray(w.dequantize(jnp.float32), np.float64)
        by_xla = jnp.matmul(x, w.dequantize(), preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        error = lambda y: np.sqrt(np.mean((np.asarray(y, np.float64) - want) ** 2))
        assert got.dtype == jnp.bfloat16 and error(got) <= 2 * error(by_xla)
        gradient = lambda f: jax.grad(lambda x: (f(x, w).astype(jnp.float32) ** 2).sum())(x)
        close(gradient(sk.matmul), gradient(lambda x, w: x @ w.dequantize()), 0.05)


def tunable(rng):
    """Functions of an array and numbers: groups with zero points, (n, k) with offsets, a batch, and ragged rows."""
    batched = lambda x, w: sk.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))
    bf16 = dict(dtype_x="bfloat16")
    x = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    stack = lambda *each: jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    group = lambda dtype, **options: random_array(rng, dtype, 256, 128, (64, 1), **bf16, **options)
    cases = {
        "zeros": (sk.matmul, x(8, 256), group("int4", zero=True)),
        "offsets": (
            lambda x, w: sk.dot_general(x, w, TRANSPOSED),
            x(3, 256),
            group("uint8", offset=True, scale="float8_e8m0fnu", transposed=True),
        ),
        "batch": (batched, x(2, 5, 256), stack(group("int8"), group("int8"))),
    }
    if not ON_GPU:
        cases["ragged"] = (sk.ragged_dot, x(9, 256), stack(group("int4"), group("int4")), jnp.array([4, 5], jnp.int32))
    return cases


@pytest.mark.parametrize("name", tunable(np.random.default_rng()))
def test_tuning_compares_numbers_with_what_xla_dequantizes(rng, name, store, monkeypatch):
    fn, *operands = tunable(rng)[name]
    monkeypatch.setitem(measure.ROTATED_BYTES, "cuda" if ON_GPU else "cpu", 1e5)
    made = sk.plan(fn, *operands)
    memory = measure.Memory(made.device)
    own = contest.operands_of(dataclasses.replace(made, microseconds=1e3), memory)[0]
    ours, xlas = (np.asarray(jax.jit(side(made))(*own), np.float64) for side in (contest.ours, contest.xlas))
    np.testing.assert_allclose(ours, xlas, rtol=0, atol=2**-6 * np.abs(xlas).max())
    with sk.tuning() as plans:
        jax.jit(fn)(*operands)
    (tuned,) = plans
    assert tuned.problem == made.problem and "product took" in str(tuned)
