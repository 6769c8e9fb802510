"""Products of float8 by float8, with and without scales, against float64."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax import lax

import jax_streamk as sk
from jax_streamk import QuantizedArray, StreamK
from jax_streamk.accelerate import rewrite
from jax_streamk.tuning import contest, measure

ON_GPU = jax.default_backend() == "gpu"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
AS_IS = ((1,), (0,)), ((), ())
M, N, K = 48, 144, 512
# (rows, neighbours along k), (neighbours along k, columns) that share a scale
BLOCKS = {
    "tensor": ((M, K), (K, N)),
    "row": ((1, K), (K, 1)),
    "block": ((1, 128), (128, 1)),
    "row_by_block": ((1, K), (128, N)),
}


@pytest.fixture
def rng():
    return np.random.default_rng()


def random_floats(rng, dtype, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def random_array(rng, values, shape, block, **options):
    scale = rng.uniform(0.5, 2, [size // of for size, of in zip(shape, block)])
    return QuantizedArray(random_floats(rng, values, *shape), jnp.asarray(scale, jnp.float32), **options)


def both(rng, layout="row", dtypes=(E4M3, E4M3), dtype=jnp.bfloat16):
    return tuple(
        random_array(rng, of, shape, block, dtype=dtype)
        for of, shape, block in zip(dtypes, ((M, K), (K, N)), BLOCKS[layout])
    )


def wide(x):
    return np.asarray(x.dequantize(jnp.float32) if isinstance(x, QuantizedArray) else x).astype(np.float64)


def check(got, lhs, rhs, numbers=AS_IS):
    product = lambda x, y: np.asarray(np.tensordot(x, y, numbers[0]))
    assert_near(got, product(wide(lhs), wide(rhs)), product(abs(wide(lhs)), abs(wide(rhs))))


def assert_near(got, want, absolute):
    """Of the size of bfloat16's rounding, or of what tensor cores lose of a sum of 32 products."""
    rounding = 2.0**-8 if got.dtype == jnp.bfloat16 else 2.0**-22
    bound = rounding * abs(want) + (2.0**-9 if ON_GPU else 2.0**-20) * absolute
    assert (abs(np.asarray(got, np.float64) - want) <= bound).all()


def is_ours(fn, *args):
    plan = sk.plan(fn, *args)
    return plan.kernel is not None and plan.problem.type_a.dtype in (E4M3, E5M2)


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_without_scales(rng, dtypes, out):
    for m, n, k in ((48, 144, 512), (1, 16, 16), (7, 48, 1040), (300, 160, 48)):
        for contract in ((1, 0), (1, 1)):
            shape = (k, n) if contract[1] == 0 else (n, k)
            lhs, rhs = random_floats(rng, dtypes[0], m, k), random_floats(rng, dtypes[1], *shape)
            numbers = ((contract[:1], contract[1:]), ((), ()))
            product = lambda x, y: sk.dot_general(x, y, numbers, preferred_element_type=out)
            assert is_ours(lambda x, y: sk.dot_general(x, y, numbers, None, out, schedule=StreamK()), lhs, rhs)
            got = jax.jit(product)(lhs, rhs)
            assert got.dtype == out and got.shape == (m, n)
            check(got, lhs, rhs, numbers)


def test_presets_and_what_stays_xlas(rng):
    lhs, rhs = random_floats(rng, E4M3, M, K), random_floats(rng, E5M2, K, N)
    for preset in ("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM"):
        product = lambda x, y: sk.matmul(
            x,
            y,
            precision=lax.DotAlgorithmPreset[preset],
            preferred_element_type=jnp.float32,
        )
        assert sk.plan(product, lhs, rhs, device=sk.H200).kernel.startswith("sm90_e4m3_e5m2_f32")
    with pytest.raises(ValueError, match=r"result of .* must be bfloat16 or float32"):
        sk.matmul(lhs, rhs, preferred_element_type=jnp.float16, schedule=StreamK())


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("layout", BLOCKS)
def test_scales(rng, layout, dtypes):
    lhs, rhs = both(rng, layout, dtypes)
    for out in (jnp.bfloat16, jnp.float32):
        product = lambda x, y: sk.matmul(x, y, preferred_element_type=out, schedule=StreamK())
        assert is_ours(product, lhs, rhs)
        check(jax.jit(product)(lhs, rhs), lhs, rhs)


@pytest.mark.parametrize("layout", BLOCKS)
def test_integers_with_scales(rng, layout):
    """Exact products of integers, times scales: not of dequantized arrays, which have the size of bfloat16."""
    lhs, rhs = (
        QuantizedArray(jnp.asarray(rng.integers(-128, 128, x.shape), jnp.int8), x.scale, dtype=x.dtype)
        for x in both(rng, layout)
    )
    product = lambda x, y: sk.matmul(x, y, preferred_element_type=jnp.float32, schedule=StreamK())
    is_exact = not ON_GPU or "block" not in layout  # kernels on Hopper have scales for all of K
    assert (sk.plan(product, lhs, rhs).problem.type_a.dtype == jnp.int8) == is_exact
    got = jax.jit(product)(lhs, rhs)
    want, absolute = wide(lhs) @ wide(rhs), abs(wide(lhs)) @ abs(wide(rhs))
    assert (abs(np.asarray(got, np.float64) - want) <= (2.0**-20 if is_exact else 2.0**-8) * absolute).all()


def test_transposed_operands_and_epilogues(rng):
    lhs, rhs = both(rng, "block")
    turned = QuantizedArray(rhs.values.T, rhs.scale.T, dtype=rhs.dtype)
    numbers = ((1,), (1,)), ((), ())
    product = lambda x, y: sk.dot_general(x, y, numbers, schedule=StreamK())
    assert is_ours(product, lhs, turned)
    check(jax.jit(product)(lhs, turned), lhs, turned, numbers)
    folded = lambda x, y: sk.matmul(x, jax.tree.map(jnp.transpose, y), schedule=StreamK())
    assert is_ours(folded, lhs, turned)
    bias = jnp.asarray(rng.normal(size=N), jnp.bfloat16)
    fused = lambda x, y, bias: sk.linear(x, y, bias, activation="silu", schedule=StreamK())
    assert is_ours(fused, lhs, rhs, bias)
    want = jax.nn.silu(wide(lhs) @ wide(rhs) + np.asarray(bias, np.float64))
    np.testing.assert_allclose(jax.jit(fused)(lhs, rhs, bias).astype(jnp.float32), want, rtol=0.02, atol=0.5)


def test_other_formats_are_dequantized(rng):
    """Zero points, blocks along k that are shorter than a k-tile on a GPU, and matrices of other types."""
    lhs, rhs = both(rng)
    zero = QuantizedArray(lhs.values, lhs.scale, jnp.ones(lhs.scale.shape, jnp.float32), dtype=jnp.bfloat16)
    integers = sk.quantize(jnp.asarray(rng.normal(size=(K, N)), jnp.bfloat16), "int8")
    short = random_array(rng, E4M3, (K, N), (32, 1), dtype=jnp.bfloat16)
    for x, y in ((zero, rhs), (lhs, integers), (lhs, short)):
        got = np.asarray(jax.jit(sk.matmul)(x, y), np.float64)
        want = wide(x) @ wide(y)
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize("layout", ["row", "block"])
def test_derivatives_are_those_of_dequantized_arrays(rng, layout):
    lhs, rhs = both(rng, layout, dtype=jnp.float32)

    def loss(product):
        def of(scale, other):
            x, y = (
                QuantizedArray(lhs.values, scale, dtype=lhs.dtype),
                QuantizedArray(rhs.values, other, dtype=rhs.dtype),
            )
            return jnp.sum(jnp.sin(product(x, y)))

        return jax.grad(of, (0, 1))(lhs.scale, rhs.scale)

    want = loss(lambda x, y: x.dequantize() @ y.dequantize())
    for got, expected in zip(loss(sk.matmul), want):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got / scale, expected / scale, atol=0.05 if ON_GPU else 1e-4)


def test_vmap_and_scan(rng):
    pairs = [both(rng, "block") for _ in range(3)]
    lhs, rhs = (jax.tree.map(lambda *xs: jnp.stack(xs), *side) for side in zip(*pairs))
    for got in (jax.vmap(sk.matmul)(lhs, rhs), lax.scan(lambda _, xy: (None, sk.matmul(*xy)), None, (lhs, rhs))[1]):
        for out, (x, y) in zip(got, pairs):
            check(out, x, y)
    for out, (x, _) in zip(jax.vmap(sk.matmul, (0, None))(lhs, pairs[0][1]), pairs):
        check(out, x, pairs[0][1])


SIZES = np.array([5, 0, 20, 9])


def check_groups(got, lhs, rhs):
    lhs, rhs, ends = wide(lhs), wide(rhs), np.cumsum(SIZES)
    for matrix, begin, end in zip(rhs, ends - SIZES, ends):
        check(got[begin:end], lhs[begin:end], matrix)
    assert not np.asarray(got[ends[-1] :], np.float32).any()


def test_groups_without_scales(rng):
    lhs, rhs = random_floats(rng, E4M3, 40, 96), random_floats(rng, E5M2, 4, 96, 48)
    rows = rng.integers(0, 40, 34)
    product = lambda x, w, **options: sk.ragged_dot(x, w, SIZES, preferred_element_type=jnp.bfloat16, **options)
    assert is_ours(product, lhs, rhs)
    check_groups(product(lhs, rhs), lhs, rhs)
    check_groups(product(lhs, rhs, lhs_indices=rows), lhs[rows], rhs)


@pytest.mark.parametrize("block, of_weights", [((40, 256), (256, 48)), ((1, 256), (256, 1)), ((1, 128), (128, 48))])
def test_groups_with_scales(rng, block, of_weights):
    lhs = random_array(rng, E4M3, (40, 256), block, dtype=jnp.bfloat16)
    rhs = random_array(rng, E4M3, (4, 256, 48), (1, *of_weights), dtype=jnp.bfloat16)
    rows = rng.integers(-50, 50, 34)
    assert is_ours(lambda x, y: sk.ragged_dot(x, y, SIZES), lhs, rhs)
    assert is_ours(lambda x, y: sk.ragged_dot(x, y, SIZES, lhs_indices=rows), lhs, rhs)
    check_groups(jax.jit(sk.ragged_dot)(lhs, rhs, SIZES), lhs, rhs)
    chosen = wide(lhs)[np.clip(np.where(rows < 0, rows + 40, rows), 0, 39)]
    check_groups(jax.jit(sk.ragged_dot)(lhs, rhs, SIZES, lhs_indices=rows), chosen, rhs)
    dots = [sk.ragged_dot(lhs, rhs, SIZES, preferred_element_type=jnp.float32)] * 2
    got = jax.jit(sk.ragged_gated)(lhs, rhs, rhs, SIZES)
    np.testing.assert_allclose(got.astype(jnp.float32), jax.nn.silu(dots[0]) * dots[1], rtol=0.05, atol=0.5)


def moved(x, at):
    """An array, or its values and scales, whose first dimension is another one."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, at), x)


def transposed(x):
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), x)


@pytest.mark.parametrize("is_nk", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_groups_anywhere_in_memory(rng, at, is_nk):
    lhs = random_array(rng, E4M3, (40, 256), (1, 256), dtype=jnp.bfloat16)
    rhs = random_array(rng, E4M3, (4, 256, 48), (1, 128, 1), dtype=jnp.bfloat16)
    given = moved(transposed(rhs) if is_nk else rhs, at)
    contract = 2 if is_nk else 1 - at
    numbers = lax.RaggedDotDimensionNumbers((((1,), (contract,)), ((), ())), (0,), (at,))
    product = lambda x, y: sk.ragged_dot_general(x, y, SIZES, numbers)
    assert is_ours(product, lhs, given)
    check_groups(jax.jit(product)(lhs, given), lhs, rhs)
    folded = lambda x, y: sk.ragged_dot(x, transposed(moved(y, at)) if is_nk else moved(y, at), SIZES)
    assert is_ours(folded, lhs, given)
    check_groups(jax.jit(folded)(lhs, given), lhs, rhs)


@pytest.mark.parametrize("is_nk", [False, True])
@pytest.mark.parametrize("at", [(0, 1), (1, 0), (1, 1)])
def test_batches_anywhere_in_memory(rng, at, is_nk):
    lhs = random_array(rng, E4M3, (3, 32, 256), (1, 1, 128), dtype=jnp.bfloat16)
    rhs = random_array(rng, E5M2, (3, 256, 48), (1, 128, 1), dtype=jnp.bfloat16)
    given = moved(lhs, at[0]), moved(transposed(rhs) if is_nk else rhs, at[1])
    contract = (2,), (2 if is_nk else 1 - at[1],)
    product = lambda x, y: sk.dot_general(x, y, (contract, ((at[0],), (at[1],))), schedule=StreamK())
    assert is_ours(product, *given)
    for got, x, y in zip(jax.jit(product)(*given), wide(lhs), wide(rhs)):
        check(got, x, y)


@pytest.mark.parametrize("columns", [1, 16])
def test_groups_of_what_is_contracted(rng, columns):
    lhs, rhs = (random_array(rng, of, (40, n), (40, columns), dtype=jnp.bfloat16) for of, n in ((E4M3, 64), (E5M2, 48)))
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    product = lambda x, y: sk.ragged_dot_general(x, y, SIZES, numbers)
    assert is_ours(product, lhs, rhs) == (columns == 1 or not ON_GPU)
    got = jax.jit(product)(lhs, rhs)
    ends = np.cumsum(SIZES)
    for matrix, begin, end in zip(np.asarray(got, np.float64), ends - SIZES, ends):
        want = wide(lhs)[begin:end].T @ wide(rhs)[begin:end]
        assert abs(matrix - want).max(initial=0) <= 0.02 * abs(want).max(initial=1)


def test_plan_says_the_scales(rng):
    lhs, rhs = both(rng, "block")
    plan = sk.plan(lambda x, y: sk.matmul(x, y, schedule=StreamK()), lhs, rhs)
    assert "e4m3 (scale f32 per 1 x 128) x e4m3 (scale f32 per 128 x 1) -> bf16" in str(plan)
    assert not re.search("dequantize", str(plan))


def test_accelerate_takes_products_of_float8(rng):
    lhs, rhs = random_floats(rng, E4M3, 256, 1024), random_floats(rng, E5M2, 1024, 512)
    program = lambda x, y: jax.nn.relu(lax.dot_general(x, y, AS_IS, preferred_element_type=jnp.bfloat16))
    fast = sk.accelerate(program, schedule=StreamK())
    assert "_e4m3_e5m2_bf16_rr_" in str(fast.explain(lhs, rhs))
    np.testing.assert_allclose(
        *(np.asarray(jax.jit(f)(lhs, rhs), np.float32) for f in (fast, program)), rtol=0.01, atol=0.1
    )


def test_accelerate_takes_a_training_step_by_flax(rng):
    """Its forward products, and both of each layer's backward ones."""

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.relu(nn.Dense(128, dot_general_cls=fp8_ops.Fp8DotGeneralOp, dtype=jnp.bfloat16)(x))
            return x

    model, x = Layers(), jnp.asarray(rng.normal(size=(64, 256)), jnp.bfloat16)
    variables = model.init(jax.random.key(0), x)

    def step(variables, x):
        loss = lambda variables: jnp.sum(jnp.tanh(model.apply(variables, x).astype(jnp.float32) / 16))
        return jax.value_and_grad(loss, allow_int=True)(variables)

    fast = sk.accelerate(step, where=lambda problem: True)
    dtypes = [row.dtypes for row in fast.explain(variables, x).rows if row.plan.kernel]
    forward, backward = "float8_e4m3fn x float8_e4m3fn -> bf16", "float8_e5m2 x float8_e4m3fn -> bf16"
    assert sorted(dtypes) == [*[forward] * 2, *[backward] * 3]
    for got, want in zip(*(map(jnp.asarray, jax.tree.leaves(jax.jit(f)(variables, x))) for f in (fast, step))):
        # A sum that is rounded otherwise may change which float8 number the next one becomes.
        assert jnp.linalg.norm(got - want) <= (0.2 if ON_GPU else 0.02) * jnp.linalg.norm(want) + 1e-6


@pytest.mark.parametrize("shape", [(), (1,), (48, 1)])
def test_accelerate_finds_scales_of_either_side(rng, shape):
    lhs, rhs = random_floats(rng, E4M3, M, K), random_floats(rng, E5M2, K, N)
    scale = jnp.asarray(rng.uniform(0.5, 2, shape), jnp.bfloat16)

    def program(lhs, rhs, scale):
        x = lhs.astype(jnp.bfloat16) * jnp.broadcast_to(scale, lhs.shape)
        return x @ rhs.astype(jnp.bfloat16)

    fast = sk.accelerate(program, where=lambda problem: True)
    assert "_e4m3_e5m2_bf16_rr_" in str(fast.explain(lhs, rhs, scale))
    wanted = np.asarray(lhs, np.float64) * np.asarray(scale, np.float64) @ wide(rhs)
    got = np.asarray(jax.jit(fast)(lhs, rhs, scale), np.float64)
    assert abs(got - wanted).max() <= 0.01 * abs(wanted).max()


def test_accelerate_finds_groups(rng):
    lhs, rhs = random_floats(rng, E5M2, 40, 96), random_floats(rng, E4M3, 4, 96, 48)
    of_rows, of_columns = (jnp.asarray(rng.uniform(0.5, 2, shape), jnp.bfloat16) for shape in ((40, 1), (4, 1, 48)))

    def program(lhs, rhs, of_rows, of_columns):
        x = lhs.astype(jnp.bfloat16) * jnp.broadcast_to(of_rows, lhs.shape)
        w = rhs.astype(jnp.bfloat16) * jnp.broadcast_to(of_columns, rhs.shape)
        return lax.ragged_dot(x, w, jnp.asarray(SIZES))

    fast, given = sk.accelerate(program, where=lambda problem: True), (lhs, rhs, of_rows, of_columns)
    assert "_e5m2_e4m3_bf16_rr_" in str(fast.explain(*given))
    lhs, rhs = (QuantizedArray(x, s, dtype=jnp.bfloat16) for x, s in ((lhs, of_rows), (rhs, of_columns)))
    check_groups(jax.jit(fast)(*given), lhs, rhs)


def test_accelerate_leaves_arrays_that_others_read(rng):
    lhs, rhs = random_floats(rng, E4M3, M, K), random_floats(rng, E4M3, K, N)

    def program(lhs, rhs):
        x = lhs.astype(jnp.bfloat16) * jnp.full(lhs.shape, 0.5, jnp.bfloat16)
        return x @ rhs.astype(jnp.bfloat16), x

    assert "float8_e4m3fn x" not in str(sk.accelerate(program, where=lambda problem: True).explain(lhs, rhs))


def dot(x, y, dtype=jnp.bfloat16):
    return lax.dot(x, y, preferred_element_type=dtype)


# Programs that scale what they multiply, by scales of rows (M, 1) and of columns (1, N); and what the kernel reads.
SCALED = {
    "rows and columns": (lambda x, y, s, t: dot(x, y) * s * t, "bf16 per 1 x 512", "bf16 per 512 x 1"),
    "before the product": (lambda x, y, s, t: s * (t * dot(x, y)), "bf16 per 1 x 512", "bf16 per 512 x 1"),
    "rows": (lambda x, y, s, t: dot(x, y) * s, "bf16 per 1 x 512", "f32 per 512 x 144"),
    "columns": (lambda x, y, s, t: dot(x, y) * t[0], "f32 per 48 x 512", "bf16 per 512 x 1"),
    "for all": (lambda x, y, s, t: dot(x, y) * s[0] * t[0, 0], "f32 per 48 x 512", "f32 per 512 x 144"),
    "a matrix of both": (lambda x, y, s, t: dot(x, y) * (s * t), "bf16 per 1 x 512", "bf16 per 512 x 1"),
    "converted": (
        lambda x, y, s, t: dot(x, y, jnp.float32) * (s * t).astype(jnp.float32),
        "bf16 per 1 x 512",
        "bf16 per 512 x 1",
    ),
    "of a wider result": (
        lambda x, y, s, t: dot(x, y).astype(jnp.float32) * s.astype(jnp.float32),
        "f32 per 1 x 512",
        "f32 per 512 x 144",
    ),
    "twice": (lambda x, y, s, t: dot(x, y) * s * s * t, "f32 per 1 x 512", "bf16 per 512 x 1"),
}


def scales_of_result(rng):
    return (jnp.asarray(rng.uniform(0.5, 2, shape), jnp.bfloat16) for shape in ((M, 1), (1, N)))


def problem_of(program, *args, where=lambda problem: True):
    (row,) = sk.accelerate(program, where=where).explain(*args).rows
    return str(row.plan.problem)


def check_program(program, product, *args):
    """``product`` is the same in float64, of the arrays that are given."""
    got, by_xla = (jax.jit(f)(*args) for f in (sk.accelerate(program, where=lambda problem: True), program))
    assert (got.dtype, got.shape) == (by_xla.dtype, by_xla.shape)
    wides = [wide(x) for x in args]
    assert_near(got, product(*wides), product(*map(abs, wides)))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("name", SCALED)
def test_accelerate_finds_scales_of_a_result(rng, name, dtypes):
    program, of_lhs, of_rhs = SCALED[name]
    lhs, rhs = random_floats(rng, dtypes[0], M, K), random_floats(rng, dtypes[1], K, N)
    args = lhs, rhs, *scales_of_result(rng)
    assert re.search(rf"\(scale {of_lhs}\) x e4m3 \(scale {of_rhs}\)", problem_of(program, *args))
    with jax.enable_x64(True):
        ones = jnp.ones((M, 1), dtypes[0]), jnp.ones((1, N), E4M3)
        factors = np.asarray(program(*ones, *(jnp.asarray(wide(x)) for x in args[2:])), np.float64)
    check_program(program, lambda x, y, *_: x @ y * factors, *args)


def test_scales_of_a_result_with_several_dimensions(rng):
    x, w = random_floats(rng, E4M3, 3, 16, 128), random_floats(rng, E4M3, 128, 48)
    y = random_floats(rng, E4M3, 3, 48, 128)
    of_rows, of_text, of_columns, of_matrices = (
        jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in ((3, 16, 1), (3, 1, 1), (48,), (3, 1, 48))
    )
    for numbers, *args in (
        ("btk,kn->btn", x, w, of_rows, of_columns),
        ("btk,kn->btn", x, w, of_text, of_columns),
        ("btk,bnk->btn", x, y, of_rows, of_matrices),
        ("btk,bnk->btn", x, y, of_text, of_columns),
    ):
        program = lambda x, y, s, t, xp=jnp, **options: xp.einsum(numbers, x, y, **options) * s * t
        in_float32 = functools.partial(program, preferred_element_type=jnp.float32)
        assert problem_of(in_float32, *args).count("scale f32") == 2
        check_program(in_float32, functools.partial(program, xp=np), *args)


def test_what_follows_scales_of_a_result(rng):
    lhs, rhs = random_floats(rng, E4M3, M, K), random_floats(rng, E4M3, K, N)
    args = lhs, rhs, *scales_of_result(rng), jnp.asarray(rng.normal(size=N), jnp.bfloat16)
    program = lambda x, y, s, t, bias: jax.nn.relu(dot(x, y) * s * t + bias)
    assert problem_of(program, *args).endswith("relu(A @ B + bias)")
    check_program(program, lambda x, y, s, t, bias: np.maximum(x @ y * s * t + bias, 0), *args)


LEFT = {
    "read elsewhere": lambda x, y, s, t: ((z := dot(x, y)) * s, z.max()),
    "a matrix": lambda x, y, s, t: dot(x, y) * (s + t),
    "rounded between": lambda x, y, s, t: dot(x, y, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32) * s,
    "rounded to eight bits": lambda x, y, s, t: lax.dot(x, y).astype(jnp.bfloat16) * s,
}


@pytest.mark.parametrize("name", LEFT)
def test_results_whose_scales_stay_apart(rng, name):
    lhs, rhs = random_floats(rng, E4M3, M, K), random_floats(rng, E4M3, K, N)
    args = lhs, rhs, *scales_of_result(rng)
    assert "scale" not in str(sk.accelerate(LEFT[name], where=lambda problem: True).explain(*args).rows[0].plan)
    for got, want in zip(*(jax.tree.leaves(jax.jit(f)(*args)) for f in (sk.accelerate(LEFT[name]), LEFT[name]))):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), rtol=0.02, atol=0.1)


def test_transformed_scales_of_a_result(rng):
    lhs, rhs = random_floats(rng, E4M3, 3, M, K), random_floats(rng, E4M3, K, N)
    s, t = (x.astype(jnp.float32) for x in scales_of_result(rng))
    program = lambda x, y, s, t: dot(x, y, jnp.float32) * s * t
    fast = sk.accelerate(program, where=lambda problem: True)
    want = np.asarray(wide(lhs) @ wide(rhs) * wide(s) * wide(t))
    for got in (
        jax.vmap(fast, (0, None, None, None))(lhs, rhs, s, t),
        lax.scan(lambda _, x: (None, fast(x, rhs, s, t)), None, lhs)[1],
        sk.accelerate(jax.vmap(program, (0, None, None, None)), where=lambda problem: True)(lhs, rhs, s, t),
    ):
        np.testing.assert_allclose(got, want, rtol=0.01, atol=1e-3 * abs(want).max())
    gradients = [jax.grad(lambda s, t: jnp.sum(jnp.sin(f(lhs[0], rhs, s, t) / 64)), (0, 1)) for f in (fast, program)]
    for got, expected in zip(*(gradient(s, t) for gradient in gradients)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=(0.05 if ON_GPU else 1e-4) * abs(expected).max())


@pytest.mark.parametrize("rows, is_nk, is_found", [(16, True, True), (4096, False, True), (4096, True, False)])
def test_scales_of_a_result_on_a_gpu(monkeypatch, rows, is_nk, is_found):
    """Where the product alone is left to XLA, so is what it scales."""
    monkeypatch.setattr(rewrite, "device_of", lambda _: sk.H200)
    n, k = 7168, 4096
    numbers = (((1,), (1 if is_nk else 0,)), ((), ()))
    program = lambda x, y, s, t: lax.dot_general(x, y, numbers, preferred_element_type=jnp.bfloat16) * s * t
    shapes = ((rows, k), E4M3), ((n, k) if is_nk else (k, n), E4M3), ((rows, 1), jnp.bfloat16), ((1, n), jnp.bfloat16)
    (row,) = sk.accelerate(program).explain(*(jax.ShapeDtypeStruct(*x) for x in shapes)).rows
    assert row.is_ours == is_found and ("scale" in str(row.plan.problem)) == is_found


def test_tuning_compares_with_xlas_product(rng):
    lhs, rhs = both(rng, "block")
    plan = sk.plan(lambda x, y: sk.matmul(x, y, schedule=StreamK()), lhs, rhs)
    memory = measure.Memory(plan.device)
    (operands, *_) = contest.operands_of(plan, memory)
    ours, theirs = (np.asarray(jax.jit(f(plan))(*operands), np.float32) for f in (contest.ours, contest.xlas))
    np.testing.assert_allclose(ours, theirs, atol=0.02 * np.abs(theirs).max())
