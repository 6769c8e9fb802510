"""Draws who works on which output tile: ``plan(...).plot()`` and ``plot_schedules``.

A row is a worker, and a bar is a run of MAC iterations of one output tile, as the kernels' own decomposition has them
(ffi/work_units.cc). What is too much to draw bar by bar is left out or summed up, and the picture says so.
"""

import dataclasses
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_streamk import text
from jax_streamk.plan.plan import Plan, views
from jax_streamk.schedules import DataParallel, Schedule, SplitK, StreamK
from jax_streamk.show import explain

if TYPE_CHECKING:
    from jax_streamk.api import Shaped

# Colors of output tiles, in turn. Neighbours differ in lightness, for readers and printers without colors.
_TILES = ("#7fb0e3", "#f8d78f", "#5fa58b", "#f3bccb", "#a58fd6", "#cde29c")
_INK, _MUTED, _IDLE, _SECOND = "#1f2328", "#57606a", "#f3f4f6", "#9aa2ab"
_SETTINGS = {
    "svg.hashsalt": "jax_streamk",
    "svg.fonttype": "none",
    "font.size": 9,
    "hatch.linewidth": 0.5,
}
_HATCH, _WIDE_HATCH = "/////", "///"  # of few rows, and of many
_TILE, _NOBODY = "an output tile", "idle"  # in the legend
_MOST_ROWS = 160  # workers that have a row each
_MOST_BARS = 4000
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 300  # cells of a picture that sums up
_MOST_PIECES, _SHOWN_PIECES = 32, 12  # of the busiest worker: if more, that many at the beginning and at the end
_NUMBERED = 80  # bars at most have their tiles' numbers
_SPACED = 40  # rows at most have gaps between them
_WIDTH, _LEAST_HEIGHT, _MOST_HEIGHT = 8.0, 0.6, 4.6  # inches of a figure, and of axes
_COLUMNS = 14.7  # of a caption in an inch


def plot(plan: Plan, path: str | os.PathLike[str] | None = None, ax: Any = None) -> Any:
    """``Plan.plot``."""
    matplotlib = _matplotlib("plot")
    picture = _Picture(plan)
    picture.leave_out()
    with matplotlib.rc_context(_SETTINGS):
        is_own = ax is None
        caption = picture.caption(_WIDTH if is_own else _width(ax))
        if is_own:
            figure = _figure(path, picture.height() + 1.2 + 0.16 * len(caption))
            figure.suptitle(_product(plan), x=0.01, ha="left", fontsize=10, fontweight="bold")
            ax = figure.add_subplot()
        else:
            caption = [*_wrapped(_product(plan), _width(ax)), *caption]
        picture.draw(ax)
        ax.set_title("\n".join(caption), loc="left", fontsize=8.5, color=_INK if not is_own else _MUTED)
        ax.set_xlabel("MAC iterations of a worker, one after another")
        _legend(ax.figure if is_own else ax, _handles(picture))
        if path is not None:
            _save(ax.figure, path)
    return ax


views["plot"] = plot


def plot_schedules(
    lhs: "Shaped",
    rhs: "Shaped",
    schedules: Sequence[Schedule] = (DataParallel(), SplitK(2), StreamK()),
    *,
    kernel: str | None = None,
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Draws a product under several schedules, one below the other, on a common axis.

    Each schedule is drawn on the kernel that it would run on, or all on one, which shows what a schedule alone changes.
    Where tiles differ in size, the axis counts the multiply-adds of an SM (a thread on a CPU) instead of MAC
    iterations.

    Args:
      lhs, rhs: as in ``plan``.
      schedules: what to draw, from top to bottom.
      kernel: the name of a kernel for all of them.
      path: of a file to write, such as ``"schedules.svg"``; None writes none.
      options: further arguments of ``plan``, such as ``device``.

    Returns:
      The ``matplotlib.figure.Figure``.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError, ValueError: as ``plan`` and ``Plan.plot``.
      ValueError: there is no schedule to draw, there is no such kernel, or it cannot run one of them.
    """
    from jax_streamk.api import plan

    matplotlib = _matplotlib("plot_schedules")
    if not schedules:
        raise ValueError("plot_schedules: schedules is empty; it must have at least one schedule")
    plans = [plan(lhs, rhs, schedule=schedule, **options) for schedule in schedules]
    pictures = [_Picture(explain.on_kernel(x, kernel) if kernel is not None else x) for x in plans]
    is_common = len({picture.multiply_adds for picture in pictures}) == 1
    for picture in pictures:
        picture.scale = 1.0 if is_common else picture.multiply_adds
    with matplotlib.rc_context(_SETTINGS):
        heights = [picture.height(len(pictures)) for picture in pictures]
        figure = _figure(path, sum(heights) + 0.6 * len(pictures) + 1.0)
        first = pictures[0].plan
        figure.suptitle(_product(first), x=0.01, ha="left", fontsize=10, fontweight="bold")
        every = figure.subplots(len(pictures), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, picture in zip(every, pictures):
            picture.draw(axes)
            axes.set_title("\n".join(picture.caption(_WIDTH)), loc="left", fontsize=8.5, color=_MUTED)
        every[-1].set_xlim(0, 1.015 * max(picture.end for picture in pictures))
        worker = "a thread" if first.device.platform == "cpu" else "an SM"
        every[-1].set_xlabel("MAC iterations of a worker" if is_common else f"million multiply-adds of {worker}")
        _legend(figure, _handles(*pictures))
        if path is not None:
            _save(figure, path)
    return figure


def _matplotlib(what: str) -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ImportError(
            f"{what} needs matplotlib: pip install 'jax-streamk[tools]', or '.[tools]' in the source tree"
        ) from None
    return matplotlib


def _figure(path: Any, height: float) -> Any:
    """A figure that notebooks show, or one that is for a file alone."""
    if path is None:
        import matplotlib.pyplot as plt

        return plt.figure(figsize=(_WIDTH, height), layout="constrained")
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    is_svg = os.fspath(path).lower().endswith(".svg")
    figure.savefig(path, dpi=160, metadata={"Date": None} if is_svg else None)


def _width(axes: Any) -> float:
    """Inches."""
    return axes.get_window_extent().width / axes.figure.dpi


def _wrapped(line: str, width: float) -> list[str]:
    return textwrap.wrap(line, max(20, int(_COLUMNS * width)), break_on_hyphens=False)


def _legend(of: Any, handles: dict[str, Any]) -> None:
    from matplotlib.figure import FigureBase
    from matplotlib.legend_handler import HandlerTuple

    is_figure = isinstance(of, FigureBase)
    below = dict(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.6)  # of the axis and its label
    where: dict[str, Any] = dict(loc="outside lower center") if is_figure else below
    in_row = len(handles) if is_figure else max(1, int(_width(of) / 1.9))
    of.legend(
        list(handles.values()),
        list(handles),
        ncols=min(len(handles), in_row),
        frameon=False,
        fontsize=8.5,
        handlelength=2.6,
        columnspacing=1.4,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        **where,
    )


def _handles(*pictures: "_Picture") -> dict[str, Any]:
    """The legend's, by label, each once."""
    handles = {label: handle for picture in pictures for label, handle in picture.handles().items()}
    last = {_NOBODY: handles.pop(_NOBODY)} if _NOBODY in handles else {}
    if any(picture.repeats_colors for picture in pictures):
        handles = {f"{_TILE} (colors repeat)" if label == _TILE else label: x for label, x in handles.items()}
    return handles | last


def _product(plan: Plan) -> str:
    p = plan.problem
    assert p is not None
    batch = f"{p.batch} x " if p.batch > 1 else ""
    types = f"{p.type_a.name} x {p.type_b.name} to {p.type_d.name}"
    return f"{batch}{p.m} x {p.n} x {p.k} (m x n x k), {types}, on {plan.device.kind or plan.device.platform}"


def _short(schedule: Schedule | None) -> str:
    """A schedule without the arguments that it has by default."""
    fields = dataclasses.fields(schedule) if schedule is not None else ()
    given = [f"{x.name}={value!r}" for x in fields if (value := getattr(schedule, x.name)) != x.default]
    return f"{type(schedule).__name__}({', '.join(given)})"


def _boxes(x0: Any, x1: Any, y0: Any, y1: Any) -> Any:
    """One path of many rectangles: a file of a few parts."""
    from matplotlib.path import Path

    corners = np.stack(
        [np.stack([x0, y0], -1), np.stack([x1, y0], -1), np.stack([x1, y1], -1), np.stack([x0, y1], -1)], 1
    )
    return Path.make_compound_path_from_polys(corners)


class _Picture:
    """A plan's units of work, and how they are drawn."""

    def __init__(self, plan: Plan):
        self.plan, self.units = plan, explain.work_units(plan)
        assert plan.kernel is not None
        self.kernel = explain.kernel_of(plan.kernel, plan.device)
        self.last = int(self.units.end.max())  # MAC iterations of the busiest worker
        self.scale = 1.0  # of the axis: units of it in a MAC iteration
        self.left_out = (0, 0)  # MAC iterations that are not drawn: from, to

    def leave_out(self) -> None:
        """Leaves out the middle of a long product, where all workers do one whole tile after another."""
        units = self.units
        busiest = units.worker[units.end == self.last][0]
        ends = np.sort(units.end[units.worker == busiest])
        if len(ends) > _MOST_PIECES and units.workers <= _MOST_ROWS:
            self.left_out = int(ends[_SHOWN_PIECES - 1]), int(ends[-_SHOWN_PIECES - 1])

    @property
    def is_summed(self) -> bool:
        is_long = self.left_out == (0, 0) and len(self.units.worker) > _MOST_BARS
        return self.units.workers > _MOST_ROWS or is_long

    @property
    def repeats_colors(self) -> bool:
        return not self.is_summed and self.units.tiles > len(_TILES)

    @property
    def per_row(self) -> int:
        return -(-self.units.workers // _SUMMED_ROWS) if self.is_summed else 1

    @property
    def rows(self) -> int:
        return -(-self.units.workers // self.per_row)

    @property
    def is_drawn(self) -> Any:
        """Whether a part of each unit is on the axis."""
        begin, end = self.left_out
        return (self.units.begin < begin) | (self.units.end > end)

    @property
    def gap(self) -> float:
        """What the axis has instead of what is left out."""
        begin, end = self.left_out
        return 0.03 * (self.last - (end - begin)) if end > begin else 0.0

    def at(self, iterations: Any) -> Any:
        """Places on the axis."""
        (begin, end), x = self.left_out, np.asarray(iterations, float)
        later = x - (end - begin) + self.gap
        return self.scale * np.where(x <= begin, x, np.where(x >= end, later, begin))

    @property
    def end(self) -> float:
        return float(self.at(self.last))

    @property
    def multiply_adds(self) -> float:
        """Million multiply-adds that an SM, or a thread, does in the time of a MAC iteration of its workers."""
        kernel = self.kernel
        ctas = self.units.workers * kernel.cluster_m * kernel.cluster_n
        return max(1, round(ctas / self.plan.device.sms)) * kernel.tile_m * kernel.tile_n * kernel.tile_k / 1e6

    @property
    def worker(self) -> str:
        return explain.worker_of(self.kernel, self.units.workers, self.plan.device)

    @property
    def has_second_kernel(self) -> bool:
        """Whether sums are added after all that is drawn."""
        return bool(self.units.peers.max() > 1 and not self.units.fixes_up.any())

    def height(self, pictures: int = 1) -> float:
        """Inches of the axes."""
        most = _MOST_HEIGHT if pictures == 1 else max(1.4, 6.0 / pictures)
        return float(np.clip(0.27 * self.rows, _LEAST_HEIGHT, most))

    def caption(self, width: float) -> list[str]:
        """Lines that fit a width in inches."""
        plan, units = self.plan, self.units
        tiles = f"{units.tiles:,} tile{'s' * (units.tiles != 1)} of {units.k_tiles:,} MAC iterations"
        who = f"{len(np.unique(units.worker)):,} of {units.workers:,} {self.worker}s at work"
        waves = f"{plan.waves:.2f} waves, quantization efficiency {plan.efficiency:.0%}"
        predicted = f", {text.duration(plan.microseconds)} predicted" if plan.microseconds else ""
        lines = [
            f"{_short(plan.schedule)}: {waves}{predicted}",
            f"{plan.kernel}: {tiles}, {who}",
        ]
        if self.is_summed:
            lines.append(
                f"Each row sums up {self.per_row} {self.worker}s: "
                "a cell's color is as strong as the share of them that is at work."
            )
        begin, end = self.left_out
        if end > begin:
            hidden = np.count_nonzero(~self.is_drawn)
            lines.append(f"Not drawn: MAC iterations {begin:,} to {end:,}, which are {hidden:,} units of work.")
        return [part for line in lines for part in _wrapped(line, width)]

    def handles(self) -> dict[str, Any]:
        """The legend's, by label."""
        from matplotlib.patches import Patch

        shared: dict[str, Any] = dict(facecolor="white", edgecolor=_INK, linewidth=0, hatch=_HATCH)
        handles: dict[str, Any] = {}
        if not self.is_summed:
            handles[_TILE] = tuple(Patch(facecolor=color) for color in _TILES[:3])
        elif self.units.peers.min() == 1:
            handles["whole tiles"] = Patch(facecolor=_TILES[0])
        if self.units.peers.max() > 1:
            if self.is_summed:
                handles["tiles that workers share"] = Patch(facecolor=_TILES[1])
            else:
                handles["a tile that workers share"] = Patch(**shared)
        if self.units.fixes_up.any() and not self.is_summed:
            handles["adds up its sums (expected)"] = Patch(facecolor=_INK)
        if self.has_second_kernel:
            handles["a second kernel adds up (not to scale)"] = Patch(facecolor=_SECOND)
        last = np.zeros(self.units.workers, int)
        np.maximum.at(last, self.units.worker, self.units.end)
        if last.min() < self.last:
            handles[_NOBODY] = Patch(facecolor=_IDLE, edgecolor="#c4c9ce", linewidth=0.6)
        return handles

    def draw(self, axes: Any) -> None:
        from matplotlib.patches import Rectangle

        if self.is_summed:
            self._draw_sums(axes)
        else:
            self._draw_bars(axes)
        beyond = 1.015
        if self.has_second_kernel:
            axes.add_patch(Rectangle((self.end, 0), 0.02 * self.end, self.rows, facecolor=_SECOND, linewidth=0))
            beyond = 1.025
        axes.plot([self.end, self.end], [0, self.rows], color=_INK, linewidth=1, solid_capstyle="butt", zorder=5)
        axes.set_xlim(0, beyond * self.end)
        axes.set_ylim(self.rows, 0)
        axes.tick_params(axis="y", length=0)
        axes.spines[["left", "top", "right"]].set_visible(False)
        self._number_rows(axes)
        self._break(axes)

    def _draw_bars(self, axes: Any) -> None:
        from matplotlib.patches import PathPatch

        units = self.units
        x0, x1 = self.at(units.begin), self.at(units.end)
        margin = 0.08 if self.rows <= _SPACED else 0.0
        y0, y1 = units.worker + margin, units.worker + 1 - margin
        edge, hatch = (0.6, _HATCH) if self.rows <= _SPACED else (0.25, _WIDE_HATCH)

        rows = np.arange(self.rows)
        everything = np.zeros(self.rows), np.full(self.rows, self.end), rows + margin, rows + 1 - margin
        axes.add_patch(PathPatch(_boxes(*everything), facecolor=_IDLE, linewidth=0, zorder=1))

        def boxes(chosen: Any, **style: Any) -> None:
            chosen = chosen & self.is_drawn
            if chosen.any():
                axes.add_patch(PathPatch(_boxes(x0[chosen], x1[chosen], y0[chosen], y1[chosen]), **style))

        for i, color in enumerate(_TILES):
            boxes(units.tile % len(_TILES) == i, facecolor=color, edgecolor="white", linewidth=edge, zorder=2)
        boxes(units.peers > 1, facecolor="none", edgecolor=_INK, linewidth=0, hatch=hatch, zorder=3)
        fixes_up = units.fixes_up == 1
        x0 = np.maximum(x0, x1 - 0.008 * self.end)
        boxes(fixes_up, facecolor=_INK, linewidth=0, zorder=4)
        if len(units.worker) <= _NUMBERED:
            self._number_tiles(axes)

    def _number_tiles(self, axes: Any) -> None:
        units = self.units
        plate = dict(boxstyle="round,pad=0.1", facecolor="white", alpha=0.85, linewidth=0)
        begins, ends = self.at(units.begin), self.at(units.end)
        for worker, tile, begin, end, peers in zip(units.worker, units.tile, begins, ends, units.peers):
            if self.rows <= _SPACED and end - begin > 0.012 * (1 + len(str(tile))) * self.end:
                axes.text(
                    (begin + end) / 2, worker + 0.5, str(tile), ha="center", va="center_baseline", fontsize=7.5,
                    color=_INK, bbox=plate if peers > 1 else None, zorder=6,
                )  # fmt: skip

    def _draw_sums(self, axes: Any) -> None:
        """The share of time in which the workers of each row and column work, on whole and on shared tiles."""
        units, rows = self.units, self.rows
        edges = np.linspace(0, self.last, _SUMMED_COLUMNS + 1)
        row = units.worker // self.per_row

        def elapsed(since: Any, chosen: Any) -> Any:
            """What of a row has passed at each edge since the times before it, all added up."""
            cell = row[chosen] * len(edges) + np.searchsorted(edges, since[chosen], "left")
            shape = rows, len(edges)
            count = np.bincount(cell, minlength=rows * len(edges)).reshape(shape).cumsum(1)
            total = np.bincount(cell, since[chosen], rows * len(edges)).reshape(shape).cumsum(1)
            return count * edges - total

        workers = np.bincount(np.arange(units.workers) // self.per_row)
        color_of = lambda color: np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        image = np.tile(color_of(_IDLE), (rows, _SUMMED_COLUMNS, 1))
        for chosen, color in ((units.peers == 1, _TILES[0]), (units.peers > 1, _TILES[1])):
            at_work = np.diff(elapsed(units.begin, chosen) - elapsed(units.end, chosen), axis=1)
            share = at_work / (workers[:, None] * np.diff(edges))
            image += share[:, :, None] * (color_of(color) - color_of(_IDLE))
        axes.imshow(
            np.clip(image, 0, 1), extent=(0, self.end, rows, 0), aspect="auto", interpolation="nearest", zorder=1
        )

    def _number_rows(self, axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        workers = self.units.workers
        if self.rows <= 16 and not self.is_summed:
            numbers = np.arange(workers)
        else:
            ticks = MaxNLocator(min(8, max(2, int(4 * self.height()))), integer=True).tick_values(0, workers - 1)
            numbers = np.array([tick for tick in ticks if 0 <= tick < workers], int)
        offset = 0.0 if self.is_summed else 0.5
        axes.set_yticks(numbers / self.per_row + offset, [f"{number:,}" for number in numbers], fontsize=8)
        ctas = self.kernel.cluster_m * self.kernel.cluster_n
        axes.set_ylabel(f"cluster of {ctas} CTAs" if self.worker == "cluster" else self.worker)

    def _break(self, axes: Any) -> None:
        """Ticks and a gap where iterations are left out."""
        from matplotlib.patches import Rectangle
        from matplotlib.ticker import MaxNLocator

        begin, end = self.left_out
        if end == begin:
            return
        ticks = MaxNLocator(5, integer=True).tick_values
        later = [x for x in ticks(end, self.last) if end < x <= self.last]
        shown = [x for x in ticks(0, begin) if x < begin] + later
        axes.set_xticks(self.at(shown), [f"{x:,.0f}" for x in shown])
        left = self.scale * begin
        axes.add_patch(Rectangle((left, 0), self.scale * self.gap, self.rows, facecolor="white", linewidth=0, zorder=4))
        for x in (left, left + self.scale * self.gap):
            axes.plot([x, x], [0, self.rows], color=_MUTED, linewidth=0.8, linestyle=(0, (3, 2)), zorder=5)
        axes.text(
            left + self.scale * self.gap / 2, self.rows / 2, "not drawn", rotation=90, ha="center", va="center",
            fontsize=7.5, color=_MUTED, zorder=6,
        )  # fmt: skip
