"""Products of JAX's ``dot_general``: their types, derivatives, batching and sharding."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jax_streamk import compat, schedules
from jax_streamk.plan import problem
from jax_streamk.product import partition
from jax_streamk.product.epilogue import ACTIVATIONS, Epilogue, scaled, wide
from jax_streamk.product.primitive import batched, bind
from jax_streamk.product.spec import Product


@dataclasses.dataclass(frozen=True, repr=False)
class Dense(Product):
    """``lax.dot_general``, then its epilogue or a transpose.

    Attributes:
      numbers: ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)).
      permutation: transposes the result, or None. XLA folds a transpose into the dot before it, but not into a custom
        call. Must be None with an epilogue.
    """

    permutation: tuple[int, ...] | None = None

    def __post_init__(self):
        (a, b), (c, d) = self.numbers  # batching makes lists
        object.__setattr__(self, "numbers", ((tuple(a), tuple(b)), (tuple(c), tuple(d))))
        if self.epilogue.beta != 1 and self.epilogue.is_plain:  # the factor of no residual
            object.__setattr__(self, "epilogue", Epilogue())

    @property
    def has(self):
        return "lhs", "rhs", *self.epilogue.roles

    @property
    def turned(self):
        """The product of the operands in the other order, whose free dimensions are exchanged in the result."""
        precision = self.precision[::-1] if isinstance(self.precision, tuple) else self.precision
        return self.replaced(numbers=tuple(sides[::-1] for sides in self.numbers), precision=precision)

    def exchanged(self, lhs_ndim, rhs_ndim):
        """The same plain product of the operands, with these ranks, in the other order."""
        (contract, _), (batch, _) = self.numbers
        first, fixed = len(batch), len(contract) + len(batch)
        dims = range(lhs_ndim + rhs_ndim - first - 2 * len(contract))
        of_rhs = first + rhs_ndim - fixed
        order = (*dims[:first], *dims[of_rhs:], *dims[first:of_rhs])
        permutation = order if self.permutation is None else tuple(order[i] for i in self.permutation)
        return self.turned.replaced(permutation=permutation)

    def result(self, avals, out_sharding):
        lhs, rhs, *_ = avals
        product, effects = compat.dot_general_p.abstract_eval(lhs, rhs, out_sharding=out_sharding, **self.laxs)
        if self.epilogue.gate == "stacked":
            *sizes, _, last = product.shape
            limits = dict(start_indices=(0,) * product.ndim, limit_indices=(*sizes, 1, last), strides=None)
            product = lax.slice_p.abstract_eval(product, **limits)[0]
            product = lax.squeeze_p.abstract_eval(product, dimensions=(product.ndim - 2,))[0]
        if not self.epilogue.is_plain and compat.is_unreduced(product):
            raise ValueError(
                f"linear: out_sharding={out_sharding} leaves the sum over devices open, but the epilogue needs it"
            )
        if self.permutation is not None:
            product, _ = lax.transpose_p.abstract_eval(product, permutation=self.permutation)
        return product, effects

    def by_xla(self, *operands, out_sharding=None):
        dtype = self.preferred_element_type
        params = self.laxs | dict(preferred_element_type=dtype if self.epilogue.is_plain else wide(dtype))
        given = self.by_role(operands)
        lhs, matrices = given.pop("lhs"), [given.pop(role) for role in ("rhs", "up") if role in given]
        product, *up = (compat.dot_general_p.bind(lhs, x, out_sharding=out_sharding, **params) for x in matrices)
        out = self.epilogue.apply(product, **dict(zip(("up",), up)), **given, dtype=dtype)
        return out if self.permutation is None else lax.transpose(out, self.permutation)

    def apart(self, *operands, **params):
        """Product and epilogue; the products of a gated one with their biases, each rounded."""
        given = self.by_role(operands)
        lhs, rhs = given.pop("lhs"), given.pop("rhs")
        if not self.epilogue.gate:
            return self.epilogue.apply(bind(self.plain, lhs, rhs, **params), **given)
        each, gate = self.before_gate, dataclasses.replace(self.epilogue, has_bias=False, bias_batch=0)
        biases = [[given[role]] if role in given else [] for role in ("bias", "up_bias")]
        products = [bind(each, lhs, x, *bias, **params) for x, bias in zip((rhs, *_of(given, "up")), biases)]
        return gate.apply(products[0], **dict(zip(("up",), products[1:])))

    def cotangent(self, of, cotangent, operands, schedule):
        """The result's, contracted with the other operand over its free dimensions."""
        if self.permutation is not None:
            cotangent = lax.transpose(cotangent, np.argsort(self.permutation))
        contract, batch = self.numbers
        x, other = operands[of].aval, operands[1 - of]
        x_free, other_free = (
            [i for i in range(ndim) if i not in (*contract[side], *batch[side])]
            for ndim, side in ((x.ndim, of), (other.ndim, 1 - of))
        )
        in_output = range(len(batch[0]), len(batch[0]) + len(x_free) + len(other_free))
        from_other = in_output[len(x_free) :] if of == 0 else in_output[: len(other_free)]
        # For each dimension of the product, the dimension of x that it becomes.
        order = [*batch[of], *x_free, *(contract[of][i] for i in np.argsort(contract[1 - of]))]
        product = self.replaced(
            numbers=((from_other, other_free), (range(len(batch[0])), batch[1 - of])),
            permutation=None if order == sorted(order) else tuple(map(order.index, range(x.ndim))),
        )
        sharding = compat.cotangent_sharding(x, order)
        return bind(product, cotangent, other, schedule=schedules.of_cotangent(schedule, of), out_sharding=sharding)

    def jvp(self, primals, tangents, **params):
        """Applies the activation in XLA: its derivative needs the value before it."""
        if self.epilogue.gate:
            return super().jvp(primals, tangents, **params)
        linear = dataclasses.replace(self.epilogue, activation=None)
        before = bind(self.replaced(epilogue=linear), *primals, **params)
        product: Callable[..., Any] = functools.partial(bind, self.plain, **params)
        moving = {role: x for role, x in self.by_role(tangents).items() if type(x) is not ad.Zero}
        terms = []
        if "lhs" in moving:
            terms.append(product(moving["lhs"], primals[1]))
        if "rhs" in moving:
            terms.append(product(primals[0], moving["rhs"]))
        if terms:
            # One scaling of the sum: its transpose then scales the cotangent once. Two scaled copies would each be
            # moved between devices.
            terms = [scaled(self.epilogue.alpha, functools.reduce(lax.add, terms))]
        terms += [scaled(self.epilogue.beta, x) for x in _of(moving, "residual")]
        for bias in _of(moving, "bias"):
            terms.append(jnp.zeros_like(before) + self.epilogue.spread_bias(bias, before.ndim))
        return jax.jvp(ACTIVATIONS[self.epilogue.activation], (before,), (functools.reduce(lax.add, terms),))

    def batched(self, axis_data, operands, dims, *, schedule, out_sharding=None):
        """One kernel if the mapped axis is a batch, or free in the only matrix that has it; else two steps."""
        given, of = self.by_role(operands), self.by_role(dims)
        biases = [role for role in ("bias", "up_bias") if role in given]
        one_bias_for_all = all(of[role] is None for role in biases)
        is_separate = not self.epilogue.is_plain and of["rhs"] is None and (of["lhs"] is None or not one_bias_for_all)
        if self.epilogue.is_pair:
            is_separate |= (of["rhs"] is None) != (of["up"] is None)
        elif self.epilogue.gate:
            is_separate |= of["rhs"] is not None and of["lhs"] is None  # rhs has two free dimensions only
        if is_separate:
            params = dict(schedule=schedule, out_sharding=out_sharding)
            rule = super().batched if self.epilogue.gate else self._batched_apart
            return rule(axis_data, operands, dims, **params)
        lhs, rhs, lhs_dim, rhs_dim = given["lhs"], given["rhs"], of["lhs"], of["rhs"]
        numbers, out_dim, out_sharding = compat.batched_dimensions(
            axis_data, (lhs.ndim, rhs.ndim), (lhs_dim, rhs_dim), self.numbers, out_sharding
        )

        def mapped(x, dim, to):
            if dim is not None:
                return jnp.moveaxis(x, dim, to)
            return jnp.repeat(jnp.expand_dims(x, to), axis_data.size, to)

        bias_batch = self.epilogue.bias_batch
        if lhs_dim is None:
            # The mapped axis is a free dimension of rhs, and these come last in the result as in the bias.
            rank = lhs.ndim + rhs.ndim - 2 * len(numbers[0][0]) - len(numbers[1][0])
            for role in biases:
                x, dim = given[role], of[role]
                given[role] = mapped(x, dim, out_dim - rank + x.ndim + (dim is None))
        elif biases and rhs_dim is not None and not (one_bias_for_all and not bias_batch):
            # A bias with one of the batch dimensions must have all of them.
            sizes = [lhs.shape[i] for i in numbers[1][0]]
            for role in biases:
                x = jnp.expand_dims(mapped(given[role], of[role], 0), tuple(range(1 + bias_batch, len(sizes))))
                given[role] = jnp.broadcast_to(x, (*sizes, *x.shape[len(sizes) :]))
            bias_batch = len(sizes)
        if "up" in given and rhs_dim is not None:
            given["up"] = jnp.moveaxis(given["up"], of["up"], rhs_dim)
        if "residual" in given:
            given["residual"] = mapped(given["residual"], of["residual"], out_dim)
        permutation = self.permutation
        if permutation is not None:
            permutation = (out_dim, *(dim + (dim >= out_dim) for dim in permutation))
        epilogue = dataclasses.replace(self.epilogue, bias_batch=bias_batch)
        product = self.replaced(numbers=numbers, epilogue=epilogue, permutation=permutation)
        out = bind(product, *given.values(), schedule=schedule, out_sharding=out_sharding)
        return out, out_dim if permutation is None else 0

    def _batched_apart(self, axis_data, operands, dims, **params):
        """``batched`` by a product that is not rounded before its epilogue."""
        dtype = self.preferred_element_type
        product = self.plain.replaced(preferred_element_type=wide(dtype))
        out, out_dim = batched(axis_data, operands[:2], dims[:2], product=product, **params)
        roles = self.epilogue.roles
        finish = lambda x, *others: self.epilogue.apply(x, **dict(zip(roles, others)), dtype=dtype)
        return jax.vmap(finish, (out_dim, *dims[2:]))(out, *operands[2:]), 0

    def asked(self, avals, out_sharding):
        return (compat.dot_general_p, *avals[:2]), self.laxs | dict(out_sharding=out_sharding)

    def partitioned(self, avals, schedule):
        bound = functools.partial(bind, schedule=schedule)
        plain = self.plain.replaced(permutation=self.permutation)
        product = lambda lhs, rhs, **parts: bound(plain, lhs, rhs, *parts.values())
        fused = lambda **given: bound(self, *(given[role] for role in self.roles))
        return partition.partitioned(product, self.epilogue.apply, fused, self.factors(avals))

    def factors(self, avals):
        return partition.Factors(self, avals[0].ndim, avals[1].ndim)

    def without_transposes(self, operands, avals, behind):
        # A gated product's transposes are folded in only if all matrices then have one layout.
        lhs, matrices = operands[0], operands[1 : 3 if self.epilogue.is_pair else 2]
        folded = [_without_transposes((lhs, x), avals, self.numbers, behind) for x in matrices]
        ((lhs, _), (of_lhs, of_rhs), numbers), *_ = folded
        if any(x[1:] != folded[0][1:] for x in folded):
            return self, operands, avals
        count = 1 + len(matrices)
        operands = [lhs, *(rhs for (_, rhs), *_ in folded), *operands[count:]]
        return self.replaced(numbers=numbers), operands, [of_lhs, *[of_rhs] * len(matrices), *avals[count:]]

    def arranged(self, types, platform, nests=False):
        return problem.arrange(
            types["lhs"], types["rhs"], self.numbers, self.precision, self.preferred_element_type, platform,
            self.epilogue, self.permutation, nests,
        )  # fmt: skip

    def nested(self, types, platform):
        return self.arranged(types, platform, nests=True)

    def of_several_rows(self, types):
        (contract, _), (batch, _) = self.numbers
        lhs = types["lhs"]
        shape = [max(size, 2) if i not in (*contract, *batch) else size for i, size in enumerate(lhs.shape)]
        return types | dict(lhs=lhs.update(shape=tuple(shape)))


def _of(given, *roles):
    """The operands with these roles, as far as a product has them."""
    return [given[role] for role in roles if role in given]


def _without_transposes(operands, avals, numbers, behind):
    """Folds transposes of lhs and rhs into the product, and returns both, their types, and its dimension numbers."""
    operands, avals = list(operands), list(avals[:2])
    sides = [list(side) for side in zip(*numbers)]
    for i in range(2):
        while (transpose := behind(operands[i])) is not None:
            source, permutation = transpose
            free = [p for dim, p in enumerate(permutation) if dim not in (*sides[i][0], *sides[i][1])]
            if free != sorted(free):  # the result keeps the operand's order
                break
            operands[i] = source
            avals[i] = avals[i].update(shape=tuple(avals[i].shape[j] for j in np.argsort(permutation)))
            sides[i] = [tuple(permutation[dim] for dim in dims) for dims in sides[i]]
    return operands, avals, tuple(zip(*sides))
