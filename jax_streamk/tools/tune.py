"""``python -m jax_streamk tune``: measures the fastest plan of each product on this machine, and stores it.

examples:
  python -m jax_streamk tune examples/shapes.csv
      shapes of your own in bfloat16; programs find the plans in your cache folder
  python -m jax_streamk tune --set strong_scaling --sample 8 --dtype float16 --limit 600
      some shapes of a set in float16, for ten minutes
  python -m jax_streamk tune --groups moe_decode
      ragged products of the experts of public models, with groups of about the same size
"""

import contextlib
import dataclasses
import math
import time

import jax
import jax.numpy as jnp

from jax_streamk import compat, schedules
from jax_streamk.device import device_of
from jax_streamk.lower import lowering
from jax_streamk.plan import alternatives
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.product.dense import Dense
from jax_streamk.product.epilogue import ACTIVATIONS, Epilogue
from jax_streamk.product.ragged import Ragged
from jax_streamk.product.spec import Product
from jax_streamk.text import duration
from jax_streamk.tools import groups, shapes
from jax_streamk.tuning import tune, tuned
from jax_streamk.tuning.measure import Memory


def add_arguments(parser):
    groups.add_argument(shapes.add_arguments(parser))
    parser.add_argument("--dtype", action="append", type=shapes.dtype, help="of operands (bfloat16); may be repeated")
    parser.add_argument("--out-dtype", type=shapes.dtype, help="of results (of int8 int32, else JAX's choice)")
    activations = ["none", *filter(None, ACTIVATIONS)]
    parser.add_argument(
        "--gated",
        choices=activations,
        metavar="ACTIVATION",
        help=f"gated products of two matrices of each shape's B, in one kernel or apart: {', '.join(activations)}",
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="plans for Auto(batch_invariant=True), which has some of its own"
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="where plans are stored (the user's cache folder, which programs read)"
    )
    parser.add_argument(
        "--limit",
        type=shapes.not_negative,
        default=math.inf,
        metavar="SECONDS",
        help="start no new product after this time",
    )
    parser.add_argument("--again", action="store_true", help="measure also what is already stored")


def run(arguments):
    try:
        wanted = (shapes if arguments.groups is None else groups).chosen(arguments)
        store = tuned.store_of(arguments.cache)
    except (OSError, ValueError) as error:
        arguments.error(str(error))
    epilogue = Epilogue()
    if arguments.gated:
        if any(shape.batch > 1 or shape.trans_a for shape in wanted):
            arguments.error("--gated multiplies one row-major A: shapes with a batch or trans_a are not for it")
        epilogue = Epilogue(None if arguments.gated == "none" else arguments.gated, gate="pair")
    try:
        device = device_of(None)
        schedule = schedules.Auto(batch_invariant=arguments.batch_invariant)
        dtypes = arguments.dtype or ["bfloat16"]
        problems, left = _plan(wanted, dtypes, arguments.out_dtype, device, epilogue, schedule)
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"tune: {error}") from None
    try:
        if problems:
            store.check_writable(device)
    except OSError as error:
        raise SystemExit(f"tune: plans cannot be stored in {store.directory}: {error}") from None
    console, progress = progress_of("tune")
    for product, why in left.items():
        console.print(f"{product}: {why}")

    stored = (
        {}
        if arguments.again
        else {problem: tuned_plan for problem, tuned_plan in store.plans(device).items() if tuned_plan.is_of_this_xla}
    )
    before = {problem: stored[problem] for problem in problems if problem in stored}
    now, failed, ended, interrupted = {}, 0, "", False
    memory, started = Memory(device), time.monotonic()
    try:
        open_ = [problem for problem in problems if problem not in before]
        with progress if open_ else contextlib.nullcontext():
            for problem in progress.track(open_, description="tuning"):
                if time.monotonic() - started > arguments.limit:
                    ended = f", the rest not started within {arguments.limit:g} s"
                    break
                try:
                    tuned_plan = tune.fastest(problem, memory)
                except Exception as error:  # running out of memory raises many types
                    failed += 1
                    console.print(f"{problems[problem]}: failed: {type(error).__name__}: {error}")
                    continue
                store.add(device, problem, tuned_plan)
                now[problem] = tuned_plan
                console.print(f"{problems[problem]}: {_summary_of(tuned_plan)}")
    except KeyboardInterrupt:
        ended, interrupted = ", interrupted", True
    except OSError as error:
        raise SystemExit(f"tune: plans cannot be stored any more: {error}") from None

    counts = f"{len(now)} tuned, {len(before)} tuned before, {failed} failed{ended}"
    print(f"{len(problems)} product{'s' * (len(problems) != 1)}: {counts}")
    plans = [*before.values(), *now.values()]
    faster = sum(plan.is_left_to_xla for plan in plans)
    print(f"left to XLA: {len(left) + faster} ({len(left)} unmeasured, {faster} faster there)")
    if plans:
        ratios = [plan.planned_microseconds / plan.microseconds for plan in plans]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        changed = sum(ratio != 1 for ratio in ratios)
        print(
            f"{changed} of {len(plans)} plans differ from the planner's, whose time over theirs is {mean:.3f} in the "
            "geometric mean"
        )
        print(f"stored in {store.path(device)}")
    return 130 if interrupted else int(failed > 0)


def _plan(wanted, dtypes, out_dtype, device, epilogue, schedule):
    """The product of each problem that a kernel runs, and for the other products why they are left to XLA."""
    lowering.check_build(device.platform)
    problems: dict[GemmProblem, str] = {}
    left: dict[str, str] = {}
    for shape in wanted:
        if isinstance(shape, groups.Groups):
            shape = dataclasses.replace(shape, routing="uniform")  # what is measured
        for each in dtypes:
            result = out_dtype or shapes.result_dtype(each)
            name = f"{shape} {each}" + (f" -> {result}" if result else "")
            lhs, rhs = (jax.ShapeDtypeStruct(stored, each) for stored in shape.stored())
            kind: type[Product] = Dense
            types = dict(lhs=lhs, rhs=rhs)
            if isinstance(shape, groups.Groups):
                kind, types["group_sizes"] = Ragged, jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
            precision = compat.canonicalize_precision(None)
            product = kind(shape.dimension_numbers(), precision, result and jnp.dtype(result), epilogue)
            try:
                plan = alternatives.plan(product, types, schedule, device).plan
            except ValueError as error:  # of products that must be batch invariant
                left[name] = str(error)
                continue
            if plan.kernel is None:
                left[name] = plan.reasons[0]
            else:
                problems.setdefault(plan.problem, name)
    return problems, left


def _summary_of(tuned_plan):
    what, planners = duration(tuned_plan.microseconds), "by the planner's choice"
    beside = f"; XLA's product took {tuned_plan.xla_ratio:.2f} times as long" if tuned_plan.xla_ratio else ""
    beside += ", and is used" * tuned_plan.is_left_to_xla
    if tuned_plan.microseconds == tuned_plan.planned_microseconds:
        return f"{what} {planners}{beside}"
    splits = f", {tuned_plan.splits} splits, {tuned_plan.reduction}" if tuned_plan.splits > 1 else ""
    how = f"{tuned_plan.kernel}, {tuned_plan.schedule}{splits}, {tuned_plan.policy}"
    return f"{what} by {how}; {duration(tuned_plan.planned_microseconds)} {planners}{beside}"


def progress_of(command):
    """A console for what happens, and a progress bar, of rich.

    Raises:
      SystemExit: rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        raise SystemExit(f"{command}: rich is missing: pip install rich") from None
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "so far,",
        TimeRemainingColumn(),
        "left",
    )
    return console, Progress(*columns, console=console, speed_estimate_period=600)
