"""Whether a training step fits into a device, how large a batch or a sequence does, and what that costs.

A shape is a number of sequences and their length; each is traced, and its peak simulated. Peaks grow almost evenly
with either, so the search follows the line through what it knows, and ends where one step more no longer fits. A fixed
way fits if its peak does; the planner's way fits if the least peak of all plans does, and costs what the fastest plan
within the device's memory does. All times are simulated, per token, by the unplanned step of one short batch.
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

Shape = tuple[int, int]
Dimension = Literal["micro-batch", "sequence"]
Verdict = Literal["fits without a plan", "fits with a plan", "does not fit"]
_DIMENSIONS: tuple[Dimension, Dimension] = ("micro-batch", "sequence")


@dataclass(frozen=True)
class Need:
    """What a step takes at its peak: `bytes_by_use` make it up; it is reached at `where`."""

    plan: str
    peak_bytes: int
    seconds: float
    where: str
    bytes_by_use: Mapping[str, int]

    @classmethod
    def of(cls, plan: str, simulation: Simulation) -> Need:
        """The need of a simulated step."""
        peak = simulation.peak
        return cls(plan, peak.num_bytes, simulation.seconds, peak.where, dict(peak.bytes_by_use))


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
    for a step under a layout; `sequence_step` is the multiple that lengths are rounded to."""

    def __init__(
        self,
        graph_of: Callable[[Shape], Graph],
        planner_from: Callable[[Graph], Planner],
        layout: Layout,
        memory_bytes: int,
        *,
        sequence_step: int,
    ) -> None:
        self._graph_of = cache(graph_of)
        self._planner_from = planner_from
        self._layout = layout
        self._memory_bytes = memory_bytes
        self._sequence_step = sequence_step
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
        return unplanned, self._fastest(planner), _least_of(planner)

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
        planner = self._planner_from(lay_out(self._graph_of(shape), layout))
        return planner.least.simulation.peak_bytes <= self._memory_bytes

    def _reaches(self, shape: Shape, along: Literal[0, 1]) -> Iterator[Reach]:
        """Each way goes further than the one before it, mostly, so the search begins where that one ended."""
        step = self._sequence_step if along else 1
        base = max(shape[along] // step, 1)
        tried = [base]
        for way in (*WAYS, BEST):

            def peak(count: int, way: str = way) -> int:
                tried.append(count)
                return self._peak(way, self.planner(_with_count(shape, along, count * step)))

            count = largest(peak, self._memory_bytes, sorted({base, tried[-1]} if way == BEST else set(tried)))
            tried.append(max(count, 1))
            yield self._reach(
                way, _DIMENSIONS[along], _with_count(shape, along, count * step) if count else None, shape
            )

    def _reach(self, way: str, dimension: Dimension, shape: Shape | None, base: Shape) -> Reach:
        if shape is None:
            return Reach(way, dimension, None, None, None, None)
        planner = self.planner(shape)
        need = Need.of(way, planner.simulate(way)) if way != BEST else self._fastest(planner) or _least_of(planner)
        token_seconds = need.seconds / (shape[0] * shape[1])
        short = self.planner((1, base[1])).unplanned.seconds / base[1]
        added = need.seconds / planner.unplanned.seconds - 1.0
        return Reach(way, dimension, shape, need.peak_bytes, token_seconds / short, added)

    def _peak(self, way: str, planner: Planner) -> int:
        return planner.least.simulation.peak_bytes if way == BEST else planner.simulate(way).peak_bytes

    def _fastest(self, planner: Planner) -> Need | None:
        if planner.least.simulation.peak_bytes > self._memory_bytes:
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
    limit; each third one halves what is left, for peaks that bend.
    """
    known = {count: peak_of(count) for count in starts}
    while True:
        fits = max((count for count, peak in known.items() if peak <= limit), default=0)
        fails = min((count for count, peak in known.items() if peak > limit), default=None)
        if fails is not None and fails <= fits + 1:
            return fits
        count = _next_count(known, limit, fits, fails)
        known[count] = peak_of(count)


def _next_count(known: Mapping[int, int], limit: int, fits: int, fails: int | None) -> int:
    if len(known) == 1:
        return fits + max(1, fits // 2) if fails is None else max(1, fails // 2)
    if fails is not None and len(known) % 3 == 0:
        return (fits + fails) // 2
    (a, peak_a), (b, peak_b) = sorted(known.items(), key=lambda each: abs(each[1] - limit))[:2]
    slope = (peak_b - peak_a) / (b - a)
    guess = a + int((limit - peak_a) // slope) if slope > 0 else 2 * fits
    return max(fits + 1, guess if fails is None else min(guess, fails - 1))
