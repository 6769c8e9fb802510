"""Partitions a product over devices: batch, m and n without communication, k as split-K across devices.

Of a ragged product also the groups: like k where each has rows of the result, without communication where it has a
result of its own. A device has the runs of the groups that lie in its part of what they cut.

Each dimension of the operands and the result is a factor of the product. Shardy propagates shardings between arrays by
the rule; ``_partition`` then makes the shardings it chose consistent.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_streamk import compat
from jax_streamk.product.epilogue import Epilogue

# The identity, with a result type without sharding. XLA's partitioner may call back while an explicit mesh is set, and
# collectives would carry its shardings into the function that adds two elements.
_local_p = Primitive("streamk_local")
_local_p.def_abstract_eval(compat.local_aval)
mlir.register_lowering(_local_p, lambda ctx, x: [x])


def without_mesh():
    """A context in which no mesh is set."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def without_explicit_mesh():
    """A context in which no mesh with explicit axes is set, for functions of JAX's that infer no sharding."""
    is_explicit = compat.is_explicit(jax.sharding.get_abstract_mesh())
    return without_mesh() if is_explicit else contextlib.nullcontext()


class Factors:
    """Names of a product's dimensions: dimensions with the same name are one factor."""

    def __init__(self, dimension_numbers, lhs_ndim, rhs_ndim, epilogue=Epilogue(), permutation=None):
        contract, batch = dimension_numbers
        lhs, rhs = ([f"{side}{i}" for i in range(ndim)] for side, ndim in (("m", lhs_ndim), ("n", rhs_ndim)))
        for name, pairs in (("k", zip(*contract)), ("b", zip(*batch))):
            for i, j in pairs:
                lhs[i] = rhs[j] = f"{name}{i}"
        # In the order of lhs, as Shardy requires of the rule.
        self.contract = tuple(lhs[i] for i in sorted(contract[0]))
        batch = tuple(lhs[i] for i in batch[0])
        lhs_free, rhs_free = (tuple(x for x in side if x not in (*self.contract, *batch)) for side in (lhs, rhs))
        product = (*batch, *lhs_free, *rhs_free)
        self.product = product if permutation is None else tuple(product[i] for i in permutation)
        # Every device needs both of two stacked matrices.
        self.whole = rhs_free[:1] if epilogue.gate == "stacked" else ()
        self.result = tuple(name for name in self.product if name not in self.whole)
        self.seconds = int(epilogue.is_pair)  # operands after rhs that are multiplied by lhs too
        bias = (*batch[: epilogue.bias_batch], *rhs_free)
        others = ([tuple(rhs)] * self.seconds, [bias] * epilogue.has_bias * (1 + self.seconds))
        self.operands = (tuple(lhs), tuple(rhs), *others[0], *others[1], *[self.result] * epilogue.has_residual)
        self.shared = 0  # operands after the matrices that each product needs
        self.kept: tuple[str, ...] = ()  # along these no operand is gathered: the largest is divided

    def on_device(self, others, axes, sizes, mesh):
        """(the operands after the matrices as one device needs them if ``axes`` divide the factors, its parameters)"""
        del axes, sizes, mesh
        return others, {}

    def rule(self):
        return SdyShardingRule(
            tuple(ArrayMapping(*names) for names in self.operands),
            (ArrayMapping(*self.result),),
            reduction_factors=self.contract,
            need_replication_factors=self.whole,
        )


class RaggedFactors(Factors):
    """Those of a ragged product. After its matrices come group sizes, with ``leading`` that of rows before, and biases.

    Every device has the sizes of all groups, and all of the biases of the columns that it has.
    """

    def __init__(self, numbers, epilogue, leading):
        ((contract,), (rhs_contract,)), _ = numbers.dot_dimension_numbers
        (cut,) = numbers.lhs_ragged_dimensions
        lhs, rhs = ["m", "m"], ["n"] * (2 + len(numbers.rhs_group_dimensions))
        lhs[contract] = rhs[rhs_contract] = "k"
        for dimension in numbers.rhs_group_dimensions:
            rhs[dimension] = "g"
        self.cut = lhs[cut]
        # In the order of the operands, as Shardy requires of the rule.
        self.contract = tuple(x for x in dict.fromkeys((*lhs, *rhs)) if x in ("k", "g"))
        self.product = self.result = ("m", "n") if "g" in self.contract else ("g", "m", "n")
        self.whole = ("sizes", "groups") if epilogue.has_bias else ("sizes",)
        self.seconds, self.shared, self.kept, self._leading = int(epilogue.is_pair), 1, ("g",), leading
        biases = [("groups", "n")] * epilogue.has_bias * (1 + self.seconds)
        self.operands = (tuple(lhs), tuple(rhs), *[tuple(rhs)] * self.seconds, ("sizes",), *biases)

    def on_device(self, others, axes, sizes, mesh):
        group_sizes, *biases = others
        if not axes["g"] and not axes[self.cut]:
            return others, dict(leading=self._leading)
        if not self._leading:
            group_sizes = jnp.pad(group_sizes, (1, 0))

        def part(name):
            """(where a device's part of a dimension begins, how long it is)"""
            at = functools.reduce(lambda at, axis: at * mesh[axis] + lax.axis_index(axis), axes[name], 0)
            size = sizes[name] // math.prod(mesh[axis] for axis in axes[name])
            return at * size, size

        (first, count), (begin, extent) = part("g"), part(self.cut)
        ends = lax.dynamic_slice_in_dim(ends_of_groups(group_sizes, sizes[self.cut]), first, 1 + count)
        ends = jnp.clip(ends - begin, 0, extent)
        return (jnp.diff(ends, prepend=0), *biases), dict(leading=True)


def ends_of_groups(group_sizes, extent):
    """Where groups end that cut a dimension of up to 2^30: what kernels make of any sizes."""
    sizes = jnp.clip(group_sizes, 0, extent)
    is_beyond = jnp.cumsum(sizes.astype(np.float32)) / 1.5 > extent  # where int32 may wrap
    return jnp.where(is_beyond, extent, jnp.minimum(jnp.cumsum(sizes), extent))


def partitioned(product, finish, fused, factors):
    """``finish(product(lhs, rhs), *others)``, for XLA to partition; ``fused`` does both if no sum comes between.

    In the place of each second rhs, ``finish`` gets its product. ``product`` also takes the first ``factors.shared``
    others after the matrices.
    """
    function = custom_partitioning(lambda *operands: fused(*operands))
    function.def_partition(functools.partial(_partition, product, finish, fused, factors), sharding_rule=factors.rule())
    return function


def _partition(product, finish, fused, factors, mesh, operands, result):
    specs = [_axes_of_dimensions(x) for x in (*operands, result)]
    for names, spec in zip(factors.operands, specs):
        spec[:] = [() if name in factors.whole else axes for name, axes in zip(names, spec)]
    arrays = *zip(operands, factors.operands), (result, factors.result)
    sizes = {name: size for x, dims in arrays for name, size in zip(dims, x.shape)}
    axes = _axes_of_factors((*factors.operands, factors.result), specs, sizes, factors, mesh.shape)
    summed = [axis for name in factors.contract for axis in axes[name]]
    # If the result is sharded over axes of k, the sum is reduce-scattered over them instead of all-reduced.
    final = dict(axes)
    scattered: dict[int, tuple[str, ...]] = {}
    for name, wanted in zip(factors.result, specs[-1]):
        dimension = factors.product.index(name)
        for axis in wanted:
            size = sizes[name] // math.prod(mesh.shape[a] for a in final[name])
            if axis in summed and size % mesh.shape[axis] == 0:
                summed.remove(axis)
                final[name] = (*final[name], axis)
                scattered[dimension] = (*scattered.get(dimension, ()), axis)

    multiplied = 2 + factors.seconds

    def local(*operands):
        with without_mesh():
            lhs, *others = (_local_p.bind(x) for x in operands)
            matrices, others = others[: multiplied - 1], others[multiplied - 1 :]
            here, params = factors.on_device(others, axes, sizes, mesh.shape)
            if not summed and not scattered:
                return fused(lhs, *matrices, *here, **params)
            sums = [add_up(product(lhs, x, *here[: factors.shared], **params)) for x in matrices]
            # What follows the sum is of all groups, in the part of the result that the device now has.
            final_axes = final | dict.fromkeys(factors.contract, ())
            here, params = factors.on_device(others, final_axes, sizes, mesh.shape)
            return finish(*sums, *here, **params)

    def add_up(out):
        dtype = out.dtype
        # A sum of booleans is a logical or, which collectives lack.
        out = out.astype(np.int32) if dtype == np.bool_ else out
        for dimension, over in scattered.items():
            out = lax.psum_scatter(out, over, scatter_dimension=dimension, tiled=True)
        return (lax.psum(out, tuple(summed)) if summed else out).astype(dtype)

    def sharding(dims, axes):
        return NamedSharding(mesh, PartitionSpec(*(axes[name] or None for name in dims)))

    shardings = [sharding(dims, axes if i < multiplied else final) for i, dims in enumerate(factors.operands)]
    return mesh, local, sharding(factors.result, final), tuple(shardings)


def _axes_of_factors(names, specs, sizes, factors, mesh):
    """The mesh axes that divide each factor evenly. The first array to claim an axis gets it, for one factor."""
    lhs, rhs, *others, result = (list(zip(*x)) for x in zip(names, specs))
    # m and n before k: gathering an operand along k is one collective, the alternative two. Among them, claims that the
    # result shares come first. The result's own come last: slicing it, or scattering its sum, is cheap.
    claims = [claim for name in sizes for claim in (*lhs, *rhs) if claim[0] == name]
    contract, kept = factors.contract, factors.kept
    claims.sort(key=lambda claim: (claim[0] not in kept, claim[0] in contract, claim not in result))
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(sizes, ())
    taken: set[str] = set()
    for factor, wanted in (*claims, *result, *(claim for claims in others for claim in claims)):
        if (
            not axes[factor]
            and not taken & set(wanted)
            and sizes[factor] % math.prod(mesh[axis] for axis in wanted) == 0
        ):
            axes[factor] = wanted
            taken.update(wanted)
    return axes


def _axes_of_dimensions(x):
    spec = x.sharding.spec
    return [
        axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        for axes in (*spec, *[None] * (len(x.shape) - len(spec)))
    ]
