"""Presents results of bench: progress while it measures, and tables for terminals and pages."""

import contextlib
import io
import math
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jax_streamk.text import duration, size
from jax_streamk.tools import float8, groups, weights
from jax_streamk.tools.results import LOSS, is_of_programs, summary
from jax_streamk.tools.sides import DENSE, EVEN, MEASURES, OURS, XLA

WIDE = 170


@contextlib.contextmanager
def progress(todo):
    """Progress as a bar or, off a terminal, in lines; yields a function to call with the result after each shape."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times
    bar = Progress(*columns, console=console, speed_estimate_period=1800, disable=not console.is_terminal)
    with bar:
        bar.add_task("measuring", total=len(todo))
        (task,) = bar.tasks

        def advance(result):
            row, each = result["rows"][-1], result["measures"][0]
            if ratio := row["sides"].get(OURS, {}).get("ratio", {}).get(each):
                text = f"{ratio:.2f}, mean {summary(result)[OURS]['geomean'][each]:.3f}"
            elif "skipped" in row["sides"].get(XLA, {}):
                text = _time(row["sides"].get(OURS, {}), each) or "XLA skipped"
            else:
                text = row.get("skipped", "failed")
            bar.update(task.id, advance=1, description=f"{_extents(row)}: {text}")
            if bar.disable:
                took = duration(1e6 * (task.elapsed or 0))
                console.print(f"{task.completed:.0f} of {len(todo)} in {took}, {task.description}", markup=False)

        yield advance


def show(result):
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(*_head(result), sep="\n", highlight=False, markup=False, soft_wrap=True)
    tables = [_programs_table] if is_of_programs(result) else [_table, _summary]
    console.print(Group(*(table(result, box.SIMPLE_HEAD) for table in tables)))
    for line in _tail(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def markdown(result):
    """A result as a Markdown page."""
    file = io.StringIO()
    console = Console(file=file, width=400, color_system=None)
    head = _head(result)
    console.print(f"# {head[0]}", "", *head[1:], sep="\n", highlight=False, markup=False, soft_wrap=True)
    if not is_of_programs(result):
        console.print(_summary(result, box.MARKDOWN))
    console.print(*_tail(result), sep="\n\n", highlight=False, markup=False, soft_wrap=True)
    console.print((_programs_table if is_of_programs(result) else _table)(result, box.MARKDOWN))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


_BOUNDS = (
    f"{DENSE}: ours of the same m, n and k without groups; {EVEN}: XLA's batched product of groups that have equally "
    "many rows"
)


def by_machine(results):
    """Groups results (a dict by path) by machine and then file name. The machine with the most results comes first.

    Raises:
      ValueError: two results of a machine have the same name.
    """
    machines: dict[str, dict[str, Any]] = {}
    for path, result in results.items():
        of_machine = machines.setdefault(result["machine"]["device"], {})
        if path.stem in of_machine:
            raise ValueError(f"{path}: another result of {result['machine']['device']} has this name")
        of_machine[path.stem] = result
    return dict(sorted(machines.items(), key=lambda item: -len(item[1])))


def digest(machines):
    """Markdown: for each machine that ``by_machine`` returns, a line per result and measure, its ragged products
    and its programs.
    """
    return "\n".join(_digest_of(device, results) for device, results in machines.items())


def _digest_of(device, results):
    table = Table(box=box.MARKDOWN)
    table.add_column("result")
    table.add_column("operands")
    table.add_column("time")
    for column in ("shapes", "mean", f"below {LOSS}", "slowest", "left to XLA", "measured"):
        table.add_column(column, justify="right")
    products = {name: result for name, result in results.items() if not is_of_programs(result)}
    for name, result in products.items():
        of, task = summary(result)[OURS], result["task"]
        kind = "gated by" if task.get("gated") else "bias and"
        linear = "" if task["activation"] is None else f", {kind} {task['activation']}"
        linear = ", in groups" * task.get("groups", False) + linear
        by = f" by {weights.name_of(task)}" if "weights" in task else ""
        by += f" {float8.name_of(task)}" if task.get("scales", "none") != "none" else ""
        what = task["dtype"] + by + (f' at "{task["precision"]}"' if task["precision"] else "") + linear
        for each in result["measures"]:
            ratios = [row["sides"][OURS]["ratio"][each] for row in result["rows"] if "ratio" in row["sides"][OURS]]
            means = f"{of['geomean'][each]:.3f}", str(of["losses"][each]), f"{min(ratios):.2f}"
            table.add_row(name, what, each, str(of["shapes"]), *means, str(of["fallbacks"]), result["date"][:10])
    machines = [result["machine"] for result in results.values()]
    drivers = sorted({f"driver {machine['driver']}" for machine in machines if machine.get("driver")})
    versions = sorted({f"jax {machine['jax']}" for machine in machines})
    lines = [f"### {device}", "", f"With {', '.join(drivers + versions)}.", ""]
    if products:
        lines += [*_markdown(table), ""]
    notes: dict[str, list[str]] = {}
    for name, result in results.items():
        if result["notes"]:
            notes.setdefault("; ".join(result["notes"]), []).append(name)
    lines += [f"- {', '.join(names)}: {note}." for note, names in notes.items()] + [""] * bool(notes)
    for name, result in results.items():
        of = f"{name}, {result['date'][:10]}"
        if is_of_programs(result):
            said = f"{of}: {_programs_in_short(result)} Pairs are XLA's / ours."
            lines += [said, "", *_markdown(_programs_table(result, box.MARKDOWN)), ""]
        elif result["task"].get("groups"):
            said = f"{of}: ragged products, and as bounds {_BOUNDS}."
            lines += [said, "", *_markdown(_table(result, box.MARKDOWN, in_full=False)), ""]
    return "\n".join(lines)


def _markdown(table):
    file = io.StringIO()
    Console(file=file, width=400, color_system=None).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def _head(result):
    machine, task = result["machine"], result["task"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    if is_of_programs(result):
        return [
            f"Programs under accelerate beside XLA's, {task['size']} size, {machine['device']}{driver}, "
            f"{result['date'][:10]}",
            f"jax {machine['jax']}, jaxlib {machine.get('jaxlib', '?')}; `{result['command']}`.",
            f"Median wall times of a step, of {2 * result['rounds']} runs in turns, half the interquartile range after "
            "±; ratios are XLA's time over ours. Errors are those of the worst array beside a wider dtype's, in root "
            "mean square; copies, transposes and memory are those of the compiled program. Pairs are XLA's / ours.",
        ]
    kind = "gated products," if task.get("gated") else "linear layers, bias and"
    what = "products" if task["activation"] is None else f"{kind} {task['activation']}"
    bounds = []
    if "weights" in task:
        what = f"products by {weights.name_of(task)}"
        bounds = [f"XLA's dequantize first. Beside them, by weights of {task['dtype']}: {', '.join(weights.BOUNDS)}."]
    if task.get("scales", "none") != "none":
        what += f" {float8.name_of(task)}"
        bounds = [f"XLA's dequantize first. Beside them: {float8.UNSCALED}."]
    if task.get("groups"):
        what = f"ragged {what}"
        bounds = [f"Beside them, as bounds: {_BOUNDS}. Bytes are without the matrices of groups that have no rows."]
    measures = "; ".join(f"{each}: {MEASURES[each]}" for each in result["measures"])
    return [
        f"{task['dtype']} {what} beside XLA's default, {machine['device']}{driver}, {result['date'][:10]}",
        f"jax {machine['jax']}, jaxlib {machine.get('jaxlib', '?')}; `{result['command']}`.",
        "Times of a call are medians ± half the interquartile range; ratios are XLA's time over the other's. "
        f"{measures}.",
        *bounds,
    ]


def _tail(result):
    limits = result["limits"]
    lines = [f"Note: {note}." for note in result["notes"]]
    if is_of_programs(result):
        lines.append(_programs_in_short(result))
    if limits:
        lines.append(
            f"This machine streams {limits['bytes_per_s'] / 1e9:.0f} GB/s (an elementwise function, read and written), "
            f"and its XLA multiplies {limits['flops_per_s'] / 1e12:.1f} TFLOP/s (a large square)."
        )
    if result["link_us"] and "dependent" in result["measures"]:
        lines.append(
            f"Dependent calls: {duration(result['link_us'])} of each, on every side, is the kernel that links them."
        )
    cool = sum(row.get("rotated_bytes", 200e6) < 200e6 for row in result["rows"])
    if cool and result["machine"]["platform"] == "cuda":
        lines.append(f"{cool} shapes are so small that less than 200 MB of operands rotate.")
    skipped = [row["sides"][XLA]["skipped"] for row in result["rows"] if "skipped" in row["sides"].get(XLA, {})]
    if skipped:
        lines.append(f"XLA's side was skipped {len(skipped)} times, first for {skipped[0]}.")
    failed: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        if "not_compared" in row:
            lines.append(f"Note: results of {row['program']} were not compared: {row['not_compared']}")
        for name, side in row["sides"].items():
            if "error" in side:
                failed.setdefault((name, side["error"]), []).append(_extents(row))
            if side.get("wrong"):
                lines.append(f"FAILED {name} of {_extents(row)}: {_what_is_wrong(row, side)}")
    for (name, error), where in failed.items():
        lines.append(f"FAILED {name} of {where[0]}" + f" and {len(where) - 1} more" * (len(where) > 1) + f": {error}")
    if "stopped" in result:
        lines.append(f"Stopped {result['stopped']}.")
    return lines


def _what_is_wrong(row, side):
    if "program" not in row:
        return f"differs from XLA by {side['max_difference'] or math.inf:.2g} of the largest entry"
    error = "is not finite" if side["relative_error"] is None else f"is {side['relative_error']:.2g}"
    return f"its relative error {error}, XLA's {row['sides'][XLA].get('relative_error', 0):.2g}"


def _summary(result, style):
    table = Table(box=style)
    table.add_column("against XLA")
    for column in (
        "shapes",
        *(f"{each}: mean" for each in result["measures"]),
        *(f"{each} < {LOSS}" for each in result["measures"]),
    ):
        table.add_column(column, justify="right")
    for column in ("fallbacks, as 1.0", "failed", "wrong"):
        table.add_column(column, justify="right")
    for name, of in summary(result).items():
        share = f"{of['fallbacks']} ({of['fallbacks'] / of['shapes']:.0%})"
        means = [f"{of['geomean'][each]:.3f}" if each in of["geomean"] else "" for each in result["measures"]]
        losses = [str(of["losses"][each]) for each in result["measures"]]
        table.add_row(name, str(of["shapes"]), *means, *losses, share, str(of["failed"]), str(of["wrong"]))
    return table


def _extents(row):
    if "groups" in row:
        return groups.name_of(row)
    return row["program"] if "program" in row else " x ".join(str(row[name]) for name in "mnk")


def _programs_in_short(result):
    """Mean and lowest ratio, the most memory beside XLA's, and what was skipped."""
    rows, (each,) = [row for row in result["rows"] if "ratio" in row["sides"].get(OURS, {})], result["measures"]
    skipped: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "skipped" in row:
            skipped.setdefault(row["skipped"], []).append(row["program"])
    left_out = "".join(f" Skipped: {', '.join(names)}: {why}." for why, names in skipped.items())
    if not rows:
        return f"No program was measured.{left_out}"
    of, lowest = summary(result)[OURS], min(rows, key=lambda row: row["sides"][OURS]["ratio"][each])
    largest = max(rows, key=_memory_ratio)
    return (
        f"{len(rows)} programs have a mean ratio of {of['geomean'][each]:.3f}, {of['losses'][each]} below {LOSS}, the "
        f"lowest {lowest['sides'][OURS]['ratio'][each]:.2f} ({lowest['program']}). The most memory is "
        f"{_memory_ratio(largest):.2f} of XLA's ({largest['program']}).{left_out}"
    )


def _memory_ratio(row):
    return row["sides"][OURS]["peak_bytes"] / row["sides"][XLA]["peak_bytes"]


def _programs_table(result, style):
    (each,), plain = result["measures"], style is box.MARKDOWN
    table = Table(box=style)
    table.add_column("program", no_wrap=True)
    table.add_column("dtype")
    for column in ("XLA", "ours", "ratio", "our calls", "copies", "transposes", "peak memory", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        if "skipped" in row:
            table.add_row(row["program"], row["dtype"], "", "", "skipped")
            continue
        sides = xla, ours = row["sides"][XLA], row["sides"][OURS]

        def both(key, text, sides=sides):
            return " / ".join("-" if side.get(key) is None else text(side[key]) for side in sides)

        table.add_row(
            row["program"],
            row["dtype"],
            _time(xla, each),
            _time(ours, each),
            _ratio(ours, each, plain),
            str(ours.get("custom_calls", "")),
            both("copies", str),
            both("transposes", str),
            both("peak_bytes", size),
            both("relative_error", "{:.1e}".format),
        )
    return table


def _table(result, style, in_full=True):
    measures, plain = result["measures"], style is box.MARKDOWN
    names = dict.fromkeys(name for row in result["rows"] for name in row["sides"])
    others = [name for name in names if name not in (XLA, OURS)]
    in_groups = result["task"].get("groups", False)
    table = Table(box=style)
    for column in (*("groups",) * in_groups, "m", "n", "k"):
        table.add_column(column, justify="right")
    if in_groups:
        table.add_column("routing"), table.add_column("pass")
    flags = any(row["trans_a"] or row["trans_b"] or row["batch"] > 1 for row in result["rows"])
    if flags:
        table.add_column("batch")
    for column in (
        "XLA",
        "ours",
        *(f"{each} ratio" for each in measures),
        *(name if in_groups else f"{name} ratio" for name in others),
    ):
        table.add_column(column, justify="right")
    if in_groups:
        table.add_column("TFLOP/s", justify="right")
    if result["limits"]:
        table.add_column("of stream", justify="right")
    if in_full:
        table.add_column("difference", justify="right")
        table.add_column("our plan", overflow="fold")
    for row in result["rows"]:
        ours, xla = row["sides"][OURS], row["sides"][XLA]
        named = ("groups", *"mnk", "routing", "pass_") if in_groups else "mnk"
        cells = [str(row[name]) for name in named]
        if flags:
            cells.append(f"{row['batch']}" + " A^T" * row["trans_a"] + " B^T" * row["trans_b"])
        cells += [_time(xla, measures[0]), _time(ours, measures[0]), *(_ratio(ours, each, plain) for each in measures)]
        for side in (row["sides"].get(name, {}) for name in others):
            cells.append(_time(side, measures[0]) if in_groups else _ratio(side, measures[0], plain))
        if in_groups:
            cells.append(
                f"{ours['flops_per_s'] / 1e12:.{3 if ours['flops_per_s'] < 1e12 else 1}f}"
                if "flops_per_s" in ours
                else ""
            )
        if result["limits"]:
            cells.append(
                f"{ours['bytes_per_s'] / result['limits']['bytes_per_s']:.0%}" if "bytes_per_s" in ours else ""
            )
        difference, plan = ours.get("max_difference"), row["plan"]
        if in_full:
            cells.append(f"{difference:.1e}" if difference is not None else "")
            cells.append(f"{plan['kernel']} {plan['schedule']}" if plan["kernel"] else "XLA")
        table.add_row(*cells)
    return table


def _time(side, measure):
    if measure not in side:
        return "failed" if "error" in side else "skipped" if "skipped" in side else ""
    time = side[measure]
    if "quartiles_us" not in time:
        return duration(time["median_us"])
    low, high = time["quartiles_us"]
    return duration(time["median_us"], (high - low) / 2)


def _ratio(side, measure, plain):
    if "ratio" not in side:
        return "failed" if "error" in side else ""
    ratio = side["ratio"][measure]
    text = f"{ratio:.2f}" + " (XLA)" * side.get("fallback", False)
    style = "green" if ratio > 1 / LOSS else "red" if ratio < LOSS else ""
    return text if plain or not style else f"[{style}]{text}[/{style}]"
