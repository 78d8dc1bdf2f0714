"""The search for the plan that meets a budget best, and for the one that needs the least memory.

The program chooses an option for each layer, and the choice is simulated. Where the simulation says more than the
program believed, the program gets less to spend, until what is simulated fits; and more, where it leaves much unused.
The fixed policies run along: what comes out is the fastest of all that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from actmem.planning.choice_program import Choice, Mood
from actmem.planning.chosen_rules import rules_of_options
from actmem.planning.options import Option, OptionMaker
from actmem.planning.plan import Rule, Tier
from actmem.planning.polish import FEW_LAYERS, polished
from actmem.planning.simulation import LayerPlan, Simulation
from actmem.planning.solver import Solver
from actmem.planning.terrain import Terrain

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
class Found:
    """A plan that was played through, for whatever budget it fits."""

    rules: tuple[Rule, ...]
    layers: tuple[LayerPlan, ...]
    simulation: Simulation


class Search:
    """Searches among the options that `makers` make, one of them for each layer. `policies` are the fixed ones, the
    first of them that of no plan; `limits` are bytes that the tiers can take, and `swaps` says whether any may."""

    def __init__(
        self,
        terrain: Terrain,
        makers: Sequence[OptionMaker],
        policies: Sequence[Found],
        *,
        limits: Mapping[Tier, int],
        swaps: bool,
    ) -> None:
        self.options = [maker.options for maker in makers]
        self.solver = Solver(terrain, self.options, limits=limits)
        self._terrain = terrain
        self._makers = makers
        self._policies = policies
        self._swaps = swaps

    def fastest(self, budget_bytes: int, bound: float | None, *, seconds: float) -> Found | None:
        """The fastest plan whose simulated peak is within the budget, after about so many `seconds` the best that was
        found; ``None`` where even the least peak is above it. `bound` is what the solver has for that budget."""
        found = [*self._policies, *(() if bound is None else self._closing_in(budget_bytes, bound, seconds))]
        fitting = [each for each in found if each.simulation.peak_bytes <= budget_bytes] or [self.least]
        if fitting[0].simulation.peak_bytes > budget_bytes:
            return None
        best: Found = min([*fitting, *self._polished(fitting, budget_bytes)], key=_by_seconds)
        return best

    @cached_property
    def smallest(self) -> Found:
        """What has the least peak. Each way to solve is asked for less than those before it found. Where options are
        few, copies do not even out, and a choice may need less than the program believes: there it is whatever any way
        comes to."""
        best, until = min(self._policies, key=_by_peak), time.monotonic() + _LEAST_SECONDS
        for mood in self._moods:
            below = math.inf if self._has_few_options else best.simulation.peak_bytes
            choices = [self.solver.least_peak(mood=mood, below=below)]
            if self._has_few_options and choices[0] is not None:
                choices.append(self.solver.solve(choices[0].peak_bytes, until=until, mood=mood))
            best = min([best, *self._all_played(choices)], key=_by_peak)
        return best

    @cached_property
    def least(self) -> Found:
        """`smallest`, or a faster plan that has its peak as well."""
        best, until = self.smallest, time.monotonic() + _LEAST_SECONDS
        faster = [self.solver.solve(best.simulation.peak_bytes, until=until, mood="plain")]
        if self._swaps:
            faster.append(self.solver.least_peak(is_fast=True))
        return min([best, *self._all_played(faster)], key=_by_peak)

    def _closing_in(self, budget_bytes: int, bound: float, seconds: float) -> Iterator[Found]:
        """Choices that the simulation takes closer and closer to the budget, until one is good enough."""
        until, least_seconds = time.monotonic() + seconds, self._policies[0].simulation.seconds + bound
        for mood in self._moods:
            aim, too_much = budget_bytes, math.inf
            for _ in range(_ROUNDS):
                choice = self.solver.solve(aim, target=bound, until=until, mood=mood)
                if choice is None:
                    break
                found = self._played(choice.options)
                yield found
                excess = found.simulation.peak_bytes - budget_bytes
                if excess <= 0 and found.simulation.seconds - least_seconds <= self.solver.gap_seconds:
                    return
                if -_UNUSED * budget_bytes < excess <= 0:
                    break
                if excess > 0:
                    too_much = min(too_much, aim)
                step = max(_STRIDE * excess, _LEAST_STEP * budget_bytes) if excess > 0 else _STRIDE * excess
                aim = round(min(aim - step, (aim + too_much) / 2))

    def _polished(self, fitting: Iterable[Found], budget_bytes: int) -> Iterator[Found]:
        """The fastest choices made faster, where layers are so few that this is worth it."""
        if len(self._makers) <= FEW_LAYERS:
            for found in sorted(fitting, key=_by_seconds)[:_MOST_POLISHED]:
                better = self._played(polished(self._terrain, self._makers, found.layers, budget_bytes))
                if better.simulation.peak_bytes <= budget_bytes:
                    yield better

    @property
    def _has_few_options(self) -> bool:
        return sum(map(len, self.options)) <= _FEW

    @property
    def _moods(self) -> tuple[Mood, ...]:
        """How to solve; where copies make the program inexact, in more than one way."""
        return ("careful", "hopeful", "plain") if self._swaps else ("plain",)

    def _played(self, options: tuple[Option, ...]) -> Found:
        layers = tuple(option.plan for option in options)
        return Found(rules_of_options(options, self._terrain.layers), layers, self._terrain.run(layers))

    def _all_played(self, choices: Iterable[Choice | None]) -> Iterator[Found]:
        yield from (self._played(choice.options) for choice in choices if choice is not None)


def _by_seconds(found: Found) -> float:
    return found.simulation.seconds


def _by_peak(found: Found) -> tuple[int, float]:
    return found.simulation.peak_bytes, found.simulation.seconds
