"""Products over eight simulated CPU devices, against XLA's: values, gradients, types and collectives."""

import collections
import functools
import itertools
import os
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import persistent_cache
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streamk
from jax_streamk import DataParallel, SplitK, StreamK, accelerate, dot_general, linear, matmul
from jax_streamk.product import partition
from jax_streamk.product.dense import Dense

AUTO, EXPLICIT = (
    jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    for kind in (AxisType.Auto, AxisType.Explicit)
)
SIZES = dict(b=8, m=16, n=40, k=24)
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def place(*placed, mesh=AUTO):
    """Puts arrays, each given with its PartitionSpec, on the mesh."""
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in placed]


def compiled(function, *operands, **options):
    return jax.jit(function, **options).lower(*operands).compile()


def collectives(program):
    """The number of each kind, counted per array: depending on the rest of the program, XLA combines some."""
    found = re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\((.*?)\)", program.as_text())
    return collections.Counter(kind for kind, operands in found for _ in range(operands.count("%")))


def our_calls(program):
    """The attributes of our custom calls in a compiled program, which must have no other product."""
    text = program.as_text()
    assert not re.search(r" dot\(|__onednn|__cublas", text)
    found = re.findall(r'custom_call_target="jax_streamk_host_gemm".*backend_config=\{(.*?)\}', text)
    return [dict(re.findall(r"(\w+) = (\w+)", attributes)) for attributes in found]


def macs(call):
    return np.prod([int(call[extent]) for extent in ("batch", "m", "n", "k")])


def with_gradients(function):
    """Returns the result of ``function`` and its gradients, with the last operand as cotangent."""

    def result_and_gradients(*operands):
        out, pullback = jax.vjp(function, *operands[:-1])
        return out, *pullback(operands[-1])

    return result_and_gradients


def assert_as_exact(found, xlas, exact):
    """The root mean square error of each array against float64 is at most twice XLA's, plus a rounding or a few."""
    for got, xla, want in zip(*map(jax.tree.leaves, (found, xlas, exact)), strict=True):
        assert got.dtype == xla.dtype and got.shape == xla.shape
        rounding = max(2.0**-21, float(jnp.finfo(got.dtype).eps) / 2)
        got, xla = (np.asarray(x, np.float64) for x in (got, xla))
        ours, theirs, size = (np.sqrt(np.mean(np.abs(x) ** 2)) for x in (got - want, xla - want, want))
        assert ours <= 2 * theirs + rounding * size, f"off by {ours:.1e}, XLA by {theirs:.1e}"


def in_float64(function, *operands):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(function)(*(np.asarray(x, np.float64) for x in operands)))


def assert_like_xla(ours, xlas, *operands, **options):
    """Compares values, gradients (the last operand is the cotangent) and collectives. Returns both numbers of these."""
    programs = [compiled(with_gradients(function), *operands, **options) for function in (ours, xlas)]
    results = [program(*operands) for program in programs]
    assert_as_exact(*results, in_float64(with_gradients(xlas), *operands))
    assert [x.sharding for x in results[0]] == [x.sharding for x in results[1]]
    mine, theirs = map(collectives, programs)
    assert mine.total() <= theirs.total(), (mine, theirs)
    return mine, theirs


# Automatic partitioning.


NUMBERS = (((0,), (2,)), ((1,), (1,)))
FORMULAS = {
    "dot_general": (
        ("kbm", "nbk"),
        lambda a, b: dot_general(a, b, NUMBERS),
        lambda a, b: lax.dot_general(a, b, NUMBERS),
    ),
    "matmul": (("mk", "bkn"), matmul, jnp.matmul),
    "linear": (
        ("bmk", "kn", "n", "bmn"),
        lambda x, w, bias, residual: linear(x, w, bias, residual=residual, activation="silu", alpha=0.5, beta=2),
        lambda x, w, bias, residual: jax.nn.silu(0.5 * (x @ w) + 2 * residual + bias),
    ),
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("x, y", list(itertools.combinations_with_replacement("bmnk-", 2)))
def test_a_mesh_axis_divides_a_factor(x, y, formula):
    """Axes x and y of the mesh each divide batch, m, n or k in every array that has it, or nothing (-)."""
    names, ours, xlas = FORMULAS[formula]
    axes = {f: tuple(axis for axis, factor in (("y", y), ("x", x)) if factor == f) for f in "bmnk"}
    operands = [
        jax.device_put(
            normal(*(SIZES[f] for f in dims), seed=i), NamedSharding(AUTO, P(*(axes[f] or None for f in dims)))
        )
        for i, dims in enumerate((*names, "bmn"))
    ]
    program = compiled(ours, *operands[:-1])
    assert collectives(program) == ({"all-reduce": 1} if "k" in (x, y) else {})
    # The call multiplies the shards. Unless k is divided it applies the epilogue, which otherwise follows the sum.
    (call,) = our_calls(program)
    assert macs(call) * (2 if x != "-" else 1) * (4 if y != "-" else 1) == np.prod(list(SIZES.values()))
    assert (call["has_bias"] == "true") == (formula == "linear" and "k" not in (x, y))
    mine, theirs = assert_like_xla(ours, xlas, *operands)
    assert mine <= theirs


# Divisions of lhs (m, k) and rhs (k, n), of the result if requested, and the collectives of the forward pass. All but
# the scattered sums are from data, fully sharded data and tensor parallelism.
MOVED = {
    "k scattered over m": ((None, "x"), ("x", None), ("x", None), {"reduce-scatter": 1}),
    "k scattered over n": ((None, "x"), ("x", None), (None, "x"), {"reduce-scatter": 1}),
    "k scattered over m, two axes": ((None, ("x", "y")), (("x", "y"), None), (("x", "y"), None), {"reduce-scatter": 1}),
    "k scattered over m that is divided": (("x", "y"), ("y", None), (("x", "y"), None), {"reduce-scatter": 1}),
    "k scattered over n where m is divided": (("x", "y"), ("y", None), ("x", "y"), {"reduce-scatter": 1}),
    "k scattered over m and n": ((None, ("x", "y")), (("x", "y"), None), ("x", "y"), {"reduce-scatter": 2}),
    "k scattered in part": (
        (None, ("x", "y")),
        (("x", "y"), None),
        ("x", None),
        {"reduce-scatter": 1, "all-reduce": 1},
    ),
    "k in one operand": ((None, "x"), (None, None), None, {"all-reduce": 1}),
    "rhs stored by k": (("x", None), ("x", None), None, {"all-gather": 1}),
    "rhs stored by n": (("x", None), (None, "x"), None, {"all-gather": 1}),
    "rhs stored by k, columns divided": (("x", None), ("x", "y"), None, {"all-gather": 1}),
    "rhs stored by n, k divided": (("x", "y"), ("y", "x"), None, {"all-gather": 1, "all-reduce": 1}),
    "rhs replicated": (("x", None), (None, None), None, {}),
    "result divided": ((None, None), (None, None), ("x", "y"), {}),
}


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("case", MOVED)
def test_operands_and_results_that_move(case, epilogue):
    lhs, rhs, asked, expected = MOVED[case]
    operands = place((normal(16, 24), P(*lhs)), (normal(24, 40), P(*rhs)))
    products = matmul, jnp.matmul
    if epilogue:
        operands += place((normal(40), P()), (normal(16, 40, seed=1), P(*asked or ())))
        products = FORMULAS["linear"][1:]

    def constrained(product):
        def function(*operands):
            out = product(*operands)
            return out if asked is None else lax.with_sharding_constraint(out, NamedSharding(AUTO, P(*asked)))

        return function

    program = compiled(constrained(products[0]), *operands)
    assert collectives(program) == expected
    assert len(our_calls(program)) == 1
    if asked:
        program = compiled(products[0], *operands, out_shardings=NamedSharding(AUTO, P(*asked)))
        assert collectives(program) == expected
    # Gradients, wanted where the operands are.
    (cotangent,) = place((normal(16, 40, seed=2), program.output_shardings.spec))
    where = program.output_shardings, *(x.sharding for x in operands)
    assert_like_xla(*map(constrained, products), *operands, cotangent, out_shardings=where)


def random_division(rng, dims):
    axes = [() for _ in range(len(dims) + 1)]
    for axis in rng.permutation(["x", "y"]):
        axes[rng.integers(len(axes))] += (str(axis),)
    return P(*axes[:-1])


def divided_at_random(rng, names):
    """An array with dimensions of each of ``names``."""
    return place(*((normal(*(SIZES[f] for f in dims)), random_division(rng, dims)) for dims in names))


@pytest.mark.parametrize("seed", range(12))
def test_any_division_is_computed(seed):
    """The arrays may be divided in any way, consistently or not."""
    names, ours, xlas = list(FORMULAS.values())[seed % 3]
    rng = np.random.default_rng(seed)
    operands = divided_at_random(rng, names)
    out = NamedSharding(AUTO, random_division(rng, "bmn"))
    found, xla = (jax.jit(f, out_shardings=out)(*operands) for f in (ours, xlas))
    assert_as_exact(found, xla, in_float64(xlas, *operands))


# (m, k, n): the mesh divides some of them unevenly.
UNEVEN = {"m": (18, 24, 40), "n": (16, 24, 42), "k": (16, 26, 40), "all": (3, 5, 7)}


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_sizes(case):
    m, k, n = UNEVEN[case]
    a, b, cotangent = normal(m, k), normal(k, n), normal(m, n, seed=1)

    def constrained(product):
        def function(a, b):
            a = lax.with_sharding_constraint(a, NamedSharding(AUTO, P("x", "y")))
            b = lax.with_sharding_constraint(b, NamedSharding(AUTO, P("y", "x")))
            return lax.with_sharding_constraint(product(a, b), NamedSharding(AUTO, P("y", "x")))

        return function

    results = [jax.jit(with_gradients(constrained(f)))(a, b, cotangent) for f in (matmul, jnp.matmul)]
    assert_as_exact(*results, in_float64(with_gradients(jnp.matmul), a, b, cotangent))


# Explicit sharding: the mesh is part of the types.

# Divisions of a and b, and out_sharding.
TYPED = {
    "m, n": (("x", None), (None, "y"), None),
    "m, k": (("x", "y"), ("y", None), P("x", None)),
    "k scattered": (("x", "y"), ("y", None), P("x", "y")),
    "k over two axes": ((None, ("x", "y")), (("x", "y"), None), P(None, None)),
    "batch": (("x", None, None), ("x", None, "y"), None),
    "batch, k": (("x", None, "y"), ("x", "y", None), P("x", None, None)),
    "vector": (("x", "y"), ("y",), P("x")),
    "rhs replicated": (("x", None), (None, None), P("x", "y")),
    "k in one operand": (("x", "y"), (None, "y"), None),
    "stacked": ((None, None), ("x", None, "y"), P(None, "x", "y")),
}


def assert_typed_like_xla(ours, xlas, *operands, atol=1e-5):
    """Compares types and values of results and gradients; ours may have no more collectives."""
    functions = [lambda *operands, f=f: with_gradients(f)(*operands, jnp.cos(f(*operands))) for f in (ours, xlas)]
    programs = [compiled(function, *operands) for function in functions]
    found, xla = (program(*operands) for program in programs)
    assert [jax.typeof(x) for x in found] == [jax.typeof(x) for x in xla]
    for got, want in zip(found, xla, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol)
    mine, theirs = map(collectives, programs)
    assert mine.total() <= theirs.total(), (mine, theirs)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("case", TYPED)
def test_explicit_sharding(case, named):
    *specs, out = TYPED[case]
    if named:
        out = NamedSharding(EXPLICIT, out or P(*specs[0][:-1], specs[1][-1]))
    with jax.set_mesh(EXPLICIT):
        shapes = (16, 24) if len(specs[0]) == 2 else (8, 16, 24), ((24,), (24, 40), (8, 24, 40))[len(specs[1]) - 1]
        a, b = place(*((normal(*shape), P(*spec)) for shape, spec in zip(shapes, specs)), mesh=EXPLICIT)
        ours, xlas = ((lambda a, b, f=f: f(a, b, out_sharding=out)) for f in (matmul, jnp.matmul))
        # The gradient of a matrix that a stack shares is a sum of eight times as many terms.
        assert_typed_like_xla(ours, xlas, a, b, atol=3e-5 if case == "stacked" else 1e-5)
        assert our_calls(compiled(ours, a, b))
        assert jax.typeof(ours(a, b)) == jax.typeof(xlas(a, b))  # outside of jit


@pytest.mark.parametrize("numbers", [(((2,), (2,)), ((1,), (1,))), (((0,), (0,)), ((2,), (2,)))])
def test_an_explicit_mesh_of_one_device(numbers):
    """One kernel runs the whole product, and stores or transposes its result, although the types have shardings."""
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:1])
    with jax.set_mesh(mesh):
        a, b = place(
            (normal(16, 8, 24), P("x", None, None)), (normal(16, 8, 24, seed=1), P(None, None, None)), mesh=mesh
        )
        assert_typed_like_xla(*(lambda a, b, f=f: f(a, b, numbers) for f in (dot_general, lax.dot_general)), a, b)


def test_explicit_sharding_of_linear():
    with jax.set_mesh(EXPLICIT):
        operands = place(
            (normal(16, 24), P("x", "y")),
            (normal(24, 40), P("y", None)),
            (normal(40), P(None)),
            (normal(16, 40), P("x", None)),
            mesh=EXPLICIT,
        )
        for out, collective in ((P("x", None), "all-reduce"), (P("x", "y"), "reduce-scatter")):

            def ours(x, w, bias, residual):
                return linear(x, w, bias, residual=jax.reshard(residual, out), activation="gelu", out_sharding=out)

            def xlas(x, w, bias, residual):
                product = jnp.matmul(x, w, out_sharding=out)
                return jax.nn.gelu(
                    product + jax.reshard(residual, out) + jax.reshard(bias, P(out[1])), approximate=False
                )

            assert_typed_like_xla(ours, xlas, *operands)
            assert collectives(compiled(ours, *operands)) == {collective: 1}


@pytest.mark.parametrize("spec_residual", [P(None, None), P("x", None), P(None, "y")], ids=str)
@pytest.mark.parametrize("spec_bias", [P(None), P("y")], ids=str)
@pytest.mark.parametrize("spec_x", [P(None, None), P("x", None)], ids=str)
def test_bias_and_residual_take_the_sharding_of_the_product(spec_x, spec_bias, spec_residual):
    with jax.set_mesh(EXPLICIT):
        x, w, bias, residual = operands = place(
            (normal(16, 24), spec_x),
            (normal(24, 40), P(None, None)),
            (normal(40), spec_bias),
            (normal(16, 40), spec_residual),
            mesh=EXPLICIT,
        )
        assert jax.typeof(linear(x, w, bias, residual=residual)) == jax.typeof(jnp.matmul(x, w))
        layer = lambda x, w, bias, residual: linear(x, w, bias, residual=residual, activation="silu")
        gradients = jax.jit(jax.grad(lambda *operands: layer(*operands).sum(), argnums=(0, 1, 2, 3)))(*operands)
        assert [*map(jax.typeof, gradients)] == [*map(jax.typeof, operands)]
        out, tangent = jax.jvp(lambda residual: layer(x, w, bias, residual), (residual,), (residual,))
        assert jax.typeof(out) == jax.typeof(tangent)
        exact = np.asarray(x) @ np.asarray(w) + np.asarray(bias) + np.asarray(residual)
        np.testing.assert_allclose(out, exact / (1 + np.exp(-exact)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec_a, spec_b", [((None, "x"), ("x", None)), ((None, "x"), ("y", None)), (("x", None), (None, "x"))]
)
def test_explicit_sharding_that_lax_refuses(spec_a, spec_b):
    with jax.set_mesh(EXPLICIT):
        a, b = place((normal(16, 24), P(*spec_a)), (normal(24, 40), P(*spec_b)), mesh=EXPLICIT)
        with pytest.raises(Exception) as expected:
            jnp.matmul(a, b)
        for product in (matmul, linear):
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                product(a, b)


def test_a_sum_left_open():
    """Each device keeps its term of the sum until a reshard adds them; such a product is left to XLA."""
    with jax.set_mesh(EXPLICIT):
        a, b = place((normal(16, 24), P(None, "x")), (normal(24, 40), P("x", None)), mesh=EXPLICIT)
        open_sum = P(None, None, unreduced={"x"})

        def closed(product, **options):
            return lambda a, b: jax.reshard(product(a, b, out_sharding=open_sum, **options), P(None, None))

        assert_typed_like_xla(closed(matmul), closed(jnp.matmul), a, b)
        with pytest.raises(ValueError, match="schedule=.* only XLA supports an out_sharding with unreduced axes"):
            closed(matmul, schedule=DataParallel())(a, b)
        with pytest.raises(
            ValueError, match="linear: out_sharding=.* the sum over devices open, but the epilogue needs it"
        ):
            closed(linear, activation="relu")(a, b)


def test_explicit_sharding_under_vmap():
    with jax.set_mesh(EXPLICIT):
        a, b = place((normal(8, 16, 24), P("x", None, "y")), (normal(24, 40), P("y", None)), mesh=EXPLICIT)
        ours, xlas = (
            jax.vmap(lambda a, b, f=f: f(a, b, out_sharding=P(None, "y")), in_axes=(0, None))
            for f in (matmul, jnp.matmul)
        )
        assert_typed_like_xla(ours, xlas, a, b)


def test_vmap_over_a_mesh_axis():
    a, b = place((normal(8, 16, 24), P("x")), (normal(8, 24, 40), P("x", "y")))
    for f in (matmul, linear):
        program = compiled(jax.vmap(f, spmd_axis_name="x"), a, b)
        assert collectives(program) == {"all-reduce": 1}
        np.testing.assert_allclose(program(a, b), a @ b, rtol=1e-5, atol=1e-5)


# What accelerate fuses.

# The dimensions of the operands, and a function of a product.
CHAINS = {
    "activation": (("bmk", "kn"), lambda f: lambda x, w: jax.nn.silu(f(x, w))),
    "scale of the transpose": (("mk", "kn"), lambda f: lambda x, w: 0.5 * f(x, w).T),
    "bias": (("mk", "kn", "n"), lambda f: lambda x, w, bias: jnp.tanh(f(x, w) + bias)),
    "bias of heads": (
        ("bmk", "kn", "n"),
        lambda f: lambda x, w, bias: jnp.tanh(f(x, w).reshape(8, 16, 8, 5) + bias.reshape(8, 5)),
    ),
    "residual": (("mk", "kn", "mn"), lambda f: lambda x, w, residual: f(x, w) + residual),
    "both": (
        ("bmk", "kn", "n", "bmn"),
        lambda f: lambda x, w, bias, residual: jax.nn.relu(f(x, w) + bias + residual),
    ),
    "layer": (
        ("mk", "kn", "n", "nk"),
        lambda f: lambda x, up, bias, down: x + f(jax.nn.gelu(f(x, up) + bias), down),
    ),
}


def assert_divided_as_unfused(chain, *operands, wrapped=lambda f: f):
    """Results, gradients, their shardings and collectives are those of the same products without ``accelerate``."""

    def result_and_gradients(product):
        function = wrapped(accelerate(chain(product)) if product is jnp.matmul else chain(product))
        loss = lambda *operands: jnp.cos(function(*operands)).sum()
        return lambda *operands: (function(*operands), *jax.grad(loss, tuple(range(len(operands))))(*operands))

    programs = [compiled(result_and_gradients(product), *operands) for product in (jnp.matmul, matmul)]
    for got, want in zip(*(program(*operands) for program in programs), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim), (got.sharding, want.sharding)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    mine, theirs = map(collectives, programs)
    assert mine.total() <= theirs.total(), (mine, theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CHAINS)
def test_fused_products_are_divided_as_others(case, seed):
    names, chain = CHAINS[case]
    operands = divided_at_random(np.random.default_rng([seed, *case.encode()]), names)
    assert any(row.fused for row in accelerate(chain(jnp.matmul)).explain(*operands).rows)
    assert_divided_as_unfused(chain, *operands)


@pytest.mark.parametrize("spec_w, spec_residual", [(P("y"), P(None, "x")), (P(None, "y"), P(None, "x"))], ids=str)
def test_a_residual_that_is_divided_unlike_the_product(spec_w, spec_residual):
    operands = place(
        (normal(16, 24), P(None, "y") if spec_w == P("y") else P()),
        (normal(24, 40), spec_w),
        (normal(16, 40), spec_residual),
    )
    chain = CHAINS["residual"][1]
    assert_divided_as_unfused(chain, *operands)
    got, want = accelerate(chain(jnp.matmul))(*operands), chain(matmul)(*operands)  # outside of jit
    assert got.sharding.is_equivalent_to(want.sharding, 2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec_residual", [P(None, None), P("x", None), P(None, "y"), P("x", "y")], ids=str)
@pytest.mark.parametrize("spec_bias", [P(None), P("y")], ids=str)
def test_fused_products_with_explicit_shardings(spec_bias, spec_residual):
    with jax.set_mesh(EXPLICIT):
        operands = place(
            (normal(16, 24), P("x", None)),
            (normal(24, 40), P(None, "y")),
            (normal(40), spec_bias),
            (normal(16, 40), spec_residual),
            mesh=EXPLICIT,
        )
        ours, unfused = (
            lambda x, w, bias, residual, f=f: jnp.tanh(f(x, w) + bias + residual) for f in (jnp.matmul, matmul)
        )
        assert_typed_like_xla(accelerate(ours), unfused, *operands)


def test_fused_products_in_a_shard_map_that_leaves_an_axis_to_xla():
    names, chain = CHAINS["both"]
    operands = place(*((normal(*(SIZES[f] for f in dims)), P(*[None] * (len(dims) - 1), "y")) for dims in names))
    specs = P("x"), P(), P(), P("x")
    wrapped = lambda f: mapped(f, specs, P("x"), axis_names={"x"})
    assert_divided_as_unfused(chain, *operands, wrapped=wrapped)


# shard_map.


def mapped(function, in_specs, out_specs, mesh=AUTO, **options):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


# A function of a product that runs on the shards; divisions of x (16, 24), w (24, 40) and the result.
SHARDED = {
    "w replicated": (lambda f: lambda x, w: f(x, w), P(("x", "y")), P(), P(("x", "y"))),
    "x replicated": (lambda f: lambda x, w: f(x, w), P(), P(None, "y"), P(None, "y")),
    "k summed": (lambda f: lambda x, w: lax.psum(f(x, w), "y"), P("x", "y"), P("y"), P("x")),
    "k scattered": (
        lambda f: lambda x, w: lax.psum_scatter(f(x, w), "y", tiled=True),
        P("x", "y"),
        P("y"),
        P(("x", "y")),
    ),
    "w gathered": (lambda f: lambda x, w: f(x, lax.all_gather(w, "x", tiled=True)), P("x"), P("x"), P("x")),
    "vmap": (lambda f: lambda x, w: jax.vmap(f, in_axes=(0, None))(x, w), P("x"), P(None, "y"), P("x", "y")),
    "remat": (lambda f: jax.checkpoint(lambda x, w: jnp.sin(f(x, w))), P("x"), P(), P("x")),
    "gradient": (lambda f: lambda x, w: jax.grad(lambda w: jnp.sum(jnp.sin(f(x, w))))(w)[None], P("x"), P(), P("x")),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", SHARDED)
def test_shard_map(case, check_vma):
    """Values and gradients, including those of replicated operands, are as with XLA's product."""
    body, *specs, out_spec = SHARDED[case]
    x, w = place((normal(16, 24), specs[0]), (normal(24, 40), specs[1]))
    products = {
        matmul: jnp.matmul,
        lambda x, w: linear(x, w, w[0], activation="tanh", alpha=2): lambda x, w: jnp.tanh(2 * (x @ w) + w[0]),
    }
    for ours, xlas in products.items():
        functions = [mapped(body(f), tuple(specs), out_spec, check_vma=check_vma) for f in (ours, xlas)]
        (cotangent,) = place((normal(*jax.eval_shape(functions[1], x, w).shape, seed=1), out_spec))
        programs = [compiled(with_gradients(f), x, w, cotangent) for f in functions]
        for got, want in zip(*(program(x, w, cotangent) for program in programs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert our_calls(programs[0])
        mine, theirs = map(collectives, programs)
        assert mine == theirs


def test_vmap_of_shard_map():
    xs, ws, cotangent = normal(3, 16, 24), normal(3, 24, 40), normal(3, 16, 40, seed=1)
    ours, xlas = (
        jax.vmap(mapped(lambda x, w, f=f: lax.psum(f(x, w), "y"), (P("x", "y"), P("y")), P("x")))
        for f in (matmul, jnp.matmul)
    )
    assert_like_xla(ours, xlas, xs, ws, cotangent)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_that_leaves_an_axis_to_xla(check_vma):
    x, w = place((normal(16, 24), P("x", "y")), (normal(24, 40), P("y")))

    def program(product):
        return mapped(product, (P("x"), P()), P("x"), axis_names={"x"}, check_vma=check_vma)

    assert_like_xla(program(linear), program(jnp.matmul), x, w, *place((normal(16, 40), P("x"))))
    refused = r"products in a shard_map that leaves mesh axes automatic; Auto\(\) leaves the product to XLA"
    with pytest.raises(ValueError, match=refused):
        jax.jit(program(lambda x, w: matmul(x, w, schedule=StreamK())))(x, w)


# Schedules, and what programs do with products.


@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(3), SplitK(2, "separate"), StreamK()])
def test_the_schedule_is_that_of_the_local_product(schedule):
    a, b = place((normal(16, 4 * 192), P("x", "y")), (normal(4 * 192, 40), P("y")))
    program = compiled(lambda a, b: matmul(a, b, schedule=schedule), a, b)
    (call,) = our_calls(program)
    assert (call["m"], call["k"]) == ("8", "192")
    alone = compiled(lambda a, b: matmul(a, b, schedule=schedule), normal(8, 192), normal(192, 40))
    assert call == our_calls(alone)[0]
    assert_as_exact(program(a, b), jnp.matmul(a, b), in_float64(jnp.matmul, a, b))


def test_without_shardy_products_are_xlas():
    operands = place((normal(16, 24), P("x", "y")), (normal(24, 40), P("y")), (normal(40), P()))
    ours, theirs = functools.partial(linear, activation="relu"), lambda x, w, bias: jax.nn.relu(x @ w + bias)
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for mine, stock, args in ((matmul, jnp.matmul, operands[:2]), (ours, theirs, operands)):
            program = compiled(mine, *args)
            assert "custom-call" not in program.as_text()
            assert collectives(program) == collectives(compiled(stock, *args))
            assert_as_exact(program(*args), stock(*args), in_float64(stock, *args))
            with pytest.raises(ValueError, match=r"schedule=StreamK.* cannot run: .*jax_use_shardy_partitioner is off"):
                compiled(functools.partial(mine, schedule=StreamK()), *args)
        assert len(our_calls(compiled(matmul, normal(16, 24), normal(24, 40)))) == 1  # one device
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_sums_of_narrow_types(dtype):
    """Across devices they have the result's type, as XLA's do."""
    operands = place(
        (normal(16, 512).astype(dtype), P("x", "y")),
        (normal(512, 40).astype(dtype), P("y")),
        (normal(16, 40).astype(dtype), P("x")),
    )
    assert_like_xla(matmul, jnp.matmul, *operands)


def test_a_schedule_that_does_not_fit_the_local_product():
    a, b = place((normal(16, 512), P(None, "y")), (normal(512, 40), P("y")))
    schedule = SplitK(8)
    jax_streamk.plan(a, b, schedule=schedule)  # the whole product would allow it
    with pytest.raises(
        Exception, match=r"schedule=SplitK\(splits=8.* cannot run \[16, 128\] @ \[128, 40\].* exceeds its 2 k-tiles"
    ):
        jax.jit(lambda a, b: matmul(a, b, schedule=schedule))(a, b)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.complex64, bool])
@pytest.mark.parametrize("out, collective", [(P("x"), "all-reduce"), (P("x", "y"), "reduce-scatter")])
def test_products_left_to_xla_are_divided_too(out, collective, dtype):
    a, b = (
        normal(*shape) > 1.5 if dtype is bool else (3 * normal(*shape)).astype(dtype) for shape in ((16, 24), (24, 40))
    )
    operands = place((a, P("x", "y")), (b, P("y")))
    program = compiled(matmul, *operands, out_shardings=NamedSharding(AUTO, out))
    assert collectives(program) == {collective: 1}
    found = program(*operands)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, a @ b, rtol=1e-5, atol=1e-5)


def mlp(product):
    def layer(x, w):
        return jnp.tanh(0.1 * product(jnp.tanh(0.2 * product(x, w)), w.T))

    return layer


# Programs around a layer of two products.
PROGRAMS = {
    "scan": lambda layer: lambda x, w: lax.scan(lambda x, _: (layer(x, w), None), x, length=3)[0],
    "while": lambda layer: lambda x, w: lax.fori_loop(0, 3, lambda _, x: layer(x, w), x),
    "remat": lambda layer: jax.checkpoint(layer),
    "dots_saveable": lambda layer: jax.checkpoint(layer, policy=jax_streamk.dots_saveable),
    "cond": lambda layer: lambda x, w: lax.cond(jnp.sum(x) < 1e9, layer, lambda x, w: x, x, w),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs(case):
    operands = place((normal(16, 24), P("x")), (normal(24, 40), P(None, "y")), (normal(16, 24, seed=1), P("x")))
    where = tuple(x.sharding for x in (operands[2], *operands[:2]))
    ours, xlas = (PROGRAMS[case](mlp(f)) for f in (matmul, jnp.matmul))
    if case == "while":
        assert_as_exact(
            *(jax.jit(f, out_shardings=where[0])(*operands[:2]) for f in (ours, xlas)), in_float64(xlas, *operands[:2])
        )
    else:
        assert_like_xla(ours, xlas, *operands, out_shardings=where)


def test_donated_operands_and_given_shardings():
    by_rows, by_columns = (NamedSharding(AUTO, spec) for spec in (P("x"), P(None, "y")))
    x, w, r = normal(16, 24), normal(24, 40), normal(16, 40)
    (residual,) = place((r, P("x", "y")))
    step = jax.jit(
        lambda x, w, residual: linear(x, w, residual=residual, activation="relu"),
        in_shardings=(by_rows, by_columns, residual.sharding),
        out_shardings=residual.sharding,
        donate_argnums=2,
    )
    found = step(x, w, residual)
    assert residual.is_deleted() and found.sharding.spec == P("x", "y")
    np.testing.assert_allclose(found, np.maximum(x @ w + r, 0), rtol=1e-5, atol=1e-5)
    assert collectives(step.lower(x, w, found).compile()) == {}


# Products of the same arrays; each differs from the previous one in one argument.
ALIKE = [
    dict(activation="silu"),
    dict(activation="tanh"),
    dict(activation="tanh", alpha=2.0),
    dict(activation="tanh", alpha=2.0, beta=3.0),
    dict(activation="tanh", alpha=2.0, beta=3.0, schedule=SplitK(2)),
    dict(activation="tanh", alpha=2.0, beta=3.0, schedule=SplitK(2, "separate")),
    dict(activation="tanh", alpha=2.0, beta=3.0, schedule=SplitK(2, "separate"), precision="highest"),
]


@pytest.fixture
def compilation_cache(tmp_path):
    """A persistent cache whose keys omit addresses of Python objects, as if two were equal by chance."""
    with persistent_cache(tmp_path, jax_remove_custom_partitioning_ptr_from_cache_key=True):
        yield tmp_path


def test_the_persistent_cache_tells_products_apart(compilation_cache):
    x, w, residual = normal(16, 192), normal(192, 40), normal(16, 40)
    operands = place((x, P("x")), (w, P()), (residual, P("x")))
    for again in (False, True):
        for i, options in enumerate(ALIKE):

            def layer(x, w, residual):  # the name is in the key
                return linear(x, w, residual=residual, **options)

            program = compiled(layer, *operands)
            assert len(list(compilation_cache.glob("jit_layer-*-cache"))) == (len(ALIKE) if again else i + 1)
            activation = dict(silu=jax.nn.silu, tanh=jnp.tanh)[options["activation"]]
            want = activation(options.get("alpha", 1.0) * (x @ w) + options.get("beta", 1.0) * residual)
            np.testing.assert_allclose(program(*operands), want, rtol=1e-4, atol=1e-4)
        jax.clear_caches()


def test_what_the_persistent_cache_knows_of_a_product_is_the_same_in_every_process():
    operands = place((normal(16, 192), P("x")), (normal(192, 40), P()))
    for precision in (None, "highest", lax.DotAlgorithmPreset.F32_F32_F32):
        f = jax.jit(lambda x, w: linear(x, w, activation="silu", precision=precision, schedule=StreamK()))
        (meaning,) = re.findall(r'jax_streamk = "(.*?[^\\])"', f.lower(*operands).as_text())
        for part in ("silu", "StreamK", "numbers", "preferred_element_type", "precision", "Device"):
            assert part in meaning
        assert "0x" not in meaning and " at " not in meaning


class FactorsOfScales(partition.Factors):
    """Those of a product of rows by columns whose lhs has a scale for each row and 8 elements of k."""

    shared = ("scale",)

    def __init__(self):
        super().__init__(Dense((((1,), (0,)), ((), ())), None, None), 2, 2)
        (k,) = self.contract
        self.blocks = {k: 8}
        self.operands |= dict(scale=("m0", partition.Block(k)))


@pytest.mark.parametrize("axes", [(None, "x", None), ("x", "y", None), (None, ("x", "y"), None), ("y", None, "x")])
def test_a_dimension_may_be_a_block_of_another(axes):
    """Where devices divide k they divide its scales alike, by whole blocks."""
    m, k, n = axes
    lhs, rhs, scale = normal(16, 64), normal(64, 24), normal(16, 8)
    scaled = lambda lhs, rhs, *, scale: (lhs * jnp.repeat(scale, 8, 1)) @ rhs
    given = lambda **operands: scaled(operands["lhs"], operands["rhs"], scale=operands["scale"])
    f = partition.partitioned(scaled, lambda out, **_: out, given, FactorsOfScales())
    placed = place((lhs, P(m, k)), (rhs, P(k, n)), (scale, P(m, k)))
    program = compiled(f, *placed)
    np.testing.assert_allclose(program(*placed), scaled(lhs, rhs, scale=scale), rtol=1e-4, atol=1e-4)
    assert collectives(program) == ({"all-reduce": 1} if k else {})
    # Parts of a block are not worth a scale of their own: 4 blocks on 8 devices.
    short = place((lhs[:, :32], P(m, k)), (rhs[:32], P(k, n)), (scale[:, :4], P(m, None)))
    np.testing.assert_allclose(
        compiled(f, *short)(*short), scaled(lhs[:, :32], rhs[:32], scale=scale[:, :4]), rtol=1e-4, atol=1e-4
    )


def test_metadata_stays_on_a_product():
    operands = place((normal(16, 192), P("x")), (normal(192, 40), P()))
    with set_xla_metadata(layer="first"):
        text = jax.jit(lambda x, w: matmul(x, w)).lower(*operands).as_text()
    assert re.search(r'mhlo.frontend_attributes = \{jax_streamk = ".*", layer = "first"\}', text)


def test_dimensions_of_k_in_any_order():
    """An attention's output projection: jnp.einsum contracts h and d in the order of the alphabet."""
    (a,) = place((normal(4, 6, 8, 16), P("x", None, "y")))
    w = normal(8, 16, 24)
    ours, xlas = (jax.jit(functools.partial(f, "bqhd,hdm->bqm"))(a, w) for f in (jax_streamk.einsum, jnp.einsum))
    assert_as_exact([ours], [xlas], [np.einsum("bqhd,hdm->bqm", np.asarray(a, np.float64), w.astype(np.float64))])


def test_programs_whose_arguments_have_no_sharding():
    """No argument has a mesh, so it is the one that is set."""
    a, b = normal(16, 24), normal(24, 40)
    with jax.set_mesh(AUTO):
        (divided,) = place((b, P("y", None)))
        programs = [
            lambda a: matmul(a, b),
            lambda a: matmul(a, divided),
            lambda a: matmul(lax.with_sharding_constraint(a, P("x", "y")), b),
            lambda a: linear(a, b, activation="relu") - linear(-a, b, activation="relu"),
        ]
        for program in programs:
            np.testing.assert_allclose(jax.jit(program)(a), a @ b, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(
                compiled(program, jax.ShapeDtypeStruct(a.shape, a.dtype))(a), a @ b, rtol=1e-4, atol=1e-4
            )
        gradient = jax.jit(jax.grad(lambda a: matmul(a, divided).sum()))(a)
        np.testing.assert_allclose(gradient, np.broadcast_to(b.sum(1), a.shape), rtol=1e-4, atol=1e-4)
        assert collectives(compiled(programs[2], a)) == {"all-reduce": 1}


def test_shardings_without_a_mesh():
    """The product is left to XLA: our partitioning needs the names of mesh axes, which such arrays lack."""
    from jax._src.sharding_impls import GSPMDSharding

    a, b = normal(16, 24), normal(24, 40)
    rows = GSPMDSharding(AUTO.devices.ravel().tolist(), NamedSharding(AUTO, P(("x", "y")))._to_xla_hlo_sharding(2))
    np.testing.assert_allclose(jax.jit(matmul)(jax.device_put(a, rows), b), a @ b, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"products in a program for several devices without a mesh; Auto\(\) leaves"):
        jax.jit(functools.partial(matmul, schedule=StreamK()))(jax.device_put(a, rows), b)


def test_two_meshes_are_refused_by_jax():
    """As docs/sharding.md says. JAX's own products can be divided over both."""
    operands = place((normal(16, 24), P("x")), (normal(24, 40), P()))
    other = NamedSharding(jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")), P("z"))
    with pytest.raises(ValueError, match="mesh should be the same across the entire program"):
        jax.jit(matmul, out_shardings=other)(*operands)
    np.testing.assert_allclose(
        jax.device_put(jax.jit(matmul)(*operands), other), operands[0] @ operands[1], rtol=1e-4, atol=1e-4
    )


# Several processes.

PROCESS = """
import sys
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))

import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_streamk import linear

assert jax.device_count() == 4 and jax.local_device_count() == 2
# Axis k goes across processes.
mesh = jax.make_mesh((2, 2), ("k", "m"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
x, w, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 160), (160,)))

def place(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: x[index])

def loss(x, w, bias):
    out = linear(x, w, bias, activation="tanh")
    return (out**2).sum(), out

step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
operands = place(x, "m", "k"), place(w, "k"), place(bias)
text = step.lower(*operands).compile().as_text()
assert "jax_streamk_host_gemm" in text and " dot(" not in text
(_, out), gradients = step(*operands)

wide = [array.astype(np.float64) for array in (x, w, bias)]
exact = np.tanh(wide[0] @ wide[1] + wide[2])
inner = 2 * exact * (1 - exact**2)
for found, want in zip((out, *gradients), (exact, inner @ wide[1].T, wide[0].T @ inner, inner.sum(0)), strict=True):
    for shard in found.addressable_shards:
        np.testing.assert_allclose(shard.data, want[shard.index], rtol=1e-4, atol=1e-4)
print("agreed")
"""


def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i)],
            cwd="/", env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0 and output.endswith("agreed\n"), "\n".join(outputs)
