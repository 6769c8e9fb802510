"""How a product is divided over devices: batch, m and n without communication, k as split-K across devices.

A dimension of the operands and of the result is a factor of the product. Shardy learns from the rule how shardings spread from one
array to another; ``_partition`` then takes what the arrays were given and makes it consistent.
"""

import functools
import math

import jax
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_streamk import compat


# The identity, to a type without sharding. XLA's partitioner calls back while an explicit mesh may be set, whose axes are not
# those of a program for one device: collectives would carry shardings into the function that adds two elements.
_local_p = Primitive("streamk_local")
_local_p.def_abstract_eval(compat.local_aval)
mlir.register_lowering(_local_p, lambda ctx, x: [x])
_no_mesh = jax.sharding.AbstractMesh((), ())


class Factors:
    """The names of the dimensions of a product: those of one name are one factor."""

    def __init__(self, dimension_numbers, lhs_ndim, rhs_ndim):
        contract, batch = dimension_numbers
        lhs, rhs = ([f"{side}{i}" for i in range(ndim)] for side, ndim in (("m", lhs_ndim), ("n", rhs_ndim)))
        for name, pairs in (("k", zip(*contract)), ("b", zip(*batch))):
            for i, j in pairs:
                lhs[i] = rhs[j] = f"{name}{i}"
        self.contract = tuple(lhs[i] for i in contract[0])
        shared = {*self.contract, *(lhs[i] for i in batch[0])}
        self.operands = (tuple(lhs), tuple(rhs))
        self.result = (*(lhs[i] for i in batch[0]), *(x for x in (*lhs, *rhs) if x not in shared))

    def rule(self):
        return SdyShardingRule(
            tuple(ArrayMapping(*names) for names in self.operands), (ArrayMapping(*self.result),), reduction_factors=self.contract
        )


def partitioned(bind, factors):
    """``bind(*operands)``, a product with these factors, for XLA to partition."""
    product = custom_partitioning(bind)
    product.def_partition(
        partition=functools.partial(_partition, bind, factors), sharding_rule=factors.rule(), decode_shardings=True
    )
    return product


def _partition(bind, factors, mesh, operands, result):
    specs = [_axes_of_dimensions(x) for x in (*operands, result)]
    names = (*factors.operands, factors.result)
    sizes = {name: size for x, dims in zip(operands, factors.operands) for name, size in zip(dims, x.shape)}
    axes = _axes_of_factors(names, specs, sizes, factors.contract, mesh.shape)
    summed = tuple(axis for name in factors.contract for axis in axes[name])
    # Where the result asks for the axes of k, its sum is scattered over them instead of being made whole everywhere.
    scatter = {}
    for dimension, (name, wanted) in enumerate(zip(factors.result, specs[-1])):
        for axis in wanted:
            size = sizes[name] // math.prod(mesh.shape[a] for a in (*axes[name], *scatter.get(dimension, ())))
            if axis in summed and size % mesh.shape[axis] == 0:
                scatter.setdefault(dimension, []).append(axis)

    def local(*operands):
        with jax.sharding.use_abstract_mesh(_no_mesh):
            out = bind(*(_local_p.bind(x) for x in operands))
            for dimension, scattered in scatter.items():
                out = lax.psum_scatter(out, tuple(scattered), scatter_dimension=dimension, tiled=True)
            whole = tuple(axis for axis in summed if not any(axis in scattered for scattered in scatter.values()))
            return lax.psum(out, whole) if whole else out

    def sharding(dims, scatter={}):
        return NamedSharding(mesh, PartitionSpec(*((*axes[name], *scatter.get(i, ())) or None for i, name in enumerate(dims))))

    return mesh, local, sharding(factors.result, scatter), tuple(map(sharding, factors.operands))


def _axes_of_factors(names, specs, sizes, contract, mesh):
    """For each factor, the mesh axes that divide it evenly. An axis divides one factor; the first array to claim it has it."""
    axes, taken = dict.fromkeys(sizes, ()), set()

    def claim(factor, dims, spec):
        if factor not in dims or axes[factor]:
            return
        wanted = spec[dims.index(factor)]
        if not taken & set(wanted) and sizes[factor] % math.prod(mesh[axis] for axis in wanted) == 0:
            axes[factor] = wanted
            taken.update(wanted)

    *operands, result = zip(names, specs)
    # k after m and n: where an axis divides m in one operand and k in the other, gathering the other is one collective, and moving
    # the one and summing the result are two. The result last: it may be had by slicing, or by scattering the sum.
    for factor in sorted(sizes, key=lambda name: name in contract):
        for dims, spec in operands:
            claim(factor, dims, spec)
    for factor in result[0]:
        claim(factor, *result)
    return axes


def _axes_of_dimensions(x):
    spec = x.sharding.spec
    return [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in (*spec, *[None] * (len(x.shape) - len(spec)))]
