"""``dot_general`` and ``einsum`` against lax's and jnp's: values, types, gradients and copies."""

import functools
import inspect
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streamk
from jax_streamk import DataParallel, PerPass, SplitK, StreamK, _ffi, dot_general, einsum, plan
from jax_streamk.plan.problem import arrange
from jax_streamk.product import kinds

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGET = "jax_streamk_cuda_gemm" if PLATFORM == "cuda" else "jax_streamk_host_gemm"
DTYPES = ["float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "bool", "complex64"]
MATMUL = (((1,), (0,)), ((), ()))


def normal(shape, dtype="float32", seed=0):
    rng = np.random.default_rng([seed, *shape])
    dtype = jnp.dtype(dtype)
    if dtype.kind in "iub":
        return rng.integers(0, 5, shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def assert_close(got, wanted, exact):
    """Error against float64 at most twice XLA's, and a few roundings of the accumulator."""
    assert (got.dtype, got.shape, got.weak_type) == (wanted.dtype, wanted.shape, wanted.weak_type)
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    scale = max(math.sqrt(np.mean(np.abs(exact) ** 2)), 1e-30) if exact.size else 1.0
    ours, xlas = (
        np.sqrt(np.mean(np.abs(np.asarray(x).astype(wide) - exact) ** 2)) / scale if exact.size else 0
        for x in (got, wanted)
    )
    floor = 2.0**-10 if PLATFORM == "cuda" and got.dtype == np.float32 else 2.0**-20
    assert ours <= 2 * xlas + floor, f"error {ours:.3g}, XLA's {xlas:.3g}"


DROP_INS = {
    jnp.matmul: jax_streamk.matmul,
    jnp.einsum: einsum,
    lax.dot_general: dot_general,
    lax.ragged_dot: jax_streamk.ragged_dot,
    lax.ragged_dot_general: jax_streamk.ragged_dot_general,
}


@pytest.mark.parametrize("jaxs", DROP_INS, ids=lambda f: f.__name__)
def test_drop_ins_take_every_argument_of_jaxs(jaxs):
    """In the same places, with the same defaults."""
    theirs, ours = (inspect.signature(f).parameters for f in (jaxs, DROP_INS[jaxs]))
    public = {name: x for name, x in theirs.items() if not name.startswith("_")}
    assert {name: x.default for name, x in public.items()}.items() <= {
        name: x.default for name, x in ours.items()
    }.items()
    positional = [[name for name, x in of.items() if x.kind is not x.KEYWORD_ONLY] for of in (public, ours)]
    assert positional[0] == positional[1][: len(positional[0])]


# lhs shape, rhs shape, dimension numbers: each excludes some shortcut of XLA's kernels or ours.
PRODUCTS = {
    "nn": ((37, 65), (65, 24), MATMUL),
    "nt": ((37, 65), (24, 65), (((1,), (1,)), ((), ()))),
    "tn": ((65, 37), (65, 24), (((0,), (0,)), ((), ()))),
    "tt": ((65, 37), (24, 65), (((0,), (1,)), ((), ()))),
    "batch first": ((3, 17, 40), (3, 40, 24), (((2,), (1,)), ((0,), (0,)))),
    "batch in the middle": ((17, 3, 40), (40, 3, 24), (((2,), (0,)), ((1,), (1,)))),
    "batch in the middle, contracted first": ((40, 3, 17), (24, 3, 40), (((0,), (2,)), ((1,), (1,)))),
    "batch in the middle, k = 1": ((17, 3, 1), (1, 3, 24), (((2,), (0,)), ((1,), (1,)))),
    "two batches in the middle": ((17, 2, 3, 40), (40, 2, 3, 24), (((3,), (0,)), ((1, 2), (1, 2)))),
    "batch last": ((17, 40, 3), (24, 40, 3), (((1,), (1,)), ((2,), (2,)))),
    "two batches, swapped": ((2, 3, 17, 8), (3, 2, 8, 5), (((3,), (2,)), ((1, 0), (0, 1)))),
    "two contractions, swapped": ((17, 4, 8), (8, 4, 24), (((1, 2), (1, 0)), ((), ()))),
    "free on both sides": ((5, 40, 7), (3, 40, 6), (((1,), (1,)), ((), ()))),
    "attention": ((2, 9, 4, 16), (2, 11, 4, 16), (((3,), (3,)), ((0, 2), (0, 2)))),
    "vectors": ((65,), (65,), (((0,), (0,)), ((), ()))),
    "outer": ((7,), (9,), (((), ()), ((), ()))),
    "all batch": ((4, 6), (4, 6), (((), ()), ((0, 1), (0, 1)))),
    "k = 1": ((33, 1), (1, 40), MATMUL),
    "no k": ((33, 0), (0, 40), MATMUL),
    "no m": ((0, 8), (8, 40), MATMUL),
    "no batch": ((0, 3, 8), (0, 8, 4), (((2,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(name, dtype):
    shape_lhs, shape_rhs, numbers = PRODUCTS[name]
    with jax.enable_x64(dtype == "float64"):
        lhs, rhs = jnp.asarray(normal(shape_lhs, dtype, 1)), jnp.asarray(normal(shape_rhs, dtype, 2))
        wide = np.complex128 if dtype == "complex64" else np.float64
        exact = np_dot_general(np.asarray(lhs).astype(wide), np.asarray(rhs).astype(wide), numbers)
        got, wanted = dot_general(lhs, rhs, numbers), lax.dot_general(lhs, rhs, numbers)
        if jnp.dtype(dtype).kind in "iub":
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)
        else:
            assert_close(got, wanted, exact)
            assert_close(jax.jit(functools.partial(dot_general, dimension_numbers=numbers))(lhs, rhs), wanted, exact)


def np_dot_general(lhs, rhs, numbers):
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    letters = iter("abcdefghijkl")
    lhs_names, rhs_names = [next(letters) for _ in lhs.shape], [next(letters) for _ in rhs.shape]
    for i, j in (*zip(lhs_contract, rhs_contract), *zip(lhs_batch, rhs_batch)):
        rhs_names[j] = lhs_names[i]
    contracted = {lhs_names[i] for i in lhs_contract}
    batch = [lhs_names[i] for i in lhs_batch]
    out = batch + [x for x in (*lhs_names, *rhs_names) if x not in contracted and x not in batch]
    return np.einsum(f"{''.join(lhs_names)},{''.join(rhs_names)}->{''.join(dict.fromkeys(out))}", lhs, rhs)


@pytest.mark.parametrize(
    "lhs_dtype, rhs_dtype", list(itertools.product(["float32", "bfloat16", "float16", "int8", "bool"], repeat=2))
)
def test_mixed_dtypes(lhs_dtype, rhs_dtype):
    if lhs_dtype == rhs_dtype == "bool" and jax.default_backend() == "gpu":
        pytest.skip("XLA multiplies no booleans on a GPU")
    lhs, rhs = normal((19, 70), lhs_dtype, 1), normal((70, 13), rhs_dtype, 2)
    exact = lhs.astype(np.float64) @ rhs.astype(np.float64)
    for preferred in (None, jnp.float32):
        got, wanted = (f(lhs, rhs, MATMUL, None, preferred) for f in (dot_general, lax.dot_general))
        assert_close(got, wanted, exact)


def test_mixed_float_operands_run_a_kernel():
    lhs, rhs = normal((19, 70), "bfloat16"), normal((70, 13), "float32")
    made = plan(lhs, rhs, MATMUL)
    assert made.kernel is not None
    assert "lhs is converted from bfloat16 to float32 first: kernels need operands of one dtype" in made.reasons


def precisions():
    yield from (
        None,
        "highest",
        lax.Precision.HIGH,
        (lax.Precision.HIGHEST, lax.Precision.DEFAULT),
        ("float32", "bfloat16"),
    )
    yield from (lax.DotAlgorithmPreset.F32_F32_F32, lax.DotAlgorithmPreset.BF16_BF16_F32, "F32_F32_F32")
    yield lax.DotAlgorithm(np.float32, np.float32, np.float32)


@pytest.mark.parametrize("precision", list(precisions()), ids=str)
def test_precision(precision):
    dtype = "bfloat16" if precision == lax.DotAlgorithmPreset.BF16_BF16_F32 else "float32"
    lhs, rhs = normal((33, 65), dtype, 1), normal((65, 40), dtype, 2)
    kwargs = dict(precision=precision, preferred_element_type=jnp.float32)
    try:
        wanted = lax.dot_general(lhs, rhs, MATMUL, **kwargs)
    except Exception as error:  # an algorithm that XLA lacks here
        with pytest.raises(type(error)):
            dot_general(lhs, rhs, MATMUL, **kwargs).block_until_ready()
        return
    assert_close(dot_general(lhs, rhs, MATMUL, **kwargs), wanted, lhs.astype(np.float64) @ rhs.astype(np.float64))
    made = plan(lhs, rhs, MATMUL, **kwargs)
    assert made.kernel is not None or "falls back to XLA" in str(made)


@pytest.mark.parametrize(
    "lhs, rhs, numbers, error, message",
    [
        (np.ones((2, 3)), np.ones((4, 5)), MATMUL, TypeError, "contracting dimensions"),
        (np.ones((2, 3)), np.ones((3, 5)), (((2,), (0,)), ((), ())), TypeError, "dimension"),
        (np.ones((2, 3, 4)), np.ones((3, 4, 5)), (((2,), (1,)), ((0,), (0,))), TypeError, "batch dimension"),
        ("abc", np.ones((3, 5)), MATMUL, TypeError, "dot_general: lhs is str"),
        (np.ones((2, 3)), np.array(["a"]), MATMUL, TypeError, "dot_general: rhs is ndarray of dtype <U1"),
    ],
)
def test_bad_input(lhs, rhs, numbers, error, message):
    with pytest.raises(error, match=message):
        dot_general(lhs, rhs, numbers)


def test_strict_promotion_is_none_of_laxs_business():
    a, b = normal((19, 70), "bfloat16"), normal((70, 13))
    with jax.numpy_dtype_promotion("strict"):
        assert dot_general(a, b, MATMUL).dtype == jnp.float32
        gradient = jax.grad(
            lambda a: dot_general(a, b.astype(jnp.bfloat16), MATMUL, preferred_element_type=jnp.float32).sum()
        )(a)
        assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "numbers, error, message",
    [
        ((((0,), (0,)), ((), ())), TypeError, "contracting dimensions"),
        ((((5,), (0,)), ((), ())), TypeError, "dimension"),
        (((1,), (0,)), TypeError, r"dimension_numbers=.* must be \(\(lhs_contract, rhs_contract\)"),
    ],
)
def test_plan_refuses_what_the_product_refuses(numbers, error, message):
    a, b = normal((8, 16)), normal((16, 4))
    for f in (plan, dot_general):
        with pytest.raises(error, match=message):
            f(a, b, numbers)


def test_bad_schedule():
    with pytest.raises(TypeError, match="schedule='fast': must be None"):
        dot_general(np.ones((2, 3)), np.ones((3, 2)), MATMUL, schedule="fast")
    with pytest.raises(TypeError, match="PerPass: rhs=3 must be None"):
        PerPass(rhs=3)
    with pytest.raises(ValueError, match="no kernel multiplies int32"):
        dot_general(np.ones((2, 3), np.int32), np.ones((3, 2), np.int32), MATMUL, schedule=StreamK())


EINSUMS = {
    "ij,jk->ik": [(7, 40), (40, 9)],
    "bij,bjk->bik": [(3, 7, 40), (3, 40, 9)],
    "bqhd,bkhd->bhqk": [(2, 9, 4, 16), (2, 11, 4, 16)],
    "bhqk,bkhd->bqhd": [(2, 4, 9, 11), (2, 11, 4, 16)],
    "bsd,dhk->bshk": [(2, 9, 24), (24, 4, 6)],
    "ij,jk,kl->il": [(7, 20), (20, 30), (30, 5)],
    "ii,ij->j": [(8, 8), (8, 5)],
    "ij->ji": [(3, 4)],
    "...ij,jk->...ik": [(2, 3, 7, 20), (20, 5)],
    "i,j->": [(5,), (6,)],
}


@pytest.mark.parametrize("subscripts", EINSUMS)
def test_einsum(subscripts):
    operands = [normal(shape, seed=i) for i, shape in enumerate(EINSUMS[subscripts])]
    got, wanted = einsum(subscripts, *operands), jnp.einsum(subscripts, *operands)
    assert_close(got, wanted, np.einsum(subscripts, *(x.astype(np.float64) for x in operands)))


def test_einsum_keywords():
    a, b = normal((7, 40), "bfloat16"), normal((40, 130), "bfloat16")
    f = functools.partial(
        einsum, "ij,jk->ik", schedule=StreamK(), preferred_element_type=jnp.float32, precision="highest"
    )
    assert f(a, b).dtype == jnp.float32
    text = jax.jit(f).lower(a, b).as_text()
    assert re.search(rf"{TARGET}.* schedule = 2 : i32", text) and "stablehlo.dot" not in text
    # jnp.einsum compiles for every function that it has not seen: the same schedule must be the same one.
    from jax_streamk import api

    assert (
        api._dot_general_under(StreamK()) is api._dot_general_under(StreamK()) is not api._dot_general_under(SplitK(2))
    )


# ---- gradients ----


@pytest.mark.parametrize("name", [name for name in PRODUCTS if "no " not in name])
@pytest.mark.parametrize("operands", ["float32 float32", "bfloat16 bfloat16", "bfloat16 float32", "float16 float16"])
@pytest.mark.parametrize("preferred", [None, "float32"])
def test_gradients(name, operands, preferred):
    """Also for a bfloat16 product with a float32 result, whose cotangents are products of mixed dtypes."""
    shape_lhs, shape_rhs, numbers = PRODUCTS[name]
    lhs, rhs = (
        normal(shape, dtype, i) for i, (shape, dtype) in enumerate(zip((shape_lhs, shape_rhs), operands.split()))
    )

    f = functools.partial(dot_general, dimension_numbers=numbers, preferred_element_type=preferred)
    out = jax.eval_shape(f, lhs, rhs)
    cotangent = normal(out.shape, out.dtype, 3)

    def cotangents(product, lhs, rhs, cotangent, **kwargs):
        return jax.vjp(functools.partial(product, dimension_numbers=numbers, **kwargs), lhs, rhs)[1](cotangent)

    got, wanted = (
        jax.jit(functools.partial(cotangents, product, preferred_element_type=preferred))(lhs, rhs, cotangent)
        for product in (dot_general, lax.dot_general)
    )
    with jax.enable_x64(True):
        exact = cotangents(lax.dot_general, *(jnp.asarray(x, jnp.float64) for x in (lhs, rhs, cotangent)))
    for ours, xlas, value in zip(got, wanted, exact):
        assert_close(ours, xlas, np.asarray(value))


def test_schedules_of_the_backward_pass():
    a, b = normal((128, 512)), normal((512, 256))

    def schedules(schedule):
        text = (
            jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(dot_general(a, b, MATMUL, schedule=schedule))), (0, 1)))
            .lower(a, b)
            .as_text()
        )
        calls = re.findall(rf"@{TARGET}.*? k = (\d+) .*? n = (\d+) .*? schedule = (\d) .*? splits = (\d+)", text)
        assert len(calls) == 3
        return {(int(k), int(n)): (int(kind), int(splits)) for k, n, kind, splits in calls}

    automatic = schedules(None)
    given = schedules(SplitK(4))
    assert given[512, 256] == (1, 4)
    assert all(given[key] == automatic[key] for key in automatic if key != (512, 256))
    per_pass = schedules(PerPass(StreamK(), lhs=SplitK(2), rhs=DataParallel()))
    assert per_pass == {(512, 256): (2, 1), (256, 512): (1, 2), (128, 256): (0, 1)}


def test_precision_of_the_backward_pass():
    """Each product has lax's pair, in the order of its operands: ours may be the other way round."""
    a, b = normal((12, 40)), normal((40, 9))
    pair = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)

    def products(f):
        jaxpr = jax.make_jaxpr(jax.grad(lambda a, b: jnp.sum(f(a, b, MATMUL, pair) ** 2), (0, 1)))(a, b)
        found = {}
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("dot_general", "streamk_dot_general"):
                shapes = tuple(x.aval.shape for x in equation.invars)
                precision = kinds.of(equation).precision
                if shapes in [((12, 40), (12, 9)), ((12, 9), (12, 40))]:  # the cotangent of b, in either order
                    precision = dict(zip(shapes, precision))
                found[frozenset(shapes)] = precision
        assert len(found) == 3
        return found

    assert products(dot_general) == products(lax.dot_general)


# ---- copies ----


def copies(f, *operands):
    text = jax.jit(f).lower(*operands).compile().as_text()
    return len(re.findall(r"= \S+ (?:transpose|copy)\(", text))


def loss(product, numbers):
    return lambda a, b: jnp.sum(jnp.sin(product(a, b, numbers)))


@pytest.mark.parametrize("name", [name for name in PRODUCTS if "no " not in name])
def test_copies(name):
    """Forward and backward have no more transposes and copies than with XLA's product."""
    shape_lhs, shape_rhs, numbers = PRODUCTS[name]
    lhs, rhs = normal(shape_lhs), normal(shape_rhs)
    for transform in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
        ours, xlas = (copies(transform(loss(product, numbers)), lhs, rhs) for product in (dot_general, lax.dot_general))
        assert ours <= xlas


STRIDED = ["nn", "nt", "tn", "tt", "batch first", "k = 1", "vectors"] + [
    name for name in PRODUCTS if "in the middle" in name
]


@pytest.mark.parametrize("name", STRIDED)
def test_strided_operands_cost_no_copy(name):
    """Nor do their cotangents, which have the same layout."""
    shape_lhs, shape_rhs, numbers = PRODUCTS[name]
    dtype = jnp.bfloat16 if PLATFORM == "cuda" else jnp.float32  # small float32 products are left to XLA on a GPU
    lhs, rhs = normal(shape_lhs).astype(dtype), normal(shape_rhs).astype(dtype)
    assert copies(functools.partial(dot_general, dimension_numbers=numbers), lhs, rhs) == 0
    assert copies(jax.grad(loss(dot_general, numbers), (0, 1)), lhs, rhs) == 0


@pytest.mark.parametrize(
    "shape_a, shape_b", [((17, 40), (3, 40, 24)), ((5, 3, 1, 40), (3, 40, 24)), ((1, 17, 40), (2, 3, 40, 24))]
)
def test_stacked_matrices_cost_no_copy(shape_a, shape_b):
    """The leading dimension of matmul's result is a middle one of dot_general's."""
    a, b = normal(shape_a), normal(shape_b)
    assert copies(jax_streamk.matmul, a, b) == 0
    assert copies(jax.grad(lambda b: jnp.sum(jnp.sin(jax_streamk.matmul(a, b)))), b) == 0


def test_transposed_operands_cost_no_copy():
    a, b = normal((65, 37)), normal((24, 65))
    assert copies(lambda a, b: jax_streamk.matmul(a.T, b.T), a, b) == 0
    # Several, one behind the other; a batch stays a batch.
    assert copies(lambda a: jax_streamk.matmul(a.T.T.T, a), a) == 0
    batch = normal((5, 16, 24))
    assert copies(lambda x: jax_streamk.matmul(lax.transpose(x, (0, 2, 1)), x), batch) == 0
    np.testing.assert_allclose(
        jax.jit(lambda a, b: jax_streamk.matmul(a.T, b.T))(a, b), a.T @ b.T, rtol=2e-2, atol=2e-2
    )
    # The result's order decides: here the transpose has to be made.
    f = lambda x, y: dot_general(lax.transpose(x, (1, 0, 2)), y, (((2,), (0,)), ((), ())))
    x, y = normal((3, 7, 16)), normal((16, 5))
    np.testing.assert_allclose(jax.jit(f)(x, y), np.einsum("ijk,kl->jil", x, y), rtol=2e-2, atol=2e-2)


def test_a_batch_is_broadcast_without_a_copy():
    a, b = normal((5, 17, 40)), normal((40, 24))
    text = jax.jit(jax.vmap(jax_streamk.matmul, (None, 0))).lower(a[0], normal((5, 40, 24))).as_text()
    assert re.search(r"batch = 5 : i64, batch_stride_a = 0 : i64", text)
    # The mapped dimension lies between the others in the result.
    assert copies(jax.vmap(jax_streamk.matmul, (None, 0), out_axes=1), a[0], normal((5, 40, 24))) == 0
    assert copies(jax.vmap(jax_streamk.matmul, (0, None)), a, b) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "texts, places, heads, group, size", [(3, 200, 2, 4, 64), (2, 136, 3, 1, 40), (1, 77, 4, 8, 128)]
)
def test_heads_of_a_cache(dtype, texts, places, heads, group, size):
    """Attention of one token: (text, position, head, element) is not transposed first, where kernels nest batches."""
    q, cache = normal((texts, 1, heads, group, size), dtype), normal((texts, places, heads, size), dtype)
    weights = normal((texts, heads, group, 1, places), dtype)
    for text, x in (("btkgd,bskd->bkgts", q), ("bkgts,bskd->btkgd", weights)):
        exact = np.einsum(text, x.astype(np.float64), cache.astype(np.float64))
        xlas = functools.partial(jnp.einsum, text, precision="high")
        ours = jax_streamk.accelerate(xlas)
        assert_close(jax.jit(ours)(x, cache), jax.jit(xlas)(x, cache), exact)
        if PLATFORM == "cuda" and dtype != "float32":
            assert copies(ours, x, cache) == 0


# ---- nested batches ----


def strided_products(arranged, lhs, rhs):
    """D in the order of the result, NaN where nothing is stored: what a kernel makes of the strides of a problem."""
    p = arranged.problem
    operands = (x if order is None else x.transpose(order) for x, order in
                ((lhs, arranged.permute_lhs), (rhs, arranged.permute_rhs)))  # fmt: skip
    a, b = (np.ascontiguousarray(x).ravel() for x in list(operands)[:: -1 if arranged.swapped else 1])
    d = np.full(p.batch * p.m * p.n, np.nan)

    def matrices(x, rows, columns, major, name):
        ld, outer, inner = (getattr(p, field + name) for field in ("ld", "batch_stride_", "inner_stride_"))
        strides = outer, inner, *((ld, 1) if major == _ffi.Major.row else (1, ld))
        shape = p.batch // p.inner_batch, p.inner_batch, rows, columns
        assert sum((size - 1) * stride for size, stride in zip(shape, strides)) < x.size
        return np.lib.stride_tricks.as_strided(x, shape, [8 * stride for stride in strides])

    product = matrices(a, p.m, p.k, p.major_a, "a") @ matrices(b, p.k, p.n, p.major_b, "b")
    matrices(d, p.m, p.n, _ffi.Major.row, "d")[...] = product
    return d


def test_arrangements_tell_where_matrices_are():
    """Random products with up to three batch dimensions and a transpose of the result, batches nested or not."""
    rng, nested = np.random.default_rng(5), 0
    for _ in range(1500):
        batch, free_l, free_r, contract = (list(names[: rng.integers(low, high)]) for names, low, high in
                                           (("abc", 0, 4), ("de", 0, 3), ("fg", 0, 3), ("hi", 1, 3)))  # fmt: skip
        sizes = dict(zip("abcdefghi", map(int, rng.integers(1, 4, 9))))
        names = [list(rng.permutation(batch + free + contract)) for free in (free_l, free_r)]
        lhs, rhs = (rng.standard_normal([sizes[name] for name in of]) for of in names)
        numbers = tuple(tuple(tuple(map(of.index, dims)) for of in names) for dims in (contract, batch))
        order = tuple(map(int, rng.permutation(len(batch + free_l + free_r)))) if rng.integers(2) else None
        result = batch + [name for of, free in zip(names, (free_l, free_r)) for name in of if name in free]
        exact = np.einsum(f"{''.join(names[0])},{''.join(names[1])}->{''.join(result)}", lhs, rhs)
        for nests in (False, True):
            shapes = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (lhs, rhs))
            arranged = arrange(*shapes, numbers, None, None, "cuda", permutation=order, nests=nests)
            stored = exact if order is None else exact.transpose(order)
            if arranged.permute_result is not None:  # after the product
                stored = stored.transpose(np.argsort(arranged.permute_result))
            np.testing.assert_allclose(strided_products(arranged, lhs, rhs), stored.ravel(), atol=1e-12)
            nested += arranged.problem.inner_batch > 1
    assert nested > 100
