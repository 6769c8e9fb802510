"""Which kernel runs a product, and how: every choice is made in ``make_plan``, and a plan prints its reasons."""

import dataclasses
import functools

from jax_streamk import _ffi, cost_model, schedules
from jax_streamk.problem import Device, GemmProblem

_REDUCTIONS = {r.name: r for r in (_ffi.Reduction.ordered, _ffi.Reduction.atomic, _ffi.Reduction.separate)}
_CONSIDERED = 5  # candidates that a plan's reasons list


@dataclasses.dataclass(frozen=True)
class Plan:
    """What ``matmul`` runs for one problem on one device.

    Attributes:
      problem: the strided GEMM; None where the product is not arranged as one (no kernel serves its types).
      device: what the plan is made for.
      kernel: name of the kernel, see ``kernels()``; None where XLA's own product runs, or where there is nothing to compute.
      schedule: the resolved ``DataParallel``, ``SplitK`` or ``StreamK``; None where kernel is None.
      raster, swizzle: the order of tiles: along "m" or "n", in panels of so many tiles.
      workspace_bytes: that XLA allocates for the call.
      microseconds: the planner's estimate.
      reasons: one line each.
    """

    problem: GemmProblem | None
    device: Device
    kernel: str | None
    schedule: schedules.Schedule | None
    raster: str = "m"
    swizzle: int = 1
    workspace_bytes: int = 0
    microseconds: float | None = None
    reasons: tuple[str, ...] = ()

    def __str__(self):
        lines = [f"Plan: {self.problem or 'a product that XLA computes'}"]
        device = f"sm_{self.device.arch}, {self.device.sms} SMs" if self.device.arch else f"{self.device.sms} threads"
        lines.append(f"  on {self.device.platform} ({device})")
        if self.kernel:
            order = f"along {self.raster}" + (f", panels of {self.swizzle}" if self.swizzle > 1 else "")
            lines.append(f"  {self.kernel}, {self.schedule}, {order}, workspace {self.workspace_bytes} bytes")
        lines.extend(f"  - {reason}" for reason in self.reasons)
        return "\n".join(lines)

    def native_schedule(self):
        return _native_schedule(self.schedule, self.raster, self.swizzle)


def _native_schedule(schedule, raster="m", swizzle=1):
    kind, splits, reduction, max_sms = _ffi.ScheduleKind.data_parallel, 1, _ffi.Reduction.ordered, 0
    if isinstance(schedule, schedules.SplitK):
        kind, splits, reduction = _ffi.ScheduleKind.split_k, schedule.splits, _REDUCTIONS[schedule.reduction]
    elif isinstance(schedule, schedules.StreamK):
        kind, reduction, max_sms = _ffi.ScheduleKind.stream_k, _REDUCTIONS[schedule.reduction], schedule.max_sms or 0
    return _ffi.Schedule(kind, splits, reduction, max_sms, _ffi.Raster.along_m if raster == "m" else _ffi.Raster.along_n, swizzle)


@functools.cache
def _registry():
    """Kernels by what a problem fixes: family group, operand types, math and majorness."""
    by_problem = {}
    for kernel in _ffi.kernels():
        platform = "cpu" if kernel.family == _ffi.Family.host else "cuda"
        key = (platform, kernel.type_a, kernel.math, kernel.major_a, kernel.major_b)
        by_problem.setdefault(key, []).append(kernel)
    return by_problem


def _accumulator(operand):
    return {_ffi.Type.f64: _ffi.Type.f64, _ffi.Type.s8: _ffi.Type.s32}.get(operand, _ffi.Type.f32)


def _schedules_for(kernel, problem, device, wanted):
    """The schedules of one kernel that answer what the caller wants."""
    if not isinstance(wanted, schedules.Auto):
        return [wanted]
    found = []
    if kernel.type_d == problem.type_d:
        found.append(schedules.DataParallel())
        if _ffi.Reduction.ordered in kernel.stream_k_reductions:
            found.append(schedules.StreamK())
    m, n = (problem.n, problem.m) if kernel.swap_ab else (problem.m, problem.n)
    tiles = problem.batch * -(-m // kernel.tile_m) * -(-n // kernel.tile_n)
    for splits in cost_model.split_candidates(-(-problem.k // kernel.tile_k), tiles, device.sms):
        if _ffi.Reduction.ordered in kernel.split_k_reductions and kernel.type_d == problem.type_d:
            found.append(schedules.SplitK(splits))
        if device.platform == "cuda" and _ffi.Reduction.separate in kernel.split_k_reductions and problem.batch == 1:
            found.append(schedules.SplitK(splits, "separate"))
    return found


def _may_run(kernel, problem, device):
    """Cheap refusals that need no schedule; can_implement has the last word."""
    if device.platform == "cuda":
        if kernel.family == _ffi.Family.sm90 and device.arch != 90:
            return False
        if device.arch < 80:
            return False
    return problem.type_d == kernel.type_d or (
        kernel.type_d == _accumulator(problem.type_a) and _ffi.Reduction.separate in kernel.split_k_reductions
    )


def _order(kernel, problem):
    """Raster and swizzle: walk the shorter side first, in panels that keep a wave square."""
    tiles_m = -(-problem.m // (kernel.tile_n if kernel.swap_ab else kernel.tile_m))
    tiles_n = -(-problem.n // (kernel.tile_m if kernel.swap_ab else kernel.tile_n))
    raster = "m" if tiles_m <= tiles_n else "n"
    swizzle = 1 if min(tiles_m, tiles_n) <= 16 else 8
    return raster, swizzle


def _predict(kernel, problem, schedule, device):
    native = _native_schedule_tuple(schedule)
    predict = cost_model.predict_host if device.platform == "cpu" else cost_model.predict_gpu
    return predict(kernel, problem, native, device)


def _native_schedule_tuple(schedule):
    if isinstance(schedule, schedules.SplitK):
        return _ffi.ScheduleKind.split_k, schedule.splits, _REDUCTIONS[schedule.reduction]
    if isinstance(schedule, schedules.StreamK):
        return _ffi.ScheduleKind.stream_k, 1, _REDUCTIONS[schedule.reduction]
    return _ffi.ScheduleKind.data_parallel, 1, _ffi.Reduction.ordered


@functools.lru_cache(maxsize=4096)
def make_plan(problem, schedule, device):
    """Plans a ``GemmProblem`` on a ``Device``.

    ``Auto()`` takes the candidate with the least estimate, and XLA's product where no kernel can run the problem. Any other
    schedule is obeyed: on the best kernel that can, or refused.

    Raises:
      ValueError: an explicit schedule that no kernel can run, with the reason of the kernel that came closest.
    """
    if 0 in (problem.batch, problem.m, problem.n, problem.k):
        return Plan(problem, device, None, None, reasons=("there is nothing to multiply: the result is empty or zero",))
    native_problem, native_device = problem.native(), device.native()
    key = (device.platform, problem.type_a, problem.math, problem.major_a, problem.major_b)
    candidates = []
    for kernel in _registry().get(key, ()):
        if _may_run(kernel, problem, device):
            for candidate in _schedules_for(kernel, problem, device, schedule):
                candidates.append((_predict(kernel, problem, candidate, device), kernel, candidate))
    candidates.sort(key=lambda candidate: (candidate[0].microseconds, candidate[1].name))
    refusals, chosen = [], None
    for at, (cost, kernel, candidate) in enumerate(candidates):
        raster, swizzle = _order(kernel, problem)
        native = _native_schedule(candidate, raster, swizzle)
        why = _ffi.can_implement(kernel.name, native_problem, native, native_device)
        if why is None:
            chosen = at
            break
        refusals.append(why)
    if chosen is None:
        why = min(refusals, key=len) if refusals else f"no kernel of this build runs it on {device.platform}, sm_{device.arch}"
        if isinstance(schedule, schedules.Auto):
            return Plan(problem, device, None, None, reasons=(f"falls back to XLA: {why}",))
        raise ValueError(f"schedule={schedule} cannot run {problem}: {why}")

    workspace = _ffi.workspace_bytes(kernel.name, native_problem, native, native_device)
    reasons = [f"{cost}"]
    others = [c for c in candidates[chosen + 1 :] if (c[1].name, c[2]) != (kernel.name, candidate)]
    reasons += [f"over {other.name}, {how}: {estimate.microseconds:.1f} us" for estimate, other, how in others[:_CONSIDERED]]
    if not isinstance(schedule, schedules.Auto):
        reasons.insert(0, "the schedule was given")
    return Plan(problem, device, kernel.name, candidate, raster, swizzle, workspace, cost.microseconds, tuple(reasons))
