"""How a product's MAC iterations are divided among workers: the values of every ``schedule=`` argument."""

import dataclasses
from typing import Any, Literal, get_args

from jax_streamk.checks import check_static, integer

Reduction = Literal["ordered", "atomic", "separate"]


def _check_reduction(reduction: Any) -> None:
    check_static("reduction", reduction)
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(map(repr, get_args(Reduction)))}")


@dataclasses.dataclass(frozen=True)
class Auto:
    """The default: the tuned plan if there is one, else the planner's choice of kernel and schedule.

    XLA's own product runs where no kernel supports the product, where XLA was measured to be faster (by tuning or by
    us), and on GPUs without a machine file until tuning finds our kernels faster.
    """


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """One worker computes each output tile."""


@dataclasses.dataclass(frozen=True)
class SplitK:
    """The K of every output tile is cut into ``splits`` near-equal slices of whole k-tiles.

    Attributes:
      splits: an integer from 1 to the number of k-tiles, or 1 where K is 0. 1 gives exactly the bits of the unsplit
        product.
      reduction: ``"ordered"`` adds a tile's float32 partial sums along K in the kernel (deterministic); ``"atomic"``
        adds them in order of arrival; ``"separate"`` adds them along K in a second kernel (deterministic), which
        reduces many splits in parallel. On GPUs its slices are equal except the last, so there may be fewer than
        ``splits``: 64 k-tiles in 15 splits give 13 slices of at most 5.

    Raises:
      TypeError: splits or reduction is traced.
      ValueError: splits or reduction is not one of these values.
    """

    splits: int
    reduction: Reduction = "ordered"

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", integer("splits", self.splits))
        _check_reduction(self.reduction)


@dataclasses.dataclass(frozen=True)
class StreamK:
    """Every worker gets an equal run of MAC iterations; tiles that straddle runs are fixed up (Osama et al., 2023).

    Attributes:
      reduction: ``"ordered"`` (deterministic), ``"atomic"`` or ``"separate"``, as in ``SplitK``.
      max_sms: the largest number of SMs (threads on a CPU) that share tiles; None for all, 1 for data-parallel. Kernels
        of the sm80 family may still run whole tiles on other SMs.

    Raises:
      TypeError: reduction or max_sms is traced.
      ValueError: reduction or max_sms is not one of these values.
    """

    reduction: Reduction = "ordered"
    max_sms: int | None = None

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)
        if self.max_sms is not None:
            object.__setattr__(self, "max_sms", integer("max_sms", self.max_sms))


Schedule = Auto | DataParallel | SplitK | StreamK


@dataclasses.dataclass(frozen=True)
class PerPass:
    """Schedules of a product and of the two products of its backward pass, whose shapes differ.

    Attributes:
      forward: the product itself, and its tangents in forward mode.
      lhs: the product that computes the left operand's cotangent. ``Auto()`` if a product's schedule is not a
        ``PerPass``.
      rhs: the same of the right operand.

    Raises:
      TypeError: one of them is not a schedule.
    """

    forward: Schedule | None = None
    lhs: Schedule | None = None
    rhs: Schedule | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            schedule = getattr(self, field.name)
            if not isinstance(schedule, (Auto, DataParallel, SplitK, StreamK, type(None))):
                check_static(f"PerPass: {field.name}", schedule)
                raise TypeError(f"PerPass: {field.name}={schedule!r} must be {_SCHEDULES}")


_SCHEDULES = "None, Auto(), DataParallel(), SplitK(...) or StreamK(...)"


def check_schedule(schedule: Any) -> Schedule | PerPass:
    """Returns the schedule (``Auto()`` for None). Raises TypeError if it is neither a schedule nor a ``PerPass``."""
    if schedule is None:
        return Auto()
    if not isinstance(schedule, (Auto, DataParallel, SplitK, StreamK, PerPass)):
        check_static("schedule", schedule)
        raise TypeError(f"schedule={schedule!r}: must be {_SCHEDULES}, or PerPass(...) of them")
    return schedule


def of_forward(schedule: Schedule | PerPass) -> Schedule:
    """The schedule of the product itself."""
    return (schedule.forward or Auto()) if isinstance(schedule, PerPass) else schedule


def of_cotangent(schedule: Schedule | PerPass, operand: int) -> Schedule:
    """The schedule of the product that computes the cotangent of lhs (0) or rhs (1)."""
    return ((schedule.lhs, schedule.rhs)[operand] or Auto()) if isinstance(schedule, PerPass) else Auto()
