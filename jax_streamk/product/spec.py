"""What is multiplied: the static part of a product, and what rules of JAX's, planning and lowering ask it.

A kind of product is a file beside this one with a class: ``dense``, ``ragged``, ``joined``. Operands go by role. They
are lhs and rhs, and, in the order in which kernels take them, those that ``ROLES`` lists.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
from jax.interpreters import ad

from jax_streamk import _ffi
from jax_streamk.product.epilogue import Epilogue, ShortRepr

ROLES = ("lhs", "rhs", *(role for role in _ffi.roles if role not in ("a", "b", "d")))


@dataclasses.dataclass(frozen=True, repr=False)
class Product(ShortRepr):
    """The static part of a product.

    Attributes:
      numbers: which dimensions are contracted, batch or cut by groups, as JAX's primitive of this kind has it.
      precision, preferred_element_type: canonical, as JAX's primitives carry them.
      epilogue: what follows.
    """

    # What JAX's primitive of this kind calls ``numbers``.
    called: ClassVar[str] = "dimension_numbers"
    # Whether XLA's product infers the explicit sharding of its result.
    is_placed_by_xla: ClassVar[bool] = True
    # Whether XLA has one product, too, where no kernel of ours runs it.
    is_one: ClassVar[bool] = True

    numbers: Any
    precision: Any
    preferred_element_type: Any
    epilogue: Epilogue = Epilogue()

    @property
    def has(self):
        """The roles of the operands, in any order."""
        raise NotImplementedError

    @functools.cached_property
    def roles(self):
        """The roles of the operands, in order."""
        return tuple(role for role in ROLES if role in self.has)

    def by_role(self, operands):
        """{role: operand}"""
        return dict(zip(self.roles, operands, strict=True))

    @property
    def is_bilinear(self):
        """Whether it is a function of lhs and rhs, other than integers, and linear in each."""
        return self.epilogue.is_plain

    @property
    def plain(self):
        """The same without epilogue."""
        return self.replaced(epilogue=Epilogue())

    @property
    def before_gate(self):
        """One of the products of a gated one."""
        return self.replaced(epilogue=self.epilogue.before_gate)

    def replaced(self, **changes):
        return dataclasses.replace(self, **changes)

    @classmethod
    def of(cls, eqn):
        """The product of an equation of JAX's primitive of this kind."""
        return cls(*(eqn.params[name] for name in (cls.called, "precision", "preferred_element_type")))

    @property
    def laxs(self):
        """The parameters of lax's product."""
        types = dict(precision=self.precision, preferred_element_type=self.preferred_element_type)
        return {self.called: self.numbers} | types

    @classmethod
    def why_not(cls, eqn):
        """Why there is no such product as that of an equation of JAX's; None if there is."""
        return None

    def canonical(self, operands, out_sharding):
        """(product, operands, out_sharding) to bind: the same ones, unless the kind has no such product."""
        return self, operands, out_sharding

    def result(self, avals, out_sharding):
        """(the type of the result, effects). Raises TypeError or ValueError as JAX's own product."""
        raise NotImplementedError

    def by_xla(self, *operands, out_sharding=None):
        """What the primitive computes, by XLA."""
        raise NotImplementedError

    def apart(self, *operands, schedule, out_sharding=None):
        """The same by simpler products of ours, one after the other."""
        raise NotImplementedError

    def cotangent(self, of, cotangent, operands, schedule):
        """The cotangent of lhs (``of`` is 0) or rhs (1) of a bilinear product."""
        raise NotImplementedError

    def jvp(self, primals, tangents, **params):
        """The result and its tangent, of a product that is not bilinear."""
        moves = [is_moving(x) for x in tangents]
        function = of_some(functools.partial(self.apart, **params), primals, moves)
        free, velocities = ([x for x, moved in zip(xs, moves) if moved] for xs in (primals, tangents))
        return jax.jvp(function, free, velocities)

    def batched(self, axis_data, operands, dims, *, schedule, out_sharding=None):
        """(the results of operands mapped over ``dims``, at least one not None; their mapped dimension)"""
        apart = functools.partial(self.apart, schedule=schedule, out_sharding=out_sharding)
        return jax.vmap(apart, dims, axis_size=axis_data.size, spmd_axis_name=axis_data.spmd_name)(*operands), 0

    def asked(self, avals, out_sharding):
        """What policies of ``jax.checkpoint`` are asked about: ((JAX's primitive, types of operands), parameters)."""
        raise NotImplementedError

    def instead(self, *operands, **params):
        """The same by simpler products where no kernel computes it as one, or XLA partitions them."""
        return self.apart(*operands, **params)

    def partitioned(self, avals, schedule):
        """A function of the operands for XLA to partition; None if it is to partition the products ``instead``."""
        return None

    def factors(self, avals):
        """The ``Factors`` of its dimensions, which devices may divide."""
        raise NotImplementedError

    def without_transposes(self, operands, avals, behind):
        """(product, operands, types): with transposes of operands folded in, since kernels read either majorness.

        ``behind`` finds (operand, permutation) of the transpose that makes a value, None if none does.
        """
        return self, operands, avals

    def arranged(self, types, platform):
        """The ``Arrangement`` for one kernel. Raises ``Unsupported``, if no kernel supports the operands."""
        raise NotImplementedError

    def nested(self, types, platform):
        """The ``Arrangement`` with a batch of two dimensions, where that saves copies; None if the kind has none."""
        return None

    def of_several_rows(self, types):
        """The types of operands of the same product with more than one row in each free dimension of lhs."""
        return types

    def as_read(self, types):
        """{role: function} of operands that kernels read in another form."""
        return {}


def is_moving(tangent):
    """Whether a tangent is one of numbers that change: neither zero nor that of integers."""
    return type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0


def of_some(function, operands, is_free):
    """A function of those operands that are free."""

    def of_free(*given):
        taken = iter(given)
        return function(*(next(taken) if free else x for x, free in zip(operands, is_free)))

    return of_free
