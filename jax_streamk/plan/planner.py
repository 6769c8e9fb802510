"""Chooses the kernel, schedule and launch policy of a product. ``make_plan`` decides; a plan prints its reasons.

The search is in cutlass_kernels/planner/planner.cc, with the cost model beside it.
"""

import functools

from jax_streamk import _ffi, schedules, text
from jax_streamk.machines import machine_of
from jax_streamk.plan import cost_model, described, invariance, left_to_xla
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.plan import Candidate, Plan, native_schedule
from jax_streamk.tuning import tuned


def policy_in_order(kernel, problem, native, raster, swizzle, device):
    """The ``LaunchPolicy`` for a kernel, by name, in a given order of tiles."""
    info, order = _registry(device.platform)[0][kernel], LaunchPolicy(raster, swizzle).native()
    parts = order.raster, order.swizzle, device.native(), machine_of(device).native
    return LaunchPolicy.of(_ffi.launch_policy(info, problem.native(), native, *parts))


def kernels_for(platform):
    """This build's kernels for a platform; in a build without CUDA kernels, descriptions of those of a full build."""
    if platform not in ("cpu", "cuda"):
        return []
    kernels = [kernel for kernel in _ffi.kernels() if kernel.platform == platform]
    return kernels or described.cuda_kernels()


@functools.cache
def _registry(platform):
    """A platform's kernels by name, and as ``_ffi.Kernels`` by the problems that they may run.

    Those are told by operand types, math, majorness, whether gated, ragged, joined, scaled, and whether B has few
    columns.
    """
    by_name: dict[str, _ffi.KernelInfo] = {}
    by_problem: dict[tuple, list[_ffi.KernelInfo]] = {}
    for kernel in kernels_for(platform):
        by_name[kernel.name] = kernel
        for few in (False, True):
            for majors in _ffi.majors(kernel, few):
                types = kernel.type_a, kernel.type_b, kernel.math
                for scaled in (False, True) if kernel.scales_sums else (kernel.scaled,):
                    key = (*types, *majors, kernel.gated, kernel.ragged, kernel.joined, scaled, few)
                    by_problem.setdefault(key, []).append(kernel)
    return by_name, {key: _ffi.Kernels(kernels) for key, kernels in by_problem.items()}


def _schedule_of(native):
    """The public schedule for an ``_ffi.Schedule`` that the planner chose."""
    return _public_schedule(native.schedule, native.splits, native.reduction)


@functools.cache
def _public_schedule(kind, splits, reduction):
    if kind == _ffi.ScheduleKind.split_k:
        return schedules.SplitK(splits, reduction.name)
    return schedules.StreamK(reduction.name) if kind == _ffi.ScheduleKind.stream_k else schedules.DataParallel()


_text_of = functools.lru_cache(maxsize=1024)(str)


def make_plan(problem, schedule, device):
    """Plans a ``GemmProblem`` on a ``Device``.

    ``Auto()`` takes what tuning found for exactly this problem and device. If it found nothing, it takes XLA's product
    where ``left_to_xla`` says so or no kernel can run the problem, else the candidate with the lowest estimate.
    Any other schedule runs on the best kernel that supports it, or is refused. An invariant problem (``invariance``) is
    never XLA's.

    Raises:
      ValueError: no kernel can run an explicit schedule, or an invariant problem; the message has the reason of the
        kernel that came closest.
    """
    tuned_plan = None
    if isinstance(schedule, schedules.Auto) and not problem.is_empty:
        tuned_plan = tuned.lookup(problem, device)
        if problem.is_invariant:
            if tuned_plan is not None and why_another_order(tuned_plan.kernel, problem, tuned_plan.native(), device):
                tuned_plan = None
        elif tuned_plan is None and (why := left_to_xla.why(problem, device)):
            ours = plan_with(problem, schedule, device, None)
            known = dict(microseconds=ours.microseconds, why_xla=why)
            if ours.kernel:
                time = text.duration(ours.microseconds)
                known["notes"] = (f"instead of {ours.kernel}, {ours.schedule}: {time}",)
            return Plan(problem, device, None, None, **known)
    return plan_with(problem, schedule, device, tuned_plan)


def choose(problem, wanted, device, **listed):
    """The ``_ffi.Choice`` for a native schedule; None considers every deterministic one."""
    order = ""
    if problem.is_invariant:
        chosen = invariance.choice(problem, wanted, device, kernels_of)
        order = "none" if chosen is None else chosen.order
    machine = machine_of(device).native_for(problem.type_a)
    parts = problem.native(), wanted, device.native(), machine
    return _ffi.choose(kernels_of(problem, device), *parts, order=order, **listed)


def choice_of_rows(problem, schedule, device):
    """The ``invariance.Choice`` of an invariant problem; None if there is none."""
    wanted = None if isinstance(schedule, schedules.Auto) else native_schedule(schedule)
    return invariance.choice(problem, wanted, device, kernels_of)


def why_another_order(kernel, problem, native, device):
    """Why an invariant problem must not run on a kernel, by name, under a native schedule; None if it may."""
    chosen, order = choice_of_rows(problem, schedules.Auto(), device), sum_order(kernel, problem, native, device)
    if chosen is not None and chosen.order == order:
        return None
    return f"its sum order is {order}, and that of any number of rows {None if chosen is None else chosen.order}"


def sum_order(kernel, problem, native, device):
    """In which order a kernel, by name, adds products, as text; "" if the bits of a row depend on other rows."""
    return _ffi.sum_order(_registry(device.platform)[0][kernel], problem.native(), native)


def kernels_of(problem, device):
    """The ``_ffi.Kernels`` that may run a problem."""
    # Host kernels run all.
    on_cpu = device.platform == "cpu"
    ragged, is_joined = (_ffi.Ragged.none, False) if on_cpu else (problem.ragged, problem.second_column > 0)
    majors, few = (problem.major_a, problem.major_b), problem.n < 8  # repack.cc's kFewColumns
    kinds = problem.gated, ragged, is_joined, problem.has_scales
    key = (problem.type_a, problem.type_b, problem.math, *majors, *kinds, few)
    return _registry(device.platform)[1].get(key) or _ffi.Kernels([])


@functools.lru_cache(maxsize=4096)
def plan_with(problem, schedule, device, tuned_plan):
    """``make_plan``, given what tuning found (None: nothing)."""
    if problem.is_empty:
        if problem.k == 0 and getattr(schedule, "splits", 1) > 1:
            why = f"splits={schedule.splits} exceeds its 0 k-tiles: it must be 1"
            raise ValueError(f"schedule={schedule} cannot run {problem}: {why}")
        return Plan(problem, device, None, None, notes=("there is nothing to multiply: the result is empty or zero",))
    auto = isinstance(schedule, schedules.Auto)
    choice = choose(problem, None if auto else native_schedule(schedule), device)
    if not choice.candidates:
        why = choice.refusal or _without_kernels(problem, device)
        if problem.is_invariant and choice_of_rows(problem, schedule, device) is None:
            why = f"no kernels have one sum order for any number of rows: {why}"
        if auto and not problem.is_invariant:
            return Plan(problem, device, None, None, why_xla=why)
        raise ValueError(f"schedule={schedule} cannot run {problem}: {why}")

    ranked, (kernels, _) = choice.candidates, _registry(device.platform)
    distinct = _distinct(ranked, schedule)
    chosen = ranked[0]
    kernel, native, workspace_bytes = chosen.kernel, chosen.schedule, choice.workspace_bytes
    policy = LaunchPolicy.of(chosen.policy)
    figures: list[str] = []
    cost, microseconds = chosen.cost, chosen.cost.microseconds
    if tuned_plan is not None:
        alone = f"{kernel}, {_schedule_of(native)}, {policy}"
        without = f"without tuning the planner chooses {alone}: {text.duration(microseconds)} estimated"
        if tuned_plan.is_left_to_xla and not problem.is_invariant:
            took = f"its product took {tuned_plan.xla_ratio:.2f} of the time of {tuned_plan.kernel}"
            why = f"{took}, measured by tuning on {tuned_plan.date[:10]}"
            return Plan(problem, device, None, None, why_xla=why, notes=(without,))
        known = tuned_plan.xla_ratio and tuned_plan.is_of_this_xla
        beside = f"took {tuned_plan.xla_ratio:.2f} times as long" if known else "was not measured"
        kernel, native, policy = tuned_plan.kernel, tuned_plan.native(), tuned_plan.policy
        microseconds = tuned_plan.microseconds
        workspace_bytes = _ffi.workspace_bytes(kernel, problem.native(), native, device.native())
        machine = machine_of(device).native_for(problem.type_a)
        cost = _ffi.estimate(kernels[kernel], problem.native(), native, device.native(), machine)
        planned = f"the planner's choice took {text.duration(tuned_plan.planned_microseconds)}"
        notes = [
            f"{text.duration(microseconds)} measured by tuning on {tuned_plan.date[:10]}; {planned}",
            f"XLA's product {beside}",
            without,
        ]
    else:
        notes = [] if auto else ["the schedule was given"]
        figures.append(cost_model.describe(cost))
    limit, efficiency = cost_model.limit_of(problem, device), _efficiency(problem, kernels[kernel], native, cost)
    if limit is not None:
        work = (
            f"to move {text.size(limit.amount)} once" if limit.bound == "memory" else f"for {text.flops(limit.amount)}"
        )
        share = f"{limit.microseconds / microseconds:.0%} of the {limit.bound} limit"
        figures.append(f"{share}, {text.duration(limit.microseconds)} {work}")
    figures.append(f"{cost.waves:.2f} waves, quantization efficiency {efficiency:.0%}")
    order = sum_order(kernel, problem, native, device)
    if problem.is_invariant:
        figures.append(f"batch invariant: {order}")
    if tuned_plan is None:
        others = list(distinct.items())[1:]
        figures.extend(f"instead of {x.kernel}, {_text_of(x.schedule)}: {duration}" for duration, x in others)
    if device.platform == "cuda" and not _ffi.has_cuda:
        unknown = "" if workspace_bytes is not None else ", which does not give the workspace of this one"
        figures.append(f"this build has no CUDA kernels: planned from a description of them{unknown}")
    return Plan(
        problem,
        device,
        kernel,
        _schedule_of(native) if auto else schedule,
        policy,
        workspace_bytes,
        microseconds,
        notes=(*notes, *figures),
        figures=tuple(figures),
        candidates=tuple(distinct.values()),
        waves=cost.waves,
        efficiency=efficiency,
        limit=limit,
        sum_order=order,
    )


def copying(plan):
    """The expected time, in microseconds, of the copies of operands that a plan's kernel makes first."""
    kernel, machine = _registry(plan.device.platform)[0][plan.kernel], machine_of(plan.device).native
    parts = plan.problem.native(), plan.native_schedule(), plan.device.native(), machine
    return _ffi.estimate(kernel, *parts).repack


def _without_kernels(problem, device):
    if problem.gated:
        return "no kernel multiplies such operands by two matrices at once"
    if problem.is_ragged:
        return f"no kernel multiplies groups of {problem.type_a.name} whose sizes are data on {device.platform}"
    if problem.has_scales:
        of = f"{problem.type_b.name} with scales"
        return f"no kernel multiplies {problem.type_a.name} by {of} on {device.platform}"
    if problem.type_a != problem.type_b:
        return f"no kernel multiplies {problem.type_a.name} by {problem.type_b.name}"
    return f"no kernel of this build supports it on {device.platform}, sm_{device.arch}"


def _distinct(candidates, schedule):
    """A ``Candidate`` for each estimate as text: candidates with equal estimates do equal work."""
    auto = isinstance(schedule, schedules.Auto)
    distinct: dict[str, Candidate] = {}
    for x in candidates:
        microseconds = x.cost.microseconds
        duration = text.duration(microseconds)
        if duration not in distinct:
            distinct[duration] = Candidate(x.kernel, _schedule_of(x.schedule) if auto else schedule, microseconds)
    return distinct


def _efficiency(problem, kernel, native, cost):
    split = native.schedule == _ffi.ScheduleKind.split_k
    k_tiles = _ffi.k_tiles(kernel, problem.native())
    pieces = native.splits if split else 1  # of a tile
    # A separate reduction cuts equal slices of whole k-tiles, so there may be fewer of them.
    if split and native.reduction == _ffi.Reduction.separate and kernel.platform != "cpu":
        pieces = -(-k_tiles // -(-k_tiles // pieces))
    return min(1.0, cost.waves / pieces * k_tiles / cost.iterations)
