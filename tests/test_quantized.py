"""Operands of four and eight bits with scales."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jax_streamk as sk
from jax_streamk import QuantizedArray, from_words, quantize, quantized

K, N = 64, 24
# Shapes of scales of values (64, 24).
LAYOUTS = {"tensor": (1, 1), "column": (1, N), "row": (K, 1), "group": (4, N), "block": (4, 3), "each": (K, N)}


def values(rng, dtype, shape=(K, N)):
    """Random bits: every number of the dtype, NaN and infinity left out."""
    bits = ml_dtypes.finfo(dtype).bits if jnp.issubdtype(dtype, np.floating) else ml_dtypes.iinfo(dtype).bits
    every = np.arange(2**bits, dtype=np.uint8)
    every = every.view(dtype) if bits == 8 else every.astype(np.float32).astype(dtype)
    every = every[np.isfinite(every.astype(np.float64))]
    return jnp.asarray(rng.choice(every, shape))


def expected(x):
    """What a ``QuantizedArray`` stands for, in float64."""
    wide = lambda x: np.asarray(x.dequantize(jnp.float32) if isinstance(x, QuantizedArray) else x).astype(np.float64)
    spread = lambda x: np.kron(x, np.ones([size // of for size, of in zip(numbers.shape, x.shape)]))
    numbers = wide(x.values)
    if x.zero_point is not None:
        numbers = numbers - spread(wide(x.zero_point))
    numbers = numbers * spread(wide(x.scale))
    return numbers if x.offset is None else numbers + spread(wide(x.offset))


def random_array(rng, dtype, layout="group", scale="float32", *, zero_point=False, offset=False):
    shape = LAYOUTS[layout]
    scales = jnp.asarray(2.0 ** rng.integers(-6, 3, shape), scale)
    zeros = jnp.asarray(rng.integers(0, 8, shape), jnp.int32) if zero_point else None
    offsets = jnp.asarray(rng.normal(size=shape), jnp.float32) if offset else None
    return QuantizedArray(values(rng, jnp.dtype(dtype)), scales, zeros, offsets)


def assert_close(got, want):
    """As float32 sums in different orders are, or on a GPU those of TF32."""
    tolerance = 2e-3 if jax.default_backend() == "gpu" else 1e-5
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(np.asarray(want)).max())


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", quantized.VALUES)
def test_an_array_is_what_it_stands_for(rng, dtype, layout):
    for zero_point, offset in ((False, False), (True, False), (True, True)):
        x = random_array(rng, dtype, layout, zero_point=zero_point, offset=offset)
        assert (x.shape, x.ndim, x.size, x.dtype) == ((K, N), 2, K * N, np.float32)
        assert tuple(np.multiply(x.block, x.scale.shape)) == x.shape
        np.testing.assert_allclose(x.dequantize(), expected(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", quantized.SCALES)
def test_types_of_scales(rng, scale):
    x = random_array(rng, "int4", scale=scale)
    assert x.dtype == (scale if scale in ("float32", "bfloat16", "float16") else jnp.bfloat16)
    np.testing.assert_array_equal(x.dequantize(jnp.float32), expected(x))
    assert x.dequantize().dtype == x.dtype
    assert QuantizedArray(x.values, x.scale, dtype=jnp.float16).dequantize().dtype == np.float16


def test_scales_may_have_a_scale():
    """NVFP4."""
    rng = np.random.default_rng(0)
    scales = QuantizedArray(jnp.abs(values(rng, jnp.dtype("float8_e4m3fn"), (4, N))), jnp.full((1, 1), 2.0**-7))
    x = QuantizedArray(values(rng, jnp.dtype("float4_e2m1fn")), scales)
    assert x.dtype == np.float32 and x.block == (16, 1)
    np.testing.assert_array_equal(x.dequantize(), expected(x))


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**100])
def test_extreme_scales(rng, scale):
    x = QuantizedArray(values(rng, jnp.dtype("int4")), jnp.full((1, N), scale, jnp.float32))
    np.testing.assert_array_equal(x.dequantize(), expected(x))


def test_nan_and_infinity_stay():
    x = QuantizedArray(jnp.array([[jnp.nan, jnp.inf, -jnp.inf, 1]], jnp.float8_e5m2), jnp.ones((1, 1), jnp.bfloat16))
    np.testing.assert_array_equal(x.dequantize().astype(np.float32), [[np.nan, np.inf, -np.inf, 1]])
    assert np.isnan(np.asarray(sk.matmul(x, jnp.ones((4, 2), jnp.bfloat16)).astype(np.float32))).all()


@pytest.mark.parametrize("block", [None, 16, (16, 8), (None, None), (1, None)])
@pytest.mark.parametrize("dtype", quantized.VALUES)
def test_quantizing_finds_the_nearest_numbers(rng, dtype, block):
    x = jnp.asarray(rng.normal(size=(K, N)) + 0.5, jnp.float32).at[:16, :8].set(0)
    found = quantize(x, dtype, block=block)
    scale = np.kron(found.scale, np.ones(found.block))
    if dtype in ("int4", "int8", "uint4", "uint8"):
        step = scale / 2 * (2 if dtype[0] == "u" else 1)  # its zero point is rounded, too
    else:
        info = ml_dtypes.finfo(dtype)
        step = np.maximum(np.abs(x) * 2.0 ** -(info.nmant + 1), scale * float(info.smallest_subnormal) / 2)
    assert (np.abs(np.asarray(found.dequantize()) - x) <= step * 1.001).all()
    assert (np.asarray(found.dequantize())[:16, :8] == 0).all() or dtype[0] == "u"
    assert (found.zero_point is not None) == (dtype[0] == "u")


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (4, 0), (2, 6, 4)])
def test_quantizing_any_shape(shape):
    x = quantize(jnp.ones(shape, jnp.bfloat16), "int8")
    assert x.shape == shape and x.dtype == jnp.bfloat16 and (np.asarray(x.dequantize(), np.float32) == 1).all()


OF_K = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
SIZES = jnp.array([3, 0, 5])
PRODUCTS = {
    "matmul": (sk.matmul, (8, K), (K, N)),
    "dot_general": (lambda x, w: sk.dot_general(x, w, (((1,), (1,)), ((), ()))), (8, K), (N, K)),
    "einsum": (lambda x, w: sk.einsum("mk,kn->nm", x, w), (8, K), (K, N)),
    "linear": (lambda x, w: sk.linear(x, w, activation="relu"), (8, K), (K, N)),
    "gated_linear": (lambda x, w: sk.gated_linear(x, w, w), (8, K), (K, N)),
    "ragged_dot": (lambda x, w: sk.ragged_dot(x, w, SIZES), (8, K), (3, K, N)),
    "ragged_dot_general": (lambda x, w: sk.ragged_dot_general(x, w, SIZES, OF_K), (8, K), (8, N)),
    "ragged_gated": (lambda x, w: sk.ragged_gated(x, w, w, SIZES), (8, K), (3, K, N)),
}


@pytest.mark.parametrize("sides", ["rhs", "lhs", "both"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_takes_them(rng, name, sides):
    product, *shapes = PRODUCTS[name]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    given = [quantize(x, "int4", block=4) if sides in (side, "both") else x for x, side in zip(arrays, ("lhs", "rhs"))]
    as_arrays = [jnp.asarray(x) for x in given]
    want = product(*as_arrays)
    for function in (product, jax.jit(product)):
        got = function(*given)
        assert got.dtype == want.dtype
        # Kernels round the numbers to bfloat16 less often.
        exact = np.asarray(want, np.float64)
        assert np.linalg.norm(np.asarray(got, np.float64) - exact) <= 2**-6 * np.linalg.norm(exact)


def test_derivatives(rng):
    x, w = jnp.asarray(rng.normal(size=(8, K)), jnp.float32), random_array(rng, "int8", zero_point=True, offset=True)

    def loss(x, scale, offset, product):
        return (product(x, QuantizedArray(w.values, scale, w.zero_point, offset)) ** 2).sum()

    got = jax.grad(loss, (0, 1, 2))(x, w.scale, w.offset, sk.matmul)
    want = jax.grad(loss, (0, 1, 2))(x, w.scale, w.offset, lambda x, w: jnp.matmul(x, w.dequantize()))
    for ours, xlas in zip(got, want):
        assert_close(ours, xlas)


def test_layers_and_batches(rng):
    x, w = (
        jnp.asarray(rng.normal(size=(8, K)), jnp.float32),
        quantize(rng.normal(size=(5, K, K)).astype(np.float32), "int4"),
    )
    of_each = [QuantizedArray(*jax.tree.map(lambda x, i=i: x[i], (w.values, w.scale))) for i in range(5)]
    mapped = jax.vmap(sk.matmul, (None, 0))(x, w)
    assert_close(mapped, [sk.matmul(x, one) for one in of_each])
    scanned, _ = jax.lax.scan(lambda x, w: (sk.matmul(x, w), None), x, w)
    assert_close(scanned, functools.reduce(sk.matmul, of_each, x))


def test_a_pytree_by_names(rng):
    x = random_array(rng, "uint4", zero_point=True)
    leaves, structure = jax.tree_util.tree_flatten_with_path(x)
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".values", ".scale", ".zero_point"]
    again = jax.tree.unflatten(structure, [leaf for _, leaf in leaves])
    np.testing.assert_array_equal(again.dequantize(), x.dequantize())
    assert repr(again) == "QuantizedArray(uint4[64, 24], float32[4, 24], zero_point=int32[4, 24], dtype=float32)"
    assert jax.tree.map(lambda x: None, x) is not None  # unflattened without arrays


@pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="this process has one device")
def test_shardings(rng):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    x, w = jnp.asarray(rng.normal(size=(8, K)), jnp.float32), random_array(rng, "int4")
    placed = jax.device_put(w, jax.tree.map(lambda _: sharding, w))
    assert_close(jax.jit(sk.matmul)(x, placed), sk.matmul(x, w))


def packed(numbers, bits, order=None):
    """Words of numbers along the last dimension, by Python's integers."""
    count = 32 // bits
    order = range(count) if order is None else order
    words = [
        [
            sum(int(row[i + of]) % 2**bits << bits * part for part, of in enumerate(order))
            for i in range(0, len(row), count)
        ]
        for row in numbers
    ]
    return np.array(words, np.uint32)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("order", [None, (0, 2, 4, 6, 1, 3, 5, 7)])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
def test_words(rng, dtype, order, axis):
    bits, order = ml_dtypes.iinfo(dtype).bits, order if "4" in dtype else order and (0, 2, 1, 3)
    numbers = np.asarray(values(rng, jnp.dtype(dtype), (6, 16))).astype(np.int32)
    words = packed(numbers, bits, order)
    words, numbers = (words.T, numbers.T) if axis == 0 else (words, numbers)
    for given in (words, words.view(np.int32)):
        got = from_words(given, bits, axis=axis, order=order, signed=dtype[0] == "i")
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.int32), numbers)


def test_a_word_of_each_library():
    """0x76543210 holds 0 to 7 from its low bits up."""
    word = np.array([[0x76543210]], np.uint32)
    assert from_words(word, 4).astype(np.int32).tolist() == [list(range(8))]  # MLX, compressed-tensors
    assert from_words(word, 4, axis=0).shape == (8, 1)  # GPTQ
    awq = from_words(word, 4, order=(0, 2, 4, 6, 1, 3, 5, 7)).astype(np.int32).tolist()
    assert awq == [[0, 4, 1, 5, 2, 6, 3, 7]]


def test_arrays_of_qwix(rng):
    qwix = pytest.importorskip("qwix")
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, K), (K, N)))
    theirs = qwix.quantize(w, qtype=jnp.int4, channelwise_axes=(1,))
    assert_close(sk.matmul(x, theirs), x @ qwix.dequantize(theirs))
    assert "s4 (scale" in str(sk.plan(sk.matmul, x, theirs).problem)


def test_plans_of_shapes_are_of_arrays(rng):
    x, w = jax.ShapeDtypeStruct((8, K), jnp.float32), random_array(rng, "int4")
    plan = sk.plan(x, w)
    assert plan.problem == sk.plan(x, w.dequantize()).problem
    assert plan.reasons[-1].startswith("rhs is planned as the array that it stands for")
    assert plan.reasons[-1].endswith("read int4 with scales")


REFUSED = {
    "values has dtype float32; it must be int4, uint4": lambda v: QuantizedArray(
        v.astype(jnp.float32), jnp.ones((1, 1))
    ),
    "scale has dtype int32; it must be float32": lambda v: QuantizedArray(v, jnp.ones((1, 1), int)),
    "zero_point has dtype bool": lambda v: QuantizedArray(v, jnp.ones((1, 1)), jnp.ones((1, 1), bool)),
    "offset has dtype int32": lambda v: QuantizedArray(v, jnp.ones((1, 1)), offset=jnp.ones((1, 1), int)),
    "values is str; it must be an array": lambda v: QuantizedArray("4", jnp.ones((1, 1))),
    "dtype=int8 must be float32, bfloat16 or float16": lambda v: QuantizedArray(v, jnp.ones((1, 1)), dtype="int8"),
    "quantize: dtype=float32 must be": lambda v: quantize(jnp.ones((2, 2)), "float32"),
    "quantize: x has dtype int32": lambda v: quantize(jnp.ones((2, 2), int), "int4"),
    "from_words: words has dtype int8": lambda v: from_words(jnp.ones((2, 2), jnp.int8), 4),
}
MISFITS = {
    "scale has shape (3, 1) and values (4, 6)": lambda v: QuantizedArray(v, jnp.ones((3, 1))),
    "scale has shape (1,) and values (4, 6); it must have as many dimensions": lambda v: QuantizedArray(v, jnp.ones(1)),
    "zero_point has shape (8, 6)": lambda v: QuantizedArray(v, jnp.ones((1, 1)), jnp.ones((8, 6))),
    "block=(3, 1) must have a number that divides": lambda v: quantize(jnp.ones((4, 6)), "int4", block=3),
    "block=(4,) must have": lambda v: quantize(jnp.ones((4, 6)), "int4", block=(4,)),
    "bits=3 must be 4 or 8": lambda v: from_words(jnp.ones(2, jnp.uint32), 3),
    "order=(0, 0, 1, 2) must have each": lambda v: from_words(jnp.ones(2, jnp.uint32), 8, order=(0, 0, 1, 2)),
    "words has shape ()": lambda v: from_words(jnp.uint32(1), 8),
}


@pytest.mark.parametrize("why", [*REFUSED, *MISFITS])
def test_refusals(why):
    v = jnp.ones((4, 6), jnp.int4)
    with pytest.raises(TypeError if why in REFUSED else ValueError) as error:
        (REFUSED | MISFITS)[why](v)
    assert why in str(error.value)
