"""Products of one left operand, such as those of q, k and v, as one: their results lie side by side.

Only what ``fused_p`` calls is such a product: derivatives are those of the products apart.
"""

import dataclasses
import itertools

import jax.numpy as jnp

from jax_streamk.plan import problem
from jax_streamk.product.dense import Dense
from jax_streamk.product.primitive import bind
from jax_streamk.product.spec import Product

MOST = 3
NARROWEST = 64  # columns of a kernel's tile
BY_ROWS, BY_COLUMNS = ((((1,), (i,)), ((), ())) for i in (0, 1))  # of matrices (k, n) and (n, k)


@dataclasses.dataclass(frozen=True, repr=False)
class Joined(Product):
    """lhs of shape (m, k) by two or three matrices, all (k, n) or all (n, k), to (m, sum of n).

    Attributes:
      numbers: ``BY_ROWS`` or ``BY_COLUMNS``.
      matrices: how many there are.
    """

    is_one = False

    matrices: int = 2

    @property
    def has(self):
        return ("lhs", "rhs", "up", "third")[: 1 + self.matrices]

    @property
    def is_bilinear(self):
        return False

    @property
    def each(self):
        """One of its products."""
        return Dense(self.numbers, self.precision, self.preferred_element_type)

    def columns(self, avals):
        """The number of columns of each matrix."""
        return [x.shape[self.numbers == BY_ROWS] for x in avals[1:]]

    def result(self, avals, out_sharding):
        product, effects = self.each.result(avals[:2], out_sharding)
        return product.update(shape=(avals[0].shape[0], sum(self.columns(avals)))), effects

    def by_xla(self, *operands, out_sharding=None):
        lhs, *matrices = operands
        return jnp.concatenate([self.each.by_xla(lhs, x, out_sharding=out_sharding) for x in matrices], 1)

    def apart(self, *operands, **params):
        lhs, *matrices = operands
        return jnp.concatenate([bind(self.each, lhs, x, **params) for x in matrices], 1)

    def asked(self, avals, out_sharding):
        return self.each.asked(avals, out_sharding)

    def arranged(self, types, platform):
        operands = [types[role] for role in self.roles]
        if any(min(x.shape) < NARROWEST or x.dtype != types["lhs"].dtype for x in operands[1:]):
            raise problem.Unsupported(
                f"kernels join matrices of lhs's dtype with at least {NARROWEST} rows and columns"
            )
        columns = self.columns(operands)
        extents = types["lhs"].shape[1], sum(columns)
        whole = types["rhs"].update(shape=extents if self.numbers == BY_ROWS else extents[::-1])
        arrangement = self.each.arranged(types | dict(rhs=whole), platform)
        second, third = (*itertools.accumulate(columns[:-1]), 0)[:2]
        gemm = dataclasses.replace(arrangement.problem, second_column=second, third_column=third)
        gemm = dataclasses.replace(gemm, ldb=second) if self.numbers == BY_ROWS else gemm
        return problem.Arrangement(gemm, arrangement.dtypes)
