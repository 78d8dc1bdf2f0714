"""What a plan did: bytes held and recomputed, and why; ops run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from actmem.planning import Fates
from actmem.planning.fates import INPUT, SAVED, SMALL
from actmem.runtime.swap.counters import SwapCounters


@dataclass
class RegionStats:
    """One region. Bytes are those of one call (the last that was learned); counts are over all calls.

    `held_bytes` is what the region holds until its backward pass, split in `held_bytes_by_reason`: ``saved`` by the
    plan, ``input`` of the region, or the reason for which the engine always saves it. `dropped_bytes` is what autograd
    would have held and is recomputed instead, `swapped_bytes` what the region would hold and is moved away instead.
    """

    name: str
    layer: int
    held_bytes: int = 0
    dropped_bytes: int = 0
    swapped_bytes: int = 0
    held_bytes_by_reason: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0
    num_learning_calls: int = 0
    num_streamed_calls: int = 0
    num_ops_on_tape: int = 0
    num_replayed_ops: int = 0
    num_unpacks: int = 0
    num_verified: int = 0

    def take(self, fates: Fates) -> None:
        """Note the fates that calls of this region now have."""
        self.held_bytes = fates.held_bytes
        self.dropped_bytes = fates.dropped_bytes
        self.swapped_bytes = fates.swapped_bytes
        self.held_bytes_by_reason = dict(fates.held_bytes_by_reason)
        self.num_ops_on_tape = len(fates.replayed)


@dataclass(frozen=True)
class Stats:
    """All regions of a model, and their totals. `swap` counts copies since the plan was applied."""

    regions: tuple[RegionStats, ...]
    swap: SwapCounters = field(default_factory=SwapCounters)

    @property
    def held_bytes(self) -> int:
        """Bytes held until the backward pass, over all regions."""
        return sum(region.held_bytes for region in self.regions)

    @property
    def dropped_bytes(self) -> int:
        """Bytes recomputed instead of held, over all regions."""
        return sum(region.dropped_bytes for region in self.regions)

    @property
    def swapped_bytes(self) -> int:
        """Bytes that leave the device until the backward pass, over all regions."""
        return sum(region.swapped_bytes for region in self.regions)

    @property
    def always_saved_bytes(self) -> dict[str, int]:
        """Bytes that the engine holds whatever the plan says, by reason."""
        totals: Counter[str] = Counter()
        for region in self.regions:
            totals.update(region.held_bytes_by_reason)
        return {reason: size for reason, size in sorted(totals.items()) if reason not in (SAVED, INPUT, SMALL)}

    @property
    def num_replayed_ops(self) -> int:
        """Ops run again so far."""
        return sum(region.num_replayed_ops for region in self.regions)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "held_bytes": self.held_bytes,
            "dropped_bytes": self.dropped_bytes,
            "swapped_bytes": self.swapped_bytes,
            "always_saved_bytes": self.always_saved_bytes,
            "num_replayed_ops": self.num_replayed_ops,
            "swap": self.swap.to_dict(),
            "regions": [asdict(region) for region in self.regions],
        }


def collect(regions: Iterable[RegionStats], swap: SwapCounters) -> Stats:
    """The stats of some regions."""
    return Stats(tuple(regions), swap)
