"""JAX's transformations and program forms with our products, compared with JAX's own."""

import functools
import inspect
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compilations, persistent_cache
from jax import lax
from jax.experimental import checkify, sparse
from jax.experimental.jet import jet
from jax.test_util import check_grads

import jax_streamk
from jax_streamk import DataParallel, SplitK, StreamK, dot_general, linear, matmul

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGET = "jax_streamk_cuda_gemm" if PLATFORM == "cuda" else "jax_streamk_host_gemm"
TOLERANCE = 2e-2 if PLATFORM == "cuda" else 2e-5  # TF32 there


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def assert_same(got, wanted):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x, y, rtol=TOLERANCE, atol=TOLERANCE * max(1, np.abs(y).max(initial=0))
        ),
        got,
        wanted,
    )


def calls(f, *operands):
    text = jax.jit(f).lower(*operands).as_text()
    assert "stablehlo.dot" not in text
    return text.count(f"@{TARGET}")


A, B, C = normal((24, 40), 1), normal((40, 16), 2), normal((16, 24), 3)


def chain(product):
    return lambda a, b, c: product(jnp.tanh(product(a, b)), c)


# ---- vmap ----


@pytest.mark.parametrize(
    "in_axes", [axes for axes in itertools.product((None, 0, 1, 2), repeat=2) if axes != (None, None)]
)
@pytest.mark.parametrize("out_axes", [0, 1, -1])
def test_vmap(in_axes, out_axes):
    a, b = (x if axis is None else np.stack([x + i for i in range(3)], axis) for x, axis in zip((A, B), in_axes))
    f = lambda product: jax.vmap(product, in_axes, out_axes)
    assert_same(f(matmul)(a, b), f(jnp.matmul)(a, b))
    assert calls(f(matmul), a, b) == 1


@pytest.mark.parametrize(
    "outer, inner",
    [((0, 0), (0, 0)), ((0, None), (None, 0)), ((None, 1), (0, None)), ((2, 1), (1, 1)), ((0, 0), (None, 1))],
)
def test_nested_vmap(outer, inner):
    shapes = []
    for shape, first, second in zip(((7, 8), (8, 6)), inner, outer):
        shape = list(shape)
        for axis, size in ((first, 3), (second, 5)):
            if axis is not None:
                shape.insert(axis, size)
        shapes.append(shape)
    a, b = (normal(tuple(shape), i) for i, shape in enumerate(shapes))
    f = lambda product: jax.vmap(jax.vmap(product, inner), outer)
    assert_same(f(matmul)(a, b), f(jnp.matmul)(a, b))
    gradient = lambda product: jax.grad(lambda a, b: jnp.sum(jnp.sin(f(product)(a, b))), (0, 1))
    assert_same(gradient(matmul)(a, b), gradient(jnp.matmul)(a, b))


@pytest.mark.parametrize(
    "in_axes", [axes for axes in itertools.product((None, 0, 1, 3), repeat=2) if axes != (None, None)]
)
def test_vmap_of_a_transposed_result(in_axes):
    """matmul's leading dimensions are in another order than the product's."""
    shapes = []
    for shape, axis in zip(((2, 1, 7, 8), (4, 8, 5)), in_axes):
        shapes.append(shape if axis is None else (*shape[:axis], 3, *shape[axis:]))
    a, b = (normal(shape, i) for i, shape in enumerate(shapes))
    f = lambda product: jax.vmap(product, in_axes, 1)
    assert_same(f(matmul)(a, b), f(jnp.matmul)(a, b))
    assert calls(f(matmul), a, b) == 1
    gradient = lambda product: jax.grad(lambda a, b: jnp.sum(jnp.sin(f(product)(a, b))), (0, 1))
    assert_same(gradient(matmul)(a, b), gradient(jnp.matmul)(a, b))


@pytest.mark.parametrize("options", [{}, dict(activation="silu")], ids=str)
def test_jet_knows_no_groups(options):
    x, w, sizes = normal((6, 8)), normal((2, 8, 4)), np.array([3, 3], np.int32)
    f = lambda x: jax_streamk.ragged_dot(x, w, sizes, **options)
    with pytest.raises(NotImplementedError, match="Taylor-mode differentiation"):
        jet(f, (x,), ((x,),))


def test_vmap_of_a_batched_product_and_of_nothing():
    numbers = (((2,), (1,)), ((0,), (0,)))
    a, b = normal((4, 3, 7, 8)), normal((3, 8, 4, 5))
    f = lambda product: jax.vmap(functools.partial(product, dimension_numbers=numbers), (0, 2), 1)
    assert_same(f(dot_general)(a, b), f(lax.dot_general)(a, b))
    assert jax.vmap(matmul)(np.ones((0, 3, 4), np.float32), np.ones((0, 4, 5), np.float32)).shape == (0, 3, 5)
    # Neither operand has the mapped axis.
    assert_same(jax.vmap(lambda _: matmul(A, B))(np.arange(3.0)), np.stack([A @ B] * 3))


# ---- derivatives ----


def test_derivatives_by_finite_differences():
    with jax.enable_x64(True):
        operands = [jnp.asarray(x, jnp.float64) for x in (A[:5], B[:, :4], C[:4, :3])]
        check_grads(chain(matmul), operands, order=2, modes=("fwd", "rev"))
        check_grads(
            lambda x, w, b: linear(x, w, b, activation="gelu", alpha=0.5),
            [*operands[:2], operands[1][0]],
            order=2,
            modes=("fwd", "rev"),
        )


SMALL = (A[:4, :5], B[:5, :3], C[:3, :2])
STACK = (A[:4, None, :5], *SMALL[1:])
DERIVATIVES = {
    "jvp": (lambda f: lambda *xs: jax.jvp(f, xs, tuple(x + 1 for x in xs)), SMALL),
    "vjp": (lambda f: lambda *xs: jax.vjp(f, *xs)[1](f(*xs)), SMALL),
    "linearize": (lambda f: lambda *xs: jax.linearize(f, *xs)[1](*xs), SMALL),
    "jacfwd": (lambda f: jax.jacfwd(lambda *xs: jnp.sum(f(*xs), 1), (0, 1)), SMALL),
    "jacrev": (lambda f: jax.jacrev(lambda *xs: jnp.sum(f(*xs), 1), (1, 2)), SMALL),
    "hessian": (lambda f: jax.hessian(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1)), SMALL),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(lambda *xs: jnp.sum(f(*xs))), (0, None, None)), STACK),
    "grad of vmap": (lambda f: jax.grad(lambda *xs: jnp.sum(jax.vmap(f, (0, None, None))(*xs)), (0, 1)), STACK),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    transform, operands = DERIVATIVES[name]
    assert_same(jax.jit(transform(chain(matmul)))(*operands), transform(chain(jnp.matmul))(*operands))


def test_second_derivatives_of_a_batch_in_the_middle():
    """A cotangent is a product with a transposed result, and has cotangents itself."""
    numbers = (((2,), (0,)), ((1,), (1,)))
    operands = normal((4, 3, 5)), normal((5, 3, 2), 1)

    def hessian(product):
        return jax.jit(jax.hessian(lambda a, b: jnp.sum(jnp.sin(product(a, b, numbers))), (0, 1)))(*operands)

    assert_same(hessian(dot_general), hessian(lax.dot_general))
    with jax.enable_x64(True):
        check_grads(lambda a, b: dot_general(a, b, numbers), [jnp.asarray(x, jnp.float64) for x in operands], order=2)


def test_transpose_of_a_linear_function():
    ct = normal((24, 16), 5)
    (got,) = jax.linear_transpose(lambda b: matmul(A, b), B)(ct)
    assert_same(got, A.T @ ct)
    with pytest.raises(AssertionError):
        jax.linear_transpose(lambda a: matmul(a, a), np.ones((3, 3), np.float32))(np.ones((3, 3), np.float32))


def test_symbolic_zeros_and_unused_cotangents():
    got = jax.grad(lambda a: jnp.sum(matmul(a, lax.stop_gradient(B))))(A)
    assert_same(got, np.broadcast_to(B.sum(1), A.shape))
    text = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(matmul(a, B))))).lower(A).as_text()
    assert text.count(f"@{TARGET}") == 2  # forward, and one cotangent


FUSED = (
    lambda a, b: linear(a, b, B[0], activation="silu", residual=jnp.ones((24, 16)), alpha=0.5),
    lambda a, b: jax.nn.silu(0.5 * jnp.matmul(a, b) + 1 + B[0]),
)


@pytest.mark.parametrize("ours, theirs", [(matmul, jnp.matmul), FUSED])
@pytest.mark.parametrize("of_both", [True, False])
def test_jet(ours, theirs, of_both):
    series = [[jnp.cos(A), A, jnp.sin(A)], [x if of_both else jnp.zeros_like(x) for x in (jnp.sin(B), B, jnp.cos(B))]]

    def derivatives(product):
        return jax.jit(lambda a, b: jet(lambda a, b: jnp.sin(product(a / 8, b)), (a, b), series))(A, B)

    assert_same(derivatives(ours), derivatives(theirs))


SPARSE = {
    "matmul": (matmul, jnp.matmul),
    "transposed": (lambda a, b: matmul(a, jnp.stack([b, b])), lambda a, b: jnp.matmul(a, jnp.stack([b, b]))),
    "on the right": (lambda a, b: matmul(b.T, a.T), lambda a, b: jnp.matmul(b.T, a.T)),
    "linear": FUSED,
    "accelerate": (jax_streamk.accelerate(jnp.matmul), jnp.matmul),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparsify(name):
    ours, theirs = SPARSE[name]
    dense = jnp.where(A > 0.5, A, 0)
    for transform in (sparse.sparsify, lambda f: jax.jit(sparse.sparsify(f)), lambda f: sparse.sparsify(jax.jit(f))):
        assert_same(transform(ours)(sparse.BCOO.fromdense(dense), B), theirs(dense, B))
    if name == "matmul":
        assert_same(sparse.sparsify(ours)(sparse.BCSR.fromdense(dense), B), theirs(dense, B))
        product = sparse.sparsify(ours)(*map(sparse.BCOO.fromdense, (dense, jnp.asarray(B))))
        assert isinstance(product, sparse.BCOO)
        assert_same(product.todense(), theirs(dense, B))


def test_sparse_matrices_are_not_imported_for_those_without(tmp_path):
    code = """if True:
        import sys, jax, jax_streamk as sk
        assert "jax.experimental.sparse" not in sys.modules
        a = jax.numpy.eye(4)
        sk.matmul(a, a)
        from jax.experimental import sparse
        assert (sparse.sparsify(sk.accelerate(jax.numpy.matmul))(sparse.BCOO.fromdense(a), a) == a).all()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)


# ---- control flow ----


def test_scan():
    w = normal((24, 24)) / 5

    def run(product, x, w):
        return lax.scan(lambda x, w: (jnp.tanh(product(x, w)), jnp.sum(x)), x, w)

    ws = np.stack([w, 2 * w, w.T])
    assert_same(run(matmul, A[:, :24], ws), run(jnp.matmul, A[:, :24], ws))
    gradient = lambda product: jax.jit(jax.grad(lambda x, ws: jnp.sum(run(product, x, ws)[0]), (0, 1)))
    assert_same(gradient(matmul)(A[:, :24], ws), gradient(jnp.matmul)(A[:, :24], ws))


def test_cond_switch_while_and_map():
    square = normal((24, 24)) / 5

    def f(product, flag, x):
        x = lax.cond(flag, lambda x: product(x, square), lambda x: x, x)
        x = lax.switch(flag.astype(int) + 1, [lambda x: x, lambda x: product(x, x), lambda x: product(x, x.T)], x)
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(product(s[1], square))), (0, x))[1]

    for flag in (jnp.array(True), jnp.array(False)):
        assert_same(jax.jit(functools.partial(f, matmul))(flag, square), f(jnp.matmul, flag, square))
    rows = lambda product: lax.map(lambda row: product(row, B), A, batch_size=5)
    assert_same(rows(matmul), A @ B)
    fori = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: matmul(x, square), x))
    assert_same(fori(square), square @ square @ square @ square)


# ---- checkpoint ----


@pytest.mark.parametrize(
    "policy, products",
    [
        (None, 2 + 1 + 4),  # the first product again; the second's value is not needed
        (jax_streamk.dots_saveable, 2 + 4),
        (jax_streamk.dots_with_no_batch_dims_saveable, 2 + 4),
        (jax.checkpoint_policies.nothing_saveable, 2 + 1 + 4),
        (jax.checkpoint_policies.everything_saveable, 2 + 4),
    ],
)
def test_checkpoint(policy, products):
    f = jax.checkpoint(lambda a, b, c: jnp.sum(chain(matmul)(a, b, c)), policy=policy)
    gradient = jax.jit(jax.grad(f, (0, 1, 2)))
    assert_same(gradient(A, B, C), jax.grad(lambda *xs: jnp.sum(chain(jnp.matmul)(*xs)), (0, 1, 2))(A, B, C))
    program = jax.make_jaxpr(jax.value_and_grad(f, (0, 1, 2)))(A, B, C)
    assert str(program).count("streamk_dot_general[") == products


POLICIES = {
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save_from_both_policies": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("none")
    ),
    "of one's own": lambda primitive, *avals, **_: primitive.name == "dot_general" and avals[0].shape[-1] == 40,
    "all but products": lambda primitive, *_, **__: primitive.name != "dot_general",
}


def batch(product):
    return lambda a, b, c: jnp.sum(jnp.sin(product(jnp.stack([a, 2 * a]), jnp.stack([b, b]))), 0) @ c


def loop(product):
    layer = lambda x, b: product(jnp.sin(product(x, b / 8)), b.T / 8)
    return lambda a, b, c: lax.scan(lambda x, _: (layer(x, b), None), a / 8, length=2)[0]


BLOCKS = {
    "plain": (chain(matmul), chain(jnp.matmul)),
    "batch": (batch(matmul), batch(jnp.matmul)),
    "scan": (loop(matmul), loop(jnp.matmul)),
    "accelerate": (jax_streamk.accelerate(chain(jnp.matmul)), chain(jnp.matmul)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_policies_take_our_products_for_jaxs(policy, block):
    def program(f):
        block = jax.checkpoint(lambda a, b, c: jnp.sum(jnp.sin(f(a, b, c))), policy=POLICIES[policy])
        return jax.value_and_grad(jax.jit(block), (0, 1, 2))

    ours, theirs = map(program, BLOCKS[block])
    texts = [str(jax.make_jaxpr(f)(A, B, C)) for f in (ours, theirs)]
    for primitive in ("dot_general[", "device_put["):
        assert texts[0].count(primitive) == texts[1].count(primitive)
    assert_same(jax.jit(ours)(A, B, C), theirs(A, B, C))


def test_a_policy_is_asked_about_an_epilogue_as_about_a_product():
    policy = jax.checkpoint_policies.dots_saveable
    f = jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(linear(a, b, alpha=2.0))), policy=policy)
    program = str(jax.make_jaxpr(jax.value_and_grad(f, (0, 1)))(A, B))
    assert program.count("epilogue=Epilogue(") == 1


def test_policies_know_batches_and_other_primitives():
    batched = jax.checkpoint(
        lambda a, b: jnp.sum(jnp.sin(jnp.sin(matmul(a, b)))), policy=jax_streamk.dots_with_no_batch_dims_saveable
    )
    a, b = normal((3, 4, 5)), normal((3, 5, 6))
    assert str(jax.make_jaxpr(jax.value_and_grad(batched))(a, b)).count("streamk_dot_general[") == 3
    stock = jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(jnp.matmul(a, b))), policy=jax_streamk.dots_saveable)
    assert str(jax.make_jaxpr(jax.value_and_grad(stock))(A, B)).count("dot_general[") == 2
    for policy in (jax_streamk.dots_saveable, jax_streamk.dots_with_no_batch_dims_saveable):
        fused = jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(linear(a, b, alpha=2.0))), policy=policy)
        assert str(jax.make_jaxpr(jax.value_and_grad(fused))(A, B)).count("epilogue=Epilogue(") == 1


# ---- program forms ----


def test_shapes_jaxprs_and_ahead_of_time():
    shape = jax.eval_shape(
        matmul, jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4, 5), jnp.bfloat16)
    )
    assert (shape.shape, shape.dtype) == ((3, 5), jnp.bfloat16)
    assert "streamk_dot_general" in str(jax.make_jaxpr(matmul)(A, B))
    compiled = jax.jit(matmul).lower(A, B).compile()
    assert_same(compiled(A, B), A @ B)
    assert compiled.cost_analysis() is not None
    with jax.disable_jit():
        assert_same(matmul(A, B), A @ B)


def test_donated_arguments():
    f = jax.jit(lambda a, b: (matmul(a, b), a + 1), donate_argnums=0)
    a = jnp.asarray(A)
    product, successor = f(a, B)
    assert_same((product, successor), (A @ B, A + 1))
    assert f.lower(a if PLATFORM == "cpu" else jnp.asarray(A), B).compile().as_text().count("input_output_alias") == 1
    assert a.is_deleted()


def test_debug_nans():
    with jax.debug_nans(True):
        matmul(A, B)
        a = A.copy()
        a[3, 5] = np.nan
        for f in (matmul, jax.jit(matmul)):
            with pytest.raises(FloatingPointError, match="invalid value"):
                jax.block_until_ready(f(a, B))


@pytest.mark.parametrize("product", [matmul, functools.partial(linear, activation="silu")])
def test_checkify_finds_nan(product):
    checked = checkify.checkify(jax.jit(product), errors=checkify.nan_checks)
    error, _ = checked(A, B)
    assert error.get() is None
    error, _ = checked(np.full_like(A, np.nan), B)
    assert "nan generated by primitive: streamk_" in error.get()


def test_persistent_compilation_cache(tmp_path):
    f = lambda: jax.jit(lambda a, b: matmul(jnp.cos(a), b, schedule=StreamK()))
    with persistent_cache(tmp_path):
        first = f()(A, B)
        entries = sorted(tmp_path.glob("*-cache"))
        assert entries
        jax.clear_caches()
        assert np.array_equal(f()(A, B), first)
        assert sorted(tmp_path.glob("*-cache")) == entries  # read, not written anew


def test_names_reach_the_program():
    def f(a, b):
        with jax.named_scope("attention"):
            return matmul(a, b)

    text = jax.jit(f).lower(A, B).compile().as_text()
    assert re.search(rf'custom_call_target="{TARGET}".*op_name="[^"]*attention/', text)


def test_profiles_tell_the_schedule_of_a_product():
    operands = jax.ShapeDtypeStruct((128, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)

    def names(schedule):
        text = jax.jit(lambda a, b: matmul(a, b, schedule=schedule)).lower(*operands).compile().as_text()
        return re.findall(rf'custom_call_target="{TARGET}".*op_name="jit\([^"/]*/([^"]*)"', text)

    assert names(DataParallel()) == ["data_parallel/streamk_dot_general"]
    assert names(SplitK(2)) == ["split_k_2_ordered/streamk_dot_general"]
    assert names(StreamK("atomic")) == ["stream_k_atomic/streamk_dot_general"]


# ---- calls outside of traces ----

EAGER = {
    "matmul": (matmul, jnp.matmul, (A, B)),
    "dot_general": (dot_general, lax.dot_general, (A, B, (((1,), (0,)), ((), ())))),
    "dot_general of lists": (dot_general, lax.dot_general, (A, B, [[[1], [0]], [[], []]])),
    "einsum": (jax_streamk.einsum, jnp.einsum, ("mk,kn->nm", A, B)),
    "linear": (linear, lambda x, w, bias: x @ w + bias, (A, B, B[0])),
}


@pytest.mark.parametrize("name", EAGER)
def test_calls_outside_of_traces_are_compiled_once(name):
    # JAX 0.9 traces every call of a program that was first called, with other arrays, in the course of a vmap.
    jax.clear_caches()
    ours, theirs, args = EAGER[name]
    assert_same(ours(*args), theirs(*args))
    args = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    assert_same(ours(*args), theirs(*args))
    with compilations(and_traces=True) as compiled:
        for _ in range(4):
            jax.block_until_ready(ours(*args))
    assert not compiled


@pytest.mark.parametrize("params", [{}, dict(preferred_element_type=np.float32)])
def test_results_and_tangents_are_not_converted(params):
    program = jax.make_jaxpr(lambda a: jax.jvp(lambda a: matmul(a, B, **params), (a,), (a,)))(A)
    assert {eqn.primitive.name for eqn in program.eqns} == {"streamk_dot_general"}


@pytest.mark.parametrize("name", EAGER)
def test_misspelt_arguments(name):
    ours, _, args = EAGER[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'shedule'"):
        ours(*args, shedule=StreamK())


def test_a_call_on_constants_is_traced_as_it_is():
    """As one on tracers: the program has our primitive, not a call of our function."""
    for program in (jax.make_jaxpr(matmul)(A, B), jax.make_jaxpr(lambda: matmul(A, B))()):
        assert [eqn.primitive.name for eqn in program.eqns] == ["streamk_dot_general"]


INTEGERS = dict(group_sizes=[2, 3, 1, 2], lhs_indices=[3, -1, 0, 0, 9, 2, 5, 1], group_offset=[1])
OF_ARRAYS = {
    "matmul": (lambda x, w, **_: matmul(x, w), [(8, 16), (16, 12)]),
    "dot_general": (lambda x, w, **_: dot_general(x, w, (((1,), (0,)), ((), ()))), [(8, 16), (16, 12)]),
    "einsum": (lambda x, w, **_: jax_streamk.einsum("mk,kn->nm", x, w), [(8, 16), (16, 12)]),
    "linear": (
        lambda x, w, b, r, **_: linear(x, w, b, residual=r, alpha=0.5, beta=2, activation="gelu"),
        [(8, 16), (16, 12), (12,), (8, 12)],
    ),
    "linear, relu": (
        lambda x, w, b, **_: linear(x, w, b, alpha=0.0, activation="relu"),
        [(8, 16), (16, 12), (12,)],
    ),
    "gated_linear": (
        lambda x, v, w, b, **_: jax_streamk.gated_linear(x, v, w, b_up=b),
        [(8, 16), (16, 12), (16, 12), (12,)],
    ),
    "gated_linear, stacked": (
        lambda x, w, b, **_: jax_streamk.gated_linear(x, w, None, b),
        [(8, 16), (16, 2, 12), (2, 12)],
    ),
    "ragged_dot": (
        lambda x, w, b, **given: jax_streamk.ragged_dot(x, w, bias=b, activation="sigmoid", **given),
        [(8, 16), (3, 16, 12), (3, 12)],
    ),
    "ragged_dot_general": (
        lambda x, y, group_sizes, **_: jax_streamk.ragged_dot_general(x, y, group_sizes, OF_K),
        [(8, 16), (8, 12)],
    ),
    "ragged_gated": (
        lambda x, v, w, b, **given: jax_streamk.ragged_gated(x, v, w, b_gate=b, **given),
        [(8, 16), (3, 16, 12), (3, 16, 12), (3, 12)],
    ),
    "accelerate": (
        lambda x, w, b, **_: jax_streamk.accelerate(lambda x, w, b: jax.nn.silu(x @ w + b))(x, w, b),
        [(8, 16), (16, 12), (12,)],
    ),
    "chain": (
        lambda x, w, v, **_: jax_streamk.chain(lambda x, w, v: jax.nn.silu(x @ w) @ v)(x, w, v),
        [(8, 16), (16, 12), (12, 8)],
    ),
}
OF_K = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def test_all_products_are_of_arrays():
    takes = lambda name: inspect.signature(getattr(jax_streamk, name)).parameters
    functions = [name for name in jax_streamk.__all__ if inspect.isfunction(getattr(jax_streamk, name))]
    products = {name for name in functions if "schedule" in takes(name)} - {"plan", "plot_schedules"}
    assert products == {name.split(",")[0] for name in OF_ARRAYS}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_calls_outside_of_jit_upload_no_constant(name):
    jax.clear_caches()
    f, shapes = OF_ARRAYS[name]
    f = functools.partial(f, **{name: jnp.array(x) for name, x in INTEGERS.items()})
    arrays = [jnp.asarray(normal(shape, i)) for i, shape in enumerate(shapes)]
    mapped = [jnp.stack([x, -x]) for x in arrays]
    with jax.transfer_guard("disallow"):
        cotangent = f(*arrays)
        jax.linearize(f, *arrays)[1](*arrays)
        jax.vjp(f, *arrays)[1](cotangent)
        jax.vmap(lambda *xs: jax.jvp(f, xs, xs))(*mapped)
        for i in range(len(arrays)):
            axes = [0 if i == j else None for j in range(len(arrays))]
            jax.vmap(f, axes)(*arrays[:i], mapped[i], *arrays[i + 1 :])


def test_calls_outside_of_traces_follow_the_settings_in_force():
    a, b = jnp.asarray(A), jnp.asarray(B)
    for _ in range(2):
        assert matmul(a, b).dtype == np.float32
        assert matmul(a, b, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
        with jax.enable_x64(True):
            assert matmul(a.astype(np.float64), b).dtype == np.float64
        with jax.default_device(jax.devices("cpu")[1]):
            assert matmul(A, B).devices() == {jax.devices("cpu")[1]}
        assert matmul(jax.device_put(a, jax.devices("cpu")[2]), B).devices() == {jax.devices("cpu")[2]}
        with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="strict"):
            matmul(a, b.astype(jnp.bfloat16))
        with pytest.raises(ValueError, match="contract sizes 40 and 24"):
            matmul(a, a)
        with pytest.raises(ValueError, match="1000"):
            matmul(a, b, schedule=jax_streamk.SplitK(1000))
        with pytest.raises(TypeError, match="alpha is bool"):
            linear(a, b, alpha=True)
        assert_same(linear(a, b, alpha=1.0), A @ B)
        assert_same(linear(a, b, alpha=jnp.float32(2)), 2 * A @ B)
        weak = jnp.broadcast_to(3.0, (2, 2))
        assert weak.weak_type and matmul(weak, weak).weak_type and not matmul(weak, a[:2]).weak_type
