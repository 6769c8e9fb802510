"""A plan as data: what runs for a problem on a device, and why."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax_streamk import _ffi, schedules, text
from jax_streamk.device import Device
from jax_streamk.plan import cost_model
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.problem import GemmProblem

if TYPE_CHECKING:
    import jax_streamk

# How a plan is shown: explain.py and plot.py, which look at plans, put their functions here.
views: dict[str, Callable[..., Any]] = {}

_REDUCTIONS = {r.name: r for r in (_ffi.Reduction.ordered, _ffi.Reduction.atomic, _ffi.Reduction.separate)}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel and schedule that can run a problem, with the estimated time in microseconds."""

    kernel: str
    schedule: schedules.Schedule
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What ``matmul`` runs for one problem on one device.

    Attributes:
      problem: the strided GEMM; None if no kernel supports the operand types.
      device: the ``Device`` that the plan is for.
      kernel: the kernel's name, see ``kernels()``; None if XLA's own product runs or there is nothing to compute.
      schedule: the chosen ``DataParallel``, ``SplitK`` or ``StreamK``; None if kernel is None.
      policy: the ``LaunchPolicy``: tile order (``raster``, ``swizzle``) and the other choices of the launch.
      workspace_bytes: bytes that XLA allocates for the call; None if only a build with CUDA kernels knows.
      microseconds: the estimated time, or the one that tuning measured. If XLA's product runs, that of our best kernel.
      why_xla: why XLA's own product runs; None if a kernel runs, or there is nothing to multiply.
      notes: other reasons, lines of text.
      figures: those of the notes that other attributes say in numbers.
      candidates: the planner's best, a ``Candidate`` per kernel and kind of schedule, lowest estimate first.
      waves: output tiles x splits / workers (SMs or clusters of them; threads on a CPU).
      efficiency: quantization efficiency: MAC iterations / those that all workers could do in the time of the busiest.
      limit: the ``cost_model.Limit`` of the problem on the device; None on a CPU.
      sum_order: in which order products are added, as text: plans of one text give the bits of a row whatever rows are
        computed with it. "" if the bits depend on these, as under ``StreamK``, or no kernel runs.
      product: the operands' types as text, if problem is None.
    """

    problem: GemmProblem | None
    device: Device
    kernel: str | None
    schedule: schedules.Schedule | None
    policy: LaunchPolicy = dataclasses.field(default_factory=LaunchPolicy)
    workspace_bytes: int | None = 0
    microseconds: float | None = None
    why_xla: str | None = None
    notes: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    waves: float | None = None
    efficiency: float | None = None
    limit: cost_model.Limit | None = None
    sum_order: str = ""
    product: str = "a product that XLA computes"

    def __str__(self) -> str:
        lines = [f"Plan: {self.problem or self.product}"]
        device = f"sm_{self.device.arch}, {self.device.sms} SMs" if self.device.arch else f"{self.device.sms} threads"
        lines.append(f"  on {self.device.kind or self.device.platform} ({device})")
        if self.kernel:
            workspace = "unknown" if self.workspace_bytes is None else text.size(self.workspace_bytes)
            lines.append(f"  {self.kernel}")
            lines.append(f"  {self.schedule}, workspace {workspace}")
            lines.append(f"  launch: {self.policy}")
        lines.extend(f"  - {reason}" for reason in self.reasons)
        return "\n".join(lines)

    @property
    def raster(self) -> str:
        """The dimension along which consecutive tiles lie, "m" or "n"."""
        return self.policy.raster

    @property
    def swizzle(self) -> int:
        """The width, in tiles, of the panels in which they are ordered."""
        return self.policy.swizzle

    @property
    def bound(self) -> str | None:
        """ "memory" or "arithmetic", whichever takes longer on its own; None without a limit."""
        return None if self.limit is None else self.limit.bound

    @property
    def batch_invariant(self) -> bool:
        """Whether the product has this sum order with any number of rows, as its schedule asks."""
        return self.problem is not None and self.problem.is_invariant

    @property
    def is_empty(self) -> bool:
        """Whether the result is empty or zero, with nothing to multiply."""
        return self.problem is not None and self.problem.is_empty

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is this plan, in lines of text."""
        return self.notes if self.why_xla is None else (f"falls back to XLA: {self.why_xla}", *self.notes)

    def with_notes(self, more: Sequence[str]) -> "Plan":
        return dataclasses.replace(self, notes=(*self.notes, *more)) if more else self

    def native_schedule(self) -> _ffi.Schedule:
        return native_schedule(self.schedule)

    def explain(self, *, measure: bool = False) -> "jax_streamk.Explanation":
        """The figures behind the plan, as attributes and, printed, as text; in notebooks as a table.

        Args:
          measure: whether to run the product on this machine, and XLA's, and to add their times.

        Raises:
          ValueError: measure, and this process has not the device, or there is nothing to run.
          RuntimeError: measure, and this build has no kernels for the device, or running failed.
        """
        return views["explain"](self, measure=measure)

    def plot(self, path: str | os.PathLike[str] | None = None, ax: Any = None) -> Any:
        """Draws who works on which output tile: workers on one axis, MAC iterations on the other.

        Args:
          path: of a file to write, such as ``"plan.svg"`` or ``"plan.png"``; None writes none.
          ax: ``matplotlib.axes.Axes`` to draw in; None makes a figure.

        Returns:
          The ``matplotlib.axes.Axes``.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: XLA's product runs, or a kernel whose work depends on data or has too many parts to draw.
        """
        return views["plot"](self, path, ax)


def unsupported(lhs, rhs, device, why):
    """The ``Plan`` of a product of these operands that no kernel supports."""
    product = " @ ".join(f"{x.dtype}[{', '.join(map(str, x.shape))}]" for x in (lhs, rhs))
    return Plan(None, device, None, None, why_xla=str(why), product=product)


_KINDS = {
    schedules.DataParallel: _ffi.ScheduleKind.data_parallel,
    schedules.SplitK: _ffi.ScheduleKind.split_k,
    schedules.StreamK: _ffi.ScheduleKind.stream_k,
}


def native_schedule(schedule):
    """The ``_ffi.Schedule`` of a public one."""
    return _ffi.Schedule(
        schedule=_KINDS[type(schedule)],
        splits=getattr(schedule, "splits", 1),
        reduction=_REDUCTIONS[getattr(schedule, "reduction", "ordered")],
        max_sms=getattr(schedule, "max_sms", None) or 0,
    )
