"""Which products of a program are ours.

``decide`` is the one function that decides. A product is XLA's if ``left_to_xla`` says so or no kernel runs it, and
under ``Auto()`` on a GPU also if XLA merges it with its neighbours, which saves more than a faster kernel, or if
copies of the operands would take longer than the product. A ``where`` decides instead of the last two, and so does what
``tuning()`` measured.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jax_streamk import _ffi, compat, schedules, text
from jax_streamk.accelerate.equations import Equations, is_merged
from jax_streamk.device import Device
from jax_streamk.machines import machine_of
from jax_streamk.plan import alternatives, cost_model, planner
from jax_streamk.plan.plan import Plan
from jax_streamk.product import kinds
from jax_streamk.product.dense import Dense
from jax_streamk.tuning import tuned

_FEW_ROWS = 64  # up to here XLA's autotuner takes Triton's GEMM fusions
_LARGER = 4  # times the elements of everything else that a product reads and writes
_NOT_WANTED = "where(problem) is false"
_LAYOUT = ("reshape", "transpose", "squeeze", "expand_dims", "copy", "copy_p", "pvary")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a product is ours, and why not; the plan, if there is one."""

    is_ours: bool
    why: str
    plan: Plan | None


def decide(
    eqn: Any,
    program: Equations,
    schedule: Any,
    where: Any,
    device: Device,
    measured: tuned.FragmentTimes | None = None,
) -> Decision:
    """Whether the product of an equation of JAX's in a program becomes ours.

    ``measured``: what tuning found for it with the equations around it.

    Raises:
      ValueError: the schedule is batch invariant, and only XLA can compute the product, which is not of integers.
    """
    decision = _decided(eqn, program, schedule, where, device, measured)
    is_exact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
    if decision.is_ours or decision.why == _NOT_WANTED or is_exact or not schedules.is_invariant(schedule):
        return decision
    product = " @ ".join(x.aval.str_short() for x in eqn.invars[:2])
    raise ValueError(
        f"accelerate: schedule={schedules.of_forward(schedule)} cannot run {product}, which would be XLA's: "
        f"{decision.why}"
    )


def _decided(
    eqn: Any,
    program: Equations,
    schedule: Any,
    where: Any,
    device: Device,
    measured: tuned.FragmentTimes | None,
) -> Decision:
    if eqn.ctx.compute_type is not None:
        return Decision(False, f"it is under compute_on({eqn.ctx.compute_type!r})", None)
    if (why := kinds.KINDS[eqn.primitive].why_not(eqn)) is not None:
        return Decision(False, why, None)
    product = kinds.of(eqn)
    is_dense = isinstance(product, Dense)
    try:
        plan = planned(eqn, program, device, schedule, product)
        permutation = _transposed(eqn.outvars[0], program) if is_dense else None
        if plan.kernel is None and permutation is not None:
            plan = planned(eqn, program, device, schedule, product.replaced(permutation=permutation))
    except ValueError as error:
        return Decision(False, str(error), None)
    if measured is not None and plan.problem is not None:
        # A product that wins with its neighbours may have lost to XLA's alone.
        if plan.kernel is not None or tuned.lookup(plan.problem, device) is not None:
            return Decision(measured.winner != "xla", measured.why, plan)
    if plan.problem is None or plan.kernel is None:
        return Decision(False, plan.why_xla or plan.reasons[0], plan)
    if is_dense and schedules.may_be_xlas(schedule) and where is None and device.platform == "cuda":
        why = merged_by_xla(eqn, program) or copied_first(plan)
        if why is not None:
            return Decision(False, why, plan)
    if where is not None and not where(plan.problem):
        return Decision(False, _NOT_WANTED, plan)
    return Decision(True, "", plan)


def planned(eqn: Any, program: Equations, device: Device, schedule: Any = None, product: Any = None) -> Plan:
    """The ``Plan`` of a product's equation, ours or JAX's, as lowering makes it: of what lies behind transposes.

    Args:
      schedule, product: None are those of the equation.

    Raises:
      ValueError: no kernel runs an explicit schedule.
    """
    product, schedule = product or kinds.of(eqn), schedule or eqn.params["schedule"]
    avals = [compat.local_aval(x.aval) for x in eqn.invars]
    product, _, avals = product.without_transposes(eqn.invars, avals, program.transpose_behind)
    return alternatives.plan(product, product.by_role(avals), schedule, device).plan


def merged_by_xla(eqn: Any, program: Equations) -> str | None:
    """Why XLA's GEMM fusion makes a product its own, by what is before or after it; None if it does not.

    Those of a batch were measured in GPT-2's forward pass: 0.82 of XLA's speed without them, 0.94 with them, where all
    products took as long as XLA's and the fusions around them 4.7 ms instead of 3.1 (H200, jaxlib 0.11.2). That of few
    rows follows from the bytes: an operand made for one product is stored and read again before a kernel of ours.
    """
    (result,) = eqn.outvars
    has_batch = bool(kinds.of(eqn).numbers[1][0])
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


def copied_first(plan: Plan) -> str | None:
    """Why XLA is faster at a product whose operands our kernel copies first; None if it is not.

    Copies that take as long as the product at the machine's limit leave ours at half of it at best, while XLA's GEMM
    fusions read any rows. Such copies are about what was lost in ViT-B/16 on an H100, attention over 197 tokens:
    1.2 ms of XLA's 19.4. A Gauss-Newton step for 433 weights in float32 has 1.45 of XLA's speed on an H200 without the
    rule, but 1.54 of its memory, since the Jacobian's copies as A and as B each have room.
    """
    problem, device, limit = plan.problem, plan.device, plan.limit
    if problem is None or limit is None or problem.math == _ffi.Math.tf32x3:
        return None  # three TF32 are multiplied from copies whatever the layout
    topology = machine_of(device).topology
    if topology is None or cost_model.moved_bytes(problem) <= topology.l2_bytes:
        return None  # what L2 holds is copied fast
    copying = planner.copying(plan)
    if copying <= limit.microseconds or tuned.lookup(problem, device) is not None:
        return None  # tuning has measured the copies
    return (
        f"our kernel would copy operands first, {text.duration(copying)}, and at the limit of {limit.bound} the "
        f"product itself takes {text.duration(limit.microseconds)}: XLA's reads them as they are"
    )


def _transposed(x: Any, program: Equations) -> tuple[int, ...] | None:
    """The permutation of the transpose that alone uses a value."""
    user = program.user(x)
    eqn = None if user is None else program.eqns[user]
    return eqn.params["permutation"] if eqn is not None and eqn.primitive.name == "transpose" else None


def _rows(eqn: Any, side: int) -> int:
    contract, batch = kinds.of(eqn).numbers
    shape = eqn.invars[side].aval.shape
    return math.prod(size for i, size in enumerate(shape) if i not in (*contract[side], *batch[side]))


def _maker(x: Any, program: Equations) -> str | None:
    """The elementwise primitive whose result an operand is, if nothing else reads it; None if it is in memory."""
    while (eqn := program.eqn_of(x)) is not None and program.user(x) is not None:
        name = eqn.primitive.name
        if name not in _LAYOUT:
            is_reduced = name.startswith("reduce_") or name in ("argmax", "argmin", "iota")
            return None if is_reduced or not is_merged(eqn) else name
        x = eqn.invars[0]
    return None
