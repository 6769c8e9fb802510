"""What makes and what reads each value of a jaxpr, and which values XLA's program has in memory."""

import collections
import copy
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var

from jax_streamk import compat
from jax_streamk.accelerate import activations

RESHAPES = ("reshape", "squeeze", "expand_dims")
_MOVES = (*RESHAPES, "transpose", "copy", "copy_p")
# What XLA merges with what it reads and with what reads it.
_MERGED = frozenset(
    """abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim
    cbrt ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1
    floor ge gt imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
    one_minus_square or pad population_count pow pvary real reduce_and reduce_max reduce_min reduce_or reduce_precision
    reduce_prod reduce_sum rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor""".split()
)


class Equations:
    """The equations of a jaxpr.

    Attributes:
      live: the values that something else reads.
      in_memory: values that memory will hold, as far as somebody asked.
    """

    def __init__(self, eqns: Sequence[Any], outvars: Sequence[Any]):
        self.eqns, self.outvars = eqns, outvars
        self.live = {x for x in outvars if isinstance(x, Var)}
        self.in_memory = set[Any]()
        self.maker: dict[Any, int] = {}
        self.uses: dict[Any, list[int]] = collections.defaultdict(list)
        for at, eqn in enumerate(eqns):
            for out in eqn.outvars:
                self.maker[out] = at
            for x in variables(eqn):
                self.uses[x].append(at)

    def with_eqns(self, eqns: Sequence[Any]) -> "Equations":
        """The program of other equations with the same operands and results."""
        other = copy.copy(self)
        other.eqns = eqns
        return other

    def user(self, x: Var) -> int | None:
        """The only equation that uses a value; None if there are more or it is live."""
        uses = self.uses[x]
        return uses[0] if len(uses) == 1 and x not in self.live else None

    def eqn_of(self, x: Any) -> Any:
        """The equation that makes a value; None if it is an argument or a constant."""
        at = self.maker.get(x) if isinstance(x, Var) else None
        return None if at is None else self.eqns[at]

    def transpose_behind(self, x: Any) -> tuple[Any, tuple[int, ...]] | None:
        """(operand, permutation) of the transpose that makes a value; None if none does."""
        eqn = self.eqn_of(x)
        if eqn is None or eqn.primitive.name != "transpose":
            return None
        return eqn.invars[0], tuple(eqn.params["permutation"])

    def is_same(self, x: Any, y: Any) -> bool:
        """Whether two values are one, or equal conversions of one: each layer converts its argument."""
        while x is not y:
            eqns = [self.eqn_of(v) for v in (x, y)]
            if None in eqns or eqns[0].primitive is not eqns[1].primitive or eqns[0].params != eqns[1].params:
                return False
            if eqns[0].primitive.name not in ("convert_element_type", "pvary", *RESHAPES):
                return False
            x, y = (eqn.invars[0] for eqn in eqns)
        return True

    def number(self, x: Any) -> float | None:
        """The one number that all elements of ``x`` are, if the equations tell."""
        if isinstance(x, Literal):
            return activations.number_in(x)
        return self._numbers.get(x)

    @functools.cached_property
    def _numbers(self) -> dict[Any, float]:
        numbers: dict[Any, float] = {}
        for eqn in self.eqns:
            operands = [activations.number_in(y) if isinstance(y, Literal) else numbers.get(y) for y in eqn.invars]
            if None in operands or not is_movable(eqn):
                continue
            poly = activations.result_of(eqn, [activations.constant(number or 0.0) for number in operands])
            number = None if poly is None else activations.value_of(poly)
            if number is not None:
                numbers[eqn.outvars[0]] = number
        return numbers

    def is_stored(self, x: Var, taken: Collection[int] = ()) -> bool:
        """Whether somebody reads ``x`` from memory, other than what XLA merges with whatever makes ``x``."""
        if x in self.live:
            return True
        for at in self.uses[x]:
            eqn = self.eqns[at]
            if at in taken or not is_merged(eqn):
                return True
            if eqn.primitive.name in _MOVES and self.is_stored(eqn.outvars[0], taken):
                return True
        return False


def bytes_of(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def variables(eqn: Any) -> dict[Var, None]:
    """What an equation reads, in order."""
    return dict.fromkeys(x for x in eqn.invars if isinstance(x, Var))


def is_merged(eqn: Any) -> bool:
    """Whether XLA merges an equation with those that it reads from and that read it."""
    body = compat.called(eqn)
    return eqn.primitive.name in _MERGED if body is None else all(map(is_merged, body.eqns))


def is_movable(eqn: Any, results: int = 1) -> bool:
    """Whether an equation does nothing but compute this number of arrays, where and how XLA likes."""
    are_arrays = len(eqn.outvars) == results and all(isinstance(x.aval, jax.core.ShapedArray) for x in eqn.outvars)
    is_computation = are_arrays and not eqn.effects
    return is_computation and eqn.ctx.compute_type is None and not eqn.ctx.xla_metadata


def is_view(eqn: Any) -> bool:
    """Whether an equation moves nothing: it changes a shape, or is a copy, which lowering leaves out."""
    if eqn.primitive.name in ("copy", "copy_p"):
        return True
    if eqn.primitive.name == "broadcast_in_dim":  # that only adds dimensions of size 1
        return len(eqn.invars) == 1 and eqn.outvars[0].aval.size == eqn.invars[0].aval.size
    return (eqn.primitive.name in RESHAPES and eqn.params.get("dimensions") is None) or eqn.primitive.name == "squeeze"


def is_exact(eqn: Any) -> bool:
    """Whether an equation converts to a dtype that holds every value of the one before."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    return activations.holds(eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype)


def is_float(x: Any) -> bool:
    return activations.is_float(x.aval.dtype)
