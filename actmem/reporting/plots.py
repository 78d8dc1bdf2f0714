"""Plots fit for a slide, as PNG and SVG. Nothing here touches matplotlib's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from actmem.measuring.result import BASELINE, BenchResult, PolicyResult
from actmem.reporting.labels import Label, Point, place_labels
from actmem.reporting.style import FAINT, INK, OURS, SERIES, TEXT, TICKS, TITLE, TORCH, new_figure, save
from actmem.runtime.yardsticks import YARDSTICKS

_MARKERS = (("o", OURS), ("s", TORCH))
_MIB = 2**20


def plot_bench(result: BenchResult, *paths: str | Path) -> None:
    """Peak memory over step time, a point a policy, written to each of `paths` in the format of its suffix.

    Our policies are dots, torch's own ways squares, the unplanned model is a ring. A line joins the policies that no
    other beats in both; bars show the quartiles of the step time.
    """
    figure, axes = new_figure()
    axes.set_title(result.setting, loc="left", fontsize=TITLE, color=INK, pad=14)
    axes.set_xlabel("step time (ms)", fontsize=TEXT, color=INK)
    axes.set_ylabel("peak memory of a step (MiB)", fontsize=TEXT, color=INK)
    best = [_point(each) for each in pareto(result.policies)]
    axes.plot(*zip(*best, strict=True), color=FAINT, linewidth=2, zorder=1)
    for each in result.policies:
        _draw(axes, each)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlim(*_span([x for each in result.policies for x, _ in _quartile_bar(each)]))
    labels = [Label(each.policy, _point(each), _color(each)) for each in result.policies]
    place_labels(axes, labels, [*pairwise(best), *map(_quartile_bar, result.policies)], size=TEXT)
    _explain_markers(axes)
    save(figure, paths)


def plot_losses(losses: Mapping[str, Sequence[float]], *paths: str | Path) -> None:
    """Training loss over steps, a line a run, each named at its end; written to each of `paths`."""
    figure, axes = new_figure()
    axes.set_title("training loss", loc="left", fontsize=TITLE, color=INK, pad=14)
    axes.set_xlabel("step", fontsize=TEXT, color=INK)
    axes.set_ylabel("training loss (nats a token)", fontsize=TEXT, color=INK)
    colors = [SERIES[index % len(SERIES)] for index in range(len(losses))]
    for series, color in zip(losses.values(), colors, strict=True):
        axes.plot(range(1, len(series) + 1), series, color=color, linewidth=2)
    axes.set_xlim(0, 1.35 * max(map(len, losses.values())))  # the names stand to the right of the lines
    points = [[(float(step), loss) for step, loss in enumerate(series, 1)] for series in losses.values()]
    labels = [Label(name, each[-1], color) for name, each, color in zip(losses, points, colors, strict=True)]
    place_labels(axes, labels, [line for each in points for line in pairwise(each)], size=TEXT)
    save(figure, paths)


def pareto(policies: Sequence[PolicyResult]) -> list[PolicyResult]:
    """The policies that no other equals or beats in both peak and median step time, fastest first."""
    best: list[PolicyResult] = []
    for each in sorted(policies, key=_point):
        if not best or each.peak_bytes < best[-1].peak_bytes:
            best.append(each)
    return best


def _draw(axes: Axes, each: PolicyResult) -> None:
    x, y = _point(each)
    color = _color(each)
    axes.plot(
        *zip(*_quartile_bar(each), strict=True), color=color, linewidth=1.2, alpha=0.5, zorder=2, solid_capstyle="butt"
    )
    marker = "s" if each.policy in YARDSTICKS else "o"
    face = "white" if each.policy == BASELINE else color
    axes.plot([x], [y], marker, markersize=9, markerfacecolor=face, markeredgecolor=color, markeredgewidth=2, zorder=3)


def _explain_markers(axes: Axes) -> None:
    """In the lower left, where no policy can be: it would have to be fast and small."""
    ours, theirs = (
        Line2D([], [], linestyle="", markersize=8, marker=marker, color=color) for marker, color in _MARKERS
    )
    axes.legend(
        [ours, theirs],
        ["actmem", "torch"],
        loc="lower left",
        frameon=False,
        fontsize=TICKS,
        labelcolor=INK,
        handletextpad=0.2,
    )


def _point(each: PolicyResult) -> Point:
    return each.timing.median * 1e3, each.peak_bytes / _MIB


def _span(times: Sequence[float]) -> tuple[float, float]:
    """The part of the axis that holds all quartiles with room around them."""
    first, last = min(times), max(times)
    room = max(0.15 * (last - first), 0.06 * last)
    return max(0.0, first - room), last + room


def _quartile_bar(each: PolicyResult) -> tuple[Point, Point]:
    first, third = each.timing.quartiles
    return (first * 1e3, each.peak_bytes / _MIB), (third * 1e3, each.peak_bytes / _MIB)


def _color(each: PolicyResult) -> str:
    return TORCH if each.policy in YARDSTICKS else INK if each.policy == BASELINE else OURS
