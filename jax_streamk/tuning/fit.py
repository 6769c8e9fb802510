"""Fits the constants and limits of a ``Machine`` to measured plans, and says how well it then chooses."""

import collections
import csv
import dataclasses
import gzip
import pathlib
import zlib

import numpy as np

from jax_streamk import _ffi, machines
from jax_streamk.plan import described, left_to_xla
from jax_streamk.plan.problem import GemmProblem

COLUMNS = ("majors", "m", "n", "k", "kernel", "schedule", "splits", "reduction", "raster", "swizzle", "us")
BESIDE_XLA = ("batch", "rule", "xla_us")  # of products that were measured for a rule of ``left_to_xla``
HELD_OUT = 3  # every third shape, by a hash of it
_REACH = 3.0  # how far a constant may move from its start, as a factor
_NOISE = 0.02  # in the logarithm of estimates, which makes choices among plans smooth
_STAY = 0.01  # weight of the squared logarithm of how far a constant moved, relative to that of the regret's logarithm
_TIME = 0.1  # ... and of the mean error of the estimates' logarithm
_LIKELY = 1.7  # times the lowest estimate of a shape at the start: no fit would choose plans above
_KEPT = ("overlap_power",)  # an integer

_MAJORS = {"r": _ffi.Major.row, "c": _ffi.Major.column}


def kernels_beside(*paths):
    """{name: ``_ffi.KernelInfo``} of this version's kernels, and of those in a kernels.csv in a table's folder.

    Tables outlive kernels; ``described.write`` writes such a file.

    Raises:
      OSError: a file cannot be read.
    """
    kernels = described.cuda_kernels()
    for path in dict.fromkeys(pathlib.Path(path).parent / "kernels.csv" for path in paths):
        if path.exists():
            with open(path) as file:
                kernels = [*described.read(file), *kernels]
    return {kernel.name: kernel for kernel in kernels}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a problem, a plan, microseconds."""

    m: int
    n: int
    k: int
    majors: str  # of A and B, "r" or "c" each
    kernel: _ffi.KernelInfo
    schedule: str
    splits: int
    reduction: str
    raster: str
    swizzle: int
    us: float
    batch: int = 1

    @classmethod
    def of(cls, record, kernels):
        """Raises ValueError if the record is of none of the ``kernels``, which are by name."""
        x = record
        if (kernel := kernels.get(x["kernel"])) is None:
            remedy = "describe it in a kernels.csv beside the table"
            raise ValueError(f"no kernel of this version is called {x['kernel']}: {remedy}")
        return cls(
            int(x["m"]), int(x["n"]), int(x["k"]), x["majors"], kernel, x["schedule"], int(x["splits"]), x["reduction"],
            x["raster"], int(x["swizzle"]), float(x["us"]), int(x.get("batch") or 1),
        )  # fmt: skip

    @property
    def shape(self):
        return self.m, self.n, self.k

    def problem(self, of=_ffi.GemmProblem):
        """As an ``_ffi.GemmProblem``, or as the planner's."""
        type_a, type_b, (major_a, major_b) = self.kernel.type_a, self.kernel.type_b, (_MAJORS[x] for x in self.majors)
        lda, ldb = self.k if self.majors[0] == "r" else self.m, self.n if self.majors[1] == "r" else self.k
        m, n, k = self.shape
        strides = (m * k, k * n, m * n) if self.batch > 1 else (0, 0, 0)
        type_d = _ffi.Type.bf16 if type_a.bits == 8 else type_a
        parts = type_a, type_b, type_d, self.kernel.math, major_a, major_b, lda, ldb, n, *strides
        return of(self.batch, m, n, k, *parts)

    def native(self):
        return _ffi.Schedule(_ffi.ScheduleKind[self.schedule], self.splits, _ffi.Reduction[self.reduction])

    def order(self):
        return _ffi.Raster.along_m if self.raster == "m" else _ffi.Raster.along_n, self.swizzle


def is_held_out(shape):
    return zlib.crc32(repr(shape).encode()) % HELD_OUT == 0


def read(path):
    """The records of a CSV file, gzipped or not.

    Raises:
      OSError: it cannot be read.
      ValueError: it lacks one of ``COLUMNS``.
    """
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {min(missing)}")
        return list(reader)


def tables_of(records, kernels, machine, device):
    """``Table``s of the records by set (a column that may be missing), type and majorness, except those beside XLA.

    Raises:
      ValueError: a record is of none of the ``kernels``, which are by name.
    """
    rows = collections.defaultdict(list)
    for x in records:
        if not x.get("rule"):
            row = Row.of(x, kernels)
            rows[x.get("set", ""), row.kernel.type_a.name, row.majors].append(row)
    return [Table(key, group, machine, device) for key, group in sorted(rows.items())]


class Table:
    """Measured plans of some shapes, of one type and majorness.

    Plans that differ only in the order of tiles count once, with the order that the planner ranks first. Plans with
    equal estimates are ranked by name, since tables may be sorted by time.
    """

    def __init__(self, key, rows, machine, device):
        rows = sorted(rows, key=lambda row: (row.kernel.name, row.schedule, row.splits))
        needs = _batch(rows, device).needs(machine.native)
        orders: dict[tuple, int] = {}
        for at, row in enumerate(rows):
            plan = row.shape, row.kernel.name, row.schedule, row.splits, row.reduction
            orders[plan] = min(orders.get(plan, at), at, key=needs.__getitem__)
        best: dict[tuple, float] = collections.defaultdict(lambda: np.inf)
        for row in rows:
            best[row.shape] = min(best[row.shape], row.us)
        self._set(key, [rows[at] for at in orders.values()], best, device)

    def _set(self, key, rows, best, device):
        self.key, self.rows, self._best, self._device = key, rows, best, device
        self._batch = _batch(rows, device)
        shapes = sorted(best)
        number = {shape: at for at, shape in enumerate(shapes)}
        self._shape = np.array([number[row.shape] for row in rows])
        self._us = np.log([row.us for row in rows])
        self._log_regrets = self._us - np.log([best[row.shape] for row in rows])
        self.held_out = np.array([is_held_out(shape) for shape in shapes])

    def likely(self, machine):
        """The plans that a fit might choose if it starts at ``machine``."""
        estimates, least = self._estimates(machine)
        rows = [row for row, above in zip(self.rows, estimates - least, strict=True) if above < np.log(_LIKELY)]
        table = Table.__new__(Table)
        table._set(self.key, rows, self._best, self._device)
        return table

    def _estimates(self, machine):
        """(logarithm of each row's estimate, the lowest of its shape)."""
        estimates = np.log(self._batch.microseconds(machine.native))
        least = np.full(len(self.held_out), np.inf)
        np.minimum.at(least, self._shape, estimates)
        return estimates, least[self._shape]

    def log_regrets(self, machine):
        """The logarithm of each shape's regret: the time of the plan with the lowest estimate over the best time."""
        estimates, least = self._estimates(machine)
        at = np.flatnonzero(estimates == least)
        _, first = np.unique(self._shape[at], return_index=True)
        return self._log_regrets[at[first]]

    def expected(self, machine):
        """Two logarithms for the shapes that are not held out: the mean regret if plans are chosen with the weight
        exp(-gap / _NOISE), where gap is from the lowest estimate; and the mean error of good plans' estimates."""
        estimates, least = self._estimates(machine)
        weights = np.exp(-np.minimum((estimates - least) / _NOISE, 50.0))
        log_regrets = np.bincount(self._shape, weights * self._log_regrets) / np.bincount(self._shape, weights)
        near = (self._log_regrets < 0.2) & ~self.held_out[self._shape]
        error = np.abs(estimates - self._us)[near]
        return np.mean(log_regrets[~self.held_out]), np.mean(error) if error.size else 0.0


def _batch(rows, device):
    kernels, problems = [row.kernel for row in rows], [row.problem() for row in rows]
    schedules, orders = [row.native() for row in rows], [row.order() for row in rows]
    return _ffi.Batch(kernels, problems, schedules, orders, device.native(), machines.machine_of(device).native)


def regret(tables, machine, held_out=None):
    """The geometric mean over all shapes, over those held out (True), or over the others (False)."""
    log_regrets = [
        table.log_regrets(machine)[slice(None) if held_out is None else table.held_out == held_out] for table in tables
    ]
    return float(np.exp(np.mean(np.concatenate(log_regrets)))) if sum(map(len, log_regrets)) else float("nan")


def fit(tables, start, steps=25, progress=lambda step: None):
    """The ``Machine`` whose constants give the best choices among the plans of tables, and accurate estimates.

    Held-out shapes are not used. Constants stay within a factor of ``_REACH`` of ``start``, and do not move if no plan
    depends on them. ``progress`` is called after each of at most ``steps`` steps.
    """
    from scipy.optimize import minimize

    names, first = zip(*((name, value) for name, value in start.constants if name not in _KEPT), strict=True)
    tables = [table.likely(start) for table in tables if not table.held_out.all()]
    # Larger tables weigh more, but less than in proportion to their shapes.
    weights = np.sqrt([np.sum(~table.held_out) for table in tables])

    def machine(x):
        return start.replace(**dict(zip(names, (np.array(first) * np.exp(x)).tolist(), strict=True)))

    def cost(x):
        now = machine(x)
        log_regret, error = np.average([table.expected(now) for table in tables], axis=0, weights=weights)
        return log_regret + _TIME * error + _STAY * np.sum(np.square(x))

    def with_gradient(x):
        step = 0.01
        moves = step * np.eye(len(x))
        return cost(x), np.array([cost(x + move) - cost(x - move) for move in moves]) / (2 * step)

    count = iter(range(1, steps + 1))
    reach = np.log(_REACH)
    optimum = minimize(
        with_gradient, np.zeros(len(names)), jac=True, method="L-BFGS-B", bounds=[(-reach, reach)] * len(names),
        callback=lambda _: progress(next(count, steps)), options=dict(maxiter=steps),
    )  # fmt: skip
    return machine(optimum.x)


def limits(records, kernels, machine):
    """The ``Machine`` with the limits that lose least by leaving products to XLA, of the rules that records are for.

    A loss is the logarithm of the time of what a limit chooses over that of the other. Of limits that lose as little,
    the nearest to the machine's is taken.

    Raises:
      ValueError: a record is of none of the ``kernels``, which are by name.
    """
    gains: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for x in records:
        if rule := x.get("rule"):
            row = Row.of(x, kernels)
            value = left_to_xla.RULES["cuda"][rule].value(row.problem(GemmProblem), machine)
            if value is not None:
                gains[rule].append((value, float(np.log(row.us / float(x["xla_us"])))))
    found = dict(machine.limits)
    for rule, pairs in gains.items():
        values = sorted(value for value, _ in pairs)
        candidates = [found[rule], values[0] / 2, *values]
        gain = {limit: sum(gain for value, gain in pairs if value <= limit) for limit in candidates}
        found[rule] = max(candidates, key=lambda limit: (gain[limit], -abs(np.log(limit / found[rule]))))
    return dataclasses.replace(machine, limits=tuple(found.items()))
