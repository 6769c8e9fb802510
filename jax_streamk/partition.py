"""Partitions a product over devices: batch, m and n without communication, k as split-K across devices.

Each dimension of the operands and the result is a factor of the product. Shardy propagates shardings between arrays by
the rule; ``_partition`` then makes the shardings it chose consistent.
"""

import functools
import math

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_streamk import compat
from jax_streamk.epilogue import Epilogue

# The identity, with a result type without sharding. XLA's partitioner may call back while an explicit mesh is set, and
# collectives would carry its shardings into the function that adds two elements.
_local_p = Primitive("streamk_local")
_local_p.def_abstract_eval(compat.local_aval)
mlir.register_lowering(_local_p, lambda ctx, x: [x])
_no_mesh = jax.sharding.AbstractMesh((), ())


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

    def rule(self):
        return SdyShardingRule(
            tuple(ArrayMapping(*names) for names in self.operands),
            (ArrayMapping(*self.result),),
            reduction_factors=self.contract,
            need_replication_factors=self.whole,
        )


def partitioned(product, finish, fused, factors):
    """``finish(product(lhs, rhs), *others)``, for XLA to partition; ``fused`` does both if no sum comes between.

    In the place of each second rhs, ``finish`` gets its product.
    """
    function = custom_partitioning(fused)
    function.def_partition(functools.partial(_partition, product, finish, fused, factors), sharding_rule=factors.rule())
    return function


def _partition(product, finish, fused, factors, mesh, operands, result):
    specs = [_axes_of_dimensions(x) for x in (*operands, result)]
    for names, spec in zip(factors.operands, specs):
        spec[:] = [() if name in factors.whole else axes for name, axes in zip(names, spec)]
    sizes = {name: size for x, dims in zip(operands, factors.operands) for name, size in zip(dims, x.shape)}
    axes = _axes_of_factors((*factors.operands, factors.result), specs, sizes, factors.contract, mesh.shape)
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

    def local(*operands):
        with jax.sharding.use_abstract_mesh(_no_mesh):
            lhs, rhs, *others = (_local_p.bind(x) for x in operands)
            if not summed and not scattered:
                return fused(lhs, rhs, *others)
            sums = [add_up(product(lhs, x)) for x in (rhs, *others[: factors.seconds])]
            return finish(*sums, *others[factors.seconds :])

    def add_up(out):
        dtype = out.dtype
        # A sum of booleans is a logical or, which collectives lack.
        out = out.astype(np.int32) if dtype == np.bool_ else out
        for dimension, over in scattered.items():
            out = lax.psum_scatter(out, over, scatter_dimension=dimension, tiled=True)
        return (lax.psum(out, tuple(summed)) if summed else out).astype(dtype)

    def sharding(dims, axes):
        return NamedSharding(mesh, PartitionSpec(*(axes[name] or None for name in dims)))

    multiplied = 2 + factors.seconds
    shardings = [sharding(dims, axes if i < multiplied else final) for i, dims in enumerate(factors.operands)]
    return mesh, local, sharding(factors.result, final), tuple(shardings)


def _axes_of_factors(names, specs, sizes, contract, mesh):
    """The mesh axes that divide each factor evenly. The first array to claim an axis gets it, for one factor."""
    lhs, rhs, *others, result = (list(zip(*x)) for x in zip(names, specs))
    # m and n before k: gathering an operand along k is one collective, the alternative two. Among them, claims that the
    # result shares come first. The result's own come last: slicing it, or scattering its sum, is cheap.
    claims = [claim for name in sizes for claim in (*lhs, *rhs) if claim[0] == name]
    claims.sort(key=lambda claim: (claim[0] in contract, claim not in result))
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
