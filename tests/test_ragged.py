"""Ragged products: groups of any sizes against float64, lax's functions and their derivatives, plans, accelerate."""

import collections
import dataclasses
import functools
import inspect
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streamk as sk
from jax_streamk import _ffi
from jax_streamk.device import device_of
from jax_streamk.lower import lowering
from jax_streamk.machines import machine_of
from jax_streamk.plan import alternatives, planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.product import partition, ragged
from jax_streamk.product.epilogue import ACTIVATIONS
from jax_streamk.product.primitive import bind
from jax_streamk.product.ragged import Ragged
from jax_streamk.tuning import contest, measure

ON_GPU = jax.default_backend() == "gpu"
TARGET = "jax_streamk_cuda_gemm" if ON_GPU else "jax_streamk_host_gemm"
NUMBERS = lax.RaggedDotDimensionNumbers
BASIC = NUMBERS((((1,), (1,)), ((), ())), (0,), (0,))
DATA_PARALLEL = _ffi.Schedule(_ffi.ScheduleKind.data_parallel)
OF_K = NUMBERS((((0,), (0,)), ((), ())), (0,), ())


def zipf(rng, groups, rows):
    shares = rng.permutation(1 / np.arange(1, groups + 1))
    return rng.multinomial(rows, shares / shares.sum())


# name: (rows, k, n, sizes)
RNG = np.random.default_rng(7)
ROUTINGS = {
    "uniform": (515, 40, 70, RNG.multinomial(515, np.full(8, 1 / 8))),
    "zipf": (700, 33, 65, zipf(RNG, 64, 700)),
    "all rows in one group": (300, 64, 40, [0, 0, 300, 0]),
    "every second group empty": (257, 31, 17, [64, 0, 65, 0, 128, 0]),
    "one row": (1, 20, 30, [0, 1, 0]),
    "no row in a group": (90, 8, 9, [0, 0]),
    "sum below m": (400, 24, 33, [100, 3, 77]),
    "groups of one row": (129, 16, 24, [1] * 129),
    "one group": (61, 13, 11, [61]),
    "512 groups": (1024, 9, 12, RNG.multinomial(1000, np.full(512, 1 / 512))),
    "k of one": (50, 1, 12, [20, 0, 30]),
    "starts at every residue": (8256, 5, 6, [*range(1, 129)]),
    "long k": (30, 9000, 7, [11, 19]),
    "wide": (70, 17, 1111, [33, 37]),
}
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]


def routing(name, dtype, seed=0):
    rows, k, n, sizes = ROUTINGS[name]
    rng = np.random.default_rng(seed)
    lhs = rng.standard_normal((rows, k)).astype(dtype)
    return lhs, rng.standard_normal((len(sizes), k, n)).astype(dtype), np.asarray(sizes, np.int32)


def group_of(sizes, rows, leading=0):
    """The group of each row, -1 for none, whatever the sizes are."""
    group, at = np.full(rows, -1), leading
    for i, size in enumerate(sizes):
        group[at : at + max(size, 0)] = i
        at += max(int(size), 0)
    return group


def exact(lhs, rhs, group):
    """The product in float64."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for i in set(group) - {-1}:
        out[group == i] = lhs[group == i].astype(np.float64) @ rhs[i].astype(np.float64)
    return out


def exact_of_k(lhs, rhs, groups, group):
    of_each = (np.where((group == i)[:, None], lhs, 0).astype(np.float64).T for i in range(groups))
    return np.stack([x @ rhs.astype(np.float64) for x in of_each])


def close(got, want, depth, dtype):
    dtype = jnp.dtype(dtype)
    eps = float(jnp.finfo(dtype).eps)
    sums = 2.0**-50 if dtype == np.float64 else 2.0**-10 if ON_GPU and dtype == np.float32 else 2.0**-21
    bound = (eps + sums) * 4 * math.sqrt(depth) * (1 + np.abs(want).max(initial=0) / max(math.sqrt(depth), 1))
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= bound


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("name", ROUTINGS)
def test_groups_of_rows(name, dtype):
    lhs, rhs, sizes = routing(name, dtype)
    group = group_of(sizes, lhs.shape[0])
    out = sk.ragged_dot(lhs, rhs, sizes)
    assert out.dtype == dtype
    close(out, exact(lhs, rhs, group), lhs.shape[1], dtype)
    assert not np.asarray(out)[group == -1].any()
    of_lax = jax.eval_shape(lax.ragged_dot, lhs, rhs, sizes)
    assert (out.shape, out.dtype) == (of_lax.shape, of_lax.dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("name", ROUTINGS)
def test_groups_of_what_is_contracted(name, dtype):
    lhs, rhs, sizes = routing(name, dtype)
    other = np.random.default_rng(1).standard_normal((lhs.shape[0], rhs.shape[2])).astype(dtype)
    lhs = lhs[:, :200]
    group = group_of(sizes, lhs.shape[0])
    out = sk.ragged_dot_general(lhs, other, sizes, OF_K)
    want = exact_of_k(lhs, other, len(sizes), group)
    close(out, want, max(sizes.max(), 1), dtype)
    assert not np.asarray(out)[sizes == 0].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_preferred_element_type(dtype):
    lhs, rhs, sizes = routing("zipf", dtype)
    out = sk.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
    assert out.dtype == np.float32
    close(out, exact(lhs, rhs, group_of(sizes, len(lhs))), lhs.shape[1], np.float32)


@pytest.mark.parametrize("dims", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_dimensions_in_any_order(dims, turned):
    """Of rhs (dims says which dimension each of groups, k and n is) and of lhs."""
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    numbers = NUMBERS((((0 if turned else 1,), (dims[1],)), ((), ())), (1 if turned else 0,), (dims[0],))
    given = lhs.T if turned else lhs, rhs.transpose(np.argsort(dims))
    functions = [
        functools.partial(f, group_sizes=sizes, ragged_dot_dimension_numbers=numbers)
        for f in (sk.ragged_dot_general, lax.ragged_dot_general)
    ]
    ours, laxs = (jax.value_and_grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1))(*given) for f in functions)
    tolerance = dict(rtol=1e-2, atol=1e-3) if ON_GPU else dict(rtol=2e-4, atol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), ours, laxs)


def test_batches_of_groups_are_laxs():
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((2, 30, 8), np.float32), rng.standard_normal((3, 2, 8, 5), np.float32)
    sizes = np.array([[10, 5, 15], [0, 20, 3]])
    numbers = NUMBERS((((2,), (2,)), ((0,), (1,))), (1,), (0,))
    out = sk.ragged_dot_general(lhs, rhs, sizes, numbers)
    np.testing.assert_array_equal(out, lax.ragged_dot_general(lhs, rhs, sizes, numbers))
    made = sk.plan(lhs, rhs, numbers, group_sizes=sizes)
    assert made.reasons == ("falls back to XLA: no kernel multiplies batches of groups",)
    with pytest.raises(ValueError, match="DataParallel.. cannot run this product: no kernel multiplies batches of"):
        sk.ragged_dot_general(lhs, rhs, sizes, numbers, schedule=sk.DataParallel())


def test_groups_of_a_batch():
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((6, 30, 40), np.float32), rng.standard_normal((6, 40, 5), np.float32)
    numbers = NUMBERS((((2,), (1,)), ((0,), (0,))), (0,), ())
    np.testing.assert_array_equal(sk.ragged_dot_general(lhs, rhs, np.array([2, 4]), numbers), sk.matmul(lhs, rhs))
    assert sk.plan(lhs, rhs, numbers, group_sizes=np.array([2, 4])) == sk.plan(lhs, rhs)


@pytest.mark.parametrize(
    "sizes", [[-5, 10, 20], [30, 40, 50], [10, -(2**31), 70], [2**31 - 1] * 3, [0, 2**31 - 1, 5]], ids=str
)
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32])
def test_sizes_that_do_not_fit(sizes, kind):
    """A size below 0 counts as 0, and groups end with the last row, wherever the product runs."""
    if kind == np.uint32 and min(sizes) < 0:
        sizes = [max(x, 0) for x in sizes]
    lhs, rhs, _ = routing("one group", np.float32)
    rhs = np.concatenate([rhs, 2 * rhs, 3 * rhs])
    sizes = np.array(sizes, kind)
    out = sk.ragged_dot(lhs, rhs, sizes)
    close(out, exact(lhs, rhs, group_of(sizes.astype(np.int64), len(lhs))), lhs.shape[1], np.float32)
    params = dict(numbers=BASIC, precision=None, preferred_element_type=jnp.dtype(np.float32))
    xlas = Ragged(**params).by_xla(lhs, rhs, jnp.asarray(sizes))
    np.testing.assert_allclose(xlas, out, rtol=1e-2, atol=1e-4)


def bits_with_threads(threads, problem, buffers, sizes, tile):
    """D by the kernel's direct entry, with poison around it."""
    kernel = f"host_f32_f32_{'rr' if problem.ragged == _ffi.Ragged.m else 'cr'}_{tile}"
    device = _ffi.Device(0, threads)
    native = problem.native()
    assert _ffi.can_implement(kernel, native, DATA_PARALLEL, device) is None
    groups = problem.batch if problem.ragged == _ffi.Ragged.k else 1
    guard, elements = 64, groups * problem.m * problem.n
    d = np.full(elements + 2 * guard, np.nan, np.float32)
    workspace = np.full(_ffi.workspace_bytes(kernel, native, DATA_PARALLEL, device) + 64, 0xFF, np.uint8)
    a, b, bias = buffers
    spans = {name: (x if x is None else np.ascontiguousarray(x)) for name, x in zip("ab", (a, b))}
    addresses = [spans["a"].ctypes.data, spans["b"].ctypes.data, d.ctypes.data + 4 * guard, 0, 0]
    addresses += [0 if bias is None else bias.ctypes.data, 0, 0, sizes.ctypes.data]
    _ffi.launch(
        kernel,
        native,
        DATA_PARALLEL,
        LaunchPolicy().native(),
        device,
        tuple(addresses),
        -(-workspace.ctypes.data // 64) * 64,
    )
    assert np.isnan(d[:guard]).all() and np.isnan(d[-guard:]).all()
    return d[guard:-guard].reshape(groups, problem.m, problem.n)


@pytest.mark.parametrize("tile", ["64x64x64", "128x128x64", "256x512x64"])
@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_kernels_on_poisoned_memory(name, leading, tile):
    lhs, rhs, sizes = routing(name, np.float32)
    with_leading = np.array([37, *sizes], np.int32) if leading else sizes
    group = group_of(sizes, len(lhs), 37 if leading else 0)
    problem, _ = ragged_problem(lhs, rhs, with_leading, BASIC, leading)
    problem = dataclasses.replace(
        problem, has_bias=True, batch_stride_bias=rhs.shape[2], activation=_ffi.Activation.relu
    )
    bias = np.random.default_rng(3).standard_normal((len(sizes), rhs.shape[2])).astype(np.float32)
    # NaN in rows of no group: nobody reads them.
    read = np.where((group == -1)[:, None], np.float32(np.nan), lhs)
    one, three = (bits_with_threads(x, problem, (read, rhs, bias), with_leading, tile) for x in (1, 3))
    assert one.tobytes() == three.tobytes()
    want = np.maximum(exact(lhs, rhs, group) + np.where((group == -1)[:, None], 0, bias[group]), 0)
    close(one[0], want, lhs.shape[1], np.float32)

    other = np.random.default_rng(1).standard_normal((lhs.shape[0], rhs.shape[2])).astype(np.float32)
    lhs, read = lhs[:, :200], np.ascontiguousarray(read[:, :200])
    problem, _ = ragged_problem(lhs, other, with_leading, OF_K, leading)
    one, three = (bits_with_threads(x, problem, (read, other, None), with_leading, tile) for x in (1, 3))
    assert one.tobytes() == three.tobytes()
    close(one, exact_of_k(lhs, other, len(sizes), group), max(sizes.max(), 1), np.float32)


def ragged_problem(lhs, rhs, sizes, numbers, leading):
    product = Ragged(numbers, None, jnp.dtype(np.float32), leading=leading)
    device = sk.plan(lhs, lhs.T, device="cpu").device
    way = alternatives.plan(product, dict(lhs=lhs, rhs=rhs, group_sizes=sizes), sk.Auto(), device)
    return way.arrangement.problem, way.plan


def test_refused_by_kernels():
    lhs, rhs, sizes = routing("uniform", np.float32)
    problem, _ = ragged_problem(lhs, rhs, sizes, BASIC, False)
    kernel, device = "host_f32_f32_rr_64x64x64", _ffi.Device(0, 3)
    split = _ffi.Schedule(_ffi.ScheduleKind.stream_k, 1, _ffi.Reduction.ordered, 0)
    assert "data-parallel" in _ffi.can_implement(kernel, problem.native(), split, device)
    with_residual = dataclasses.replace(problem, has_residual=True)
    assert "residual" in _ffi.can_implement(kernel, with_residual.native(), DATA_PARALLEL, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_bias_and_activation(activation, has_bias):
    """Of rows in groups only, with derivatives of first and second order."""
    lhs, rhs, sizes = routing("sum below m", np.float32)
    lhs, sizes = lhs[:60], np.array([20, 0, 30], np.int32)
    group = group_of(sizes, len(lhs))
    bias = np.random.default_rng(3).standard_normal((len(sizes), rhs.shape[2])).astype(np.float32)
    inside = (group >= 0)[:, None]

    def ours(lhs, rhs, bias):
        bias = bias if has_bias else None
        return sk.ragged_dot(lhs, rhs, sizes, precision="highest", bias=bias, activation=activation)

    def dense(lhs, rhs, bias):
        product = jnp.einsum("mk,mkn->mn", lhs, rhs[group], precision="highest")
        return jnp.where(inside, ACTIVATIONS[activation](product + bias[group] * has_bias), 0)

    check_derivatives(ours, dense, (lhs / 5, rhs, bias))


def check_derivatives(ours, other, operands):
    rtol, atol = (3e-2, 3e-2) if ON_GPU else (1e-3, 2e-3)
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    every = tuple(range(len(operands)))

    def gradients(f):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), every)

    def second(f):
        return jax.grad(lambda *x: sum(jnp.sum(jnp.cos(g)) for g in gradients(f)(*x)), every)

    def forward(f):
        return lambda *x: jax.jvp(gradients(f), x, tuple(0.1 * v for v in x))

    for transform in (lambda f: f, gradients, second, forward):
        jax.tree.map(close, jax.jit(transform(ours))(*operands), jax.jit(transform(other))(*operands))


def test_derivatives_as_laxs():
    lhs, rhs, sizes = routing("zipf", np.float32)
    ours, laxs = (lambda *x, f=f: jnp.sum(jnp.sin(f(*x, sizes))) for f in (sk.ragged_dot, lax.ragged_dot))
    tolerance = dict(rtol=1e-2, atol=1e-2) if ON_GPU else dict(rtol=1e-4, atol=2e-3)
    for transform in (lambda f: jax.grad(f, (0, 1)), lambda f: lambda *x: jax.jvp(jax.grad(f, (0, 1)), x, x)):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, **tolerance),
            transform(ours)(lhs, rhs),
            transform(laxs)(lhs, rhs),
        )


@jax.default_matmul_precision("highest")
def test_derivatives_of_rows_of_some_groups():
    """lax has no group_offset."""
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    lhs, rhs, sizes = lhs[:50], rhs[2:4], np.array([9, 5, 0, 20, 11], np.int32)
    group = group_of(sizes, len(lhs)) - 2
    inside = ((group >= 0) & (group < 2))[:, None]

    def ours(lhs, rhs):
        return sk.ragged_dot(lhs, rhs, sizes, group_offset=np.array([2]))

    def dense(lhs, rhs):
        return jnp.where(inside, jnp.einsum("mk,mkn->mn", lhs, rhs[np.clip(group, 0, 1)], precision="highest"), 0)

    check_derivatives(ours, dense, (lhs / 3, rhs))


def test_gradients_copy_no_weights():
    lhs, rhs, sizes = routing("uniform", np.float32)
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(sk.ragged_dot(*x, sizes) ** 2), (0, 1)))
    text = gradient.lower(lhs, rhs).as_text()
    assert "stablehlo.transpose" not in text
    if not ON_GPU:
        assert text.count("custom_call @jax_streamk_host_gemm") == 3


def test_transposed_weights_are_read_as_they_lie():
    lhs, rhs, sizes = routing("uniform", np.float32)
    turned = jax.jit(lambda lhs, rhs: sk.ragged_dot(lhs, jnp.swapaxes(rhs, 1, 2), sizes, bias=jnp.zeros((8, 70))))
    out = turned(lhs, np.ascontiguousarray(rhs.swapaxes(1, 2)))
    close(out, exact(lhs, rhs, group_of(sizes, len(lhs))), lhs.shape[1], np.float32)
    compiled = turned.lower(lhs, rhs.swapaxes(1, 2)).compile().as_text()
    if not ON_GPU:
        assert not re.search(r"f32\[8,40,70\].* (transpose|copy)\(", compiled)


@pytest.mark.parametrize("offset", [0, 1, 3, 5, -1, 99])
@pytest.mark.parametrize("local", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_group_offset(offset, local, bias):
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    first = min(max(offset, 0), len(sizes) - local)
    of_rows = group_of(sizes, len(lhs)) - first
    group = np.where((of_rows >= 0) & (of_rows < local), of_rows, -1)
    added = np.random.default_rng(3).standard_normal((local, rhs.shape[2])).astype(np.float32)
    want = exact(lhs, rhs[first : first + local], group)
    if bias:
        want += np.where((group == -1)[:, None], 0, added[group])
    f = jax.jit(functools.partial(sk.ragged_dot, bias=added if bias else None))
    out = f(lhs, rhs[first : first + local], sizes, group_offset=jnp.array([offset]))
    close(out, want, lhs.shape[1], np.float32)
    assert not np.asarray(out)[group == -1].any()


@pytest.mark.parametrize("leading", [0, 40, 400, 2**31 - 1])
@pytest.mark.parametrize("numbers", [BASIC, OF_K], ids=["rows", "contracted"])
def test_xlas_product_of_leading_rows(leading, numbers):
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    other = rhs if numbers is BASIC else np.random.default_rng(1).standard_normal((len(lhs), 5)).astype(np.float32)
    sizes = jnp.array([leading, *sizes], jnp.int32)
    product = Ragged(numbers, None, jnp.dtype(np.float32), leading=True)
    out = bind(product, lhs, other, sizes, schedule=sk.Auto())
    np.testing.assert_allclose(product.by_xla(lhs, other, sizes), out, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, 0), (1, 0, None), (None, 2, None), (None, None, 0)], ids=str)
def test_vmap(mapped):
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    operands = [np.stack([x, x[::-1]], dim or 0) if dim is not None else x for x, dim in zip((lhs, rhs, sizes), mapped)]
    out = jax.vmap(sk.ragged_dot, mapped)(*operands)
    for i in range(2):
        one = [np.take(x, i, dim) if dim is not None else x for x, dim in zip(operands, mapped)]
        np.testing.assert_array_equal(out[i], sk.ragged_dot(*one))
    if mapped == (0, 0, 0):
        np.testing.assert_allclose(out, jax.vmap(lax.ragged_dot)(*operands), rtol=1e-2, atol=1e-4)
    with_bias = jax.vmap(lambda *x: jax.grad(lambda *y: jnp.sum(sk.ragged_dot(*y, activation="silu")))(*x), mapped)
    assert with_bias(*operands).shape == (2, *lhs.shape)


def test_one_program_for_all_sizes():
    lhs, rhs, sizes = routing("uniform", np.float32)
    traces = []

    @jax.jit
    def f(lhs, rhs, sizes):
        traces.append(1)
        return sk.ragged_dot(lhs, rhs, sizes)

    for given in (sizes, sizes[::-1].copy(), np.zeros_like(sizes)):
        close(f(lhs, rhs, given), exact(lhs, rhs, group_of(given, len(lhs))), lhs.shape[1], np.float32)
    assert len(traces) == 1


@pytest.mark.parametrize("biased", ["", "both", "gate"])
@pytest.mark.parametrize("activation", [None, "silu", "sigmoid"])
@jax.default_matmul_precision("highest")
def test_gated(activation, biased):
    lhs, rhs, sizes = routing("sum below m", np.float32)
    lhs, sizes = lhs[:60] / 5, np.array([20, 0, 30], np.int32)
    operands = [lhs, rhs, rhs[::-1].copy()]
    names = dict(both=["b_gate", "b_up"], gate=["b_gate"]).get(biased, [])
    operands += [np.random.default_rng(i).standard_normal(rhs.shape[::2]).astype(np.float32) for i in range(len(names))]
    group = group_of(sizes, 60)

    def ours(lhs, rhs, up, *biases):
        return sk.ragged_gated(lhs, rhs, up, sizes, activation=activation, **dict(zip(names, biases)))

    def dense(lhs, rhs, up, *biases):
        gate, up = (jnp.einsum("mk,mkn->mn", lhs, x[group]) for x in (rhs, up))
        added = [bias[group] for bias in biases] + [0, 0]
        return jnp.where((group >= 0)[:, None], ACTIVATIONS[activation](gate + added[0]) * (up + added[1]), 0)

    np.testing.assert_allclose(ours(*operands), dense(*operands), rtol=1e-4, atol=1e-5)
    check_derivatives(ours, dense, operands)
    with_bias = functools.partial(sk.ragged_gated, *operands[:3], sizes)
    with pytest.raises(ValueError, match=r"ragged_gated: b_up has shape \(3,\); it must be \(3, 33\)"):
        with_bias(b_up=np.ones(3, np.float32))


@jax.default_matmul_precision("highest")
def test_gated_of_some_groups():
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    out = sk.ragged_gated(lhs, rhs[2:4], rhs[:2], sizes, group_offset=np.array([2]))
    rows = slice(64, 129)
    want = jax.nn.silu(lhs[rows] @ rhs[2]) * (lhs[rows] @ rhs[0])
    np.testing.assert_allclose(out[rows], want, rtol=1e-2, atol=1e-3)
    assert not np.asarray(out)[:64].any() and not np.asarray(out)[129:].any()


def arguments(**changed):
    lhs, rhs, sizes = routing("uniform", np.float32)
    return dict(lhs=lhs, rhs=rhs, group_sizes=sizes) | changed


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(lhs="a"), TypeError, "ragged_dot: lhs is str; it must be an array of numbers"),
        (dict(rhs=None), TypeError, "ragged_dot: rhs is NoneType"),
        (dict(lhs=np.ones(4)), ValueError, r"lhs has shape \(4,\) and rhs \(8, 40, 70\); they must be \(m, k\) and"),
        (dict(lhs=np.ones((4, 41))), ValueError, r"lhs has shape \(4, 41\) and rhs \(8, 40, 70\)"),
        (dict(rhs=np.ones((40, 70))), ValueError, r"and rhs \(40, 70\)"),
        (dict(group_sizes=np.ones(8)), TypeError, "ragged_dot: group_sizes has dtype float.*; it must be integers"),
        (dict(group_sizes=np.ones(7, int)), ValueError, r"group_sizes has shape \(7,\); it must be \(8,\)"),
        (dict(group_sizes=np.ones((1, 8), int)), ValueError, r"group_sizes has shape \(1, 8\)"),
        (dict(group_offset=1), ValueError, r"group_offset has shape \(\); it must be \(1,\)"),
        (dict(group_offset=np.ones(1)), TypeError, "group_offset has dtype float.*; it must be integers"),
        (
            dict(group_offset=np.ones(1, int), group_sizes=np.ones(7, int)),
            ValueError,
            r"group_sizes has shape \(7,\); with group_offset it must be one-dimensional, with at least the 8 groups",
        ),
        (dict(lhs_indices=np.ones(5)), TypeError, "ragged_dot: lhs_indices has dtype float.*; it must be integers"),
        (dict(lhs_indices="a"), TypeError, "ragged_dot: lhs_indices is str"),
        (dict(lhs_indices=3), ValueError, r"lhs_indices has shape \(\); it must be \(m,\)"),
        (dict(lhs_indices=np.ones((2, 3), int)), ValueError, r"lhs_indices has shape \(2, 3\)"),
        (dict(lhs_indices=[0], lhs=np.ones((0, 40))), ValueError, r"lhs_indices has shape \(1,\), and lhs.* no rows"),
        (dict(bias=np.ones((8, 71))), ValueError, r"bias has shape \(8, 71\); it must be \(8, 70\)"),
        (dict(bias=np.ones((8, 70), complex)), TypeError, "bias has dtype complex"),
        (dict(activation="elu"), ValueError, "ragged_dot: activation='elu'; it must be one of"),
        (dict(schedule=3), TypeError, "schedule=3: must be"),
        (dict(schedule=sk.SplitK(2)), ValueError, "a ragged product is data-parallel|no kernel multiplies groups"),
        (dict(preferred_element_type="f31"), TypeError, "preferred_element_type='f31'"),
        (dict(preferred_element_type=np.int32, activation="relu"), TypeError, "the result's dtype is int32"),
    ],
    ids=lambda x: str(list(x)) if isinstance(x, dict) else "",
)
def test_refused(changed, error, message):
    with pytest.raises(error, match=message):
        sk.ragged_dot(**arguments(**changed))


def test_refused_in_general():
    lhs, rhs, sizes = routing("uniform", np.float32)
    general = functools.partial(sk.ragged_dot_general, lhs, rhs, sizes)
    with pytest.raises(TypeError, match="must be a jax.lax.RaggedDotDimensionNumbers"):
        general((((1,), (1,)), ((), ())))
    with pytest.raises(TypeError, match=r"lhs_ragged_dimensions=\(5,\) must be one dimension of lhs"):
        general(NUMBERS((((1,), (1,)), ((), ())), (5,), (0,)))
    with pytest.raises(TypeError, match="rhs group dimension size"):
        sk.ragged_dot_general(lhs, rhs, sizes[:3], BASIC)
    with pytest.raises(ValueError, match="group_offset is for groups of rows"):
        sk.ragged_dot_general(lhs, lhs, sizes, OF_K, group_offset=np.array([0]))
    with pytest.raises(ValueError, match="w_gate is float32 of shape .* and w_up float16"):
        sk.ragged_gated(lhs, rhs, rhs.astype(np.float16), sizes)


@pytest.mark.parametrize("shape", [(0, 4, 5), (6, 0, 5), (6, 4, 0)])
def test_empty(shape):
    m, k, n = shape
    lhs, rhs, sizes = np.ones((m, k), np.float32), np.ones((2, k, n), np.float32), np.array([1, 2])
    out = sk.ragged_dot(lhs, rhs, sizes, bias=np.ones((2, n), np.float32))
    want = np.where(np.arange(m)[:, None] < 3, k + 1.0, 0) * np.ones((m, n))
    np.testing.assert_array_equal(out, want)
    assert sk.ragged_gated(lhs, rhs, rhs, sizes).shape == (m, n)
    assert sk.ragged_dot_general(lhs, np.ones((m, n), np.float32), sizes, OF_K).shape == (2, k, n)


def test_plans():
    lhs, rhs, sizes = routing("uniform", np.float32)
    made = sk.plan(lhs, rhs, group_sizes=sizes, device="cpu")
    assert made.kernel.startswith("host_f32_f32_rr") and made.schedule == sk.DataParallel()
    assert "Plan: [515, 40] @ [40, 70], rows in 8 groups, f32 x f32 -> f32" in str(made)
    assert "depends on the sizes of the groups" in str(made.explain())
    with pytest.raises(ValueError, match="depends on the sizes of the groups"):
        made.plot()
    with pytest.raises(ValueError, match="depend on the sizes of the groups"):
        made.explain(measure=True)
    of_k = sk.plan(lhs, lhs, OF_K, group_sizes=sizes, device="cpu")
    assert "[40, 515] @ [515, 40], k in 8 groups" in str(of_k) and "_cr_" in of_k.kernel
    some = sk.plan(lhs, rhs[:3], group_sizes=sizes, bias=True, activation="silu", device="cpu")
    assert some.problem.leading_rows and some.problem.batch == 3 and "silu(A @ B + bias)" in str(some)
    gated = sk.plan(lhs, rhs, group_sizes=sizes, gate=True, activation="silu", device="cpu")
    assert "this product twice" in str(gated) and gated.kernel is not None
    with pytest.raises(TypeError, match="plan: group_sizes has dtype float32"):
        sk.plan(lhs, rhs, group_sizes=lhs[0])
    for refused in (
        functools.partial(sk.ragged_dot_general, lhs, lhs, 3, OF_K),
        functools.partial(sk.plan, lhs, lhs, OF_K, group_sizes=sizes.sum()),
    ):
        with pytest.raises(ValueError, match=r"group_sizes has shape \(\); it must have at least one dimension"):
            refused()
    with pytest.raises(ValueError, match="with group_sizes there is neither residual"):
        sk.plan(lhs, rhs, group_sizes=sizes, residual=True)
    assert sk.plan(lhs, rhs, group_sizes=sizes, schedule=sk.DataParallel(), device="cpu").kernel == made.kernel


@pytest.mark.parametrize("gate", [False, True])
def test_a_gpu_without_a_kernel_falls_back(gate):
    lhs, rhs, sizes = np.zeros((8, 4)), np.zeros((513, 4, 4)), np.zeros(513, int)
    made = sk.plan(lhs, rhs, group_sizes=sizes, gate=gate, device=sk.H100)
    why = "at most 512 groups"
    assert made.kernel is None and made.reasons[0].startswith("falls back to XLA: ") and why in made.reasons[0]
    with pytest.raises(ValueError, match=why):
        sk.plan(lhs, rhs, group_sizes=sizes, device=sk.H100, schedule=sk.DataParallel())


@pytest.mark.parametrize("device", [sk.A100, sk.H200])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("n", [64, 3])
def test_gpus_have_a_kernel_for_every_ragged_product(device, dtype, n):
    """Of any alignment, forward and backward, with a wider result, precise or not; gated as two products."""
    lhs, rhs, sizes = (jax.ShapeDtypeStruct(*x) for x in (((50, 7), dtype), ((4, 7, n), dtype), ((4,), np.int32)))
    planned = functools.partial(sk.plan, group_sizes=sizes, device=device)
    for given in (dict(), dict(gate=True), dict(preferred_element_type=np.float32), dict(precision="high")):
        assert planned(lhs, rhs, **given).kernel is not None, given
    cotangent, transposed = jax.ShapeDtypeStruct((50, n), dtype), ragged.numbers_of(1, 2, 0, (0,))
    assert planned(cotangent, rhs, dimension_numbers=transposed).kernel is not None
    assert planned(lhs, cotangent, dimension_numbers=ragged.numbers_of(0, 0, 0)).kernel is not None


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_gradients_with_few_tiles_may_share_them(groups):
    """Where one group's tiles could keep a few CTAs busy alone, the kernel cuts them along K."""
    of_rows = lambda columns: jax.ShapeDtypeStruct((65536, columns), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((groups,), np.int32)
    made = sk.plan(of_rows(512), of_rows(512), OF_K, group_sizes=sizes, device=sk.H200)
    assert "_coop_ragged_k" in made.kernel


@pytest.mark.parametrize("rows, shares", [(8 * 64, False), (8 * 65536, True)])
def test_short_tiles_are_not_cut(rows, shares):
    of_rows = lambda columns: jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    made = sk.plan(of_rows(512), of_rows(512), OF_K, group_sizes=jax.ShapeDtypeStruct((8,), np.int32), device=sk.H200)
    (kernel,) = (x for x in planner.kernels_for("cuda") if x.name == "sm90_bf16_bf16_cr_128x256x64_1x1_coop_ragged_k")
    cost = _ffi.estimate(
        kernel, made.problem.native(), made.native_schedule(), sk.H200.native(), machine_of(sk.H200).native
    )
    assert (cost.peers > 1) == shares


@pytest.mark.left_to_xla
def test_groups_are_ours_on_gpus_that_nobody_measured():
    lhs, rhs, sizes = routing("uniform", np.float32)
    assert sk.plan(lhs, rhs, group_sizes=sizes, device=sk.A100).kernel.startswith("sm80_")
    assert sk.plan(lhs, rhs[0], device=sk.A100).kernel is None


def test_accelerate():
    lhs, rhs, sizes = map(jnp.asarray, routing("zipf", np.float32))

    def layer(lhs, rhs, sizes):
        return jnp.sum(jax.nn.silu(lax.ragged_dot(lhs, rhs, sizes)) ** 2)

    gradient = jax.grad(layer, (0, 1))
    accelerated = sk.accelerate(gradient)
    tolerance = dict(rtol=1e-2, atol=1e-2) if ON_GPU else dict(rtol=1e-4, atol=1e-3)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **tolerance),
        jax.jit(accelerated)(lhs, rhs, sizes),
        gradient(lhs, rhs, sizes),
    )
    found = accelerated.explain(lhs, rhs, sizes)
    assert [row.groups for row in found.rows] == [64] * 3
    assert all(row.is_ours for row in found.rows)
    assert "700 x 65 x 33, 64 groups" in str(found) and "3 of 3 products are ours" in str(found)
    none = sk.accelerate(layer, where=lambda problem: not problem.is_ragged)
    assert [row.is_ours for row in none.explain(lhs, rhs, sizes).rows] == [False]
    split = sk.accelerate(layer, schedule=sk.SplitK(2))
    assert not split.explain(lhs, rhs, sizes).rows[0].is_ours
    np.testing.assert_array_equal(split(lhs, rhs, sizes), layer(lhs, rhs, sizes))


def test_accelerate_leaves_what_no_kernel_runs():
    lhs, rhs, sizes = map(jnp.asarray, routing("uniform", np.float32))
    whys = {
        "no kernel multiplies complex64": lambda x, w, s: lax.ragged_dot(x.astype(jnp.complex64), w, s),
        "no kernel multiplies batches of groups": lambda x, w, s: jax.vmap(lax.ragged_dot)(x[None], w[None], s[None]),
    }
    for why, f in whys.items():
        (row,) = sk.accelerate(f).explain(lhs, rhs, sizes).rows
        assert why in row.why and not row.is_ours
        if not (ON_GPU and "complex64" in why):  # lax.ragged_dot itself ends the process there (jaxlib 0.11.2)
            np.testing.assert_array_equal(sk.accelerate(f)(lhs, rhs, sizes), f(lhs, rhs, sizes))


def test_checkpoint_asks_policies_as_of_laxs():
    lhs, rhs, sizes = routing("uniform", np.float32)

    def products(f, policy):
        g = jax.checkpoint(lambda x: jnp.sum(jnp.sin(f(jnp.sin(x), rhs, sizes))), policy=policy)
        return str(jax.make_jaxpr(jax.grad(g))(lhs)).count("dot_general[")

    for policy in (jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.dots_saveable):
        assert products(sk.ragged_dot, policy) == products(lax.ragged_dot, policy)


def pulled(operand):
    """The derivative for lhs or rhs of a product, by its cotangent."""
    return lambda x, w, s, y: jax.vjp(lambda *xs: sk.ragged_dot(*xs, s), x, w)[1](y)[operand]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, s, y: sk.ragged_dot(x, w, s),
        lambda x, w, s, y: sk.ragged_dot(x, w, s, bias=w[:, 0], activation="silu"),
        lambda x, w, s, y: sk.ragged_gated(x, w, w, s),
        lambda x, w, s, y: sk.ragged_dot_general(x, y, s, OF_K),
        pulled(0),
        pulled(1),
    ],
)
def test_no_temporary_is_larger_than_the_result(f):
    dtype = jnp.bfloat16 if ON_GPU else np.float32
    x, w, y = (jnp.ones(shape, dtype) for shape in ((512, 64), (16, 64, 96), (512, 96)))
    sizes = jnp.full(16, 30)
    memory = jax.jit(f).lower(x, w, sizes, y).compile().memory_analysis()
    workspace = sk.plan(x, w, group_sizes=sizes).workspace_bytes
    few = 4 * 96 * 16 + 1024  # biases, and sizes
    assert memory.temp_size_in_bytes <= memory.output_size_in_bytes + workspace + few


@pytest.mark.skipif(ON_GPU and len(jax.devices()) < 2, reason="needs two GPUs")
def test_expert_parallel():
    """Each device has the matrices of some groups; their results are added."""
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def local(lhs, rhs, sizes):
        first = jax.lax.axis_index("e") * rhs.shape[0]
        return jax.lax.psum(sk.ragged_dot(lhs, rhs, sizes, group_offset=first[None]), "e")

    whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("e"), P()), out_specs=P()))
    close(whole(lhs, rhs, sizes), exact(lhs, rhs, group_of(sizes, len(lhs))), lhs.shape[1], np.float32)
    of_whole, of_one = (
        jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x, sizes))), (0, 1))(lhs, rhs) for f in (whole, sk.ragged_dot)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-4), of_whole, of_one)


ROUTED = [10, 0, 33, 1, 0, 20, 7, 5]  # of 96 rows, so that parts of all begin and end in and between groups
# What divides lhs, rhs and the result over (x, y), None for any, and the collectives of one product.
DIVISIONS = {
    "rows": (P("x"), P(), None, {}),
    "rows over both axes": (P(("y", "x")), P(), None, {}),
    "columns": (P(), P(None, None, "x"), None, {}),
    "rows and columns": (P("x"), P(None, None, "y"), None, {}),
    "k": (P(None, "x"), P(None, "x"), None, {"all-reduce": 1}),
    "rows and groups by one axis": (P("x"), P("x"), P("x"), {"all-gather": 1, "reduce-scatter": 1}),
    "groups": (P(), P("y"), None, {"all-reduce": 1}),
    "rows and groups": (P("x"), P("y"), None, {"all-reduce": 1}),
    "k and groups": (P(None, "y"), P("x", "y"), None, {"all-reduce": 1}),
    "k, and rows of the result": (P(None, "x"), P(None, "x"), P("x"), {"reduce-scatter": 1}),
    "groups, and columns of the result": (P(), P("x"), P(None, "x"), {"reduce-scatter": 1}),
    "groups, and rows of the result": (P("y"), P("x"), P(("y", "x")), {"reduce-scatter": 1}),
}


def collectives(program):
    found = re.findall(r" (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\(", program)
    return dict(collections.Counter(found))


def divided_over_devices(f, specs, *operands):
    """The result and the text of a program of ``f`` on two by two devices; the last spec is the result's."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=axes)
    *given, result = (None if spec is None else NamedSharding(mesh, spec) for spec in specs)
    placed = [jax.device_put(x, to) for x, to in zip(operands, given)]
    program = jax.jit(f, out_shardings=result).lower(*placed).compile()
    return program(*placed), program.as_text()


def divided_operands():
    """Parts of all have rows of 16 bytes."""
    rng = np.random.default_rng(0)
    shapes = (96, 32), (8, 32, 64), (8, 32, 64), (8, 64)
    dtype = jnp.bfloat16 if ON_GPU else np.float32
    return [*(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes), jnp.array(ROUTED)]


def assert_alike(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=(2e-2 if ON_GPU else 1e-5) * np.abs(want).max() + 1e-30)


OF_DIVIDED = {
    "plain": lambda x, v, w, b, s: sk.ragged_dot(x, v, s, schedule=sk.DataParallel()),
    "bias and gelu": lambda x, v, w, b, s: sk.ragged_dot(x, v, s, bias=b, activation="gelu"),
    "sigmoid": lambda x, v, w, b, s: sk.ragged_dot(x, v, s, activation="sigmoid"),
    "gated": lambda x, v, w, b, s: sk.ragged_gated(x, v, w, s, b_gate=b, b_up=-b),
    "offset": lambda x, v, w, b, s: sk.ragged_dot(
        x, v, jnp.concatenate([s, s[:3]]), group_offset=jnp.array([2]), bias=b
    ),
}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("form", OF_DIVIDED)
def test_automatic_partitioning(form, division):
    lhs, rhs, result, moved = DIVISIONS[division]
    f, operands = OF_DIVIDED[form], divided_operands()
    out, program = divided_over_devices(f, (lhs, rhs, rhs, P(), P(), result), *operands)
    assert_alike(out, f(*operands))
    assert TARGET in program
    products = 2 if form == "gated" and moved else 1  # XLA may send both sums at once
    assert all(0 < n <= products * moved.get(kind, 0) for kind, n in collectives(program).items())
    assert set(collectives(program)) == set(moved)


@pytest.mark.parametrize("division", DIVISIONS)
def test_automatic_partitioning_of_derivatives(division):
    lhs, rhs, _, _ = DIVISIONS[division]
    operands = divided_operands()
    operands = [operands[i] for i in (0, 1, 4)]

    def gradients(product):
        return jax.grad(lambda x, w, s: jnp.sum(jnp.sin(product(x, w, s).astype(np.float32))), (0, 1))

    (got, program), (want, of_lax) = (
        divided_over_devices(gradients(f), (lhs, rhs, P(), None), *operands) for f in (sk.ragged_dot, lax.ragged_dot)
    )
    jax.tree.map(assert_alike, got, want)
    assert program.count(TARGET) >= 3
    assert sum(collectives(program).values()) <= sum(collectives(of_lax).values())


@pytest.mark.parametrize("division", ["k", "rows", "columns", "result"])
def test_automatic_partitioning_of_groups_of_what_is_contracted(division):
    x, *_, sizes = divided_operands()
    y = jnp.sin(x)
    specs = dict(
        k=(P("x"), P("x"), None), rows=(P(None, "x"), P(), None), columns=(P(), P(None, ("x", "y")), None),
        result=(P(None, "y"), P(), P("x", "y")),
    )[division]  # fmt: skip
    f = functools.partial(sk.ragged_dot_general, ragged_dot_dimension_numbers=OF_K)
    out, program = divided_over_devices(f, (*specs[:2], P(), specs[2]), x, y, sizes)
    assert_alike(out, f(x, y, sizes))
    assert TARGET in program and collectives(program) == ({"all-reduce": 1} if division == "k" else {})


TUNED = {
    "forward": lambda x, w, s: sk.ragged_dot(x, w, s),
    "transposed": lambda x, w, s: sk.ragged_dot(x, jnp.swapaxes(w, 1, 2), s),
    "epilogue": lambda x, w, s: sk.ragged_dot(x, w, s, bias=w[:, 0], activation="silu"),
    "offset": lambda x, w, s: sk.ragged_dot(x, w[:2], s, group_offset=jnp.array([1])),
    "groups of k": lambda x, w, s: sk.ragged_dot_general(x, x, s, OF_K),
}


@pytest.mark.parametrize("what", TUNED)
def test_tuning(what, tmp_path):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if ON_GPU else np.float32
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((140, 64), (5, 64, 64)))
    args = x, w, jnp.array([40, 0, 1, 70, 20])
    want = TUNED[what](*args)
    with sk.tuning(tmp_path) as plans:
        assert_alike(jax.jit(lambda *args: TUNED[what](*args))(*args), want)
    (made,) = plans
    assert made.problem.is_ragged and "measured by tuning" in str(made)
    assert ("product took" in str(made)) == (what in ("forward", "transposed", "groups of k"))
    with sk.tuning(tmp_path) as again:
        jax.jit(lambda *args: TUNED[what](*args))(*args)
    assert not again


def test_what_tuning_leaves_to_xla(tmp_path, monkeypatch):
    monkeypatch.setattr(contest, "xla_ratio", lambda *_: 0.5)
    lhs, rhs, sizes = (jnp.asarray(x) for x in routing("uniform", jnp.bfloat16))
    lhs, rhs = (jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % 8),)) for x in (lhs, rhs))
    with sk.tuning(tmp_path):
        text = jax.jit(sk.ragged_dot).lower(lhs, rhs, sizes).as_text()
        made = sk.plan(lhs, rhs, group_sizes=sizes)
    assert TARGET not in text and made.kernel is None and "0.50 of the time" in made.reasons[0]


EXPLICIT = {
    "nothing": (P(), P(), P()),
    "rows": (P("x"), P(), P("x")),
    "columns": (P(), P(None, None, "x"), P(None, "x")),
    "k": (P(None, "x"), P(None, "x"), P()),
    "groups": (P(), P("x"), P()),
    "rows and columns": (P("x"), P(None, None, "y"), P("x", "y")),
    "rows over both axes": (P(("x", "y")), P(), P(("x", "y"))),
    "rows and groups": (P("x"), P("y"), P("x")),
}


@pytest.fixture
def explicit_mesh():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    axes = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=axes)):
        yield


@pytest.mark.usefixtures("explicit_mesh")
@pytest.mark.parametrize("division", EXPLICIT)
@pytest.mark.parametrize("form", OF_DIVIDED)
def test_explicit_sharding(form, division):
    *given, result = EXPLICIT[division]
    operands = divided_operands()
    want = jax.device_get(OF_DIVIDED[form](*operands))
    specs = given[0], given[1], given[1], P(), P()
    operands = [jax.device_put(x, jax.P(*spec)) for x, spec in zip(operands, specs)]
    out = jax.jit(OF_DIVIDED[form])(*operands)
    assert tuple(jax.typeof(out).sharding.spec) == (*result, *[None] * (2 - len(result)))
    assert_alike(out, want)
    x, v, *others = operands
    gradients = jax.jit(jax.grad(lambda x, v: jnp.sum(OF_DIVIDED[form](x, v, *others).astype(np.float32)), (0, 1)))
    for got, operand in zip(gradients(x, v), (x, v)):
        assert jax.typeof(got).sharding.spec == jax.typeof(operand).sharding.spec


@pytest.mark.usefixtures("explicit_mesh")
def test_explicit_sharding_of_what_xla_computes_and_of_groups_of_k():
    x, v, *_, sizes = divided_operands()
    divided = jax.device_put(x, jax.P("x"))
    z = jax.jit(sk.ragged_dot)(divided.astype(np.complex64), v.astype(np.complex64), sizes)
    assert tuple(jax.typeof(z).sharding.spec) == ("x", None)
    np.testing.assert_allclose(jax.device_get(z).real, exact(*map(np.asarray, (x, v)), group_of(ROUTED, 96)), atol=0.1)
    y = jax.jit(lambda x, s: sk.ragged_dot_general(x, x, s, OF_K))(divided, sizes)
    assert tuple(jax.typeof(y).sharding.spec) == (None, None, None)
    with pytest.raises(Exception, match="two dimensions of the result would be divided over one axis"):
        sk.ragged_dot(divided, jax.device_put(v, jax.P(None, None, "x")), sizes)


@pytest.mark.parametrize("form", ["in order", "by index"])
def test_xlas_product_in_an_explicit_mesh_of_one_device(form):
    x, v, _, _, sizes = (np.asarray(operand) for operand in divided_operands())
    x, v = x.astype(np.complex64), v.astype(np.complex64)  # no kernel has this type
    rows = {} if form == "in order" else dict(lhs_indices=jnp.arange(len(x)))
    f = lambda x, v: sk.ragged_dot(x, v, sizes, **rows)
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=explicit, devices=jax.devices()[:1])):
        assert_alike(jax.jit(f)(x, v).real, f(x, v).real)
        assert jax.jit(jax.grad(lambda *xs: jnp.sum(f(*xs)).real, (0, 1)))(x, v)[1].shape == v.shape


OF_PLACED = {
    "bias and silu": lambda x, v, s, to: sk.ragged_dot(x, v, s, bias=v.max(1), activation="silu", out_sharding=to),
    "gated": lambda x, v, s, to: sk.ragged_gated(x, v, v[::-1], s, out_sharding=to),
    "by index": lambda x, v, s, to: sk.ragged_dot(x, v, s, lhs_indices=jnp.arange(96)[::-1], out_sharding=to),
    "general": lambda x, v, s, to: sk.ragged_dot_general(x, v, s, BASIC, out_sharding=to),
    "accelerated": lambda x, v, s, to: sk.accelerate(lambda *xs: lax.ragged_dot(*xs, out_sharding=to))(x, v, s),
}


@pytest.mark.usefixtures("explicit_mesh")
@pytest.mark.parametrize(
    "rows, matrices, result",
    [
        (P("x"), P(), P(None, "x")),
        (P(None, "x"), P(None, "x"), P("x")),
        (P("x"), P(None, None, "x"), P("x")),  # no sharding follows: both would be divided over x
        (P("y"), P("x"), P(("y", "x"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", OF_PLACED)
def test_out_sharding(form, rows, matrices, result):
    if form == "accelerated" and "out_sharding" not in inspect.signature(lax.ragged_dot).parameters:
        pytest.skip("JAX has no such argument yet")
    x, v, *_, sizes = divided_operands()
    f = OF_PLACED[form]
    loss = lambda x, v, to: jnp.sum(f(x, v, sizes, to).astype(np.float32) ** 2)
    expected = f(x, v, sizes, P()), *jax.grad(loss, (0, 1))(x, v, P())
    x, v = jax.device_put(x, rows), jax.device_put(v, matrices)
    program = jax.jit(lambda x, v: f(x, v, sizes, result)).lower(x, v).compile()
    found = program(x, v), *jax.jit(jax.grad(lambda x, v: loss(x, v, result), (0, 1)))(x, v)
    for got, want, placed in zip(found, expected, (result, rows, matrices)):
        assert_alike(jax.device_get(got), jax.device_get(want))
        assert tuple(jax.typeof(got).sharding.spec) == (*placed, *[None] * (got.ndim - len(placed)))
    if form == "general" and rows == P(None, "x"):
        assert set(collectives(program.as_text())) == {"reduce-scatter"}


@pytest.mark.usefixtures("explicit_mesh")
def test_out_sharding_of_other_ragged_products():
    x, v, *_, sizes = divided_operands()
    batches = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
    of_batches = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))
    for lhs, rhs, sizes_, numbers, to in (
        (x, x, sizes, OF_K, P(None, "x", "y")),
        (jnp.stack([x] * 8), v, jnp.arange(8), batches, P("x", None, "y")),
        (jnp.stack([x] * 2), jnp.stack([v] * 2), sizes, of_batches, P("x", None, "y")),  # lax's
    ):
        product = functools.partial(sk.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
        out = jax.jit(functools.partial(product, out_sharding=to))(lhs, rhs, sizes_)
        assert jax.typeof(out).sharding.spec == to
        assert_alike(jax.device_get(out), jax.device_get(product(lhs, rhs, sizes_, out_sharding=P())))
    each = jax.vmap(functools.partial(sk.ragged_dot, out_sharding=P("x", "y")), (0, None, None))
    out = jax.jit(each)(jnp.stack([x, -x]), v, sizes)
    assert jax.typeof(out).sharding.spec == P(None, "x", "y")
    assert_alike(jax.device_get(out[1]), jax.device_get(sk.ragged_dot(-x, v, sizes)))
    with pytest.raises(NotImplementedError, match="out_sharding=.* leaves sums over devices open"):
        sk.ragged_dot(x, v, sizes, out_sharding=P("y", unreduced={"x"}))


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("sizes", [[-3, 2**31 - 1, 5, 0, 1, 2, 3, 4], [0] * 8, [200] + [2**31 - 1] * 7])
def test_automatic_partitioning_of_any_sizes(sizes, division):
    lhs, rhs, result, _ = DIVISIONS[division]
    x, v, _, b, _ = divided_operands()
    f, sizes = lambda x, v, b, s: sk.ragged_dot(x, v, s, bias=b), jnp.array(sizes, jnp.int32)
    out, _ = divided_over_devices(f, (lhs, rhs, P(), P(), result), x, v, b, sizes)
    assert_alike(out, f(x, v, b, sizes))


def test_matrices_of_divided_groups_are_not_gathered():
    operands = divided_operands()
    _, program = divided_over_devices(OF_DIVIDED["gated"], (P("x"), P("x"), P("x"), P(), P(), None), *operands)
    assert not re.search(r"all-gather\(\w+\[\d+,32,64\]|\w+\[8,32,64\]\S* all-gather", program)


def test_large_products_for_gpus():
    """The tiles of all groups together count, and a run ends where a tensor map of 2^30 rows does."""

    def planned(m, n):
        shapes = ((m, 64), jnp.bfloat16), ((512, 64, n), jnp.bfloat16), ((512,), np.int32)
        lhs, rhs, sizes = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
        return sk.plan(lhs, rhs, group_sizes=sizes, device=sk.H200)

    assert planned(2**21, 16384).kernel is not None
    beyond = planned(2**30 + 128, 128)
    assert beyond.kernel is None and "2^30" in beyond.reasons[0]


def test_sizes_beyond_int32():
    lhs, rhs, _ = routing("uniform", np.float32)
    sizes = jnp.full(8, 2**31 - 1, jnp.int32)
    want = exact(lhs, rhs, np.zeros(len(lhs), int))
    close(sk.ragged_dot(lhs, rhs, sizes), want, lhs.shape[1], np.float32)
    close(sk.ragged_dot(lhs, rhs, sizes, group_offset=jnp.array([0])), want, lhs.shape[1], np.float32)
    assert not sk.ragged_dot(lhs, rhs[:2], sizes, group_offset=jnp.array([3])).any()
    ends = partition.ends_of_groups(jnp.full(600, 2**31 - 1, jnp.int32), 4_000_000)
    assert (ends == 4_000_000).all()


def test_tuning_holds_for_programs_that_divide_no_groups(tmp_path):
    operands = [divided_operands()[i] for i in (0, 1, 4)]
    with sk.tuning(tmp_path) as plans:
        jax.jit(lambda *args: sk.ragged_dot(*args))(*operands)
        divided_over_devices(lambda *args: sk.ragged_dot(*args), (P(), P(), P(), None), *operands)
    assert len(plans) == 1


def test_tuning_in_a_partitioned_program(tmp_path):
    operands = [divided_operands()[i] for i in (0, 1, 4)]
    with sk.tuning(tmp_path) as plans:
        out, _ = divided_over_devices(lambda *args: sk.ragged_dot(*args), (P("x"), P(), P(), None), *operands)
    assert_alike(out, sk.ragged_dot(*operands))
    assert [plan.problem.m for plan in plans] == [48]


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("numbers", [BASIC, OF_K])
def test_tuning_measures_groups_of_about_one_size(leading, numbers):
    rhs = jax.ShapeDtypeStruct((20, 8, 16) if numbers is BASIC else (1000, 16), np.float32)
    sizes = jax.ShapeDtypeStruct((20 + leading,), np.int32)
    types = dict(lhs=jax.ShapeDtypeStruct((1000, 8), np.float32), rhs=rhs, group_sizes=sizes)
    made = alternatives.plan(Ragged(numbers, None, None, leading=leading), types, sk.Auto(), device_of(None)).plan
    drawn = measure.group_sizes(made.problem)
    assert drawn.shape == sizes.shape and drawn.sum() == 1000 and drawn.min() > 20
    np.testing.assert_array_equal(drawn, measure.group_sizes(made.problem))


def test_tuning_measures_gathered_rows():
    lhs, rhs = jax.ShapeDtypeStruct((1000, 8), jnp.bfloat16), jax.ShapeDtypeStruct((20, 8, 16), jnp.bfloat16)
    types = dict(lhs=lhs, rhs=rhs, group_sizes=jax.ShapeDtypeStruct((20,), np.int32))
    made = alternatives.plan(Ragged(BASIC, None, None), types, sk.Auto(), device_of(None)).plan
    made = planner.make_plan(dataclasses.replace(made.problem, gathered_rows=50), sk.Auto(), device_of(None))
    drawn = measure.lhs_indices(made.problem)
    assert drawn.shape == (1000,) and 0 <= drawn.min() < drawn.max() < 50
    launch = measure.Memory(device_of(None)).rotation(made.problem)
    d = launch.result(made.kernel, made.native_schedule(), LaunchPolicy())
    assert np.isfinite(d.astype(np.float32)).all()


@pytest.mark.parametrize("leading", [False, True])
def test_xlas_sums_of_groups(leading):
    """The derivative of a bias."""
    lhs, _, sizes = routing("every second group empty", np.float32)
    sizes = jnp.array([5] * leading + [*sizes], jnp.int32)
    product = Ragged(OF_K, None, jnp.dtype(np.float32), leading=leading)
    out = bind(product, lhs[:, :1], lhs, sizes, schedule=sk.Auto())
    np.testing.assert_allclose(product.by_xla(lhs[:, :1], lhs, sizes), out, rtol=1e-2, atol=1e-4)


def gathered_operands(dtype=np.float32, rows=40):
    """Tokens, each in any number of groups, the matrices and sizes of these, and the rows' indices."""
    _, rhs, sizes = routing("uniform", dtype)
    rng = np.random.default_rng(1)
    return rng.standard_normal((rows, rhs.shape[1])).astype(dtype), rhs, sizes, rng.integers(0, rows, 515)


OF_GATHERED = {
    "plain": lambda x, w, s, **rows: sk.ragged_dot(x, w, s, **rows),
    "bias and silu": lambda x, w, s, **rows: sk.ragged_dot(x, w, s, bias=w[:, 0], activation="silu", **rows),
    "gated": lambda x, w, s, **rows: sk.ragged_gated(x, w, w[::-1], s, **rows),
    "offset": lambda x, w, s, **rows: sk.ragged_dot(x, w[2:5], s, group_offset=jnp.array([2]), **rows),
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("form", OF_GATHERED)
def test_rows_by_index(form, dtype):
    x, w, sizes, chosen = gathered_operands(dtype)
    f = OF_GATHERED[form]
    want = f(x[chosen], w, sizes)
    # No kernel of a GPU multiplies float32, and XLA does as it likes.
    like = 1e-2 if ON_GPU and dtype == np.float32 else 0
    from_the_end = np.where(chosen % 2, chosen - len(x), chosen)
    for got in f(x, w, sizes, lhs_indices=chosen), jax.jit(f)(x, w, sizes, lhs_indices=from_the_end):
        np.testing.assert_allclose(got, want, rtol=like, atol=like)
    assert f(x, w, sizes, lhs_indices=jnp.zeros(0, int)).shape == (0, want.shape[1])


@pytest.mark.parametrize("way", ["by a kernel", "gathered first", "by XLA"])
@pytest.mark.parametrize("form", ["plain", "bias and silu", "gated"])
def test_indices_out_of_bounds(form, way, monkeypatch):
    """As of JAX's gathers with mode="clip"."""
    x, w, sizes, _ = map(jnp.asarray, gathered_operands())
    chosen = jnp.array([-(2**31), -1000, -41, -40, -39, -1, 0, 1, 39, 40, 41, 1000, 2**31 - 1] * 20)
    sizes = sizes * len(chosen) // 515
    f = OF_GATHERED[form]
    if way == "gathered first":
        monkeypatch.setattr(alternatives, "_gathering", lambda rows, device: -math.inf)
    elif way == "by XLA":
        monkeypatch.setattr(lowering, "why_not_here", lambda *_: "this test")
    by_index = lambda x, w, chosen=chosen: f(x, w, sizes, lhs_indices=chosen)
    as_jax = lambda x, w, chosen=chosen: f(x.at[chosen].get(mode="clip"), w, sizes)

    def results(f, x, w):
        loss = lambda *operands: jnp.sum(jnp.sin(f(*operands)))
        each = jnp.stack([chosen, chosen[::-1]])
        return (
            jax.jvp(f, (x, w), (x[::-1], w[::-1])),
            jax.grad(loss, (0, 1))(x, w),
            jax.vmap(f, (None, None, 0))(x, w, each),
        )

    got, want = (jax.tree.leaves(jax.jit(results, static_argnums=0)(f, x, w)) for f in (by_index, as_jax))
    for each, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-4, atol=1e-2 if ON_GPU else 1e-4)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_kinds_of_indices_out_of_bounds(kind):
    x, w, sizes, _ = gathered_operands(rows=200)
    limits = np.iinfo(kind)
    chosen = np.resize(np.array([limits.min, limits.max, limits.max - 1, 3, *[-3, -100] * bool(limits.min)], kind), 515)
    row = [min(max(i + 200 * (i < 0), 0), 199) for i in chosen.tolist()]  # JAX wraps the largest unsigned ones around
    np.testing.assert_array_equal(sk.ragged_dot(x, w, sizes, lhs_indices=chosen), sk.ragged_dot(x[row], w, sizes))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint32, jnp.int4])
def test_kinds_of_indices(kind):
    x, w, sizes, chosen = gathered_operands(rows=7)
    out = sk.ragged_dot(x, w, sizes, lhs_indices=jnp.asarray(chosen).astype(kind))
    np.testing.assert_array_equal(out, sk.ragged_dot(x[chosen], w, sizes))


@pytest.mark.parametrize("form", OF_GATHERED)
def test_derivatives_of_rows_by_index(form):
    x, w, sizes, chosen = gathered_operands()
    f = OF_GATHERED[form]
    by_index = lambda x, w: f(x, w, sizes, lhs_indices=chosen)
    gathered_first = lambda x, w: f(jnp.take(x, chosen, 0), w, sizes)
    primals, moves = (x, w), (x[::-1], w[::-1])
    for of in (
        lambda f: jax.jvp(f, primals, moves),
        lambda f: jax.grad(lambda *operands: jnp.sum(jnp.sin(f(*operands))), (0, 1))(*primals),
        lambda f: jax.grad(lambda w: jnp.sum(jax.jvp(lambda x: f(x, w), (x,), (moves[0],))[1] ** 2))(w),
    ):
        for got, want in zip(jax.tree.leaves(of(by_index)), jax.tree.leaves(of(gathered_first))):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3 if ON_GPU else 1e-4)


def test_transformations_of_rows_by_index():
    x, w, sizes, chosen = gathered_operands()
    each = jnp.stack([chosen, chosen[::-1]])
    got = jax.vmap(lambda rows: sk.ragged_dot(x, w, sizes, lhs_indices=rows))(each)
    np.testing.assert_array_equal(got, [sk.ragged_dot(x[rows], w, sizes) for rows in each])
    cotangent = np.ones((515, 70), np.float32)
    for i, operand in enumerate((x, w)):
        by_index = lambda y: sk.ragged_dot(*((y, w) if i == 0 else (x, y)), sizes, lhs_indices=chosen)
        first = lambda y: sk.ragged_dot(*((y[chosen], w) if i == 0 else (x[chosen], y)), sizes)
        got, want = (jax.linear_transpose(f, operand)(cotangent)[0] for f in (by_index, first))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_plans_of_rows_by_index():
    x, w, sizes, chosen = gathered_operands()
    made = sk.plan(x, w, group_sizes=sizes, lhs_indices=chosen, device="cpu")
    assert "[515, 40] @ [40, 70], rows in 8 groups by index of 40" in str(made) and made.kernel.startswith("host_")
    for_gpu = functools.partial(sk.plan, group_sizes=sizes, lhs_indices=chosen, device=sk.H200)
    assert "XLA gathers the rows of lhs first" in str(for_gpu(x, w))  # no kernel gathers float32
    narrow = jnp.zeros((40, 64), jnp.bfloat16), jnp.zeros((8, 64, 64), jnp.bfloat16)
    assert for_gpu(*narrow).problem.gathered_rows == for_gpu(*narrow, gate=True).problem.gathered_rows == 40
    with pytest.raises(ValueError, match="data-parallel"):
        for_gpu(*narrow, schedule=sk.StreamK())
    nothing = for_gpu(*narrow, lhs_indices=np.zeros(0, int))
    assert nothing.is_empty and "gathers" not in str(nothing)
    by_index = sk.accelerate(lambda x, w: sk.ragged_dot(x, w, sizes, lhs_indices=chosen))
    for dtype in (np.float32, np.complex64):
        assert by_index.explain(x.astype(dtype), w).rows[0].m == 515
    for given in (dict(), dict(group_sizes=sizes, dimension_numbers=BASIC)):
        with pytest.raises(ValueError, match="lhs_indices without group_sizes, or with dimension_numbers"):
            sk.plan(x, w, lhs_indices=chosen, **given)


def test_checkpoint_policies_see_the_rows_of_products_by_index():
    x, w, sizes, chosen = gathered_operands()
    seen = set()

    def policy(primitive, *avals, **_):
        if primitive.name == "ragged_dot_general":
            seen.add(avals[0].shape)
        return False

    f = jax.checkpoint(lambda w: jnp.sum(jnp.sin(sk.ragged_dot(x, w, sizes, lhs_indices=chosen))), policy=policy)
    jax.grad(f)(w)
    assert seen == {(515, 40)}


@pytest.mark.usefixtures("explicit_mesh")
@pytest.mark.parametrize("rows", [P(), P("x"), P(None, "y"), P("x", "y")], ids=str)
@pytest.mark.parametrize("indices", [P(), P("y")], ids=str)
def test_explicit_sharding_of_rows_by_index(rows, indices):
    x, v, w, _, sizes = divided_operands()
    chosen = jnp.arange(2 * len(x)) * 7 % len(x)
    want = jax.device_get(sk.ragged_gated(x, v, w, 2 * sizes, lhs_indices=chosen))
    if "y" in rows and indices:
        pytest.skip("divides two dimensions over one axis")
    x, v, w = (jax.device_put(a, P(*spec)) for a, spec in ((x, rows), (v, (None, *rows[1:])), (w, (None, *rows[1:]))))
    chosen = jax.device_put(chosen, indices)
    f = lambda x, v, w: sk.ragged_gated(x, v, w, 2 * sizes, lhs_indices=chosen)
    out = jax.jit(f)(x, v, w)
    assert tuple(jax.typeof(out).sharding.spec) == (*(indices or [None]), None)
    assert_alike(out, want)
    gradients = jax.jit(jax.grad(lambda *operands: jnp.sum(f(*operands).astype(np.float32)), (0, 1)))(x, v, w)
    for got, operand in zip(gradients, (x, v)):
        assert jax.typeof(got).sharding.spec == jax.typeof(operand).sharding.spec


@pytest.mark.usefixtures("explicit_mesh")
@pytest.mark.parametrize("by_index", [False, True])
def test_gradients_in_a_partly_manual_map(by_index):
    x, v, *_, sizes = jax.device_get(divided_operands())
    chosen = dict(lhs_indices=np.arange(len(x))) if by_index else {}
    loss = lambda x, v: jnp.sum(sk.ragged_dot(x, v, sizes, **chosen).astype(np.float32))
    gradients = jax.grad(loss, (0, 1))
    stacked = lambda x, v: jax.tree.map(lambda y: y[None], gradients(x, v))
    mapped = jax.shard_map(stacked, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    got = jax.device_get(jax.jit(mapped)(jax.device_put(np.concatenate([x, 2 * x]), P("x")), v))
    for i in range(2):
        # Replicated matrices have the sum of both devices' gradients.
        for each, want in zip(got, (gradients(x, v)[0], 3 * gradients(x, v)[1])):
            assert_alike(each[i], jax.device_get(want))


@pytest.mark.parametrize("division", ["rows", "columns", "k", "groups"])
def test_automatic_partitioning_of_rows_by_index(division):
    lhs, rhs, result, _ = DIVISIONS[division]
    x, v, *_, sizes = divided_operands()
    chosen = jnp.arange(2 * len(x)) * 7 % len(x)
    f = lambda x, v, sizes, chosen: sk.ragged_dot(x, v, 2 * sizes, lhs_indices=chosen)
    out, program = divided_over_devices(f, (lhs, rhs, P(), P(), result), x, v, sizes, chosen)
    assert_alike(out, f(x, v, sizes, chosen))
    assert TARGET in program


@pytest.mark.parametrize("offset", [None, np.array([2])])
def test_export(offset):
    lhs, rhs, sizes = routing("every second group empty", np.float32)
    f = functools.partial(sk.ragged_dot, group_offset=offset)
    if offset is not None:
        rhs = rhs[:3]
    export = functools.partial(jax.export.export, jax.jit(f), disabled_checks=sk.EXPORT_CHECKS)
    m = jax.export.symbolic_shape("m, 31")
    for rows in (jax.ShapeDtypeStruct(lhs.shape, lhs.dtype), jax.ShapeDtypeStruct(m, lhs.dtype)):
        exported = jax.export.deserialize(export()(rows, rhs, sizes).serialize())
        np.testing.assert_allclose(exported.call(lhs, rhs, sizes), f(lhs, rhs, sizes), rtol=1e-2, atol=1e-4)


def test_export_of_rows_by_index():
    x, w, sizes, chosen = gathered_operands()
    chosen = chosen.astype(np.int32)
    f = lambda x, w, chosen: sk.ragged_dot(x, w, sizes, lhs_indices=chosen)
    tokens, rows = jax.export.symbolic_shape("tokens, rows")
    export = jax.export.export(jax.jit(f), disabled_checks=sk.EXPORT_CHECKS)
    for shape, of_chosen in (((tokens, 40), chosen.shape), ((40, 40), (rows,)), ((tokens, 40), (rows,))):
        exported = export(jax.ShapeDtypeStruct(shape, x.dtype), w, jax.ShapeDtypeStruct(of_chosen, chosen.dtype))
        np.testing.assert_allclose(exported.call(x, w, chosen), f(x, w, chosen), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_sizes_of_four_bits(dtype):
    lhs, rhs, _ = routing("uniform", np.float32)
    sizes = jnp.arange(8).astype(dtype)
    want = exact(lhs, rhs, group_of(np.arange(8), len(lhs)))
    ours = [sk.ragged_dot, jax.jit(sk.ragged_dot)]
    if not ON_GPU:  # where lax's own product of float32, which this one is left to, sums four bits wrongly
        ours.append(sk.accelerate(jax.lax.ragged_dot))
    for f in ours:
        close(f(lhs, rhs, sizes), want, lhs.shape[1], np.float32)


@pytest.mark.parametrize("indices", [None, np.array([3, 0, 3, -1, 99], np.int32)])
def test_transposes_with_a_bias(indices):
    """It is linear in rows and bias together, as linear solvers see it."""
    rng = np.random.default_rng()
    lhs, rhs, bias, cotangent = (rng.standard_normal(x, np.float32) for x in ((5, 8), (2, 8, 6), (2, 6), (5, 6)))
    sizes, groups = np.array([2, 2], np.int32), np.array([0, 0, 1, 1])  # the last row is in no group

    def written(lhs, bias):
        rows = lhs if indices is None else lhs.at[indices].get(mode="clip")
        return jnp.pad(jnp.einsum("mk,mkn->mn", rows[:4], rhs[groups]) + bias[groups], ((0, 1), (0, 0)))

    ours = lambda lhs, bias: sk.ragged_dot(lhs, rhs, sizes, bias=bias, lhs_indices=indices)
    got, want = (jax.linear_transpose(f, lhs, bias)(cotangent) for f in (ours, written))
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-2 if ON_GPU else 1e-5, atol=1e-2 if ON_GPU else 1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_sizes(dtype):
    lhs, rhs, _ = routing("all rows in one group", np.float32)
    sizes = np.array([100, 0, 120, 60]).astype(dtype)
    want = exact(lhs, rhs, group_of(sizes.astype(int), len(lhs)))
    close(sk.ragged_dot(lhs, rhs, sizes), want, lhs.shape[1], np.float32)
    product = Ragged(BASIC, None, jnp.dtype(np.float32))
    close(product.by_xla(lhs, rhs, jnp.asarray(sizes)), want, lhs.shape[1], np.float32)
    if sizes.dtype != np.int8:
        out = sk.ragged_dot(lhs, rhs[1:3], sizes, group_offset=np.array([1]))
        close(out[100:220], want[100:220], lhs.shape[1], np.float32)
