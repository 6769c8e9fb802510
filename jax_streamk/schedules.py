"""How a product's MAC-iteration space is cut: the values of every ``schedule=`` argument."""

import dataclasses
from typing import Union

_REDUCTIONS = ("ordered", "atomic", "separate")


def _check_reduction(reduction):
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(map(repr, _REDUCTIONS))}")


def _check_count(name, value, least=1):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")


@dataclasses.dataclass(frozen=True)
class Auto:
    """The planner chooses the kernel and the schedule, or XLA's own product where no kernel serves. The default."""


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Every output tile is computed whole by one worker."""


@dataclasses.dataclass(frozen=True)
class SplitK:
    """Every output tile's K is cut into ``splits`` near-equal runs of k-tiles.

    Attributes:
      splits: at least 1, at most the number of k-tiles. 1 is bit for bit the unsplit product.
      reduction: ``"ordered"`` adds the f32 partials of a tile in the order of K inside the kernel (deterministic);
        ``"atomic"`` adds them as they arrive; ``"separate"`` leaves them to a second kernel (deterministic), which reduces many
        splits in parallel.

    Raises:
      ValueError: splits or reduction is not as above.
    """

    splits: int
    reduction: str = "ordered"

    def __post_init__(self):
        _check_count("splits", self.splits)
        _check_reduction(self.reduction)


@dataclasses.dataclass(frozen=True)
class StreamK:
    """Every worker gets an equal run of MAC iterations, and tiles that straddle runs are fixed up (Osama et al., 2023).

    Attributes:
      reduction: ``"ordered"`` (deterministic), ``"atomic"`` or ``"separate"``, as in ``SplitK``.
      max_sms: spread the cut tiles over at most so many SMs (CPU threads on the host); None is all of them. 1 is data-parallel.
        Kernels of the sm80 family may still run whole tiles on the others.

    Raises:
      ValueError: reduction or max_sms is not as above.
    """

    reduction: str = "ordered"
    max_sms: int | None = None

    def __post_init__(self):
        _check_reduction(self.reduction)
        if self.max_sms is not None:
            _check_count("max_sms", self.max_sms)


Schedule = Union[Auto, DataParallel, SplitK, StreamK]


def check_schedule(schedule):
    """Returns the schedule, ``Auto()`` for None; raises TypeError for anything that is not a schedule."""
    if schedule is None:
        return Auto()
    if not isinstance(schedule, (Auto, DataParallel, SplitK, StreamK)):
        raise TypeError(f"schedule={schedule!r}: must be None, Auto(), DataParallel(), SplitK(...) or StreamK(...)")
    return schedule
