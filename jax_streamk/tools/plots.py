"""Plots of a result: a roofline and the ratios of all shapes in order, or a bar per program. SVG and PNG."""

import itertools
import re

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from jax_streamk.tools.results import LOSS, is_of_programs, summary
from jax_streamk.tools.sides import OURS, XLA

# Markers differ, and so do the colors, also for color-blind readers.
_STYLES = {
    "faster": dict(color="#0072b2", marker="^"),
    f"within {1 - LOSS:.0%}": dict(color="#737373", marker="o"),
    "slower": dict(color="#d55e00", marker="v"),
    "left to XLA": dict(color="#737373", marker="s", facecolors="none"),
}
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#737373", "#111111")
_LABELLED = 40  # up to this number of shapes, the axis names each
_SET = 50  # write_digest plots results with at least this number of shapes
_SETTINGS = {"svg.hashsalt": "jax_streamk", "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}


def write(result, folder):
    """Writes the roofline and the ratio plot of a result, or the bars of programs, as SVG and PNG; returns their paths.

    Raises:
      OSError: the folder cannot be made or written to.
      ValueError: no shape or program has a ratio.
    """
    rows = [row for row in result["rows"] if "ratio" in row["sides"].get(OURS, {})]
    of_programs = is_of_programs(result)
    if not rows:
        raise ValueError(f"no {'program' if of_programs else 'shape'} was measured")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with plt.rc_context(_SETTINGS):
        for name, draw in (dict(programs=_bars) if of_programs else dict(roofline=_roofline, ratio=_ratio)).items():
            figure = draw(result, rows)
            for kind, metadata in (("svg", {"Date": None}), ("png", {})):
                paths.append(folder / f"{name}.{kind}")
                figure.savefig(paths[-1], dpi=160, metadata=metadata)
            plt.close(figure)
    return paths


def write_digest(machines, folder):
    """Plots the ratios of each machine's larger results (``report.by_machine``) and programs; returns the SVG paths.

    Raises:
      OSError: the folder cannot be made or written to.
      ValueError: no result has enough shapes to plot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with plt.rc_context(_SETTINGS | {"svg.fonttype": "none"}):
        for device, results in machines.items():
            curves = {
                name: _sorted_ratios(result) for name, result in results.items() if "device" in result["measures"]
            }
            curves = {name: ratios for name, ratios in curves.items() if len(ratios) >= _SET}
            if curves:
                paths.append(_saved(_curves(device, curves), folder, "ratios", device))
            for name, result in results.items():
                rows = [row for row in result["rows"] if "ratio" in row["sides"].get(OURS, {})]
                if is_of_programs(result) and rows:
                    paths.append(_saved(_bars(result, rows), folder, name, device))
    if not paths:
        raise ValueError(f"no result has {_SET} shapes or more, or programs")
    return paths


def _saved(figure, folder, name, device):
    path = folder / f"{name}_{re.sub('[^a-z0-9]+', '_', device.lower())}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _sorted_ratios(result):
    sides = [row["sides"].get(OURS, {}) for row in result["rows"]]
    return sorted(side["ratio"]["device"] for side in sides if "ratio" in side)


def _curves(device, curves):
    figure = plt.figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(yscale="log")
    axes.axhspan(LOSS, 1 / LOSS, color="#000000", alpha=0.06, linewidth=0)
    axes.axhline(1, color="#111111", linewidth=0.8)
    for (name, ratios), color in zip(curves.items(), itertools.cycle(_COLORS)):
        at = (np.arange(len(ratios)) + 0.5) / len(ratios)
        label = f"{name} ({len(ratios)}, mean {np.exp(np.mean(np.log(ratios))):.3f})"
        axes.plot(100 * at, ratios, color=color, linewidth=1.4, label=label)
    _ratio_axis(axes, min(min(x) for x in curves.values()), max(max(x) for x in curves.values()))
    axes.set(
        xlabel="percent of a set's shapes, by ratio",
        ylabel="XLA's time over ours (above 1: we are faster)",
        title=f"Ratio to XLA, {device}",
        xlim=(0, 100),
    )
    axes.grid(alpha=0.25, axis="y")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _ratio_axis(axes, least, most):
    low, high = min(0.9, least) / 1.05, max(1.1, most) * 1.05
    ticks = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 6, 8, 10]
    if high / low > 20:  # the labels of more would cover each other
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_ylim(low, high)


def _bars(result, rows):
    (measure,), at = result["measures"], np.arange(len(rows))
    ratios, kinds = np.array([row["sides"][OURS]["ratio"][measure] for row in rows]), [_kind(r, measure) for r in rows]
    figure = plt.figure(figsize=(min(14, max(8, 0.35 * len(rows))), 6.5), layout="constrained")
    axes = figure.add_subplot(yscale="log")
    axes.axhspan(LOSS, 1 / LOSS, color="#000000", alpha=0.06, linewidth=0)
    for kind, style in _STYLES.items():
        chosen = np.array([each == kind for each in kinds])
        if chosen.any():
            label = f"{kind} ({chosen.sum()})"
            axes.bar(at[chosen], ratios[chosen] - 1, bottom=1, width=0.7, color=style["color"], label=label)
    axes.axhline(1, color="#111111", linewidth=0.8)
    mean = summary(result)[OURS]["geomean"][measure]
    axes.axhline(mean, color="#0072b2", linewidth=1, linestyle="--", label=f"geometric mean {mean:.3f}")
    _ratio_axis(axes, ratios.min(), ratios.max())
    machine = result["machine"]
    axes.set(
        xlim=(-0.8, len(rows) - 0.2),
        ylabel="XLA's time over ours (above 1: we are faster)",
        title=f"A step of each program under accelerate\n{machine['device']}, jax {machine['jax']}, "
        f"{result['date'][:10]}",
    )
    axes.set_xticks(at, [row["program"] for row in rows], rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.grid(alpha=0.25, axis="y")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _kind(row, measure):
    side = row["sides"][OURS]
    ratio = side["ratio"][measure]
    faster, even, slower, left = _STYLES
    return left if side.get("fallback") else faster if ratio > 1 / LOSS else slower if ratio < LOSS else even


def _title(result, text):
    dtype, machine = result["task"]["dtype"], result["machine"]
    return f"{text}\n{dtype}, {machine['device']}, jax {machine['jax']}, {result['date'][:10]}"


def _roofline(result, rows):
    measure, figure = result["measures"][0], plt.figure(figsize=(8, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    intensity = np.array([row["flops"] / row["bytes"] for row in rows])
    times = {
        side: [row["sides"][side].get(measure, {}).get("median_us", np.nan) for row in rows] for side in (XLA, OURS)
    }
    speed = {side: np.array([row["flops"] for row in rows]) / us / 1e6 for side, us in times.items()}
    speed[OURS] = np.where(np.isnan(speed[OURS]), speed[XLA], speed[OURS])
    axes.vlines(intensity, speed[XLA], speed[OURS], color="#bbbbbb", linewidth=0.8, zorder=1)
    axes.scatter(intensity, speed[XLA], marker="_", color="#111111", s=60, linewidth=1.2, label="XLA", zorder=2)
    kinds = np.array([_kind(row, measure) for row in rows])
    for kind, style in _STYLES.items():
        at = kinds == kind
        if at.any():
            label = f"jax_streamk, {kind} ({at.sum()})"
            axes.scatter(
                intensity[at], speed[OURS][at], s=34 if len(rows) <= _LABELLED else 14, label=label, zorder=3, **style
            )
    limits = result["limits"]
    fastest = np.fmax(speed[XLA], speed[OURS])
    memory = limits.get("bytes_per_s", np.nanmax(fastest / intensity) * 1e12) / 1e12
    compute = limits.get("flops_per_s", np.nanmax(fastest) * 1e12) / 1e12
    word = "measured limit" if limits else "fastest here"
    xs = np.geomspace(intensity.min() / 1.5, max(intensity.max(), compute / memory) * 1.5, 300)
    roof = f"{word}: {memory * 1e3:,.0f} GB/s, {compute:,.{0 if compute > 10 else 2}f} TFLOP/s"
    axes.plot(xs, np.minimum(memory * xs, compute), color="#009e73", linewidth=1.2, label=roof, zorder=0)
    axes.set(
        xlabel="FLOP per byte of operands and result",
        ylabel="TFLOP/s",
        title=_title(result, f"Speed beside XLA, {measure} time"),
    )
    axes.grid(alpha=0.25, which="major")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _ratio(result, rows):
    measure, *others = result["measures"]
    rows = sorted(rows, key=lambda row: row["sides"][OURS]["ratio"][measure])
    named = len(rows) <= _LABELLED
    figure = plt.figure(figsize=(min(14, max(8, 0.3 * len(rows))), 6.5 if named else 5.5), layout="constrained")
    axes = figure.add_subplot(yscale="log")
    ratios = {each: np.array([row["sides"][OURS]["ratio"][each] for row in rows]) for each in result["measures"]}
    at, kinds = np.arange(len(rows)), np.array([_kind(row, measure) for row in rows])
    axes.axhspan(LOSS, 1 / LOSS, color="#000000", alpha=0.06, linewidth=0)
    axes.axhline(1, color="#111111", linewidth=0.8)
    mean = summary(result)[OURS]["geomean"]
    size = 34 if named else 10
    for each, marker in zip(others, "x+"):
        label = f"{each} (mean {mean[each]:.3f})"
        axes.scatter(
            at, ratios[each], s=size * 0.65, color="#b3a1c9", marker=marker, linewidth=1, label=label, zorder=2
        )
    for kind, style in _STYLES.items():
        chosen = kinds == kind
        if chosen.any():
            if named:
                axes.vlines(
                    at[chosen], 1, ratios[measure][chosen], color=style["color"], linewidth=1.2, alpha=0.6, zorder=1
                )
            axes.scatter(
                at[chosen],
                ratios[measure][chosen],
                s=size,
                label=f"{measure}, {kind} ({chosen.sum()})",
                zorder=3,
                **style,
            )
    axes.axhline(
        mean[measure],
        color="#0072b2",
        linewidth=1,
        linestyle="--",
        label=f"{measure}: geometric mean {mean[measure]:.3f}",
    )
    _ratio_axis(axes, min(r.min() for r in ratios.values()), max(r.max() for r in ratios.values()))
    axes.set_xlim(-0.8, len(rows) - 0.2)
    axes.set(
        ylabel="XLA's time over ours (above 1: we are faster)", title=_title(result, "Ratio to XLA, shape by shape")
    )
    if named:
        names = [" x ".join(str(row[name]) for name in "mnk") for row in rows]
        axes.set_xticks(at, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_xlabel("m x n x k, by ratio")
    else:
        axes.set_xlabel(f"{len(rows)} shapes, by ratio")
    axes.grid(alpha=0.25, axis="y")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
