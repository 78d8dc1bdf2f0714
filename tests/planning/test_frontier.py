"""The frontier of a small step: ordered, bounded, with its knee where the definition puts it; and written and read."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from actmem.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from actmem.errors import PlanError
from actmem.graph import Graph
from actmem.hardware import Hardware, load_hardware, work_of
from actmem.planning.conditions import conditions_on
from actmem.planning.fates import resolve
from actmem.planning.frontier import Frontier, FrontierPoint, budgets, frontier, knee_of, thinned
from actmem.planning.plan import Action
from actmem.planning.planner import Planner, planner_for
from actmem.planning.times import measured_share, times_in_words, times_of
from actmem.planning.yardsticks import torch_full, torch_selective
from actmem.training.traced import trace_step

NUM_POINTS = 5


@pytest.fixture(scope="module")
def graph() -> Graph:
    run = RunConfig(
        model=ModelConfig(name="qwen3-tiny", config={"num_hidden_layers": 2}),
        data=DataConfig(path=["none"], sequence_length=64),
        train=TrainConfig(micro_batch_size=4),
    )
    return trace_step(run)


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("cpu")


@pytest.fixture(scope="module")
def planner(graph: Graph, hardware: Hardware) -> Planner:
    return planner_for(graph, conditions_on(hardware, tiers=("disk",), gradients_stand=False), min_swap_bytes=1)


@pytest.fixture(scope="module")
def heard() -> list[str]:
    return []


@pytest.fixture(scope="module")
def found(planner: Planner, hardware: Hardware, heard: list[str]) -> Frontier:
    return frontier(
        planner, hardware, setting="a small model", num_points=NUM_POINTS, seconds=0.5, on_point=heard.append
    )


def test_budgets_go_from_the_least_peak_to_the_unplanned_one(found: Frontier, planner: Planner) -> None:
    asked = [point.budget_bytes for point in found.points]
    assert asked == budgets(planner, NUM_POINTS)
    assert (asked[0], asked[-1]) == (planner.least.simulation.peak_bytes, planner.unplanned.peak_bytes)


def test_more_memory_is_never_slower_and_no_point_breaks_its_budget_or_its_bound(found: Frontier) -> None:
    seconds = [point.predicted_seconds for point in found.points]
    assert seconds == sorted(seconds, reverse=True)
    for point in found.points:
        assert point.budget_bytes is not None and point.predicted_peak_bytes <= point.budget_bytes
        assert point.bound_seconds is None or point.bound_seconds <= point.predicted_seconds


def test_no_policy_lies_below_the_frontier(found: Frontier) -> None:
    for policy in found.beside:
        within = [p for p in found.points if p.budget_bytes and p.budget_bytes >= policy.predicted_peak_bytes]
        assert not within or within[-1].predicted_seconds <= policy.predicted_seconds * (1 + 1e-9)


def test_the_parts_of_each_peak_add_up_and_the_timeline_holds_it(found: Frontier) -> None:
    for point in (*found.points, *found.beside):
        assert sum(point.bytes_by_use.values()) == point.predicted_peak_bytes
        assert max(size for _, size in point.timeline) == point.predicted_peak_bytes


def test_policies_and_yardsticks_stand_beside(found: Frontier) -> None:
    kinds = {point.label: point.kind for point in found.beside}
    assert kinds["selective"] == kinds["attention-swap"] == "policy"
    assert kinds["torch-full"] == kinds["torch-sac"] == "yardstick"
    assert found.unplanned.label == "none" and found.ratio(found.unplanned, "low") == 1.0


def test_low_efficiency_is_slower_than_high(found: Frontier) -> None:
    assert all(p.low_seconds > p.predicted_seconds > p.high_seconds for p in (*found.points, *found.beside))


def test_each_point_is_heard_of(found: Frontier, heard: list[str]) -> None:
    assert heard == [*(point.label for point in found.points), "policies"]


def test_json_comes_back_and_says_what_it_is(found: Frontier, tmp_path: Path) -> None:
    found.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json") == found
    data = json.loads((tmp_path / "frontier.json").read_text())
    assert (data["times"], data["hardware"], data["efficiency"]) == ("modelled", "cpu", "nominal")
    assert data["knee"] == (None if found.knee is None else found.knee.label)
    with pytest.raises(PlanError, match="no frontier"):
        Frontier.from_dict({"points": []})


def test_csv_has_a_line_a_point_each_with_its_source(found: Frontier, tmp_path: Path) -> None:
    found.save_csv(tmp_path / "frontier.csv")
    with (tmp_path / "frontier.csv").open(encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(found.points) + len(found.beside)
    for line in lines:
        assert (line["hardware"], line["times"]) == ("cpu", "modelled")
        parts = [int(value) for name, value in line.items() if name.startswith("peak_bytes of ")]
        assert sum(parts) == int(line["predicted_peak_bytes"])


def at(peak: int, seconds: float) -> FrontierPoint:
    return FrontierPoint(f"auto@{peak}", "auto", peak, peak, seconds, seconds, seconds, None, "", {}, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("points", "knee"),
    [
        ([at(0, 10.0), at(1, 2.0), at(5, 1.0), at(10, 0.0)], 1),
        ([at(0, 10.0), at(5, 4.0), at(6, 1.0), at(10, 0.0)], 2),
        ([at(0, 10.0), at(5, 5.0), at(10, 0.0)], None),  # straight
        ([at(0, 10.0), at(5, 9.0), at(10, 0.0)], None),  # bent the other way
        ([at(0, 1.0), at(10, 0.0)], None),
        ([at(0, 1.0), at(5, 1.0), at(10, 1.0)], None),
    ],
)
def test_the_knee_is_farthest_below_the_chord(points: list[FrontierPoint], knee: int | None) -> None:
    assert knee_of(points) is (None if knee is None else points[knee])


def test_a_thinned_timeline_keeps_the_highest_moment_of_each_span() -> None:
    timeline = [(float(moment), (moment * 37) % 101) for moment in range(1000)]
    kept = thinned(timeline, 20)
    assert len(kept) <= 20
    assert max(size for _, size in kept) == max(size for _, size in timeline)
    assert [seconds for seconds, _ in kept] == sorted(seconds for seconds, _ in kept)
    assert thinned([]) == ()


def test_times_are_measured_only_if_every_op_was(graph: Graph, hardware: Hardware) -> None:
    assert measured_share(graph, hardware) == 0.0
    layer = next(iter(graph.kinds.values()))
    seconds = {work_of(layer, op).signature: 1e-3 for op in range(len(layer.ops))}
    some = measured_share(graph, hardware.model_copy(update={"measured_ops": seconds}))
    assert 0.5 < some < 1.0
    assert (times_of(some), times_of(1.0)) == ("modelled", "measured")
    assert "but for" in times_in_words(some) and "measured" in times_in_words(1.0)


def test_yardsticks_hold_what_torch_holds(graph: Graph) -> None:
    layer = next(iter(graph.kinds.values()))
    assert torch_full(layer) == resolve(layer, lambda path: Action.RECOMPUTE)
    fates = torch_selective(layer)
    intensive = {storage for storage, op in layer.creators.items() if layer.ops[op].compute_intensive}
    assert intensive <= fates.held.keys() and not intensive & fates.dropped
    assert not any(layer.ops[op].compute_intensive for op in fates.replayed)


def test_without_a_bound_the_bound_of_a_point_is_what_it_reaches(found: Frontier) -> None:
    point = replace(found.points[0], bound_seconds=None)
    assert found.bound_ratio(point) == found.ratio(point)


@pytest.mark.parametrize("text", ["", "[]", '{"actmem_frontier": 1}', '{"actmem_frontier"'])
def test_a_file_that_is_no_frontier_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "frontier.json").write_text(text)
    with pytest.raises(PlanError, match="frontier"):
        Frontier.load(tmp_path / "frontier.json")
