"""Plans, bounds and predicted peaks of models whose layers hold storages in common: with a skip around many layers, or
with outputs that two layers save."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from block_models import Block, Twice, features, regions_of, squares
from torch import Tensor, nn

import actmem
from actmem.graph import Graph
from actmem.hardware import load_hardware
from actmem.memory import measure_peak
from actmem.planning import Action, Plan, Rule
from actmem.planning.conditions import conditions_on
from actmem.planning.planner import Planner, planner_for

SCALARS = 1024


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Skipping(nn.Module):
    """The output of the first block goes round all others, as in a U-Net."""

    def __init__(self, blocks: Sequence[nn.Module], *, multiplies: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.multiplies = multiplies

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = [hidden := block(hidden) for block in self.blocks]
        out = hidden + (outputs[0] * outputs[-1] if self.multiplies else outputs[0])
        assert isinstance(out, Tensor)
        return out


def traced(model: Skipping, *, gradients_stand: bool = True) -> tuple[Graph, Planner, dict[str, Tensor]]:
    batch = features()
    graph = actmem.trace(model, batch, loss=squares, regions=regions_of(model))
    hardware = load_hardware("cpu").model_copy(update={"workspace_bytes": 0})
    conditions = conditions_on(hardware, tiers=(), gradients_stand=gradients_stand)
    return graph, planner_for(graph, conditions, min_swap_bytes=4096), batch


def every_simulation(planner: Planner) -> list[tuple[int, float]]:
    """Peak and seconds of each way to combine the layers' options."""
    runs = (planner.simulator.run([each.plan for each in taken]) for taken in product(*planner._search.options))
    return [(run.peak_bytes, run.seconds) for run in runs]


BLOCKS: dict[str, tuple[type[nn.Module], ...]] = {
    "saved twice": (Twice, Twice, Twice),
    "residual": (Block, Block, Block),
    "frozen first": (Frozen, Twice, Block),
    "two kinds": (Twice, Block, Twice),
}


@pytest.mark.parametrize("multiplies", [True, False], ids=["product", "sum"])
@pytest.mark.parametrize("makes", BLOCKS.values(), ids=BLOCKS.keys())
def test_no_plan_undercuts_the_bound(makes: tuple[type[nn.Module], ...], multiplies: bool) -> None:
    _, planner, _ = traced(Skipping([make() for make in makes], multiplies=multiplies))
    found = every_simulation(planner)
    for budget in sorted({peak for peak, _ in found}):
        best = min(seconds for peak, seconds in found if peak <= budget)
        bound = planner._search.solver.bound(budget)
        assert bound is not None, f"{budget}: said to be met by none, and met"
        bound += planner.unplanned.seconds
        assert bound <= best * (1 + 1e-9), f"{budget}: bound {bound / best - 1:+.1%} above a plan that fits"


def test_the_plan_is_as_fast_as_the_best_combination_of_options() -> None:
    _, planner, _ = traced(Skipping([Twice() for _ in range(3)], multiplies=True))
    found = every_simulation(planner)
    for budget in sorted({peak for peak, _ in found}):
        best = min(seconds for peak, seconds in found if peak <= budget)
        planned = planner.plan(budget)
        assert planned.simulation.seconds <= best + 1e-3 * planner.unplanned.seconds, (
            f"{budget}: {planned.simulation.seconds / best - 1:+.1%}, called optimal: {planned.is_optimal}"
        )


LAST = Plan("last", (Rule(".*", Action.RECOMPUTE, (2,)),))


@pytest.mark.parametrize("stand", [True, False])
@pytest.mark.parametrize("policy", ["none", "full", LAST], ids=["none", "full", "last"])
@pytest.mark.parametrize("case", ["sum", "product", "frozen first"])
def test_peak_of_a_model_with_a_long_skip(case: str, policy: str | Plan, stand: bool) -> None:
    torch.manual_seed(0)
    first = Frozen() if case == "frozen first" else Block()
    model = Skipping([first, Block(), Block()], multiplies=case != "sum")
    graph, planner, batch = traced(model, gradients_stand=stand)
    assert graph.step is not None
    predicted = planner.simulate(policy).peak_bytes - graph.step.standing.total
    predicted += 0 if stand else graph.step.standing.gradients

    def step() -> None:
        squares(model, batch).backward()
        if not stand:
            model.zero_grad(set_to_none=True)

    with actmem.apply(model, policy, regions=regions_of(model), memory={"verify": "off"}):
        step()
        step()
        measured = measure_peak(step, torch.device("cpu")).peak_bytes
    assert abs(measured - predicted) <= SCALARS, f"{measured / predicted - 1:+.1%}: {measured - predicted} bytes"


def test_budgets_hold_for_a_model_with_a_long_skip() -> None:
    torch.manual_seed(0)
    model = Skipping([Block() for _ in range(4)], multiplies=True)
    _, planner, batch = traced(model)
    least, most = planner.least.simulation.peak_bytes, planner.unplanned.peak_bytes
    draw = random.Random(5)

    def step() -> None:
        squares(model, batch).backward()

    over = []
    for budget in sorted([least, *(draw.randint(least, most) for _ in range(5))]):
        planned = planner.plan(budget)
        with actmem.apply(model, planned, regions=regions_of(model), memory={"verify": "off"}):
            step()
            step()
            measured = measure_peak(step, torch.device("cpu")).peak_bytes + planner.standing_bytes
        over += [(budget, measured)] if measured > budget + SCALARS else []
    assert not over
