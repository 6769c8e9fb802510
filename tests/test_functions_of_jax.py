"""Every public function of JAX that takes arrays, beside a product: ``jit(accelerate(f))`` against ``jit(f)``.

Functions are those of the modules, so that new ones come in by themselves. Arguments are found by the names of their
parameters, and by trying. A function that nothing fits needs a line in ``ARGUMENTS``, or a place in ``LEFT_OUT``.
"""

import functools
import importlib
import inspect
import operator
import pkgutil
import re
import types
import typing
import warnings

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import jax_streamk as sk

MODULES = [
    "jax.numpy", "jax.numpy.linalg", "jax.numpy.fft", "jax.nn", "jax.lax", "jax.lax.linalg", "jax.random", "jax.image",
    *(x.name for x in pkgutil.walk_packages(jax.scipy.__path__, "jax.scipy.") if "._" not in x.name),
]  # fmt: skip
PARTS = 16
TARGET = "jax_streamk_cuda_gemm" if jax.default_backend() == "gpu" else "jax_streamk_host_gemm"
P = jax.ShapeDtypeStruct((4, 4), np.float32)


def arrays(p):
    """Arrays of several kinds, made of a matrix whose elements are between 0 and 1."""
    i = (4 * p).astype(np.int32)
    return types.SimpleNamespace(
        x=p, v=p[0], s=p[0, 0], cube=jnp.stack([p] * 4), images=jnp.stack([jnp.stack([p] * 2)] * 2), z=p + 1j * p.T,
        spd=p @ p.T + np.eye(4), i=i, iv=i[0], u=i.astype(np.uint32), u8=i.astype(np.uint8), b=p > 0.5,
        key=jax.random.key(i[0, 0]), seed=i[0, 0], sizes=jnp.minimum(i[0], 1),
    )  # fmt: skip


# What parameters of these names are given; all others get an array, of the first of the kinds in ``TRIED`` that fits.
NAMED = dict(
    axis=0, axis1=0, axis2=1, axes=(0, 1), dimension=0, dimensions=(0,), source=0, destination=1, permutation=(1, 0),
    shape=(4, 4), new_shape=(2, 8), new_sizes=(2, 8), sizes=(2, 2), indices_or_sections=2, reps=(2, 2), repeats=2,
    kth=1, k=2, M=4, N=4, n=4, d=3, deg=2, num=3, num_classes=4, rank=3, order=1, pad_width=1, obj=1,
    dtype=np.float32, new_dtype=np.float32, index_dtype=np.int32, start_index=0, limit_index=2, slice_size=2,
    start_indices=(0, 1), limit_indices=(2, 3), slice_sizes=(2, 2), index=1, start_dimension=0, stop_dimension=2,
    exponent_bits=5, mantissa_bits=7, permutation_size=4, axis_name="i", split_axis=0, concat_axis=0,
    perm=[(0, 1), (1, 0), (2, 3), (3, 2)], broadcast_dimensions=(0, 1), inplace=False, lower=True,
)  # fmt: skip
# These are kinds of ``arrays``.
NAMED |= dict(key="key", keys="key", seed="seed", indices="i", ind="i", mask="b", condition="b")
TRIED = ["x", "v", "i", "b", "z", "cube", "spd", "iv", "u", "u8", "s"]
# Tried beside what a function requires, each by itself: these change what it does most.
OPTIONAL = dict(
    size=lambda a: 4, length=lambda a: 4, total_repeat_length=lambda a: 8, where=lambda a: a.b,
    p=lambda a: a.v / a.v.sum(), weights=lambda a: a.v,
)  # fmt: skip

ROWS = (((1,), (0,)), ((), ()))  # dimension numbers of a matrix product
OF_GATHER = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
OF_SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def scattered(f, a):
    return f(a.x, a.iv[:, None], a.x, OF_SCATTER)


def convolved(f, a, **params):
    return f(a.images, a.images, (1, 1), "SAME", **params)


def newton(f, x):
    return lax.fori_loop(0, 3, lambda _, x: x - f(x) / 4, x)


# How functions are called that names do not tell enough of.
ARGUMENTS = {
    "jax.numpy.apply_along_axis": lambda f, a: f(jnp.cumsum, 0, a.x),
    "jax.numpy.apply_over_axes": lambda f, a: f(jnp.sum, a.x, (0,)),
    "jax.numpy.choose": lambda f, a: f(a.iv, [a.v] * 4, mode="clip"),
    "jax.numpy.clip": lambda f, a: f(a.x, 0.25, 0.5),
    "jax.numpy.compress": lambda f, a: f(a.b[0], a.x, size=4),
    "jax.numpy.cross": lambda f, a: f(a.x[:, :3], a.x[:, 1:]),
    "jax.numpy.digitize": lambda f, a: f(a.x, jnp.sort(a.v)),
    "jax.numpy.einsum": lambda f, a: f("ij,jk->ki", a.x, a.x),
    "jax.numpy.fill_diagonal": lambda f, a: f(a.x, a.s, inplace=False),
    "jax.numpy.fromfunction": lambda f, a: f(lambda i, j: a.s * i + j, (4, 4)),
    "jax.numpy.frompyfunc": lambda f, a: f(operator.add, 2, 1)(a.x, a.x),
    "jax.numpy.interp": lambda f, a: f(a.x, jnp.sort(a.v), a.v),
    "jax.numpy.lexsort": lambda f, a: f((a.v, a.v)),
    "jax.numpy.linalg.cross": lambda f, a: f(a.x[:, :3], a.x[:, 1:]),
    "jax.numpy.mask_indices": lambda f, a: f(4, lambda x, k: jnp.triu(x * a.x, k), size=4),
    "jax.numpy.piecewise": lambda f, a: f(a.x, [a.b], [jnp.sin, jnp.cos]),
    "jax.numpy.ravel_multi_index": lambda f, a: f((a.iv, a.iv), (4, 4), mode="clip"),
    "jax.numpy.searchsorted": lambda f, a: f(jnp.sort(a.v), a.x),
    "jax.numpy.vectorize": lambda f, a: f(jnp.dot, signature="(n),(n)->()")(a.x, a.x),
    "jax.numpy.where": lambda f, a: (f(a.b, a.x, a.v), f(a.b, size=4)),
    "jax.nn.dot_product_attention": lambda f, a: f(a.images, a.images, a.images),
    "jax.nn.scaled_dot_general": lambda f, a: f(a.cube, a.cube, (((2,), (2,)), ((0,), (0,)))),
    "jax.lax.associative_scan": lambda f, a: f(jnp.add, a.x),
    "jax.lax.composite": lambda f, a: f(lambda x: jnp.sin(x), "of.a_test")(a.x),
    "jax.lax.cond": lambda f, a: f(a.s > 0.5, jnp.sin, jnp.cos, a.x),
    "jax.lax.conv": convolved,
    "jax.lax.conv_general_dilated": convolved,
    "jax.lax.conv_general_dilated_local": lambda f, a: f(
        a.images, jnp.ones((2, 8, 4, 4)) * a.s, (1, 1), "SAME", (2, 2)
    ),
    "jax.lax.conv_general_dilated_patches": lambda f, a: f(a.images, (2, 2), (1, 1), "SAME"),
    "jax.lax.conv_transpose": convolved,
    "jax.lax.conv_with_general_padding": lambda f, a: convolved(f, a, lhs_dilation=None, rhs_dilation=None),
    "jax.lax.custom_linear_solve": lambda f, a: f(
        lambda x: 2 * x, a.v, lambda matvec, b: b / 2, lambda vecmat, b: b / 2
    ),
    "jax.lax.custom_root": lambda f, a: f(lambda x: x**3 + x - a.v, a.v, newton, lambda g, y: y / g(jnp.ones_like(y))),
    "jax.lax.dot_general": lambda f, a: f(a.x, a.x, ROWS),
    "jax.lax.dynamic_update_index_in_dim": lambda f, a: f(a.x, a.v, a.iv[0], 0),
    "jax.lax.dynamic_update_slice": lambda f, a: f(a.x, a.x[:2], (a.iv[0], 0)),
    "jax.lax.dynamic_update_slice_in_dim": lambda f, a: f(a.x, a.x[:2], a.iv[0], 0),
    "jax.lax.fft": lambda f, a: f(a.z, "fft", (4,)),
    "jax.lax.fori_loop": lambda f, a: f(0, 3, lambda i, x: x * i + a.s, a.x),
    "jax.lax.gather": lambda f, a: f(a.x, a.iv[:, None], OF_GATHER, (1, 4)),
    "jax.lax.index_take": lambda f, a: f(a.x, (a.iv,), (0,)),
    "jax.lax.integer_pow": lambda f, a: f(a.x, 3),
    "jax.lax.map": lambda f, a: f(jnp.sin, a.x),
    "jax.lax.pad": lambda f, a: f(a.x, a.s, ((1, 0, 1), (0, -1, 0))),
    "jax.lax.platform_dependent": lambda f, a: f(a.x, cpu=jnp.sin, default=jnp.cos),
    "jax.lax.pshuffle": lambda f, a: f(a.x, "i", [1, 0, 3, 2]),
    "jax.lax.ragged_dot": lambda f, a: f(a.x, a.cube, a.sizes),
    "jax.lax.ragged_dot_general": lambda f, a: f(a.x, a.cube, a.sizes, OF_GROUPS),
    "jax.lax.reduce": lambda f, a: f(a.x, np.float32(1), lax.mul, (0,)),
    "jax.lax.reduce_window": lambda f, a: f(a.x, np.float32(0), lax.add, (2, 2), (1, 1), "SAME"),
    "jax.lax.rng_bit_generator": lambda f, a: f(a.u[0], (4, 4)),
    "jax.lax.scan": lambda f, a: f(lambda carry, x: (carry + x, carry * x), a.v, a.x),
    "jax.lax.scatter": scattered,
    "jax.lax.scatter_add": scattered,
    "jax.lax.scatter_apply": lambda f, a: f(a.x, a.iv[:, None], jnp.sin, OF_SCATTER, update_shape=(4, 4)),
    "jax.lax.scatter_max": scattered,
    "jax.lax.scatter_min": scattered,
    "jax.lax.scatter_mul": scattered,
    "jax.lax.scatter_sub": scattered,
    "jax.lax.select_n": lambda f, a: f(a.b, a.x, a.x.T),
    "jax.lax.sort_key_val": lambda f, a: f(a.x, a.x.T),
    "jax.lax.squeeze": lambda f, a: f(a.x[None], (0,)),
    "jax.lax.switch": lambda f, a: f(a.iv[0], [jnp.sin, jnp.cos, jnp.tan], a.x),
    "jax.lax.while_loop": lambda f, a: f(lambda x: x.sum() < 40, lambda x: x + a.v, a.x),
    "jax.lax.with_sharding_constraint": lambda f, a: f(a.x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    "jax.lax.linalg.cholesky_update": lambda f, a: f(a.spd, a.v),
    "jax.lax.linalg.householder_product": lambda f, a: f(a.x, a.v),
    "jax.lax.linalg.ormqr": lambda f, a: f(a.x, a.v, a.x),
    "jax.lax.linalg.tridiagonal_solve": lambda f, a: f(a.v, a.v + 1, a.v, a.x),
    "jax.random.wrap_key_data": lambda f, a: f(a.u[0, :2]),
    "jax.image.resize": lambda f, a: f(a.x, (8, 3), "linear"),
    "jax.image.scale_and_translate": lambda f, a: f(a.x, (4, 4), (0, 1), a.v[:2], a.v[2:], "linear"),
    "jax.scipy.interpolate.RegularGridInterpolator": lambda f, a: f(
        (jnp.arange(4.0), jnp.arange(4.0)), a.x, method="linear"
    )(4 * a.x[:, :2]),
    "jax.scipy.linalg.cho_solve": lambda f, a: f((a.spd, True), a.x),
    "jax.scipy.linalg.eigh_tridiagonal": lambda f, a: f(a.v, a.v[1:], eigvals_only=True),
    "jax.scipy.linalg.funm": lambda f, a: f(a.spd, jnp.sin),
    "jax.scipy.linalg.leslie": lambda f, a: f(a.v, a.v[1:]),
    "jax.scipy.linalg.lu_solve": lambda f, a: f((a.spd, jnp.arange(4) + 0 * a.iv), a.x),
    "jax.scipy.ndimage.map_coordinates": lambda f, a: f(a.x, [4 * a.x, 4 * a.x.T], 1),
    "jax.scipy.optimize.minimize": lambda f, a: f(lambda x: ((x - a.v) ** 2).sum(), a.v + 1, method="BFGS").x,
    "jax.scipy.special.bessel_jn": lambda f, a: f(a.v, v=2),
    "jax.scipy.special.sph_harm_y": lambda f, a: f(a.iv[:1], a.iv[:1], a.v[:1], a.v[:1], n_max=4),
    "jax.scipy.special.zeta": lambda f, a: f(a.x + 1, a.x),
}

# Functions that are not called, by the reason why.
LEFT_OUT = {
    "take shapes or dtypes only": """
        jax.numpy.arange jax.numpy.broadcast_shapes jax.numpy.einsum_path jax.numpy.promote_types jax.numpy.result_type
        jax.lax.broadcast_shapes jax.lax.conv_dimension_numbers jax.lax.conv_general_permutations
        jax.lax.conv_general_shape_tuple jax.lax.conv_shape_tuple jax.lax.conv_transpose_shape_tuple jax.lax.dtype
        jax.lax.iota jax.lax.padtype_to_pads jax.lax.reduce_window_shape_tuple jax.nn.get_scaled_dot_general_config
        jax.random.key_dtype jax.random.key_impl
    """,
    "read or write files, text or buffers of others": """
        jax.numpy.array_repr jax.numpy.array_str jax.numpy.from_dlpack jax.numpy.frombuffer jax.numpy.fromfile
        jax.numpy.fromiter jax.numpy.fromstring jax.numpy.get_printoptions jax.numpy.load jax.numpy.printoptions
        jax.numpy.save jax.numpy.savez jax.numpy.set_printoptions
    """,
    "return tokens, or nothing": "jax.lax.after_all jax.lax.create_token jax.lax.dce_sink",
    "have results whose shape depends on values": "jax.numpy.trim_zeros",
    "need a mesh of devices": """
        jax.lax.pbroadcast jax.lax.pcast jax.lax.precv jax.lax.psum_scatter_start jax.lax.ragged_all_to_all
    """,
    "are for GPUs, up to JAX 0.9": "jax.nn.scaled_matmul",
    "return other numbers each time": "jax.lax.rng_uniform",
}


def public_functions():
    """Names and functions, each function once."""
    found = {}
    for module in MODULES:
        try:
            of = importlib.import_module(module)
        except ImportError:  # new in a later JAX
            continue
        for name in dir(of):
            with warnings.catch_warnings(action="ignore"):
                function = getattr(of, name)
            is_class = isinstance(function, type) or typing.get_origin(function) is not None
            is_asked = f"{module}.{name}" in ARGUMENTS or not is_class
            if not name.startswith("_") and callable(function) and is_asked:
                found.setdefault(id(function), (f"{module}.{name}", function))
    left_out = " ".join(LEFT_OUT.values()).split()
    return {name: function for name, function in found.values() if name not in left_out}


def parameters_of(function):
    try:
        return [*inspect.signature(function).parameters.values()]
    except ValueError:
        return [inspect.Parameter("x", inspect.Parameter.POSITIONAL_ONLY)]


def calls(name, function):
    """Ways to call a function, each as what is added to its name and a function of ``arrays``."""
    if name in ARGUMENTS:
        yield "", lambda a: ARGUMENTS[name](function, a)
        return
    parameters = parameters_of(function)
    needed = [x for x in parameters if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    needed += [x for x in parameters if x.name == "inplace"]
    is_variadic = not needed and any(x.kind is x.VAR_POSITIONAL for x in parameters)
    optional = [x.name for x in parameters if x.name in OPTIONAL and x not in needed]

    def call(a, kind, options, count):
        def value(x):
            given = NAMED.get(x.name, kind)
            return getattr(a, given) if isinstance(given, str) and x.name != "axis_name" else given

        args = [value(x) for x in needed if x.kind is not x.KEYWORD_ONLY] + [getattr(a, kind)] * count
        kwargs = {x.name: value(x) for x in needed if x.kind is x.KEYWORD_ONLY}
        return function(*args, **kwargs, **{name: OPTIONAL[name](a) for name in options})

    for kind in TRIED:
        for options in ((), *((x,) for x in optional)):
            for count in (2, 1, 3) if is_variadic else (0,):
                suffix = "".join(f"({x}=)" for x in options)
                yield suffix, functools.partial(call, kind=kind, options=options, count=count)


def of_matrix(function, call):
    """``call`` as a function of a matrix; one of an axis's name is called in a ``vmap`` over it."""

    def of(p):
        if any(x.name == "axis_name" for x in parameters_of(function)):
            results = jax.vmap(lambda s: call(arrays(p * s)), axis_name="i")(p[0])
        else:
            results = call(arrays(p))
        is_key = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)
        return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, results)

    return of


def traced(name, function):
    """({name: jaxpr of a matrix} of a function and of it with each of its options, what failed)"""
    found, errors = {}, []
    for suffix, call in calls(name, function):
        if name + suffix in found:
            continue
        try:
            jaxpr = jax.make_jaxpr(of_matrix(function, call))(P)
            assert jaxpr.out_avals, "it returns no arrays"
            found[name + suffix] = jaxpr
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".split("\n")[0])
    return found, errors


def derivative(jaxpr):
    """The jaxpr of a matrix that has the derivative of the sum of a jaxpr's results; None if there is none."""

    def total(p):
        return sum(jnp.sum(y.real) for y in jaxpr_as_fun(jaxpr)(p) if jnp.issubdtype(y.dtype, np.inexact))

    try:
        return jax.make_jaxpr(jax.grad(total))(P)
    except Exception:
        return None


def beside_a_product(jaxpr):
    def program(x, w):
        p = x @ w
        return p, jaxpr_as_fun(jaxpr)(p)

    return program


def has_bodies(jaxpr):
    """Whether a jaxpr has functions in it, other than jitted ones: these are the same wherever they are."""
    for eqn in jaxpr.eqns:
        values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        bodies = [x for x in values if hasattr(x, "eqns")]
        if eqn.primitive.name not in ("jit", "pjit") and (bodies or "hi_primitive" in eqn.primitive.name):
            return True
        if any(map(has_bodies, bodies)):
            return True
    return False


def in_a_scan(f):
    return lambda x, w: lax.scan(lambda x, _: (x, f(x, w)), x, None, length=1)[1]


def lowered(f):
    """The text of a function of two matrices; None if it cannot be lowered."""
    try:
        return jax.jit(f).lower(P, P).as_text()
    except Exception:
        return None


def rest_of(text):
    """The operations of a program, without matrix products: values have numbers by their order."""
    numbers, lines, products = {}, [], 0

    def numbered(found):
        value, part = found.groups()
        number = numbers.setdefault(value, f"%{len(numbers)}_")
        return number if number.startswith("%product") else number + (part or "")

    for line in text.splitlines():
        if "func.func" in line:
            numbers.clear()
        value, defines, operation = re.match(r"\s*(?:(%\w+)(?::\d+)?( = ))?(.*)", line).groups()
        if TARGET in operation or "stablehlo.dot_general" in operation:
            products += 1
            numbers[value] = f"%product_{products}"
        elif "module @" not in line:
            operation = re.sub(r"(%\w+)(#\d+)?", numbered, operation)
            if defines:
                numbers[value] = f"%{len(lines)}"
            lines.append(numbers.get(value, "") + operation)
    return lines


def difference(f):
    """What tells the results of ``jit(accelerate(f))`` from those of ``jit(f)``; None if they are alike."""
    x = (np.arange(1, 17).reshape(4, 4) + np.diag([12, 20, 31, 44])) / 64
    operands = x.astype(np.float32), np.eye(4, dtype=np.float32)  # with these the product is exact
    try:
        got, want = (jax.tree.leaves(jax.jit(f)(*operands)) for f in (sk.accelerate(f), f))
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(a, np.result_type(a.dtype, np.float32)) for a in (x, y))
        if not np.allclose(x, y, rtol=1e-3, atol=1e-3 * np.nanmax(np.abs(y), initial=1), equal_nan=True):
            return f"{x} instead of {y}"
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_as_by_jit(part):
    """All but products is the same program, or, if it is another one, has the same results."""
    wrong = []
    for name, function in [*public_functions().items()][part::PARTS]:
        found, errors = traced(name, function)
        if not found:
            wrong.append(f"{name}: no arguments found, add them to ARGUMENTS, or the name to LEFT_OUT: {errors[0]}")
        for name, jaxpr in found.items():
            values, derived = beside_a_product(jaxpr), derivative(jaxpr)
            forms = {name: values}
            if has_bodies(jaxpr):
                forms[f"{name} in a scan"] = in_a_scan(values)
            if derived is not None:
                forms[f"derivative of {name}"] = beside_a_product(derived)
            all_forms = lambda *xs, forms=forms: [f(*xs) for f in forms.values()]
            ours, jaxs = lowered(sk.accelerate(all_forms)), lowered(all_forms)
            # A GPU's kernels refuse such small products, or XLA merges them.
            assert ours is None or TARGET in ours or jax.default_backend() == "gpu"
            if None not in (ours, jaxs) and rest_of(ours) == rest_of(jaxs):
                continue
            for form, f in forms.items():
                if lowered(f) is not None:
                    if (why := difference(f)) is not None:
                        wrong.append(f"{form}: {why}")
                elif f is values and jax.default_backend() == "cpu":  # XLA has some for CPUs only
                    wrong.append(f"{name}: jit itself fails, give it other arguments in ARGUMENTS")
    assert not wrong, "\n".join(wrong)


def test_options_are_tried():
    """Those that new primitives of JAX's came with."""
    functions = public_functions()
    for name, option in ("jax.numpy.nonzero", "size"), ("jax.numpy.unique", "size"), ("jax.random.choice", "p"):
        assert f"{name}({option}=)" in traced(name, functions[name])[0]
