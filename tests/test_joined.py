"""Products that share their left operand as one: the kernels, and what ``accelerate`` makes of programs."""

import math
import sys
import zlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from test_kernels import (
    DTYPES,
    KERNELS,
    device_of,
    error,
    exact_product,
    launched,
    make_schedule,
    poisoned,
    round_up,
    runs_here,
)

import jax_streamk as sk
from jax_streamk import _ffi
from jax_streamk.accelerate import products
from jax_streamk.plan import alternatives
from jax_streamk.product.joined import Joined

HERE = [
    pytest.param(name, marks=[] if kernel.family == _ffi.Family.host else [pytest.mark.gpu])
    for name, kernel in KERNELS.items()
    if (kernel.joined or kernel.family == _ffi.Family.host) and not kernel.scaled and runs_here(kernel)
]
ROWS, COLUMNS = ((((1,), (i,)), ((), ())) for i in (0, 1))
WHOLE_TILES = make_schedule(_ffi.ScheduleKind.data_parallel)


def problem_of(kernel, m, widths, k, **changed):
    row_b = kernel.major_b == _ffi.Major.row
    lda, ldb = (k if kernel.major_a == _ffi.Major.row else m), (widths[0] if row_b else k)
    n, columns = sum(widths), [*np.cumsum(widths[:-1]).tolist(), 0][:2]
    types = kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b
    given = dict(second_column=columns[0], third_column=columns[1]) | changed
    return _ffi.GemmProblem(1, m, n, k, *types, lda, ldb, round_up(n, 8), m * k, 0, 0, **given)


def launch(name, m, widths, k):
    """D of a kernel, after checking that nothing around it was written; and the exact D."""
    kernel = KERNELS[name]
    dtype, dtype_d = DTYPES[kernel.type_a], DTYPES[kernel.type_d]
    rng = np.random.default_rng(zlib.crc32(repr((m, widths, k)).encode()))

    def drawn(*shape):
        if dtype == np.int8:
            return rng.integers(-9, 10, shape).astype(dtype)
        return (rng.standard_normal(shape) / math.sqrt(math.sqrt(k))).astype(dtype)

    a = drawn(m, k) if kernel.major_a == _ffi.Major.row else drawn(k, m).T
    row_b = kernel.major_b == _ffi.Major.row
    matrices = [drawn(k, n) if row_b else drawn(n, k).T for n in widths]
    whole = np.concatenate(matrices, 1)
    exact = exact_product(a, whole)
    scale = math.sqrt(k * np.mean(a.astype(np.float64) ** 2) * np.mean(whole.astype(np.float64) ** 2))
    problem, device = problem_of(kernel, m, widths, k), device_of(kernel)
    assert (why := _ffi.can_implement(name, problem, WHOLE_TILES, device)) is None, why
    stored = [np.ascontiguousarray(a if kernel.major_a == _ffi.Major.row else a.T)]
    # Each matrix alone in its buffer, before poison.
    for x in matrices:
        flat = np.ascontiguousarray(x if row_b else x.T).reshape(-1)
        stored.append(np.concatenate([flat, poisoned((512,), dtype)]))
    operands = dict(zip(("a", "b", "up", "third"), stored))
    shape, ldd = (m, sum(widths)), round_up(sum(widths), 8)
    return launched(kernel, problem, WHOLE_TILES, device, shape, ldd, dtype_d, **operands), exact, scale


@pytest.mark.parametrize("name", HERE or [pytest.param("no kernel in this build", marks=pytest.mark.gpu)])
def test_kernels(name):
    """One tile, ragged tiles, K's tail, and more tiles than CTAs."""
    kernel = KERNELS[name]
    is_host = kernel.family == _ffi.Family.host
    tile, rows = (kernel.tile_m, kernel.tile_n) if kernel.swap_ab else (kernel.tile_n, kernel.tile_m)
    cases = [
        (1, (tile, 8), 8),
        (rows, (tile, 2 * tile, tile), kernel.tile_k),
        (rows - 3, (3 * tile, tile, tile - 8), 3 * kernel.tile_k + 8),
        (2 * rows + 1, (tile, tile, 5 * tile + 16), 9 * kernel.tile_k),
        (3, (150 * tile, tile, 2 * tile), 264),
    ]
    if is_host:
        cases = [(1, (1, 1), 1), (13, (37, 5, 100), 70), (rows + 3, (tile + 1, 3, tile - 1), 600), (5, (8, 300), 33)]
    for case in cases:
        got, exact, scale = launch(name, *case)
        values = got.astype(np.float64)
        assert np.isfinite(values).all()
        with np.errstate(over="ignore"):
            rounding, largest = error(exact.astype(got.dtype).astype(np.float64), exact, scale)
        rms, most = error(values, exact, scale)
        wide = got.dtype.itemsize >= 4  # rounded at every addition
        floor = 0 if got.dtype.kind == "i" else float(jnp.finfo(got.dtype).eps) * (16 if wide else 1 / 16)
        assert rms <= 2 * rounding + floor and most <= 2 * largest + 16 * floor, (case, rms, rounding, most, largest)


@pytest.mark.parametrize("name", HERE or [pytest.param("no kernel in this build", marks=pytest.mark.gpu)])
def test_what_kernels_refuse(name):
    kernel = KERNELS[name]
    tile = kernel.tile_m if kernel.swap_ab else kernel.tile_n
    refused = [
        (dict(second_column=tile, third_column=tile), "must follow those before"),
        (dict(third_column=tile), "must follow those before"),
        (dict(third_column=4 * tile), "must follow those before"),
        (dict(second_column=-1), "must follow those before"),
    ]
    if kernel.family != _ffi.Family.host:
        refused += [
            (dict(second_column=0, third_column=0), "two or three"),
            (dict(third_column=tile + 8), "whole tiles"),
        ]
    for changed, why in refused:
        problem = problem_of(kernel, 16, (tile, 2 * tile, tile), 64, **changed)
        assert why in (_ffi.can_implement(name, problem, WHOLE_TILES, device_of(kernel)) or "")


def attention(x, wq, wk, wv):
    return x @ wq, x @ wk, x @ wv


def operands(m=16, d=512, kv=128, lead=(), dtype=jnp.bfloat16, turned=False):
    rng = np.random.default_rng(0)
    shapes = [(d, d), (d, kv), (d, kv)]
    matrices = [jnp.asarray(rng.standard_normal(shape[::-1] if turned else shape) / 32, dtype) for shape in shapes]
    return jnp.asarray(rng.standard_normal((*lead, m, d)), dtype), *matrices


@pytest.fixture
def on_h200(monkeypatch):
    """Programs are rewritten as for this GPU; a CPU runs them."""
    if jax.default_backend() == "gpu":
        pytest.skip("for CPUs")
    monkeypatch.setattr(sys.modules["jax_streamk.accelerate.rewrite"], "device_of", lambda _: sk.H200)


def joined_in(fn, *args, **options):
    """The numbers of matrices of a program's joined products."""
    found = []

    def look(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if isinstance(eqn.params.get("product"), Joined):
                found.append(len(eqn.invars) - 1)
            for name, value in eqn.params.items():
                if name != "written" and hasattr(value, "eqns"):
                    look(value)

    look(jax.make_jaxpr(sk.accelerate(fn, **options))(*args))
    return found


def heads(x, wq, wk, wv):
    """As ``DenseGeneral`` does."""
    return [lax.dot_general(x, w.reshape(w.shape[0], -1, 64), (((x.ndim - 1,), (0,)), ((), ()))) for w in (wq, wk, wv)]


def with_effects(x, wq, wk, wv):
    query = x @ wq
    jax.debug.callback(lambda _: None, query[0, 0])  # an equation without results
    return query, x @ wk, x @ wv


FORMS = {
    "plain": (attention, operands()),
    "with effects": (with_effects, operands()),
    "one row": (attention, operands(1)),
    "a batch of texts": (attention, operands(1, lead=(4, 2))),
    "vector": (attention, [x[0] if i == 0 else x for i, x in enumerate(operands(1))]),
    "heads": (heads, operands()),
    "with biases": (lambda x, *w: [y + y[:1] * 0.5 + w[1][0, 0] for y in attention(x, *w)], operands()),
    "one with a residual": (lambda x, *w: (x + x @ w[0], x @ w[1], x @ w[2]), operands()),
    "turned": (lambda x, *w: attention(x, *(y.T for y in w)), operands(turned=True)),
    "by the last dimension": (lambda x, *w: [jnp.einsum("md,nd->mn", x, y) for y in w], operands(turned=True)),
    "converted matrices": (
        lambda x, *w: attention(x, *(y.astype(jnp.bfloat16) for y in w)),
        [operands()[0], *(y.astype(np.float32) for y in operands()[1:])],
    ),
    "two": (lambda x, w, v, _: (x @ w, x @ v), operands()),
    "used between": (lambda x, w, v, _: jnp.sort(x @ w)[:, :128] * (x @ v.astype(jnp.bfloat16)), operands()),
}


@pytest.mark.parametrize("form", FORMS)
def test_programs(form, on_h200):
    fn, args = FORMS[form]
    assert joined_in(fn, *args) == [2 if form in ("two", "used between") else 3]
    want = fn(*args)
    for got in jax.jit(sk.accelerate(fn))(*args), sk.accelerate(fn)(*args):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
            np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=2e-2, atol=2e-2)


APART = {
    "unused": (lambda x, w, v, u: (x @ w, x @ v, x @ u)[0], operands()),
    "turned heads": (
        lambda x, *w: [
            lax.dot_general(x, y.reshape(8, 64, 512).transpose(2, 0, 1), (((1,), (0,)), ((), ()))) for y in w
        ],
        [operands()[0], *[operands()[1]] * 3],
    ),
    "stored activations": (
        lambda x, w, v, _: (jax.nn.silu(x @ w), jax.nn.silu(x @ v)),
        [jax.ShapeDtypeStruct((256 if i == 0 else 2048, 2048), jnp.bfloat16) for i in range(4)],
    ),
    "gate": (lambda x, w, v, u: jax.nn.silu(x @ v) * (x @ u), operands()),
    "many rows": (attention, [jax.ShapeDtypeStruct((1024 if i == 0 else 4096, 4096), jnp.bfloat16) for i in range(4)]),
    "float32": (attention, operands(dtype=np.float32)),
    "one product": (lambda x, w, *_: x @ w, operands()),
    "narrow": (lambda x, w, *_: (x @ w[:, :64], x @ w[:, :24]), operands()),
    "one needs another": (lambda x, w, v, u: (x @ w, x @ (v * (x @ w).sum())), operands()),
    "other results": (lambda x, w, v, _: (x @ w, jnp.matmul(x, v, preferred_element_type=np.float32)), operands()),
    "other layouts": (
        lambda x, w, v, _: (x @ w, jnp.einsum("md,nd->mn", x, v)),
        [*operands()[:2], *operands(turned=True)[2:]],
    ),
}


@pytest.mark.parametrize("form", APART)
def test_what_is_not_joined(form, on_h200):
    fn, args = APART[form]
    assert joined_in(fn, *args) == []


def test_options_that_leave_products_apart(on_h200):
    args = operands()
    assert joined_in(attention, *args, where=lambda _: True) == []
    assert joined_in(attention, *args, schedule=sk.SplitK(2)) == []


def test_transformations(on_h200):
    args = operands()
    total = lambda f: lambda *args: sum(jnp.sum(jnp.sin(y.astype(np.float32))) for y in f(*args))
    mine, its = total(sk.accelerate(attention)), total(attention)
    many = [jnp.stack([x, x[::-1]]) for x in args]
    cases = [
        lambda f: jax.grad(f, (0, 1, 2, 3))(*args),
        lambda f: jax.jvp(f, args, args)[1],
        lambda f: jax.vmap(f, (0, None, None, None))(many[0], *args[1:]),
        lambda f: jax.vmap(f)(*many),
        lambda f: jax.grad(jax.checkpoint(f), 1)(*args),
    ]
    for case in cases:
        for x, y in zip(jax.tree.leaves(case(mine)), jax.tree.leaves(case(its)), strict=True):
            np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=5e-2, atol=5e-2)


def test_symbolic_rows(on_h200):
    x, *matrices = operands()
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("m"), 512), x.dtype)
    fn = jax.jit(sk.accelerate(attention))
    exported = jax.export.export(fn, disabled_checks=sk.EXPORT_CHECKS)(rows, *matrices)
    for got, want in zip(exported.call(x, *matrices), attention(x, *matrices)):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("spec", [P(None, "x"), P("x", None), P()])
def test_partitioning(spec, on_h200):
    """On devices, products are divided as they were written."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("x",))
    fn = lambda x, wq, wk, wv, wo: (jnp.sin(x @ wq) + jnp.tile(jnp.sin(x @ wk) - x @ wv, 4)) @ wo
    args = [*operands(), operands()[1]]
    specs = [P(None, spec[0] if len(spec) else None), *[spec] * 3, P("x", None) if spec == P(None, "x") else P()]
    divided = [jax.device_put(x, jax.sharding.NamedSharding(mesh, s)) for x, s in zip(args, specs)]
    assert joined_in(fn, *args) == [3]
    mine, its = (jax.jit(f).lower(*divided).compile() for f in (sk.accelerate(fn), fn))
    kinds = "all-reduce(", "all-gather(", "all-to-all(", "collective-permute(", "reduce-scatter("
    assert [mine.as_text().count(kind) for kind in kinds] == [its.as_text().count(kind) for kind in kinds]
    got, want = (np.asarray(f(*divided), np.float32) for f in (mine, its))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def test_accelerate_inside_accelerate(on_h200):
    x, a, b, c = (operands()[0], *[operands()[1]] * 3)
    inner = sk.accelerate(lambda x, a, b: (jax.nn.relu(x @ a.T), jax.nn.relu(x @ b)))
    fn = lambda inner: lambda x, a, b, c: (*inner(x, a, b), x @ c)
    plain = fn(lambda x, a, b: (jax.nn.relu(x @ a.T), jax.nn.relu(x @ b)))
    for got, want in zip(sk.accelerate(fn(inner))(x, a, b, c), plain(x, a, b, c)):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.left_to_xla
def test_what_xla_reads_as_it_is_stays_apart(on_h200):
    """Weights of int8, which XLA converts as it reads them."""
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    fn = lambda x, a, b, z, w: (x @ a.astype(x.dtype), x @ b.astype(x.dtype), z @ w)
    matrices = [shape(jnp.int8, 2048, 512)] * 2
    others = shape(jnp.bfloat16, 512, 1024), shape(jnp.bfloat16, 1024, 1024)
    assert joined_in(fn, shape(jnp.bfloat16, 1, 2048), *matrices, *others) == []


def test_products_in_derivatives_are_joined(on_h200):
    """The forward products of value_and_grad."""
    args = operands()
    fn = jax.value_and_grad(lambda *args: sum(jnp.sum(y.astype(np.float32) ** 2) for y in attention(*args)))
    assert 3 in joined_in(fn, *args)


def test_explain(on_h200, monkeypatch):
    monkeypatch.setattr(products, "device_of", lambda _: sk.H200, raising=False)
    made = sk.accelerate(attention).explain(*operands())
    (row,) = made.rows
    assert (row.m, row.n, row.k, row.is_ours) == (16, 768, 512, True) and "joined" in row.kernel
    assert "of 3 matrices" in str(row.plan)
    with pytest.raises(ValueError, match="nothing to measure"):
        row.plan.explain(measure=True)


def test_plans_are_for_whole_tiles():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def plan(numbers, *operands):
        product = Joined(numbers, None, jnp.dtype(jnp.bfloat16), matrices=len(operands) - 1)
        return alternatives.plan(product, product.by_role(operands), sk.Auto(), sk.H200).plan

    made = plan(ROWS, shape(16, 512), shape(512, 512), shape(512, 128))
    assert made.problem.second_column == 512 and made.problem.third_column == 0 and made.problem.ldb == 512
    made = plan(COLUMNS, shape(16, 512), shape(512, 512), shape(128, 512), shape(72, 512))
    assert (made.problem.second_column, made.problem.third_column, made.problem.n) == (512, 640, 712)
    assert made.kernel is not None
    assert plan(ROWS, shape(16, 512), shape(512, 520), shape(512, 128)).kernel is None
