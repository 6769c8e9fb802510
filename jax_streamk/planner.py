"""Which kernel runs a product, and how: every choice is made in ``make_plan``, and a plan prints its reasons."""

import dataclasses
import functools

import numpy as np

from jax_streamk import _ffi, cost_model, schedules
from jax_streamk.problem import Device, GemmProblem

_REDUCTIONS = {r.name: r for r in (_ffi.Reduction.ordered, _ffi.Reduction.atomic, _ffi.Reduction.separate)}
_CONSIDERED = 5  # runners-up that a plan's reasons list
_MOST_SPLITS = 128


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

    @property
    def is_empty(self):
        """Whether there is nothing to multiply: the result is empty or zero."""
        return self.problem is not None and self.problem.is_empty

    def with_reasons(self, more):
        return dataclasses.replace(self, reasons=(*self.reasons, *more)) if more else self

    def native_schedule(self):
        return _native_schedule(self.schedule, self.raster, self.swizzle)

    def schedule_attributes(self):
        return _schedule_attributes(self.schedule, self.raster, self.swizzle)


_KINDS = {
    schedules.DataParallel: _ffi.ScheduleKind.data_parallel,
    schedules.SplitK: _ffi.ScheduleKind.split_k,
    schedules.StreamK: _ffi.ScheduleKind.stream_k,
}


def _schedule_attributes(schedule, raster="m", swizzle=1):
    """A schedule in the words of ``_ffi.Schedule`` and of the custom call's attributes, which are the same."""
    return dict(
        schedule=_KINDS[type(schedule)],
        splits=getattr(schedule, "splits", 1),
        reduction=_REDUCTIONS[getattr(schedule, "reduction", "ordered")],
        max_sms=getattr(schedule, "max_sms", None) or 0,
        raster=_ffi.Raster.along_m if raster == "m" else _ffi.Raster.along_n,
        swizzle=swizzle,
    )


def _native_schedule(schedule, raster="m", swizzle=1):
    return _ffi.Schedule(**_schedule_attributes(schedule, raster, swizzle))


@functools.cache
def _registry():
    """``cost_model.Kernels`` by what a problem fixes: platform, operand types, math and majorness."""
    by_problem = {}
    for kernel in _ffi.kernels():
        platform = "cpu" if kernel.family == _ffi.Family.host else "cuda"
        key = (platform, kernel.type_a, kernel.math, kernel.major_a, kernel.major_b)
        by_problem.setdefault(key, []).append(kernel)
    return {key: cost_model.Kernels(kernels) for key, kernels in by_problem.items()}


def _columns(candidates):
    """Schedules as the cost model's arrays."""
    split = [isinstance(s, schedules.SplitK) for s in candidates]
    return cost_model.Schedules(
        splits=np.array([s.splits if is_split else 1 for s, is_split in zip(candidates, split)], float),
        stream_k=np.array([isinstance(s, schedules.StreamK) and s.max_sms != 1 for s in candidates]),
        separate=np.array([is_split and s.splits > 1 and s.reduction == "separate" for s, is_split in zip(candidates, split)]),
    )


def _split_counts(problem, device):
    """Numbers of splits worth trying: small ones, powers of two, those that fill a wave, and divisors of K's tiles."""
    counts = set(range(2, 17)) | {32, 64, 128} | {device.sms // tiles for tiles in range(1, device.sms // 16 + 1)}
    for tile_k in (64, 128):
        # Slices of one length are one launch.
        counts |= {n for n in range(17, _MOST_SPLITS + 1) if problem.k % (tile_k * n) == 0}
    return sorted(n for n in counts if 2 <= n <= min(_MOST_SPLITS, problem.k))


def _candidates(wanted, problem, device):
    """The schedules that answer what the caller wants, and for each the index of one that shows whether a kernel has its kind.

    Arguments of a kind decide little about that, and asking kernels about every number of splits would take long.
    """
    if not isinstance(wanted, schedules.Auto):
        return [wanted], [wanted], [0]
    kinds = [schedules.DataParallel(), schedules.StreamK(), schedules.SplitK(2)]
    if device.platform == "cuda":
        kinds.append(schedules.SplitK(2, "separate"))
    found, kind_of = kinds[:2], [0, 1]
    for kind, example in enumerate(kinds[2:], 2):
        counts = _split_counts(problem, device)
        found = found + [schedules.SplitK(splits, example.reduction) for splits in counts]
        kind_of += [kind] * len(counts)
    return found, kinds, kind_of


def _refusals(kernels, kinds, problem, device):
    """Why each kernel refuses each kind of schedule; None where it does not."""
    native_problem, native_device = problem.native(), device.native()
    native_kinds = [_native_schedule(kind) for kind in kinds]
    return [[_ffi.can_implement(k.name, native_problem, kind, native_device) for kind in native_kinds] for k in kernels.infos]


def _closest_refusal(kernels, refusals, problem, device):
    """The most telling of the refusals of one schedule: of a kernel that runs the problem data-parallel, with many k-tiles."""
    plain = _refusals(kernels, [schedules.DataParallel()], problem, device)
    ranks = [(why[0] is not None, info.align_a, info.tile_k) for why, info in zip(plain, kernels.infos)]
    return refusals[min(range(len(ranks)), key=ranks.__getitem__)][0]


def _costs(kernels, problem, candidates, columns, device):
    """The ``Costs`` of all candidates, and the raster and swizzle of every kernel."""
    # Only a schedule that was given limits SMs, and then it is the only candidate. A limit of one means data-parallel.
    limit = getattr(candidates[0], "max_sms", None) or device.sms
    width = min(device.sms, limit) if limit > 1 else device.sms
    if device.platform == "cpu":
        return cost_model.predict_host(kernels, problem, columns, width), [("m", 1)] * len(kernels.infos)
    machine = cost_model.machine_of(device)
    orders, wave = cost_model.best_orders(kernels, problem, width, machine)
    return cost_model.predict_gpu(kernels, problem, columns, width, machine, wave), orders


@functools.lru_cache(maxsize=4096)
def make_plan(problem, schedule, device):
    """Plans a ``GemmProblem`` on a ``Device``.

    ``Auto()`` takes the candidate with the least estimate, and XLA's product where no kernel can run the problem. Any other
    schedule is obeyed: on the best kernel that can, or refused.

    Raises:
      ValueError: an explicit schedule that no kernel can run, with the reason of the kernel that came closest.
    """
    if problem.is_empty:
        return Plan(problem, device, None, None, reasons=("there is nothing to multiply: the result is empty or zero",))
    key = (device.platform, problem.type_a, problem.math, problem.major_a, problem.major_b)
    kernels = _registry().get(key, cost_model.Kernels(()))
    candidates, kinds, kind_of = _candidates(schedule, problem, device)
    refusals = _refusals(kernels, kinds, problem, device)
    runs = np.array([[why is None for why in row] for row in refusals], bool).reshape(len(refusals), len(kinds))[:, kind_of]
    columns = _columns(candidates)
    runs &= (columns.splits - 1) * kernels.tile_k < problem.k
    costs, orders = _costs(kernels, problem, candidates, columns, device)
    times = np.where(runs, costs.microseconds, np.inf)
    native_problem, native_device = problem.native(), device.native()
    ranked = np.argsort(times, axis=None, kind="stable")
    ranked = np.stack(np.unravel_index(ranked[np.isfinite(times.flat[ranked])], times.shape), axis=1).tolist()
    for at, (i, j) in enumerate(ranked):
        kernel, chosen = kernels.infos[i], candidates[j]
        raster, swizzle = orders[i]
        native = _native_schedule(chosen, raster, swizzle)
        # The kernel has the last word on these very arguments.
        if _ffi.can_implement(kernel.name, native_problem, native, native_device) is None:
            break
    else:
        why = f"no kernel of this build runs it on {device.platform}, sm_{device.arch}"
        if refusals:
            why = _closest_refusal(kernels, refusals, problem, device)
        if isinstance(schedule, schedules.Auto):
            return Plan(problem, device, None, None, reasons=(f"falls back to XLA: {why}",))
        raise ValueError(f"schedule={schedule} cannot run {problem}: {why}")

    workspace = _ffi.workspace_bytes(kernel.name, native_problem, native, native_device)
    reasons = [] if isinstance(schedule, schedules.Auto) else ["the schedule was given"]
    reasons.append(str(costs.at(i, j)))
    seen = {(i, kind_of[j])}
    for i, j in ranked[at + 1 :]:
        if len(seen) > _CONSIDERED:
            break
        if (i, kind_of[j]) not in seen:
            seen.add((i, kind_of[j]))
            reasons.append(f"over {kernels.infos[i].name}, {candidates[j]}: {times[i, j]:.1f} us")
    chosen_time = float(times[ranked[at][0], ranked[at][1]])
    return Plan(problem, device, kernel.name, chosen, raster, swizzle, workspace, chosen_time, tuple(reasons))
