"""Fits the constants of jax_streamk.cost_model's Machine to measured times, and says how well it then chooses.

    python benchmarks/fit_cost_model.py measured.csv [--sms 132] [--shapes]

Reads what measure_plans.py writes (m, n, k, kernel, schedule, splits, reduction, raster, swizzle, us), or the plain CUTLASS
measurements that the project began with (m, n, k, config, swap_ab, schedule, splits, decomposition, kernel_us). Kernels are known
by their names: no GPU and no CUDA build is needed. Needs scipy.

Prints the constants ready to paste, the error of the predicted times, and the regret: the time of the plan that the model ranks
first over that of the best plan measured, for every shape. Of the CUTLASS measurements only data-parallel ones are fitted, because
their kernels fold split-K partials one after another and ours do not; the others still count for the regret, under constants of
their own.
"""

import argparse
import collections
import csv
import dataclasses
import math
import re
import types

import numpy as np
from scipy.optimize import least_squares

from jax_streamk import _ffi, cost_model, planner
from jax_streamk.cost_model import H200, Kernels, Schedules

FIX_UP = ("fix_up", "partial_rate_sm")
OURS_ONLY = (*FIX_UP, "reduction", "reduction_slice", "reduction_rate")
# The memset comes and goes with the fix-up: their times add up and cannot be told apart.
NEVER = ("mma_rate_sm", "memset")
LARGEST_FACTOR = 50  # by which a constant may leave its starting value

_SM90 = re.compile(r"sm90_(\w+?)_(\w+?)_([rc])([rc])_(\d+)x(\d+)x(\d+)_(\d)x(\d)_(coop|pingpong)(_swap)?")
_SM80 = re.compile(r"sm80_(\w+?)_(\w+?)_([rc])([rc])_(\d+)x(\d+)x(\d+)_s(\d+)_a(\d+)")
_CUTLASS = re.compile(r"(\d+)x(\d+)x(\d+)c(\d)(\d)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a problem, a kernel (what cost_model.Kernels reads of a KernelInfo), a schedule, microseconds."""

    m: int
    n: int
    k: int
    kernel: types.SimpleNamespace
    schedule: str
    splits: int
    reduction: str
    us: float
    raster: str
    swizzle: int
    label: str


def kernel_of(name):
    """The attributes of a kernel that its name tells."""
    major = {"r": _ffi.Major.row, "c": _ffi.Major.column}
    if match := _SM90.fullmatch(name):
        a, d, major_a, major_b, *numbers, warps, swap = match.groups()
        tile_m, tile_n, tile_k, cluster_m, cluster_n = map(int, numbers)
        family, align, warp_schedule = _ffi.Family.sm90, 8, "pingpong" if warps == "pingpong" else "cooperative"
    elif match := _SM80.match(name):
        a, d, major_a, major_b, *numbers = match.groups()
        tile_m, tile_n, tile_k, _, align = map(int, numbers)
        family, cluster_m, cluster_n, warp_schedule, swap = _ffi.Family.sm80, 1, 1, "multistage", None
    else:
        raise ValueError(f"{name!r} is not the name of a CUDA kernel")
    return types.SimpleNamespace(
        name=name, family=family, type_a=getattr(_ffi.Type, a), type_d=getattr(_ffi.Type, d), major_a=major[major_a],
        major_b=major[major_b], tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, cluster_m=cluster_m, cluster_n=cluster_n,
        align_a=align, warp_schedule=warp_schedule, swap_ab=bool(swap),
    )  # fmt: skip


def ours(record):
    kernel = kernel_of(record["kernel"])
    splits = int(record["splits"])
    raster, swizzle = record["raster"], int(record["swizzle"])
    label = f"{kernel.name}, {record['schedule']} {splits} {record['reduction']}, along {raster} by {swizzle}"
    m, n, k = (int(record[x]) for x in "mnk")
    return Row(m, n, k, kernel, record["schedule"], splits, record["reduction"], float(record["us"]), raster, swizzle, label)


def in_planned_order(rows, sms):
    """Of plans that differ in the order of tiles only, the one that the planner would have taken."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.m, row.n, row.k, row.kernel.name, row.schedule, row.splits, row.reduction].append(row)
    planned = [
        min(group, key=lambda row: planner.wave_footprint(row.kernel, row.m, row.n, sms, row.raster, row.swizzle))
        for group in groups.values()
    ]
    lost = [math.log(row.us / min(other.us for other in group)) for row, group in zip(planned, groups.values()) if len(group) > 1]
    if lost:
        print(f"# planned order of tiles over the best order measured: geomean {math.exp(np.mean(lost)):.3f}, {len(lost)} plans")
    return planned


def cutlass(record, sms):
    """A row of the CUTLASS measurements; None where it is unknown how K was cut."""
    tile_m, tile_n, tile_k, cluster_m, cluster_n = map(int, _CUTLASS.fullmatch(record["config"]).groups())
    warps = "pingpong" if record["schedule"] == "pingpong" else "coop"
    swap = "_swap" if record["swap_ab"] == "1" else ""
    kernel = kernel_of(f"sm90_bf16_bf16_rr_{tile_m}x{tile_n}x{tile_k}_{cluster_m}x{cluster_n}_{warps}{swap}")
    m, n, k = (int(record[x]) for x in "mnk")
    schedule = record["decomposition"]
    rows, columns = (n, m) if kernel.swap_ab else (m, n)
    tiles = math.ceil(rows / (tile_m * cluster_m)) * math.ceil(columns / (tile_n * cluster_n))
    workers, k_tiles = sms // (cluster_m * cluster_n), math.ceil(k / tile_k)
    # PersistentTileSchedulerSm90StreamKParams::get_num_sk_tiles: no Stream-K without a partial wave or with at most 8 k-tiles,
    # and the heuristic wants none either where the last wave is half full.
    uncut = tiles % workers == 0 or k_tiles <= 8
    if schedule == "heuristic":
        if not uncut and 2 * (tiles % workers) < workers:
            return None
        schedule = "data_parallel"
    if schedule == "stream_k" and uncut:
        schedule = "data_parallel"
    splits = int(record["splits"])
    label = f"{record['config']}{swap} {record['schedule']}, {schedule} {splits}"
    return Row(m, n, k, kernel, schedule, splits, "ordered", float(record["kernel_us"]), "m", 1, label)


def predict(rows, machine, sms):
    """Predicted microseconds of every row."""

    def column(of):
        return np.array([of(row) for row in rows]).reshape(-1, 1)

    m, n, k = (column(lambda row, x=x: getattr(row, x)).astype(float) for x in "mnk")
    type_a = rows[0].kernel.type_a
    size = cost_model.BYTES[type_a]
    # measure_plans.py and its forerunner have row-major operands of a 16-bit type and a result of the same.
    problem = types.SimpleNamespace(
        batch=1, m=m, n=n, k=k, lda=k, ldb=n, type_a=type_a, math=_ffi.Math.native, flops=2 * m * n * k,
        bytes=size * (m * k + k * n + m * n),
    )  # fmt: skip
    schedules = Schedules(
        splits=column(lambda row: float(row.splits) if row.schedule == "split_k" else 1.0),
        stream_k=column(lambda row: row.schedule == "stream_k"),
        separate=column(lambda row: row.schedule == "split_k" and row.splits > 1 and row.reduction == "separate"),
    )
    return cost_model.predict_gpu(Kernels([row.kernel for row in rows]), problem, schedules, sms, machine).microseconds.ravel()


def best_times(rows):
    best = collections.defaultdict(lambda: math.inf)
    for row in rows:
        best[row.m, row.n, row.k] = min(best[row.m, row.n, row.k], row.us)
    return best


def fit(rows, start, names, sms):
    """The Machine whose named constants fit the rows, in the logarithm of time. Plans near the best of their shape weigh most."""
    best, us = best_times(rows), np.array([row.us for row in rows])
    weight = np.array([best[row.m, row.n, row.k] / row.us for row in rows]) ** 1.5
    first = np.array([getattr(start, name) for name in names])

    def machine(x):
        return dataclasses.replace(start, **dict(zip(names, (first * np.exp(x)).tolist())))

    def residuals(x):
        return weight * np.log(predict(rows, machine(x), sms) / us)

    limit = math.log(LARGEST_FACTOR)
    return machine(least_squares(residuals, np.zeros(len(names)), bounds=(-limit, limit), loss="soft_l1", f_scale=0.1).x)


def report(title, rows, machine, sms, every_shape, measured=None):
    """Prints error and regret of the model over `rows`; the best plan is sought among `measured`, by default the rows."""
    best_of = best_times(measured or rows)
    predicted, us = predict(rows, machine, sms), np.array([row.us for row in rows])
    error = np.log(predicted / us)
    by_shape = collections.defaultdict(list)
    for at, row in enumerate(rows):
        by_shape[row.m, row.n, row.k].append(at)
    regrets, near = [], []
    for shape, members in by_shape.items():
        chosen, best = min(members, key=predicted.__getitem__), min(members, key=us.__getitem__)
        regrets.append((us[chosen] / best_of[shape], shape, chosen, best))
        near += [error[at] for at in members if us[at] < 1.25 * us[best]]
    geomean = math.exp(np.mean([math.log(regret[0]) for regret in regrets]))
    spread, spread_near = (np.sqrt(np.mean(np.square(errors))) for errors in (error, near))
    print(f"# {title}: {len(rows)} plans of {len(by_shape)} shapes")
    print(f"# error of the time: rms {spread:.3f}; of plans within 25% of the best {spread_near:.3f}")
    print(f"# regret: geomean {geomean:.3f}, worst {max(regrets)[0]:.3f}")
    for regret, shape, chosen, best in sorted(regrets, reverse=True)[: None if every_shape else 8]:
        print(
            f"#   {regret:.3f} {shape}: {rows[chosen].label}: {us[chosen]:.1f} us, predicted {predicted[chosen]:.1f}; "
            f"best {rows[best].label}: {us[best]:.1f}, predicted {predicted[best]:.1f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured")
    parser.add_argument("--sms", type=int, default=132, help="of the GPU that was measured (default: an H200's 132)")
    parser.add_argument("--shapes", action="store_true", help="print the regret of every shape, not of the worst only")
    arguments = parser.parse_args()
    with open(arguments.measured) as file:
        records = list(csv.DictReader(file))
    names = [field.name for field in dataclasses.fields(H200) if field.name not in NEVER]
    if "kernel" in records[0]:
        measured = [ours(record) for record in records]
        rows = in_planned_order(measured, arguments.sms)
        report("before fitting", rows, H200, arguments.sms, False, measured)
        fitted = fit(rows, H200, names, arguments.sms)
        report("fitted", rows, fitted, arguments.sms, arguments.shapes, measured)
    else:
        rows = [row for record in records if (row := cutlass(record, arguments.sms))]
        whole = [row for row in rows if row.schedule == "data_parallel"]
        names = [name for name in names if name not in OURS_ONLY]
        fitted = fit(whole, H200, names, arguments.sms)
        report("data-parallel", whole, fitted, arguments.sms, arguments.shapes)
        # CUTLASS's turnstile, and no memset in the sum of kernel times.
        cut = [row for row in rows if row.schedule != "data_parallel"]
        turnstile = fit(cut, dataclasses.replace(fitted, memset=0.0), FIX_UP, arguments.sms)
        report("all, with CUTLASS's fix-up", rows, turnstile, arguments.sms, arguments.shapes)
    print("Fitted:")
    for name in names:
        print(f"    {name}={getattr(fitted, name):.4g},")


if __name__ == "__main__":
    main()
