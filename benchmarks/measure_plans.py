"""Measures our own plans on this GPU: every kernel that can run a problem, under many schedules, but for those whose estimate is far
above the least. Writes the CSV that fit_cost_model.py reads.

Each plan is captured into a CUDA graph of calls on rotating operands (more than 200 MB of them, so that L2 stays cold), which is
replayed and timed with events: microseconds per call, with every memset and reduction kernel.

With `--alone`, the planner's first plans only, few of a kernel, and XLA's product, whose kernel is written as XLA: by the profiler, as
`bench` measures device time. `--plans` says how many; `--no-xla` leaves out what takes longest.

    python benchmarks/measure_plans.py benchmarks/shapes/planner.csv out.csv [--limit SECONDS]
    python benchmarks/measure_plans.py benchmarks/shapes/dtypes.csv out.csv --type f32 --majors rc
    python benchmarks/measure_plans.py ../shared/shapes/streamk_sample.csv out.csv --alone
"""

import argparse
import collections
import csv
import dataclasses
import math
import random
import statistics
import time

import jax

from jax_streamk import Auto, _ffi, planner
from jax_streamk.cost_model import machine_of
from jax_streamk.device import device_of
from jax_streamk.launch_policy import LaunchPolicy
from jax_streamk.problem import GemmProblem
from jax_streamk.tools import bench, sides, timing
from jax_streamk.tools.shapes import Shape
from jax_streamk.tuning import contest
from jax_streamk.tuning.measure import Memory, dtype_of
from jax_streamk.tuning.programs import repeat
from jax_streamk.tuning.tune import ORDERS
from jax_streamk.tuning.tuned import Candidate, Tuned

HOPELESS = 1.6  # times the best of the shape: no other order of tiles is tried
CLOSE = 1.25  # times the best of the shape: measured again, in turns
ROUNDS = 5  # of turns. A GPU at its power limit slows down within milliseconds: what comes first would look fast
UNLIKELY = 2.5  # times the least estimate of the shape: not measured at all
# Plans measured alone: so many, so many of a kernel, and estimates of at most so many times the least.
FIRST, OF_KERNEL, LIKELY = 24, 3, 1.5


def candidates(kernel, m, n, k, sms):
    """(schedule, splits, reduction) worth measuring for a result of the operands' type."""
    rows, columns = (n, m) if kernel.swap_ab else (m, n)
    tiles = -(-rows // kernel.tile_m) * -(-columns // kernel.tile_n)
    k_tiles = -(-k // kernel.tile_k)
    if tiles > 4 * sms and kernel.tile_m * kernel.tile_n < 64 * 128:
        return
    splits = sorted(
        {s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, sms // tiles if tiles < sms else 2) if s >= 2}
    )
    splits = [s for s in splits if s <= k_tiles and tiles * s <= 4 * sms]
    if kernel.type_d == kernel.type_a:
        yield "data_parallel", 1, _ffi.Reduction.ordered
        if _ffi.Reduction.ordered in kernel.stream_k_reductions and tiles % sms:
            yield "stream_k", 1, _ffi.Reduction.ordered
        if _ffi.Reduction.ordered in kernel.split_k_reductions:
            yield from (("split_k", s, _ffi.Reduction.ordered) for s in splits if s <= 16)
    if _ffi.Reduction.separate in kernel.split_k_reductions:
        yield from (("split_k", s, _ffi.Reduction.separate) for s in splits)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes")
    parser.add_argument("out")
    parser.add_argument(
        "--type",
        choices=["bf16", "f16", "f32", "f64"],
        default="bf16",
        help="of operands and result; f32 is multiplied as TF32",
    )
    parser.add_argument("--majors", choices=["rr", "rc", "cr", "cc"], default="rr", help="row or column, of A and of B")
    parser.add_argument(
        "--reductions", default="none,ordered,separate", help="which ways to share tiles; none is data-parallel"
    )
    parser.add_argument(
        "--family",
        action="append",
        help="of kernels; may be given several times (all but sm80 where others serve the type)",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="the planner's first plans, of any kernel, and XLA's product, by the profiler",
    )
    parser.add_argument("--plans", type=int, default=FIRST, help="of --alone, at most (%(default)s)")
    parser.add_argument("--no-xla", action="store_true", help="--alone without XLA's product")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no new shape is begun")
    arguments = parser.parse_args()
    memory = Memory(device_of(None))
    type_, row, column = _ffi.Type[arguments.type], _ffi.Major.row, _ffi.Major.column
    math_ = _ffi.Math.tf32 if type_ == _ffi.Type.f32 and memory.device.arch else _ffi.Math.native
    major_a, major_b = (row if major == "r" else column for major in arguments.majors)
    gpu = ["sm90", "skinny"] + ["sm80"] * (arguments.type in ("f32", "f64"))
    families = [_ffi.Family[name] for name in arguments.family or (gpu if memory.device.arch else ["host"])]
    kernels = [
        kernel
        for kernel in _ffi.kernels()
        if kernel.family in families and kernel.type_a == type_ and kernel.math == math_
    ]

    def problem_of(m, n, k):
        lda, ldb = k if major_a == row else m, n if major_b == row else k
        return GemmProblem(1, m, n, k, type_, type_, type_, math_, major_a, major_b, lda, ldb, n, 0, 0, 0)

    with open(arguments.shapes) as file:
        shapes = sorted({(int(row["m"]), int(row["n"]), int(row["k"])) for row in csv.DictReader(file)}, key=math.prod)
    started = time.time()
    with open(arguments.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("majors m n k kernel schedule splits reduction raster swizzle us".split())
        for m, n, k in shapes:
            if time.time() - started > arguments.limit:
                print("stopped at the time limit before", (m, n, k))
                break
            problem = problem_of(m, n, k)
            if arguments.alone:
                times = measured_alone(problem, memory, arguments.plans, not arguments.no_xla)
            else:
                times = measured(problem, kernels, memory, arguments.reductions.split(","))
            for plan, us in times:
                of = "XLA", "", "", "", "", ""
                if plan is not None:
                    of = (
                        plan.kernel,
                        plan.schedule,
                        plan.splits,
                        plan.reduction,
                        plan.policy.raster,
                        plan.policy.swizzle,
                    )
                writer.writerow([arguments.majors, m, n, k, *of, f"{us:.2f}"])
            file.flush()


def measured(problem, kernels, memory, reductions):
    """Every plan that is measured, a ``Candidate``, and its microseconds."""
    m, n, k, device = problem.m, problem.n, problem.k, memory.device
    rotation = memory.rotation(problem)
    plans = [
        (kernel, Candidate(kernel.name, name, splits, reduction.name, LaunchPolicy(*ORDERS[0])))
        for kernel in kernels
        for name, splits, reduction in candidates(kernel, m, n, k, device.sms)
        if ("none" if name == "data_parallel" else reduction.name) in reductions
    ]
    plans = [
        (kernel, plan)
        for kernel, plan in plans
        if _ffi.can_implement(kernel.name, problem.native(), plan.native(), device.native()) is None
    ]
    count, schedules = len(plans), [plan.native() for _, plan in plans]
    orders = [(_ffi.Raster.along_m, 1)] * count
    batch = _ffi.Batch([kernel for kernel, _ in plans], [problem.native()] * count, schedules, orders, device.native())
    estimates = batch.microseconds(machine_of(device).native)
    bound = UNLIKELY * min(estimates, default=0)
    us, least = {}, math.inf
    for (kernel, plan), estimate in zip(plans, estimates):
        if estimate > bound:
            continue
        for raster, swizzle in (
            ORDERS[:1] if kernel.family == _ffi.Family.sm80 else ORDERS
        ):  # which order their tiles themselves
            policy = planner.policy_in_order(plan.kernel, problem, plan.native(), raster, swizzle, device)
            plan = dataclasses.replace(plan, policy=policy)
            us[plan] = statistics.median(rotation.time(plan.kernel, plan.native(), policy))
            least = min(least, us[plan])
            if us[plan] > HOPELESS * least:
                break
    turns = {plan: [] for plan in us if us[plan] < CLOSE * least}
    for _ in range(ROUNDS):
        for plan in random.sample(list(turns), len(turns)):
            turns[plan] += rotation.time(plan.kernel, plan.native(), plan.policy, repeats=1)
    us.update((plan, statistics.median(times)) for plan, times in turns.items())
    print((m, n, k), min(us.values(), default=None), min(us, key=us.get, default=None), flush=True)
    yield from us.items()


def measured_alone(problem, memory, first, has_xla):
    """The same of so many of the planner's first plans, and of XLA's product, which is None."""
    found = planner.choose(problem, None, memory.device, listed=20 * FIRST).candidates
    estimates = {Candidate.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy)): x.cost.microseconds for x in found}
    of_kernel, plans, least = collections.Counter(), [], min(estimates.values())
    for plan, us in estimates.items():
        if us <= LIKELY * least and of_kernel[plan.kernel] < OF_KERNEL and len(plans) < first:
            plans.append(plan)
            of_kernel[plan.kernel] += 1
    made = [
        planner.plan_with(problem, Auto(), memory.device, Tuned.now(plan, estimates[plan], estimates[plan]))
        for plan in plans
    ]
    row = _ffi.Major.row
    shape = Shape(problem.m, problem.n, problem.k, problem.major_a != row, problem.major_b != row)
    with jax.enable_x64(True):  # types are the problem's
        task = sides.Task(dtype_of(problem.type_a).name)
        count, _ = bench.calls_of(task.bytes(shape), gpu=True)
        operands = [tuple(x.reshape(-1) for x in xs) for xs in task.operands(shape, count)]
        functions = [contest.xlas(made[0])] * has_xla + [contest.ours(x) for x in made]
        programs = [sides.jax_programs(function, operands, 1)["device"] for function in functions]
        times = [[] for _ in programs]
        for program in programs:
            repeat(program, 1)
        for i in [*range(len(programs)), *reversed(range(len(programs)))]:
            times[i] += timing.device_samples(programs[i])[0]
    us = dict(zip([None] * has_xla + plans, map(statistics.median, times)))
    print((problem.m, problem.n, problem.k), us, flush=True)
    yield from us.items()


if __name__ == "__main__":
    main()
