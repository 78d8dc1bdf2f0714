"""What a plan does to the bytes that the layers of a model hold, layer kind by layer kind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from actmem.graph import Graph
from actmem.planning import Action, resolve
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
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for layer, kind in enumerate(graph.layers.values()):
        groups.setdefault((kind, source.group(layer)), []).append(layer)
    found = []
    for (kind, _), layers in groups.items():
        region = graph.kinds[kind]
        rules = RuleSet(source.rules(layers[0], region))
        fates = resolve(region, rules.action_of, min_swap_bytes=min_swap_bytes)
        unplanned = resolve(region, lambda path: Action.SAVE).held_bytes
        held = (fates.held_bytes, fates.dropped_bytes, fates.swapped_bytes)
        found.append(LayerBytes(kind, tuple(layers), unplanned, *held))
    return Effect(source.name, tuple(found))
