"""What a planner has to know of the step that it makes a plan for: a whole one, or what one rank of a pipeline does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from actmem.graph import Graph, RegionGraph
from actmem.planning.course import Course
from actmem.planning.fates import Fates
from actmem.planning.plan import Tier
from actmem.planning.sharing import Common, Sharing
from actmem.planning.simulation import Conditions, LayerPlan, Simulation
from actmem.planning.surroundings import Surroundings


@dataclass(frozen=True)
class Moment:
    """Circumstances in which a pass through a span of layers runs: `counts` of other calls that are between their
    passes, by span; `num_bytes` that stand beside them and beside the span's surroundings, which are `around`, and
    `bare` where each layer holds what others may hold of that which escapes from it."""

    counts: tuple[int, ...]
    num_bytes: int
    around: Surroundings
    bare: Surroundings

    def covers(self, other: Moment) -> bool:
        """Whether whatever fits here fits there as well."""
        more = all(a >= b for a, b in zip(self.counts, other.counts, strict=True))
        return more and self.num_bytes >= other.num_bytes and self.around is other.around


class Terrain(Protocol):
    """A step to plan. `spans` are runs of layers that a call goes through from end to end; each is gone through
    `repeats` times in a step."""

    graph: Graph
    conditions: Conditions
    layers: list[RegionGraph]
    commons: tuple[Common, ...]

    @property
    def spans(self) -> tuple[range, ...]: ...
    @property
    def repeats(self) -> int: ...
    @property
    def gap_seconds(self) -> float:
        """Of one call, what runs outside the layers."""

    def moments(self, span: int, *, backward: bool) -> Sequence[Moment]:
        """The circumstances in which a span's passes run; those that are nowhere harder than others are left out."""

    def run(self, plans: Sequence[LayerPlan]) -> Simulation:
        """Play a step through."""

    def course_of(self, layer: int, fates: Fates, elsewhere: frozenset[int] = frozenset()) -> Course:
        """The course of one layer."""

    def sharing(self, layer: int) -> Sharing:
        """What a layer may hold together with others."""

    def leaving(self, layer: int) -> frozenset[int]:
        """Storages that a layer makes and others refer to when its call is over."""

    def op_seconds(self, layer: int, op: int) -> float:
        """Seconds to run one op of a layer's forward pass again."""

    def copy_seconds(self, tier: Tier, num_bytes: int) -> float:
        """By how much copying a storage to a tier and back holds computing up."""


def plus(*rows: Mapping[int, float]) -> dict[int, float]:
    """The sum of rows of a program."""
    total: dict[int, float] = {}
    for row in rows:
        for variable, value in row.items():
            total[variable] = total.get(variable, 0.0) + value
    return total
