"""Batch invariance: a row's bits depend neither on how many rows are computed with it nor on its place.

They depend on the sum order (cutlass_kernels/planner/sum_order.h) of what computes them: instruction, promotion, and
the runs that K is cut into. So each product has one sum order, whatever its number of rows: that which takes the least
time over few and many of them, in the geometric mean. It follows from n, k, types, the layout of the other operand and
the device alone; what is planned for the rows at hand is all else.
"""

import dataclasses
import functools
import math

from jax_streamk import _ffi, schedules
from jax_streamk.machines import machine_of
from jax_streamk.plan.problem import only_tf32

# Of decoding one text and several, and of a prompt or a training step.
ROWS = (1, 16, 64, 128, 512, 4096)
# The k of a product whose K is not cut, so that its sum order does not follow from K: the rows of a weight's gradient.
_ANY_K = 4096
# Fields with defaults that the order of sums may follow from.
_KEPT = (
    "gated", "ragged", "scale_rows", "scale_columns", "scale_type", "has_zero", "zero_type", "has_offset",
    "offset_type", "scale_rows_of_a", "scale_columns_of_a", "scale_type_of_a",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Choice:
    """A sum order, and the microseconds that a product takes in it with each of ``ROWS``."""

    order: str
    microseconds: tuple[float, ...]


def arranged(product, types, schedule, platform):
    """``product.arranged``, of a problem that says whether its schedule asks for invariance."""
    if not schedules.is_invariant(schedule):
        return product.arranged(types, platform)
    # XLA has full float32 for one row, and TF32 for more.
    of_any_rows = only_tf32(product, types, platform)
    arrangement = of_any_rows.arranged(types, platform)
    rows = _ffi.Invariant.n if arrangement.swapped else _ffi.Invariant.m
    return dataclasses.replace(arrangement, problem=dataclasses.replace(arrangement.problem, invariant=rows))


def choice(problem, wanted, device, kernels_of):
    """The ``Choice`` of an invariant problem; None if no kernels have one sum order for all numbers of rows.

    Args:
      wanted: an ``_ffi.Schedule``, or None for any deterministic one.
      kernels_of: a function of problem and device.
    """
    key = None if wanted is None else tuple(getattr(wanted, name) for name, *_ in wanted.fields)
    is_cut = wanted is None or wanted.schedule == _ffi.ScheduleKind.split_k
    return _choice(_of_rows(problem, is_cut), key, device, kernels_of)


@functools.lru_cache(maxsize=4096)
def _choice(problem, wanted, device, kernels_of):
    schedule = None if wanted is None else _ffi.Schedule(*wanted)
    machine, costs = machine_of(device).native_for(problem.type_a), []
    for rows in ROWS:
        of_rows = dataclasses.replace(problem, m=rows, batch_stride_d=0 if problem.is_ragged else rows * problem.n)
        parts = of_rows.native(), schedule, device.native(), machine
        costs.append(_ffi.costs_by_sum_order(kernels_of(of_rows, device), *parts))
    common = set(costs[0]).intersection(*costs[1:])
    if not common:
        return None
    times = {order: tuple(cost[order] for cost in costs) for order in sorted(common)}
    order = min(times, key=lambda order: math.prod(times[order]))
    return Choice(order, times[order])


def _of_rows(problem, is_cut):
    """The problem without all that a batch changes, or that does not change the order of its sums.

    Rows are those of a row-major A; so a product whose operands were exchanged has them back.
    """
    p, k = problem, problem.k if is_cut or problem.has_scales else _ANY_K
    of_b = dict(n=p.n, type_b=p.type_b, major_b=p.major_b, ldb=p.ldb)
    if p.invariant == _ffi.Invariant.n:
        turned = _ffi.Major.column if p.major_a == _ffi.Major.row else _ffi.Major.row
        of_b = dict(n=p.m, type_a=p.type_b, type_b=p.type_a, major_b=turned, ldb=p.lda)
    if 1 in (of_b["n"], k):  # either layout
        of_b |= dict(major_b=_ffi.Major.column)
    if of_b["major_b"] == _ffi.Major.column:
        of_b |= dict(ldb=k)
    others = {name: default for name, _, _, default in _ffi.GemmProblem.fields if name not in _KEPT}
    others = {name: default for name, default in others.items() if default is not None}  # required ones have none
    of_a = dict(lda=p.lda) if p.ragged == _ffi.Ragged.k else dict(major_a=_ffi.Major.row, lda=k)
    strides = dict(batch_stride_a=0, batch_stride_b=p.batch_stride_b if p.ragged == _ffi.Ragged.m else 0)
    batch = p.batch if p.is_ragged else 1
    fields = others | of_a | of_b | strides | dict(batch=batch, k=k, ldd=of_b["n"], invariant=_ffi.Invariant.m)
    return dataclasses.replace(p, **fields)


def takes_less(one, other):
    """Whether the geometric mean of times with each of ``ROWS`` is not larger."""
    return math.prod(one) <= math.prod(other)
