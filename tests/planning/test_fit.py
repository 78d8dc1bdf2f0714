"""What fits: the search, and the arithmetic of layouts on a small step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actmem.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from actmem.errors import PlanError
from actmem.graph import Graph
from actmem.hardware import load_hardware
from actmem.planning.conditions import conditions_on
from actmem.planning.fit import BEST, FitSearch, Shape, largest
from actmem.planning.layout import Layout, adapter_bytes, lay_out, standing_under
from actmem.planning.planner import Planner, planner_for
from actmem.planning.simulation import Moment, Simulation
from actmem.training.traced import trace_step

MIB = 2**20
BASE: Shape = (2, 64)


@cache
def graph_of(shape: Shape) -> Graph:
    run = RunConfig(
        model=ModelConfig(name="qwen3-tiny", config={"num_hidden_layers": 1}),
        data=DataConfig(path=["none"], sequence_length=shape[1]),
        train=TrainConfig(micro_batch_size=shape[0]),
    )
    return trace_step(run)


def planner_from(graph: Graph) -> Planner:
    return planner_for(graph, conditions_on(load_hardware("cpu"), tiers=(), gradients_stand=False))


def search_within(limit: int) -> FitSearch:
    return FitSearch(graph_of, planner_from, Layout(), limit, sequence_step=32)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(BASE)


@pytest.fixture(scope="module")
def limit(graph: Graph) -> int:
    """A little more than the unplanned step of `BASE` takes."""
    return int(planner_from(graph).unplanned.peak_bytes * 1.3)


@pytest.mark.parametrize("slope", [1, 7, 1000])
@pytest.mark.parametrize("starts", [(1,), (8,), (3, 500), (10_000,)])
def test_the_largest_count_is_found_in_few_tries(slope: int, starts: tuple[int, ...]) -> None:
    tried: list[int] = []

    def peak(count: int) -> int:
        tried.append(count)
        return 5000 + slope * count + count // 50

    found = largest(peak, 100_000, starts)
    assert peak(found) <= 100_000 < peak(found + 1)
    assert len(tried) <= 20


def test_a_curved_peak_is_no_trouble() -> None:
    assert largest(lambda count: count**2, 10_000, (4,)) == 100


def test_next_to_a_straight_line_nothing_is_halved() -> None:
    tried: list[int] = []

    def peak(count: int) -> int:
        tried.append(count)
        return 1000 + 100 * count + count**2 // 50

    assert largest(peak, 4000, (1, 2, 8)) == 29
    assert len(tried) <= 6


class StraightPlanner:
    """A planner of steps that need some bytes a token; the bound is lower than the least peak by a share."""

    def __init__(self, graph: Graph, missing: float, asked: list[int]) -> None:
        assert graph.step is not None
        self._tokens, self._missing, self._asked = graph.step.num_tokens, missing, asked
        self.graph, self.unplanned = graph, self.simulate("none")

    @property
    def least_peak_bytes(self) -> int:
        self._asked.append(self._tokens)
        return self.simulate("least").peak_bytes

    @property
    def least(self) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(name="least"), simulation=self.simulate("least"))

    @property
    def least_bound_bytes(self) -> int:
        return int((1 - self._missing) * self.simulate("least").peak_bytes)

    def can_meet(self, budget: int) -> bool:
        return self.least_bound_bytes <= budget and self.least_peak_bytes <= budget

    def plan(self, budget: int) -> Any:
        return self.least

    def simulate(self, way: str) -> Simulation:
        size = {"none": 40, "selective": 20, "full": 10, "least": 9}[way] * self._tokens
        return Simulation(float(self._tokens), 0.0, 0.0, Moment("", {"all": size}), 0, 0)


@pytest.mark.parametrize("missing", [0.0, 0.01, 0.1])
def test_where_the_bound_is_too_low_the_search_goes_back(graph: Graph, missing: float) -> None:
    asked: list[int] = []

    def with_tokens(shape: Shape) -> Graph:
        assert graph.step is not None
        return replace(graph, step=replace(graph.step, num_tokens=shape[0] * shape[1]))

    def planner(graph: Graph) -> Planner:
        return cast(Planner, StraightPlanner(graph, missing, asked))

    search = FitSearch(with_tokens, planner, Layout(), 1_000_000, sequence_step=1)
    reaches = {(each.way, each.dimension): each.shape for each in search.reaches((2, 100))}
    assert reaches[BEST, "micro-batch"] == (1_000_000 // 900, 100)
    assert reaches[BEST, "sequence"] == (2, 1_000_000 // 18)
    assert len(set(asked)) <= (2 if not missing else 10)


def test_nothing_fits() -> None:
    assert largest(lambda count: 100 + count, 100, (8,)) == 0


def test_each_way_reaches_as_far_as_it_says(limit: int) -> None:
    search = search_within(limit)
    reaches = {(each.way, each.dimension): each for each in search.reaches(BASE)}
    for (way, dimension), reach in reaches.items():
        assert reach.shape is not None and reach.peak_bytes is not None and reach.peak_bytes <= limit, way
        more = (reach.shape[0] + 1, 64) if dimension == "micro-batch" else (2, reach.shape[1] + 32)
        planner = search.planner(more)
        peak = planner.least.simulation.peak_bytes if way == BEST else planner.simulate(way).peak_bytes
        assert peak > limit, way
    batch = {
        way: reach.shape[0] for (way, dimension), reach in reaches.items() if dimension == "micro-batch" and reach.shape
    }
    assert 2 <= batch["none"] <= batch["selective"] <= batch["full"] <= batch[BEST]
    assert reaches["none", "micro-batch"].added_share == 0.0
    full = reaches["full", "micro-batch"]
    assert full.added_share is not None and full.added_share > 0.05


def test_needs_without_a_plan_with_one_and_none_at_all() -> None:
    def needs(memory: int) -> tuple[Any, Any, Any]:
        return search_within(memory).needs((8, 64))

    unplanned, planned, least = needs(2**30)
    assert planned.plan == "auto@1.00GiB" and planned.peak_bytes == unplanned.peak_bytes
    tight = (unplanned.peak_bytes + least.peak_bytes) // 2
    _, planned, _ = needs(tight)
    assert least.peak_bytes <= planned.peak_bytes <= tight and planned.seconds > unplanned.seconds
    assert sum(planned.bytes_by_use.values()) == planned.peak_bytes
    assert needs(least.peak_bytes - 1)[1] is None


def test_optimizers(graph: Graph) -> None:
    assert graph.step is not None
    traced = graph.step.standing
    assert standing_under(graph, Layout()) == traced
    assert standing_under(graph, Layout(optimizer="sgd")).optimizer == traced.gradients
    assert standing_under(graph, Layout(optimizer="none")).optimizer == 0


def test_lora_freezes_what_was_there(graph: Graph) -> None:
    assert graph.step is not None
    layout = Layout(trained="lora", lora_rank=8)
    adapters = adapter_bytes(graph, 8)
    assert adapters == 8 * 4 * sum(sum(each.shape) for each in _matrices(graph))
    standing = standing_under(graph, layout)
    assert (standing.gradients, standing.optimizer) == (adapters, 2 * adapters)
    assert standing.parameters == graph.step.standing.parameters + adapters
    whole, light = planner_from(graph).unplanned, planner_from(lay_out(graph, layout)).unplanned
    assert light.seconds < whole.seconds
    assert light.held_bytes == whole.held_bytes


def _matrices(graph: Graph) -> list[Any]:
    layer = next(iter(graph.kinds.values()))
    weights = {
        layer.values[each].storage: layer.values[each]
        for op in layer.ops
        if op.compute_intensive
        for each in op.inputs
        if layer.storages[layer.values[each].storage].kind == "parameter"
    }
    assert len(weights) == 7
    return list(weights.values())


def test_shards_share_the_state_but_for_two_layers(graph: Graph) -> None:
    assert graph.step is not None
    traced = graph.step.standing
    layer = sum(each.num_bytes for each in next(iter(graph.kinds.values())).storages if each.kind == "parameter")
    standing = standing_under(graph, Layout(num_shards=4))
    assert standing.optimizer == traced.optimizer // 4
    assert standing.parameters == traced.parameters // 4 + 2 * layer
    whole, shared = (
        planner_from(each).simulator.surroundings.backward_bytes
        for each in (graph, lay_out(graph, Layout(num_shards=4)))
    )
    assert shared[0] - shared[-1] == pytest.approx((whole[0] - whole[-1]) / 4, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimizer": "lion"}, "optimizer 'lion' is not known; allowed: adamw, sgd, none"),
        ({"trained": "half"}, "trained 'half' is not known; allowed: full, lora"),
        ({"num_shards": 0}, "num_shards is 0; allowed: 1 or more"),
    ],
)
def test_a_layout_that_is_none(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        replace(Layout(), **wrong)
