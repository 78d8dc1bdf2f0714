"""The planner's plan against all plans that there are, on steps small enough for that."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from small_graphs import conditions, everything, steps

from actmem.errors import PlanError
from actmem.graph import Graph
from actmem.planning.planner import planner_for

GAP = 1e-3  # of a step: what the search may leave on the table, and a little for rounding


def some_budget(data: st.DataObject, peaks: set[int]) -> int:
    """One at which, or just below which, some plan begins to fit."""
    return data.draw(st.sampled_from(sorted(peaks))) - data.draw(st.integers(0, 1))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps(most_layers=3, most_ops=4), st.data())
def test_no_plan_that_recomputes_is_better(graph: Graph, data: st.DataObject) -> None:
    planner = planner_for(graph, conditions())
    found = list(everything(planner.simulator))
    budget = some_budget(data, {each.peak_bytes for each in found})
    best = min((each.seconds for each in found if each.peak_bytes <= budget), default=None)
    assert planner.least.simulation.peak_bytes == min(each.peak_bytes for each in found)
    if best is None:
        with pytest.raises(PlanError, match="the least possible is"):
            planner.plan(budget)
        return
    planned = planner.plan(budget)
    assert planned.simulation.peak_bytes <= budget
    assert planned.simulation.seconds <= best + GAP * planner.unplanned.seconds
    assert planned.bound_seconds <= best * (1 + 1e-9)
    assert planner.simulate(planned.plan) == planned.simulation


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps(most_layers=2, most_ops=3), st.sampled_from((1.0, 4.0)), st.data())
def test_hardly_a_plan_that_swaps_is_better(graph: Graph, mib_per_second: float, data: st.DataObject) -> None:
    """The program has copies flow evenly, and here a few storages are all that flows: so 2 % of a step."""
    planner = planner_for(graph, conditions(mib_per_second * 2**20), min_swap_bytes=0)
    found = list(everything(planner.simulator, swaps=True))
    budget = some_budget(data, {each.peak_bytes for each in found})
    best = min((each.seconds for each in found if each.peak_bytes <= budget), default=None)
    assume(best is not None)
    planned = planner.plan(budget)
    unswapped = min((e.seconds for e in found if e.peak_bytes <= budget and not e.swapped_bytes), default=math.inf)
    assert planned.simulation.peak_bytes <= budget
    assert planned.simulation.seconds <= best + 0.02 * planner.unplanned.seconds
    assert planned.simulation.seconds <= unswapped + GAP * planner.unplanned.seconds
    assert planned.bound_seconds <= best * (1 + 1e-9)
    assert planner.simulate(planned.plan) == planned.simulation
