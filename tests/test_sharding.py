"""Products over eight simulated CPU devices, against XLA's: values, gradients, types, and the collectives of the compiled programs."""

import collections
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
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streamk
from jax_streamk import DataParallel, SplitK, StreamK, dot_general, linear, matmul

AUTO, EXPLICIT = (
    jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices("cpu")) for kind in (AxisType.Auto, AxisType.Explicit)
)
SIZES = dict(b=8, m=16, n=40, k=24)
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def place(*placed, mesh=AUTO):
    """Arrays, each given with its PartitionSpec, on the mesh."""
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in placed]


def compiled(function, *operands, **options):
    return jax.jit(function, **options).lower(*operands).compile()


def collectives(program):
    """How many of each kind, one for each array: XLA combines some, which depends on what else the program has."""
    found = re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\((.*?)\)", program.as_text())
    return collections.Counter(kind for kind, operands in found for _ in operands.split(","))


def our_calls(program):
    """The attributes of every custom call of ours in a compiled program, which has no other product."""
    text = program.as_text()
    assert not re.search(r" dot\(|__onednn|__cublas", text)
    found = re.findall(r'custom_call_target="jax_streamk_host_gemm".*backend_config=\{(.*?)\}', text)
    return [dict(re.findall(r"(\w+) = (\w+)", attributes)) for attributes in found]


def macs(call):
    return np.prod([int(call[extent]) for extent in ("batch", "m", "n", "k")])


def with_gradients(function):
    """The result of function, and its gradients for the last operand as cotangent."""

    def result_and_gradients(*operands):
        out, pullback = jax.vjp(function, *operands[:-1])
        return out, *pullback(operands[-1])

    return result_and_gradients


def assert_as_exact(found, xlas, exact):
    """Each of the arrays at most twice as far from float64 as XLA's, and a few roundings."""
    for got, xla, want in zip(*map(jax.tree.leaves, (found, xlas, exact)), strict=True):
        assert got.dtype == xla.dtype and got.shape == xla.shape
        ours, theirs = (np.abs(np.asarray(x, np.float64) - want).max() for x in (got, xla))
        assert ours <= 2 * theirs + 2.0**-21 * np.abs(want).max(), f"off by {ours:.1e}, XLA by {theirs:.1e}"


def in_float64(function, *operands):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(function)(*(np.asarray(x, np.float64) for x in operands)))


def assert_like_xla(ours, xlas, *operands, **options):
    """Values and gradients of two functions, the last operand being the cotangent; and no more collectives. Returns both counts."""
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
    "linear": (
        ("bmk", "kn", "n", "bmn"),
        lambda x, w, bias, residual: linear(x, w, bias, residual=residual, activation="silu", alpha=0.5, beta=2),
        lambda x, w, bias, residual: jax.nn.silu(0.5 * (x @ w) + 2 * residual + bias),
    ),
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("x, y", list(itertools.combinations_with_replacement("bmnk-", 2)))
def test_a_mesh_axis_divides_a_factor(x, y, formula):
    """Axis x of the mesh divides one of batch, m, n and k in every array that has it, axis y another or the same; - is none."""
    names, ours, xlas = FORMULAS[formula]
    axes = {f: tuple(axis for axis, factor in (("y", y), ("x", x)) if factor == f) for f in "bmnk"}
    operands = [
        jax.device_put(normal(*(SIZES[f] for f in dims), seed=i), NamedSharding(AUTO, P(*(axes[f] or None for f in dims))))
        for i, dims in enumerate((*names, "bmn"))
    ]
    program = compiled(ours, *operands[:-1])
    assert collectives(program) == ({"all-reduce": 1} if "k" in (x, y) else {})
    # The call multiplies the shards. With k whole it applies the epilogue, which otherwise follows the sum.
    (call,) = our_calls(program)
    assert macs(call) * (2 if x != "-" else 1) * (4 if y != "-" else 1) == np.prod(list(SIZES.values()))
    assert (call["has_bias"] == "true") == (formula == "linear" and "k" not in (x, y))
    mine, theirs = assert_like_xla(ours, xlas, *operands)
    assert mine <= theirs


# Divisions of lhs (m, k) and rhs (k, n), of the result where it is asked for, and what the forward needs. All but the scattered sums
# are those of data, fully sharded data and tensor parallelism.
MOVED = {
    "k scattered over m": ((None, "x"), ("x", None), ("x", None), {"reduce-scatter": 1}),
    "k scattered over n": ((None, "x"), ("x", None), (None, "x"), {"reduce-scatter": 1}),
    "k scattered over m, two axes": ((None, ("x", "y")), (("x", "y"), None), (("x", "y"), None), {"reduce-scatter": 1}),
    "k scattered over m that is divided": (("x", "y"), ("y", None), (("x", "y"), None), {"reduce-scatter": 1}),
    "k scattered over n where m is divided": (("x", "y"), ("y", None), ("x", "y"), {"reduce-scatter": 1}),
    "k scattered over m and n": ((None, ("x", "y")), (("x", "y"), None), ("x", "y"), {"reduce-scatter": 2}),
    "k scattered in part": ((None, ("x", "y")), (("x", "y"), None), ("x", None), {"reduce-scatter": 1, "all-reduce": 1}),
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


@pytest.mark.parametrize("seed", range(8))
def test_any_division_is_computed(seed):
    """However the arrays are divided, consistently or not."""
    names, ours, xlas = FORMULAS["linear" if seed % 2 else "dot_general"]
    rng = np.random.default_rng(seed)

    def division(dims):
        axes = [() for _ in range(len(dims) + 1)]
        for axis in rng.permutation(["x", "y"]):
            axes[rng.integers(len(axes))] += (str(axis),)
        return NamedSharding(AUTO, P(*axes[:-1]))

    operands = [jax.device_put(normal(*(SIZES[f] for f in dims)), division(dims)) for dims in names]
    found, xla = (jax.jit(f, out_shardings=division("bmn"))(*operands) for f in (ours, xlas))
    assert_as_exact(found, xla, in_float64(xlas, *operands))


# (m, k, n) of which the mesh divides some unevenly, and the forward's collectives.
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

# Divisions of a, b, and out_sharding.
TYPED = {
    "m, n": (("x", None), (None, "y"), None),
    "m, k": (("x", "y"), ("y", None), P("x", None)),
    "k scattered": (("x", "y"), ("y", None), P("x", "y")),
    "k over two axes": ((None, ("x", "y")), (("x", "y"), None), P(None, None)),
    "batch": (("x", None, None), ("x", None, "y"), None),
    "batch, k": (("x", None, "y"), ("x", "y", None), P("x", None, None)),
    "vector": (("x", "y"), ("y",), P("x")),
    "rhs replicated": (("x", None), (None, None), P("x", "y")),
}
EXTENTS = {1: ((24,),) * 2, 2: ((16, 24), (24, 40)), 3: ((8, 16, 24), (8, 24, 40))}


def types_and_values(function, *operands):
    """Of the result of function, and of the gradients, in and out of jit."""
    found = []
    for f in (function, jax.jit(function)):
        out, pullback = jax.vjp(f, *operands)
        found += [out, *pullback(jnp.cos(out))]
    return [jax.typeof(x) for x in found], found


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("case", TYPED)
def test_explicit_sharding(case, named):
    spec_a, spec_b, out = TYPED[case]
    if named and out is None:
        out = P(*spec_a[:-1], spec_b[-1])
    with jax.set_mesh(EXPLICIT):
        a, b = place(
            (normal(*EXTENTS[len(spec_a)][0]), P(*spec_a)), (normal(*EXTENTS[len(spec_b)][1]), P(*spec_b)), mesh=EXPLICIT
        )
        out_sharding = NamedSharding(EXPLICIT, out) if named else out
        ours, xlas = ((lambda a, b, f=f: f(a, b, out_sharding=out_sharding)) for f in (matmul, jnp.matmul))
        (types, found), (xla_types, xla) = (types_and_values(f, a, b) for f in (ours, xlas))
        assert types == xla_types
        for got, want in zip(found, xla):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        mine, theirs = (collectives(compiled(with_gradients(f), a, b, found[0])) for f in (ours, xlas))
        assert mine.total() <= theirs.total(), (mine, theirs)
        assert our_calls(compiled(ours, a, b))


def test_explicit_sharding_of_linear():
    with jax.set_mesh(EXPLICIT):
        x, w, bias, residual = operands = place(
            (normal(16, 24), P("x", "y")), (normal(24, 40), P("y", None)), (normal(40), P(None)), (normal(16, 40), P("x", None)),
            mesh=EXPLICIT,
        )  # fmt: skip
        for out in (P("x", None), P("x", "y")):
            def ours(x, w, bias, residual):
                return linear(x, w, bias, residual=jax.reshard(residual, out), activation="gelu", out_sharding=out)

            def xlas(x, w, bias, residual):
                product = jnp.matmul(x, w, out_sharding=out)
                return jax.nn.gelu(product + jax.reshard(residual, out) + jax.reshard(bias, P(out[1])), approximate=False)

            (types, found), (xla_types, xla) = (types_and_values(f, *operands) for f in (ours, xlas))
            assert types == xla_types
            for got, want in zip(found, xla):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            assert collectives(compiled(ours, *operands)) == {"all-reduce" if out[1] is None else "reduce-scatter": 1}


def test_explicit_sharding_refuses_what_lax_refuses():
    with jax.set_mesh(EXPLICIT):
        for spec_a, spec_b in (((None, "x"), ("x", None)), (("x", "y"), (None, "y")), (("x", None), (None, "x")), ((None, "x"), ("y", None))):
            a, b = place((normal(16, 24), P(*spec_a)), (normal(24, 40), P(*spec_b)), mesh=EXPLICIT)
            def error(f):
                try:
                    f(a, b)
                except Exception as why:
                    return type(why), str(why)

            assert error(matmul) == error(jnp.matmul) is not None
            print(error(matmul), error(lambda a,b: linear(a,b,normal(40))))


def test_explicit_sharding_under_vmap():
    with jax.set_mesh(EXPLICIT):
        a, b = place((normal(8, 16, 24), P("x", None, "y")), (normal(24, 40), P("y", None)), mesh=EXPLICIT)
        found, xla = (
            types_and_values(jax.vmap(lambda a, b: f(a, b, out_sharding=P(None, "y")), in_axes=(0, None)), a, b) for f in (matmul, jnp.matmul)
        )
        assert found[0] == xla[0]
        for got, want in zip(found[1], xla[1]):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_vmap_over_a_mesh_axis():
    a, b = place((normal(8, 16, 24), P("x")), (normal(8, 24, 40), P("x", "y")))
    for f in (matmul, linear):
        program = compiled(jax.vmap(f, spmd_axis_name="x"), a, b)
        assert collectives(program) == {"all-reduce": 1}
        np.testing.assert_allclose(program(a, b), a @ b, rtol=1e-5, atol=1e-5)
