"""Measures our own plans on this GPU: every kernel that can run a problem, under many schedules. Writes the CSV that
fit_cost_model.py reads.

Each plan is captured into a CUDA graph of calls on rotating operands (more than 200 MB of them, so that L2 stays cold), which is
replayed and timed with events: microseconds per call, with every memset and reduction kernel. Needs torch for graphs and events.

    python benchmarks/measure_plans.py benchmarks/shapes/planner.csv out.csv [--limit SECONDS]
"""

import argparse
import csv
import math
import time

import torch

import jax_streamk
from jax_streamk import _ffi

ROTATE_BYTES = 220e6
ORDERS = [("m", 1), ("m", 4), ("n", 1), ("n", 4), ("m", 2), ("m", 8), ("n", 8)]
HOPELESS = 1.6  # times the best of the shape: no other order of tiles is tried
KINDS = {"data_parallel": _ffi.ScheduleKind.data_parallel, "split_k": _ffi.ScheduleKind.split_k, "stream_k": _ffi.ScheduleKind.stream_k}


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
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no new shape is begun")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    device = jax_streamk.Device("cuda", 10 * properties.major + properties.minor, properties.multi_processor_count)
    kernels = [
        kernel
        for kernel in _ffi.kernels()
        if kernel.family == _ffi.Family.sm90 and kernel.type_a == _ffi.Type.bf16
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
            measure_shape(writer, kernels, device, m, n, k, arguments.reductions.split(","))
            file.flush()


def measure_shape(writer, kernels, device, m, n, k, reductions):
    count = max(2, min(64, math.ceil(ROTATE_BYTES / (2 * (m * k + k * n + m * n)))))
    a = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(count)]
    b = [torch.randn(k, n, device="cuda").bfloat16() for _ in range(count)]
    d = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    best = []
    for kernel in kernels:
        problem = _ffi.GemmProblem(
            1, m, n, k, _ffi.Type.bf16, _ffi.Type.bf16, _ffi.Type.bf16, _ffi.Math.native, _ffi.Major.row, _ffi.Major.row,
            k, n, n, 0, 0, 0,
        )  # fmt: skip
        for name, splits, reduction in candidates(kernel, m, n, k, device.sms):
            if ("none" if name == "data_parallel" else reduction.name) not in reductions:
                continue
            for raster, swizzle in ORDERS:
                order = _ffi.Raster.along_m if raster == "m" else _ffi.Raster.along_n
                schedule = _ffi.Schedule(KINDS[name], splits, reduction, 0, order, swizzle)
                if _ffi.can_implement(kernel.name, problem, schedule, device.native()) is not None:
                    break
                us = time_calls(kernel.name, problem, schedule, device.native(), a, b, d)
                writer.writerow([m, n, k, kernel.name, name, splits, reduction.name, raster, swizzle, f"{us:.2f}"])
                best.append((us, kernel.name, name, splits, reduction.name, raster, swizzle))
                if us > HOPELESS * min(best)[0]:
                    break
    print((m, n, k), *min(best, default=()), flush=True)


def time_calls(name, problem, schedule, device, a, b, d, repeats=3):
    workspace = torch.empty(max(_ffi.workspace_bytes(name, problem, schedule, device), 1), dtype=torch.uint8, device="cuda")

    def calls():
        stream = torch.cuda.current_stream().cuda_stream
        for x, y, z in zip(a, b, d):
            _ffi.launch(name, problem, schedule, device, x.data_ptr(), y.data_ptr(), z.data_ptr(), workspace.data_ptr(), stream)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(a))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
