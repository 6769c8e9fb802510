"""What a plan comes to, in figures: ``plan(...).explain()``.

The kernels' own decomposition says who does which MAC iterations (ffi/work_units.cc), and predicted times are the
planner's (cutlass_kernels/planner/).
"""

import dataclasses
import functools
import html
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_streamk import _ffi, text
from jax_streamk.device import Device, jax_device_of
from jax_streamk.lower import lowering
from jax_streamk.machines import machine_of
from jax_streamk.plan import cost_model, planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.plan import Candidate, Plan, views
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.schedules import Schedule
from jax_streamk.tuning import contest

WIDTH = 100  # columns of the printed text
_INDENT = 20  # of figures, which follow their labels
_SAME = 0.05  # microseconds that estimates do not tell apart


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure over all workers of the machine, those without work included.

    Attributes:
      least: of any worker.
      mean: of all workers.
      most: of any worker.
    """

    least: int
    mean: float
    most: int

    def __str__(self) -> str:
        return f"least {self.least}, mean {self.mean:.1f}, most {self.most}"


@dataclasses.dataclass(frozen=True)
class RunnerUp:
    """A kernel and schedule that the planner considered.

    Attributes:
      kernel: the kernel's name.
      schedule: its schedule.
      microseconds: the predicted time.
      parts: of that time, in microseconds by name; they add up.
      resources: the time that the main loop and epilogue need each resource, in microseconds by name; these overlap.
        Empty on a CPU.
      why: which part is larger than the chosen plan's.
    """

    kernel: str
    schedule: Schedule
    microseconds: float
    parts: dict[str, float]
    resources: dict[str, float]
    why: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times on this machine: of the calls alone on a GPU, of a chain of dependent calls on a CPU.

    Attributes:
      microseconds: of our product; None where XLA's own product runs.
      xla_microseconds: of XLA's product of the same operands; None where XLA has none of that precision.
      tflops: our 10^12 floating-point operations per second, or XLA's where its product runs.
      gbytes_per_s: the same of 10^9 bytes, each operand and the result counted once.
      limit_share: the limit over the time; None without a limit.
    """

    microseconds: float | None
    xla_microseconds: float | None
    tflops: float
    gbytes_per_s: float
    limit_share: float | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The figures behind a ``Plan``. ``print`` shows them, and notebooks show a table.

    What does not apply is None: most figures where XLA's own product runs, the limit on a CPU, and what only a GPU or a
    build with CUDA kernels can tell where there is none.

    Attributes:
      plan: the ``Plan``.
      problem: the plan's.
      device: the plan's.
      schedule: the plan's.
      policy: the plan's.
      kernel: the ``KernelInfo`` of its kernel.
      tiles: output tiles, of all batches; of a cluster's CTAs together.
      tile: (m, n) of an output tile.
      tile_k: length of K of a MAC iteration.
      k_tiles: MAC iterations of each tile. Three TF32 take three times as many.
      workers: clusters of CTAs, SMs or threads that work at once, on the whole device.
      busy_workers: those that have work.
      waves: the plan's.
      efficiency: the plan's, quantization efficiency.
      iterations: MAC iterations of a worker, a ``Spread``.
      shared_tiles: tiles that several workers share.
      peers: the most that share one; 1 if none is shared.
      workspace_bytes: the plan's.
      grid: CTAs along each dimension of the launch, idle clusters included.
      threads: of a CTA.
      stages: of a CTA.
      shared_memory: of a CTA, in bytes.
      registers: per thread, which the GPU says if it is here.
      ctas_per_sm: CTAs that fit on an SM, which the GPU says if it is here.
      most_ctas_per_sm: CTAs for which an SM has shared memory and threads.
      bytes: of every operand and the result, once.
      flops: floating-point operations.
      limit: the ``Limit`` of memory or arithmetic.
      microseconds: the predicted time; where XLA's product runs, that of our best kernel.
      tuned_microseconds: what tuning measured, if the plan is tuned.
      parts: of the predicted time, as in ``RunnerUp``.
      resources: of the predicted time, as in ``RunnerUp``.
      limit_share: the limit over the predicted time.
      runners_up: a ``RunnerUp`` for each of the planner's other candidates, lowest prediction first.
      measured: ``Measured``, with ``measure=True``.
      unknown: why who does what is not known, or "".
    """

    plan: Plan
    kernel: _ffi.KernelInfo | None = None
    tiles: int | None = None
    tile: tuple[int, int] | None = None
    tile_k: int | None = None
    k_tiles: int | None = None
    workers: int | None = None
    busy_workers: int | None = None
    iterations: Spread | None = None
    shared_tiles: int | None = None
    peers: int | None = None
    grid: tuple[int, ...] | None = None
    registers: int | None = None
    ctas_per_sm: int | None = None
    most_ctas_per_sm: int | None = None
    bytes: int | None = None
    flops: int | None = None
    microseconds: float | None = None
    tuned_microseconds: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    resources: dict[str, float] = dataclasses.field(default_factory=dict)
    runners_up: tuple[RunnerUp, ...] = ()
    measured: Measured | None = None
    unknown: str = ""

    @property
    def problem(self) -> GemmProblem | None:
        return self.plan.problem

    @property
    def device(self) -> Device:
        return self.plan.device

    @property
    def schedule(self) -> Schedule | None:
        return self.plan.schedule

    @property
    def policy(self) -> LaunchPolicy:
        return self.plan.policy

    @property
    def waves(self) -> float | None:
        return self.plan.waves

    @property
    def efficiency(self) -> float | None:
        return self.plan.efficiency

    @property
    def workspace_bytes(self) -> int | None:
        return self.plan.workspace_bytes

    @property
    def threads(self) -> int | None:
        return self.kernel and self.kernel.threads

    @property
    def stages(self) -> int | None:
        return self.kernel and self.kernel.stages

    @property
    def shared_memory(self) -> int | None:
        return self.kernel and self.kernel.shared_memory

    @property
    def limit(self) -> cost_model.Limit | None:
        known = self.plan.limit is not None or self.problem is None or self.problem.is_empty
        return self.plan.limit if known else cost_model.limit_of(self.problem, self.device)

    @property
    def limit_share(self) -> float | None:
        return self.limit.microseconds / self.microseconds if self.limit and self.microseconds else None

    def rows(self) -> list[tuple[str, str, str]]:
        """What is printed: (section, label, figure) of each row."""
        return list(_rows(self))

    def __str__(self) -> str:
        lines: list[str] = []
        section = ""
        for of, label, figure in self.rows():
            if of != section:
                lines.append(of)
                section = of
            head = f"  {label}".ljust(_INDENT - 1) + " " if label else "  "
            hang = " " * _INDENT if label else "    "
            lines += textwrap.wrap(figure, WIDTH, initial_indent=head, subsequent_indent=hang, break_on_hyphens=False)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        cell = 'style="text-align: left; vertical-align: top"'
        lines = ["<table>"]
        section = ""
        for of, label, figure in self.rows():
            if of != section:
                lines.append(f'<tr><th colspan="2" {cell}>{html.escape(of)}</th></tr>')
                section = of
            shown = html.escape(figure)
            lines.append(
                f"<tr><td {cell}>{html.escape(label)}</td><td {cell}>{shown}</td></tr>"
                if label
                else f'<tr><td colspan="2" {cell}>{shown}</td></tr>'
            )
        return "\n".join([*lines, "</table>"])


def explain(plan: Plan, *, measure: bool = False) -> Explanation:
    """``Plan.explain``."""
    measured = _measured(plan) if measure else None
    problem = plan.problem
    if problem is None or problem.is_empty:
        return Explanation(plan, measured=measured)
    work = dict(bytes=cost_model.moved_bytes(problem), flops=cost_model.flop_count(problem))
    if plan.kernel is None or plan.schedule is None or plan.microseconds is None:
        return Explanation(plan, microseconds=plan.microseconds, measured=measured, **work)
    kernel = kernel_of(plan.kernel, plan.device)
    cost, parts, resources = _predicted(plan, plan.kernel, plan.schedule)
    # Candidates are the planner's: the time of a tuned plan is none of theirs.
    is_tuned = not plan.candidates or plan.microseconds != plan.candidates[0].microseconds
    microseconds: float = cost.microseconds if is_tuned else plan.microseconds
    parts[cost_model.MAIN_LOOP] += microseconds - cost.microseconds  # of another order of tiles
    chosen = RunnerUp(plan.kernel, plan.schedule, microseconds, parts, resources, "")
    registers, ctas_per_sm = _on_the_device(kernel, plan.device)
    tile = (kernel.tile_m * kernel.cluster_m, kernel.tile_n * kernel.cluster_n)
    return Explanation(
        plan,
        kernel=kernel,
        tile=tile[::-1] if kernel.swap_ab else tile,
        tile_k=kernel.tile_k,
        registers=registers,
        ctas_per_sm=ctas_per_sm,
        most_ctas_per_sm=_ffi.most_ctas_per_sm(kernel, plan.device.native()) if plan.device.arch else None,
        microseconds=microseconds,
        tuned_microseconds=plan.microseconds if is_tuned else None,
        parts=parts,
        resources=resources,
        runners_up=tuple(_runners_up(plan, chosen)),
        measured=measured,
        **work,
        **_division(plan, kernel),
    )


views["explain"] = explain


def kernel_of(name: str, device: Device) -> _ffi.KernelInfo:
    """The ``KernelInfo`` of a kernel by name. Raises ValueError if there is none."""
    known = _kernels(device.platform)
    if name not in known:
        raise ValueError(f"kernel={name!r}: no such kernel for {device.platform}")
    return known[name]


@functools.cache
def _kernels(platform: str) -> dict[str, _ffi.KernelInfo]:
    return {kernel.name: kernel for kernel in planner.kernels_for(platform)}


def on_kernel(plan: Plan, name: str) -> Plan:
    """A plan's schedule on another kernel. Raises ValueError if there is none of that name, or it cannot run it."""
    kernel_of(name, plan.device)
    if plan.problem is None or plan.schedule is None:
        return plan
    replaced = dataclasses.replace(plan, kernel=name, workspace_bytes=None, notes=(), figures=(), candidates=())
    units = work_units(replaced)
    cost, _, _ = _predicted(replaced, name, plan.schedule)
    order = plan.raster, plan.swizzle
    policy = planner.policy_in_order(name, plan.problem, plan.native_schedule(), *order, plan.device)
    efficiency = int((units.k_end - units.k_begin).sum()) / (units.workers * int(units.end.max()))
    return dataclasses.replace(
        replaced,
        policy=policy,
        microseconds=cost.microseconds,
        waves=cost.waves,
        efficiency=efficiency,
        candidates=(Candidate(name, plan.schedule, cost.microseconds),),
    )


def work_units(plan: Plan) -> _ffi.WorkUnits:
    """What every worker of a plan does, as the kernels' decomposition has it.

    Raises:
      ValueError: XLA's own product runs, there are too many units, or it depends on the sizes of groups.
    """
    if plan.kernel is None or plan.problem is None:
        raise ValueError(f"no kernel of jax_streamk runs: {'; '.join(plan.reasons) or 'XLA computes the product'}")
    if plan.problem.is_ragged:
        raise ValueError("who does what depends on the sizes of the groups, which are data")
    kernel = kernel_of(plan.kernel, plan.device)
    return _ffi.work_units(kernel, plan.problem.native(), plan.native_schedule(), plan.device.native())


def worker_of(kernel: _ffi.KernelInfo, workers: int, device: Device) -> str:
    """What a worker of a kernel is, of so many at once."""
    if kernel.worker == "thread" or (kernel.worker == "SM" and workers <= device.sms):
        return kernel.worker
    return "cluster" if kernel.cluster_m * kernel.cluster_n > 1 else "CTA"


def _division(plan: Plan, kernel: _ffi.KernelInfo) -> dict[str, Any]:
    """The fields of an ``Explanation`` that tell how the work is divided."""
    try:
        units = work_units(plan)
    except ValueError as why:
        return dict(unknown=str(why))
    iterations: Any = np.bincount(units.worker, units.end - units.begin, units.workers).astype(np.int64)
    shared = units.tile[units.peers > 1]
    return dict(
        tiles=units.tiles,
        k_tiles=units.k_tiles,
        workers=units.workers,
        busy_workers=int(np.count_nonzero(iterations)),
        iterations=Spread(int(iterations.min()), float(iterations.mean()), int(iterations.max())),
        shared_tiles=len(np.unique(shared)),
        peers=int(units.peers.max()),
        grid=_grid(plan, kernel, units),
    )


def _grid(plan: Plan, kernel: _ffi.KernelInfo, units: _ffi.WorkUnits) -> tuple[int, ...] | None:
    """CTAs along each dimension of the launch; None where CUTLASS decides, and on a CPU."""
    if kernel.adds_in_cluster:
        return (len(units.worker),)
    if kernel.worker != "CTA":
        return None
    clusters = len(np.unique(units.worker)) + plan.policy.idle_clusters
    return clusters * kernel.cluster_m, kernel.cluster_n


def _on_the_device(kernel: _ffi.KernelInfo, device: Device) -> tuple[int | None, int | None]:
    if device.platform != "cuda" or not _ffi.has_cuda or jax_device_of(device) is None:
        return None, None
    return kernel.resources()


def _predicted(plan: Plan, kernel: str, schedule: Schedule | None) -> tuple[Any, dict[str, float], dict[str, float]]:
    """The ``_ffi.Cost`` of a kernel under a schedule, its parts, and what its main loop asks of each resource."""
    assert plan.problem is not None
    native = dataclasses.replace(plan, schedule=schedule).native_schedule()
    machine = machine_of(plan.device).native_for(plan.problem.type_a)
    what = kernel_of(kernel, plan.device), plan.problem.native(), native, plan.device.native(), machine
    cost = _ffi.estimate(*what)
    parts = {name: time for name, time in cost_model.parts_of(cost).items() if time > 0}
    if plan.device.platform == "cuda":
        return cost, parts, cost_model.resources_of(_ffi.parts(*what))
    return cost, parts, {"fix-ups": cost.fix_up} if cost.fix_up > 0 else {}


def _runners_up(plan: Plan, chosen: RunnerUp) -> Iterator[RunnerUp]:
    for candidate in plan.candidates:
        if (candidate.kernel, candidate.schedule) == (chosen.kernel, chosen.schedule):
            continue
        _, parts, resources = _predicted(plan, candidate.kernel, candidate.schedule)
        other = RunnerUp(candidate.kernel, candidate.schedule, candidate.microseconds, parts, resources, "")
        yield dataclasses.replace(other, why=_why(chosen, other))


def _largest_increase(before: dict[str, float], after: dict[str, float]) -> str:
    return max(after, key=lambda name: after[name] - before.get(name, 0.0))


def _why(chosen: RunnerUp, other: RunnerUp) -> str:
    """Which part of another candidate takes longer than the chosen one's."""
    if other.microseconds - chosen.microseconds < _SAME:
        return "no slower than the chosen one" if other.microseconds < chosen.microseconds else "as fast, by estimate"
    name = _largest_increase(chosen.parts, other.parts)
    more = f"{text.duration(other.parts[name] - chosen.parts.get(name, 0.0))} more for {name}"
    if name != cost_model.MAIN_LOOP or not other.resources:
        return more
    of = _largest_increase(chosen.resources, other.resources)
    after, before = other.resources[of], chosen.resources.get(of, 0.0)
    return more if after - before < _SAME else f"{more} ({of} {text.duration(after)} against {text.duration(before)})"


def _measured(plan: Plan) -> Measured:
    problem = plan.problem
    if problem is None or problem.is_empty:
        raise ValueError(f"explain: there is nothing to measure: {'; '.join(plan.reasons)}")
    if problem.is_ragged:
        raise ValueError(
            "explain: there is nothing to measure: times depend on the sizes of the groups, which are data"
        )
    if problem.second_column:
        raise ValueError("explain: there is nothing to measure: XLA has no product of several matrices as one")
    has_xla = problem.math != _ffi.Math.tf32x3  # XLA multiplies TF32 once where we multiply three times
    if plan.kernel is not None:
        lowering.check_build(plan.device.platform)
    elif not has_xla:
        raise ValueError("explain: there is nothing to measure: XLA has no product of three TF32")
    ours, xla = contest.times(plan, has_ours=plan.kernel is not None, has_xla=has_xla)
    time = ours or xla
    limit = cost_model.limit_of(problem, plan.device)
    return Measured(
        ours,
        xla,
        cost_model.flop_count(problem) / time / 1e6,
        cost_model.moved_bytes(problem) / time / 1e3,
        limit.microseconds / time if limit else None,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _times(parts: dict[str, float]) -> str:
    shown = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {text.duration(time)}" for name, time in shown)


def _rows(x: Explanation) -> Iterator[tuple[str, str, str]]:
    plan = x.plan
    section = "product"
    yield section, "problem", str(x.problem or x.plan.product)
    units = f"sm_{x.device.arch}, {x.device.sms} SMs" if x.device.arch else f"{x.device.sms} threads"
    yield section, "device", f"{x.device.kind or x.device.platform} ({units})"
    if x.bytes is not None and x.flops is not None:
        intensity = f"{x.flops / x.bytes:.1f} FLOP per byte"
        yield section, "work", f"{text.size(x.bytes)} to move once, {text.flops(x.flops)}: {intensity}"
    if x.limit is not None:
        yield section, "limit", f"{x.limit.bound}: {text.duration(x.limit.microseconds)} at the least"

    section = "plan"
    if x.kernel is None:
        yield section, "kernel", "XLA's own product" if not plan.is_empty else "none"
    else:
        yield section, "kernel", x.kernel.name
        yield section, "schedule", str(x.schedule)
        yield section, "launch policy", str(x.policy)
        workspace = "unknown without CUDA kernels" if x.workspace_bytes is None else text.size(x.workspace_bytes)
        yield section, "workspace", workspace
        yield section, "sums", _order_of_sums(plan)
    for reason in plan.reasons:
        if reason not in plan.figures:
            yield section, "", reason
    if x.kernel is not None:
        yield from _division_rows(x, x.kernel)
    yield from _time_rows(x)
    for other in x.runners_up:
        yield (
            "not chosen",
            "",
            f"{other.kernel}, {other.schedule}: {text.duration(other.microseconds)}; {other.why}",
        )


def _order_of_sums(plan: Plan) -> str:
    if not plan.sum_order:
        return "in an order that depends on how many rows there are"
    return plan.sum_order + (", with any number of rows" if plan.batch_invariant else "")


def _division_rows(x: Explanation, kernel: _ffi.KernelInfo) -> Iterator[tuple[str, str, str]]:
    section = "division of work"
    if x.unknown:
        yield section, "", f"unknown: {x.unknown}"
    elif (
        x.tiles is not None
        and x.tile is not None
        and x.k_tiles is not None
        and x.busy_workers is not None
        and x.workers is not None
        and x.iterations is not None
    ):
        ctas = kernel.cluster_m * kernel.cluster_n
        of_cluster = f", each of a cluster of {ctas} CTAs" if ctas > 1 else ""
        yield section, "output tiles", f"{_count(x.tiles, 'tile')} of {x.tile[0]} x {x.tile[1]}{of_cluster}"
        yield section, "MAC iterations", f"{x.k_tiles:,} along K of each tile, {kernel.tile_k} long"
        worker = worker_of(kernel, x.workers, x.device)
        idle = f", {x.workers - x.busy_workers:,} idle" if x.workers > x.busy_workers else ""
        yield section, "workers", f"{_count(x.workers, worker)} at once: {x.busy_workers:,} with work{idle}"
        yield section, "of a worker", f"{x.iterations} MAC iterations"
        if x.shared_tiles:
            yield section, "shared tiles", f"{x.shared_tiles:,}, by at most {_count(x.peers or 1, 'peer')}"
        else:
            yield section, "shared tiles", "none"
    if x.waves is not None and x.efficiency is not None:
        yield section, "waves", f"{x.waves:.2f}, quantization efficiency {x.efficiency:.0%}"
    if kernel.platform == "cpu":
        return
    section = "launch"
    if x.grid is not None:
        clusters = ""
        if kernel.cluster_m * kernel.cluster_n > 1:
            clusters = f" in clusters of {kernel.cluster_m} x {kernel.cluster_n}"
        elif kernel.adds_in_cluster and getattr(x.schedule, "reduction", "") == "ordered":
            clusters = f" in clusters of {x.peers}" if x.peers != 1 else ""
        yield section, "grid", f"{' x '.join(f'{extent:,}' for extent in x.grid)} CTAs{clusters}"
    elif not x.unknown:
        yield section, "grid", "chosen by CUTLASS at the launch"
    yield section, "CTA", f"{kernel.threads} threads, {_count(kernel.stages, 'stage')}, {kernel.warp_schedule.name}"
    yield section, "shared memory", f"{text.size(kernel.shared_memory)} per CTA"
    registers = "unknown without the device" if x.registers is None else f"{x.registers} per thread"
    yield section, "registers", registers
    most = f"at most {x.most_ctas_per_sm}, by shared memory and threads"
    yield section, "CTAs per SM", most if x.ctas_per_sm is None else str(x.ctas_per_sm)


def _time_rows(x: Explanation) -> Iterator[tuple[str, str, str]]:
    section = "time"
    if x.microseconds is not None:
        share = f", {x.limit_share:.0%} of the {x.limit.bound} limit" if x.limit_share and x.limit else ""
        what = "predicted" if x.kernel is not None else "ours, predicted"
        yield section, what, f"{text.durations(x.parts)}{share}" if x.parts else text.duration(x.microseconds)
    if x.resources:
        overlap = "of the main loop and epilogue, overlapping: " if x.device.platform == "cuda" else "of it "
        yield section, "needs", f"{overlap}{_times(x.resources)}"
    if x.tuned_microseconds is not None:
        yield section, "tuning measured", text.duration(x.tuned_microseconds)
    times = x.measured
    if times is not None:
        rates = f"{times.tflops:.3g} TFLOP/s, {times.gbytes_per_s:,.4g} GB/s"
        share = f", {times.limit_share:.0%} of the {x.limit.bound} limit" if times.limit_share and x.limit else ""
        if times.microseconds is not None:
            yield section, "measured", f"{text.duration(times.microseconds)}: {rates}{share}"
        if times.xla_microseconds is not None:
            ratio = (
                f", {times.xla_microseconds / times.microseconds:.2f} of ours" if times.microseconds else f": {rates}"
            )
            yield section, "XLA, measured", f"{text.duration(times.xla_microseconds)}{ratio}"
