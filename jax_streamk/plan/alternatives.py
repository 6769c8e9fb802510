"""The one entry of planning: weighs the ways in which our kernels could compute a product, for every caller.

The ways are one kernel, one with a batch of two dimensions, the products of a gated one apart, and rows that XLA
gathers first.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax_streamk import schedules, text
from jax_streamk.machines import machine_of
from jax_streamk.plan import cost_model, custom_call, invariance, planner, problem
from jax_streamk.plan.plan import Plan, unsupported
from jax_streamk.tuning import tuned

# Only skinny kernels take a nested batch. Up to here their tiles have all rows, and read B once.
_ROWS_OF_NESTED = 32


@dataclasses.dataclass(frozen=True)
class Way:
    """How a product is computed on one device.

    Attributes:
      plan: the ``Plan``; if several products are, that of the first one.
      arrangement: its ``Arrangement``; None if no kernel supports the operands.
      instead: None, or a function of the operands by simpler products, which have plans of their own.
    """

    plan: Plan
    arrangement: problem.Arrangement | None
    instead: Callable[..., Any] | None = None


def plan(product, types, schedule, device):
    """The ``Way`` of a ``Product``.

    Args:
      types: {role: type, or shape and dtype} of lhs and rhs at least, and of the operands that the kind names.

    Raises:
      ValueError: no kernel can run an explicit schedule, or one that asks for batch invariance.
    """
    schedule = schedules.of_forward(schedule)
    if "scale" in product.roles:
        return _scaled(product, types, schedule, device)
    if "indices" in product.roles:
        return _gathered(product, types, schedule, device)
    if product.epilogue.gate:
        return _gated(product, types, schedule, device)
    way = _alone(product, types, schedule, device)
    if way.plan.kernel is None and not product.is_one:
        return dataclasses.replace(way, instead=product.instead)
    return way


def plan_or_none(product, types, schedule, device):
    """The ``Plan`` of a product in a jaxpr; None if no kernel can run an explicit schedule."""
    try:
        return plan(product, types, schedule, device).plan
    except ValueError:
        return None


def refuse_schedule(schedule, what, why):
    """Raises ValueError if XLA's product must not run."""
    if not schedules.may_be_xlas(schedule):
        raise ValueError(f"schedule={schedule} cannot run{what}: {why}; Auto() leaves the product to XLA")


def _alone(product, types, schedule, device):
    try:
        if custom_call.WHY_REFUSED is not None:
            raise problem.Unsupported(custom_call.WHY_REFUSED)
        arrangement = invariance.arranged(product, types, schedule, device.platform)
    except problem.Unsupported as why:
        refuse_schedule(schedule, " this product", why)
        return Way(unsupported(types["lhs"], types["rhs"], device, why), None)
    flat_plan = planner.make_plan(arrangement.problem, schedule, device)
    nested = None
    if device.platform == "cuda" and arrangement.transposes and not arrangement.problem.is_invariant:
        nested = product.nested(types, device.platform)
    if nested is not None and nested.problem.inner_batch > 1 and nested.problem.m <= _ROWS_OF_NESTED:
        try:
            instead = planner.make_plan(nested.problem, schedule, device)
        except ValueError:  # of an explicit schedule
            instead = flat_plan
        copied = math.inf if flat_plan.kernel is None else flat_plan.microseconds + _copying(arrangement, types, device)
        if instead is not flat_plan and instead.kernel is not None and instead.microseconds <= copied:
            return Way(instead.with_notes(nested.copies(types["lhs"], types["rhs"])), nested)
    copies = [] if flat_plan.kernel is None else arrangement.copies(types["lhs"], types["rhs"])
    return Way(flat_plan.with_notes(copies), arrangement)


def _copying(arrangement, types, device):
    """The expected time of the transposes around a product, in microseconds."""
    p, lhs, rhs = arrangement.problem, types["lhs"], types["rhs"]
    copied = (
        (arrangement.permute_lhs, lhs.size * lhs.dtype.itemsize),
        (arrangement.permute_rhs, rhs.size * rhs.dtype.itemsize),
        (arrangement.permute_result, p.batch * p.m * p.n * p.type_d.bits // 8),
    )
    return sum(cost_model.moving(2 * size, device) for permutation, size in copied if permutation is not None)


def _gated(product, types, schedule, device):
    """One kernel for both products, or these apart: the plan is then that of one of them, or of both if stacked."""
    epilogue, gated_plan, why = product.epilogue, None, ""
    try:
        arrangement = invariance.arranged(product, types, schedule, device.platform)
        if copies := arrangement.copies(types["lhs"], types["rhs"]):
            raise problem.Unsupported(copies[0])
        if arrangement.problem.is_invariant:  # one row may lie as no kernel reads several
            several = invariance.arranged(product, product.of_several_rows(types), schedule, device.platform)
            planner.make_plan(several.problem, schedule, device)
        gated_plan = planner.make_plan(arrangement.problem, schedule, device)
        if gated_plan.is_empty:
            return Way(gated_plan, arrangement)
        if gated_plan.kernel is None:
            why = gated_plan.why_xla
    except (problem.Unsupported, ValueError) as error:
        why = str(error)
    apart = _alone(product.before_gate, types, schedule, device)
    products = 2 if epilogue.is_pair else 1
    if gated_plan is not None and gated_plan.kernel is not None:
        more = _gating(arrangement.problem, products, device)
        alone = None if apart.plan.microseconds is None else products * apart.plan.microseconds + more
        if arrangement.problem.is_invariant:
            is_faster = _is_faster_for_any_rows(arrangement, 1, apart.arrangement, products, 0, schedule, device)
        else:
            is_tuned = tuned.lookup(arrangement.problem, device) is not None
            is_faster = alone is None or gated_plan.microseconds <= alone or is_tuned
        if is_faster:
            return Way(gated_plan, arrangement)
        why = (
            f"{gated_plan.kernel} is slower, {text.duration(gated_plan.microseconds)} instead of {text.duration(alone)}"
        )
    return Way(apart.plan.with_notes([_of_a_gate(epilogue, why)]), apart.arrangement, product.instead)


def _of_a_gate(epilogue, why):
    """What a plan says of a gated product that runs as simpler ones."""
    of_each = "this product twice, each time with other weights" if epilogue.is_pair else "this product"
    gate = "gate" if epilogue.activation is None else f"{epilogue.activation}(gate)"
    return f"a gated product is {of_each}, and then {gate} * up by XLA: {why}"


def _is_faster_for_any_rows(one, count, other, count_of_other, first, schedule, device):
    """Whether some products of one arrangement take no longer than those of another, after what takes ``first``.

    That is in the mean over numbers of rows, since the rows at hand must not decide.
    """
    times = []
    for arrangement, products in ((one, count), (other, count_of_other)):
        choice = arrangement and planner.choice_of_rows(arrangement.problem, schedule, device)
        if choice is None:
            return arrangement is other
        of_rows = (dataclasses.replace(arrangement.problem, m=rows) for rows in invariance.ROWS)
        gating = [_gating(p, products, device) if products > 1 else 0.0 for p in of_rows]
        times.append([products * us + more for us, more in zip(choice.microseconds, gating)])
    return invariance.takes_less(times[0], [first + us for us in times[1]])


def _gating(p, products, device):
    """The expected time, in microseconds, of multiplying the two products by XLA, and of all launches but the first.

    On a CPU the model has none. Each launch costs as much as it takes to start a kernel; what L2 holds of the products
    is read in that time.
    """
    if device.platform == "cpu":
        return 0.0
    machine = machine_of(device)
    rows = p.m if p.is_ragged else p.batch * p.m
    moved = 3 * rows * p.n * p.type_d.bits // 8
    held = 0 if machine.topology is None else machine.topology.l2_bytes
    return machine.launch_us * products + max(0, moved - held) / machine.dram_bytes_per_us


def _scaled(product, types, schedule, device):
    """A kernel that reads numbers with scales, or the product of what XLA dequantizes first, whichever is faster.

    It reads one matrix: a gated product of numbers is two, one after the other.
    """
    is_gated = bool(product.epilogue.gate)
    each, count = (product.before_gate, 2) if is_gated else (product, 1)
    try:
        way = _alone(each, types, schedule, device)
        why = way.plan.why_xla
    except ValueError as error:
        way, why = None, str(error)
    if why is None and is_gated:
        note = _of_a_gate(product.epilogue, "no kernel multiplies by two matrices with scales at once")
        way = dataclasses.replace(way, plan=way.plan.with_notes([note]), instead=product.apart)
    is_weighed = isinstance(schedule, schedules.Auto) and device.platform == "cuda"
    if why is None and (way.plan.is_empty or not is_weighed):
        return way
    dense = plan(product.of_fewer, product.types_of_fewer(types), schedule, device)
    if why is None:
        ours = count * way.plan.microseconds + (_gating(way.arrangement.problem, count, device) if is_gated else 0)
        of_dense, dequantizing = 1 if dense.instead is None else count, count * _dequantizing(product, types, device)
        first = dequantizing + of_dense * (dense.plan.microseconds or math.inf)
        if way.plan.problem.is_invariant:
            parts = way.arrangement, count, dense.arrangement, of_dense, dequantizing
            is_faster = _is_faster_for_any_rows(*parts, schedule, device)
        else:
            is_faster = ours <= first or tuned.lookup(way.plan.problem, device) is not None
        if is_faster:
            return way
        why = f"{way.plan.kernel} is slower, {text.duration(ours)} instead of {text.duration(first)}"
    return Way(dense.plan.with_notes([f"XLA dequantizes first: {why}"]), dense.arrangement, product.instead)


def _dequantizing(product, types, device):
    """The expected time, in microseconds, of dequantizing by XLA on a GPU."""
    moved, wide = 0, product.types_of_fewer(types)
    for role in ("lhs", "rhs"):
        if wide[role].dtype != types[role].dtype:
            bits = problem.TYPES[types[role].dtype].bits + problem.TYPES[wide[role].dtype].bits
            moved += types[role].size * bits // 8
    return cost_model.moving(moved, device)


def _gathered(product, types, schedule, device):
    """A kernel that gathers rows, or the product of rows that XLA gathers first, whichever is faster."""
    lhs, rows = types["lhs"], product.rows(types)
    after = plan(product.of_rows, types | dict(lhs=rows), schedule, device)
    rows_plan = after.plan
    if rows_plan.is_empty:
        return Way(rows_plan, after.arrangement, product.instead)
    why = "two products read them" if after.instead is not None else "no kernel does"
    if rows_plan.kernel is not None and after.instead is None and isinstance(lhs.shape[0], int):
        arrangement = invariance.arranged(product, types, schedule, device.platform)
        try:
            instead = planner.make_plan(arrangement.problem, schedule, device)
        except ValueError as error:  # of an explicit schedule
            why, instead = str(error), rows_plan
        if instead is not rows_plan and instead.kernel is not None:
            first = rows_plan.microseconds + _gathering(rows, device)
            if instead.microseconds <= first or tuned.lookup(arrangement.problem, device) is not None:
                return Way(instead.with_notes(arrangement.copies(rows, types["rhs"])), arrangement)
            why = f"{instead.kernel} is slower, {text.duration(instead.microseconds)} instead of {text.duration(first)}"
    noted = rows_plan.with_notes([f"XLA gathers the rows of lhs first: {why}"])
    return Way(noted, after.arrangement, product.instead)


def _gathering(rows, device):
    """The expected time, in microseconds, of gathering rows by XLA; on a CPU kernels always do."""
    if device.platform == "cpu":
        return math.inf
    return cost_model.moving(2 * rows.size * rows.dtype.itemsize, device)
