"""``python -m jax_streamk bench``: compares every shape with XLA's default, in one process on the same operands.

examples:
  python -m jax_streamk bench examples/shapes.csv
      shapes of your own, each as XLA's default and as ours
  python -m jax_streamk bench --set decode_llm --sample 40 --measure device --out decode.json
      40 shapes of a set, their time on the device alone, stored after every shape
  python -m jax_streamk bench --from decode.json --plot plots
      what was measured before, drawn
"""

import contextlib
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
from typing import Any

import jax
import jax.numpy as jnp

import jax_streamk
from jax_streamk.device import device_of
from jax_streamk.epilogue import ACTIVATIONS
from jax_streamk.tools import results, shapes, sides, timing
from jax_streamk.tools.info import driver
from jax_streamk.tuning.measure import ROTATED_BYTES
from jax_streamk.tuning.programs import repeat, wall_sample

# Relative to the largest entry. Rounding, even TF32 against float32, stays far below; a wrong sum does not.
GROSS_ERROR = {"bfloat16": 0.02, "float16": 0.02, "float32": 0.01, "float64": 1e-9}
MOST_CALLS, MOST_CALLS_IN_PROGRAM = 256, 64


def add_arguments(parser):
    what = shapes.add_arguments(parser)
    what.add_argument("--from", dest="result", metavar="RESULT.json", help="show an earlier result")
    what.add_argument(
        "--report", type=pathlib.Path, metavar="DIR", help="summarize all results in DIR: a Markdown table per machine"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=GROSS_ERROR, help="of operands and result (%(default)s)")
    parser.add_argument(
        "--precision", choices=["default", "high", "highest"], default="default", help="of float32 products"
    )
    activations = ["none", *filter(None, ACTIVATIONS)]
    parser.add_argument(
        "--linear",
        choices=activations,
        metavar="ACTIVATION",
        help=f"linear layers with a bias: {', '.join(activations)}",
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
        default=2,
        help="rounds, each of which times the sides in order and in reverse (%(default)s)",
    )
    parser.add_argument("--no-peers", action="store_true", help="compare with XLA only, not with other libraries")
    parser.add_argument(
        "--limit",
        type=shapes.not_negative,
        default=math.inf,
        metavar="SECONDS",
        help="start no new shape after this time",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="OUT.json",
        help="written after every shape; at the end also the table, as OUT.md",
    )
    parser.add_argument("--resume", action="store_true", help="continue the result in OUT.json")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="DIR", help="write plots of roofline and ratios to DIR, as SVG and PNG"
    )


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
    ours = [row["sides"][sides.OURS] for row in result["rows"]]
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


def _plotted(write, measured, folder):
    try:
        return write(measured, folder)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--plot {folder}: {error}") from None


def _load(path, error):
    try:
        return results.load(path)
    except (OSError, ValueError) as reason:
        error(str(reason))


def measure_all(arguments, report):
    """The result that a command line asks for, and whether the user interrupted it."""
    try:
        todo = shapes.chosen(arguments)
    except (OSError, ValueError) as error:
        arguments.error(str(error))
    if arguments.out and arguments.out.suffix != ".json":
        arguments.error(f"--out {arguments.out}: its name must end in .json")
    if arguments.resume and not arguments.out:
        arguments.error("--resume needs --out")
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    precision = None if arguments.precision == "default" else arguments.precision
    task = sides.Task(arguments.dtype, precision, arguments.linear)
    gpu = jax.default_backend() == "gpu"
    measures, notes = [name for name in sides.MEASURES if name in (arguments.measure or sides.MEASURES)], []
    link = sides.link_program()
    if "device" in measures and (why := "a CPU has no profile of kernels" if not gpu else _no_profile(link)):
        measures.remove("device")
        notes.append(f"no device times: {why}")
    if not measures:
        arguments.error(f"--measure {' '.join(arguments.measure)}: {notes[0]}")
    builders, absent = ({}, {}) if arguments.no_peers else sides.peers(task)
    notes += [f"not measured: {name}: {why}" for name, why in absent.items()]
    if task.xla_precision != task.precision:
        notes.append(f"XLA's precision is {task.xla_precision.name}, as exact as ours")
    result = dict(
        format=results.FORMAT,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=_command(),
        machine=_machine(),
        task=dataclasses.asdict(task),
        measures=measures,
        rounds=arguments.rounds,
        notes=notes,
        limits={},
        link_us=None,
        rows=[],
    )
    if arguments.out and arguments.out.exists():
        if not arguments.resume:
            arguments.error(f"--out {arguments.out} exists; --resume continues it")
        before = _load(arguments.out, arguments.error)
        for key in ("machine", "task", "measures", "rounds"):
            if _settings(before[key]) != _settings(result[key]):
                arguments.error(f"--resume: {key} in {arguments.out} is {before[key]}, now it is {result[key]}")
        result = before | dict(command=f"{before['command']}; {result['command']}")
        result.pop("stopped", None)
    save = functools.partial(results.save, result, arguments.out) if arguments.out else lambda: None
    try:
        save()
    except OSError as error:
        arguments.error(f"--out {arguments.out}: cannot write it: {error}")
    if result["link_us"] is None:
        result["link_us"] = wall_sample(_warm(link))
        result["limits"] = _limits(task.dtype) if gpu else {}
    done = {_key(row) for row in result["rows"]}
    todo = [shape for shape in todo if _key(dataclasses.asdict(shape)) not in done]
    started, why, before = time.monotonic(), "by the user", len(result["rows"])
    try:
        with report.progress(todo) as advance:
            for shape in todo:
                if time.monotonic() - started > arguments.limit:
                    why = f"at the limit of {arguments.limit:g} seconds"
                    break
                result["rows"].append(measure(task, shape, builders, measures, arguments.rounds, gpu))
                save()
                advance(result)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    if left := todo[len(result["rows"]) - before :]:
        result["stopped"] = f"{why}, {len(left)} shapes unmeasured, the first {left[0]}"
    save()
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(report.markdown(result))
    return result, interrupted


def _key(row):
    return tuple(row[name] for name in ("m", "n", "k", "trans_a", "trans_b", "batch"))


def _settings(value):
    return {key: x for key, x in value.items() if key != "load_average"} if isinstance(value, dict) else value


def calls_of(size, gpu):
    """How many calls with operands of ``size`` bytes evict the first one's from L2, and how many a program makes."""
    count = max(8, min(MOST_CALLS, math.ceil(ROTATED_BYTES["cuda"] / size))) if gpu else 2
    return count, min(count, MOST_CALLS_IN_PROGRAM)


def measure(task, shape, peers, measures, rounds, gpu):
    """A shape's row in a result."""
    size = task.bytes(shape)
    count, in_program = calls_of(size, gpu)
    plan = task.plan(shape)
    row = dataclasses.asdict(shape) | dict(
        bytes=size, flops=2 * shape.batch * shape.m * shape.n * shape.k, rotated_bytes=size * in_program,
        calls_in_program=in_program,
        plan=dict(
            kernel=plan.kernel, schedule=str(plan.schedule), raster=plan.raster, swizzle=plan.swizzle,
            workspace_bytes=plan.workspace_bytes, estimate_us=plan.microseconds, reason=plan.reasons[0],
        ),
        sides={},
    )  # fmt: skip
    no_operands: dict[str, str] = {}
    with _recorded(no_operands):
        operands = jax.block_until_ready(task.operands(shape, count))
    if no_operands:
        row["sides"] = {sides.XLA: no_operands, sides.OURS: no_operands}
        return row
    builders = {
        name: functools.partial(sides.jax_programs, function) for name, function in task.functions(shape).items()
    }
    if plan.kernel is None:
        builders.pop(sides.OURS), builders.pop(sides.OUR_MATMUL, None)
    builders |= {name: functools.partial(build, shape) for name, build in peers.items()}
    programs, reference = {}, None
    for name, build in builders.items():
        side: dict[str, Any] = {}
        row["sides"][name] = side
        with _recorded(side):
            built = build(operands, in_program)
            for each in measures:
                _warm(built[each])
            outs = built["device"].run()
            built["device"].wait(outs)
            first = jnp.from_dlpack(outs[0])
            reference = first if name == sides.XLA else reference
            if name not in (sides.XLA, sides.OUR_MATMUL) and reference is not None:
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
            with _recorded(side):
                if each == "device":
                    more, side["kernels"] = timing.device_samples(programs[name][each])
                else:
                    more = [wall_sample(programs[name][each])]
                samples[name][each] += more
    for name, side in row["sides"].items():
        if "error" not in side:
            side |= {each: timing.summary(samples[name][each]) for each in measures}
            best = side[measures[0]]["median_us"] / 1e6
            side |= dict(bytes_per_s=size / best, flops_per_s=row["flops"] / best)
    xla = row["sides"][sides.XLA]
    for side in row["sides"].values():
        if "error" not in side and "error" not in xla:
            side["ratio"] = {each: xla[each]["median_us"] / side[each]["median_us"] for each in measures}
    if plan.kernel is None:
        row["sides"][sides.OURS] = dict(fallback=True, ratio=dict.fromkeys(measures, 1.0))
    return row


@contextlib.contextmanager
def _recorded(side):
    """Records an exception as the error of ``side``, so that the other sides are still measured."""
    try:
        yield
    except Exception as error:
        side["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:300]


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
