"""``python -m jax_streamk fit``: measures plans on this GPU and fits the constants of the planner's estimates.

examples:
  python -m jax_streamk fit
      20 minutes of measuring on the GPU that is here; the planner finds the result by itself
  python -m jax_streamk fit --from table.csv --device h100 --out h100.json
      to plans that were measured before, on any machine
"""

import csv
import datetime
import operator
import pathlib
import re
import shlex
import time

from jax_streamk import machines
from jax_streamk.device import NAMED, device_named
from jax_streamk.lower import lowering
from jax_streamk.tools import shapes
from jax_streamk.tools.tune import progress_of
from jax_streamk.tuning import fit, plans
from jax_streamk.tuning.measure import Memory

_STEPS = 25


def add_arguments(parser):
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=pathlib.Path,
        help="machine file to write (in the user's data folder, where plans find it)",
    )
    parser.add_argument(
        "--minutes", type=shapes.not_negative, default=20, help="start no new shape after this time (20)"
    )
    parser.add_argument("--resume", action="store_true", help="keep what was measured for the same file")
    parser.add_argument(
        "--from", dest="tables", nargs="+", metavar="TABLE", help="fit to tables of measured plans; needs no GPU"
    )
    parser.add_argument("--device", choices=NAMED, help="GPU that the tables were measured on (this one)")


def run(arguments):
    try:
        measured_before = [record for table in arguments.tables or () for record in fit.read(table)]
    except (OSError, ValueError) as error:
        arguments.error(str(error))
    try:
        device = device_named(arguments.device)
        if device.platform != "cuda":
            raise ValueError(f"it fits constants of GPUs, and this is {device.kind or device.platform}: see --from")
        out = arguments.out or machines.user_directory() / f"{_slug(device.kind)}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        console, progress = progress_of("fit")
        start = machines.derived(device)
        if arguments.tables:
            records = measured_before
        else:
            lowering.check_build(device.platform)
            records = _measured(device, out.with_suffix(".csv"), arguments, console, progress)
        kernels = fit.kernels_beside(*arguments.tables or ())
        tables = fit.tables_of(records, kernels, start, device)
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"fit: {error}") from None
    if not tables:
        raise SystemExit("fit: no plan was measured")

    with progress:
        task = progress.add_task("fitting", total=_STEPS)
        fitted = fit.fit(tables, start, _STEPS, lambda step: progress.update(task, completed=step))
    for machine, name in ((start, "before"), (fitted, "fitted")):
        held_out, others = (fit.regret(tables, machine, which) for which in (True, False))
        print(f"regret {name}: {held_out:.4f} on shapes that are held out, {others:.4f} on the others")
    before = machines.machine_of(device)
    fitted = machines.Machine(
        out.stem, (device.kind,), device.arch, fitted.topology, fitted.constants, before.launch_policy, before.limits,
        date=datetime.date.today().isoformat(), command=_command(arguments),
    )  # fmt: skip
    try:
        out.write_text(fit.limits(records, kernels, fitted).text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"fit: {error}") from None
    print(f"stored in {out}")
    return 0


def _measured(device, path, arguments, console, progress):
    """Records of fixed sets of problems, written to a file as they are measured."""
    before = fit.read(path) if arguments.resume and path.exists() else []
    done = {plans.key_of(record) for record in before}
    # In turns, so that a limit of time shortens both.
    sets = plans.beside_xla(), [("", problem) for problem in plans.problems()]
    turns = [(i / len(each), pair) for each in sets for i, pair in enumerate(each)]
    asked = [pair for _, pair in sorted(turns, key=operator.itemgetter(0))]
    left = [(rule, problem) for rule, problem in asked if plans.key_of(plans.record_of(problem, rule)) not in done]
    memory, started, records = Memory(device), time.monotonic(), list(before)
    with path.open("a" if before else "w", newline="") as file, progress:
        writer = csv.DictWriter(file, fit.COLUMNS + fit.BESIDE_XLA)
        if not before:
            writer.writeheader()
        for i, (rule, problem) in enumerate(progress.track(left, description="measuring"), 1):
            if time.monotonic() - started > 60 * arguments.minutes:
                console.print(f"some shapes were not started within {arguments.minutes:g} min; --resume measures them")
                break
            try:
                rows = plans.measured_beside_xla(rule, problem, device) if rule else plans.measured(problem, memory)
            except Exception as error:  # running out of memory raises many types
                console.print(f"{problem}: failed: {type(error).__name__}: {error}")
                continue
            console.print(f"{i} of {len(left)}, {problem}: {len(rows)} plans")
            writer.writerows(rows)
            file.flush()
            records += rows
    return [{name: str(value) for name, value in record.items()} for record in records]


def _slug(kind):
    return re.sub(r"\W+", "_", kind).strip("_").lower() or "gpu"


def _command(arguments):
    """The command line, without folders."""
    tables = [pathlib.Path(table).name for table in arguments.tables or ()]
    parts = ["fit", *(["--from", *tables] if tables else [])]
    parts += ["--device", arguments.device] if arguments.device else []
    return "python -m jax_streamk " + shlex.join(parts)
