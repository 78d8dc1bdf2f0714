"""Plots are written whole, their labels clear of each other, and matplotlib's settings untouched."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from actmem.measuring.interleave import Timing
from actmem.measuring.result import BenchResult
from actmem.reporting import plots
from actmem.reporting.labels import Label, place_labels
from actmem.reporting.plots import pareto, plot_bench, plot_losses

MIB = 2**20


@pytest.fixture
def axes() -> Axes:
    figure = Figure(figsize=(8, 5), dpi=100)
    FigureCanvasAgg(figure)
    return figure.add_subplot(xlim=(0, 10), ylim=(0, 10))


def test_a_bench_is_drawn_as_png_and_svg(result: BenchResult, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot_bench(result, tmp_path / "bench.png", tmp_path / "bench.svg")
    assert dict(matplotlib.rcParams) == before
    height, width, _ = imread(tmp_path / "bench.png").shape
    assert (width, height) == (1600, 960)
    ElementTree.parse(tmp_path / "bench.svg")


def test_every_policy_is_named_at_its_point(
    result: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[Label] = []
    monkeypatch.setattr(plots, "place_labels", lambda axes, labels, lines, size: placed.extend(labels))
    plot_bench(result, tmp_path / "bench.svg")
    points = {label.name: label.point for label in placed}
    assert points == {
        "none": (pytest.approx(110), 1200),
        "selective": (pytest.approx(121), 600),
        "full": (pytest.approx(165), 300),
        "torch-full": (pytest.approx(176), 305),
    }
    assert f"<!-- {result.setting} -->" in (tmp_path / "bench.svg").read_text()


def test_quartile_bars_end_within_the_axes(
    result: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = replace(result.policies[0], timing=Timing((0.01, 0.01, 0.11, 0.9, 0.9)))
    spans: list[tuple[float, float]] = []
    monkeypatch.setattr(plots, "place_labels", lambda axes, labels, lines, size: spans.append(axes.get_xlim()))
    plot_bench(replace(result, policies=(noisy, *result.policies[1:])), tmp_path / "bench.svg")
    first, third = noisy.timing.quartiles
    ((low, high),) = spans
    assert low < first * 1e3 and third * 1e3 < high


def test_losses_are_drawn(tmp_path: Path) -> None:
    plot_losses({"a": [3.0, 2.0, 1.5], "b": [3.0, 2.1, 1.6]}, tmp_path / "losses.png")
    assert imread(tmp_path / "losses.png").std() > 0


def test_what_another_policy_beats_in_both_is_not_joined(result: BenchResult) -> None:
    assert [each.policy for each in pareto(result.policies)] == ["none", "selective", "full"]
    slow = replace(result.policies[1], policy="slow", timing=Timing((0.2, 0.2, 0.2)))
    large = replace(result.policies[1], policy="large", peak_bytes=1300 * MIB)
    assert [each.policy for each in pareto((slow, large, *result.policies))] == ["none", "selective", "full"]


def test_equal_policies_are_joined_once(result: BenchResult) -> None:
    twin = replace(result.policies[1], policy="twin")
    assert len(pareto((*result.policies, twin))) == 3


@pytest.mark.parametrize(
    "points",
    [
        [(5.0, 5.0), (5.1, 5.1), (5.2, 4.9), (5.3, 5.0)],
        [(5.0, 5.0)] * 4,
        [(0.1, 0.1), (9.9, 9.9), (0.1, 9.9), (9.9, 0.1)],
        [(5.0, 5.0), (6.0, 5.0), (7.0, 5.0), (8.0, 5.0)],
    ],
    ids=["a cluster", "one place", "corners", "a row"],
)
def test_labels_overlap_neither_each_other_nor_the_frame(axes: Axes, points: list[tuple[float, float]]) -> None:
    labels = [Label(f"policy-{index}", point, "black") for index, point in enumerate(points)]
    place_labels(axes, labels, size=12)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)


def test_labels_keep_off_points_and_lines(axes: Axes) -> None:
    points = [(4.0, 5.0), (6.0, 5.0)]
    place_labels(
        axes, [Label("one", points[0], "black"), Label("two", points[1], "black")], [(points[0], points[1])], size=12
    )
    boxes = [text.get_window_extent() for text in axes.texts]
    on_line = [axes.transData.transform((4.0 + step / 10, 5.0)) for step in range(21)]
    assert not any(box.contains(*place) for box in boxes for place in on_line)
