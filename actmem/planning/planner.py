"""A byte budget in, the best plan out.

trace -> options of each layer -> choice under the budget -> simulation. Where the simulation says more than the program
believed, the program gets less to spend, until what is simulated fits; and more, where it leaves much unused. The fixed
policies run along: what comes out is the fastest of all that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, TypedDict, Unpack

from actmem.config.schema import read_budget
from actmem.config.shown import shown
from actmem.errors import ConfigError, Fault, PlanError
from actmem.graph import Graph, RegionGraph
from actmem.hardware import Hardware, Level, load_hardware
from actmem.planning.choice_program import Choice, Mood
from actmem.planning.chosen_rules import rules_of_options, rules_of_policy
from actmem.planning.conditions import conditions_on
from actmem.planning.fates import fates_under, path_of_storage
from actmem.planning.options import Option, OptionMaker
from actmem.planning.plan import Plan, Rule, RuleSet, Tier
from actmem.planning.policies import POLICIES, SWAPPING
from actmem.planning.polish import FEW_LAYERS, polished
from actmem.planning.simulation import HELD, Conditions, LayerPlan, Moment, Simulation
from actmem.planning.simulator import Simulator
from actmem.planning.solver import Solver
from actmem.planning.terrain import Terrain
from actmem.units import format_bytes

_BUDGETS = "bytes such as '60GiB', a share of the activations such as 0.4 or '40%', or auto"
_ROUNDS = 4
_STRIDE = 1.5
"""What is too much or too little changes the next budget by so many times as much."""
_LEAST_STEP = 5e-4
"""Share of a budget that is taken off at least where a choice needs more: the program tells bytes apart less finely."""
_LEAST_SECONDS = 10.0
"""To find, of the plans with the least peak, a fast one."""
_FEW = 600
"""So many options of all layers together are tried one by one."""
_MOST_POLISHED = 3
"""Of the choices that fit, the fastest."""
_UNUSED = 0.001
"""Share of a budget that is not worth another round."""


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


@dataclass(frozen=True)
class _Found:
    """A plan that was played through, for whatever budget it fits."""

    rules: tuple[Rule, ...]
    layers: tuple[LayerPlan, ...]
    simulation: Simulation


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
        peak_bytes = self._least.simulation.peak_bytes
        return self._planned(self._least, "least memory", peak_bytes, self._solver.bound(peak_bytes))

    @property
    def least_peak_bytes(self) -> int:
        """The least peak of any plan; it takes no time to make that plan a fast one, as `least` does."""
        return self._smallest.simulation.peak_bytes

    @cached_property
    def least_bound_bytes(self) -> int:
        """What no plan can get the peak below; found much faster than `least`."""
        peaks = [each.simulation.peak_bytes for each in self._policies]
        return min(*peaks, self._solver.least_peak_bound())

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
        bound = self._solver.bound(budget_bytes)
        found = [*self._policies, *(() if bound is None else self._search(budget_bytes, bound, seconds))]
        fitting = [each for each in found if each.simulation.peak_bytes <= budget_bytes] or [self._least]
        if fitting[0].simulation.peak_bytes > budget_bytes:
            self._refuse(budget_bytes)
        best = min([*fitting, *self._polished(fitting, budget_bytes)], key=_by_seconds)
        return self._planned(best, name, budget_bytes, bound)

    @cached_property
    def _solver(self) -> Solver:
        return Solver(self.simulator, self._options, limits=self._limits)

    @property
    def _options(self) -> list[list[Option]]:
        return [maker.options for maker in self._makers]

    @cached_property
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
    def _policies(self) -> list[_Found]:
        """What the fixed policies come to."""
        found = []
        for policy in POLICIES:
            if self._tiers or policy not in SWAPPING:
                layers, rules = tuple(self.layer_plans(policy)), self._policy_rules(policy)
                found.append(_Found(rules, layers, self.simulator.run(layers)))
        return found

    @cached_property
    def _smallest(self) -> _Found:
        """Each way to solve is asked for less than those before it found. Where options are few, copies do not even
        out, and a choice may need less than the program believes: there it is whatever any way comes to."""
        best, until = min(self._policies, key=_by_peak), time.monotonic() + _LEAST_SECONDS
        for mood in self._moods:
            below = math.inf if self._has_few_options else best.simulation.peak_bytes
            choices = [self._solver.least_peak(mood=mood, below=below)]
            if self._has_few_options and choices[0] is not None:
                choices.append(self._solver.solve(choices[0].peak_bytes, until=until, mood=mood))
            best = min([best, *self._all_played(choices)], key=_by_peak)
        return best

    @cached_property
    def _least(self) -> _Found:
        """What has the smallest peak, or a faster plan that has it as well."""
        best, until = self._smallest, time.monotonic() + _LEAST_SECONDS
        faster = [self._solver.solve(best.simulation.peak_bytes, until=until, mood="plain")]
        if self._tiers:
            faster.append(self._solver.least_peak(is_fast=True))
        return min([best, *self._all_played(faster)], key=_by_peak)

    @property
    def _has_few_options(self) -> bool:
        return sum(map(len, self._options)) <= _FEW

    def _search(self, budget_bytes: int, bound: float, seconds: float) -> Iterator[_Found]:
        """Choices that the simulation takes closer and closer to the budget, until one is good enough."""
        until = time.monotonic() + seconds
        for mood in self._moods:
            aim, too_much = budget_bytes, math.inf
            for _ in range(_ROUNDS):
                choice = self._solver.solve(aim, target=bound, until=until, mood=mood)
                if choice is None:
                    break
                found = self._played(choice.options)
                yield found
                excess = found.simulation.peak_bytes - budget_bytes
                above = found.simulation.seconds - self.unplanned.seconds - bound
                if excess <= 0 and above <= self._solver.gap_seconds:
                    return
                if -_UNUSED * budget_bytes < excess <= 0:
                    break
                if excess > 0:
                    too_much = min(too_much, aim)
                step = max(_STRIDE * excess, _LEAST_STEP * budget_bytes) if excess > 0 else _STRIDE * excess
                aim = round(min(aim - step, (aim + too_much) / 2))

    def _polished(self, fitting: Iterable[_Found], budget_bytes: int) -> Iterator[_Found]:
        """The fastest choices made faster, where layers are so few that this is worth it."""
        if len(self._makers) <= FEW_LAYERS:
            for found in sorted(fitting, key=_by_seconds)[:_MOST_POLISHED]:
                better = self._played(polished(self.simulator, self._makers, found.layers, budget_bytes))
                if better.simulation.peak_bytes <= budget_bytes:
                    yield better

    @property
    def _moods(self) -> tuple[Mood, ...]:
        """How to solve; where copies make the program inexact, in more than one way."""
        return ("careful", "hopeful", "plain") if self._tiers else ("plain",)

    def _played(self, options: tuple[Option, ...]) -> _Found:
        layers = tuple(option.plan for option in options)
        rules = rules_of_options(options, self.simulator.layers)
        return _Found(rules, layers, self.simulator.run(layers))

    def _all_played(self, choices: Iterable[Choice | None]) -> Iterator[_Found]:
        yield from (self._played(choice.options) for choice in choices if choice is not None)

    def _planned(self, found: _Found, name: str, budget_bytes: int, bound: float | None) -> Planned:
        plan = Plan(name, found.rules, self.graph.made_for, prefetch=self.simulator.conditions.prefetch)
        bound_seconds = min(self.unplanned.seconds + (bound or 0.0), found.simulation.seconds)
        is_optimal = found.simulation.seconds <= bound_seconds + self._solver.gap_seconds
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
        swapped, and another loss only where this one holds all logits then."""
        if not self._tiers and peak.bytes_by_use.get(HELD, 0) > self._min_swap_bytes:
            yield "swapping (hardware with a link, or memory.tier: disk)"
        if peak.where.startswith("behind the layers") and self._holds_all_logits():
            yield "model.loss: chunked, which never holds all logits"
        yield "a smaller train.micro_batch_size"
        yield "a shorter data.sequence_length"

    def _holds_all_logits(self) -> bool:
        step = self.graph.step
        assert step is not None
        return any(op.signature.startswith(f"_log_softmax({step.num_tokens}x") for op in step.gaps[-1].forward)


def _by_seconds(found: _Found) -> float:
    return found.simulation.seconds


def _by_peak(found: _Found) -> tuple[int, float]:
    return found.simulation.peak_bytes, found.simulation.seconds


def _percent(share: float) -> str:
    """``40%``, ``12.5%``."""
    return f"{100 * share:.4g}%"
