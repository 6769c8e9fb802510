"""Which products ``accelerate`` leaves to XLA, and what ``explain`` says of them all."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_accelerate import normal, on_host, products

import jax_streamk
from jax_streamk import H200, Device, SplitK, StreamK, _ffi, accelerate
from jax_streamk.accelerate import decisions, fusion

bf16, f32 = jnp.bfloat16, jnp.float32
COLUMN = _ffi.Major.column


def shaped(*shape, dtype=bf16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(sys.modules["jax_streamk.accelerate.rewrite"], "device_of", lambda device: H200)


def on_h200(test):
    """As users have it there."""
    return pytest.mark.left_to_xla(pytest.mark.usefixtures("h200")(test))


def rows(fn, *args, **kwargs):
    return accelerate(fn, **kwargs).explain(*args).rows


def reasons(fn, *args, **kwargs):
    """Why each product is XLA's; "" if it is ours."""
    return [row.why for row in rows(fn, *args, **kwargs) for _ in range(row.count)]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2])
@on_h200
def test_weights_of_few_bits_are_read_as_they_are(dtype):
    x, w, scale = shaped(8, 4096), shaped(4096, 4096, dtype=dtype), shaped(4096)
    quantized = {
        "plain": lambda x, w, scale: x @ w.astype(bf16),
        "scaled": lambda x, w, scale: x @ (w.astype(f32) * scale).astype(bf16),
        "transposed": lambda x, w, scale: x @ w.astype(bf16).T,
        "grouped": lambda x, w, scale: x @ (w.reshape(64, 64, 4096).astype(bf16) * scale).reshape(4096, 4096),
    }
    for fn in quantized.values():
        (row,) = rows(fn, x, w, scale)
        assert row.is_ours and row.plan.problem.type_b.dtype == dtype


@on_h200
def test_weights_made_for_few_rows_are_left_to_xla():
    x, w = shaped(8, 4096), shaped(4096, 4096)
    made = lambda x, w: x @ jnp.tanh(w).T
    (why,) = reasons(made, x, w)
    assert why == "rhs is the result of tanh, which XLA's GEMM fusion merges where rows are few"
    assert reasons(made, x, w, schedule=StreamK()) == [""]
    assert reasons(made, x, w, where=lambda problem: True) == [""]
    assert reasons(made, shaped(2048, 4096), w) == [""]


@on_h200
def test_operands_whose_copies_take_longer_than_the_product_are_not_ours(monkeypatch):
    gram = lambda x: x.T @ x
    (odd,) = rows(gram, shaped(300_000, 401, dtype=f32))
    assert not odd.is_ours and odd.why.startswith("our kernel would copy operands first, ")
    assert odd.plan.kernel is not None
    # Rows on 16 bytes are read as they lie, and so are those of float64.
    assert reasons(gram, shaped(300_000, 400, dtype=f32)) == [""]
    with jax.enable_x64(True):
        assert reasons(gram, shaped(300_000, 401, dtype=jnp.float64)) == [""]
    # Who asks for our kernels has them.
    assert reasons(gram, shaped(300_000, 401, dtype=f32), schedule=SplitK(2)) == [""]
    assert reasons(gram, shaped(300_000, 401, dtype=f32), where=lambda problem: True) == [""]
    # Three TF32 need copies in parts whatever the layout.
    precise = lambda x: jnp.matmul(x.T, x, precision="high")
    assert [reasons(precise, shaped(300_000, n, dtype=f32)) for n in (400, 401)] == [[""], [""]]

    def weighted(w, v):
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(w.astype(f32)).astype(bf16), v)

    for length, is_ours in ((197, False), (200, True)):
        (product,) = rows(weighted, shaped(64, 12, length, length), shaped(64, length, 12, 64))
        assert product.is_ours == is_ours
    # A copy that fits in L2 is short, and one that is multiplied often enough, too.
    (small,) = rows(weighted, shaped(1, 12, 197, 197), shaped(1, 197, 12, 64))
    assert small.is_ours
    assert reasons(jnp.matmul, shaped(8192, 4001), shaped(4001, 4096)) == [""]
    monkeypatch.setattr(decisions, "tuned", types.SimpleNamespace(lookup=lambda problem, device: "found"))
    assert reasons(gram, shaped(300_000, 401, dtype=f32)) == [""]


@on_h200
def test_what_is_planned_is_what_lowering_makes():
    """It reads through transposes of operands."""
    written = {
        "transposed": lambda x, y: x.T @ y,
        "contracted": lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
        "swapped twice": lambda x, y: (x.swapaxes(0, 1).T).swapaxes(0, 1) @ y,
    }
    plans = [rows(fn, shaped(8192, 1024), shaped(8192, 2048))[0].plan for fn in written.values()]
    assert plans[0] == plans[1] == plans[2] and plans[0].problem.major_a == _ffi.Major.column


@on_h200
def test_what_makes_a_large_operand_of_few_rows_is_merged():
    x, w, mask = shaped(16, 4096), shaped(4096, 4096, dtype=f32), shaped(4096, 4096, dtype=bool)
    convert = lambda x, w, mask: x @ w.astype(bf16)
    assert reasons(convert, x, w, mask) == [
        "rhs is the result of convert_element_type, which XLA's GEMM fusion merges where rows are few"
    ]
    masked = lambda x, w, mask: x @ lax.select(mask, w, -w).T
    assert "select_n" in reasons(masked, shaped(16, 4096, dtype=f32), w, mask)[0]
    assert reasons(convert, shaped(2048, 4096), w, mask) == [""]
    twice = lambda x, w, mask: (lambda v: (x @ v) @ v)(w.astype(bf16))
    assert reasons(twice, x, w, mask) == ["", ""]
    # Made from few rows itself, a pass over it is short.
    assert reasons(lambda x, w, mask: jnp.tanh(x) @ w, x, shaped(4096, 4096), mask) == [""]


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.125
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype(f32)).astype(bf16), v)


@on_h200
def test_long_attention_is_merged_with_its_softmax():
    long, short = ([shaped(2, length, 12, 64)] * 3 for length in (1024, 128))
    by = sorted(why.split(":")[0] for why in reasons(attention, *long))
    assert by == [
        "rhs is the result of convert_element_type and larger than all else",
        "the result is larger than all else",
    ]
    assert reasons(attention, *short) == ["", ""]
    # What the backward pass needs is in memory anyway.
    step = jax.grad(lambda *args: attention(*args).astype(f32).sum(), (0, 1, 2))
    assert sum(why == "" for why in reasons(step, *long)) >= 3


def test_a_cpu_merges_nothing():
    x, w = normal(8, 64), normal(64, 64).astype(jnp.int8)
    assert reasons(lambda x, w: x @ w.astype(f32), x, w) == [""]


def test_reasons():
    x, w = normal(6, 16), normal(16, 16)
    assert reasons(jnp.matmul, x, w, where=lambda problem: False) == ["where(problem) is false"]
    assert "complex64" in reasons(jnp.matmul, x.astype(jnp.complex64), w)[0]
    assert "cannot run" in reasons(jnp.matmul, x, w, schedule=SplitK(9))[0]


@pytest.mark.left_to_xla
@pytest.mark.parametrize(
    "device, why",
    [
        (Device("cpu", 0, 8), "a product of 6 x 16 x 16 is too small for a kernel"),
        (H200, "with k = 16, tiles are mostly empty"),
    ],
)
def test_reasons_of_small_products(device, why, monkeypatch):
    monkeypatch.setattr(sys.modules["jax_streamk.accelerate.rewrite"], "device_of", lambda _: device)
    assert reasons(jnp.matmul, normal(6, 16), normal(16, 16)) == [why]


def test_counts():
    def fn(x, w):
        x, _ = lax.scan(lambda c, _: (lax.scan(lambda c, _: (jnp.tanh(c @ w), ()), c, length=3)[0], ()), x, length=5)
        x = lax.while_loop(lambda c: c.sum() < 1, lambda c: jnp.abs(c @ w.T) + 1, x)
        return lax.cond(x.sum() > 0, lambda x: (x.T @ x).sum(), lambda x: (jnp.cos(x).T @ x).sum(), x)

    found = {(row.m, row.n, row.k, row.fused): row for row in rows(fn, normal(6, 16), normal(16, 16))}
    by_fused = {key: (row.count, row.is_exact) for key, row in found.items()}
    assert by_fused.pop((6, 16, 16, "tanh(A @ B)")) == (15, True)
    assert by_fused.pop((6, 16, 16, "")) == (1, False)
    assert sorted(by_fused) == [(16, 16, 6, "")] and by_fused[16, 16, 6, ""] == (2, False)


def test_every_product_is_listed_without_running():
    calls = []

    def fn(x, w):
        jax.debug.callback(calls.append, x[0, 0])
        return x @ w, x.astype(jnp.complex64) @ w, jnp.sin(x @ w).T @ x

    explained = accelerate(fn).explain(shaped(6, 16, dtype=f32), shaped(16, 16, dtype=f32))
    assert not calls
    assert sorted((row.m, row.n, row.k, row.is_ours) for row in explained.rows) == [
        (6, 16, 16, False),
        (6, 16, 16, True),
        (16, 16, 6, True),
    ]
    assert [row.count for row in explained.rows if (row.m, row.is_ours) == (6, True)] == [2]
    assert sum(row.share or 0 for row in explained.rows) == pytest.approx(1)
    assert explained.microseconds == pytest.approx(sum(row.count * (row.microseconds or 0) for row in explained.rows))
    ours, theirs = (next(row for row in explained.rows if row.is_ours is is_ours) for is_ours in (True, False))
    assert ours.kernel in {kernel.name for kernel in jax_streamk.kernels()} and ours.plan.kernel == ours.kernel
    assert ours.schedule is not None
    assert theirs.kernel is None and theirs.schedule is None and theirs.why
    assert products(accelerate(fn), normal(6, 16), normal(16, 16))[0] == 3


def test_products_of_ours_and_of_other_libraries():
    from jax_streamk import linear, matmul

    x, w = normal(6, 16), normal(16, 16)
    fn = lambda x, w: linear(matmul(x, w, schedule=StreamK()), w, activation="relu")
    assert sorted((row.fused, row.schedule) for row in rows(fn, x, w))[0] == ("", StreamK())
    assert [row.fused for row in rows(fn, x, w)].count("relu(A @ B)") == 1


def test_products_that_accelerate_does_not_see():
    x, w = normal(6, 16), normal(16, 16)
    (row,) = rows(on_host, x, w)
    assert not row.is_ours and "device_host" in row.why


@on_h200
def test_a_table():
    def model(x, w, v):
        for _ in range(3):
            x = x + jax.nn.gelu(x @ w) @ w.T
        return (x @ v.astype(bf16)).astype(f32)

    explained = accelerate(model).explain(shaped(8, 4096), shaped(4096, 16384), shaped(4096, 50257, dtype=jnp.int8))
    text = str(explained)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.startswith("6 of 7 products are ours on NVIDIA H200\n")
    assert "gelu_tanh(A @ B)" in text and "A @ B + residual" in text and "the result of convert_element_type" in text
    assert "that of our best kernel" in text
    shown = explained._repr_html_()
    assert shown.count("<tr>") == 1 + len(explained.rows) and "gelu_tanh(A @ B)" in shown and "&#x27;" in shown
    for row in explained.rows:
        assert row.shape in text and row.dtypes in text


@on_h200
def test_epilogues_that_take_longer_than_they_save_are_not_fused(monkeypatch):
    def fused():
        block = lambda x, w1, w2: x + jax.nn.gelu(x @ w1) @ w2
        return {row.fused for row in rows(block, shaped(8192, 1024), shaped(1024, 4096), shaped(4096, 1024))}

    model = fusion._Fusion._time

    def with_slow_residuals(self, operands, product):
        return model(self, operands, product) + 1e4 * product.epilogue.has_residual

    assert fused() == {"gelu_tanh(A @ B)", "A @ B + residual"}
    monkeypatch.setattr(fusion._Fusion, "_time", with_slow_residuals)
    assert fused() == {"gelu_tanh(A @ B)", ""}


@on_h200
def test_a_copy_reads_nothing():
    """Lowering leaves it out. ``jax.nn.gelu`` ends with one if it is exact, not if it is approximate."""
    layer = lambda x, w, b: jax.nn.gelu(x @ w + b, approximate=False)
    arguments = shaped(128, 768), shaped(768, 768), shaped(768)
    assert "copy" in str(jax.make_jaxpr(layer)(*arguments))
    assert [row.fused for row in rows(layer, *arguments)] == ["gelu(A @ B + bias)"]


def test_nothing_to_multiply():
    assert str(accelerate(jnp.sin).explain(normal(3))).startswith("no products on ")


def test_methods_have_it():
    class Model:
        w = normal(16, 16)

        @accelerate(schedule=StreamK())
        def __call__(self, x):
            return x @ self.w

    (row,) = Model.__call__.explain(Model(), normal(6, 16)).rows
    assert row.schedule == StreamK()


def test_equal_rows_are_one():
    fn = lambda x, w: [np.float32(i) + jnp.sin(x * i) @ w for i in range(4)]
    (row,) = rows(fn, normal(6, 16), normal(16, 16))
    assert row.count == 4


@on_h200
def test_heads_of_a_cache():
    """The cache of a decoder is (text, position, head, element): no transpose is left, and the rows are those of q."""

    def attention(q, k, v):
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores).astype(v.dtype), v)

    cache, q = shaped(16, 512, 8, 128), shaped(16, 1, 8, 4, 128)
    found = rows(attention, q, cache, cache)
    assert [(p.batch, p.is_ours, p.plan.problem.inner_batch) for p in found] == [(128, True, 8)] * 2
    assert {(p.plan.problem.m, p.plan.problem.n) for p in found} == {(4, 512), (4, 128)}
    # More rows than a skinny tile has are multiplied in copies, as XLA does.
    many = shaped(16, 64, 8, 4, 128)
    assert all(row.plan.problem.inner_batch == 1 for row in rows(attention, many, cache, cache))


@on_h200
def test_a_transpose_stays_where_no_kernel_stores_it():
    for text in ("bhd,bshd->bsh", "bshd,bhd->bsh"):
        x, cache = shaped(8, 32, 128), shaped(8, 4096, 32, 128)
        operands = (x, cache) if text.startswith("bhd") else (cache, x)
        (row,) = rows(lambda x, y, text=text: jnp.einsum(text, x, y), *operands)
        assert (row.is_ours, row.plan.problem.inner_batch, row.m) == (True, 32, 1)


@on_h200
def test_a_small_copy_is_better_than_a_slow_kernel():
    """Of the queries, where each head's cache is contiguous."""
    q, cache = shaped(8, 16, 32, 128), shaped(8, 32, 4096, 128)
    (row,) = rows(lambda q, cache: jnp.einsum("bqhd,bhsd->bhqs", q, cache), q, cache)
    assert row.is_ours and row.plan.problem.inner_batch == 1


@on_h200
def test_a_bias_is_added_where_pieces_are_transposed():
    """XLA reads the product there anyway, and a kernel that also adds the bias takes longer."""

    def heads(x, w, b):
        q, k, v = (y.reshape(8, 1024, 12, 64) for y in jnp.split(x @ w + b, 3, -1))
        return jnp.einsum("bqhd,bkhd->bhqk", q, k), v.transpose(0, 2, 1, 3)

    found = rows(heads, shaped(8192, 768), shaped(768, 2304), shaped(2304))
    assert [(row.is_ours, row.fused) for row in found if row.n == 2304] == [(True, "")]


@on_h200
def test_a_gated_mlp():
    """Where rows are few one kernel is faster, where they are many it is not."""

    def mlp(x, w1, w2, w3):
        return x + (jax.nn.silu(x @ w1) * (x @ w2)) @ w3

    weights = shaped(4096, 14336), shaped(4096, 14336), shaped(14336, 4096)
    gated, down = rows(mlp, shaped(8, 4096), *weights)
    assert (gated.fused, gated.shape) == ("silu(A @ B) * (A @ second B)", "8 x 14336 x 4096")
    assert gated.plan.problem.gated and gated.microseconds > down.microseconds
    assert "D = silu(A @ B) * (A @ second B)" in str(accelerate(mlp).explain(shaped(8, 4096), *weights))
    assert {row.fused for row in rows(mlp, shaped(4096, 4096), *weights)} == {"", "A @ B + residual"}


def test_plans_are_those_that_are_lowered():
    """Of products of groups and of two matrices, too, behind transposes."""
    x, n = shaped(48, 320, dtype=f32), shaped(4, dtype=jnp.int32)
    groups = jax_streamk.ragged_dot, x, shaped(4, 64, 320, dtype=f32), n
    gated = jax_streamk.gated_linear, x, *[shaped(48, 320, dtype=f32)] * 2
    for fn, x, *others in (groups, gated):
        swapped = lambda x, *others, fn=fn: fn(x, *(jnp.swapaxes(w, -1, -2) if w.ndim > 1 else w for w in others))
        (row,) = accelerate(swapped).explain(x, *others).rows
        made = jax_streamk.plan(swapped, x, *others)
        assert (row.kernel, row.plan.problem) == (made.kernel, made.problem) and made.problem.major_b == COLUMN


def test_a_row_names_the_place_of_its_products():
    def layer(x, w):
        with jax.named_scope("attention"):
            y = x @ w
        return y @ w

    def model(x, w):
        x = lax.scan(lambda x, _: (layer(x, w), None), x, None, 3)[0]
        x = jax_streamk.linear(x, w)
        return layer(layer(x, w), w)

    first = layer.__code__.co_firstlineno
    file, x = "test_products.py", shaped(256, 256, dtype=f32)
    explained = accelerate(model).explain(x, x)
    assert {row.place: row.count for row in explained.rows} == {
        f"{file}:{first + 2} (layer), in scan/attention": 3,
        f"{file}:{first + 3} (layer), in scan": 3,
        f"{file}:{model.__code__.co_firstlineno + 2} (model)": 1,
        f"{file}:{first + 2} (layer), in attention": 2,
        f"{file}:{first + 3} (layer)": 2,
    }
    assert all(f"at {row.place}" in str(explained) and row.place in explained._repr_html_() for row in explained.rows)
    backward = {row.place for row in accelerate(jax.grad(lambda w, x: layer(x, w).sum())).explain(x, x).rows}
    assert f"{file}:{first + 2} (layer), in transpose(jvp(attention))" in backward


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of CPUs")
def test_shares_go_by_the_types_of_operands():
    """A product of float64 takes a CPU longer than one of float32."""
    with jax.enable_x64(True):
        x, y = (shaped(512, 512, dtype=dtype) for dtype in (f32, jnp.float64))
        shares = {row.dtypes[:3]: row.share for row in rows(lambda x, y: (x @ x, y @ y), x, y)}
    assert shares["f64"] > 0.6 and sum(shares.values()) == pytest.approx(1)
