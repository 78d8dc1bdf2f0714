"""The program of a choice: one option for each layer, so that a step fits into a budget and takes the least time.

Its rows say, layer by layer: what stands when the layer's forward and backward passes run, what copies have got away
by then, and when they are back. Each option's figures, its working set in the backward pass included, come from playing
it through, so that the program is linear and yet exact but for the copies. It takes those to flow evenly, and comes in
several moods. The hopeful one has them leave as soon as may be; relaxed, so that a layer may be a mixture of options,
it bounds from below what any choice of them can reach. The careful one knows that what a layer makes last is still here
when the layer ends, and is the better one to choose by. The plain one swaps nothing, and is exact.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from actmem.planning.options import Option
from actmem.planning.plan import Tier
from actmem.planning.program import Program, Solution
from actmem.planning.sharing import Common
from actmem.planning.terrain import Moment, Terrain, plus

_MIB = 2**20
_NEAR = 10
"""So many options that the relaxed solution leaves out, the nearest ones, are considered beside those that it takes."""
_LAST = 12
"""So many layers can be left to a search at once."""

Mood = Literal["careful", "hopeful", "plain"]


@dataclass(frozen=True)
class Choice:
    """What was chosen: an option a layer, the seconds that it adds to an unplanned step, and the peak that the program
    believes in."""

    options: tuple[Option, ...]
    added_seconds: float
    peak_bytes: int


class ChoiceProgram:
    """The program for one budget, or for the least one where none is given, up to `most_bytes` and with a second as
    dear as `second_price` MiB, with the variables of each layer. Bytes are in MiB, so that figures are of a size."""

    def __init__(
        self,
        terrain: Terrain,
        options: Sequence[Sequence[Option]],
        budget_bytes: int | None,
        among: Sequence[frozenset[int]] | None = None,
        *,
        limits: Mapping[Tier, int],
        mood: Mood = "careful",
        most_bytes: float = math.inf,
        second_price: float = 0.0,
    ) -> None:
        self._careful = mood == "careful"
        self._terrain = terrain
        self._commons = terrain.commons
        self._conditions = terrain.conditions
        self._options = options
        self._limits = limits
        self._num_layers = len(options)
        self.program = Program()
        self._second_price = second_price if budget_bytes is None else float(terrain.repeats)
        high = most_bytes if budget_bytes is None else budget_bytes
        self._peak = self.program.variable(float(budget_bytes is None), high=high / _MIB)
        self._chosen = [
            {
                index: self.program.variable(self._second_price * option.seconds, high=1.0, whole=True)
                for index, option in enumerate(options)
                if (among is None or index in among[layer]) and not (mood == "plain" and option.swapped_bytes)
            }
            for layer, options in enumerate(self._options)
        ]
        self._peak_rows: list[int] = []
        self._backlogs: dict[int, float] = {}
        self._build()

    def promising(self, relaxed: Solution) -> tuple[frozenset[int], ...]:
        """Options that a solution close to the relaxed one can have. Layers that choose among the same ones can change
        places, so what is taken for one of them is promising for all."""
        alike: dict[int, list[int]] = defaultdict(list)
        for layer, options in enumerate(self._options):
            alike[id(options)].append(layer)
        found = {key: self._promising_for(layers, relaxed) for key, layers in alike.items()}
        return tuple(found[id(options)] for options in self._options)

    @property
    def windows(self) -> list[range]:
        """Groups of layers, each a third of all: every third one, and those that follow one another."""
        third = -(-self._num_layers // 3)
        starts = range(0, self._num_layers, third)
        return [
            *(range(first, self._num_layers, 3) for first in range(min(3, self._num_layers))),
            *(range(first, min(first + third, self._num_layers)) for first in starts),
        ]

    def settled(self, found: Solution, window: range) -> dict[int, float]:
        """Variables of all layers but those in a window, with what they have in a solution."""
        settled = [chosen for layer, chosen in enumerate(self._chosen) if layer not in window]
        return {variable: float(round(found.values[variable])) for chosen in settled for variable in chosen.values()}

    def dived(self) -> dict[int, float]:
        """Variables of most layers, settled in turn: those first for which the relaxed solution is the most decided,
        after which the relaxed solution for the others is another one."""
        settled: dict[int, float] = {}
        free, step = set(range(self._num_layers)), self._num_layers
        relaxed = self.program.solve(relaxed=True)
        while relaxed is not None and len(free) > _LAST and step:
            step = min(step, len(free) // 3)
            values = relaxed.values
            leading = {layer: max(self._chosen[layer].values(), key=lambda each: values[each]) for layer in free}
            chosen = sorted(free, key=lambda layer: (-values[leading[layer]], layer))[:step]
            more = {each: float(each == leading[layer]) for layer in chosen for each in self._chosen[layer].values()}
            after = self.program.solve(relaxed=True, fixed={**settled, **more})
            if after is None:
                step //= 2
            else:
                relaxed, settled, free = after, {**settled, **more}, free.difference(chosen)
        return settled

    def choice(self, found: Solution) -> Choice:
        """What a solution says."""
        options = tuple(
            options[max(chosen, key=lambda index: found.values[chosen[index]])]
            for options, chosen in zip(self._options, self._chosen, strict=True)
        )
        peak = max(self._value(row, found) for row in self._peak_rows)
        return Choice(options, found.objective, math.ceil(peak * _MIB))

    def _promising_for(self, layers: Sequence[int], relaxed: Solution) -> frozenset[int]:
        variables = {index: [self._chosen[layer][index] for layer in layers] for index in self._chosen[layers[0]]}
        taken = {index for index, each in variables.items() if max(relaxed.values[each]) > 0}
        near = sorted(variables.keys() - taken, key=lambda index: (min(relaxed.reduced[variables[index]]), index))
        return frozenset(taken.union(near[:_NEAR]))

    def _value(self, row: int, found: Solution) -> float:
        coefficients, _, high = self.program.rows[row]
        stands = sum(value * found.values[index] for index, value in coefficients.items() if index != self._peak)
        return float(stands - high)

    def _build(self) -> None:
        for chosen in self._chosen:
            self.program.row(dict.fromkeys(chosen.values(), 1.0), low=1.0, high=1.0)
        held = self._hold()
        self._shared = [self._hold_together(common) for common in self._commons]
        named = (self._options[layer][index] for layer, each in enumerate(self._chosen) for index in each)
        used = {tier for option in named for tier in option.swapped_bytes}
        self._away = {tier: self._totals(partial(_mib_to, tier)) for tier in self._conditions.links if tier in used}
        leaving: list[list[int]] = []
        if self._away and self._terrain.repeats == 1:
            leaving = self._go_and_come_back()
        elif self._away:
            self._backlogs = self._circulate()
        self._cap()
        for number, span in enumerate(self._terrain.spans):
            self._limit_forward(number, span, held, leaving)
            self._limit_backward(number, span, held)

    def _go_and_come_back(self) -> list[list[int]]:
        """Rows for copies out along the forward pass, and in along the backward pass; what `_leave` gives of each
        tier."""
        forward = self._totals(lambda option: option.course.forward_seconds)
        backward = self._totals(lambda option: option.course.backward_seconds)
        waits = [self.program.variable(self._second_price) for _ in backward]
        leaving = [self._leave(tier, forward) for tier in self._away]
        for tier, each in zip(self._away, leaving, strict=True):
            self._come_back(tier, waits, backward, each[-1])
        return leaving

    def _circulate(self) -> dict[int, float]:
        """Rows for the copies of a rank that goes through its layers again and again: between the passes of one
        micro-batch lie those of others, so that a link has all the time in which as much is computed. Until the first
        backward pass, though, as many forward passes as are ever under way follow one another, faster than what they
        send leaves: the backlogs, which are returned as a row."""
        forward = self._totals(lambda option: option.course.forward_seconds)
        backward = self._totals(lambda option: option.course.backward_seconds)
        backlogs: dict[int, float] = {}
        for tier, away in self._away.items():
            link = self._conditions.links[tier]
            for rate in (link.out_bytes_per_second / _MIB, link.in_bytes_per_second / _MIB):
                row = {**dict.fromkeys(away, 1.0), **dict.fromkeys((*forward, *backward), -rate)}
                self.program.row(row, high=rate * self._terrain.gap_seconds)
            if self._careful:
                backlogs[self._backlog(away, forward, link.out_bytes_per_second / _MIB)] = 1.0
        return backlogs

    def _backlog(self, away: Sequence[int], forward: Sequence[int], rate: float) -> int:
        """A variable for what is still leaving over a link after the forward passes of the beginning."""
        backlog = self.program.variable()
        row: dict[int, float] = {backlog: -1.0}
        for number, span in enumerate(self._terrain.spans):
            moments = self._terrain.moments(number, backward=True)
            count = 1 + max(moment.counts[number] for moment in moments)
            row |= {away[layer]: float(count) for layer in span} | {forward[layer]: -count * rate for layer in span}
        self.program.row(row, high=0.0)
        return backlog

    def _totals(self, figure: Callable[[Option], float]) -> list[int]:
        """Variables for a figure of each layer."""
        totals = [self.program.variable() for _ in range(self._num_layers)]
        for layer, total in enumerate(totals):
            self.program.row({**self._sum(layer, figure), total: -1.0}, low=0.0, high=0.0)
        return totals

    def _hold(self) -> list[int]:
        """Variables for what layers before each hold, and at the end all of them."""
        held = [self.program.variable(high=0.0)]
        for layer in range(self._num_layers):
            held.append(self.program.variable())
            row = self._sum(layer, lambda option: option.held_bytes / _MIB)
            self.program.row({**row, held[layer]: 1.0, held[layer + 1]: -1.0}, low=0.0, high=0.0)
        return held

    def _hold_together(self, common: Common) -> dict[int, int]:
        """For each layer with which a common storage may count, a variable that is 1 if it or an earlier one does."""
        variables: dict[int, int] = {}
        for layer in common.counting:
            storage, before = dict(common.holders)[layer], list(variables.values())[-1:]
            variables[layer] = self.program.variable(high=1.0)
            holds = self._sum(layer, partial(_holds, storage))
            self.program.row({**holds, variables[layer]: -1.0}, high=0.0)
            for each in before:
                self.program.row({each: 1.0, variables[layer]: -1.0}, high=0.0)
        return variables

    def _held_by(self, span: range, layer: int, held: Sequence[int], moment: Moment) -> dict[int, float]:
        """What layers of a span before one hold, other calls hold, and what has not left yet, as a row."""
        row: dict[int, float] = {held[layer]: 1.0, held[span.start]: -1.0} if layer > span.start else {}
        row |= self._backlogs
        for count, other in zip(moment.counts, self._terrain.spans, strict=True):
            if count:
                row = plus(row, {held[other.stop]: count, held[other.start]: -count})
        return row

    def _held_before(
        self, span: range, layer: int, counts: Callable[[Common], bool], *, backward: bool = False
    ) -> dict[int, float]:
        """What layers of a span before one hold of the common storages that are to be counted, as a row."""
        row = {}
        for common, variables in zip(self._commons, self._shared, strict=True):
            until = layer + 1 if backward and common.constant else layer
            earlier = [variable for each, variable in variables.items() if span.start <= each < until]
            if earlier and counts(common):
                row[earlier[-1]] = self._conditions.costs.rounded(common.num_bytes) / _MIB
        return row

    def _leave(self, tier: Tier, takes: Sequence[int]) -> list[int]:
        """Variables for what is on its way out when each layer's forward begins, and at the end, where a copy that is
        under way is taken to be half done but stands as a whole. `takes` are the seconds that layers take."""
        link = self._conditions.links[tier]
        limit = self._conditions.in_flight_limit / _MIB
        rate = link.out_bytes_per_second / _MIB / (1.0 - min(link.slowdown, 0.5))
        (moment,) = self._terrain.moments(0, backward=False)
        gaps = moment.around.forward_gaps
        leaving = [self.program.variable(high=0.0)]
        for layer, away in enumerate(self._away[tier]):
            leaving.append(self.program.variable(high=limit))
            between = gaps[layer + 1].seconds if layer + 1 < self._num_layers else 0.0
            row = {away: 1.0, leaving[layer]: 1.0, leaving[-1]: -1.0, takes[layer]: -rate}
            if self._careful and layer == self._num_layers - 1:
                row |= self._sum(layer, lambda option: option.largest_copy(tier) / _MIB / 2)
            self.program.row(row, high=rate * between)
            if self._careful:
                late = self._sum(layer, lambda option: option.late_bytes(tier, link.out_bytes_per_second) / _MIB)
                self.program.row({**late, leaving[-1]: -1.0}, high=0.0)
        return leaving

    def _come_back(self, tier: Tier, waits: Sequence[int], takes: Sequence[int], on_the_way: int) -> None:
        """What layers wait for what they swapped. It is asked for when the backward pass begins `prefetch` layers
        behind, and comes in that order. `takes` are the seconds that layers take without waiting, and `on_the_way` is
        what is still leaving when the forward pass is over: some of that may never leave."""
        (moment,) = self._terrain.moments(0, backward=True)
        link, away = self._conditions.links[tier], self._away[tier]
        rate = link.in_bytes_per_second / _MIB / (1.0 - min(link.slowdown, 0.5))
        back = away if self._careful else self._part_of(away, all_but=on_the_way)
        coming = self.program.variable(high=0.0)
        for layer in reversed(range(self._num_layers)):
            ahead = range(max(layer - self._conditions.prefetch, 0), layer)
            is_first = layer == self._num_layers - 1
            asked = [*ahead, layer] if is_first else ahead[: layer >= self._conditions.prefetch]
            row = {coming: 1.0, waits[layer]: -rate, **dict.fromkeys((back[each] for each in asked), 1.0)}
            own = {**row, **{back[each]: row.get(back[each], 0.0) - 1.0 for each in ahead}}
            grace = self._sum(layer, lambda option: -option.grace_bytes(tier, link.in_bytes_per_second) / _MIB)
            if not self._careful:
                own |= {back[layer]: own.get(back[layer], 0.0) + 1.0, away[layer]: -1.0}
            self.program.row({**own, **grace}, high=0.0)
            coming = self.program.variable()
            between = rate * moment.around.backward_gaps[layer].seconds
            self.program.row({**row, takes[layer]: -rate, coming: -1.0}, high=between)

    def _part_of(self, totals: Sequence[int], *, all_but: int) -> list[int]:
        """Variables for parts of some others that together lack no more than yet another one."""
        parts = [self.program.variable() for _ in totals]
        for part, total in zip(parts, totals, strict=True):
            self.program.row({part: 1.0, total: -1.0}, high=0.0)
        self.program.row({**dict.fromkeys(totals, 1.0), **dict.fromkeys(parts, -1.0), all_but: -1.0}, high=0.0)
        return parts

    def _cap(self) -> None:
        for tier, away in self._away.items():
            if tier in self._limits:
                self.program.row(dict.fromkeys(away, 1.0), high=self._limits[tier] / _MIB)

    def _limit_forward(self, number: int, span: range, held: list[int], leaving: Sequence[list[int]]) -> None:
        for moment in self._terrain.moments(number, backward=False):
            for layer in span:
                row = self._sum(layer, lambda option: option.course.forward_peak_bytes / _MIB)
                if not self._careful:
                    row |= {away[layer]: -1.0 for away in self._away.values()}
                elif leaving:
                    row |= {each[layer]: 1.0 for each in leaving}
                else:
                    row |= {away[layer - 1]: 1.0 for away in self._away.values() if layer > span.start}
                row |= self._held_before(span, layer, _inside(layer, backward=False))
                around = moment.around.forward_bytes[layer - span.start] + moment.num_bytes - self._taken_over(layer)
                self._limit(plus(row, self._held_by(span, layer, held, moment)), around)
            ends = plus(self._held_by(span, span.stop, held, moment), {each[-1]: 1.0 for each in leaving})
            self._limit_gap(span, span.stop, ends, moment, "forward_gaps", _inside(span.stop - 1, backward=False))
        for moment in self._terrain.moments(number, backward=True):
            ends = plus(self._held_by(span, span.stop, held, moment), {each[-1]: 1.0 for each in leaving})
            self._limit_gap(span, span.stop, ends, moment, "backward_gaps", _inside(span.stop, backward=True))

    def _limit_backward(self, number: int, span: range, held: list[int]) -> None:
        for moment in self._terrain.moments(number, backward=True):
            for layer in span:
                inside = _inside(layer, backward=True)
                stands = self._held_by(span, layer, held, moment)
                ahead = slice(max(layer - self._conditions.prefetch, span.start), layer)
                away = plus(stands, *(dict.fromkeys(each[ahead], 1.0) for each in self._away.values()))
                row = plus(away, self._sum(layer, lambda option: option.lean_peak_bytes / _MIB))
                row = plus(row, self._held_before(span, layer, inside, backward=True))
                self._limit(row, moment.around.backward_bytes[layer - span.start] + moment.num_bytes)
                if self._terrain.sharing(layer).earlier:
                    self._limit_as_first(span, layer, away, moment)
                self._limit_gap(span, layer, stands, moment, "backward_gaps", inside)

    def _limit_as_first(self, span: range, layer: int, row: Mapping[int, float], moment: Moment) -> None:
        """Limit a backward pass in which what the layer holds counts with the layer alone."""

        def elsewhere(common: Common) -> bool:
            return _inside(layer, backward=True)(common) and (common.constant or layer not in common.counting)

        own = self._sum(layer, lambda option: option.course.backward_peak_bytes / _MIB)
        others = self._held_before(span, layer, elsewhere, backward=True)
        around = moment.around.backward_bytes[layer - span.start] + moment.num_bytes
        self._limit(plus(row, own, others), around)

    def _taken_over(self, layer: int) -> int:
        """Bytes that count outside no more when the layer's forward pass begins, if it is the first to hold them."""
        rounded = self._conditions.costs.rounded
        return sum(
            rounded(common.num_bytes)
            for common in self._commons
            if layer in common.counting and not common.constant and common.is_outside(layer, backward=False)
        )

    def _limit_gap(
        self,
        span: range,
        gap: int,
        row: Mapping[int, float],
        moment: Moment,
        direction: Literal["forward_gaps", "backward_gaps"],
        counts: Callable[[Common], bool],
    ) -> None:
        """Limit what stands in a gap: with common storages that are let go in its course counted outside the layers,
        and with all that are held counted with the layers."""
        around = getattr(moment.around, direction)[gap - span.start]
        self._limit(plus(row, self._held_before(span, gap, counts)), around.peak_bytes + moment.num_bytes)
        bare = getattr(moment.bare, direction)[gap - span.start]
        if bare != around:
            everything = self._held_before(span, gap, lambda _: True)
            self._limit(plus(row, everything), bare.peak_bytes + moment.num_bytes)

    def _limit(self, row: Mapping[int, float], around_bytes: int) -> None:
        """What stands is within the budget."""
        self._peak_rows.append(self.program.row({**row, self._peak: -1.0}, high=-around_bytes / _MIB))

    def _sum(self, layer: int, figure: Callable[[Option], float]) -> dict[int, float]:
        """The figure of the option that a layer takes, as a row."""
        row = {}
        for index, variable in self._chosen[layer].items():
            value = figure(self._options[layer][index])
            if value:
                row[variable] = value
        return row


def _inside(layer: int, *, backward: bool) -> Callable[[Common], bool]:
    """Whether nobody outside the layers refers to a common storage when a layer's pass begins."""
    return lambda common: not common.is_outside(layer, backward=backward)


def _mib_to(tier: Tier, option: Option) -> float:
    return option.swapped_bytes.get(tier, 0) / _MIB


def _holds(storage: int, option: Option) -> float:
    return float(storage in option.fates.held)
