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
        result = (*batch, *lhs_free, *rhs_free)
        self.result = result if permutation is None else tuple(result[i] for i in permutation)
        bias = (*batch[: epilogue.bias_batch], *rhs_free)
        self.operands = (tuple(lhs), tuple(rhs), *[bias] * epilogue.has_bias, *[self.result] * epilogue.has_residual)

    def rule(self):
        return SdyShardingRule(
            tuple(ArrayMapping(*names) for names in self.operands),
            (ArrayMapping(*self.result),),
            reduction_factors=self.contract,
        )


def partitioned(product, finish, fused, factors):
    """``finish(product(lhs, rhs), *others)``, for XLA to partition; ``fused`` does both if no sum comes between."""
    function = custom_partitioning(fused)
    function.def_partition(functools.partial(_partition, product, finish, fused, factors), sharding_rule=factors.rule())
    return function


def _partition(product, finish, fused, factors, mesh, operands, result):
    specs = [_axes_of_dimensions(x) for x in (*operands, result)]
    sizes = {name: size for x, dims in zip(operands, factors.operands) for name, size in zip(dims, x.shape)}
    axes = _axes_of_factors((*factors.operands, factors.result), specs, sizes, factors.contract, mesh.shape)
    summed = [axis for name in factors.contract for axis in axes[name]]
    # If the result is sharded over axes of k, the sum is reduce-scattered over them instead of all-reduced.
    final = dict(axes)
    scattered: dict[int, tuple[str, ...]] = {}
    for dimension, (name, wanted) in enumerate(zip(factors.result, specs[-1])):
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
            out = product(lhs, rhs)
            dtype = out.dtype
            # A sum of booleans is a logical or, which collectives lack.
            out = out.astype(np.int32) if dtype == np.bool_ else out
            for dimension, over in scattered.items():
                out = lax.psum_scatter(out, over, scatter_dimension=dimension, tiled=True)
            out = lax.psum(out, tuple(summed)) if summed else out
            return finish(out.astype(dtype), *others)

    def sharding(dims, axes):
        return NamedSharding(mesh, PartitionSpec(*(axes[name] or None for name in dims)))

    lhs, rhs, *others = factors.operands
    shardings = (sharding(lhs, axes), sharding(rhs, axes), *(sharding(dims, final) for dims in others))
    return mesh, local, sharding(factors.result, final), shardings


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
