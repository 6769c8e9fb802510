"""Measures our own plans on this GPU: every kernel that can run a problem, under many schedules, but for those whose estimate is far
above the least. Writes the CSV that fit_cost_model.py reads.

Each plan is captured into a CUDA graph of calls on rotating operands (more than 200 MB of them, so that L2 stays cold), which is
replayed and timed with events: microseconds per call, with every memset and reduction kernel.

    python benchmarks/measure_plans.py benchmarks/shapes/planner.csv out.csv [--limit SECONDS]
"""

import argparse
import csv
import dataclasses
import math
import statistics
import time

from jax_streamk import _ffi
from jax_streamk.cost_model import machine_of
from jax_streamk.device import device_of
from jax_streamk.measure import Memory
from jax_streamk.problem import GemmProblem
from jax_streamk.tune import ORDERS
from jax_streamk.tuned import Candidate

HOPELESS = 1.6  # times the best of the shape: no other order of tiles is tried
UNLIKELY = 2.5  # times the least estimate of the shape: not measured at all


def candidates(kernel, m, n, k, sms):
    """(schedule, splits, reduction) worth measuring for a bf16 result."""
    rows, columns = (n, m) if kernel.swap_ab else (m, n)
    tiles = -(-rows // kernel.tile_m) * -(-columns // kernel.tile_n)
    k_tiles = -(-k // kernel.tile_k)
    if tiles > 4 * sms and kernel.tile_m * kernel.tile_n < 64 * 128:
        return
    splits = sorted({s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, sms // tiles if tiles < sms else 2) if s >= 2})
    splits = [s for s in splits if s <= k_tiles and tiles * s <= 4 * sms]
    if kernel.type_d == _ffi.Type.bf16:
        yield "data_parallel", 1, _ffi.Reduction.ordered
        if _ffi.Reduction.ordered in kernel.stream_k_reductions and tiles % sms:
            yield "stream_k", 1, _ffi.Reduction.ordered
        if _ffi.Reduction.ordered in kernel.split_k_reductions:
            yield from (("split_k", s, _ffi.Reduction.ordered) for s in splits if s <= 16)
    elif _ffi.Reduction.separate in kernel.split_k_reductions:
        yield from (("split_k", s, _ffi.Reduction.separate) for s in splits)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes")
    parser.add_argument("out")
    parser.add_argument("--reductions", default="none,ordered,separate", help="which ways to share tiles; none is data-parallel")
    parser.add_argument("--family", action="append", help="of kernels; may be given several times (sm90 and skinny, or host)")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no new shape is begun")
    arguments = parser.parse_args()
    memory = Memory(device_of(None))
    families = [_ffi.Family[name] for name in arguments.family or (["sm90", "skinny"] if memory.device.arch else ["host"])]
    kernels = [
        kernel
        for kernel in _ffi.kernels()
        if kernel.family in families and kernel.type_a == _ffi.Type.bf16
        and (kernel.major_a, kernel.major_b) == (_ffi.Major.row, _ffi.Major.row)
    ]  # fmt: skip
    with open(arguments.shapes) as file:
        shapes = sorted({(int(row["m"]), int(row["n"]), int(row["k"])) for row in csv.DictReader(file)}, key=math.prod)
    started = time.time()
    with open(arguments.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("m n k kernel schedule splits reduction raster swizzle us".split())
        for m, n, k in shapes:
            if time.time() - started > arguments.limit:
                print("stopped at the time limit before", (m, n, k))
                break
            measure_shape(writer, kernels, memory, m, n, k, arguments.reductions.split(","))
            file.flush()


def measure_shape(writer, kernels, memory, m, n, k, reductions):
    bf16, row, device = _ffi.Type.bf16, _ffi.Major.row, memory.device
    problem = GemmProblem(1, m, n, k, bf16, bf16, bf16, _ffi.Math.native, row, row, k, n, n, 0, 0, 0)
    rotation = memory.rotation(problem)
    plans = [
        (kernel, Candidate(kernel.name, name, splits, reduction.name, *ORDERS[0]))
        for kernel in kernels
        for name, splits, reduction in candidates(kernel, m, n, k, device.sms)
        if ("none" if name == "data_parallel" else reduction.name) in reductions
    ]
    plans = [(kernel, plan) for kernel, plan in plans if _ffi.can_implement(kernel.name, problem.native(), plan.native(), device.native()) is None]
    count, schedules = len(plans), [plan.native() for _, plan in plans]
    batch = _ffi.Batch([kernel for kernel, _ in plans], [problem.native()] * count, schedules, device.native())
    estimates = batch.microseconds(machine_of(device).native)
    bound = UNLIKELY * min(estimates, default=0)
    best = []
    for (kernel, plan), estimate in zip(plans, estimates):
        if estimate > bound:
            continue
        for raster, swizzle in ORDERS:
            plan = dataclasses.replace(plan, raster=raster, swizzle=swizzle)
            us = statistics.median(rotation.time(kernel.name, plan.native()))
            record = (kernel.name, plan.schedule, plan.splits, plan.reduction, raster.removeprefix("along_"), swizzle)
            writer.writerow([m, n, k, *record, f"{us:.2f}"])
            best.append((us, *record))
            if us > HOPELESS * min(best)[0]:
                break
    print((m, n, k), *min(best, default=()), flush=True)


if __name__ == "__main__":
    main()
