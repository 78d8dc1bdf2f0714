"""A frontier made by hand, drawn, tabled and put on a page; and which published figures are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from actmem.config.schema import DataConfig, ModelConfig, RunConfig
from actmem.hardware import load_hardware
from actmem.planning.frontier import Frontier, FrontierPoint, Kind
from actmem.reporting.frontier_page import write_page
from actmem.reporting.frontier_plots import frontier_figure, make_up_figure, memory_figure, unit_of
from actmem.reporting.frontier_tables import KNEE, frontier_table
from actmem.reporting.refused import refused_figures

GIB = 2**30


def point(label: str, kind: Kind, gib: float, seconds: float) -> FrontierPoint:
    peak = int(gib * GIB)
    return FrontierPoint(
        label=label,
        kind=kind,
        budget_bytes=peak if kind == "auto" else None,
        predicted_peak_bytes=peak,
        predicted_seconds=seconds,
        low_seconds=1.5 * seconds,
        high_seconds=0.8 * seconds,
        bound_seconds=0.999 * seconds if kind == "auto" else None,
        peak_where="layer 0, backward: mm",
        bytes_by_use={"parameters": peak // 2, "held by other layers": peak - peak // 2},
        held_bytes=peak // 2,
        swapped_bytes=0,
        replay_seconds=0.0,
        exposed_seconds=0.0,
        timeline=((0.0, peak // 2), (seconds / 2, peak), (seconds, peak // 2)),
    )


@pytest.fixture
def found() -> Frontier:
    return Frontier(
        setting="a model, 4 x 4096 tokens",
        hardware="h100-sxm",
        memory_bytes=80 * 10**9,
        efficiency="nominal",
        measured_share=0.0,
        num_tokens=16384,
        gradients_stand=False,
        tiers=("host",),
        points=tuple(
            point(f"auto@{gib}GiB", "auto", gib, s) for gib, s in ((60, 1.2), (80, 1.05), (100, 1.02), (120, 1.0))
        ),
        beside=(
            point("none", "policy", 120, 1.0),
            point("full", "policy", 61, 1.25),
            point("selective", "policy", 90, 1.08),
            point("torch-full", "yardstick", 61, 1.25),
            point("torch-sac", "yardstick", 93, 1.085),
        ),
    )


def test_every_point_has_its_name_and_no_two_names_overlap(found: Frontier) -> None:
    figure = frontier_figure(found)
    assert isinstance(figure.canvas, FigureCanvasAgg)
    renderer = figure.canvas.get_renderer()
    texts = [each for each in figure.axes[0].texts if isinstance(each, Annotation)]
    names = {each.get_text() for each in texts}
    assert {"none", "full, torch-full", "selective", "torch-sac", "knee, +5.0%", "80 GB", "96 GB"} <= names
    assert "141 GB" not in names and "40 GB" not in names
    boxes = [each.get_window_extent(renderer) for each in texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_the_title_says_what_and_where_and_how_the_times_came(found: Frontier) -> None:
    title = frontier_figure(found).axes[0].get_title(loc="left")
    assert title == "a model, 4 x 4096 tokens\non h100-sxm, swap to host; modelled, nominal efficiency"


def test_seconds_and_ratios_share_their_axis(found: Frontier) -> None:
    left, right = frontier_figure(found).axes
    ratio = found.unplanned.predicted_seconds * (1e3 if "ms" in right.get_ylabel() else 1.0)
    assert right.get_ylim() == pytest.approx([ratio * each for each in left.get_ylim()])


def test_bars_and_lines(found: Frontier) -> None:
    assert next(each.get_text() for each in make_up_figure(found).axes[0].get_yticklabels()) == "auto@60GiB"
    assert len(memory_figure(found).axes[0].lines) == 3


def test_one_knee_in_the_table(found: Frontier) -> None:
    table = frontier_table(found, unit_of(found))
    marks = list(table.columns[-1].cells)
    assert marks.count(KNEE) == 1 and marks.index(KNEE) == 1
    assert next(iter(table.columns[4].cells)) == "20.00"


def config(name: str, **fields: object) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name=name, config=fields or None),  # type: ignore[arg-type]
        data=DataConfig(path=["none"]),
    )


def test_the_page_shows_the_published_table_as_refused(found: Frontier, tmp_path: Path) -> None:
    hardware = load_hardware("h100-sxm")
    write_page(found, hardware, refused_figures(config("qwen3-8b"), hardware), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Refused figures" in page
    assert "refused: implies 1,329 TFLOP/s on a 989 TFLOP/s card" in page
    assert page.count("refused: implies") == 5


def test_nothing_is_refused_for_another_model_or_card() -> None:
    h100 = load_hardware("h100-sxm")
    assert refused_figures(config("qwen3-4b"), h100) == []
    assert refused_figures(config("qwen3-8b", num_hidden_layers=2), h100) == []
    assert refused_figures(config("qwen3-8b"), load_hardware("h200")) == []
