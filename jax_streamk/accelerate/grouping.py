"""Chains of a program: products of few rows that follow each other, and what lies between them on rows, as one call.

A chain begins at a product of ours and takes every equation that reads what it has made, if a chain may have it. What
else reads that, such as attention, comes after the chain and ends it: the next product that needs it begins another.
"""

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.extend.core import Var

from jax_streamk import compat
from jax_streamk.accelerate.equations import variables
from jax_streamk.device import Device
from jax_streamk.lower.chain import Broken, Growing, chain_of
from jax_streamk.machines import machine_of
from jax_streamk.product import kinds, rows
from jax_streamk.product.chain import chain_p
from jax_streamk.product.fused import fused_p
from jax_streamk.product.primitive import product_p

# Equations of one operand whose results a program of rows reads as that operand.
_BROADCASTS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")


def chained(
    eqns: Sequence[Any], outvars: Sequence[Any], schedule: Any, device: Device, ends: dict[Any, str] | None
) -> list[Any] | None:
    """A program's equations with chains as one call each; None if there are none.

    Args:
      eqns, outvars: of a program, after fusing.
      schedule: of products that became ours.
      device: a GPU.
      ends: gets, by the first result of each chain, why it ended where it did; "" if with the program.
    """
    if most_rows(device) == 0 or sum(map(_is_ours, eqns)) < 2:
        return None
    program = _Program(eqns, outvars)
    new, group = [], _Group(program, schedule, device)
    for at in range(len(eqns)):
        if not group.takes(at):
            new += group.equations(ends)
            group = _Group(program, schedule, device)
            group.takes(at)
    new += group.equations(ends)
    return new if len(new) < len(eqns) else None


def most_rows(device: Device) -> int:
    """Up to how many rows chains are faster than their products one by one, on a GPU."""
    return int(machine_of(device).chain_rows)


def _is_ours(eqn: Any) -> bool:
    return eqn.primitive in (product_p, fused_p)


def _has(is_one: Callable[[Any], bool], eqn: Any) -> bool:
    """Whether an equation is such a one, or calls a function that has one."""
    body = compat.called(eqn)
    return is_one(eqn) or (body is not None and any(_has(is_one, inner) for inner in body.eqns))


class _Program:
    """Equations, who reads a variable (``None``: a caller of the program), and what only broadcasts an operand."""

    def __init__(self, eqns: Sequence[Any], outvars: Sequence[Any]):
        self.eqns = eqns
        self.readers: dict[Any, set[int | None]] = collections.defaultdict(set)
        self._broadcast: dict[Any, int] = {}
        for at, eqn in enumerate(eqns):
            for x in variables(eqn):
                self.readers[x].add(at)
            if eqn.primitive.name in _BROADCASTS and len(eqn.invars) == 1 and not eqn.effects:
                self._broadcast[eqn.outvars[0]] = at
        for x in outvars:
            if isinstance(x, Var):
                self.readers[x].add(None)

    def broadcasts(self, eqn: Any) -> list[int]:
        """The equations that broadcast what ``eqn`` reads: a chain reads the smaller array."""
        found: dict[int, None] = {}
        for x in variables(eqn):
            if (at := self._broadcast.get(x)) is not None:
                found |= dict.fromkeys([*self.broadcasts(self.eqns[at]), at])
        return [*found]


class _Group:
    """A chain as it grows; equations are given by their places in the program."""

    def __init__(self, program: _Program, schedule: Any, device: Device):
        self._program, self._schedule, self._device = program, schedule, device
        self._growing = Growing(schedule, device)
        self._inside: list[int] = []
        self._added: list[int] = []  # these, and the broadcasts that they read
        self._before: list[int] = []  # what needs nothing of it
        self._after: list[int] = []
        self._made: set[Any] = set()
        self._late: set[Any] = set()  # what is made after it
        self._why = ""

    def takes(self, at: int) -> bool:
        """Whether an equation is in this chain, or beside it; if not, it begins another."""
        eqn = self._program.eqns[at]
        reads = variables(eqn)
        is_ours = _is_ours(eqn)
        if not self._inside:
            if is_ours and _rows(eqn) <= most_rows(self._device) and self._grows(at, eqn):
                self._why = ""
            else:
                self._before.append(at)
            return True
        if eqn.effects:
            return False
        needs_late = not self._late.isdisjoint(reads)
        if not needs_late and self._made.isdisjoint(reads):
            if is_ours and len(self._inside) == 1:
                return False  # one product alone is no chain
            self._before.append(at)
        elif needs_late or not self._grows(at, eqn):
            if is_ours:
                return False
            self._after.append(at)
            self._late.update(eqn.outvars)
        return True

    def _grows(self, at: int, eqn: Any) -> bool:
        """Adds an equation to the chain if it can have it."""
        if _has(lambda x: x.primitive in kinds.KINDS, eqn):
            self._why = self._why or "XLA computes a product"
            return False
        may_be_of_rows = _has(_is_ours, eqn) or rows.first_columns(eqn) is not None
        if not may_be_of_rows and (why := rows.why_not(eqn)) is not None:
            self._why = self._why or why
            return False
        added = [*(x for x in self._program.broadcasts(eqn) if x not in self._added), at]
        try:
            self._add(added)
        except Broken as why:
            self._why = self._why or str(why)
            self._growing = Growing(self._schedule, self._device)
            self._add(self._added)
            return False
        self._added += added
        self._inside.append(at)
        self._made.update(eqn.outvars)
        return True

    def _add(self, places: Sequence[int]) -> None:
        for at in places:
            self._growing.add(self._program.eqns[at])

    def equations(self, ends: dict[Any, str] | None) -> list[Any]:
        """All equations that were taken, with the chain as one call if there is one."""
        eqns, inside = self._program.eqns, [*self._inside]
        while inside and not _has(_is_ours, eqns[inside[-1]]):
            inside.pop()
        # A chain stores no columns of what it stores: they are cut once more for those after it.
        cut = {x for x in inside if rows.first_columns(eqns[x]) is not None and self._is_read_after(x, inside)}
        after = sorted({*self._after, *self._inside}.difference(inside).union(cut))
        call = self._call(inside, {*inside}.difference(cut))
        if call is None:
            return [eqns[at] for at in sorted({*self._before, *inside, *after})]
        if ends is not None:
            ends[call.outvars[0]] = self._why
        return [*(eqns[at] for at in self._before), call, *(eqns[at] for at in after)]

    def _is_read_after(self, at: int, inside: Collection[int]) -> bool:
        return any(not self._program.readers[x] <= {*inside} for x in self._program.eqns[at].outvars)

    def _call(self, inside: list[int], stored: Collection[int]) -> Any:
        """The chain of equations, with the results of those ``stored`` that others read; None if it is none."""
        eqns = self._program.eqns
        if sum(_has(_is_ours, eqns[at]) for at in inside) < 2:
            return None
        copied = {x for at in inside for x in self._program.broadcasts(eqns[at])}
        replaced = [eqns[at] for at in sorted(copied.union(inside))]
        made = (x for at in inside if at in stored for x in eqns[at].outvars)
        outs = [x for x in made if not self._program.readers[x] <= {*stored}]
        inputs = list(compat.free_variables(replaced))
        jaxpr = compat.closed(inputs, replaced, *outs)
        try:
            chain_of(jaxpr, self._schedule, self._device)
        except Broken:
            return None
        params = dict(jaxpr=jaxpr, schedule=self._schedule)
        return eqns[inside[-1]].replace(primitive=chain_p, params=params, invars=inputs, outvars=outs)


def _rows(eqn: Any) -> int:
    return math.prod(eqn.outvars[0].aval.shape[:-1])
