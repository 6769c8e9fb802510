"""What ``python -m jax_streamk fit`` measures: the planner's first plans of fixed problems, and others beside XLA."""

import collections
import random
import statistics

from jax_streamk import _ffi, schedules
from jax_streamk.plan import planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.tuning import contest
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

# By the rules of ``left_to_xla``: a type, and (m, n, k, batch) on both sides of the limit. B is (n, k) of eight bits.
_BESIDE_XLA = {
    "few_k": ("bf16", [(m, n, k, 1) for m, n in ((2048, 2048), (8192, 512)) for k in (8, 16, 24, 32, 64, 128)]),
    "xla_earlier_us": ("bf16", [(1, n, k, 1) for n in (512, 1024, 2048) for k in (512, 1024, 2048)]),
    "small_tf32": ("f32", [(m, m, k, 1) for m in (32, 64, 128, 256) for k in (64, 256, 1024)]),
    "small_batched": ("bf16", [(m, m, m, batch) for m in (16, 32, 48, 64, 96, 128) for batch in (8, 256)]),
    "odd_rows": ("bf16", [(m, n, 1024, 1) for m in (40, 48, 64, 80, 96, 128) for n in (2001, 8001)]),
    "unaligned_k_of_tiles": ("bf16", [(2048, 2050, k, 1) for k in (64, 128, 256, 512, 768, 1024, 2048)]),
    "unaligned_k": ("bf16", [(1024, 2050, k, 1) for k in (36, 68, 100, 132, 196, 260, 388)]),
    "float8_along_k": (
        "e4m3",
        [(m, n, k, 1) for m in (64, 256, 512, 1024, 2048) for n, k in ((2048, 4096), (6144, 1024))],
    ),
}


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


def beside_xla():
    """(rule of ``left_to_xla``, problem) pairs, by which its limit is found."""
    return [
        (rule, _problem(type_, "rc" if type_ == "e4m3" else "rr", shape, batch))
        for rule, (type_, shapes) in _BESIDE_XLA.items()
        for *shape, batch in shapes
    ]


def _problem(type_, majors, shape, batch=1):
    m, n, k = shape
    type_, math = _ffi.Type[type_], _ffi.Math.tf32 if type_ == "f32" else _ffi.Math.native
    type_d = _ffi.Type.bf16 if type_.bits == 8 else type_
    major_a, major_b = (_ffi.Major.row if x == "r" else _ffi.Major.column for x in majors)
    lda, ldb = k if majors[0] == "r" else m, n if majors[1] == "r" else k
    strides = (m * k, k * n, m * n) if batch > 1 else (0, 0, 0)
    return GemmProblem(batch, m, n, k, type_, type_, type_d, math, major_a, major_b, lda, ldb, n, *strides)


def record_of(problem, rule=""):
    """A problem's columns of a table; its type is part of the kernel's name."""
    majors = "".join("r" if x == _ffi.Major.row else "c" for x in (problem.major_a, problem.major_b))
    beside_xla = dict(batch=problem.batch, rule=rule) if rule else {}
    return dict(majors=majors, m=problem.m, n=problem.n, k=problem.k, kernel=f"any_{problem.type_a.name}_") | beside_xla


def key_of(record):
    """A key for the problem of a record, and the rule that it was measured for, if any."""
    rule = record.get("rule") and (record["rule"], int(record["batch"]))
    return *(int(record[x]) for x in "mnk"), record["majors"], record["kernel"].split("_")[1], rule or None


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


def measured_beside_xla(rule, problem, device):
    """The one record of a problem for a rule: the planner's plan, its time and that of XLA's product.

    Raises:
      RuntimeError: no kernel runs it, or running failed.
    """
    plan = planner.plan_with(problem, schedules.Auto(), device, None)
    if plan.kernel is None:
        raise RuntimeError(plan.why_xla)
    ours, xla = contest.times(plan, has_ours=True, has_xla=True)
    trial = Trial.of(plan.kernel, plan.native_schedule(), plan.policy)
    return [record_of(problem, rule) | record(problem, trial, ours) | dict(xla_us=f"{xla:.2f}")]


def record(problem, plan, us):
    """The record of a ``Trial`` and its microseconds."""
    schedule = {name: getattr(plan, name) for name in ("kernel", "schedule", "splits", "reduction")}
    order = dict(raster=plan.policy.raster, swizzle=plan.policy.swizzle)
    return record_of(problem) | schedule | order | dict(us=f"{us:.2f}")
