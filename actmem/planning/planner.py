"""A byte budget in, the best plan out: trace -> options of each layer -> choice under the budget -> simulation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, TypedDict, Unpack

from actmem.config.schema import read_budget
from actmem.config.shown import shown
from actmem.errors import ConfigError, Fault, PlanError
from actmem.graph import Graph, RegionGraph
from actmem.hardware import Hardware, Level, load_hardware
from actmem.planning.chosen_rules import rules_of_policy
from actmem.planning.conditions import conditions_on
from actmem.planning.fates import fates_under, path_of_storage
from actmem.planning.options import OptionMaker
from actmem.planning.plan import Plan, Rule, RuleSet, Tier
from actmem.planning.policies import POLICIES, SWAPPING
from actmem.planning.search import Found, Search
from actmem.planning.simulation import HELD, Conditions, LayerPlan, Moment, Simulation
from actmem.planning.simulator import Simulator
from actmem.planning.terrain import Terrain
from actmem.units import format_bytes

_SHARED = ("parameters", "gradients", "optimizer")
_BUDGETS = "bytes such as '60GiB', a share of the activations such as 0.4 or '40%', or auto"


@dataclass(frozen=True)
class Planned:
    """A plan for a budget. `simulation` is what a step under it comes to, `bound_seconds` what no plan of these options
    can undercut; `unplanned` is the step without a plan. `is_optimal`: it is as close to the bound as is asked for."""

    plan: Plan
    budget_bytes: int
    simulation: Simulation
    unplanned: Simulation
    bound_seconds: float
    is_optimal: bool
    layers: tuple[LayerPlan, ...]

    @property
    def added_share(self) -> float:
        """By which share of the unplanned step this one is longer."""
        return self.simulation.seconds / self.unplanned.seconds - 1.0

    @property
    def bound_share(self) -> float:
        """By which share any plan makes the step longer."""
        return self.bound_seconds / self.unplanned.seconds - 1.0


def plan(
    graph: Graph,
    memory_budget: str | int | float,
    hardware: str | Path | Hardware,
    *,
    level: Level = "nominal",
    tiers: tuple[Tier, ...] = ("host",),
    gradients_stand: bool = False,
) -> Planned:
    """The best plan for a traced step within a budget of device memory.

    `memory_budget` is a number of bytes, a text such as ``"60GiB"``, or the share of the layers' activations that may
    stay (``0.4``, ``"40%"``); it covers parameters, gradients, optimizer state and everything else that stands.
    `hardware` names a device, or a file that ``actmem calibrate`` wrote; ``auto`` as a budget is all of its memory.
    `tiers` may take swapped values: ``()`` to recompute only. `gradients_stand`: parameters have gradients when a step
    begins. `actmem.apply` takes what this returns. Raises `PlanError` for a budget that no plan can meet, `ConfigError`
    for one that is none, and `HardwareError`.
    """
    if not isinstance(graph, Graph):
        raise PlanError(f"graph is a {type(graph).__name__}; allowed: what actmem.trace(model, batch) gives")
    profile = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    conditions = conditions_on(profile, level=level, tiers=tiers, gradients_stand=gradients_stand)
    return planner_for(graph, conditions).within(memory_budget, memory_bytes=profile.memory_bytes)


def planner_for(graph: Graph, conditions: Conditions, **settings: Unpack[Settings]) -> Planner:
    """A planner for one traced step. Raises `PlanError` for a graph without its step."""
    if graph.step is None:
        raise PlanError(
            "only the layers' forward passes were traced; a plan for a budget needs the whole step, as actmem.trace "
            "gives it"
        )
    return Planner(Simulator(graph, conditions), **settings)


class Settings(TypedDict, total=False):
    """What a search may use: `limits` of the tiers in bytes; `swap_to` those tiers that it may use, by default
    all that there are links to; and `min_swap_bytes`, the least that is worth a copy."""

    limits: Mapping[Tier, int]
    min_swap_bytes: int
    swap_to: tuple[Tier, ...] | None


class Planner:
    """Plans for one step, or for what one rank of a pipeline does; the layers' options are worked out once, and shared
    with other planners through `made`."""

    def __init__(
        self, simulator: Terrain, *, made: dict[object, OptionMaker] | None = None, **settings: Unpack[Settings]
    ) -> None:
        self.simulator = simulator
        self.graph = simulator.graph
        self._limits = dict(settings.get("limits", {}))
        self._min_swap_bytes = settings.get("min_swap_bytes", 2**20)
        swap_to = settings.get("swap_to")
        self._tiers = tuple(simulator.conditions.links) if swap_to is None else swap_to
        self._made = {} if made is None else made

    @cached_property
    def unplanned(self) -> Simulation:
        """The step without a plan."""
        return self.simulate("none")

    @cached_property
    def activation_bytes(self) -> int:
        """What all layers hold between their passes, without a plan."""
        return self.unplanned.held_bytes

    @property
    def standing_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer state: what a peak has that no activation takes."""
        assert self.graph.step is not None
        return self.graph.step.standing.total

    def simulate(self, policy: str | Plan) -> Simulation:
        """The step under a fixed policy or a plan."""
        return self.simulator.run(self.layer_plans(policy))

    def layer_plans(self, policy: str | Plan) -> list[LayerPlan]:
        """What a fixed policy or a plan does with each layer."""
        if isinstance(policy, Plan):
            return self.layer_plans_under(lambda layer, _: policy.rules_for(layer))
        rules_of = {id(graph): POLICIES[policy](graph) for graph in self.graph.kinds.values()}
        return self.layer_plans_under(lambda _, graph: rules_of[id(graph)])

    def layer_plans_under(self, rules_of: Callable[[int, RegionGraph], tuple[Rule, ...]]) -> list[LayerPlan]:
        """What the rules that `rules_of` gives for a layer and its graph do with each layer."""
        made: dict[Hashable, LayerPlan] = {}
        plans = []
        for layer, graph in enumerate(self.simulator.layers):
            rules = rules_of(layer, graph)
            key = (id(graph), rules)
            if key not in made:
                made[key] = self._layer_plan(graph, RuleSet(rules))
            plans.append(made[key])
        return plans

    def budget_of(self, share: float) -> int:
        """The budget that leaves `share` of the layers' activations."""
        return self.unplanned.peak_bytes - round((1.0 - share) * self.activation_bytes)

    @cached_property
    def least(self) -> Planned:
        """The plan with the least peak that there is; of several, the fastest."""
        least = self._search.least
        peak_bytes = least.simulation.peak_bytes
        return self._planned(least, "least memory", peak_bytes, self._search.solver.bound(peak_bytes))

    @property
    def least_peak_bytes(self) -> int:
        """The least peak of any plan; it takes no time to make that plan a fast one, as `least` does."""
        return self._search.smallest.simulation.peak_bytes

    @cached_property
    def least_bound_bytes(self) -> int:
        """What no plan can get the peak below; found much faster than `least`."""
        peaks = [each.simulation.peak_bytes for each in self._policies]
        return min(*peaks, self._search.solver.least_peak_bound())

    def can_meet(self, budget_bytes: int) -> bool:
        """Whether there is a plan whose peak is within the budget; as a rule the bound, or a fixed policy, tells."""
        if self.least_bound_bytes > budget_bytes:
            return False
        peaks = (each.simulation.peak_bytes for each in self._policies)
        return min(peaks) <= budget_bytes or self.least_peak_bytes <= budget_bytes

    def within(self, budget: str | int | float, *, memory_bytes: int | None = None) -> Planned:
        """The best plan for a budget as a user writes it: bytes, a share of the activations, or ``auto``, which stands
        for `memory_bytes`. Raises `ConfigError` and `PlanError`."""
        try:
            read = read_budget(budget)
        except ValueError as error:
            raise ConfigError([Fault("memory_budget", f"{shown(budget)} {error}", budget, _BUDGETS)]) from error
        if isinstance(read, float):
            return self.plan(self.budget_of(read), name=f"auto@{_percent(read)}")
        if read == "auto":
            if memory_bytes is None:
                raise ConfigError([Fault("memory_budget", "auto needs a device", budget, _BUDGETS)])
            read = memory_bytes
        return self.plan(read)

    def plan(self, budget_bytes: int, *, name: str | None = None, seconds: float = 20.0) -> Planned:
        """The fastest plan whose simulated peak is within the budget.

        After about `seconds` the search takes the best that it has found. Raises `PlanError` for a budget that no
        plan can meet, with what the least possible one is made of.
        """
        name = name or f"auto@{format_bytes(budget_bytes).replace(' ', '')}"
        if budget_bytes >= self.unplanned.peak_bytes:
            return self._unplanned(budget_bytes, name)
        bound = self._search.solver.bound(budget_bytes)
        found = self._search.fastest(budget_bytes, bound, seconds=seconds)
        if found is None:
            self._refuse(budget_bytes)
        return self._planned(found, name, budget_bytes, bound)

    @cached_property
    def _search(self) -> Search:
        return Search(self.simulator, self._makers(), self._policies, limits=self._limits, swaps=bool(self._tiers))

    def _makers(self) -> list[OptionMaker]:
        makers = []
        for layer, graph in enumerate(self.simulator.layers):
            key = (id(graph), self.simulator.leaving(layer), self.simulator.sharing(layer))
            if key not in self._made:
                self._made[key] = OptionMaker(
                    self.simulator, layer, tiers=self._tiers, min_swap_bytes=self._min_swap_bytes
                )
            makers.append(self._made[key])
        return makers

    @cached_property
    def _policies(self) -> list[Found]:
        """What the fixed policies come to."""
        found = []
        for policy in POLICIES:
            if self._tiers or policy not in SWAPPING:
                layers, rules = tuple(self.layer_plans(policy)), self._policy_rules(policy)
                found.append(Found(rules, layers, self.simulator.run(layers)))
        return found

    def _planned(self, found: Found, name: str, budget_bytes: int, bound: float | None) -> Planned:
        plan = Plan(name, found.rules, self.graph.made_for, prefetch=self.simulator.conditions.prefetch)
        bound_seconds = min(self.unplanned.seconds + (bound or 0.0), found.simulation.seconds)
        is_optimal = found.simulation.seconds <= bound_seconds + self._search.solver.gap_seconds
        return Planned(plan, budget_bytes, found.simulation, self.unplanned, bound_seconds, is_optimal, found.layers)

    def _unplanned(self, budget_bytes: int, name: str) -> Planned:
        plan = Plan(name, (), self.graph.made_for)
        layers = tuple(self.layer_plans("none"))
        seconds = self.unplanned.seconds
        return Planned(plan, budget_bytes, self.unplanned, self.unplanned, seconds, True, layers)

    def _policy_rules(self, policy: str) -> tuple[Rule, ...]:
        return rules_of_policy(self.graph, lambda _, region: POLICIES[policy](region))

    def _layer_plan(self, graph: RegionGraph, rules: RuleSet) -> LayerPlan:
        fates = fates_under(graph, rules, min_swap_bytes=self._min_swap_bytes)
        return LayerPlan(fates, {each: self._tier_of(rules, path_of_storage(graph, each)) for each in fates.swapped})

    def _tier_of(self, rules: RuleSet, path: str) -> Tier:
        links = tuple(self.simulator.conditions.links)
        if not links:
            raise PlanError(f"{path} is to be swapped, and the hardware profile has no link or disk to swap over")
        return rules.tier_of(path) or links[0]

    def _refuse(self, budget_bytes: int) -> NoReturn:
        least = self.least.simulation
        parts = sorted(least.peak.bytes_by_use.items(), key=lambda part: -part[1])
        made_up = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        raise PlanError(
            f"a budget of {format_bytes(budget_bytes)} cannot be met: the least possible is "
            f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), reached {least.peak.where} with {made_up}; "
            f"what would lower it: {'; '.join(self._remedies(least.peak))}"
        )

    def _remedies(self, peak: Moment) -> Iterator[str]:
        """What lowers the least peak: swapping only where other layers hold at that moment what is large enough to be
        swapped, another loss only where this one holds all logits then, more devices only where most of it is what they
        would share, and a smaller batch unless that is the gradient of an embedding."""
        if not self._tiers and peak.bytes_by_use.get(HELD, 0) > self._min_swap_bytes:
            yield "swapping (hardware with a link, or memory.tier: disk)"
        if "behind the layers" in peak.where and self._holds_all_logits():
            yield "model.loss: chunked, which never holds all logits"
        shared = 2 * sum(peak.bytes_by_use.get(use, 0) for use in _SHARED) > peak.num_bytes
        if shared:
            yield "more devices that share parameters (parallel.dp_shard_size)"
        if not (shared and "before layer 0, backward" in peak.where):
            yield self._smaller_batch
            yield "a shorter data.sequence_length"

    @property
    def _smaller_batch(self) -> str:
        if self.simulator.repeats > 1:
            return "more parallel.pp_microbatches, or a smaller train.micro_batch_size"
        return "a smaller train.micro_batch_size"

    def _holds_all_logits(self) -> bool:
        step = self.graph.step
        assert step is not None
        return any(op.signature.startswith(f"_log_softmax({step.num_tokens}x") for op in step.gaps[-1].forward)


def _percent(share: float) -> str:
    """``40%``, ``12.5%``."""
    return f"{100 * share:.4g}%"
