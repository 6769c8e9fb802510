"""Products of matrices of four or eight bits with scales, that XLA need not dequantize."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_streamk import compat
from jax_streamk.plan import problem
from jax_streamk.product import partition
from jax_streamk.product.dense import Dense
from jax_streamk.product.primitive import bind
from jax_streamk.product.ragged import Ragged
from jax_streamk.product.spec import Product, is_moving

PARTS = "scale", "zero", "offset"
# What the roles of the parts of each matrix end with.
MATRICES = {"rhs": "", "up": "_of_up"}


def dequantize(values, scale, zero, offset, dtype):
    """``(values - zero) * scale + offset`` of arrays, or None, in float32, rounded to dtype."""
    wide = values.astype(jnp.float32)
    if zero is not None:
        wide = wide - _spread(zero.astype(jnp.float32), values.shape)
    wide = wide * _spread(scale.astype(jnp.float32), values.shape)
    if offset is not None:
        wide = wide + _spread(offset.astype(jnp.float32), values.shape)
    return wide.astype(dtype)


def _spread(x, shape):
    """An array whose numbers are of blocks, for each number of an array of this shape."""
    parts = [n for size, of in zip(shape, x.shape) for n in (of, size // max(of, 1))]
    of_blocks = x.reshape([n for of in x.shape for n in (of, 1)])
    return jnp.broadcast_to(of_blocks, parts).reshape(shape)


@dataclasses.dataclass(frozen=True, repr=False)
class Scaled(Product):
    """What products by numbers with scales have in common: the base before that of their kind.

    Attributes:
      dtype: of the matrices that the numbers stand for.
      parts: what there is besides numbers, of ``PARTS``. Their shapes have a size for each block of numbers.
      of_both: whether lhs is numbers, too, with a scale only.
    """

    kind: ClassVar[type[Product]]  # of arrays

    dtype: Any = None
    parts: tuple[str, ...] = ("scale",)
    of_both: bool = False

    @staticmethod
    def by(product, dtype, parts, of_both=False):
        """The product by numbers with these parts, in the place of one by arrays."""
        (of,) = (kind for kind in Scaled.__subclasses__() if kind.kind is type(product))
        return of(**_fields(product, of.kind), dtype=dtype, parts=parts, of_both=of_both)

    @functools.cached_property
    def of_arrays(self):
        """The product of arrays."""
        return self.kind(**_fields(self, self.kind))

    @functools.cached_property
    def roles_of_parts(self):
        """{role of a matrix: {part: its role}}"""
        roles = super().has
        parts = {
            role: {part: part + suffix for part in self.parts} for role, suffix in MATRICES.items() if role in roles
        }
        return parts | ({"lhs": {"scale": "scale_of_a"}} if self.of_both else {})

    @property
    def has(self):
        return (*super().has, *(role for parts in self.roles_of_parts.values() for role in parts.values()))

    def _split(self, given):
        """(operands of ``of_arrays``, {role of a matrix: its parts by name}), of operands by role or their types"""
        of_arrays = {role: given[role] for role in self.of_arrays.roles}
        return of_arrays, {
            matrix: {part: given[role] for part, role in parts.items()} for matrix, parts in self.roles_of_parts.items()
        }

    def _dequantized(self, operands):
        """The operands of ``of_arrays``."""
        given, matrices = self._split(self.by_role(operands))
        for role, parts in matrices.items():
            scale, zero, offset = (parts.get(part) for part in PARTS)
            given[role] = dequantize(given[role], scale, zero, offset, self.dtype)
        return list(given.values())

    def types_of_arrays(self, types):
        """The types of the operands of ``of_arrays``, by role."""
        given, matrices = self._split(types)
        return given | {role: given[role].update(dtype=jnp.dtype(self.dtype)) for role in matrices}

    def _avals_of_arrays(self, avals):
        return list(self.types_of_arrays(self.by_role(avals)).values())

    def canonical(self, operands, out_sharding):
        """Where types have shardings, the product of arrays."""
        if compat.explicit_mesh(*map(jax.typeof, operands)) is not None:
            return self.of_arrays.canonical(self._dequantized(operands), out_sharding)
        return super().canonical(operands, out_sharding)

    def result(self, avals, out_sharding):
        return self.of_arrays.result(self._avals_of_arrays(avals), out_sharding)

    @property
    def is_bilinear(self):
        return False

    def by_xla(self, *operands, out_sharding=None):
        return self.of_arrays.by_xla(*self._dequantized(operands), out_sharding=out_sharding)

    @property
    def of_fewer(self):
        """The product that remains where no kernel multiplies the numbers: by those of rhs, or of arrays."""
        return self.by(self.of_arrays, self.dtype, self.parts) if self.of_both else self.of_arrays

    def types_of_fewer(self, types):
        """The types of the operands of ``of_fewer``, by role."""
        if not self.of_both:
            return self.types_of_arrays(types)
        lhs = types["lhs"].update(dtype=jnp.dtype(self.dtype))
        return {role: types[role] for role in self.of_fewer.roles} | {"lhs": lhs}

    def instead(self, *operands, **params):
        """Of matrices that XLA dequantizes first."""
        if not self.of_both:
            return bind(self.of_arrays, *self._dequantized(operands), **params)
        given = self.by_role(operands)
        given["lhs"] = dequantize(given["lhs"], given["scale_of_a"], None, None, self.dtype)
        return bind(self.of_fewer, *(given[role] for role in self.of_fewer.roles), **params)

    def apart(self, *operands, **params):
        """One product of numbers after the other, if it is gated."""
        if not self.epilogue.gate:
            return self.instead(*operands, **params)
        given, matrices = self._split(self.by_role(operands))
        each, products = self.before_gate, {}
        of_lhs = {"scale_of_a": matrices["lhs"]["scale"]} if self.of_both else {}
        for role, bias in (("rhs", "bias"), ("up", "up_bias")):
            own = given | of_lhs | matrices[role] | dict(rhs=given[role], bias=given.get(bias))
            products[role] = bind(each, *(own[name] for name in each.roles), **params)
        gate = dataclasses.replace(self.epilogue, has_bias=False, bias_batch=0)
        return gate.apply(products.pop("rhs"), **products)

    def jvp(self, primals, tangents, **params):
        """By the numbers again, where nothing but lhs moves, which is an array."""
        moves = [is_moving(x) for x in tangents]
        if self.epilogue.is_plain and moves[0] and not self.of_both and not any(moves[1:]):
            velocity = bind(self, tangents[0], *primals[1:], **params)
            return bind(self, *primals, **params), velocity
        return Product.jvp(self, primals, tangents, **params)

    def asked(self, avals, out_sharding):
        return self.of_arrays.asked(self._avals_of_arrays(avals), out_sharding)

    def factors(self, avals):
        shapes = {role: x.shape for role, x in self.by_role(avals).items()}
        return partition.with_parts(super().factors(avals), shapes, self.roles_of_parts)

    def partitioned(self, avals, schedule):
        try:
            return super().partitioned(avals, schedule)
        except ValueError:  # blocks of several lengths
            return None

    def without_transposes(self, operands, avals, behind):
        """Those of numbers whose parts are transposed alike."""
        given, matrices = self._split(self.by_role(list(zip(operands, avals))))
        joint = [(x, *matrices.get(role, {}).values()) for role, x in given.items()]

        def behind_all(arrays):
            found = [behind(x) for x, _ in arrays]
            if None in found or len({permutation for _, permutation in found}) > 1:
                return None
            order = np.argsort(found[0][1])
            shapes = [tuple(aval.shape[i] for i in order) for _, aval in arrays]
            return [(x, aval.update(shape=s)) for (x, _), (_, aval), s in zip(found, arrays, shapes)], found[0][1]

        product, joint, _ = self.of_arrays.without_transposes(joint, self._avals_of_arrays(avals), behind_all)
        flat: dict[str, Any] = {}
        for role, arrays in product.by_role(joint).items():
            flat |= dict(zip((role, *self.roles_of_parts.get(role, {}).values()), arrays))
        folded = self.by(product, self.dtype, self.parts, self.of_both)
        return folded, *map(list, zip(*(flat[role] for role in folded.roles)))

    @property
    def dimensions_of_lhs(self):
        """(those contracted, those of the batch or of groups)"""
        raise NotImplementedError

    @property
    def dimensions_of_rhs(self):
        raise NotImplementedError

    def arranged(self, types, platform, nests=False):
        assert not nests
        if self.epilogue.gate:
            raise problem.Unsupported("no kernel multiplies by two matrices with scales at once")
        given, matrices = self._split(types)
        arrangement = self.arrangement_of_arrays(self.types_of_arrays(types), platform)
        gemm, values, parts = arrangement.problem, given["rhs"], matrices["rhs"]
        if arrangement.swapped or arrangement.permute_rhs is not None:
            raise problem.Unsupported("kernels read numbers with scales as they are, as matrices (k, n) or (n, k)")
        for part, x in ((part, x) for of in matrices.values() for part, x in of.items()):
            if x.dtype not in problem.TYPES:
                raise problem.Unsupported(f"no kernel has a {part} of {x.dtype}")
        contract, batch = self.dimensions_of_rhs
        count = gemm.batch if gemm.batch_stride_b else 1
        rows, columns, order = self._blocks(values, parts, contract, batch, count)
        orders = dict.fromkeys(self.roles_of_parts["rhs"].values(), order)
        fields: dict[str, Any] = dict(type_b=problem.TYPES[values.dtype], scale_rows=rows, scale_columns=columns)
        for part, x in parts.items():
            fields |= {f"{part}_type": problem.TYPES[x.dtype]} | ({} if part == "scale" else {f"has_{part}": True})
        dtypes = arrangement.dtypes[0], values.dtype
        if self.of_both:
            lhs, of_lhs = given["lhs"], matrices["lhs"]
            if arrangement.permute_lhs is not None:
                raise problem.Unsupported("kernels read numbers with scales as they are, as matrices (m, k) or (k, m)")
            contract, batch = self.dimensions_of_lhs
            count = gemm.batch if gemm.batch_stride_a else 1
            columns, rows, orders["scale_of_a"] = self._blocks(lhs, of_lhs, contract, batch, count)
            fields |= dict(type_a=problem.TYPES[lhs.dtype], scale_type_of_a=problem.TYPES[of_lhs["scale"].dtype])
            fields |= dict(scale_rows_of_a=rows, scale_columns_of_a=columns)
            dtypes = lhs.dtype, values.dtype
        gemm = dataclasses.replace(gemm, **fields)
        orders = {role: order for role, order in orders.items() if order is not None}
        return dataclasses.replace(arrangement, problem=gemm, dtypes=dtypes, permute_others=orders)

    def arrangement_of_arrays(self, types, platform):
        return self.of_arrays.arranged(types, platform)

    def nested(self, types, platform):
        return None

    def _blocks(self, values, parts, contract, batch, count):
        """How many neighbours along k, and along the other dimension of each of ``count`` matrices, share a scale.

        And the transpose after which the parts of each matrix are in one piece, None if they are.
        """
        shape = parts["scale"].shape
        if any(x.shape != shape for x in parts.values()):
            raise problem.Unsupported("kernels want a zero point and an offset for each scale")
        batch = list(batch)
        free = [i for i in range(len(shape)) if i not in (*contract, *batch)]
        while free and math.prod(values.shape[i] for i in batch) < count:  # a batch that the other operand lacks
            batch.append(free.pop(0))
        block = [size // max(of, 1) for size, of in zip(values.shape, shape)]
        along = lambda dims: _merged([(values.shape[i], block[i]) for i in sorted(dims)])
        rows, columns = along(contract), along(free)
        if None in (rows, columns) or any(block[i] != 1 for i in batch):
            raise problem.Unsupported("kernels have scales for neighbours along k, and for neighbouring columns")
        order = (*sorted(batch), *(i for i in range(len(shape)) if i not in batch))
        solid = [i for i in order if shape[i] > 1]
        return rows, columns, None if solid == sorted(solid) else order


@dataclasses.dataclass(frozen=True, repr=False)
class ScaledDense(Scaled, Dense):
    """A ``Dense`` product whose matrices are numbers with scales."""

    kind = Dense

    @property
    def dimensions_of_lhs(self):
        (contract, _), (batch, _) = self.numbers
        return contract, batch

    @property
    def dimensions_of_rhs(self):
        (_, contract), (_, batch) = self.numbers
        return contract, batch

    def arrangement_of_arrays(self, types, platform):
        arrangement = super().arrangement_of_arrays(types, platform)
        if not arrangement.swapped:
            return arrangement
        # Numbers are B: the result, which is small, is transposed instead.
        arrangement = self.of_arrays.replaced(permutation=None).arranged(types, platform)
        return dataclasses.replace(arrangement, permute_result=self.permutation)

    def batched(self, axis_data, operands, dims, **params):
        given, of = self.by_role(operands), self.by_role(dims)
        for role, parts in self.roles_of_parts.items():
            arrays = [role, *parts.values()]
            at = next((of[name] for name in arrays if of[name] is not None), None)
            if at is None:
                continue
            at = 0 if of[role] is None else of[role]
            for name in arrays:
                x = given[name]
                if of[name] is None:
                    given[name] = jnp.repeat(jnp.expand_dims(x, at), axis_data.size, at)
                else:
                    given[name] = jnp.moveaxis(x, of[name], at)
                of[name] = at
        return super().batched(axis_data, list(given.values()), list(of.values()), **params)

    def _batched_apart(self, axis_data, operands, dims, **params):
        return Product.batched(self, axis_data, operands, dims, **params)


@dataclasses.dataclass(frozen=True, repr=False)
class ScaledRagged(Scaled, Ragged):
    """A ``Ragged`` product by numbers with scales for each group."""

    kind = Ragged

    @property
    def dimensions_of_lhs(self):
        (contract, _), _ = self.numbers.dot_dimension_numbers
        return contract, ()

    @property
    def dimensions_of_rhs(self):
        if not self.groups_rows and not self.of_both:
            raise problem.Unsupported("kernels have scales of matrices of groups, not of what groups cut")
        (_, contract), _ = self.numbers.dot_dimension_numbers
        return contract, self.numbers.rhs_group_dimensions


def _fields(product, kind):
    return {field.name: getattr(product, field.name) for field in dataclasses.fields(kind)}


def _merged(dims):
    """The length of blocks of dimensions, (size, block) each, that merge into one; None if blocks do not."""
    length, is_whole = 1, True
    for size, block in reversed(dims):
        if not is_whole and block != 1:
            return None
        length, is_whole = length * block, is_whole and block == size
    return length
