"""Storages that several may hold on to at once, and that stand only once all the same.

The output of a layer may be saved by that layer, by those that take it, and by ops outside the layers. While somebody
outside refers to it, whatever the plan, it counts there; else it counts with the first layer that holds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from actmem.graph import Escape, Graph, RegionGraph
from actmem.planning.surroundings import Outlasting


@dataclass(frozen=True)
class Common:
    """Such a storage. `holders`: layers that a plan may have hold it, in order, and what it is there; they all see a
    `constant` in it or none. `escape`: how those outside the layers let it go, and `maker` the layer that made it."""

    name: Outlasting
    num_bytes: int
    holders: tuple[tuple[int, int], ...]
    constant: bool
    escape: Escape | None
    maker: int

    def is_outside(self, layer: int, *, backward: bool) -> bool:
        """Whether it stands outside the layers when a layer's pass begins, whatever the plan."""
        end = self.escape
        if end is None:
            return False
        if backward:
            return end.backward and end.gap <= layer
        return layer > self.maker and (end.backward or end.gap > layer)

    @cached_property
    def counting(self) -> tuple[int, ...]:
        """Layers with which it may count."""
        return tuple(layer for layer, _ in self.holders if not self.is_outside(layer, backward=True))


@dataclass(frozen=True)
class Sharing:
    """Storages of one layer that are common: those that count `outside` whenever the layer holds them, those that it
    may `own`, so that its figures are to leave them out, and of these the ones that an `earlier` layer may hold."""

    outside: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    earlier: frozenset[int] = frozenset()


def commons_of(graph: Graph) -> tuple[Common, ...]:
    """All common storages of a traced step. What was made outside the layers and needs no gradient is none."""
    assert graph.step is not None, "only the layers' forward passes were traced"
    layers = [graph.of_layer(name) for name in graph.layers]
    holdable = {id(layer): _holdable(layer) for layer in layers}
    holders: dict[Outlasting, dict[int, int]] = defaultdict(dict)
    escapes: dict[Outlasting, tuple[int, Escape]] = {}
    for index, call in enumerate(graph.step.calls):
        numbers: dict[int, Outlasting] = dict((*call.shared, *call.constants))
        for escape in call.escapes:
            name = numbers.setdefault(escape.storage, (index, escape.storage))
            escapes[name] = index, escape
        for storage, name in numbers.items():
            if storage in holdable[id(layers[index])]:
                holders[name][index] = storage
    made_outside = {constant.number for constant in graph.step.constants}
    return tuple(
        _common(layers, name, found, *escapes.get(name, (-1, None)))
        for name, found in holders.items()
        if name not in made_outside and (len(found) > 1 or name in escapes)
    )


def sharing_of(commons: Sequence[Common], layer: int) -> Sharing:
    """What a layer has in common with others."""
    mine = [(dict(each.holders)[layer], each) for each in commons if not each.constant and layer in dict(each.holders)]
    own = {storage: each for storage, each in mine if layer in each.counting}
    return Sharing(
        outside=frozenset(storage for storage, _ in mine if storage not in own),
        own=frozenset(own),
        earlier=frozenset(storage for storage, each in own.items() if each.counting[0] < layer),
    )


def _common(
    layers: Sequence[RegionGraph], name: Outlasting, found: dict[int, int], maker: int, escape: Escape | None
) -> Common:
    storages = [layers[layer].storages[storage] for layer, storage in found.items()]
    constant = any(storage.constant for storage in storages)
    return Common(name, storages[0].num_bytes, tuple(sorted(found.items())), constant, escape, maker)


def _holdable(graph: RegionGraph) -> frozenset[int]:
    """Storages that some plan has a layer hold: those that lead to what autograd saves."""
    pending = list(graph.packed)
    seen = set(pending)
    while pending:
        producer = graph.values[pending.pop()].producer
        new = set() if producer is None else set(graph.ops[producer].inputs) - seen
        seen |= new
        pending.extend(new)
    return frozenset(graph.values[value].storage for value in seen)
