"""What ``python -m jax_streamk fit`` measures: a fixed set of problems, and the planner's first plans of each."""

import collections
import random
import statistics

from jax_streamk import _ffi
from jax_streamk.plan import planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.tuning.tuned import Trial

_LISTED = 400  # candidates requested from the planner
_OF_KERNEL, _PLANS = 3, 64  # most plans per kernel, and per problem
_LIKELY = 2.5  # times the lowest estimate: slower plans are not measured
_CLOSE = 1.25  # times the best measured: plans within it are measured again, in turn
_ROUNDS = 3  # of turns: a GPU at its power limit slows down within milliseconds, so the first plan would look fast

# (m, n, k): few rows by large weights, small results with a long K, squares, ragged extents, large products.
_SHAPES = [
    *((m, n, 4096) for m in (1, 8, 16, 32, 64, 128) for n in (4096, 14336)),
    *((m, n, k) for m in (1, 8, 16, 32, 64, 128) for n, k in ((4096, 14336), (1024, 8192))),
    *((m, n, k) for m, n in ((64, 64), (128, 256), (256, 256), (512, 128)) for k in (4096, 16384, 65536)),
    *((size, size, size) for size in (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)),
    *((m, n, 1024) for m in (384, 1000, 2500) for n in (520, 1712, 7000)),
    *((m, n, k) for m in (200, 400) for n, k in ((4096, 4096), (2560, 10240), (12288, 3072))),
    *((2048, n, k) for n, k in ((512, 8192), (4096, 1024), (11008, 4096), (4096, 11008))),
]  # fmt: skip
_MISALIGNED = [
    (16, 50257, 768),
    (64, 8457, 2048),
    (1000, 1001, 999),
    (1000, 1024, 999),
    (512, 516, 260),
    (300, 404, 196),
]
_FEWER = [
    (16, 4096, 4096),
    (64, 4096, 14336),
    (128, 128, 16384),
    (512, 512, 512),
    (1024, 1024, 4096),
    (4096, 4096, 4096),
]
_KINDS = [("bf16", "rr", _SHAPES + _MISALIGNED), ("bf16", "rc", _FEWER), ("f32", "rr", _FEWER), ("f32", "rc", _FEWER)]
_KINDS += [("f64", "rr", _FEWER)]


def problems():
    """The fixed set, with all kinds interleaved, so that an interrupted measurement has some of each."""
    placed = [
        (at / len(shapes), type_, majors, shape)
        for type_, majors, shapes in _KINDS
        for at, shape in enumerate(_shuffled(shapes))
    ]
    return [_problem(*parts) for _, *parts in sorted(placed, key=lambda x: x[0])]


def _shuffled(shapes):
    return random.Random(0).sample(shapes, len(shapes))


def _problem(type_, majors, shape):
    m, n, k = shape
    type_, math = _ffi.Type[type_], _ffi.Math.tf32 if type_ == "f32" else _ffi.Math.native
    major_a, major_b = (_ffi.Major.row if x == "r" else _ffi.Major.column for x in majors)
    lda, ldb = k if majors[0] == "r" else m, n if majors[1] == "r" else k
    return GemmProblem(1, m, n, k, type_, type_, type_, math, major_a, major_b, lda, ldb, n, 0, 0, 0)


def record_of(problem):
    """A problem's columns of a table; its type is part of the kernel's name."""
    majors = "".join("r" if x == _ffi.Major.row else "c" for x in (problem.major_a, problem.major_b))
    return dict(majors=majors, m=problem.m, n=problem.n, k=problem.k, kernel=f"any_{problem.type_a.name}_")


def key_of(record):
    """A key for the problem of a record."""
    return *(int(record[x]) for x in "mnk"), record["majors"], record["kernel"].split("_")[1]


def measured(problem, memory):
    """Records of the planner's best plans of a problem, at most ``_PLANS``, measured on the device of ``memory``.

    Raises:
      RuntimeError: no plan could be measured.
    """
    candidates = planner.choose(problem, None, memory.device, listed=_LISTED).candidates
    rotation = memory.rotation(problem)
    of_kernel: collections.Counter[str] = collections.Counter()
    times: dict[Trial, list[float]] = {}
    for x in candidates:
        plan = Trial.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy))
        likely = x.cost.microseconds <= _LIKELY * candidates[0].cost.microseconds
        if not likely or of_kernel[plan.kernel] == _OF_KERNEL or len(times) == _PLANS:
            continue
        of_kernel[plan.kernel] += 1
        times[plan] = [statistics.median(rotation.time(plan.kernel, plan.native(), plan.policy))]
    if not times:
        raise RuntimeError("no kernel of this build runs it")
    close = [plan for plan in times if times[plan][0] < _CLOSE * min(times.values())[0]]
    for _ in range(_ROUNDS):
        for plan in random.sample(close, len(close)):
            times[plan] += rotation.time(plan.kernel, plan.native(), plan.policy, repeats=1)
    return [record(problem, plan, statistics.median(of)) for plan, of in times.items()]


def record(problem, plan, us):
    """The record of a ``Trial`` and its microseconds."""
    schedule = {name: getattr(plan, name) for name in ("kernel", "schedule", "splits", "reduction")}
    order = dict(raster=plan.policy.raster, swizzle=plan.policy.swizzle)
    return record_of(problem) | schedule | order | dict(us=f"{us:.2f}")
