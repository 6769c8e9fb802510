"""What ``accelerate(fn).explain`` says: every product of a program, whose it is and why, its plan and expected time."""

import dataclasses
import html
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_streamk import compat, schedules, text
from jax_streamk.accelerate.decisions import decide, planned
from jax_streamk.accelerate.equations import Equations
from jax_streamk.device import Device
from jax_streamk.plan.plan import Plan
from jax_streamk.product import kinds
from jax_streamk.product.chain import chain_p
from jax_streamk.product.fused import fused_p
from jax_streamk.product.primitive import product_p
from jax_streamk.product.ragged import Ragged
from jax_streamk.tuning import tuned


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a program.

    Attributes:
      batch, m, n, k: extents, of our kernel's problem where there is one.
      dtypes: such as ``"bf16 x bf16 -> f32"``.
      count: how many times the program computes it, scans counted by their lengths.
      is_exact: whether that is known. If not, it is inside a ``while_loop``, whose body counts once, or a ``cond``,
        whose branches all do.
      is_ours: whether a kernel of ours computes it.
      why: why it is XLA's; "" if it is ours, unless tuning measured it with the equations around it.
      fused: what was fused into it, such as ``"relu(A @ B + bias)"``; "" if nothing was.
      plan: the ``Plan``; None if there is none.
      groups: the number of groups that cut m or k, whose sizes are data; 0 if it is not a ragged product.
      chain: the chain that it is part of, such as ``"in a chain of 4 products, which ends there: ..."``; "" if none.
      place: the line of the program that it is from, and the loops and named scopes around it, such as ``"model.py:12
        (attention), in scan/block"``.
      microseconds: the expected time of one; if it is XLA's, that of our best kernel. None if unknown.
      share: of the expected time of all products of the program; None if unknown.
    """

    batch: int
    m: int
    n: int
    k: int
    dtypes: str
    count: int
    is_exact: bool
    is_ours: bool
    why: str
    fused: str
    plan: Plan | None
    microseconds: float | None
    share: float | None = None
    groups: int = 0
    chain: str = ""
    place: str = ""

    @property
    def shape(self) -> str:
        """``"m x n x k"``, after the batch if it is not 1, and before the groups if there are any."""
        extents = (self.m, self.n, self.k) if self.batch == 1 else (self.batch, self.m, self.n, self.k)
        groups = f", {self.groups} group{'s' * (self.groups > 1)}" if self.groups else ""
        return " x ".join(map(str, extents)) + groups

    @property
    def kernel(self) -> str | None:
        """The kernel's name; None if it is XLA's product."""
        return self.plan.kernel if self.is_ours and self.plan is not None else None

    @property
    def schedule(self) -> schedules.Schedule | None:
        """Its schedule; None if it is XLA's product."""
        return self.plan.schedule if self.is_ours and self.plan is not None else None


_WIDTH = 100
_COLUMNS = ("m x n x k", "dtypes", "count", "by", "expected", "share")


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of a program, those that take longest first. Prints as a table; notebooks show one.

    Attributes:
      rows: a ``Product`` each; equal ones of one place are counted in one.
      device: the ``Device`` that they are planned for.
    """

    rows: tuple[Product, ...]
    device: Device

    @property
    def microseconds(self) -> float:
        """The expected time of all products whose time is known."""
        return sum(row.count * (row.microseconds or 0) for row in self.rows)

    def __str__(self) -> str:
        cells = [_COLUMNS, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = [self._title()]
        for row, texts in zip((None, *self.rows), cells):
            first, second, *others = (
                x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(texts, widths))
            )
            lines.append("  ".join((first, second, *others)).rstrip())
            for line in () if row is None else _details(row):
                lines += _folded(line)
        return "\n".join([*lines, *(_folded(self._note()) if self._note() else ())])

    def _title(self) -> str:
        ours = sum(row.count for row in self.rows if row.is_ours)
        total = sum(row.count for row in self.rows)
        of_all = f"{ours} of {total} products are ours" if total else "no products"
        return f"{of_all} on {self.device.kind or self.device.platform}"

    def _note(self) -> str:
        notes = []
        if any(not row.is_ours and row.microseconds is not None for row in self.rows):
            notes.append("Of XLA's products the time is that of our best kernel.")
        if not all(row.is_exact for row in self.rows):
            notes.append("?: in a while_loop, whose body counts once, or a cond, whose branches all do.")
        return " ".join(notes)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (*_COLUMNS, "how"))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in (*_cells(row), "; ".join(_details(row)))) + "</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{html.escape(self._title())}</p>{table}<p>{html.escape(self._note())}</p>"


def _cells(row: Product) -> tuple[str, ...]:
    return (
        row.shape,
        row.dtypes,
        f"{row.count}{'' if row.is_exact else '?'}",
        "us" if row.is_ours else "XLA",
        "" if row.microseconds is None else text.duration(row.count * row.microseconds),
        "" if row.share is None else f"{row.share:.0%}",
    )


def _details(row: Product) -> list[str]:
    """How a product is computed, a line each."""
    plan = f"{row.kernel}, {row.schedule}" if row.is_ours else ""
    lines = plan, row.fused and f"D = {row.fused}", row.chain, row.why, row.place and f"at {row.place}"
    return [line for line in lines if line]


def _folded(line: str) -> list[str]:
    """A line in lines of ``_WIDTH`` columns, indented."""
    lines, rest = [], line
    while len(rest) > _WIDTH - 4:
        cut = rest.rfind(" ", 0, _WIDTH - 4)
        cut = cut if cut > 0 else _WIDTH - 4
        lines.append("    " + rest[:cut])
        rest = rest[cut:].lstrip()
    return [*lines, "    " + rest]


def products_of(
    jaxpr: Any,
    schedule: Any,
    where: Callable[..., Any] | None,
    device: Device,
    measured: Mapping[Any, tuned.FragmentTimes],
    ends: Mapping[Any, str],
) -> Products:
    """Every product of a jaxpr that ``accelerate`` has rewritten.

    ``measured`` is by the results of products, ``ends`` by those of chains, why they end.
    """
    rows: dict[Any, Product] = {}
    for eqn, program, count, is_exact, times, around, chain in _equations(jaxpr, 1, True, measured, (), ends, ""):
        row = _row(eqn, program, count, is_exact, schedule, where, device, times)
        row = dataclasses.replace(row, chain=chain)
        line, scopes = compat.place_of(eqn)
        inside = "/".join((*around, scopes) if scopes else around)
        row = dataclasses.replace(row, place=", in ".join(filter(None, (line, inside))))
        key = dataclasses.replace(row, count=0)
        equal = rows.get(key)
        rows[key] = row if equal is None else dataclasses.replace(row, count=equal.count + row.count)
    total = sum(row.count * (row.microseconds or 0) for row in rows.values())
    shared = [
        row
        if row.microseconds is None
        else dataclasses.replace(row, share=row.count * row.microseconds / total if total else None)
        for row in rows.values()
    ]
    return Products(tuple(sorted(shared, key=lambda row: -(row.share or 0))), device)


def _equations(
    jaxpr: Any,
    count: int,
    is_exact: bool,
    measured: Mapping[Any, tuned.FragmentTimes],
    around: tuple[str, ...],
    ends: Mapping[Any, str],
    chain: str,
) -> Iterator[tuple[Any, Equations, int, bool, tuned.FragmentTimes | None, tuple[str, ...], str]]:
    """Each product's equation, its program, how often it runs, what was measured of it, and what it is in."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    program = Equations(jaxpr.eqns, jaxpr.outvars)
    for eqn in jaxpr.eqns:
        if eqn.primitive is product_p or eqn.primitive in kinds.KINDS:
            yield eqn, program, count, is_exact, measured.get(eqn.outvars[0]), around, chain
        elif eqn.primitive.name != "pallas_call":
            params = compat.parameters(eqn)
            times = count * params["length"] if {"length", "jaxpr"} <= params.keys() else count  # of a scan
            is_known = is_exact and eqn.primitive.name not in ("while", "cond", "custom_linear_solve", "linear_solve")
            # The equations that a fused product replaced are not part of the program.
            values = [value for name, value in params.items() if name != "written"]
            inside = (*around, eqn.primitive.name) if eqn.primitive.name in ("scan", "while", "cond") else around
            own = _chain(eqn, ends) if eqn.primitive is chain_p else chain
            for inner in _jaxprs(tuple(values)):
                yield from _equations(inner, times, is_known, _of_fused(eqn, inner, measured), inside, ends, own)


def _chain(eqn: Any, ends: Mapping[Any, str]) -> str:
    """What is said of each product of a chain."""
    count = sum(1 for _ in _equations(eqn.params["jaxpr"], 1, True, {}, (), {}, ""))
    why = ends.get(eqn.outvars[0], "")
    return f"in a chain of {count} products" + (f", which ends there: {why}" if why else "")


def _of_fused(eqn: Any, inner: Any, measured: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """What was measured, for the product inside of a fused one by the results of those that it replaced."""
    if eqn.primitive is not fused_p or not measured:
        return measured
    times = [measured[x] for old in eqn.params["written"].eqns for x in old.outvars if x in measured]
    return {x: times[0] for new in inner.eqns for x in new.outvars} if times else measured


def _jaxprs(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value
        elif isinstance(value, jax.stages.Traced):
            yield value.jaxpr
        elif isinstance(value, tuple):
            yield from _jaxprs(value)


def _row(eqn, program, count, is_exact, schedule, where, device, measured) -> Product:
    product, is_ours = kinds.of(eqn), eqn.primitive is product_p
    why, plan = "", None
    if is_ours:
        try:
            plan = planned(eqn, program, device)
        except ValueError as error:
            is_ours, why = False, str(error)
        if plan is not None and plan.kernel is None:
            is_ours, why = False, plan.why_xla or plan.reasons[0]
    else:
        decision = decide(eqn, program, schedule, where, device, measured)
        plan = decision.plan
        why = decision.why or "accelerate does not look into the primitive that it is in"
    if is_ours and measured is not None:
        why = measured.why
    lhs, rhs = (x.aval for x in eqn.invars[:2])
    problem, groups = plan.problem if plan is not None else None, 0
    is_ragged = isinstance(product, Ragged)
    contract, batch = product.numbers.dot_dimension_numbers if is_ragged else product.numbers
    if is_ragged:
        sizes = dict(zip(product.roles, eqn.invars))["group_sizes"]  # an equation of JAX's may have a group_offset
        groups = sizes.aval.shape[-1] - product.leading
    if problem is None:
        depth, batches = (math.prod(lhs.shape[i] for i in dims) for dims in (contract[0], batch[0]))
        m, n = (x.size // max(1, depth * batches) for x in (lhs, rhs))
        if is_ragged and product.groups_rows:
            n //= max(1, groups)
            m = eqn.outvars[0].aval.size // max(1, n * batches)
        extents = batches, m, n, depth
    else:
        extents = 1 if is_ragged else problem.batch, problem.m, problem.n, problem.k
    names = [_short(x.dtype) for x in (lhs, rhs, eqn.outvars[0].aval)]
    return Product(
        *extents,
        dtypes=f"{names[0]} x {names[1]} -> {names[2]}",
        count=count,
        is_exact=is_exact,
        is_ours=is_ours,
        why=why,
        fused=problem.epilogue if is_ours and problem is not None else "",
        plan=plan,
        microseconds=None if plan is None else plan.microseconds,
        groups=groups,
    )


def _short(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    return name.replace("bfloat", "bf").replace("float", "f") if name[-1].isdigit() and "8_" not in name else name
