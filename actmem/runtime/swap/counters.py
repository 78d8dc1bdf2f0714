"""What swapping did, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median_high
from typing import Any

_LEVELS = ("host_high_water_bytes", "disk_high_water_bytes")


@dataclass
class SwapCounters:
    """Sums since a plan was applied, except the two high-water marks.

    `begun`: storages whose copy out was asked for, `out`: those that left, `in`: those that came back. `refused`:
    storages that stayed because too much was on its way out, `no_room`: because their tiers were full or closed,
    `withdrawn`: because the backward pass came before their copy had begun, `failed`: because it failed; `unfit`:
    tensors that stayed because they are not plain ones on the model's device.
    `exposed_seconds` is what the step waited for copies; `copy_out_seconds` and `copy_in_seconds` are what the copies
    took. `pool_hits` are places given out of what a tier had already, `pool_growths` how often it had to grow.
    """

    num_begun: int = 0
    num_out: int = 0
    num_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    num_refused: int = 0
    bytes_refused: int = 0
    num_no_room: int = 0
    bytes_no_room: int = 0
    num_withdrawn: int = 0
    num_failed: int = 0
    num_unfit: int = 0
    num_late: int = 0
    exposed_seconds: float = 0.0
    copy_out_seconds: float = 0.0
    copy_in_seconds: float = 0.0
    pool_hits: int = 0
    pool_growths: int = 0
    host_high_water_bytes: int = 0
    disk_high_water_bytes: int = 0

    @property
    def hidden_share(self) -> float | None:
        """How much of the copies' time the step did not wait for; ``None`` where nothing was copied."""
        copying = self.copy_out_seconds + self.copy_in_seconds
        return max(0.0, 1.0 - self.exposed_seconds / copying) if copying else None

    def copy(self) -> SwapCounters:
        """The counts as they stand."""
        return replace(self)

    def since(self, earlier: SwapCounters) -> SwapCounters:
        """What came after `earlier`; high-water marks stay as they are."""
        counted = [each.name for each in fields(self) if each.name not in _LEVELS]
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counted})

    @property
    def bytes_stayed(self) -> int:
        """What should have left, but too much was on its way or no tier had room."""
        return self.bytes_refused + self.bytes_no_room

    @classmethod
    def middle(cls, several: Sequence[SwapCounters]) -> SwapCounters:
        """The middle one of each count by itself, of two middle ones the greater."""
        return cls(**{each.name: median_high(getattr(one, each.name) for one in several) for each in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the hidden share included."""
        return asdict(self) | {"hidden_share": self.hidden_share}
