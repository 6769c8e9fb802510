"""Fits the constants of jax_streamk.cost_model's Machine to measured times, and says how well it then chooses.

    python benchmarks/fit_cost_model.py benchmarks/tables/h200_sweep.csv.gz [--fix-up] [--shapes] [--sms 132]
    python benchmarks/fit_cost_model.py benchmarks/tables/h200_dtypes.csv.gz --type f64 [--majors rr]
    python benchmarks/fit_cost_model.py benchmarks/tables/h200_first.csv.gz --choices 300 [--keep TABLE ...]
    python benchmarks/fit_cost_model.py benchmarks/tables/h100_first.csv.gz --machine H100

Reads what measure_plans.py writes (majors, m, n, k, kernel, schedule, splits, reduction, raster, swizzle, us), or the plain CUTLASS
measurements that the project began with (m, n, k, config, swap_ab, schedule, splits, decomposition, kernel_us). Kernels are known
by their names: no GPU and no CUDA build is needed. Needs scipy.

Prints the constants ready to paste, the error of the predicted times, and the regret: the time of the plan that the model ranks
first among those measured over that of the best, for every shape; held out, a shape is predicted by constants fitted to others. `--fix-up`
fits the constants of the fix-up alone, for kernels whose other parts did not change. Of types other than bf16 only the error and
the regret of the constants as they are is printed. `--choices` takes so many seconds to make the regret less, at most half of them
along the gradient of that of all tables, the others by moving constants one after another as long as it falls, of the tables measured and
for constants a little off as well; what tables to `--keep` lose counts eightfold. Of the CUTLASS
measurements only data-parallel ones are fitted, because their kernels fold split-K partials one after another and ours do not; the
others still count for the regret, under constants of their own.
"""

import argparse
import collections
import csv
import dataclasses
import gzip
import math
import re
import time

import numpy as np

from jax_streamk import Device, _ffi, cost_model

FIX_UP = ("fix_up", "partial_rate_sm")
OURS_ONLY = (*FIX_UP, "relaunch", "reduction", "reduction_sharing", "reduction_rate")
# The memset comes and goes with the fix-up: their times add up and cannot be told apart.
NEVER = ("mma_16bit", "mma_tf32", "mma_tf32x3", "mma_f64", "memset", "fused", "narrow_loads", "half_lines")
PRIOR = 0.2  # weight of a constant's logarithm staying where it started, beside those of thousands of rows
FOLDS = 6  # of shapes, in cross-validation
NOISE = 0.007  # in the logarithm of estimates, that makes choices among plans smooth

_SM90 = re.compile(
    r"sm90_(\w+?)_(\w+?)_([rc])([rc])_(\d+)x(\d+)x(\d+)_(\d)x(\d)_(coop|pingpong|single)(_swap)?(?:_tf32)?"
)
_SM80 = re.compile(r"sm80_(\w+?)_(\w+?)_([rc])([rc])_(\d+)x(\d+)x(\d+)_s(\d+)_a(\d+)")
_SKINNY = re.compile(r"skinny_(\w+?)_(\w+?)_(r)([rc])_(\d+)x(\d+)x(\d+)(?:_\w+)?")
_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_MATH = {"f32": _ffi.Math.tf32}
_MAJORS = {"r": _ffi.Major.row, "c": _ffi.Major.column}
_CUTLASS = re.compile(r"(\d+)x(\d+)x(\d+)c(\d)(\d)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a problem, a kernel, a schedule, microseconds."""

    m: int
    n: int
    k: int
    kernel: _ffi.KernelInfo
    schedule: str
    splits: int
    reduction: str
    us: float
    raster: str
    swizzle: int
    label: str
    majors: str = "rr"  # of A and B, row or column


def kernel_of(name):
    """What the cost model reads of a kernel, as its name tells."""
    if match := _SM90.fullmatch(name):
        a, d, major_a, major_b, *numbers, warps, swap = match.groups()
        tile_m, tile_n, tile_k, cluster_m, cluster_n = map(int, numbers)
        family, align, warp_schedule = _ffi.Family.sm90, 16 // _SIZES[a], {"coop": "cooperative"}.get(warps, warps)
    elif match := _SM80.match(name):
        a, d, major_a, major_b, *numbers = match.groups()
        tile_m, tile_n, tile_k, _, align = map(int, numbers)
        family, cluster_m, cluster_n, warp_schedule, swap = _ffi.Family.sm80, 1, 1, "multistage", None
    elif match := _SKINNY.fullmatch(name):
        a, d, major_a, major_b, *numbers = match.groups()
        tile_m, tile_n, tile_k = map(int, numbers)
        family, cluster_m, cluster_n, align, warp_schedule, swap = (
            _ffi.Family.skinny,
            1,
            1,
            16 // _SIZES[a],
            "streaming",
            True,
        )
    else:
        raise ValueError(f"{name!r} is not the name of a CUDA kernel")
    return _ffi.KernelInfo(
        name=name, family=family, type_a=getattr(_ffi.Type, a), type_b=getattr(_ffi.Type, a), type_d=getattr(_ffi.Type, d),
        math=_MATH.get(a, _ffi.Math.native), major_a=_MAJORS[major_a], major_b=_MAJORS[major_b],
        tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, cluster_m=cluster_m, cluster_n=cluster_n, align_a=align,
        align_b=1 if name.endswith("_shifted") else align, align_d=align, warp_schedule=warp_schedule, swap_ab=bool(swap),
        split_k_reductions=[], stream_k_reductions=[],
    )  # fmt: skip


def ours(record):
    kernel = kernel_of(record["kernel"])
    splits = int(record["splits"])
    raster, swizzle = record["raster"], int(record["swizzle"])
    label = f"{kernel.name}, {record['schedule']} {splits} {record['reduction']}, along {raster} by {swizzle}"
    m, n, k = (int(record[x]) for x in "mnk")
    us, majors = float(record["us"]), record.get("majors", "rr")
    return Row(m, n, k, kernel, record["schedule"], splits, record["reduction"], us, raster, swizzle, label, majors)


def ours_of(records, type_, majors):
    """Rows of one type of operands and their majorness; XLA's product is none."""
    rows = (ours(record) for record in records if record["kernel"] != "XLA")
    return [row for row in rows if row.kernel.type_a == _ffi.Type[type_] and row.majors == majors]


def in_planned_order(rows, machine, sms):
    """Of plans that differ in the order of tiles only, the one whose order the planner ranks first."""
    needs = _batch(rows, sms).needs(machine.native)
    groups = collections.defaultdict(list)
    for at, row in enumerate(rows):
        groups[row.m, row.n, row.k, row.kernel.name, row.schedule, row.splits, row.reduction].append(at)
    planned = [min(group, key=needs.__getitem__) for group in groups.values()]
    pairs = [
        (rows[at].us, min(rows[other].us for other in group))
        for at, group in zip(planned, groups.values())
        if len(group) > 1
    ]
    if pairs:
        lost = np.exp(np.mean([math.log(us / best) for us, best in pairs]))
        print(f"# planned order of tiles over the best order measured: geomean {lost:.3f}, {len(pairs)} plans")
    return [rows[at] for at in planned]


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


def _batch(rows, sms):
    """The rows as the cost model takes them; measurements have a result of the operands' type."""
    problems, schedules, orders = [], [], []
    for row in rows:
        m, n, k, type_ = row.m, row.n, row.k, row.kernel.type_a
        major_a, major_b = (_MAJORS[x] for x in row.majors)
        lda, ldb = k if row.majors[0] == "r" else m, n if row.majors[1] == "r" else k
        problems.append(
            _ffi.GemmProblem(1, m, n, k, type_, type_, type_, row.kernel.math, major_a, major_b, lda, ldb, n, 0, 0, 0)
        )
        orders.append((_ffi.Raster.along_m if row.raster == "m" else _ffi.Raster.along_n, row.swizzle))
        schedules.append(_ffi.Schedule(_ffi.ScheduleKind[row.schedule], row.splits, _ffi.Reduction[row.reduction]))
    return _ffi.Batch([row.kernel for row in rows], problems, schedules, orders, Device("cuda", 90, sms).native())


def predictor(rows, sms):
    """A function from a Machine to the predicted microseconds of every row."""
    batch = _batch(rows, sms)
    return lambda machine: np.array(batch.microseconds(machine.native))


def best_times(rows):
    best = collections.defaultdict(lambda: math.inf)
    for row in rows:
        best[row.m, row.n, row.k] = min(best[row.m, row.n, row.k], row.us)
    return best


def fit(rows, start, names, sms):
    """The Machine whose named constants fit the rows, in the logarithm of time. Plans near the best of their shape weigh most."""
    from scipy.optimize import least_squares

    best, us = best_times(rows), np.array([row.us for row in rows])
    weight = np.array([best[row.m, row.n, row.k] / row.us for row in rows]) ** 2
    first, predict = np.array([getattr(start, name) for name in names]), predictor(rows, sms)

    def machine(x):
        return dataclasses.replace(start, **dict(zip(names, (first * np.exp(x)).tolist())))

    def residuals(x):
        return np.append(weight * np.log(predict(machine(x)) / us), PRIOR * x)

    return machine(least_squares(residuals, np.zeros(len(names)), loss="soft_l1", f_scale=0.1, max_nfev=50).x)


def cross_validated(rows, start, names, sms):
    """Predicted microseconds of every row by constants fitted to other shapes only."""
    shapes = sorted({(row.m, row.n, row.k) for row in rows})
    fold_of = dict(zip(shapes, np.random.default_rng(0).permutation(len(shapes)) % FOLDS))
    fold = np.array([fold_of[row.m, row.n, row.k] for row in rows])
    predicted = np.empty(len(rows))
    for held_out in range(FOLDS):
        fitted = fit([row for row, f in zip(rows, fold) if f != held_out], start, names, sms)
        test = [row for row, f in zip(rows, fold) if f == held_out]
        predicted[fold == held_out] = predictor(test, sms)(fitted)
    return predicted


def read(path):
    """The records of a CSV file, gzipped or not."""
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
        return list(csv.DictReader(file))


def least_of_shapes(shapes, values):
    """Where each shape, of those that are numbered by row, has its least value, the first of equals."""
    order = np.lexsort((values, shapes))
    return order[np.flatnonzero(np.diff(shapes[order], prepend=-1))]


def numbered(rows):
    """The number of every row's shape."""
    return np.unique([(row.m, row.n, row.k) for row in rows], axis=0, return_inverse=True)[1].ravel()


def choices(rows, predicted, measured):
    """For every shape its regret, and the rows predicted and measured to be best."""
    best_of, shapes, found = best_times(measured), numbered(rows), {}
    for chosen, best in zip(*(least_of_shapes(shapes, values) for values in (predicted, [row.us for row in rows]))):
        shape = rows[chosen].m, rows[chosen].n, rows[chosen].k
        found[shape] = rows[chosen].us / best_of[shape], chosen, best
    return found


class Choices:
    """What is lost by the plans that one Machine after another ranks first among those of a table."""

    def __init__(self, measured, machine, sms):
        rows, best = in_planned_order(measured, machine, sms), best_times(measured)
        self._shapes, self._predict = numbered(rows), predictor(rows, sms)
        self._lost = np.log([row.us / best[row.m, row.n, row.k] for row in rows])

    def lost(self, machine):
        """The logarithm of the regret of every shape."""
        return self._lost[least_of_shapes(self._shapes, self._predict(machine))]

    def expected(self, machine):
        """The mean logarithm of the regret if each plan is chosen with the weight exp(-gap / NOISE), of its estimate's logarithm to the least."""
        estimates = np.log(self._predict(machine))
        above = estimates - estimates[least_of_shapes(self._shapes, estimates)][self._shapes]
        weights = np.exp(-above / NOISE)
        return np.mean(np.bincount(self._shapes, weights * self._lost) / np.bincount(self._shapes, weights))


def moved(machine, names, factors):
    shares = {"overlapped", "drift", "misaligned_drift"}
    values = {name: getattr(machine, name) * factor for name, factor in zip(names, factors)}
    return dataclasses.replace(machine, **{name: min(x, 1.0) if name in shares else x for name, x in values.items()})


def slide(tables, start, names, until):
    """The Machine to which the gradient of expected choices leads, every table counting as much as another.

    Constants stay near the start: estimates are of time, too.
    """
    from scipy.optimize import minimize

    def cost(x):
        machine = moved(start, names, np.exp(x))
        return np.mean([table.expected(machine) for table in tables]) + 0.002 * np.sum(np.square(x))

    def with_gradient(x):
        steps = 0.006 * np.eye(len(x))
        return cost(x), np.array([cost(x + step) - cost(x - step) for step in steps]) / 0.012

    def stop_in_time(intermediate_result):
        if time.monotonic() > until:
            raise StopIteration

    bounds, started = [(-0.7, 0.7)] * len(names), np.zeros(len(names))
    found = minimize(with_gradient, started, jac=True, method="L-BFGS-B", bounds=bounds, callback=stop_in_time)
    return moved(start, names, np.exp(found.x))


def descend(tables, kept, start, slid, names, until):
    """The Machine to which steps of single constants lead that make choices among the plans of ``tables`` better, every shape counting as
    much as another, from the better of ``start`` and ``slid``.

    What ``kept`` lose more than by ``start`` counts eightfold. Constants a few percent off must choose as well, and none may leave
    ``start`` without a gain.
    """
    rng = np.random.default_rng(0)
    off = np.exp(rng.normal(0, 0.03, (6, len(names))))
    least = [np.mean(table.lost(start)) for table in kept]

    def cost(machine):
        lost = np.mean(
            [
                np.mean(np.concatenate([table.lost(moved(machine, names, factors)) for table in tables]))
                for factors in off
            ]
        )
        worse = sum(max(np.mean(table.lost(machine)) - bound, 0) for table, bound in zip(kept, least))
        return (
            lost
            + 8 * worse
            + 0.001 * sum(math.log(getattr(machine, name) / getattr(start, name)) ** 2 for name in names)
        )

    machine = min(start, slid, key=cost)
    best, steps = cost(machine), np.full(len(names), 0.2)
    while time.monotonic() < until:
        for at in rng.permutation(len(names)):
            for factor in (1 + steps[at], 1 / (1 + steps[at])):
                other = moved(machine, names, np.where(np.arange(len(names)) == at, factor, 1.0))
                if (now := cost(other)) < best - 5e-6:
                    machine, best = other, now
                    break
            else:
                steps[at] = 0.6 * steps[at] if steps[at] > 0.025 else rng.choice([0.3, 0.15, 0.06])
    return machine


def report(title, rows, predicted, every_shape, measured=None):
    """Prints error and regret of predicted times of `rows`; the best plan is sought among `measured`, by default the rows."""
    us = np.array([row.us for row in rows])
    error = np.log(predicted / us)
    best_of = best_times(rows)
    near = us < 1.25 * np.array([best_of[row.m, row.n, row.k] for row in rows])
    spread, spread_near = (np.sqrt(np.mean(np.square(errors))) for errors in (error, error[near]))
    found = choices(rows, predicted, measured or rows)
    regrets = [regret for regret, _, _ in found.values()]
    print(f"# {title}: {len(rows)} plans of {len(found)} shapes")
    print(f"# error of the time: rms {spread:.3f}; of plans within 25% of the best {spread_near:.3f}")
    print(f"# regret: geomean {np.exp(np.mean(np.log(regrets))):.3f}, worst {max(regrets):.3f}")
    by_regret = sorted(found.items(), key=lambda item: -item[1][0])
    for shape, (regret, chosen, best) in by_regret[: None if every_shape else 8]:
        print(
            f"#   {regret:.3f} {shape}: {rows[chosen].label}: {us[chosen]:.1f} us, predicted {predicted[chosen]:.1f}; "
            f"best {rows[best].label}: {us[best]:.1f}, predicted {predicted[best]:.1f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+")
    parser.add_argument(
        "--machine", choices=["H200", "H100"], default="H200", help="whose constants to begin with (%(default)s)"
    )
    parser.add_argument("--sms", type=int, default=132, help="of the GPU that was measured (default: an H200's 132)")
    parser.add_argument("--fix-up", action="store_true", help="fit the constants of the fix-up alone")
    parser.add_argument("--type", choices=list(_SIZES), default="bf16", help="of operands; rows of others are left out")
    parser.add_argument(
        "--majors", choices=["rr", "rc", "cr", "cc"], default="rr", help="row or column, of A and of B; likewise"
    )
    parser.add_argument("--shapes", action="store_true", help="print the regret of every shape, not of the worst only")
    parser.add_argument(
        "--choices", type=float, metavar="SECONDS", help="make the planner's choices better, for so long"
    )
    parser.add_argument(
        "--keep", nargs="*", default=[], help="tables of whose choices none may become worse, on average"
    )
    arguments = parser.parse_args()
    tables = [read(path) for path in arguments.measured]
    records = [record for table in tables for record in table]
    start = getattr(cost_model, arguments.machine)
    names, sms = [field.name for field in dataclasses.fields(start) if field.name not in NEVER], arguments.sms
    if arguments.choices:
        tables += [read(path) for path in arguments.keep]
        tables = [Choices(ours_of(table, arguments.type, arguments.majors), start, sms) for table in tables]
        count = len(arguments.measured)
        now = time.monotonic()
        slid = slide(tables, start, names, now + arguments.choices / 2)
        fitted = descend(tables[:count], tables[count:], start, slid, names, now + arguments.choices)
        for path, table in zip(arguments.measured + arguments.keep, tables):
            regrets = [f"{math.exp(np.mean(table.lost(machine))):.4f}" for machine in (start, fitted)]
            print(f"# regret: geomean {regrets[0]}, then {regrets[1]}: {path}")
    elif "kernel" in records[0]:
        measured = ours_of(records, arguments.type, arguments.majors)
        rows = in_planned_order(measured, start, sms)
        names = FIX_UP if arguments.fix_up else names
        if arguments.type != "bf16":
            report("as it is", rows, predictor(rows, sms)(start), arguments.shapes, measured)
            return
        report("before fitting", rows, predictor(rows, sms)(start), False, measured)
        fitted = fit(rows, start, names, sms)
        report("fitted", rows, predictor(rows, sms)(fitted), arguments.shapes, measured)
        report("held out", rows, cross_validated(rows, start, names, sms), arguments.shapes, measured)
    else:
        rows = [row for record in records if (row := cutlass(record, sms))]
        whole = [row for row in rows if row.schedule == "data_parallel"]
        names = [name for name in names if name not in OURS_ONLY]
        fitted = fit(whole, start, names, sms)
        report("data-parallel", whole, predictor(whole, sms)(fitted), arguments.shapes)
        # CUTLASS's turnstile, and no memset in the sum of kernel times.
        cut = [row for row in rows if row.schedule != "data_parallel"]
        turnstile = fit(cut, dataclasses.replace(fitted, memset=0.0), FIX_UP, sms)
        report("all, with CUTLASS's fix-up", rows, predictor(rows, sms)(turnstile), arguments.shapes)
    print("Fitted:")
    for name in names:
        print(f"    {name}={getattr(fitted, name):.4g},")


if __name__ == "__main__":
    main()
