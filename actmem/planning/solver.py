"""The choice of an option for each layer, found in seconds with HiGHS.

Its program is solved relaxed at first. That tells a bound, and which options are worth a look; most layers are settled
by what it does with them, and a search settles the last few. Then some layers at a time are looked at again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from actmem.planning.choice_program import Choice, ChoiceProgram, Mood
from actmem.planning.options import Option
from actmem.planning.plan import Tier
from actmem.planning.program import Solution
from actmem.planning.terrain import Terrain

_MIB = 2**20
_GAP = 6e-4
"""Share of a step above the bound at which a choice is good enough."""
_NODES = 20
"""A search has mostly found by then what it is going to find."""
_LEAST_PEAK_SECONDS = 10.0
_LEAST_PEAK_NODES = 100
_PEAK_GAP = 2e-5
"""Share of a peak above the bound at which it is the least."""
_FAST_GAPS = 5
"""So many times that share of a peak is worth a whole step's time, where time decides among equal peaks."""
_PRECISION = 1e-6
"""Share by which a bound may be too high for the arithmetic alone."""
_FEW = 600
"""So many options of all layers together can all be looked at."""


class Solver:
    """Chooses among `options` of each layer. `limits` are bytes that the tiers can take."""

    def __init__(
        self,
        terrain: Terrain,
        options: Sequence[Sequence[Option]],
        *,
        limits: Mapping[Tier, int],
    ) -> None:
        self.terrain = terrain
        self.options = options
        self.limits = limits
        base = (each[0].course for each in options)
        layers_seconds = sum(course.forward_seconds + course.backward_seconds for course in base)
        self.gap_seconds = _GAP * terrain.repeats * (terrain.gap_seconds + layers_seconds)

    def least_peak(self, *, mood: Mood = "careful", below: float = math.inf, is_fast: bool = False) -> Choice | None:
        """The choice with the least peak, whatever time it takes; ``None`` where none is found whose peak is `below`
        that by a worthwhile share. With `is_fast`, the time decides among those whose peaks differ by next to nothing.
        """
        most_bytes, price = (1.0 - _PEAK_GAP) * below, 0.0
        choosing = self._choosing(None, mood=mood, most_bytes=most_bytes)
        relaxed = choosing.program.solve(relaxed=True)
        if relaxed is None:
            return None
        gap = _PEAK_GAP * relaxed.objective
        if is_fast:
            price = _FAST_GAPS * gap * _GAP / self.gap_seconds * self.terrain.repeats
        if is_fast or sum(map(len, self.options)) > _FEW:
            among = choosing.promising(relaxed)
            choosing = self._choosing(None, among, mood=mood, most_bytes=most_bytes, second_price=price)
        found = choosing.program.solve(gap=gap, seconds=_LEAST_PEAK_SECONDS, most_nodes=_LEAST_PEAK_NODES)
        found = found or choosing.program.solve(fixed=choosing.dived(), most_nodes=_LEAST_PEAK_NODES)
        return None if found is None else choosing.choice(found)

    def least_peak_bound(self) -> int:
        """Bytes below which the peak of no choice goes."""
        relaxed = self._choosing(None, mood="hopeful").program.solve(relaxed=True)
        return 0 if relaxed is None else math.floor((1.0 - _PRECISION) * relaxed.objective * _MIB)

    def bound(self, budget_bytes: int) -> float | None:
        """Seconds that any choice whose peak is within the budget adds to an unplanned step; ``None`` where there is no
        such choice."""
        relaxed = self._choosing(budget_bytes, mood="hopeful").program.solve(relaxed=True)
        return None if relaxed is None else relaxed.objective

    def solve(
        self, budget_bytes: int, *, target: float = 0.0, until: float = math.inf, mood: Mood = "careful"
    ) -> Choice | None:
        """A choice whose peak is within the budget, by less than `gap_seconds` above the best one or the `target` if it
        can be; ``None`` where none is found `until` then, by the monotonic clock."""
        choosing = self._choosing(budget_bytes, mood=mood)
        relaxed = choosing.program.solve(relaxed=True, seconds=max(until - time.monotonic(), 0.0))
        if relaxed is None:
            return None
        target = max(target, relaxed.objective) + self.gap_seconds
        narrow = self._choosing(budget_bytes, choosing.promising(relaxed), mood=mood)
        found = self._search(narrow, target, until)
        if found is not None:
            return narrow.choice(found)
        found = self._search(choosing, target, until)  # of what looked promising nothing fits
        return None if found is None else choosing.choice(found)

    def _choosing(
        self,
        budget_bytes: int | None,
        among: Sequence[frozenset[int]] | None = None,
        *,
        mood: Mood,
        most_bytes: float = math.inf,
        second_price: float = 0.0,
    ) -> ChoiceProgram:
        return ChoiceProgram(
            self.terrain,
            self.options,
            budget_bytes,
            among,
            limits=self.limits,
            mood=mood,
            most_bytes=most_bytes,
            second_price=second_price,
        )

    def _search(self, choosing: ChoiceProgram, target: float, until: float) -> Solution | None:
        """A good solution, fast: most layers are settled by what the relaxed one does with them, the last few by a
        search; then some layers at a time are looked at again, with all others as they are, until it is good enough."""

        def search(settled: Mapping[int, float]) -> Solution | None:
            left = max(until - time.monotonic(), 0.0)
            gap = self.gap_seconds / 4
            return choosing.program.solve(gap=gap, seconds=left, most_nodes=_NODES, fixed=settled, target=target)

        best = search(choosing.dived()) or search({})
        for window in choosing.windows:
            if best is not None and best.objective > target:
                found = search(choosing.settled(best, window))
                best = found if found is not None and found.objective < best.objective else best
        return best
