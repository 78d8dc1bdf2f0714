"""What a plan does to the bytes that the layers of a model hold, layer kind by layer kind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from actmem.graph import Graph, RegionGraph
from actmem.measuring.floor import unplanned_fates
from actmem.planning.fates import fates_under
from actmem.planning.plan import RuleSet
from actmem.runtime.engine import RuleSource


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer of a `kind`, the same for all of `layers`, from its forward to its backward pass.

    `unplanned_bytes` would be held without the plan. `saved_bytes` are held, `recomputed_bytes` dropped and made again,
    `swapped_bytes` moved away and back.
    """

    kind: str
    layers: tuple[int, ...]
    unplanned_bytes: int
    saved_bytes: int
    recomputed_bytes: int
    swapped_bytes: int


@dataclass(frozen=True)
class Effect:
    """A plan's effect on all layers, of which those in one of `groups` fare alike."""

    plan: str
    groups: tuple[LayerBytes, ...]

    def total(self, name: str) -> int:
        """The sum of ``unplanned_bytes``, ``saved_bytes``, … over all layers."""
        return sum(int(getattr(group, name)) * len(group.layers) for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("unplanned_bytes", "saved_bytes", "recomputed_bytes", "swapped_bytes")
        totals = {name: self.total(name) for name in names}
        return {"plan": self.plan, "layers": [asdict(group) for group in self.groups], "total": totals}


def effect_of(graph: Graph, source: RuleSource, *, min_swap_bytes: int) -> Effect:
    """What the rules of `source` do in each layer of `graph`; swaps of fewer than `min_swap_bytes` are not made."""
    by_rules: dict[tuple[str, Hashable], list[int]] = {}
    for layer, kind in enumerate(graph.layers.values()):
        by_rules.setdefault((kind, source.group(layer)), []).append(layer)
    by_bytes: dict[tuple[str, tuple[int, int, int, int]], list[int]] = {}
    for (kind, _), layers in by_rules.items():
        region = graph.kinds[kind]
        counts = _bytes_of(region, RuleSet(source.rules(layers[0], region)), min_swap_bytes)
        by_bytes.setdefault((kind, counts), []).extend(layers)
    groups = [LayerBytes(kind, tuple(sorted(layers)), *counts) for (kind, counts), layers in by_bytes.items()]
    return Effect(source.name, tuple(sorted(groups, key=lambda group: group.layers)))


def _bytes_of(region: RegionGraph, rules: RuleSet, min_swap_bytes: int) -> tuple[int, int, int, int]:
    fates = fates_under(region, rules, min_swap_bytes=min_swap_bytes)
    return unplanned_fates(region).held_bytes, fates.held_bytes, fates.dropped_bytes, fates.swapped_bytes
