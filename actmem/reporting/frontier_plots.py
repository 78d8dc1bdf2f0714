"""The frontier as a plot fit for a slide; what peaks are made of; memory over the time of a step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from actmem.planning.frontier import Frontier, FrontierPoint
from actmem.reporting.labels import Label, Point, place_labels
from actmem.reporting.style import FAINT, INK, MUTED, OURS, SERIES, TEXT, TICKS, TITLE, TORCH, new_figure, save

_SIZE_INCHES = (9.6, 5.4)
_CARDS_GB = (16, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192)
_KNEE = "#b3261e"
_BAND = "#a9cce8"
_USE_COLORS = {
    "parameters": "#475569",
    "buffers": "#64748b",
    "optimizer": "#cbd5e1",
    "gradients": "#94a3b8",
    "held by other layers": "#7b4fa3",
    "swapped, on the way": "#0b62a4",
    "this layer, or what is computed": "#e0a458",
    "outside the layers": "#6aa583",
}
_MEASURED = "#b3421e"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def plot_frontier(frontier: Frontier, *paths: str | Path) -> None:
    """Step time over peak memory, written to each of `paths` in the format of its suffix."""
    save(frontier_figure(frontier), paths)


def frontier_figure(frontier: Frontier) -> Figure:
    """The frontier as a line with a dot a budget, below it the bound, around it what other efficiencies would make of
    the same plans; policies as dots, torch's ways as squares, the knee as a ring, memory of known cards as upright
    lines. To the left the time by that of the unplanned step, to the right in seconds."""
    figure, axes = new_figure(_SIZE_INCHES)
    unit, name = unit_of(frontier)
    axes.set_title(_title(frontier), loc="left", fontsize=TITLE, color=INK, pad=26)
    axes.set_xlabel(f"peak memory of a training step ({name})", fontsize=TEXT, color=INK)
    axes.set_ylabel("step time, by the unplanned one", fontsize=TEXT, color=INK)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{100 * ratio:.4g} %"))
    line = [(point.predicted_peak_bytes / unit, frontier.ratio(point)) for point in frontier.points]
    _draw_band(axes, frontier, unit)
    axes.plot(*zip(*line, strict=True), "o-", color=OURS, linewidth=2.2, markersize=4.5, zorder=3)
    for point in frontier.beside:
        _draw_point(axes, _place(frontier, point, unit), point)
    _draw_measured(axes, frontier, unit)
    _draw_knee(axes, frontier, unit)
    _set_limits(axes, frontier, unit)
    _draw_seconds(axes, frontier)
    _draw_cards(axes, unit)
    place_labels(axes, _labels(frontier, unit), pairwise(line), size=TICKS)
    _explain(axes, frontier)
    return figure


def make_up_figure(frontier: Frontier) -> Figure:
    """What the peak of each point is made of, as bars that lie on each other."""
    points = [*frontier.points, *frontier.beside]
    unit, name = unit_of(frontier)
    figure, axes = new_figure((9.6, 1.2 + 0.24 * len(points)))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    starts = [0.0] * len(points)
    for use, color in _USE_COLORS.items():
        widths = [point.bytes_by_use.get(use, 0) / unit for point in points]
        if not any(widths):
            continue
        axes.barh(range(len(points)), widths, left=starts, color=color, label=use, height=0.72)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(points)), [point.label for point in points], fontsize=9)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * max(starts))
    axes.set_xlabel(f"made up of ({name})", fontsize=TICKS, color=INK)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def memory_figure(frontier: Frontier) -> Figure:
    """Memory over the time of a step, from the first op of the forward pass to the last of the backward pass: without a
    plan, at the knee, and with the least peak."""
    figure, axes = new_figure(_SIZE_INCHES)
    unit, name = unit_of(frontier)
    scale, time_unit = _time_unit(frontier)
    for (name_of_line, point), color in zip(_told(frontier).items(), SERIES, strict=False):
        seconds, sizes = zip(*point.timeline, strict=True)
        axes.plot(
            [each * scale for each in seconds],
            [each / unit for each in sizes],
            color=color,
            linewidth=1.8,
            label=name_of_line,
            drawstyle="steps-post",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time in the step ({time_unit})", fontsize=TEXT, color=INK)
    axes.set_ylabel(f"memory that stands ({name})", fontsize=TEXT, color=INK)
    axes.legend(loc="lower right", frameon=False, fontsize=TICKS, labelcolor=INK)
    return figure


def unit_of(frontier: Frontier) -> tuple[int, str]:
    """The bytes and name of the unit in which its peaks read best."""
    most = frontier.unplanned.predicted_peak_bytes
    return next((unit for unit in _UNITS if most >= 2 * unit[0]), _UNITS[-1])


def _told(frontier: Frontier) -> dict[str, FrontierPoint]:
    """The points whose memory over time is shown, by what they are called."""
    told = {"no plan": frontier.unplanned}
    if frontier.knee is not None:
        told[f"{frontier.knee.label}, the knee"] = frontier.knee
    return told | {f"{frontier.least.label}, the least peak": frontier.least}


def _title(frontier: Frontier) -> str:
    swaps = f", swap to {' and '.join(frontier.tiers)}" if frontier.tiers else ", no swap"
    return f"{frontier.setting}\non {frontier.hardware}{swaps}; {_kind_of_times(frontier)}"


def _kind_of_times(frontier: Frontier) -> str:
    words = frontier.times_in_words
    return f"{words}, {frontier.efficiency} efficiency" if frontier.times == "modelled" else words


def _place(frontier: Frontier, point: FrontierPoint, unit: int) -> Point:
    return point.predicted_peak_bytes / unit, frontier.ratio(point)


def _draw_band(axes: Axes, frontier: Frontier, unit: int) -> None:
    """What the plans cost at other efficiencies, and, below it, what no plan reaches."""
    ratios = [[frontier.ratio(point, level) for level in ("low", "nominal", "high")] for point in frontier.points]
    peaks = [point.predicted_peak_bytes / unit for point in frontier.points]
    axes.fill_between(
        peaks, list(map(min, ratios)), list(map(max, ratios)), color=_BAND, alpha=0.55, linewidth=0, zorder=1
    )
    known = [point for point in frontier.points if point.bound_seconds is not None]
    peaks = [point.predicted_peak_bytes / unit for point in known]
    axes.fill_between(peaks, list(map(frontier.bound_ratio, known)), color=FAINT, alpha=0.35, linewidth=0, zorder=0)


def _draw_point(axes: Axes, place: Point, point: FrontierPoint) -> None:
    color = _color(point)
    marker = "s" if point.kind == "yardstick" else "o"
    face = "white" if point.label == "none" or point.kind == "yardstick" else color
    axes.plot(
        *place, marker, markersize=8.5, markerfacecolor=face, markeredgecolor=color, markeredgewidth=1.8, zorder=4
    )


def _draw_measured(axes: Axes, frontier: Frontier, unit: int) -> None:
    """A cross where a point was measured, tied to where it was predicted."""
    for point in (*frontier.points, *frontier.beside):
        place = _measured_place(frontier, point, unit)
        if place is not None:
            axes.plot(*zip(_place(frontier, point, unit), place, strict=True), color=_MEASURED, linewidth=0.9, zorder=2)
            axes.plot(*place, "x", color=_MEASURED, markersize=7, markeredgewidth=1.8, zorder=4)


def _measured_place(frontier: Frontier, point: FrontierPoint, unit: int) -> Point | None:
    ratio = frontier.measured_ratio(point)
    return None if ratio is None or point.measured_peak_bytes is None else (point.measured_peak_bytes / unit, ratio)


def _draw_knee(axes: Axes, frontier: Frontier, unit: int) -> None:
    if frontier.knee is not None:
        place = _place(frontier, frontier.knee, unit)
        axes.plot(
            *place, "o", markersize=13, markerfacecolor="none", markeredgecolor=_KNEE, markeredgewidth=2, zorder=5
        )


def _set_limits(axes: Axes, frontier: Frontier, unit: int) -> None:
    points = (*frontier.points, *frontier.beside)
    places = [_place(frontier, point, unit) for point in points]
    places += [place for point in points if (place := _measured_place(frontier, point, unit)) is not None]
    peaks, ratios = [each for each, _ in places], [each for _, each in places]
    width, height = max(peaks) - min(peaks) or 1.0, max(ratios) - min(ratios) or 0.05
    axes.set_xlim(min(peaks) - 0.07 * width, max(peaks) + 0.09 * width)
    axes.set_ylim(min(ratios) - 0.12 * height, max(ratios) + 0.14 * height)
    axes.xaxis.set_major_locator(MaxNLocator(8))


def _draw_seconds(axes: Axes, frontier: Frontier) -> None:
    """A second axis to the right: the same limits in seconds."""
    scale, name = _time_unit(frontier)
    one = frontier.unplanned.predicted_seconds * scale
    bottom, top = axes.get_ylim()
    right = axes.twinx()
    right.set_ylim(bottom * one, top * one)
    right.set_ylabel(f"step time ({name})", fontsize=TEXT, color=INK)
    right.tick_params(labelsize=TICKS, color=MUTED, labelcolor=INK)
    right.spines[["top", "left", "bottom"]].set_visible(False)
    right.spines["right"].set_color(MUTED)


def _draw_cards(axes: Axes, unit: int) -> None:
    """Upright lines at the memory of known cards, named above the plot."""
    left, right = axes.get_xlim()
    for card in _CARDS_GB:
        x = card * 1e9 / unit
        if left < x < right:
            axes.axvline(x, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
            axes.annotate(
                f"{card} GB",
                (x, 1.0),
                (0, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
                color=MUTED,
            )


def _labels(frontier: Frontier, unit: int) -> list[Label]:
    """One name for points in the same place."""
    named: dict[Point, list[FrontierPoint]] = {}
    for point in frontier.beside:
        named.setdefault(_place(frontier, point, unit), []).append(point)
    labels = [Label(", ".join(each.label for each in points), at, _color(points[0])) for at, points in named.items()]
    if frontier.knee is not None:
        added = frontier.ratio(frontier.knee) - 1
        labels.append(Label(f"knee, +{added:.1%}", _place(frontier, frontier.knee, unit), _KNEE))
    return labels


def _explain(axes: Axes, frontier: Frontier) -> None:
    """In the upper right, where nothing lies that anybody would choose."""
    marks = [
        (Line2D([], [], color=OURS, marker="o", linewidth=2.2, markersize=4.5), "actmem, a plan for each budget"),
        (Patch(color=_BAND, alpha=0.55), "the same plans at low to high efficiency"),
        (Patch(color=FAINT, alpha=0.35), "below the bound: no such plan"),
        (_dot("o", INK), "fixed policies"),
        (_dot("s", TORCH), "torch's own ways, modelled"),
    ]
    if frontier.has_measured:
        cross = Line2D([], [], linestyle="", marker="x", color=_MEASURED, markersize=7, markeredgewidth=1.8)
        marks.append((cross, "measured here"))
    axes.legend(
        *zip(*marks, strict=True), loc="upper right", fontsize=9.5, labelcolor=INK, framealpha=0.9, edgecolor="white"
    )


def _dot(marker: str, color: str) -> Line2D:
    face = "white" if marker == "s" else color
    return Line2D([], [], linestyle="", marker=marker, markersize=7.5, markerfacecolor=face, markeredgecolor=color)


def _color(point: FrontierPoint) -> str:
    return TORCH if point.kind == "yardstick" else INK


def _time_unit(frontier: Frontier) -> tuple[float, str]:
    return (1.0, "s") if frontier.unplanned.predicted_seconds >= 1 else (1e3, "ms")
