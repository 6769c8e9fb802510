"""Which products of a program are ours, and what ``accelerate(fn).explain`` says of each.

``decide`` is the one function that decides. A product is XLA's if ``left_to_xla`` says so or no kernel runs it, and
under ``Auto()`` on a GPU also if XLA merges it with its neighbours: that saves more than a faster kernel. A ``where``
decides instead of the last.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_streamk import compat, fusion, lowering, primitive, schedules, text
from jax_streamk.device import Device
from jax_streamk.machines import machine_of
from jax_streamk.planner import Plan

_FALLS_BACK = "falls back to XLA: "
_FEW_ROWS = 64  # up to here XLA's autotuner takes Triton's GEMM fusions
_LARGER = 4  # times the elements of everything else that a product reads and writes
_MOST_MERGED_BYTES = 32 * 2**20  # xla_gpu_dot_merger_threshold_mb
_PAYS = 1.2  # times faster by the model: launches of a program overlap, and the model counts each
_LAYOUT = ("reshape", "transpose", "squeeze", "expand_dims", "copy", "copy_p", "pvary")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a product is ours, and why not; the plan, if there is one."""

    is_ours: bool
    why: str
    plan: Plan | None


def decide(eqn: Any, program: fusion.Program, schedule: Any, where: Any, device: Device) -> Decision:
    """Whether the product of an equation of JAX's ``dot_general`` in a program becomes ours."""
    if eqn.ctx.compute_type is not None:
        return Decision(False, f"it is under compute_on({eqn.ctx.compute_type!r})", None)
    try:
        made = planned(eqn, device, schedule=schedule)
    except ValueError as error:
        return Decision(False, str(error), None)
    if made.problem is None or made.kernel is None:
        return Decision(False, made.reasons[0].removeprefix(_FALLS_BACK), made)
    is_auto = isinstance(schedules.of_forward(schedule), schedules.Auto)
    if is_auto and where is None and device.platform == "cuda":
        merged = merged_by_xla(eqn, program, device)
        if merged is not None:
            return Decision(False, merged, made)
    if where is not None and not where(made.problem):
        return Decision(False, "where(problem) is false", made)
    return Decision(True, "", made)


def planned(eqn: Any, device: Device, **changed: Any) -> Plan:
    """The ``Plan`` of a product's equation, ours or JAX's. Raises ValueError if no kernel runs an explicit schedule."""
    params = {name: value for name, value in eqn.params.items() if name != "out_sharding"} | changed
    return lowering.plan(*(x.aval for x in eqn.invars[:2]), device=device, **params)[0]


def merged_by_xla(eqn: Any, program: fusion.Program, device: Device) -> str | None:
    """Why XLA computes a product with its neighbours better than a kernel alone; None if it does not."""
    return _merged(eqn, program) or _merged_with_others(eqn, program, device)


def _merged(eqn: Any, program: fusion.Program) -> str | None:
    """Why XLA's GEMM fusion makes a product its own, by what is before or after it; None if it does not.

    Nobody measured these rules. The last two were suggested by GPT-2's forward: with all products ours, they took as
    long as XLA's, and the fusions around them 4.7 ms instead of 3.1 (H200, jaxlib 0.11.2). The others follow from the
    bytes that are read and written.
    """
    (result,) = eqn.outvars
    contract, batch = eqn.params["dimension_numbers"]
    sizes = [x.aval.size for x in eqn.invars]
    for side, (name, x) in enumerate(zip(("lhs", "rhs"), eqn.invars)):
        if (narrow := _narrow(x, program)) is not None:
            return f"{name} is converted from {narrow}, which XLA's GEMM fusion reads as it is"
        if (maker := _maker(x, program)) is None:
            continue
        shape, other = eqn.invars[1 - side].aval.shape, sizes[1 - side]
        rows = other // max(1, math.prod(shape[i] for i in (*contract[1 - side], *batch[1 - side])))
        if not batch[0] and rows <= _FEW_ROWS and sizes[side] >= _LARGER * other:
            return f"{name} is the result of {maker}, which XLA's GEMM fusion merges where rows are few"
        if batch[0] and sizes[side] >= _LARGER * (other + result.aval.size):
            return f"{name} is the result of {maker} and larger than all else: XLA's GEMM fusion merges the two"
    if batch[0] and result.aval.size >= _LARGER * sum(sizes):
        user = program.user(result)
        if user is not None and not program.is_stored(result):
            name = program.eqns[user].primitive.name
            return f"the result is larger than all else: XLA's GEMM fusion merges {name} with the product"
    return None


def _merged_with_others(eqn: Any, program: fusion.Program, device: Device) -> str | None:
    """Why XLA computes a product as one with others that share an operand, which pays; None if it does not.

    XLA's GPU compiler merges two such products if the smaller moves at most 32 MiB. It concatenates the other operands
    on every call, weights included, which takes longer than it saves unless they are small: by the model, up to 1 MB
    each. Nobody measured it.
    """
    contract, batch = eqn.params["dimension_numbers"]
    for side, name in enumerate(("lhs", "rhs")):
        shared, alike = eqn.invars[side], []
        if batch[0] or isinstance(shared, Literal):
            continue
        for at in program.uses[shared]:
            other = program.eqns[at]
            if other.primitive is eqn.primitive and other.params == eqn.params and other.invars[side] is shared:
                alike.append(other)
        if len(alike) < 2 or min(map(_bytes_moved, alike)) > _MOST_MERGED_BYTES:
            continue
        depth = math.prod(shared.aval.shape[i] for i in contract[side])
        extents = [math.prod(x.aval.shape) // max(1, depth) for x in (shared, *(e.invars[1 - side] for e in alike))]
        types = [jax.ShapeDtypeStruct((extents[0], depth), shared.aval.dtype)]
        types.append(jax.ShapeDtypeStruct((sum(extents[1:]), depth), eqn.invars[1 - side].aval.dtype))
        numbers = (((1,), (1,)), ((), ()))
        params = {name: value for name, value in eqn.params.items() if name != "out_sharding"}
        params |= dict(dimension_numbers=numbers, schedule=schedules.Auto())
        times = [planned(e, device, schedule=schedules.Auto()).microseconds for e in alike]
        wide = lowering.plan(*(types if side == 0 else types[::-1]), device=device, **params)[0].microseconds
        if wide is None or None in times:
            continue
        machine = machine_of(device)
        copied = sum(_bytes(e.invars[1 - side].aval) for e in alike)
        merged = wide + machine.launch_us + 2 * copied / machine.dram_bytes_per_us
        apart = sum(time or 0 for time in times)
        if apart > _PAYS * merged:
            return (
                f"XLA merges {len(alike)} products that share {name}: by the model {text.duration(merged)} with a copy "
                f"of the others, {text.duration(apart)} apart"
            )
    return None


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _bytes_moved(eqn: Any) -> int:
    return sum(_bytes(x.aval) for x in (*eqn.invars, *eqn.outvars))


def _narrow(x: Any, program: fusion.Program) -> str | None:
    """The dtype of at most 8 bits that an operand was converted from, maybe scaled after that; None if it was not."""
    while (made := program.eqn_of(x)) is not None:
        name = made.primitive.name
        if name == "convert_element_type":
            dtype = made.invars[0].aval.dtype
            if dtype != np.bool_ and dtype.itemsize == 1:
                return str(dtype)
        elif name not in (*_LAYOUT, "mul", "sub", "div"):
            return None
        same = [y for y in made.invars if y.aval.size == x.aval.size]
        if len(same) != 1:
            return None
        (x,) = same
    return None


def _maker(x: Any, program: fusion.Program) -> str | None:
    """The elementwise primitive whose result an operand is, if nothing else reads it; None if it is in memory."""
    while (made := program.eqn_of(x)) is not None and program.user(x) is not None:
        name = made.primitive.name
        if name not in _LAYOUT:
            is_reduced = name.startswith("reduce_") or name in ("argmax", "argmin", "iota")
            return None if is_reduced or not fusion.is_merged(made) else name
        x = made.invars[0]
    return None


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
      why: why it is XLA's; "" if it is ours.
      fused: what was fused into it, such as ``"relu(A @ B + bias)"``; "" if nothing was.
      plan: the ``Plan``; None if there is none.
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

    @property
    def shape(self) -> str:
        """``"m x n x k"``, after the batch if it is not 1."""
        extents = (self.m, self.n, self.k) if self.batch == 1 else (self.batch, self.m, self.n, self.k)
        return " x ".join(map(str, extents))

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
      rows: a ``Product`` each; equal ones are counted in one.
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
    if not row.is_ours:
        return [row.why]
    return [f"{row.kernel}, {row.schedule}", *([f"D = {row.fused}"] if row.fused else [])]


def _folded(line: str) -> list[str]:
    """A line in lines of ``_WIDTH`` columns, indented."""
    lines, rest = [], line
    while len(rest) > _WIDTH - 4:
        cut = rest.rfind(" ", 0, _WIDTH - 4)
        cut = cut if cut > 0 else _WIDTH - 4
        lines.append("    " + rest[:cut])
        rest = rest[cut:].lstrip()
    return [*lines, "    " + rest]


def products_of(jaxpr: Any, schedule: Any, where: Callable[..., Any] | None, device: Device) -> Products:
    """Every product of a jaxpr that ``accelerate`` has rewritten."""
    rows: dict[Any, Product] = {}
    for eqn, program, count, is_exact in _equations(jaxpr, 1, True):
        row = _row(eqn, program, count, is_exact, schedule, where, device)
        key = dataclasses.replace(row, count=0)
        found = rows.get(key)
        rows[key] = row if found is None else dataclasses.replace(row, count=found.count + row.count)
    total = sum(row.count * (row.microseconds or 0) for row in rows.values())
    shared = [
        row
        if row.microseconds is None
        else dataclasses.replace(row, share=row.count * row.microseconds / total if total else None)
        for row in rows.values()
    ]
    return Products(tuple(sorted(shared, key=lambda row: -(row.share or 0))), device)


def _equations(jaxpr: Any, count: int, is_exact: bool) -> Iterator[tuple[Any, fusion.Program, int, bool]]:
    """Each product's equation, its program, and how often it runs."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    program = fusion.Program(jaxpr.eqns, jaxpr.outvars)
    for eqn in jaxpr.eqns:
        if eqn.primitive in (compat.dot_general_p, primitive.dot_general_p, primitive.linear_p):
            yield eqn, program, count, is_exact
        elif eqn.primitive.name != "pallas_call":
            times = count * eqn.params["length"] if eqn.primitive.name == "scan" else count
            is_known = is_exact and eqn.primitive.name not in ("while", "cond", "custom_linear_solve", "linear_solve")
            for inner in _jaxprs(tuple(eqn.params.values())):
                yield from _equations(inner, times, is_known)


def _jaxprs(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value
        elif isinstance(value, tuple):
            yield from _jaxprs(value)


def _row(eqn, program, count, is_exact, schedule, where, device) -> Product:
    is_ours = eqn.primitive is not compat.dot_general_p
    why, made = "", None
    if is_ours:
        try:
            made = planned(eqn, device)
        except ValueError as error:
            is_ours, why = False, str(error)
        if made is not None and made.kernel is None:
            is_ours, why = False, made.reasons[0].removeprefix(_FALLS_BACK)
    else:
        decision = decide(eqn, program, schedule, where, device)
        made = decision.plan
        why = decision.why or "accelerate does not look into the primitive that it is in"
    lhs, rhs = (x.aval for x in eqn.invars[:2])
    (contract, batch), problem = eqn.params["dimension_numbers"], made.problem if made is not None else None
    if problem is None:
        depth, batches = (math.prod(lhs.shape[i] for i in dims) for dims in (contract[0], batch[0]))
        m, n = (x.size // max(1, depth * batches) for x in (lhs, rhs))
        extents = batches, m, n, depth
    else:
        extents = problem.batch, problem.m, problem.n, problem.k
    names = [_short(x.dtype) for x in (lhs, rhs, eqn.outvars[0].aval)]
    return Product(
        *extents,
        dtypes=f"{names[0]} x {names[1]} -> {names[2]}",
        count=count,
        is_exact=is_exact,
        is_ours=is_ours,
        why=why,
        fused=problem.epilogue if is_ours and problem is not None else "",
        plan=made,
        microseconds=None if made is None else made.microseconds,
    )


def _short(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    return name.replace("bfloat", "bf").replace("float", "f") if name[-1].isdigit() and "8_" not in name else name
