"""``accelerate`` of programs that dequantize: their products are by the numbers, where nothing else is faster."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streamk as sk
from jax_streamk import QuantizedArray, SplitK, accelerate
from jax_streamk.accelerate import rewrite
from jax_streamk.tuning import tune, tuned

M, K, N = 5, 192, 37
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's planner may let XLA dequantize")


def everything(problem):
    return True


def integers(dtype, *shape):
    limits = jnp.iinfo(dtype)
    return jnp.asarray(np.random.default_rng(shape).integers(limits.min, limits.max + 1, shape), dtype)


def normal(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def scales(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(shape).uniform(0.5, 2, shape), dtype)


def words(*shape):
    return jnp.asarray(np.random.default_rng(shape).integers(0, 2**32, shape, dtype=np.uint32))


def spread(xp, s, dtype):
    return xp.repeat(s.astype(dtype), K // len(s), 0)


def in_groups(q, s, dtype, zero=None):
    grouped = q.astype(dtype).reshape(len(s), K // len(s), N)
    grouped = grouped if zero is None else grouped - zero
    return (grouped * s.astype(dtype)[:, None]).reshape(K, N)


def unpacked(xp, w, bits=4):
    """(n, k) numbers that words have side by side."""
    shifts = xp.arange(0, 32, bits, dtype=xp.uint32)
    return ((w[..., None] >> shifts) & (2**bits - 1)).reshape(len(w), -1)


def of_gptq(xp, w):
    """(k, n) numbers that words have one above the other."""
    shifts = xp.arange(0, 32, 4, dtype=xp.uint32)[None, :, None]
    return ((w[:, None] >> shifts) & 15).reshape(-1, w.shape[1])


def in_blocks(q, s, dtype):
    """Blocks of 64 x 37."""
    return (q.astype(dtype).reshape(3, 64, N) * s.astype(dtype).reshape(3, 1, 1)).reshape(K, N)


def by_scale(xp, dtype, q, s):
    return q.astype(dtype) * s.astype(dtype)


def by_scales(xp, dtype, q, s):
    return in_groups(q, s, dtype)


def along_k(xp, dtype, w, z, s):
    numbers = of_gptq(xp, w).astype(xp.int32) - spread(xp, unpacked(xp, z), xp.int32)[:, :N]
    return numbers.astype(dtype) * spread(xp, s, dtype)


S4, U4, S8, U8 = (integers(dtype, K, N) for dtype in (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8))
F8 = normal(K, N).astype(jnp.float8_e4m3fn)
F4 = normal(K, N).astype(jnp.float4_e2m1fn)
MX = jnp.exp2(normal(K // 32, N).round()).astype(jnp.float8_e8m0fnu)
# A matrix (K, N) of some arrays, by jnp or, in float64, by numpy; and what the kernel then reads.
MATRICES = {
    "scale per column": (by_scale, (S4, scales(1, N)), "s4 (scale bf16 per 192 x 1)"),
    "scale per tensor": (by_scale, (S8, scales()), "s8 (scale bf16 per 192 x 37)"),
    "no scale": (lambda xp, dt, q: q.astype(dt), (S8,), "s8 (scale f32 per 192 x 37)"),
    "a number": (lambda xp, dt, q: q.astype(dt) * 0.5, (S8,), "s8 (scale bf16 per 192 x 37)"),
    "groups of 32": (by_scales, (S4, scales(K // 32, N)), "s4 (scale bf16 per 32 x 1)"),
    "groups of 64": (by_scales, (U8, scales(3, N)), "u8 (scale bf16 per 64 x 1)"),
    "repeated": (
        lambda xp, dt, q, s: q.astype(dt) * spread(xp, s, dt),
        (S4, scales(6, N)),
        "s4 (scale bf16 per 32 x 1)",
    ),
    "blocks": (lambda xp, dt, q, s: in_blocks(q, s, dt), (F8, scales(3, 1)), "e4m3 (scale bf16 per 64 x 37)"),
    "rounded": (
        lambda xp, dt, q, s: in_groups(q, s, xp.promote_types(dt, np.float32)).astype(dt),
        (S4, scales(6, N, dtype=jnp.float32)),
        "s4 (scale f32 per 32 x 1)",
    ),
    "MX": (by_scales, (F4, MX), "e2m1 (scale e8m0 per 32 x 1)"),
    "two scales": (
        lambda xp, dt, q, s, t: in_groups(q, s, dt) * t.astype(dt),
        (F4, MX, scales(dtype=jnp.float32)),
        "e2m1 (scale f32 per 32 x 1)",
    ),
    "zero point before": (
        lambda xp, dt, q, z, s: (q.astype(xp.int32) - spread(xp, z, xp.int32)).astype(dt) * spread(xp, s, dt),
        (U4, integers(jnp.uint4, 6, N), scales(6, N)),
        "u4 (scale bf16 per 32 x 1, zero u4)",
    ),
    "zero point after": (
        lambda xp, dt, q, z, s: in_groups(q, s, dt, z.astype(dt)[:, None]),
        (U4, integers(jnp.uint4, 6, N), scales(6, N)),
        "u4 (scale bf16 per 32 x 1, zero u4)",
    ),
    "zero point of columns": (
        lambda xp, dt, q, z, s: in_groups(q, s, dt, z.astype(dt)),
        (S8, integers(jnp.int8, 1, N), scales(6, N)),
        "s8 (scale bf16 per 32 x 1, zero s8)",
    ),
    "offset": (
        lambda xp, dt, q, s, o: q.astype(dt) * s.astype(dt) + o.astype(dt),
        (U4, scales(1, N), normal(1, N)),
        "u4 (scale bf16 per 192 x 1, offset bf16)",
    ),
    "offset of groups": (
        lambda xp, dt, q, s, o: q.astype(dt) * s.astype(dt) - spread(xp, o, dt),
        (U4, scales(1, N), normal(6, N)),
        "u4 (scale bf16 per 32 x 1, offset bf16)",
    ),
    "transposed": (
        lambda xp, dt, q, s: (q.astype(dt) * s.astype(dt)).T,
        (integers(jnp.int4, N, K), scales(N, 1)),
        "s4 (scale bf16 per 192 x 1)",
    ),
    "words": (
        lambda xp, dt, w, s: ((unpacked(xp, w).astype(np.int8) - xp.int8(8)).astype(dt) * s.astype(dt)).T,
        (words(N, K // 8), scales(N, 1)),
        "u4 (scale bf16 per 192 x 1, zero u4)",
    ),
    "words of four": (
        lambda xp, dt, w, s: (unpacked(xp, w, 8).astype(dt) * s.astype(dt)).T,
        (words(N, K // 4), scales(N, 1)),
        "u8 (scale bf16 per 192 x 1)",
    ),
    "words along k": (
        along_k,
        (words(K // 8, N), words(6, 5), scales(6, N)),
        None,
    ),
}


def problems(fn, *args, where=everything):
    """The problems of our products."""
    rows = accelerate(fn, where=where).explain(*args).rows
    return [str(row.plan.problem) for row in rows if row.is_ours]


def assert_as_exact(fn, want, *args, where=everything):
    """A program's results have its types, and no more than twice its errors."""
    theirs, ours = jax.jit(fn)(*args), jax.jit(accelerate(fn, where=where))(*args)

    def check(got, xlas, want):
        assert (got.dtype, got.shape, got.weak_type) == (xlas.dtype, xlas.shape, xlas.weak_type)
        errors = [np.abs(np.asarray(x, np.float64) - want).max() for x in (got, xlas)]
        rounding = float(jnp.finfo(got.dtype).eps) * np.abs(want).max()
        assert errors[0] <= 2 * errors[1] + rounding / 4

    jax.tree.map(check, ours, theirs, want)


@on_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_way_to_dequantize(name, dtype):
    matrix, arrays, read = MATRICES[name]
    x = normal(M, K, dtype=dtype)
    fn = lambda x, *arrays: x @ matrix(jnp, x.dtype, *arrays)
    wide = [np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, np.floating) else np.asarray(x) for x in arrays]
    wide = [x.astype(np.int32) if x.dtype.itemsize == 1 and x.dtype != np.float64 else x for x in wide]
    want = np.asarray(x, np.float64) @ matrix(np, np.dtype(np.float64), *wide)
    if np.isfinite(jax.jit(fn)(x, *arrays)).all():
        assert_as_exact(fn, want, x, *arrays)
    (problem,) = problems(fn, x, *arrays)
    read = read and read.replace("bf16 per 192 x 37", f"{'f16' if dtype == 'float16' else 'bf16'} per 192 x 37")
    if read is not None and dtype == "bfloat16":
        assert read in problem
    assert not problem.startswith(f"[{M}, {K}] @ [{K}, {N}], {problem.split(', ')[2].split(' x ')[0]} x bf16 ->")


def column(x, q, s):
    return x @ (q.astype(x.dtype) * s.astype(x.dtype))


X, S = normal(M, K), scales(1, N)
by_arrays = lambda x, q, s: np.asarray(x, np.float64) @ (np.asarray(q, np.float64) * np.asarray(s, np.float64))


@on_cpu
def test_what_a_kernel_fuses():
    bias = normal(N)
    fn = lambda x, q, s, b: jax.nn.relu(column(x, q, s) + b)
    (problem,) = problems(fn, X, S4, S, bias)
    assert "s4" in problem and problem.endswith("relu(A @ B + bias)")
    assert_as_exact(fn, np.maximum(by_arrays(X, S4, S) + np.asarray(bias, np.float64), 0), X, S4, S, bias)
    with_ours = lambda x, w, b: (jax.nn.relu(sk.matmul(x, w) + b), x @ x.T)
    assert problem in problems(with_ours, X, QuantizedArray(S4, S), bias)


@on_cpu
def test_a_function_that_dequantizes_is_looked_into():
    dequantize = jax.jit(lambda q, s: q.astype(jnp.bfloat16) * s)
    fn = lambda x, q, s: jax.jit(jnp.dot)(x, dequantize(q, s)) + x @ dequantize(q + q, s)
    assert sum("s4" in problem for problem in problems(fn, X, S4, S)) == 1  # q + q is not in memory


@on_cpu
def test_in_loops_maps_and_checkpoints():
    x, q, s = normal(M, K), integers(jnp.int4, 3, K, K), scales(3, 1, K)
    scanned = lambda x, q, s: lax.scan(lambda x, w: (column(x, *w) / 64, None), x, (q, s))[0]
    mapped = lambda x, q, s: jax.vmap(column)(jnp.stack([x, x + 1, -x]), q, s)
    kept = lambda x, q, s: jax.checkpoint(column)(x, q[0], s[0])
    for fn in (scanned, mapped, kept):
        assert "s4" in problems(fn, x, q, s)[0]
        np.testing.assert_allclose(
            *(np.asarray(f(x, q, s), np.float32) for f in (accelerate(fn), fn)), rtol=0.1, atol=1
        )
    for axes in ((None, 0, 0), (None, None, 0)):
        given = x, *(a if axis == 0 else a[0] for a, axis in zip((q, s), axes[1:]))
        got, want = (jax.vmap(fn, axes)(*given).astype(np.float32) for fn in (accelerate(column), column))
        np.testing.assert_allclose(got, want, rtol=0.1, atol=1)


@on_cpu
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_derivatives(order):
    x, q, s = normal(M, K, dtype=jnp.float32), S4, scales(1, N, dtype=jnp.float32)
    accelerated = lambda fn: accelerate(fn, where=everything)
    loss = lambda fn: lambda x, s: (fn(x, q, s) ** 2).sum()
    want = jax.grad(loss(column), (0, 1))(x, s)
    if order == "inside":
        got = accelerated(jax.grad(loss(column), (0, 1)))(x, s)
    else:
        got = jax.grad(loss(accelerated(column)), (0, 1))(x, s)
    for ours, xlas in zip(got, want):
        np.testing.assert_allclose(ours, xlas, rtol=0, atol=1e-5 * np.abs(xlas).max())
    of_rows = jax.grad(lambda x: (column(x, q, s) ** 2).sum())
    assert all("s4" in problem for problem in problems(of_rows, x))


@on_cpu
def test_matrices_that_are_read_elsewhere():
    def twice(x, q, s):
        w = q.astype(x.dtype) * s
        return (x @ w) @ w.T

    assert all("s4" in problem for problem in problems(twice, X, S4, S))
    wide = np.asarray(S4, np.float64) * np.asarray(S, np.float64)
    assert_as_exact(twice, np.asarray(X, np.float64) @ wide @ wide.T, X, S4, S)

    def returned(x, q, s):
        w = q.astype(x.dtype) * s
        return x @ w, w

    def normed(x, q, s):
        w = q.astype(x.dtype) * s
        return x @ w, jnp.abs(w).sum()

    for fn in (returned, normed):
        assert "s4" not in problems(fn, X, S4, S)[0]


LEFT = {
    "integers that wrap around": (lambda x, q, s: x @ (q - jnp.uint8(3)).astype(x.dtype), U8),
    "bytes as signed ones": (
        lambda x, q, s: x @ unpacked(jnp, q, 8).astype(jnp.int8).astype(x.dtype).T,
        words(N, K // 4),
    ),
    "integers of the program": (lambda x, q, s: x @ ((q + q).astype(x.dtype) * s), S4),
    "rounded to eight bits": (lambda x, q, s: x @ q.astype(jnp.float8_e4m3fn).astype(x.dtype), normal(K, N)),
    "two offsets": (lambda x, q, s: x @ (q.astype(x.dtype) * s + s + s), S4),
    "the logarithm": (lambda x, q, s: x @ jnp.exp(q.astype(x.dtype) * s), S4),
    "the left operand": (lambda x, q, s: ((q.astype(x.dtype) * s).T @ x.T).T, S4),
}


@on_cpu
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_was(name):
    fn, q = LEFT[name]
    (problem,) = problems(fn, X, q, S)
    assert "scale" not in problem
    got, want = (np.asarray(jax.jit(f)(X, q, S), np.float32) for f in (accelerate(fn), fn))
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


@on_cpu
def test_who_decides():
    assert "scale" in problems(column, X, S4, S, where=None)[0]
    assert problems(column, X, S4, S, where=lambda problem: not problem.scale_rows)[0].count("bf16 x bf16") == 1
    (row,) = accelerate(column, schedule=SplitK(3)).explain(X, S4, S).rows
    assert row.schedule == SplitK(3) and "s4" in str(row.plan.problem)


@pytest.mark.parametrize("rows", [16, 8192])
def test_a_gpu_reads_numbers_for_few_rows(monkeypatch, rows):
    monkeypatch.setattr(rewrite, "device_of", lambda _: sk.H200)
    shapes = [((rows, 4096), jnp.bfloat16), ((4096, 4096), jnp.int4), ((1, 4096), jnp.bfloat16)]
    (row,) = accelerate(column).explain(*(jax.ShapeDtypeStruct(*x) for x in shapes)).rows
    assert row.is_ours and ("s4" in str(row.plan.problem)) == (rows == 16)
    each = lambda x, q, s: (column(x, q, s), column(x, q, s + 1), column(x, q, s + 2))
    assert sum(row.count for row in accelerate(each).explain(*(jax.ShapeDtypeStruct(*x) for x in shapes)).rows) == 3


@pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="this process has one device")
@on_cpu
def test_sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), "x")
    q, s = (jax.device_put(a, jax.NamedSharding(mesh, jax.P(None, "x"))) for a in (S4[:, :36], S[:, :36]))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P()))
    got, want = (jax.jit(f)(x, q, s) for f in (accelerate(column), column))
    assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.5)
    mapped = jax.shard_map(
        column, mesh=mesh, in_specs=(jax.P(), jax.P(None, "x"), jax.P(None, "x")), out_specs=jax.P(None, "x")
    )
    got = jax.jit(accelerate(mapped))(x, q, s)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.5)


# The layouts of jax.nn.scaled_matmul: (B, M, K) by (B, N, K), with scales (B, N, K / 32).
SCALED = (((2,), (2,)), ((0,), (0,)))


def scaled_operands(dtype=jnp.float8_e4m3fn):
    numbers = [normal(2, size, 64).astype(dtype) for size in (16, 24)]
    return *numbers, *(jnp.exp2(normal(2, size, 2).round()).astype(jnp.float8_e8m0fnu) for size in (16, 24))


def test_the_layouts_of_scaled_matmul():
    a, b, a_scales, b_scales = scaled_operands()
    x = QuantizedArray(a, a_scales).dequantize()
    fn = lambda x, b: sk.dot_general(x, b, SCALED, preferred_element_type=jnp.float32)
    plan = sk.plan(fn, x, QuantizedArray(b, b_scales))
    assert "2 x [16, 64] @ [64, 24], bf16 x e4m3 (scale e8m0 per 32 x 1)" in str(plan.problem)
    assert not any("first" in reason or "afterwards" in reason for reason in plan.reasons)
    want = jnp.einsum(
        "bmk,bnk->bmn", *(x.dequantize(jnp.float32) for x in map(QuantizedArray, (a, b), (a_scales, b_scales)))
    )
    np.testing.assert_allclose(fn(x, QuantizedArray(b, b_scales)), want, rtol=0, atol=1e-4 * np.abs(want).max())


@on_cpu
@pytest.mark.skipif(not hasattr(lax, "scaled_dot"), reason="this JAX has no scaled_dot")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_scaled_dot(dtype):
    fn = lambda a, b, s, t: lax.scaled_dot(
        a, b, lhs_scale=s, rhs_scale=t, dimension_numbers=SCALED, preferred_element_type=dtype
    )
    operands = scaled_operands()
    assert "bf16 x e4m3 (scale e8m0 per 32 x 1)" in problems(fn, *operands)[0]
    wide = [
        np.asarray(x, np.float64) * np.repeat(np.asarray(s, np.float64), 32, -1) for x, s in zip(operands, operands[2:])
    ]
    assert_as_exact(fn, np.einsum("bmk,bnk->bmn", *wide), *operands)
    both = lambda a, b, s, t: lax.scaled_dot(
        a.astype(dtype), b.astype(dtype), lhs_scale=s, rhs_scale=t, dimension_numbers=SCALED
    )
    np.testing.assert_array_equal(accelerate(both)(*operands), both(*operands))


def model_of_qwix(x, provider, rule, **options):
    """A model that qwix quantizes, and what to call it by."""
    qwix, nnx = pytest.importorskip("qwix"), pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            given = dict(rngs=rngs, dtype=x.dtype, param_dtype=x.dtype)
            self.up, self.down = nnx.Linear(64, 96, **given), nnx.Linear(96, 33, use_bias=False, **given)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    rules = [getattr(qwix, rule)(module_path=".*", **options)]
    model = qwix.quantize_model(Model(nnx.Rngs(0)), getattr(qwix, provider)(rules), x)
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state


def assert_alike(fn, *args):
    """Results that differ by little more than bfloat16 rounds."""
    for got, want in zip(*(jax.tree.leaves(jax.jit(f)(*args)) for f in (accelerate(fn), fn))):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


@on_cpu
@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_models_of_qwix(dtype, tile):
    x = normal(M, 64)
    fn, state = model_of_qwix(x, "PtqProvider", "QuantizationRule", weight_qtype=dtype, tile_size=tile)
    found = problems(fn, state, x, where=None)
    assert len(found) == 2 and all(f"x s{dtype[-1]} (scale bf16" in problem for problem in found)
    assert_alike(fn, state, x)


@on_cpu
@pytest.mark.parametrize("dtype, name", [("int8", "s8"), ("float8_e4m3fn", "e4m3")])
def test_models_of_qwix_with_eight_bits_on_both_sides(dtype, name):
    x = normal(M, 64)
    fn, state = model_of_qwix(x, "PtqProvider", "QuantizationRule", weight_qtype=dtype, act_qtype=dtype)
    found = problems(fn, state, x, where=None)
    assert len(found) == 2 and all(re.search(rf" {name}( \(.*?\))? x {name}( \(.*?\))? -> ", text) for text in found)
    assert all(problem.count(" (scale bf16 per ") == 2 for problem in found) and found[0].endswith("A @ B + bias")
    assert_alike(fn, state, x)


@on_cpu
@pytest.mark.parametrize("dtype, name", [("int8", "s8"), ("float8_e4m3fn", "e4m3")])
def test_models_of_qwix_with_tiles_on_both_sides(dtype, name):
    """Qwix dequantizes both: kernels read the weights' numbers, and those of float8 on either side."""
    x = normal(M, 64)
    options = dict(weight_qtype=dtype, act_qtype=dtype, tile_size=32)
    fn, state = model_of_qwix(x, "PtqProvider", "QuantizationRule", **options)
    found = problems(fn, state, x, where=None)  # on a CPU, where bfloat16 by float8 is faster
    assert len(found) == 2 and all(f"bf16 x {name} (scale bf16 per 32 x 1)" in problem for problem in found)
    assert_alike(fn, state, x)
    if dtype == "float8_e4m3fn":
        found = problems(fn, state, x, where=lambda problem: True)
        of_both = "e4m3 (scale bf16 per 1 x 32) x e4m3 (scale bf16 per 32 x 1)"
        assert len(found) == 2 and all(of_both in problem for problem in found)


@on_cpu
def test_blocks_of_float8_on_both_sides():
    """As block-scaled checkpoints and activations have them, whichever way weights lie."""

    def blocks(x, rows, columns):
        return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)

    def dequantized(x, scale, rows, columns):
        spread = blocks(x.astype(jnp.bfloat16), rows, columns) * scale[:, None, :, None]
        return spread.reshape(x.shape)

    def fn(x, x_scale, w, w_scale):
        return dequantized(x, x_scale, 1, 128) @ dequantized(w, w_scale, 128, 128).T

    x, w = (normal(*shape).astype("float8_e4m3fn") for shape in ((24, 256), (384, 256)))
    scales = [1 + abs(normal(*shape)) for shape in ((24, 2), (3, 2))]
    args = x, scales[0].astype("bfloat16"), w, scales[1].astype("bfloat16")
    (problem,) = problems(fn, *args, where=lambda problem: True)
    assert "e4m3 (scale bf16 per 1 x 128) x e4m3 (scale bf16 per 128 x 128)" in problem
    assert_alike(fn, *args)


@on_cpu
@pytest.mark.parametrize("dtype, backward", [("int8", "int8"), ("float8_e4m3fn", "float8_e5m2")])
def test_training_by_qwix(dtype, backward):
    x, options = normal(37, 64), dict(weight_qtype=dtype, act_qtype=dtype, bwd_qtype=backward)

    def model(dtype):
        fn, state = model_of_qwix(x.astype(dtype), "QtProvider", "QtRule", **options)
        return jax.value_and_grad(lambda state, x: jnp.mean(fn(state, x).astype(jnp.float32) ** 2), (0, 1)), state

    step, state = model(jnp.bfloat16)
    # Forward and backward with respect to rows and weights, of both layers.
    found = problems(step, state, x, where=None)
    assert len(found) == 6 and not any("bf16 x" in problem or "x bf16" in problem for problem in found)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (state, x))
    results = jax.jit(accelerate(step))(state, x), jax.jit(step)(state, x), model(jnp.float32)[0](*wide)
    # What is rounded otherwise may become another number of eight bits: no more often than in the program.
    for got, by_xla, exact in zip(*map(jax.tree.leaves, results)):
        errors = [float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)) for y in (got, by_xla)]
        assert errors[0] <= 2 * errors[1] + 0.01


@on_cpu
@pytest.mark.parametrize("winner", ["xla", "apart"])
def test_tuning_decides(monkeypatch, winner):
    """A fragment has what dequantizes, and is measured with the product by numbers in it."""
    variants = []

    def times(key, make, device):
        variants.append({name: str(jaxpr) for name, jaxpr in make()[0].items()})
        return tuned.FragmentTimes.assumed(winner)

    monkeypatch.setattr(tune, "is_on", lambda device: True)
    monkeypatch.setattr(tune, "fragment_times", times)
    (row,) = accelerate(column).explain(X, S4, S).rows
    assert row.is_ours == (winner != "xla") and (not row.is_ours or "s4" in str(row.plan.problem))
    (of_one,) = variants
    assert "Scaled" in of_one["apart"] and "Scaled" not in of_one["xla"]


@pytest.mark.parametrize("is_nk", [False, True])
def test_groups(is_nk):
    """The experts of a mixture, whose matrices are dequantized together."""
    q, s, sizes = integers(jnp.int4, 3, K, N), scales(3, K // 32, N), jnp.array([4, 0, 3])
    x = normal(7, K)

    def program(x, q, s, sizes, dtype=jnp.bfloat16):
        groups = q.astype(dtype).reshape(3, K // 32, 32, N) * s.astype(dtype)[:, :, None]
        return lax.ragged_dot(x.astype(dtype), groups.reshape(3, K, N), sizes, preferred_element_type=dtype)

    def of_nk(x, q, s, sizes, dtype=jnp.bfloat16):
        groups = q.astype(dtype).reshape(3, N, K // 32, 32) * s.astype(dtype)[:, :, :, None]
        w = groups.reshape(3, N, K).swapaxes(1, 2)
        return lax.ragged_dot(x.astype(dtype), w, sizes, preferred_element_type=dtype)

    if is_nk:
        program, q, s = of_nk, q.swapaxes(1, 2), s.swapaxes(1, 2)
    ours = accelerate(program, where=everything)
    got, by_xla, exact = (jax.jit(f)(x, q, s, sizes) for f in (ours, program, lambda *xs: program(*xs, jnp.float32)))
    error = lambda y: np.abs(np.asarray(y, np.float64) - np.asarray(exact, np.float64)).max()
    assert error(got) <= 2 * error(by_xla)
    if jax.default_backend() == "cpu":
        assert "bf16 x s4" in str(ours.explain(x, q, s, sizes).rows[0].plan.problem)


def test_functions_with_constant_results():
    both = jax.jit(lambda q: (q.astype(jnp.bfloat16) * 2, jnp.zeros(())))

    def program(x, q):
        w, added = both(q)
        return x @ w + added

    x = normal(M, K)
    np.testing.assert_allclose(accelerate(program, where=everything)(x, S8), program(x, S8), rtol=0.02, atol=4)
