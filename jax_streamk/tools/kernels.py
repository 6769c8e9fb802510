"""``python -m jax_streamk kernels``: compares kernels and numbers of splits for one product, or lists all kernels.

Times are in microseconds. GB/s count operands and result once, whatever a schedule moves besides.

examples:
  python -m jax_streamk kernels
      every kernel of this build
  python -m jax_streamk kernels 16 4096 4096
      the fastest kernels at 1, 2, 4, 8 and 16 splits, measured on this machine
  python -m jax_streamk kernels 16 4096 4096 --device h200 --csv
      the same as the planner predicts it for an H200, which need not be here, as CSV
  python -m jax_streamk kernels 128 4096 4096 --splits 1,4 --best 1 --ncu
      with occupancy and throughputs by Nsight Compute
"""

import argparse
import csv
import dataclasses
import os
import pathlib
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from jax_streamk import _ffi, compat, text
from jax_streamk.device import NAMED, Device, device_named, jax_device_of
from jax_streamk.machines import machine_of
from jax_streamk.plan import cost_model, described, planner
from jax_streamk.plan import problem as problems
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.tools import shapes
from jax_streamk.tuning.measure import Memory
from jax_streamk.tuning.tuned import Trial

_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8")
_REDUCTIONS = ("ordered", "separate", "atomic")
_ROUNDS = 3
WIDTH = 100
# What Nsight Compute calls them in its sections Occupancy and SpeedOfLight; in percent.
_COUNTERS = {
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
_TIME = "gpu__time_duration.sum"


def add_arguments(parser):
    parser.add_argument("m", nargs="?", metavar="M", type=shapes.positive, help="rows of A and of the result")
    parser.add_argument("n", nargs="?", metavar="N", type=shapes.positive, help="columns of B and of the result")
    parser.add_argument("k", nargs="?", metavar="K", type=shapes.positive, help="columns of A, rows of B")
    parser.add_argument(
        "--dtype",
        type=shapes.dtype,
        default="bfloat16",
        choices=_DTYPES,
        help="of operands and result; int8 has an int32 result (%(default)s)",
    )
    parser.add_argument(
        "--layout", default="rr", choices=("rr", "rc", "cr", "cc"), help="A and B: row- or column-major (%(default)s)"
    )
    parser.add_argument("--splits", type=_counts, metavar="N,N", help="numbers of splits of K (1,2,4,8,16)")
    parser.add_argument(
        "--reduction",
        action="append",
        choices=_REDUCTIONS,
        help="may be given several times (ordered; on GPUs separate, too)",
    )
    parser.add_argument(
        "--best", type=shapes.positive, metavar="N", help="how many kernels of each number of splits, by prediction (3)"
    )
    parser.add_argument("--device", choices=[*NAMED, "cpu"], help="to predict for (the one that is here)")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--csv", action="store_true", help="as CSV, with every column")
    parser.add_argument("--ncu", action="store_true", help="add occupancy and throughputs, by Nsight Compute")


def _counts(words):
    try:
        return sorted({shapes.positive(word) for word in words.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{words!r} is not a list of positive integers") from None


def run(arguments):
    extents = arguments.m, arguments.n, arguments.k
    if extents == (None, None, None):
        return _list(arguments)
    if None in extents:
        arguments.error("the extents M, N and K must be given together")
    device = device_named(arguments.device)
    is_here = jax_device_of(device) is not None and (device.platform == "cpu" or _ffi.has_cuda)
    if arguments.ncu:
        _check_ncu(device, is_here, arguments.error)
    try:
        problem = _problem(arguments, device)
        rows = _planned(problem, arguments, device)
    except (ValueError, problems.Unsupported) as error:
        arguments.error(str(error))
    failed = []
    if is_here and not arguments.predict:
        try:
            failed = _measure(rows, problem, device)
        except RuntimeError as error:
            raise SystemExit(f"kernels: {error}") from None
        rows.sort(key=lambda row: row.microseconds)
    if is_here and device.platform == "cuda":
        for row in rows:
            row.registers, row.ctas_per_sm = row.kernel.resources()
    if arguments.ncu:
        _count(rows, problem, device)
    if arguments.csv:
        _write_csv(rows, problem, arguments, device)
    else:
        print("\n".join(_lines(rows, problem, arguments, device)))
    for line in failed:
        print(f"kernels: {line}", file=sys.stderr)
    return int(bool(failed))


# ---- a list of all kernels ----


def _list(arguments):
    for name in ("splits", "reduction", "best", "predict", "ncu"):
        if getattr(arguments, name):
            arguments.error(f"--{name} is about a product: give its extents M, N and K")
    kernels = _ffi.kernels()
    if arguments.device:
        kernels = planner.kernels_for(device_named(arguments.device).platform)
    if arguments.csv:
        described.write(kernels, sys.stdout)
        return 0
    names = [kernel.name for kernel in kernels]
    built = {kernel.name for kernel in _ffi.kernels()}
    what = "of this build" if built.issuperset(names) else "of a build with CUDA, which this one is not"
    print(f"{len(kernels)} kernels {what}")
    print("split-K, Stream-K: with which reductions, o(rdered), a(tomic), s(eparate)\n")
    initials = [(_initials(kernel.split_k_reductions), _initials(kernel.stream_k_reductions)) for kernel in kernels]
    table = _of_kernels(kernels) | {"split-K": [x for x, _ in initials], "Stream-K": [x for _, x in initials]}
    print("\n".join(_table(table)))
    return 0


def _initials(reductions):
    return "".join(reduction.name[0] for reduction in reductions) or "-"


# ---- one product ----


@dataclasses.dataclass
class Row:
    """A kernel under a schedule, for one product: what is predicted of it, and what was measured."""

    kernel: _ffi.KernelInfo
    plan: Trial
    cost: _ffi.Cost
    workspace_bytes: int | None  # None: only a build that has the kernel knows
    measured: float | None = None  # microseconds
    registers: int | None = None  # per thread
    ctas_per_sm: int | None = None
    counters: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def microseconds(self):
        return self.cost.microseconds if self.measured is None else self.measured

    @property
    def reduction(self):
        return self.plan.reduction if self.plan.splits > 1 else ""

    def launch(self):
        return self.plan.kernel, self.plan.native(), self.plan.policy


def _problem(arguments, device):
    shape = shapes.Shape(arguments.m, arguments.n, arguments.k, *(x == "c" for x in arguments.layout))
    lhs, rhs = (jax.ShapeDtypeStruct(stored, jnp.dtype(arguments.dtype)) for stored in shape.stored())
    result, precision = shapes.result_dtype(arguments.dtype), compat.canonicalize_precision(None)
    arrangement = problems.arrange(lhs, rhs, shape.dimension_numbers(), precision, result, device.platform)
    return arrangement.problem


def _planned(problem, arguments, device):
    """The ``Row``s of a problem, the fastest by prediction first.

    Raises:
      ValueError: no kernel runs the problem under any of the schedules.
    """
    kernels = {kernel.name: kernel for kernel in planner.kernels_for(device.platform)}
    reductions = arguments.reduction or _REDUCTIONS[: 1 if device.platform == "cpu" else 2]
    rows, refusal = [], ""
    for splits in arguments.splits or (1, 2, 4, 8, 16):
        candidates = []
        for reduction in reductions if splits > 1 else ("ordered",):
            kind = _ffi.ScheduleKind.split_k if splits > 1 else _ffi.ScheduleKind.data_parallel
            wanted = _ffi.Schedule(kind, splits, _ffi.Reduction[reduction])
            choice = planner.choose(problem, wanted, device, listed=len(kernels))
            refusal = refusal or choice.refusal
            candidates += choice.candidates
        for x in sorted(candidates, key=lambda x: x.cost.microseconds)[: arguments.best or 3]:
            plan = Trial.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy))
            workspace_bytes = _workspace_bytes(kernels[x.kernel], x.schedule, problem, device)
            rows.append(Row(kernels[x.kernel], plan, x.cost, workspace_bytes))
    if not rows:
        raise ValueError(refusal or f"no kernel runs {problem}")
    return sorted(rows, key=lambda row: row.microseconds)


def _workspace_bytes(kernel, schedule, problem, device):
    alone, machine = _ffi.Kernels([kernel]), machine_of(device).native
    return _ffi.choose(alone, problem.native(), schedule, device.native(), machine).workspace_bytes


def _measure(rows, problem, device):
    """Fills in what each row takes on this machine, and returns why some could not be measured."""
    rotation = Memory(device).rotation(problem)
    times: list[list[float]] = [[] for _ in rows]
    failed = {}
    rotation.shorten(*rows[0].launch())
    for _ in range(_ROUNDS):  # in turns: a GPU at its power limit slows down within milliseconds
        for i, row in enumerate(rows):
            if i in failed:
                continue
            try:
                times[i] += rotation.time(*row.launch(), 1)
            except RuntimeError as error:  # its workspace may be too large, for one
                failed[i] = f"{row.plan.kernel} at {row.plan.splits} splits: {error}"
    for i, row in enumerate(rows):
        row.measured = None if i in failed else statistics.median(times[i])
    return list(failed.values())


# ---- Nsight Compute ----


def _check_ncu(device, is_here, error):
    if device.platform != "cuda" or not is_here:
        error(f"--ncu runs on a GPU of this machine, and {device.kind or device.platform} is not one")
    if shutil.which("ncu") is None:
        error(
            "--ncu needs Nsight Compute, whose program ncu is not on the PATH: install the package nsight-compute of "
            "NVIDIA's CUDA repository, or see https://developer.nvidia.com/nsight-compute"
        )


def _count(rows, problem, device):
    """Fills in the counters of each row, from a process of its own that launches each once."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "launches"
        path.write_bytes(pickle.dumps((problem, device, [row.plan for row in rows])))
        metrics = ",".join((*_COUNTERS.values(), _TIME))
        child = [sys.executable, "-c", f"from {__name__} import launch_each; launch_each({str(path)!r})"]
        done = subprocess.run(
            [
                "ncu",
                "--csv",
                "--page",
                "raw",
                "--print-units",
                "base",
                "--print-kernel-base",
                "mangled",  # demangled, it drops namespaces
                "--metrics",
                metrics,
                *child,
            ],
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # this process has most of the memory
            capture_output=True,
            text=True,
        )
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise SystemExit(
            "kernels: --ncu: only administrators may read performance counters here: run as root, or see "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    counted = counters_of(done.stdout)
    if done.returncode or len(counted) != len(rows):
        last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise SystemExit(f"kernels: --ncu: ncu counted {len(counted)} of {len(rows)} launches and ended with:\n{last}")
    for row, counters in zip(rows, counted):
        row.counters = counters


def launch_each(path):
    """Launches what ``_count`` wrote to a file, each after a kernel of XLA's. Runs under Nsight Compute."""
    problem, device, plans = pickle.loads(pathlib.Path(path).read_bytes())
    rotation, marker = Memory(device).rotation(problem), jax.jit(jnp.sin)
    on = jax_device_of(device)
    for plan in plans:
        jax.block_until_ready(marker(jax.device_put(jnp.float32(1), on)))
        rotation.launch(plan.kernel, plan.native(), plan.policy)


def counters_of(output):
    """The counters of the longest kernel that multiplies, for each call in what Nsight Compute printed.

    A call is a run of our kernels: a product may be several, with copies before and a reduction after it.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    calls: list[list[dict[str, Any]]] = [[]]
    for record in csv.DictReader(lines[start:]):
        name = record.get("Kernel Name")
        if not name:  # the units
            continue
        if "streamk" not in name:
            calls.append([])
        elif not any(other in name for other in ("copy_rows", "copy_squares", "reduce_slices")):
            calls[-1].append(record)
    longest = [max(call, key=lambda record: _number(record[_TIME])) for call in calls if call]
    return [{name: _number(record[metric]) for name, metric in _COUNTERS.items()} for record in longest]


def _number(words):
    return float(words.replace(",", ""))


# ---- output ----


def _figures(row, problem):
    """GB/s of operands and result, each moved once, and TFLOP/s."""
    return (
        cost_model.moved_bytes(problem) / row.microseconds / 1e3,
        cost_model.flop_count(problem) / row.microseconds / 1e6,
    )


def _write_csv(rows, problem, arguments, device):
    writer = csv.writer(sys.stdout, lineterminator="\n")
    of_product = "m", "n", "k", "dtype", "layout"
    same = {"device": _where(device)} | {name: getattr(arguments, name) for name in of_product}
    records = []
    for row in rows:
        gigabytes, teraflops = _figures(row, problem)
        records.append(same | {
            "kernel": row.plan.kernel, "splits": row.plan.splits, "reduction": row.reduction,
            "predicted_us": f"{row.cost.microseconds:.2f}",
            "measured_us": "" if row.measured is None else f"{row.measured:.2f}",
            "gb_per_s": f"{gigabytes:.1f}", "tflop_per_s": f"{teraflops:.2f}",
            "registers": row.registers, "shared_memory": row.kernel.shared_memory, "ctas_per_sm": row.ctas_per_sm,
            "waves": f"{row.cost.waves:.3f}", "workspace_bytes": row.workspace_bytes,
        } | {f"{name}_percent": row.counters.get(name) for name in _COUNTERS})  # fmt: skip
    writer.writerow(records[0])
    writer.writerows(record.values() for record in records)


def _lines(rows, problem, arguments, device):
    size, flops = text.size(cost_model.moved_bytes(problem)), text.flops(cost_model.flop_count(problem))
    yield f"{problem.m} x {problem.n} x {problem.k} {arguments.dtype} {arguments.layout} on {_where(device)}"
    yield f"{size} to move once, {flops}; times in us; GB/s and TFLOP/s by {_by(rows)}"
    if (limit := cost_model.limit_of(problem, device)) is not None:
        yield f"no kernel can take less than {text.duration(limit.microseconds)}, the {limit.bound} limit"
    kernels = list({row.plan.kernel: row for row in rows}.values())
    numbers = {row.plan.kernel: i for i, row in enumerate(kernels, 1)}
    yield ""
    resources = {
        "registers": [_or_blank(row.registers) for row in kernels],
        "CTAs/SM": [_or_blank(row.ctas_per_sm) for row in kernels],
    }
    numbered = {"#": list(map(str, numbers.values()))}
    yield from _table(numbered | _of_kernels([row.kernel for row in kernels]) | resources)
    yield ""
    figures = [_figures(row, problem) for row in rows]
    yield from _table(
        {
            "splits": [str(row.plan.splits) for row in rows],
            "reduction": [row.reduction for row in rows],
            "#": [str(numbers[row.plan.kernel]) for row in rows],
            "predicted": [f"{row.cost.microseconds:.2f}" for row in rows],
            "measured": [_or_blank(row.measured, ".2f") for row in rows],
            "GB/s": [f"{gigabytes:.0f}" for gigabytes, _ in figures],
            "TFLOP/s": [f"{teraflops:.1f}" for _, teraflops in figures],
            "waves": [f"{row.cost.waves:.2f}" for row in rows],
            "workspace": ["?" if row.workspace_bytes is None else text.size(row.workspace_bytes) for row in rows],
        }
        | {
            f"{name.upper() if len(name) < 5 else name} %": [_or_blank(row.counters.get(name), ".0f") for row in rows]
            for name in _COUNTERS
        }
    )


def _where(device: Device):
    return device.kind or f"{device.platform}, sm_{device.arch}, {device.sms} SMs"


def _by(rows):
    if all(row.measured is None for row in rows):
        return "prediction: nothing was measured"
    return "measurement"


def _or_blank(value, digits=""):
    return "" if value is None else format(value, digits)


def _of_kernels(kernels):
    return {
        "kernel": [kernel.name for kernel in kernels],
        "threads": [str(kernel.threads) for kernel in kernels],
        "stages": [str(kernel.stages) for kernel in kernels],
        "shared": [text.size(kernel.shared_memory) if kernel.shared_memory else "" for kernel in kernels],
    }


_WORDS = ("kernel", "reduction", "split-K", "Stream-K")


def _table(columns):
    """Lines of a table, numbers to the right; without its empty columns."""
    columns = {name: values for name, values in columns.items() if any(values)}
    widths = {name: max(map(len, (name, *values))) for name, values in columns.items()}
    gap = "  " if sum(widths.values()) + 2 * len(widths) - 2 <= WIDTH else " "
    for cells in (columns.keys(), *zip(*columns.values())):
        placed = (
            cell.ljust(width) if name in _WORDS else cell.rjust(width)
            for cell, (name, width) in zip(cells, widths.items())
        )
        yield gap.join(placed).rstrip()
