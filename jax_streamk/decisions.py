"""Which products of a program are ours.

``decide`` is the one function that decides. A product is XLA's if ``left_to_xla`` says so or no kernel runs it, and
under ``Auto()`` on a GPU also if XLA merges it with its neighbours: that saves more than a faster kernel. A ``where``
decides instead of the last, and so does what ``tuning()`` measured.
"""

import dataclasses
import math
from typing import Any

from jax_streamk import lowering, schedules
from jax_streamk.device import Device
from jax_streamk.planner import Plan
from jax_streamk.program import Program, is_merged
from jax_streamk.tuning import tuned

FALLS_BACK = "falls back to XLA: "
_FEW_ROWS = 64  # up to here XLA's autotuner takes Triton's GEMM fusions
_LARGER = 4  # times the elements of everything else that a product reads and writes
_LAYOUT = ("reshape", "transpose", "squeeze", "expand_dims", "copy", "copy_p", "pvary")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a product is ours, and why not; the plan, if there is one."""

    is_ours: bool
    why: str
    plan: Plan | None


def decide(
    eqn: Any,
    program: Program,
    schedule: Any,
    where: Any,
    device: Device,
    measured: tuned.FragmentTimes | None = None,
) -> Decision:
    """Whether the product of an equation of JAX's ``dot_general`` in a program becomes ours.

    ``measured``: what tuning found for it with the equations around it.
    """
    if eqn.ctx.compute_type is not None:
        return Decision(False, f"it is under compute_on({eqn.ctx.compute_type!r})", None)
    try:
        made = planned(eqn, device, schedule=schedule)
        permutation = _transposed(eqn.outvars[0], program)
        if made.kernel is None and permutation is not None:
            made = planned(eqn, device, schedule=schedule, permutation=permutation)
    except ValueError as error:
        return Decision(False, str(error), None)
    if measured is not None and made.problem is not None:
        # Alone, a product may have lost to XLA's that wins with its neighbours.
        if made.kernel is not None or tuned.lookup(made.problem, device) is not None:
            return Decision(measured.winner != "xla", measured.why, made)
    if made.problem is None or made.kernel is None:
        return Decision(False, made.reasons[0].removeprefix(FALLS_BACK), made)
    is_auto = isinstance(schedules.of_forward(schedule), schedules.Auto)
    if is_auto and where is None and device.platform == "cuda":
        merged = merged_by_xla(eqn, program)
        if merged is not None:
            return Decision(False, merged, made)
    if where is not None and not where(made.problem):
        return Decision(False, "where(problem) is false", made)
    return Decision(True, "", made)


def planned(eqn: Any, device: Device, **changed: Any) -> Plan:
    """The ``Plan`` of a product's equation, ours or JAX's. Raises ValueError if no kernel runs an explicit schedule."""
    params = {name: value for name, value in eqn.params.items() if name != "out_sharding"} | changed
    return lowering.plan(*(x.aval for x in eqn.invars[:2]), device=device, **params)[0]


def merged_by_xla(eqn: Any, program: Program) -> str | None:
    """Why XLA's GEMM fusion makes a product its own, by what is before or after it; None if it does not.

    Nobody measured these rules. That of a batch was suggested by GPT-2's forward: with all products ours, they took as
    long as XLA's, and the fusions around them 4.7 ms instead of 3.1 (H200, jaxlib 0.11.2). That of few rows follows
    from the bytes: an operand made for one product is stored and read again before a kernel of ours.
    """
    (result,) = eqn.outvars
    has_batch = bool(eqn.params["dimension_numbers"][1][0])
    sizes = [x.aval.size for x in eqn.invars]
    for side, name in enumerate(("lhs", "rhs")):
        if (maker := _maker(eqn.invars[side], program)) is None:
            continue
        others = sizes[1 - side] + (result.aval.size if has_batch else 0)
        if sizes[side] < _LARGER * others:
            continue
        if has_batch:
            return f"{name} is the result of {maker} and larger than all else: XLA's GEMM fusion merges the two"
        if _rows(eqn, 1 - side) <= _FEW_ROWS:
            return f"{name} is the result of {maker}, which XLA's GEMM fusion merges where rows are few"
    user = program.user(result)
    if has_batch and result.aval.size >= _LARGER * sum(sizes) and user is not None and not program.is_stored(result):
        name = program.eqns[user].primitive.name
        return f"the result is larger than all else: XLA's GEMM fusion merges {name} with the product"
    return None


def _transposed(x: Any, program: Program) -> tuple[int, ...] | None:
    """The permutation of the transpose that alone uses a value."""
    user = program.user(x)
    eqn = None if user is None else program.eqns[user]
    return eqn.params["permutation"] if eqn is not None and eqn.primitive.name == "transpose" else None


def _rows(eqn: Any, side: int) -> int:
    contract, batch = eqn.params["dimension_numbers"]
    shape = eqn.invars[side].aval.shape
    return math.prod(size for i, size in enumerate(shape) if i not in (*contract[side], *batch[side]))


def _maker(x: Any, program: Program) -> str | None:
    """The elementwise primitive whose result an operand is, if nothing else reads it; None if it is in memory."""
    while (made := program.eqn_of(x)) is not None and program.user(x) is not None:
        name = made.primitive.name
        if name not in _LAYOUT:
            is_reduced = name.startswith("reduce_") or name in ("argmax", "argmin", "iota")
            return None if is_reduced or not is_merged(made) else name
        x = made.invars[0]
    return None
