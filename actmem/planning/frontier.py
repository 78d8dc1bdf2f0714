"""What memory costs in time: the fastest plan for each budget, from the least possible peak to that of no plan at all.

Budgets lie evenly between the two. A larger budget never gets a slower plan: where the search finds one, the plan of
the smaller budget, which fits too, is carried over. Each plan is made at the nominal efficiency and then played through
at the low and the high one, so that the band between them says how far the same plan may be off, not what another plan
could do. Fixed policies, and torch's own ways as modelled in `actmem.planning.yardsticks`, are points beside it.

The knee is the point of the frontier that is farthest below the chord between its ends, both axes taken from 0 to 1:
the definition of Satopää, Albrecht, Irwin and Raghavan, "Finding a 'Kneedle' in a Haystack: Detecting Knee Points in
System Behavior" (ICDCS Workshops 2011).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from actmem.files import check_format, read_json, replace_file
from actmem.hardware import Hardware, Level
from actmem.planning.conditions import conditions_on
from actmem.planning.planner import Planned, Planner
from actmem.planning.policies import POLICIES, SWAPPING
from actmem.planning.simulation import Conditions, LayerPlan
from actmem.planning.simulator import Simulator
from actmem.planning.times import Times, measured_share, times_in_words, times_of
from actmem.planning.yardsticks import YARDSTICK_FATES
from actmem.units import format_bytes

FORMAT_VERSION = 1
UNPLANNED = "none"
Kind = Literal["auto", "policy", "yardstick"]
_MOMENTS = 160
"""Moments of a step that a point keeps of its memory over time."""


@dataclass(frozen=True)
class FrontierPoint:
    """One way to train: `auto`, a plan that was made for `budget_bytes`; a fixed `policy`; or a `yardstick`, torch's.

    `predicted_seconds` are at the nominal efficiency, `low_seconds` and `high_seconds` at the others; `bound_seconds`
    is what no plan within the budget undercuts, ``None`` where it is not known. `bytes_by_use` make up the peak, which
    is reached at `peak_where`. `timeline` holds seconds and bytes, the most that stood in each of equal spans of the
    step. What was measured is ``None`` until somebody has.
    """

    label: str
    kind: Kind
    budget_bytes: int | None
    predicted_peak_bytes: int
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    bound_seconds: float | None
    peak_where: str
    bytes_by_use: Mapping[str, int]
    held_bytes: int
    swapped_bytes: int
    replay_seconds: float
    exposed_seconds: float
    timeline: tuple[tuple[float, int], ...] = ()
    measured_peak_bytes: int | None = None
    measured_seconds: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FrontierPoint:
        """The point whose `asdict` this is."""
        return cls(**{**data, "timeline": tuple((seconds, size) for seconds, size in data["timeline"])})


@dataclass(frozen=True)
class Frontier:
    """Points of peak bytes against step seconds. `points` are those of the frontier, the smallest budget first;
    `beside` are the fixed policies, ``none`` first, and the yardsticks.

    `setting` names model and batch; `measured_share` is the share of the unplanned step whose ops have measured times,
    and the rest of it is modelled at the efficiency `efficiency`. `gradients_stand` says that parameters have gradients
    when the step begins, `tiers` where plans may swap to, `memory_bytes` what the device has.
    """

    setting: str
    hardware: str
    memory_bytes: int
    efficiency: Level
    measured_share: float
    num_tokens: int
    gradients_stand: bool
    tiers: tuple[str, ...]
    points: tuple[FrontierPoint, ...]
    beside: tuple[FrontierPoint, ...]

    def with_measured(self, measured: Mapping[str, tuple[int, float]]) -> Frontier:
        """The frontier with peak bytes and step seconds that were measured, by a point's label."""

        def told(point: FrontierPoint) -> FrontierPoint:
            size, seconds = measured.get(point.label, (None, None))
            return replace(point, measured_peak_bytes=size, measured_seconds=seconds)

        return replace(self, points=tuple(map(told, self.points)), beside=tuple(map(told, self.beside)))

    @property
    def has_measured(self) -> bool:
        """Whether any point was measured."""
        return any(point.measured_seconds is not None for point in (*self.points, *self.beside))

    def measured_ratio(self, point: FrontierPoint) -> float | None:
        """A point's measured step time by that of the unplanned step; ``None`` where one of them was not measured."""
        mine, other = point.measured_seconds, self.unplanned.measured_seconds
        return None if mine is None or other is None else mine / other

    @property
    def times(self) -> Times:
        """Whether every op's time was measured on the device."""
        return times_of(self.measured_share)

    @property
    def times_in_words(self) -> str:
        """The same, with what is mixed."""
        return times_in_words(self.measured_share)

    @property
    def unplanned(self) -> FrontierPoint:
        """The step without a plan."""
        return next(point for point in self.beside if point.label == UNPLANNED)

    @property
    def least(self) -> FrontierPoint:
        """The point with the least peak."""
        return self.points[0]

    @cached_property
    def knee(self) -> FrontierPoint | None:
        """Where more memory stops to buy much time; ``None`` for a frontier without a bend."""
        return knee_of(self.points)

    def ratio(self, point: FrontierPoint, level: Level = "nominal") -> float:
        """A point's step time by that of the unplanned step, both at one efficiency."""
        return _seconds_at(point, level) / _seconds_at(self.unplanned, level)

    def bound_ratio(self, point: FrontierPoint) -> float:
        """The ratio that no plan within the point's budget undercuts; for other points, what they reach."""
        seconds = point.predicted_seconds if point.bound_seconds is None else point.bound_seconds
        return seconds / self.unplanned.predicted_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, what follows from the points included; `from_dict` reads it back."""
        return {
            "actmem_frontier": FORMAT_VERSION,
            **{name: value for name, value in vars(self).items() if name not in ("points", "beside", "knee")},
            "times": self.times,
            "unplanned": self.unplanned.label,
            "least": self.least.label,
            "knee": None if self.knee is None else self.knee.label,
            "points": [self._with_ratio(point) for point in self.points],
            "beside": [self._with_ratio(point) for point in self.beside],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Frontier:
        """The frontier that `to_dict` wrote. Raises `PlanError` for other data."""
        check_format(data, "frontier", FORMAT_VERSION)
        derived = {"actmem_frontier", "times", "unplanned", "least", "knee"}
        fields = {name: value for name, value in data.items() if name not in derived}
        fields["tiers"] = tuple(fields["tiers"])
        for name in ("points", "beside"):
            fields[name] = tuple(FrontierPoint.from_dict(_without_ratio(point)) for point in fields[name])
        return cls(**fields)

    def save(self, path: str | Path) -> None:
        """Write the frontier as JSON."""
        replace_file(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Frontier:
        """Read the frontier that `save` wrote. Raises `PlanError` for another file."""
        return read_json(path, "frontier", cls.from_dict)

    def save_csv(self, path: str | Path) -> None:
        """Write a line a point. Every line says whose hardware it is and where its times come from."""
        uses = list(dict.fromkeys(use for point in (*self.points, *self.beside) for use in point.bytes_by_use))
        stream = io.StringIO(newline="")
        lines = csv.writer(stream)
        names = [name for name in FrontierPoint.__dataclass_fields__ if name not in ("bytes_by_use", "timeline")]
        head = ["setting", "hardware", "efficiency", "times", *names, "step_ratio", "is_knee"]
        lines.writerow([*head, *(f"peak_bytes of {use}" for use in uses)])
        for point in (*self.points, *self.beside):
            about = [self.setting, self.hardware, self.efficiency, self.times_in_words]
            own = [getattr(point, name) for name in names]
            parts = [point.bytes_by_use.get(use, 0) for use in uses]
            lines.writerow([*about, *own, self.ratio(point), point is self.knee, *parts])
        replace_file(path, stream.getvalue())

    def _with_ratio(self, point: FrontierPoint) -> dict[str, Any]:
        return asdict(point) | {"step_ratio": self.ratio(point)}


def frontier(
    planner: Planner,
    hardware: Hardware,
    *,
    setting: str = "",
    num_points: int = 20,
    seconds: float = 5.0,
    steps: Iterable[Along] | None = None,
    on_point: Callable[[str], None] = lambda label: None,
) -> Frontier:
    """The frontier of `planner`, whose conditions are those of `hardware` at its nominal efficiency.

    Each of `num_points` budgets gets about `seconds` of search; `steps` are their plans if they were found before, by
    `along`. `on_point` hears of each point, and of the policies
    together.
    """
    points = _Points(planner, hardware)
    found = []
    for step in steps or along(planner, num_points, seconds):
        found.append(points.of_plan(step.planned, step.budget_bytes, step.bound_seconds))
        on_point(found[-1].label)
    beside = tuple(points.beside())
    on_point("policies")
    traced, conditions = planner.graph.step, planner.simulator.conditions
    assert traced is not None
    return Frontier(
        setting=setting,
        hardware=hardware.name,
        memory_bytes=hardware.memory_bytes,
        efficiency="nominal",
        measured_share=measured_share(planner.graph, hardware),
        num_tokens=traced.num_tokens,
        gradients_stand=conditions.gradients_stand,
        tiers=tuple(conditions.links),
        points=tuple(found),
        beside=beside,
    )


@dataclass(frozen=True)
class Along:
    """A budget on the frontier, the plan for it, and what no plan within it undercuts, where that is known."""

    budget_bytes: int
    planned: Planned
    bound_seconds: float | None


def along(planner: Planner, num_points: int, seconds: float = 5.0) -> Iterator[Along]:
    """The plans of the frontier, from the least budget on; see `frontier`."""
    best = planner.least
    for budget in budgets(planner, num_points):
        best, bound = _no_slower(planner, budget, best, seconds)
        name = f"auto@{format_bytes(budget).replace(' ', '')}"
        yield Along(budget, replace(best, plan=replace(best.plan, name=name)), bound)


def budgets(planner: Planner, num_points: int) -> list[int]:
    """Evenly spaced, from the least possible peak to the unplanned one, both included."""
    least, most = planner.least.simulation.peak_bytes, planner.unplanned.peak_bytes
    steps = max(num_points - 1, 1)
    return sorted({most - (most - min(least, most)) * step // steps for step in range(steps + 1)})


def knee_of(points: Sequence[FrontierPoint]) -> FrontierPoint | None:
    """The point farthest below the chord between the first and the last, with both axes from 0 to 1."""
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    width = last.predicted_peak_bytes - first.predicted_peak_bytes
    height = first.predicted_seconds - last.predicted_seconds
    if width <= 0 or height <= 0:
        return None

    def below(point: FrontierPoint) -> float:
        across = (point.predicted_peak_bytes - first.predicted_peak_bytes) / width
        down = (first.predicted_seconds - point.predicted_seconds) / height
        return down - across

    farthest = max(points, key=below)
    return farthest if below(farthest) > 0 else None


def thinned(timeline: Sequence[tuple[float, int]], num_moments: int = _MOMENTS) -> tuple[tuple[float, int], ...]:
    """The moment with the most bytes in each of `num_moments` equal spans, so that the peak stays."""
    end = timeline[-1][0] if timeline else 0.0
    highest: dict[int, tuple[float, int]] = {}
    for moment in timeline:
        span = int(moment[0] / end * (num_moments - 1)) if end else 0
        if span not in highest or moment[1] > highest[span][1]:
            highest[span] = moment
    return tuple(highest[span] for span in sorted(highest))


class _Points:
    """Plans and policies as points, each played through at all three efficiencies."""

    def __init__(self, planner: Planner, hardware: Hardware) -> None:
        self._planner = planner
        self._simulators = {
            level: Simulator(planner.graph, _at_level(planner, hardware, level)) for level in ("low", "high")
        }

    def of_plan(self, planned: Planned, budget_bytes: int, bound_seconds: float | None) -> FrontierPoint:
        point = self._point(planned.plan.name, "auto", planned.layers)
        bound = None if bound_seconds is None else min(bound_seconds, point.predicted_seconds)
        return replace(point, budget_bytes=budget_bytes, bound_seconds=bound)

    def beside(self) -> Iterator[FrontierPoint]:
        for policy in POLICIES:
            if policy not in SWAPPING or self._planner.simulator.conditions.links:
                yield self._point(policy, "policy", self._planner.layer_plans(policy))
        for name, fates_of in YARDSTICK_FATES.items():
            yield self._point(name, "yardstick", [LayerPlan(fates_of(g)) for g in self._planner.simulator.layers])

    def _point(self, label: str, kind: Kind, layers: Sequence[LayerPlan]) -> FrontierPoint:
        found = self._planner.simulator.run(layers)
        return FrontierPoint(
            label=label,
            kind=kind,
            budget_bytes=None,
            predicted_peak_bytes=found.peak_bytes,
            predicted_seconds=found.seconds,
            low_seconds=self._simulators["low"].run(layers).seconds,
            high_seconds=self._simulators["high"].run(layers).seconds,
            bound_seconds=None,
            peak_where=found.peak.where,
            bytes_by_use=dict(found.peak.bytes_by_use),
            held_bytes=found.held_bytes,
            swapped_bytes=found.swapped_bytes,
            replay_seconds=found.replay_seconds,
            exposed_seconds=found.exposed_seconds,
            timeline=thinned(found.timeline),
        )


def _at_level(planner: Planner, hardware: Hardware, level: Level) -> Conditions:
    mine = planner.simulator.conditions
    return conditions_on(
        hardware,
        level=level,
        tiers=tuple(mine.links),
        prefetch=mine.prefetch,
        in_flight_limit=mine.in_flight_limit,
        gradients_stand=mine.gradients_stand,
    )


def _no_slower(planner: Planner, budget_bytes: int, best: Planned, seconds: float) -> tuple[Planned, float | None]:
    """The plan for a budget, or that of a smaller one if it is as fast; and the bound, where a search gave one: it did
    not where only the plan of the least peak fits."""
    found = planner.plan(budget_bytes, seconds=seconds)
    bound = None if found.layers is planner.least.layers else found.bound_seconds
    return (found if found.simulation.seconds < best.simulation.seconds else best), bound


def _seconds_at(point: FrontierPoint, level: Level) -> float:
    return {"low": point.low_seconds, "nominal": point.predicted_seconds, "high": point.high_seconds}[level]


def _without_ratio(point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name != "step_ratio"}
