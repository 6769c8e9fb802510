"""``python -m jax_streamk bench``: compares every shape with XLA's default, in one process on the same operands.

examples:
  python -m jax_streamk bench examples/shapes.csv
      shapes of your own, each as XLA's default and as ours
  python -m jax_streamk bench --set decode_llm --sample 40 --measure device --out decode.json
      40 shapes of a set, their time on the device alone, stored after every shape
  python -m jax_streamk bench --from decode.json --plot plots
      what was measured before, drawn
  python -m jax_streamk bench --groups moe_decode --measure device --out moe.json
      ragged products of experts, also beside dense products of the same size
  python -m jax_streamk bench --set weights --weights int4 --group 128 --out int4.json
      products by quantized weights, also beside those by weights that are not
  python -m jax_streamk bench --set weights --dtype float8_e4m3fn --scales 128x128
      products of float8 with scales per block, also beside XLA's without scales
  python -m jax_streamk bench --set decode_llm --batch-invariant --out invariant.json
      what it costs that a row's bits do not depend on the batch
  python -m jax_streamk bench --programs gpt2 --limit 500 --out programs.json
      programs of this folder's benchmarks/programs, as they are and under accelerate
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_streamk
from jax_streamk.device import device_of
from jax_streamk.product.epilogue import ACTIVATIONS
from jax_streamk.tools import float8, groups, programs, results, shapes, sides, weights
from jax_streamk.tools.info import driver
from jax_streamk.tools.results import recorded
from jax_streamk.tuning import timing
from jax_streamk.tuning.measure import check_memory
from jax_streamk.tuning.programs import Program, repeat, wall_sample

# Relative to the largest entry. Rounding, even TF32 against float32, stays far below; a wrong sum does not.
GROSS_ERROR = {"bfloat16": 0.02, "float16": 0.02, "float32": 0.01, "float64": 1e-9, "int8": 0} | dict.fromkeys(
    float8.NAMES, 0.02
)
_ONLY_IF_SET = "gated", "batch_invariant"  # fields of a result's task
_NAMED_BY = "m", "n", "k", "trans_a", "trans_b", "batch", "groups", "routing", "pass_"


def add_arguments(parser):
    what = shapes.add_arguments(parser)
    what.add_argument("--from", dest="result", metavar="RESULT.json", help="show an earlier result")
    what.add_argument(
        "--report", type=pathlib.Path, metavar="DIR", help="summarize all results in DIR: a Markdown table per machine"
    )
    what.add_argument(
        "--programs",
        nargs="*",
        metavar="NAME",
        help=f"programs, each beside itself under accelerate: all of {programs.FOLDER}, its files or programs of these "
        "names or patterns, or .py files of your own",
    )
    groups.add_argument(what)
    parser.add_argument("--small", action="store_true", help="--programs at the size that tests have, for a look at it")
    parser.add_argument(
        "--dtype",
        type=shapes.dtype,
        default="bfloat16",
        choices=GROSS_ERROR,
        metavar="DTYPE",
        help="of operands and result; int8 has an int32 result, float8 one of bfloat16 (%(default)s): "
        + ", ".join(GROSS_ERROR),
    )
    parser.add_argument(
        "--precision", choices=["default", "high", "highest"], default="default", help="of float32 products"
    )
    weights.add_arguments(parser)
    float8.add_arguments(parser)
    activations = ["none", *filter(None, ACTIVATIONS)]
    parser.add_argument(
        "--linear",
        choices=activations,
        metavar="ACTIVATION",
        help=f"linear layers with a bias: {', '.join(activations)}",
    )
    parser.add_argument(
        "--gated",
        choices=activations,
        metavar="ACTIVATION",
        help="gated products without biases, of two matrices of each shape's B, with one of these activations; of "
        "--groups the forward passes",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="ours also under Auto(batch_invariant=True), of shapes and programs",
    )
    kinds = "; ".join(map(": ".join, sides.MEASURES.items()))
    parser.add_argument(
        "--measure",
        action="append",
        choices=sides.MEASURES,
        help=f"may be repeated; without it, all. {kinds}",
    )
    parser.add_argument(
        "--rounds",
        type=shapes.positive,
        help="rounds, each of which times the sides in order and in reverse (2, for programs 4)",
    )
    parser.add_argument("--no-peers", action="store_true", help="compare with XLA only, not with other libraries")
    parser.add_argument(
        "--limit",
        type=shapes.not_negative,
        default=math.inf,
        metavar="SECONDS",
        help="start nothing new after this time",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="OUT.json",
        help="written as it grows; at the end also the table, as OUT.md",
    )
    parser.add_argument("--resume", action="store_true", help="continue the result in OUT.json")
    parser.add_argument("--plot", type=pathlib.Path, metavar="DIR", help="write plots to DIR, as SVG and PNG")
    parser.set_defaults(default=parser.get_default)


def run(arguments):
    needed = ["rich"] + ["matplotlib"] * (arguments.plot is not None)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        arguments.error(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from jax_streamk.tools import report

    if arguments.report:
        return _report(arguments, report)
    interrupted = False
    if arguments.result:
        result = _load(arguments.result, arguments.error)
    else:
        result, interrupted = measure_all(arguments, report)
    report.show(result)
    if arguments.plot and (result["rows"] or not interrupted):
        from jax_streamk.tools import plots

        print("wrote", *_plotted(plots.write, result, arguments.plot))
    if interrupted:
        return 130
    ours = [row["sides"].get(sides.OURS, {}) for row in result["rows"]]
    return int(any(side.get("wrong") or "error" in side for side in ours))


def _report(arguments, report):
    try:
        machines = report.by_machine(results.load_folder(arguments.report))
    except (OSError, ValueError) as reason:
        arguments.error(str(reason))
    print(report.digest(machines), end="")
    if arguments.plot:
        from jax_streamk.tools import plots

        print("wrote", *_plotted(plots.write_digest, machines, arguments.plot), file=sys.stderr)
    return 0


def _plotted(write, what, folder):
    try:
        return write(what, folder)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--plot {folder}: {error}") from None


def _load(path, error):
    try:
        return results.load(path)
    except (OSError, ValueError) as reason:
        error(str(reason))


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a command line asks to measure.

    Attributes:
      todo: shapes or programs.
      noun: what they are.
      settings: the fields of the result that are known before.
      row: measures one of ``todo``.
      link: the program that links dependent calls of shapes; None for programs.
      dtype: of the machine's limits.
    """

    todo: list[Any]
    noun: str
    settings: dict[str, Any]
    row: Callable[[Any], dict[str, Any]]
    link: Program | None
    dtype: str


def measure_all(arguments, report):
    """The result that a command line asks for, and whether the user interrupted it."""
    work = (_shapes if arguments.programs is None else _programs)(arguments)
    if arguments.out and arguments.out.suffix != ".json":
        arguments.error(f"--out {arguments.out}: its name must end in .json")
    if arguments.resume and not arguments.out:
        arguments.error("--resume needs --out")
    result = (
        dict(
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=_command(),
            machine=_machine(),
            limits={},
            link_us=None,
            rows=[],
        )
        | work.settings
    )
    if arguments.out and arguments.out.exists():
        if not arguments.resume:
            arguments.error(f"--out {arguments.out} exists; --resume goes on with it")
        before = _load(arguments.out, arguments.error)
        for key in ("format", "machine", "task", "measures", "rounds"):
            if _settings(before[key]) != _settings(result[key]):
                arguments.error(f"--resume: {key} of {arguments.out} is {before[key]}, and now {result[key]}")
        result = before | dict(command=f"{before['command']}; {result['command']}")
        result["rows"] = [row for row in result["rows"] if "skipped" not in row]
        result.pop("stopped", None)
    save = functools.partial(results.save, result, arguments.out) if arguments.out else lambda: None
    try:
        save()
    except OSError as error:
        arguments.error(f"--out {arguments.out}: cannot write it: {error}")
    if not result["limits"] and jax.default_backend() == "gpu":
        result["limits"] = _limits(work.dtype)
    if result["link_us"] is None and work.link:
        result["link_us"] = wall_sample(_warm(work.link))
    done = {_key(row) for row in result["rows"]}
    todo = [each for each in work.todo if _key_of(each) not in done]
    started, why, before = time.monotonic(), "by the user", len(result["rows"])
    try:
        with report.progress(todo) as advance:
            for each in todo:
                if time.monotonic() - started > arguments.limit:
                    why = f"at the limit of {arguments.limit:g} seconds"
                    break
                result["rows"].append(work.row(each))
                save()
                advance(result)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    if left := todo[len(result["rows"]) - before :]:
        result["stopped"] = f"{why}, {len(left)} {work.noun} unmeasured, the first {left[0]}"
    save()
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(report.markdown(result))
    return result, interrupted


def _shapes(arguments):
    if arguments.small:
        arguments.error("--small is a size of --programs")
    is_float8 = arguments.dtype in float8.NAMES
    kind = groups if arguments.groups is not None else float8 if is_float8 else weights if arguments.weights else shapes
    if is_float8 and kind is groups:
        arguments.error("--groups are of 16 and 32 bits")
    if kind is not float8 and arguments.scales != arguments.default("scales"):
        arguments.error("--scales are of --dtype float8_e4m3fn and float8_e5m2")
    if kind is not weights and arguments.group:
        arguments.error("--group is of --weights")
    try:
        todo = kind.chosen(arguments)
    except (OSError, ValueError) as error:
        arguments.error(str(error))
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if arguments.batch_invariant and kind is not shapes:
        arguments.error("--batch-invariant is of products of matrices, and of programs")
    if arguments.linear and arguments.gated:
        arguments.error("--linear and --gated are two kinds of layers")
    if arguments.dtype == "int8" and (arguments.linear or arguments.gated):
        arguments.error("--linear and --gated are of floating-point numbers")
    if arguments.gated and any(shape.batch > 1 or shape.trans_a for shape in todo):
        arguments.error("--gated multiplies one row-major A: shapes with a batch or trans_a are not for it")
    module = sides if kind is shapes else kind
    task = module.Task.of(arguments)
    gpu = jax.default_backend() == "gpu"
    measures, notes = [name for name in sides.MEASURES if name in (arguments.measure or sides.MEASURES)], []
    link = sides.link_program()
    if "device" in measures and (why := "a CPU has no profile of kernels" if not gpu else _no_profile(link)):
        measures.remove("device")
        notes.append(f"no device times: {why}")
    if not measures:
        arguments.error(f"--measure {' '.join(arguments.measure)}: {notes[0]}")
    builders, absent = ({}, {}) if arguments.no_peers else module.peers(task)
    notes += [f"not measured: {name}: {why}" for name, why in absent.items()]
    if task.xla_precision != task.precision:
        notes.append(f"XLA's precision is {task.xla_precision.name}, as exact as ours")
    rounds = arguments.rounds or 2
    of_task = {name: x for name, x in dataclasses.asdict(task).items() if name not in _ONLY_IF_SET or x}
    settings = dict(format=results.FORMAT, task=of_task, measures=measures, rounds=rounds, notes=notes)
    row = lambda shape: measure(task, shape, builders, measures, rounds, gpu)
    return _Work(todo, "shapes", settings, row, link, task.dtype)


def _programs(arguments):
    of_task = "dtype", "precision", "linear", "gated", "weights", "group", "scales"
    for name in ("column_major", "sample", *of_task, "measure", "no_peers"):
        if getattr(arguments, name) != arguments.default(name):
            arguments.error(f"--{name.replace('_', '-')} is of shapes: it changes nothing in --programs")
    try:
        todo = programs.chosen(arguments.programs)
    except (OSError, ValueError) as error:
        arguments.error(str(error))
    size, rounds = "small" if arguments.small else "real", arguments.rounds or 4
    task = dict(size=size) | dict(batch_invariant=True) if arguments.batch_invariant else dict(size=size)
    settings = dict(format=results.PROGRAMS_FORMAT, task=task, measures=[programs.MEASURE], rounds=rounds, notes=[])
    row = lambda program: programs.measure(program, size, rounds, arguments.batch_invariant)
    return _Work(todo, "programs", settings, row, None, "bfloat16")


def _key(row):
    return row["program"] if "program" in row else tuple(row.get(name) for name in _NAMED_BY)


def _key_of(each):
    return (
        each.name if isinstance(each, programs.UserProgram) else tuple(getattr(each, name, None) for name in _NAMED_BY)
    )


def _settings(value):
    return {key: x for key, x in value.items() if key != "load_average"} if isinstance(value, dict) else value


def measure(task, shape, peers, measures, rounds, gpu):
    """A shape's row in a result."""
    size = task.bytes(shape)
    count, in_program = sides.calls_of(size, task.stored_bytes(shape))
    plan = task.plan(shape)
    row = dataclasses.asdict(shape) | dict(
        bytes=size, flops=task.flops(shape), rotated_bytes=size * in_program,
        calls_in_program=in_program,
        plan=dict(
            kernel=plan.kernel, schedule=str(plan.schedule), raster=plan.raster, swizzle=plan.swizzle,
            workspace_bytes=plan.workspace_bytes, estimate_us=plan.microseconds, reason=plan.reasons[0],
        ),
        sides={},
    )  # fmt: skip
    no_operands: dict[str, str] = {}
    with recorded(no_operands):
        if not gpu:
            check_memory(count * task.stored_bytes(shape))
        operands = jax.block_until_ready(task.operands(shape, count))
    if no_operands:
        row["sides"] = {sides.XLA: no_operands, sides.OURS: no_operands}
        return row
    builders = task.builders(shape)
    if plan.kernel is None:
        builders.pop(sides.OURS), builders.pop(sides.OUR_MATMUL, None)
    builders |= {name: functools.partial(build, shape) for name, build in peers.items()}
    programs, reference = {}, None
    for name, why in task.skipped(shape).items():
        row["sides"][name] = dict(skipped=why)
        builders.pop(name)
        if name == sides.XLA:
            with recorded(row["sides"][name]):
                reference = jax.jit(task.reference(shape))(*operands[0])
    for name, build in builders.items():
        side: dict[str, Any] = {}
        row["sides"][name] = side
        with recorded(side):
            built = build(operands, in_program)
            for each in measures:
                _warm(built[each])
            outs = built["device"].run()
            built["device"].wait(outs)
            first = jnp.from_dlpack(outs[0])
            reference = first if name == sides.XLA else reference
            if name not in (*sides.NOT_COMPARED, *weights.BOUNDS, float8.UNSCALED) and reference is not None:
                difference = _difference(first, reference)
                side |= dict(
                    max_difference=difference, wrong=difference is None or difference > GROSS_ERROR[task.dtype]
                )
            programs[name] = built
    samples: dict[str, dict[str, list[float]]] = {name: {each: [] for each in measures} for name in programs}
    for each in measures:
        for name in [*programs, *reversed(programs)] * rounds:
            side = row["sides"][name]
            if "error" in side:
                continue
            with recorded(side):
                if each == "device":
                    more, side["kernels"] = timing.device_samples(programs[name][each])
                else:
                    more = [wall_sample(programs[name][each])]
                samples[name][each] += more
    timed = {name: row["sides"][name] for name in programs if "error" not in row["sides"][name]}
    for name, side in timed.items():
        side |= {each: timing.summary(samples[name][each]) for each in measures}
        best = side[measures[0]]["median_us"] / 1e6
        side |= dict(bytes_per_s=size / best, flops_per_s=row["flops"] / best)
    if (xla := timed.get(sides.XLA)) is not None:
        for side in timed.values():
            side["ratio"] = {each: xla[each]["median_us"] / side[each]["median_us"] for each in measures}
    if plan.kernel is None:
        row["sides"][sides.OURS] = dict(fallback=True, ratio=dict.fromkeys(measures, 1.0))
    return row


def _warm(program):
    repeat(program, 1)
    return program


@jax.jit
def _relative_difference(x, y):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.max(jnp.abs(x.astype(wide) - y.astype(wide))) / jnp.max(jnp.abs(y.astype(wide)))


def _difference(x, y):
    """The largest absolute difference over the largest entry of y; None if it is not finite."""
    difference = float(_relative_difference(x, y))
    return difference if math.isfinite(difference) else None


def _no_profile(program):
    """Why device times cannot be measured; None if they can."""
    try:
        timing.device_samples(_warm(program))
    except RuntimeError as error:
        return str(error)


def _limits(dtype):
    """What the GPU reaches: bytes per second in an elementwise function, FLOP per second in XLA's large product."""
    x, size = jnp.ones(1 << 26), 8192
    stream, square = (
        wall_sample(_warm(sides.jax_programs(function, [operands], 1)["device"]), 0.1)
        for function, operands in (
            (jnp.negative, (x,)),
            (jnp.matmul, sides.Task(dtype).operands(shapes.Shape(size, size, size), 1)[0]),
        )
    )
    return dict(bytes_per_s=2 * x.nbytes / stream * 1e6, flops_per_s=2 * size**3 / square * 1e6)


def _command():
    return " ".join(["python -m jax_streamk", *sys.argv[1:]])


def _machine():
    (device,) = jnp.zeros(()).devices()
    planned = device_of(device)
    out = dict(
        device=planned.kind,
        platform=planned.platform,
        arch=planned.arch,
        sms=planned.sms,
        kernels=len(jax_streamk.kernels()),
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
    )
    if planned.platform == "cpu":
        return out | dict(load_average=os.getloadavg()[0])
    return out | dict(driver=driver(), runtime=" ".join(device.client.platform_version.split()))
