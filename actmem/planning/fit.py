"""Whether a training step fits into a device, how large a batch or a sequence does, and what that costs.

A shape is a number of sequences and their length; each is traced, and its peak simulated. Peaks grow almost evenly
with either, so the search follows the line through what it knows, and ends where one step more no longer fits. A fixed
way fits if its peak does; the planner's way fits if the least peak of all plans does, and costs what the fastest plan
within the device's memory does. The least peak takes long to find and its bound does not, so that the search follows
the bound, and looks for plans at its end. All times are simulated, per token, by the unplanned step of one short batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from actmem.graph import Graph
from actmem.planning.layout import Layout, lay_out
from actmem.planning.planner import Planner
from actmem.planning.simulation import Simulation

WAYS = ("none", "selective", "full")
BEST = "best plan"
SHARDS = (2, 4, 8, 16, 32, 64)
NUM_STAGES = 2 + 2 * (len(WAYS) + 1)
"""Of a search, as `on_stage` hears of them: two of what the shape needs, and one of how far each way goes either way.
"""

Shape = tuple[int, int]
Dimension = Literal["micro-batch", "sequence"]
Verdict = Literal["fits without a plan", "fits with a plan", "does not fit"]
_DIMENSIONS: tuple[Dimension, Dimension] = ("micro-batch", "sequence")


@dataclass(frozen=True)
class Need:
    """What a step takes at its peak: `bytes_by_use` make it up; it is reached at `where`. `swapped_bytes` leave the
    device in a step, so that there has to be as much room elsewhere."""

    plan: str
    peak_bytes: int
    swapped_bytes: int
    seconds: float
    where: str
    bytes_by_use: Mapping[str, int]

    @classmethod
    def of(cls, plan: str, simulation: Simulation) -> Need:
        """The need of a simulated step."""
        peak = simulation.peak
        swapped, uses = simulation.swapped_bytes, dict(peak.bytes_by_use)
        return cls(plan, peak.num_bytes, swapped, simulation.seconds, peak.where, uses)


@dataclass(frozen=True)
class Reach:
    """How far one way goes: the largest shape that fits, in sequences or in their length; the time of a token there by
    that in an unplanned batch of one sequence; and by which share the step is longer than an unplanned one of the same
    shape, whether that fits or not. ``None``: not even the smallest shape fits."""

    way: str
    dimension: Dimension
    shape: Shape | None
    peak_bytes: int | None
    token_ratio: float | None
    added_share: float | None


@dataclass(frozen=True)
class Fit:
    """Whether a step fits into `memory_bytes`, with what it takes without a plan and at the least, and, where it fits
    with a plan only, under the fastest that does."""

    setting: str
    hardware: str
    layout: str
    times: str
    memory_bytes: int
    unplanned: Need
    planned: Need | None
    least: Need
    reaches: tuple[Reach, ...]
    remedies: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """In words."""
        if self.unplanned.peak_bytes <= self.memory_bytes:
            return "fits without a plan"
        return "does not fit" if self.planned is None else "fits with a plan"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"verdict": self.verdict, **asdict(self)}


def max_of(reach: Reach) -> int:
    """The number of sequences, or of tokens in one, that a way reaches."""
    assert reach.shape is not None
    return reach.shape[reach.dimension == "sequence"]


class FitSearch:
    """The search for one device of `memory_bytes`. `graph_of` traces a shape, once each; `planner_from` makes a planner
    for a step under a layout; `sequence_step` is the multiple that lengths are rounded to. `on_stage` hears of each
    part of the work that is done."""

    def __init__(
        self,
        graph_of: Callable[[Shape], Graph],
        planner_from: Callable[[Graph], Planner],
        layout: Layout,
        memory_bytes: int,
        *,
        sequence_step: int,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._graph_of = cache(graph_of)
        self._planner_from = planner_from
        self._layout = layout
        self._memory_bytes = memory_bytes
        self._sequence_step = sequence_step
        self._on_stage = on_stage
        self._planners: dict[Shape, Planner] = {}

    def planner(self, shape: Shape) -> Planner:
        """The planner of one shape."""
        if shape not in self._planners:
            self._planners[shape] = self._planner_from(lay_out(self._graph_of(shape), self._layout))
        return self._planners[shape]

    def needs(self, shape: Shape) -> tuple[Need, Need | None, Need]:
        """What a shape takes without a plan, under the fastest plan that fits, and at the least."""
        planner = self.planner(shape)
        unplanned = Need.of("none", planner.unplanned)
        self._on_stage("without a plan")
        least = _least_of(planner)
        self._on_stage("least peak")
        return unplanned, self._fastest(planner), least

    def reaches(self, shape: Shape) -> tuple[Reach, ...]:
        """How far each way goes from a shape, first with more sequences, then with longer ones."""
        return (*self._reaches(shape, 0), *self._reaches(shape, 1))

    def remedies(self, shape: Shape, reaches: Sequence[Reach]) -> tuple[str, ...]:
        """What would make a shape fit, with the best plan, where nothing else does: each by itself."""
        found = [f"a {each.dimension} of {max_of(each)}" for each in reaches if each.way == BEST and each.shape]
        if self._layout.trained == "full" and self._fits(shape, replace(self._layout, trained="lora")):
            found.append("--train lora")
        more = (each for each in SHARDS if each > self._layout.num_shards)
        enough = next((each for each in more if self._fits(shape, replace(self._layout, num_shards=each))), None)
        return (*found, f"--shard {enough}") if enough else tuple(found)

    def _fits(self, shape: Shape, layout: Layout) -> bool:
        return self._planner_from(lay_out(self._graph_of(shape), layout)).can_meet(self._memory_bytes)

    def _reaches(self, shape: Shape, along: Literal[0, 1]) -> Iterator[Reach]:
        """Each way goes further than the one before it, mostly, so the search begins where that one ended."""
        step = self._sequence_step if along else 1
        base = max(shape[along] // step, 1)
        tried = [base]

        def planner(count: int) -> Planner:
            tried.append(count)
            return self.planner(_with_count(shape, along, count * step))

        for way in (*WAYS, BEST):
            count = self._furthest(way, planner, sorted({base, tried[-1]} if way == BEST else set(tried)))
            tried.append(max(count, 1))
            reached = _with_count(shape, along, count * step) if count else None
            yield self._reach(way, _DIMENSIONS[along], reached, shape)
            self._on_stage(f"{_DIMENSIONS[along]}, {way}")

    def _furthest(self, way: str, planner: Callable[[int], Planner], starts: Sequence[int]) -> int:
        """The largest count that fits, with a planner for each. For the planner's way the bound says how far to go at
        the most; if no plan is found there, the search for one goes on where the bound is lower by as much as was
        missing."""
        limit = self._memory_bytes
        if way != BEST:
            return largest(lambda count: planner(count).simulate(way).peak_bytes, limit, starts)
        most = largest(lambda count: planner(count).least_bound_bytes, limit, starts)
        if not most or planner(most).can_meet(limit):
            return most
        excess = planner(most).least_peak_bytes / planner(most).least_bound_bytes
        near = largest(lambda count: planner(count).least_bound_bytes, int(limit / excess), sorted({starts[-1], most}))
        return largest(lambda count: planner(count).least_peak_bytes, limit, sorted({max(near, 1), most}))

    def _reach(self, way: str, dimension: Dimension, shape: Shape | None, base: Shape) -> Reach:
        if shape is None:
            return Reach(way, dimension, None, None, None, None)
        planner = self.planner(shape)
        need = Need.of(way, planner.simulate(way)) if way != BEST else self._fastest(planner) or _least_of(planner)
        token_seconds = need.seconds / (shape[0] * shape[1])
        short = self.planner((1, base[1])).unplanned.seconds / base[1]
        added = need.seconds / planner.unplanned.seconds - 1.0
        return Reach(way, dimension, shape, need.peak_bytes, token_seconds / short, added)

    def _fastest(self, planner: Planner) -> Need | None:
        if not planner.can_meet(self._memory_bytes):
            return None
        planned = planner.plan(self._memory_bytes)
        return Need.of(planned.plan.name, planned.simulation)


def _with_count(shape: Shape, along: Literal[0, 1], count: int) -> Shape:
    return (shape[0], count) if along else (count, shape[1])


def _least_of(planner: Planner) -> Need:
    return Need.of(planner.least.plan.name, planner.least.simulation)


def largest(peak_of: Callable[[int], int], limit: int, starts: Sequence[int]) -> int:
    """The largest count whose peak is within `limit`, 0 for none, for peaks that grow with the count.

    `starts` are tried first. From there on the next one lies on the line through two known peaks, the nearest to the
    limit; between one that fits and one that does not, each third one halves what is left, for peaks that bend.
    """
    known = {count: peak_of(count) for count in starts}
    tried_between = 0
    while True:
        fits = max((count for count, peak in known.items() if peak <= limit), default=0)
        fails = min((count for count, peak in known.items() if peak > limit), default=None)
        if fails is not None and fails <= fits + 1:
            return fits
        tried_between += fits > 0 and fails is not None
        if fails is not None and tried_between and tried_between % 3 == 0:
            count = (fits + fails) // 2
        else:
            count = _on_the_line(known, limit, fits, fails)
        known[count] = peak_of(count)


def _on_the_line(known: Mapping[int, int], limit: int, fits: int, fails: int | None) -> int:
    if len(known) == 1:
        return fits + max(1, fits // 2) if fails is None else max(1, fails // 2)
    (a, peak_a), (b, peak_b) = sorted(known.items(), key=lambda each: abs(each[1] - limit))[:2]
    slope = (peak_b - peak_a) / (b - a)
    guess = a + int((limit - peak_a) // slope) if slope > 0 else 2 * fits
    return max(fits + 1, guess if fails is None else min(guess, fails - 1))
