"""Products by a matrix of four or eight bits with scales, that XLA need not dequantize."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_streamk.plan import problem
from jax_streamk.product.dense import Dense
from jax_streamk.product.primitive import bind
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
class Scaled(Dense):
    """A ``Dense`` product whose matrices are numbers with scales.

    Attributes:
      dtype: of the matrices that the numbers stand for.
      parts: what there is besides numbers, of ``PARTS``. Their shapes have a size for each block of numbers.
    """

    is_one = False

    dtype: Any = None
    parts: tuple[str, ...] = ("scale",)

    @classmethod
    def by(cls, product, dtype, parts):
        """The product by numbers with these parts, in the place of a ``Dense`` by arrays."""
        return cls(**_fields_of_dense(product), dtype=dtype, parts=parts)

    @property
    def dense(self):
        """The product of arrays."""
        return Dense(**_fields_of_dense(self))

    @property
    def has(self):
        dense = super().has
        return (*dense, *(part + suffix for role, suffix in MATRICES.items() if role in dense for part in self.parts))

    def _split(self, given):
        """(operands of ``dense`` by role, {role of a matrix: its parts by name}), of operands by role or their types"""
        of_dense = {role: given[role] for role in self.dense.roles}
        return of_dense, {
            role: {part: given[part + suffix] for part in self.parts}
            for role, suffix in MATRICES.items()
            if role in of_dense
        }

    def _dequantized(self, operands):
        """The operands of ``dense``."""
        given, matrices = self._split(self.by_role(operands))
        for role, parts in matrices.items():
            scale, zero, offset = (parts.get(part) for part in PARTS)
            given[role] = dequantize(given[role], scale, zero, offset, self.dtype)
        return list(given.values())

    def types_of_dense(self, types):
        """The types of the operands of ``dense``, by role."""
        given, matrices = self._split(types)
        return given | {role: given[role].update(dtype=jnp.dtype(self.dtype)) for role in matrices}

    def result(self, avals, out_sharding):
        return self.dense.result(list(self.types_of_dense(self.by_role(avals)).values()), out_sharding)

    @property
    def is_bilinear(self):
        return False

    def by_xla(self, *operands, out_sharding=None):
        return self.dense.by_xla(*self._dequantized(operands), out_sharding=out_sharding)

    def instead(self, *operands, **params):
        """Of matrices that XLA dequantizes first."""
        return bind(self.dense, *self._dequantized(operands), **params)

    def apart(self, *operands, **params):
        """One product of numbers after the other, if it is gated."""
        if not self.epilogue.gate:
            return self.instead(*operands, **params)
        given, matrices = self._split(self.by_role(operands))
        biases = dict(rhs="bias", up="up_bias")
        products = {
            role: bind(self.before_gate, given["lhs"], given[role],
                       *(given[bias] for bias in (biases[role],) if bias in given), *parts.values(), **params)
            for role, parts in matrices.items()
        }  # fmt: skip
        gate = dataclasses.replace(self.epilogue, has_bias=False, bias_batch=0)
        return gate.apply(products.pop("rhs"), **products)

    def jvp(self, primals, tangents, **params):
        """By the numbers again, where nothing but lhs moves."""
        moves = [is_moving(x) for x in tangents]
        if self.epilogue.is_plain and moves[0] and not any(moves[1:]):
            velocity = bind(self, tangents[0], *primals[1:], **params)
            return bind(self, *primals, **params), velocity
        return Product.jvp(self, primals, tangents, **params)

    def batched(self, axis_data, operands, dims, **params):
        given, of = self.by_role(operands), self.by_role(dims)
        for role, suffix in MATRICES.items():
            arrays = [name for name in (role, *(part + suffix for part in self.parts)) if name in given]
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

    def asked(self, avals, out_sharding):
        return self.dense.asked(list(self.types_of_dense(self.by_role(avals)).values()), out_sharding)

    def partitioned(self, avals, schedule):
        return None

    def without_transposes(self, operands, avals, behind):
        return self, operands, avals

    def arranged(self, types, platform, nests=False):
        assert not nests
        if self.epilogue.gate:
            raise problem.Unsupported("no kernel multiplies by two matrices with scales at once")
        given, matrices = self._split(types)
        arrangement = self.dense.arranged(self.types_of_dense(types), platform)
        gemm, values, parts = arrangement.problem, given["rhs"], matrices["rhs"]
        if arrangement.swapped or arrangement.permute_rhs is not None:
            raise problem.Unsupported("kernels read numbers with scales as they are, as matrices (k, n) or (n, k)")
        rows, columns = self._blocks(values, parts, gemm)
        fields: dict[str, Any] = dict(type_b=problem.TYPES[values.dtype], scale_rows=rows, scale_columns=columns)
        for part, x in parts.items():
            if x.dtype not in problem.TYPES:
                raise problem.Unsupported(f"no kernel has a {part} of {x.dtype}")
            fields |= {f"{part}_type": problem.TYPES[x.dtype]} | ({} if part == "scale" else {f"has_{part}": True})
        gemm = dataclasses.replace(gemm, **fields)
        return dataclasses.replace(arrangement, problem=gemm, keeps_rhs=True)

    def nested(self, types, platform):
        return None

    def _blocks(self, values, parts, gemm):
        """How many neighbours along k, and how many columns, share a scale."""
        shape = parts["scale"].shape
        if any(x.shape != shape for x in parts.values()):
            raise problem.Unsupported("kernels want a zero point and an offset for each scale")
        (_, contract), (_, batch) = self.numbers
        free = [i for i in range(len(shape)) if i not in (*contract, *batch)]
        block = [size // max(of, 1) for size, of in zip(values.shape, shape)]
        along = lambda dims: _merged([(values.shape[i], block[i]) for i in sorted(dims)])
        rows, columns = along(contract), along(free)
        is_batched = gemm.batch > 1 and gemm.batch_stride_b != 0
        if None in (rows, columns) or any(block[i] != 1 for i in batch) or is_batched > bool(batch):
            raise problem.Unsupported("kernels have scales for neighbours along k, and for neighbouring columns")
        return rows, columns


def _fields_of_dense(product):
    return {field.name: getattr(product, field.name) for field in dataclasses.fields(Dense)}


def _merged(dims):
    """The length of blocks of dimensions, (size, block) each, that merge into one; None if blocks do not."""
    length, is_whole = 1, True
    for size, block in reversed(dims):
        if not is_whole and block != 1:
            return None
        length, is_whole = length * block, is_whole and block == size
    return length
