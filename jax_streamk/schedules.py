"""How a product's MAC-iteration space is cut: the values of every ``schedule=`` argument."""

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
    """The default: the planner chooses kernel and schedule.

    XLA's own product runs where no kernel serves, and where it was measured to be faster, by tuning or by us.
    """


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Every output tile is computed whole by one worker."""


@dataclasses.dataclass(frozen=True)
class SplitK:
    """Every output tile's K is cut into ``splits`` near-equal runs of k-tiles.

    Attributes:
      splits: an integer, at least 1 and at most the number of k-tiles. 1 is bit for bit the unsplit product.
      reduction: ``"ordered"`` adds the f32 partials of a tile in the order of K inside the kernel (deterministic);
        ``"atomic"`` adds them as they arrive; ``"separate"`` leaves them to a second kernel (deterministic), which
        reduces many splits in parallel. Its runs on GPUs are equally long except the last, so there may be fewer than
        ``splits``: 15 splits of 64 k-tiles are 13 runs, of 5 each.

    Raises:
      TypeError: splits or reduction is traced.
      ValueError: splits or reduction is not as above.
    """

    splits: int
    reduction: Reduction = "ordered"

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", integer("splits", self.splits))
        _check_reduction(self.reduction)


@dataclasses.dataclass(frozen=True)
class StreamK:
    """Every worker gets an equal run of MAC iterations, and tiles that straddle runs are fixed up (Osama et al., 2023).

    Attributes:
      reduction: ``"ordered"`` (deterministic), ``"atomic"`` or ``"separate"``, as in ``SplitK``.
      max_sms: the most SMs (CPU threads on the host) that cut tiles are spread over, an integer; None is all of them. 1
        is data-parallel. Kernels of the sm80 family may still run whole tiles on the others.

    Raises:
      TypeError: reduction or max_sms is traced.
      ValueError: reduction or max_sms is not as above.
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
    """Schedules of a product and of the two products of its backward pass, which have other shapes.

    Attributes:
      forward: the product itself, and its tangents in forward mode.
      lhs, rhs: the products that give the cotangents of the operands. A schedule without ``PerPass`` leaves them to
        ``Auto()``.

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
    """Returns the schedule, ``Auto()`` for None; raises TypeError for what is neither a schedule nor a ``PerPass``."""
    if schedule is None:
        return Auto()
    if not isinstance(schedule, (Auto, DataParallel, SplitK, StreamK, PerPass)):
        check_static("schedule", schedule)
        raise TypeError(f"schedule={schedule!r}: must be {_SCHEDULES}, or PerPass(...) of them")
    return schedule


def of_forward(schedule: Schedule | PerPass) -> Schedule:
    """The schedule of a product itself."""
    return (schedule.forward or Auto()) if isinstance(schedule, PerPass) else schedule


def of_cotangent(schedule: Schedule | PerPass, operand: int) -> Schedule:
    """The schedule of the product that gives the cotangent of the lhs (0) or the rhs (1)."""
    return ((schedule.lhs, schedule.rhs)[operand] or Auto()) if isinstance(schedule, PerPass) else Auto()
