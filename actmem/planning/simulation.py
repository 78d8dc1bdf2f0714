"""What a simulation takes and gives: a plan for each layer and the conditions; the peak, the times, the timeline."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from actmem.graph import Graph
from actmem.planning.course import Costs
from actmem.planning.fates import Fates
from actmem.planning.plan import Tier

HELD = "held by other layers"


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second to a tier and back, by how many seconds computing is held up for each second of copying, and the
    seconds that go by before a copy out begins."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    slowdown: float = 0.0
    start_seconds: float = 0.0


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer's call; `tiers` says where its swapped storages go."""

    fates: Fates
    tiers: Mapping[int, Tier] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Equal for plans of one graph that do the same."""
        return self.fates.key, frozenset(self.tiers.items())


@dataclass(frozen=True)
class Conditions:
    """What a step runs under: costs of ops, links to the tiers, how many layers ahead reloads start, how many bytes may
    be on their way out or in, whether parameters have gradients when it begins, and the bytes that kernels may take for
    themselves at any moment: `workspace_bytes`, and `packing_bytes` on top in a step with products of bfloat16 whose
    own memory nobody has seen."""

    costs: Costs
    links: Mapping[Tier, Link]
    prefetch: int = 1
    in_flight_limit: int = 2**33
    gradients_stand: bool = True
    workspace_bytes: int = 0
    packing_bytes: int = 0

    def for_step(self, graph: Graph) -> Conditions:
        """The same for the step of `graph`, with all that its kernels take as `workspace_bytes`."""
        packing_bytes = self.packing_bytes if graph.multiplies_bfloat16_unseen else 0
        return replace(self, workspace_bytes=self.workspace_bytes + packing_bytes, packing_bytes=0)


@dataclass(frozen=True)
class Moment:
    """A moment of a step: where it is, and the bytes that stand, by what they are."""

    where: str
    bytes_by_use: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """All that stands."""
        return sum(self.bytes_by_use.values())


@dataclass(frozen=True)
class Simulation:
    """What a step comes to. `replay_seconds` are spent on ops that are run again, `exposed_seconds` on waiting for
    copies and on what copying takes from the computing. `timeline`: seconds and bytes at each op."""

    seconds: float
    replay_seconds: float
    exposed_seconds: float
    peak: Moment
    held_bytes: int
    swapped_bytes: int
    timeline: tuple[tuple[float, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that stands at once."""
        return self.peak.num_bytes
