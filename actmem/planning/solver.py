"""One option for each layer, so that a step fits into a budget and takes the least time.

A mixed-integer program along the step, with HiGHS. Its rows say, layer by layer: what stands when the layer's forward
and backward passes run, what copies have got away by then, and when they are back. Each option's figures, its working
set in the backward pass included, come from playing it through, so that the program is linear and yet exact but for
the copies, which it takes to flow evenly. The relaxed program, in which a layer may be a mixture of options, bounds
from below what any choice of them can reach.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from actmem.planning.options import Option
from actmem.planning.plan import Tier
from actmem.planning.program import Program, Solution
from actmem.planning.simulator import Simulator

_MIB = 2**20
_GAP = 3e-4
"""Share of a step that the search may leave on the table."""
_LEAST_PEAK_SECONDS = 10.0
_REACH = 6
"""Reloads of so many layers are asked to be back in time together; with more, only their sum would be another row."""


@dataclass(frozen=True)
class Choice:
    """What was chosen: an option a layer, the seconds that it adds to an unplanned step, the peak that the program
    believes in, and the seconds below which no choice of these options can be."""

    options: tuple[Option, ...]
    added_seconds: float
    peak_bytes: int
    bound_seconds: float
    is_optimal: bool


class Solver:
    """Chooses among `options` of each layer. `limits` are bytes that the tiers can take; `calls_in_flight` is how many
    micro-batches have been through the forward pass at once, as in a pipeline."""

    def __init__(
        self,
        simulator: Simulator,
        options: Sequence[Sequence[Option]],
        *,
        limits: Mapping[Tier, int],
        calls_in_flight: int = 1,
    ) -> None:
        self.simulator = simulator
        self.options = options
        self.limits = limits
        self.calls_in_flight = calls_in_flight

    def least_peak(self) -> Choice:
        """The choice with the least peak, whatever time it takes."""
        layout = _Layout(self, None)
        found = layout.program.solve(relaxed=False, gap=1.0, seconds=_LEAST_PEAK_SECONDS)
        assert found is not None, "without a budget any choice will do"
        return layout.choice(found, 0.0)

    def solve(self, budget_bytes: int, *, seconds: float = 5.0) -> Choice | None:
        """The best choice whose peak is within the budget; ``None`` where there is none."""
        relaxed = _Layout(self, budget_bytes)
        bound = relaxed.program.solve(relaxed=True)
        if bound is None:
            return None
        promising = relaxed.promising(bound)
        reduced = _Layout(self, budget_bytes, promising)
        found = reduced.program.solve(relaxed=False, gap=_GAP * reduced.step_seconds, seconds=seconds)
        if found is None:
            reduced = relaxed
            found = reduced.program.solve(relaxed=False, gap=_GAP * reduced.step_seconds, seconds=seconds)
        if found is None:
            return None
        return reduced.choice(found, bound.objective)


class _Layout:
    """The program for one budget, or for the least one where none is given, with the variables of each layer. Bytes are
    in MiB, so that figures are of a size."""

    def __init__(self, solver: Solver, budget_bytes: int | None, allowed: Sequence[set[int]] | None = None) -> None:
        self._solver = solver
        self._simulator = solver.simulator
        self._around = self._simulator.surroundings
        self._links = self._simulator.conditions.links
        self._options = solver.options
        self._num_layers = len(solver.options)
        self.program = Program()
        self._second_price = 0.0 if budget_bytes is None else 1.0
        high = math.inf if budget_bytes is None else budget_bytes / _MIB
        self._peak = self.program.variable(1.0 - self._second_price, high=high)
        self._chosen = [
            {
                index: self.program.variable(self._second_price * option.seconds, high=1.0, whole=True)
                for index, option in enumerate(options)
                if allowed is None or index in allowed[layer]
            }
            for layer, options in enumerate(self._options)
        ]
        self._peak_rows: list[int] = []
        self._base = [option[0].course for option in self._options]
        self.step_seconds = self._around.seconds + sum(c.forward_seconds + c.backward_seconds for c in self._base)
        self._build()

    def promising(self, bound: Solution) -> list[set[int]]:
        """Options that a solution close to the relaxed one can have."""
        within = 0.01 * self.step_seconds
        found = []
        for chosen in self._chosen:
            near = sorted(chosen, key=lambda index: bound.reduced[chosen[index]])
            found.append({i for i in near[:14] if bound.reduced[chosen[i]] <= within or bound.values[chosen[i]] > 0})
        return found

    def choice(self, found: Solution, bound_seconds: float) -> Choice:
        """What a solution says."""
        options = tuple(
            options[max(chosen, key=lambda index: found.values[chosen[index]])]
            for options, chosen in zip(self._options, self._chosen, strict=True)
        )
        peak = max(self._value(row, found) for row in self._peak_rows)
        return Choice(options, found.objective, round(peak * _MIB), bound_seconds, found.is_optimal)

    def _value(self, row: int, found: Solution) -> float:
        coefficients, _, high = self.program.rows[row]
        stands = sum(value * found.values[index] for index, value in coefficients.items() if index != self._peak)
        return float(stands - high)

    def _build(self) -> None:
        for chosen in self._chosen:
            self.program.row(dict.fromkeys(chosen.values(), 1.0), low=1.0, high=1.0)
        held = self._hold()
        tiers = [tier for tier in self._links if any(o.swapped_bytes.get(tier) for each in self._options for o in each)]
        leaving = {tier: self._leave(tier) for tier in tiers}
        for tier in tiers:
            self._come_back(tier)
            self._cap(tier)
        self._limit_forward(held, leaving)
        self._limit_backward(held, tiers)

    def _hold(self) -> list[int]:
        """Variables for what layers before each hold, and at the end all of them."""
        held = [self.program.variable(high=0.0)]
        for layer in range(self._num_layers):
            held.append(self.program.variable())
            row = self._sum(layer, lambda option: option.held_bytes / _MIB)
            self.program.row({**row, held[layer]: 1.0, held[layer + 1]: -1.0}, low=0.0, high=0.0)
        return held

    def _leave(self, tier: Tier) -> list[int]:
        """Variables for what is on its way out when each layer's forward begins, and at the end."""
        limit = self._simulator.conditions.in_flight_limit / _MIB
        rate = self._links[tier].out_bytes_per_second / _MIB
        leaving = [self.program.variable(high=0.0)]
        for layer in range(self._num_layers):
            leaving.append(self.program.variable(high=limit))
            swapped = self._sum(layer, lambda option: option.swapped_bytes.get(tier, 0) / _MIB)
            self.program.row({**swapped, leaving[-1]: -1.0}, high=0.0)
            drained = rate * self._base[layer].forward_seconds
            self.program.row({**swapped, leaving[layer]: 1.0, leaving[-1]: -1.0}, high=drained)
        return leaving

    def _come_back(self, tier: Tier) -> None:
        """Seconds that layers wait for what they swapped: it starts when the backward pass begins `prefetch` layers
        behind, and all that is asked for between has to come over the same link."""
        rate = self._links[tier].in_bytes_per_second / _MIB
        last, prefetch = self._num_layers - 1, self._simulator.conditions.prefetch
        waits = [self.program.variable(self._second_price) for _ in range(self._num_layers)]
        for layer in range(self._num_layers):
            for first in range(layer, min(layer + _REACH, self._num_layers)):
                row: dict[int, float] = defaultdict(float)
                given = 0.0
                for asked in range(layer, first + 1):
                    for variable, size in self._sum(asked, lambda o: o.swapped_bytes.get(tier, 0) / _MIB).items():
                        row[variable] += size / rate
                for passed in range(layer + 1, min(first + prefetch, last) + 1):
                    given += self._base[passed].backward_seconds
                    for variable, more in self._sum(passed, lambda o: o.course.replay_seconds).items():
                        row[variable] -= more
                    row[waits[passed]] -= 1.0
                row[waits[layer]] -= 1.0
                self.program.row(row, high=given)

    def _cap(self, tier: Tier) -> None:
        if tier in self._solver.limits:
            row: dict[int, float] = {}
            for layer in range(self._num_layers):
                row |= self._sum(layer, lambda option: option.swapped_bytes.get(tier, 0) / _MIB)
            self.program.row(row, high=self._solver.limits[tier] / _MIB / self._solver.calls_in_flight)

    def _limit_forward(self, held: list[int], leaving: Mapping[Tier, list[int]]) -> None:
        for layer in range(self._num_layers):
            row = self._sum(layer, lambda option: option.course.forward_peak_bytes / _MIB)
            row |= {held[layer]: 1.0, **{each[layer]: 1.0 for each in leaving.values()}}
            self._limit(row, held, self._around.forward_bytes[layer])
        ends = {held[-1]: 1.0, **{each[-1]: 1.0 for each in leaving.values()}}
        for gap in (self._around.forward_gaps[-1], self._around.backward_gaps[-1]):
            self._limit(ends, held, gap.peak_bytes)

    def _limit_backward(self, held: list[int], tiers: Sequence[Tier]) -> None:
        prefetch = self._simulator.conditions.prefetch
        for layer in range(self._num_layers):
            row = self._sum(layer, lambda option: option.course.backward_peak_bytes / _MIB)
            row[held[layer]] = 1.0
            for ahead in range(max(layer - prefetch, 0), layer) if tiers else ():
                row |= self._sum(ahead, lambda option: sum(option.swapped_bytes.values()) / _MIB)
            self._limit(row, held, self._around.backward_bytes[layer])
            self._limit({held[layer]: 1.0}, held, self._around.backward_gaps[layer].peak_bytes)

    def _limit(self, row: Mapping[int, float], held: list[int], around_bytes: int) -> None:
        """What stands, with the other micro-batches in flight, is within the budget."""
        row = dict(row)
        if self._solver.calls_in_flight > 1:
            row[held[-1]] = row.get(held[-1], 0.0) + self._solver.calls_in_flight - 1
        row[self._peak] = -1.0
        self._peak_rows.append(self.program.row(row, high=-around_bytes / _MIB))

    def _sum(self, layer: int, figure: Callable[[Option], float]) -> dict[int, float]:
        """The figure of the option that a layer takes, as a row."""
        row = {}
        for index, variable in self._chosen[layer].items():
            value = figure(self._options[layer][index])
            if value:
                row[variable] = value
        return row
