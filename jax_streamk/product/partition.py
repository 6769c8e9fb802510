"""Partitions a product over devices: batch, m and n without communication, k as split-K across devices.

The groups of a ragged product are divided, too: like k where each has rows of the result, without communication where
it has a result of its own. A device has the runs of the groups that lie in its part of what they cut.

Each dimension of the operands and the result is a factor of the product. Shardy propagates shardings between arrays by
the rule; ``_partition`` then makes the shardings it chose consistent.
"""

import contextlib
import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_streamk import compat

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


class Block(str):
    """The name of a factor, for a dimension that has one element for each block of it, such as a scale's."""


class Factors:
    """Names of a product's dimensions: dimensions with the same name are one factor.

    Attributes:
      blocks: the length of a ``Block`` of each factor that is divided into some.
      operands: for each role the names of its dimensions.
      product, result: those of each product, and of what the epilogue makes of it.
      contract: names of what is summed over.
      matrices: the roles of what lhs is multiplied by.
      shared: the roles that each of these products needs besides.
      parts: for the role of a matrix, {name: role} of what its product needs besides.
      whole: names along which every device needs all.
      ungathered: names along which no operand is gathered: the largest is divided.
    """

    blocks: Mapping[str, int] = types.MappingProxyType({})
    shared: tuple[str, ...] = ()
    parts: Mapping[str, Mapping[str, str]] = types.MappingProxyType({})
    ungathered: tuple[str, ...] = ()

    def __init__(self, product, lhs_ndim, rhs_ndim):
        (contract, batch), epilogue = product.numbers, product.epilogue
        lhs, rhs = ([f"{side}{i}" for i in range(ndim)] for side, ndim in (("m", lhs_ndim), ("n", rhs_ndim)))
        for name, pairs in (("k", zip(*contract)), ("b", zip(*batch))):
            for i, j in pairs:
                lhs[i] = rhs[j] = f"{name}{i}"
        # In the order of lhs, as Shardy requires of the rule.
        self.contract = tuple(lhs[i] for i in sorted(contract[0]))
        batch = tuple(lhs[i] for i in batch[0])
        lhs_free, rhs_free = (tuple(x for x in side if x not in (*self.contract, *batch)) for side in (lhs, rhs))
        self.product = (*batch, *lhs_free, *rhs_free)
        if product.permutation is not None:
            self.product = tuple(self.product[i] for i in product.permutation)
        # Every device needs both of two stacked matrices.
        self.whole = rhs_free[:1] if epilogue.gate == "stacked" else ()
        self.result = tuple(name for name in self.product if name not in self.whole)
        bias = (*batch[: epilogue.bias_batch], *rhs_free)
        others = dict(up=tuple(rhs), bias=bias, up_bias=bias, residual=self.result)
        self.operands = dict(lhs=tuple(lhs), rhs=tuple(rhs)) | {role: others[role] for role in epilogue.roles}
        self.matrices = tuple(role for role in ("rhs", "up") if role in self.operands)

    def on_device(self, given, axes, sizes, mesh):
        """(operands by role as one device needs them if ``axes`` divide the factors, the product's parameters there)"""
        del axes, sizes, mesh
        return given, {}

    def rule(self):
        def parts(names):
            of = {name: (f"{name}_of", f"{name}_in") for name in self.blocks}
            return [part for name in names for part in of.get(name, (name,))]

        def mapping(names):
            dims = (parts([name])[:1] if isinstance(name, Block) else parts([name]) for name in names)
            return ArrayMapping(*(dim[0] if len(dim) == 1 else CompoundFactor(*dim) for dim in dims))

        sizes: dict[str, Any] = {f"{name}_in": size for name, size in self.blocks.items()}
        return SdyShardingRule(
            tuple(map(mapping, self.operands.values())),
            (mapping(self.result),),
            reduction_factors=tuple(parts(self.contract)),
            need_replication_factors=tuple(parts(self.whole)),
            **sizes,
        )

    def unit(self, name):
        """What a device's part of a factor is a multiple of."""
        return self.blocks.get(name, 1)


class RaggedFactors(Factors):
    """Those of a ragged product.

    Every device has the sizes of all groups, and all of the biases of the columns that it has.
    """

    shared, ungathered = ("group_sizes",), ("g",)

    def __init__(self, product):
        numbers, epilogue = product.numbers, product.epilogue
        ((contract,), (rhs_contract,)), _ = numbers.dot_dimension_numbers
        (cut,) = numbers.lhs_ragged_dimensions
        lhs, rhs = ["m", "m"], ["n"] * (2 + len(numbers.rhs_group_dimensions))
        lhs[contract] = rhs[rhs_contract] = "k"
        for dimension in numbers.rhs_group_dimensions:
            rhs[dimension] = "g"
        self.cut, self._leading = lhs[cut], product.leading
        # In the order of the operands, as Shardy requires of the rule.
        self.contract = tuple(x for x in dict.fromkeys((*lhs, *rhs)) if x in ("k", "g"))
        self.product = self.result = ("m", "n") if "g" in self.contract else ("g", "m", "n")
        self.whole = ("groups", "sizes") if epilogue.has_bias else ("sizes",)
        others = dict(up=tuple(rhs), bias=("groups", "n"), up_bias=("groups", "n"))
        self.operands = dict(lhs=tuple(lhs), rhs=tuple(rhs)) | {role: others[role] for role in epilogue.roles}
        self.matrices = tuple(role for role in ("rhs", "up") if role in self.operands)
        self.operands["group_sizes"] = ("sizes",)

    def on_device(self, given, axes, sizes, mesh):
        if not axes["g"] and not axes[self.cut]:
            return given, dict(leading=self._leading)
        group_sizes = given["group_sizes"]
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
        return given | dict(group_sizes=jnp.diff(ends, prepend=0)), dict(leading=True)


def with_parts(factors, shapes, matrices):
    """``factors`` with the parts of matrices, which have an element for each block of a matrix.

    Args:
      shapes: of all operands, by role.
      matrices: {role of a matrix: {name: role of a part}}

    Raises:
      ValueError: a dimension has blocks of several lengths.
    """
    factors.parts, factors.blocks = matrices, {}
    for matrix, parts in matrices.items():
        for role in parts.values():
            dims = []
            for i, (name, size, of) in enumerate(zip(factors.operands[matrix], shapes[matrix], shapes[role])):
                dims.append(name if of == size else f"{role}{i}" if of == 1 else Block(name))
                if of == 1 != size:
                    factors.whole += (dims[-1],)
                elif of != size and factors.blocks.setdefault(name, size // of) != size // of:
                    raise ValueError(f"{name} has blocks of {factors.blocks[name]} and of {size // of}")
            factors.operands[role] = tuple(dims)
    return factors


def ends_of_groups(group_sizes, extent):
    """Where groups end that cut a dimension of up to 2^30: what kernels make of any sizes."""
    sizes = jnp.clip(group_sizes, 0, extent)
    is_beyond = jnp.cumsum(sizes.astype(np.float32)) / 1.5 > extent  # where int32 may wrap
    return jnp.where(is_beyond, extent, jnp.minimum(jnp.cumsum(sizes), extent))


def partitioned(product, finish, fused, factors):
    """A function of operands, in the order of ``factors``, for XLA to partition.

    Args:
      product: of lhs, one of the matrices, and, by name, the operands that are shared and its parts.
      finish: of the product by rhs, and, by role, of the other operands, with products in the place of matrices.
      fused: both at once, of all operands by role, if no sum over devices comes between.
      factors: the ``Factors``.
    """
    function = custom_partitioning(lambda *operands: fused(**dict(zip(factors.operands, operands))))
    function.def_partition(functools.partial(_partition, product, finish, fused, factors), sharding_rule=factors.rule())
    return function


def _partition(product, finish, fused, factors, mesh, operands, result):
    roles, names_of = tuple(factors.operands), tuple(factors.operands.values())
    specs = [_axes_of_dimensions(x) for x in (*operands, result)]
    for names, spec in zip(names_of, specs):
        spec[:] = [() if name in factors.whole else axes for name, axes in zip(names, spec)]
    arrays = *zip(operands, names_of), (result, factors.result)
    sizes = {name: size for x, dims in arrays for name, size in zip(dims, x.shape) if not isinstance(name, Block)}
    axes = _axes_of_factors((*names_of, factors.result), specs, sizes, factors, mesh.shape)
    summed = [axis for name in factors.contract for axis in axes[name]]
    # If the result is sharded over axes of k, the sum is reduce-scattered over them instead of all-reduced.
    final = dict(axes)
    scattered: dict[int, tuple[str, ...]] = {}
    for name, wanted in zip(factors.result, specs[-1]):
        dimension = factors.product.index(name)
        for axis in wanted:
            size = sizes[name] // math.prod(mesh.shape[a] for a in final[name])
            if axis in summed and size % (mesh.shape[axis] * factors.unit(name)) == 0:
                summed.remove(axis)
                final[name] = (*final[name], axis)
                scattered[dimension] = (*scattered.get(dimension, ()), axis)

    parts = {role: factors.parts.get(role, {}) for role in factors.matrices}
    multiplied = "lhs", *factors.matrices, *(role for of in factors.parts.values() for role in of.values())

    def local(*operands):
        with without_mesh():
            given = {role: _local_p.bind(x) for role, x in zip(roles, operands)}
            here, params = factors.on_device(given, axes, sizes, mesh.shape)
            if not summed and not scattered:
                return fused(**here, **params)
            shared, sums = {role: here[role] for role in factors.shared}, {}
            for matrix, named in parts.items():
                named = {**named, **{role: role for role in factors.parts.get("lhs", {}).values()}}
                own = {name: here[role] for name, role in named.items()}
                sums[matrix] = add_up(product(here["lhs"], here[matrix], **shared, **own, **params))
            # What follows the sum is of all groups, in the part of the result that the device now has.
            final_axes = final | dict.fromkeys(factors.contract, ())
            others = {role: x for role, x in given.items() if role not in multiplied}
            others, params = factors.on_device(others, final_axes, sizes, mesh.shape)
            return finish(sums.pop("rhs"), **sums, **others, **params)

    def add_up(out):
        dtype = out.dtype
        # A sum of booleans is a logical or, which collectives lack.
        out = out.astype(np.int32) if dtype == np.bool_ else out
        for dimension, over in scattered.items():
            out = lax.psum_scatter(out, over, scatter_dimension=dimension, tiled=True)
        return (lax.psum(out, tuple(summed)) if summed else out).astype(dtype)

    def sharding(dims, axes):
        return NamedSharding(mesh, PartitionSpec(*(axes[name] or None for name in dims)))

    shardings = [sharding(dims, axes if role in multiplied else final) for role, dims in factors.operands.items()]
    return mesh, local, sharding(factors.result, final), tuple(shardings)


def _axes_of_factors(names, specs, sizes, factors, mesh):
    """The mesh axes that divide each factor evenly. The first array to claim an axis gets it, for one factor."""
    lhs, rhs, *others, result = (list(zip(*x)) for x in zip(names, specs))
    # m and n before k: gathering an operand along k is one collective, the alternative two. Among them, claims that the
    # result shares come first. The result's own come last: slicing it, or scattering its sum, is cheap.
    claims = [claim for name in sizes for claim in (*lhs, *rhs) if claim[0] == name]
    contract, ungathered = factors.contract, factors.ungathered
    claims.sort(key=lambda claim: (claim[0] not in ungathered, claim[0] in contract, claim not in result))
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(sizes, ())
    taken: set[str] = set()
    for factor, wanted in (*claims, *result, *(claim for claims in others for claim in claims)):
        if (
            not axes[factor]
            and not taken & set(wanted)
            and sizes[factor] % math.prod((factors.unit(factor), *(mesh[axis] for axis in wanted))) == 0
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
