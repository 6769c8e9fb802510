"""How a product's MAC iterations are divided among workers: the values of every ``schedule=`` argument."""

import dataclasses
from typing import Any, Literal, get_args

from jax_streamk.checks import check_static, integer

Reduction = Literal["ordered", "atomic", "separate"]


def _check_reduction(reduction: Any) -> None:
    check_static("reduction", reduction)
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(map(repr, get_args(Reduction)))}")


@dataclasses.dataclass(frozen=True, repr=False)
class _MayBeInvariant:
    batch_invariant: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_static("batch_invariant", self.batch_invariant)
        if not isinstance(self.batch_invariant, bool):
            raise TypeError(f"batch_invariant={self.batch_invariant!r}: must be True or False")

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if shown.pop("batch_invariant"):
            shown["batch_invariant"] = True
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(_MayBeInvariant):
    """The default: the tuned plan if there is one, else the planner's choice of kernel and schedule.

    XLA's own product runs where no kernel supports the product, where XLA was measured to be faster (by tuning or by
    us), and on GPUs without a machine file until tuning finds our kernels faster.

    Attributes:
      batch_invariant: whether the bits of a row (of what lhs has besides contracted and batch dimensions) must depend
        neither on how many rows and matrices of a batch are computed with it nor on its place. XLA's product then never
        runs: a product that no kernel of ours can compute so raises ValueError. In the product that computes rhs's
        cotangent, which sums over rows, K is not cut, as under ``DataParallel(batch_invariant=True)``.

    Raises:
      TypeError: batch_invariant is not a bool.
    """


@dataclasses.dataclass(frozen=True, repr=False)
class DataParallel(_MayBeInvariant):
    """One worker computes each output tile.

    Attributes:
      batch_invariant: as of ``Auto``. Zeros appended along K do not change bits either.

    Raises:
      TypeError: batch_invariant is not a bool.
    """


@dataclasses.dataclass(frozen=True, repr=False)
class SplitK(_MayBeInvariant):
    """The K of every output tile is cut into ``splits`` near-equal slices of whole k-tiles.

    Attributes:
      splits: an integer from 1 to the number of k-tiles, or 1 where K is 0. 1 gives exactly the bits of the unsplit
        product.
      reduction: ``"ordered"`` adds a tile's float32 partial sums along K in the kernel (deterministic); ``"atomic"``
        adds them in order of arrival; ``"separate"`` adds them along K in a second kernel (deterministic), which
        reduces many splits in parallel. On GPUs its slices are equal except the last, so there may be fewer than
        ``splits``: 64 k-tiles in 15 splits give 13 slices of at most 5.
      batch_invariant: as of ``Auto``; not with ``"atomic"``, which adds in order of arrival.

    Raises:
      TypeError: splits or reduction is traced, or batch_invariant is not a bool.
      ValueError: splits or reduction is not one of these values, or an atomic reduction is to be batch invariant.
    """

    splits: int
    reduction: Reduction = "ordered"

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", integer("splits", self.splits))
        _check_reduction(self.reduction)
        super().__post_init__()
        if self.batch_invariant and self.reduction == "atomic":
            raise ValueError(
                'reduction="atomic" adds in order of arrival, which batch_invariant=True excludes: use "ordered" or '
                '"separate"'
            )


@dataclasses.dataclass(frozen=True)
class StreamK:
    """Every worker gets an equal run of MAC iterations; tiles that straddle runs are fixed up (Osama et al., 2023).

    Its cuts of K move with the number of tiles, and so it is never batch invariant.

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
      lhs: the product that computes the left operand's cotangent. If a product's schedule is not a ``PerPass``, it is
        ``Auto()``, or ``Auto(batch_invariant=True)`` if that schedule is batch invariant.
      rhs: the same of the right operand, which sums over rows: ``DataParallel(batch_invariant=True)`` if that schedule
        is batch invariant.

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
    if isinstance(schedule, PerPass):
        return (schedule.lhs, schedule.rhs)[operand] or Auto()
    if is_invariant(schedule):
        return (Auto, DataParallel)[operand](batch_invariant=True)
    return Auto()


def is_invariant(schedule: Schedule | PerPass) -> bool:
    """Whether the product itself must be batch invariant."""
    return getattr(of_forward(schedule), "batch_invariant", False)


def may_be_xlas(schedule: Schedule | PerPass) -> bool:
    """Whether XLA's product may run in the place of ours."""
    return isinstance(of_forward(schedule), Auto) and not is_invariant(schedule)
