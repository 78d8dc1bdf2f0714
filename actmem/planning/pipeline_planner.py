"""The best plan for a pipeline: a budget for each rank, and each rank's layers planned for what is under way there.

For a given cut into stages ranks decouple: what one of them recomputes or swaps costs it time in each micro-batch, and
takes no memory of another. So each is planned alone, and one that has slack pays nothing; then all are played through
together, and a rank in which copies take more than it was thought gets less to spend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

from actmem.errors import PlanError
from actmem.graph import RegionGraph
from actmem.planning.options import OptionMaker
from actmem.planning.pipeline import PipelineSimulation, PipelineSimulator
from actmem.planning.plan import Plan, Rule
from actmem.planning.planner import Planned, Planner, Settings
from actmem.planning.policies import POLICIES
from actmem.planning.rank import RankSimulator
from actmem.planning.simulation import LayerPlan

RulesOf = Callable[[int, RegionGraph], tuple[Rule, ...]]
"""The rules of a layer, by its number, whose graph is given beside."""

_ROUNDS = 4
_STRIDE = 1.5
"""A rank that takes too much has so many times as much less to spend in the next round."""


@dataclass(frozen=True)
class PlannedPipeline:
    """A plan for a pipeline. `ranks` are the plans of each rank alone, `simulation` is what a step of all together
    comes to, and `bound_seconds` what no plan of these options can undercut."""

    plan: Plan
    ranks: tuple[Planned, ...]
    simulation: PipelineSimulation
    unplanned: PipelineSimulation
    bound_seconds: float

    @property
    def added_share(self) -> float:
        """By which share of the unplanned step this one is longer."""
        return self.simulation.seconds / self.unplanned.seconds - 1.0

    @property
    def bound_share(self) -> float:
        """By which share any plan makes the step longer."""
        return self.bound_seconds / self.unplanned.seconds - 1.0


class PipelinePlanner:
    """Plans for one pipeline; `settings` are those of a `Planner`."""

    def __init__(self, simulator: PipelineSimulator, **settings: Unpack[Settings]) -> None:
        self.simulator = simulator
        self.pipeline = simulator.pipeline
        made: dict[object, OptionMaker] = {}
        self._terrains = [RankSimulator(simulator, rank) for rank in range(len(self.pipeline.orders))]
        self.ranks = [Planner(terrain, made=made, **settings) for terrain in self._terrains]

    @cached_property
    def unplanned(self) -> PipelineSimulation:
        """The step without a plan."""
        return self.simulate("none")

    def simulate(self, policy: str | Plan) -> PipelineSimulation:
        """The step under a fixed policy or a plan for the whole model."""
        if isinstance(policy, Plan):
            return self.simulate_under(lambda layer, _: policy.rules_for(layer))
        return self.simulate_under(lambda _, graph: POLICIES[policy](graph))

    def simulate_under(self, rules_of: RulesOf) -> PipelineSimulation:
        """The step under the rules that `rules_of` gives for each layer of the whole model, and its graph."""
        plans: dict[int, LayerPlan] = {}
        for planner, terrain in zip(self.ranks, self._terrains, strict=True):
            own = planner.layer_plans_under(_numbered(rules_of, terrain.numbers))
            plans.update(zip(terrain.numbers, own, strict=True))
        return self._run(plans)

    def within(self, budget: str | int | float, *, memory_bytes: int | None = None) -> PlannedPipeline:
        """The best plan for a budget of each rank: bytes, a share of what the layers of each hold at once, or ``auto``,
        which stands for `memory_bytes`. Raises `ConfigError`, and `PlanError` that names the ranks that cannot meet
        it."""
        found = list(self._each(budget, memory_bytes))
        aims = [each.budget_bytes for each in found]
        for _ in range(_ROUNDS):
            simulation = self._run(self._plans(found))
            excess = [rank.peak_bytes - each.budget_bytes for rank, each in zip(simulation.ranks, found, strict=True)]
            if max(excess) <= 0:
                return self._planned(found, simulation)
            for rank, too_much in enumerate(excess):
                if too_much > 0:
                    aims[rank] -= round(_STRIDE * too_much)
                    again = self.ranks[rank].plan(aims[rank], name=found[rank].plan.name)
                    found[rank] = replace(again, budget_bytes=found[rank].budget_bytes)
        over = [rank for rank, too_much in enumerate(excess) if too_much > 0]
        raise PlanError(
            f"ranks {over} of the pipeline: copies come too late for every plan that was tried; set memory.tier to one "
            "that is faster, or a larger memory_budget"
        )

    def _each(self, budget: str | int | float, memory_bytes: int | None) -> Iterator[Planned]:
        """Plans of the ranks alone; those that cannot meet the budget all say so at once."""
        refused = []
        for rank, planner in enumerate(self.ranks):
            try:
                yield planner.within(budget, memory_bytes=memory_bytes)
            except PlanError as error:
                refused.append(f"rank {rank} of the pipeline, {self._stages_of(rank)}: {error}")
        if refused:
            raise PlanError("\n".join(refused))

    def _stages_of(self, rank: int) -> str:
        stages = self.pipeline.stages_of[rank]
        return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}"

    def _plans(self, found: Sequence[Planned]) -> dict[int, LayerPlan]:
        return {
            number: plan
            for terrain, planned in zip(self._terrains, found, strict=True)
            for number, plan in zip(terrain.numbers, planned.layers, strict=True)
        }

    def _run(self, plans: Mapping[int, LayerPlan]) -> PipelineSimulation:
        return self.simulator.run([plans[number] for number in range(len(plans))])

    def _planned(self, found: Sequence[Planned], simulation: PipelineSimulation) -> PlannedPipeline:
        rules = [
            replace(rule, layers=tuple(sorted(terrain.numbers[layer] for layer in _layers_of(rule, terrain))))
            for terrain, planned in zip(self._terrains, found, strict=True)
            for rule in planned.plan.rules
        ]
        # One that swaps nothing says how far ahead another one, or none, reloads.
        prefetch = max(each.plan.prefetch for each in found)
        plan = Plan(found[0].plan.name, tuple(rules), self.pipeline.made_for, prefetch=prefetch)
        bound = max(self.unplanned.seconds, *(each.bound_seconds for each in found))
        return PlannedPipeline(plan, tuple(found), simulation, self.unplanned, min(bound, simulation.seconds))


def _numbered(rules_of: RulesOf, numbers: Sequence[int]) -> RulesOf:
    """The same for layers that have these numbers in the whole model."""
    return lambda layer, graph: rules_of(numbers[layer], graph)


def _layers_of(rule: Rule, terrain: RankSimulator) -> Sequence[int]:
    return range(len(terrain.numbers)) if rule.layers is None else rule.layers
