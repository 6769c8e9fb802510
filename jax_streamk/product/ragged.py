"""Ragged products, of JAX's ``ragged_dot_general``: groups whose sizes are data cut a dimension into runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_streamk import compat, schedules
from jax_streamk.plan import problem
from jax_streamk.product import partition
from jax_streamk.product.epilogue import ACTIVATIONS, wide
from jax_streamk.product.primitive import bind
from jax_streamk.product.spec import Product


def numbers_of(lhs_contract, rhs_contract, lhs_ragged, rhs_group=()):
    """The ``lax.RaggedDotDimensionNumbers`` of a product with one contracted dimension and no batch."""
    return lax.RaggedDotDimensionNumbers((((lhs_contract,), (rhs_contract,)), ((), ())), (lhs_ragged,), rhs_group)


BASIC = numbers_of(1, 1, 0, (0,))


def why_not(lhs, rhs, group_sizes, numbers):
    """Why our primitive has no such product; None if it has."""
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    if len(batch) > 0 or len(group_sizes.shape) != 1:
        return "no kernel multiplies batches of groups"
    if len(contract) != 1 or len(lhs.shape) != 2 or len(rhs.shape) != 2 + len(numbers.rhs_group_dimensions):
        return "kernels for groups contract one dimension, and lhs and rhs have one free dimension each"
    return None


@dataclasses.dataclass(frozen=True, repr=False)
class Ragged(Product):
    """``lax.ragged_dot_general`` in one of two forms, and the epilogue of the first, which has no residual or scale.

    Groups are of lhs rows, (M, k) x (G, k, n) -> (M, n), or of what is contracted, (M, m) x (M, n) -> (G, m, n), with
    dimensions in any order. A size below 0 counts as 0, and groups end with the last row.

    Attributes:
      numbers: lax's RaggedDotDimensionNumbers.
      leading: whether group_sizes has one size more in front, of rows in no group.
      gathers: whether the (M,) indices, the last operand, choose the rows of the first form: row i of the product is
        that of lhs[indices[i]]. It is JAX's mode of gathers for indices out of bounds, "clip" or
        "promise_in_bounds"; or None.
    """

    called = "ragged_dot_dimension_numbers"
    is_placed_by_xla = False

    leading: bool = False
    gathers: str | None = None

    @classmethod
    def why_not(cls, eqn):
        lhs, rhs, group_sizes = (x.aval for x in eqn.invars)
        why = why_not(lhs, rhs, group_sizes, eqn.params["ragged_dot_dimension_numbers"])
        return "it has a group_offset" if why is None and eqn.params["group_offset"] is not None else why

    @property
    def has(self):
        return "lhs", "rhs", *self.epilogue.roles, "group_sizes", *["indices"] * bool(self.gathers)

    @property
    def is_bilinear(self):
        return self.epilogue.is_plain and not self.gathers

    @property
    def groups_rows(self):
        """Whether groups are of rows of lhs and of the result."""
        return len(self.numbers.rhs_group_dimensions) > 0

    def canonical(self, operands, out_sharding):
        """No kernel's operands are gathered where types have shardings; a mesh without explicit axes says nothing."""
        sharding = out_sharding if compat.has_explicit_axes(out_sharding) else None
        if self.gathers and compat.explicit_mesh(*map(jax.typeof, operands)) is not None:
            return self.of_rows, self._gathered(operands), sharding
        return self, operands, sharding

    @property
    def of_rows(self):
        """The product of rows that are gathered already."""
        return self.replaced(gathers=None)

    def _gathered(self, operands):
        """The operands of ``of_rows``."""
        given = self.by_role(operands)
        indices = given.pop("indices")
        return tuple((given | dict(lhs=self.chosen(given["lhs"], indices))).values())

    def chosen(self, x, indices):
        """The rows of x that indices choose."""
        if self.gathers == "clip":
            rows = limit_of(x.shape[0])
            indices = jnp.clip(_from_the_front(indices, rows), 0, rows - 1)
        of_x, of_indices = jax.typeof(x), jax.typeof(indices)
        spec = None
        if compat.explicit_mesh(of_x, of_indices) is not None:
            spec = jax.P(of_indices.sharding.spec[0], of_x.sharding.spec[1])
        return jnp.asarray(x).at[indices].get(mode="promise_in_bounds", out_sharding=spec)

    def instead(self, *operands, **params):
        """Rows are gathered first, or the epilogue follows."""
        if self.gathers:
            return bind(self.of_rows, *self._gathered(operands), **params)
        return self.apart(*operands, **params)

    def rows(self, types):
        """The type of the rows of lhs that are multiplied."""
        lhs = types["lhs"]
        return lhs.update(shape=(*types["indices"].shape, lhs.shape[1])) if self.gathers else lhs

    def result(self, avals, out_sharding):
        given = self.by_role(avals)
        lhs, rhs, sizes = self.rows(given), given["rhs"], given["group_sizes"]
        sizes = sizes.update(shape=(sizes.shape[0] - self.leading,))
        typed = functools.partial(compat.ragged_dot_general_p.abstract_eval, **self.laxs, **compat.ragged_params())
        mesh, operands = compat.explicit_mesh(lhs, rhs, sizes), (lhs, rhs, sizes)
        with partition.without_explicit_mesh():
            out, effects = typed(*(operands if mesh is None else map(compat.local_aval, operands)))
        if out_sharding is not None:
            out = compat.varying_over(out.update(sharding=out_sharding), compat.varying(lhs))
            if compat.is_unreduced(out):
                remedy = "leave its unreduced axes out"
                raise NotImplementedError(
                    f"ragged_dot: out_sharding={out_sharding.spec} leaves sums over devices open: {remedy}"
                )
            return out, effects
        if mesh is None:
            return out, effects
        # lax infers no sharding. Devices add up over axes of what is contracted, and of groups of rows.
        factors = partition.RaggedFactors(self.plain.of_rows)
        axes = {
            name: spec
            for names, aval in zip(factors.operands.values(), (lhs, rhs))
            for name, spec in zip(names, aval.sharding.spec)
            if spec is not None
        }
        out = compat.divided(out, mesh, [axes.get(name) for name in factors.result])
        return compat.varying_over(out, compat.varying(lhs)), effects

    def by_xla(self, *operands, out_sharding=None):
        """By ``lax.ragged_dot_general``. The result's type has its sharding."""
        if self.gathers:
            return self.of_rows.by_xla(*self._gathered(operands))
        given = self.by_role(operands)
        lhs, rhs, dtype, epilogue = given["lhs"], given["rhs"], self.preferred_element_type, self.epilogue
        side = self.numbers.lhs_ragged_dimensions[0]
        runs = _runs(given["group_sizes"], lhs.shape[side], self.leading)
        starts = {0: side} if self.groups_rows else {0: side, 1: self.numbers.dot_dimension_numbers[0][1][0]}
        params = self.laxs | dict(preferred_element_type=dtype if epilogue.is_plain else wide(dtype))
        if not self.groups_rows and lhs.shape[1 - side] == 1:
            return _sums_of_groups(lhs.reshape(-1), rhs, runs, starts[1], self.precision, dtype)
        # lax has its groups begin with the first row.
        roll = lambda i, x: jnp.roll(x, -runs[0], starts[i]) if self.leading and i in starts else x
        lhs, matrices = roll(0, lhs), [roll(1, given[role]) for role in ("rhs", "up") if role in given]
        products = [lax.ragged_dot_general(lhs, x, jnp.diff(runs), **params) for x in matrices]
        if self.leading and self.groups_rows:
            products = [jnp.roll(x, runs[0], 0) for x in products]
        if epilogue.is_plain:
            return products[0]
        rows = products[0].shape[0]
        group = _group_of_rows(runs, rows)
        biases = [given[role] for role in ("bias", "up_bias") if role in given]
        biases = [x.at[group].get(mode="fill", fill_value=0) for x in biases]
        with_biases = [x + bias.astype(x.dtype) for x, bias in zip(products, biases)] if biases else products
        gate, *up = with_biases
        out = functools.reduce(lax.mul, up, ACTIVATIONS[epilogue.activation](gate))
        return jnp.where((group < runs.shape[0] - 1)[:, None], out, 0).astype(dtype)

    def apart(self, *operands, **params):
        """The gather, the products, then the epilogue, of products that are rounded."""
        if self.gathers:
            return self.of_rows.apart(*self._gathered(operands), **params)
        if self.epilogue.is_plain:
            return bind(self, *operands, **params)
        given = self.by_role(operands)
        lhs, sizes = given.pop("lhs"), given["group_sizes"]
        matrices = {role: given.pop(role) for role in ("rhs", "up") if role in given}
        products = {role: bind(self.plain, lhs, x, sizes, **params) for role, x in matrices.items()}
        return self._finished(products.pop("rhs"), **products, **given)

    def _finished(self, product, *, group_sizes, up=None, bias=None, up_bias=None, leading=None):
        leading, epilogue = self.leading if leading is None else leading, self.epilogue
        dtype, sums = product.dtype, []
        for x, its_bias in ((product, bias), (up, up_bias)):
            if x is None:
                continue
            sum_ = x.astype(wide(dtype))
            if its_bias is not None:
                spread = self._spread(its_bias, sum_, group_sizes, leading).astype(sum_.dtype)
                sum_ += compat.placed_like(spread, jax.typeof(sum_))
            sums.append(sum_)
        gate, *factors = sums
        if epilogue.activation is not None:
            gate = _activated(epilogue.activation, gate, group_sizes, leading)
        return functools.reduce(lax.mul, factors, gate).astype(dtype)

    def _spread(self, bias, like, group_sizes, leading):
        """Each row's bias. A product of ones: its derivative sums over groups, in a fixed order."""
        ones = jnp.ones((like.shape[0], 1), bias.dtype)
        product = Ragged(BASIC, (lax.Precision.HIGHEST,) * 2, bias.dtype, leading=leading)
        return bind(product, ones, bias[:, None], group_sizes, schedule=schedules.Auto())

    def cotangent(self, of, cotangent, operands, schedule):
        """A product of the same groups, with the other operand as it lies."""
        lhs, rhs, group_sizes = operands
        side = self.numbers.lhs_ragged_dimensions[0]
        ((contract,), (rhs_contract,)), _ = self.numbers.dot_dimension_numbers

        def product(x, y, numbers, order):
            """A product whose dimensions are those of the operand in this order."""
            sharding = compat.cotangent_sharding(operands[of].aval, order)
            schedule_ = schedules.of_cotangent(schedule, of)
            out = bind(self.replaced(numbers=numbers), x, y, group_sizes, schedule=schedule_, out_sharding=sharding)
            return out if list(order) == sorted(order) else lax.transpose(out, np.argsort(order))

        if self.groups_rows:
            (group,) = self.numbers.rhs_group_dimensions
            free = 3 - group - rhs_contract
            if of == 0:
                return product(cotangent, rhs, numbers_of(1, free, 0, (group,)), (side, contract))
            if free < rhs_contract:
                return product(cotangent, lhs, numbers_of(0, side, 0), (group, free, rhs_contract))
            return product(lhs, cotangent, numbers_of(side, 0, side), (group, rhs_contract, free))
        if of == 0:
            return product(rhs, cotangent, numbers_of(1 - rhs_contract, 2, rhs_contract, (0,)), (side, 1 - side))
        return product(lhs, cotangent, numbers_of(1 - side, 1, side, (0,)), (rhs_contract, 1 - rhs_contract))

    def batched(self, axis_data, operands, dims, *, schedule, out_sharding=None):
        """One product after another: each has groups of its own, and may have as many rows as a kernel wants."""
        params = dict(schedule=schedule, out_sharding=out_sharding)
        mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims) if dim is not None]

        def of_one(given):
            taken = iter(given)
            return bind(self, *(x if dim is None else next(taken) for x, dim in zip(operands, dims)), **params)

        return lax.map(of_one, mapped), 0

    def asked(self, avals, out_sharding):
        given = self.by_role(avals)
        operands = self.rows(given), given["rhs"], given["group_sizes"]
        params = self.laxs | compat.ragged_params(dict(out_sharding=out_sharding))
        return (compat.ragged_dot_general_p, *operands), params

    def partitioned(self, avals, schedule):
        """A device's part begins with rows in no group where groups, or what they cut, are divided."""
        if self.gathers:
            return lambda *operands: bind(self.of_rows, *self._gathered(operands), schedule=schedule)

        def product(lhs, rhs, *, group_sizes, leading, **parts):
            plain = self.plain.replaced(leading=leading)
            return bind(plain, lhs, rhs, group_sizes, *parts.values(), schedule=schedule)

        def fused(*, leading=self.leading, **given):
            return bind(self.replaced(leading=leading), *(given[role] for role in self.roles), schedule=schedule)

        function = partition.partitioned(product, self._finished, fused, self.factors(avals))
        sizes = self.roles.index("group_sizes")
        return lambda *operands: function(*(as_int32(x) if i == sizes else x for i, x in enumerate(operands)))

    def factors(self, avals):
        return partition.RaggedFactors(self)

    def without_transposes(self, operands, avals, behind):
        """Only those of the matrices of groups."""
        if not self.groups_rows or self.epilogue.gate:
            return self, operands, avals
        lhs, rhs, *others = operands
        ((contract,), (rhs_contract,)), _ = self.numbers.dot_dimension_numbers
        (group,), aval = self.numbers.rhs_group_dimensions, avals[1]
        while (transpose := behind(rhs)) is not None:
            rhs, permutation = transpose
            aval = aval.update(shape=tuple(aval.shape[i] for i in np.argsort(permutation)))
            rhs_contract, group = permutation[rhs_contract], permutation[group]
        numbers = numbers_of(contract, rhs_contract, self.numbers.lhs_ragged_dimensions[0], (group,))
        return self.replaced(numbers=numbers), [lhs, rhs, *others], [avals[0], aval, *avals[2:]]

    def arranged(self, types, platform):
        return problem.arrange_ragged(
            self.rows(types), types["rhs"], types["group_sizes"].shape[0] - self.leading, self.numbers, self.precision,
            self.preferred_element_type, platform, self.epilogue, self.leading,
            gathered_rows=types["lhs"].shape[0] if self.gathers else 0,
        )  # fmt: skip

    def as_read(self, types):
        from_the_front = functools.partial(_from_the_front, rows=types["lhs"].shape[0])
        return dict(group_sizes=as_int32, indices=from_the_front if self.gathers == "clip" else as_int32)


def limit_of(extent):
    """The largest size that means anything, which may be symbolic."""
    return min(extent, np.iinfo(np.int32).max) if isinstance(extent, int) else extent


def _runs(group_sizes, extent, leading):
    """Where the groups begin and end."""
    ends = partition.ends_of_groups(as_int32(group_sizes), limit_of(extent))
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[leading:]


def _sums_of_groups(weights, x, runs, contract, precision, dtype):
    """Weighted sums, as a product with a row for each group: lax would copy ``x`` for each group."""
    at = jnp.arange(weights.shape[0], dtype=jnp.int32)
    inside = (runs[:-1, None] <= at) & (at < runs[1:, None])
    params = dict(precision=precision, preferred_element_type=dtype)
    out = lax.dot_general(jnp.where(inside, weights, 0), x, (((1,), (contract,)), ((), ())), **params)
    return jnp.expand_dims(out, 1)


def _group_of_rows(runs, rows):
    """The group of each row; the number of groups for rows in none."""
    at, groups = jnp.arange(rows, dtype=jnp.int32), runs.shape[0] - 1
    group = jnp.searchsorted(runs[1:], at, side="right").astype(jnp.int32)
    return jnp.where(at < runs[0], groups, group)


def _activated(activation, x, group_sizes, leading):
    """The activation of rows in groups; the others are 0, and stay so."""
    if activation == "sigmoid":  # alone is not 0 at 0
        runs = _runs(group_sizes, x.shape[0], leading)
        is_inside = (_group_of_rows(runs, x.shape[0]) < runs.shape[0] - 1)[:, None]
        is_inside = compat.placed_like(jnp.broadcast_to(is_inside, x.shape), jax.typeof(x))
        return jnp.where(is_inside, jax.nn.sigmoid(x), 0)
    return ACTIVATIONS[activation](x)


def as_int32(numbers):
    """Sizes or indices as kernels read them; those that 32 bits do not hold are beyond any extent."""
    if numbers.dtype == np.int32:
        return numbers
    held, own = jnp.iinfo(np.int32), jnp.iinfo(numbers.dtype)
    return jnp.clip(numbers, max(held.min, own.min), min(held.max, own.max)).astype(np.int32)


def _from_the_front(indices, rows):
    """Indices as kernels read them, which take the nearest row for one out of bounds: none counts from the end."""
    indices = as_int32(indices)
    return jnp.where(indices < 0, indices + rows, indices)
