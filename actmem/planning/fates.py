"""From actions to fates: what a region holds until its backward pass, and which ops it re-runs.

The rule: whatever the backward pass reads must be held, be swapped, or be the output of an op that is re-run; and so
must every input of an op that is re-run. Walking back from the packed values along the actions settles all at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

from actmem.graph import COMMUNICATION, RegionGraph
from actmem.planning.plan import INPUT_PATH, Action, RuleSet

SAVED = "saved"
INPUT = "input"
SMALL = "below min_swap_bytes"
SPREAD = "a DTensor, which is not swapped"
_REARRANGING = {"cat", "clone"}


@dataclass(frozen=True)
class Fates:
    """What becomes of one region call.

    `replayed`: ops that the backward pass re-runs. `held`: storage -> why it is held (``saved`` by the plan, ``input``
    of the region, too small to swap, or the reason for which it is always saved). `dropped`: storages that autograd
    wanted and that are recomputed instead. `swapped`: storages that are moved away and brought back. Parameters are in
    none of them: somebody else owns them.
    """

    graph: RegionGraph
    replayed: frozenset[int]
    held: dict[int, str]
    dropped: frozenset[int]
    swapped: frozenset[int] = frozenset()

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal fates in one graph."""
        return self.replayed, frozenset(self.held), self.swapped

    @property
    def held_bytes(self) -> int:
        """Bytes that the region holds until its backward pass."""
        return self.graph.num_bytes(set(self.held))

    @property
    def dropped_bytes(self) -> int:
        """Bytes that autograd would have held and the plan recomputes."""
        return self.graph.num_bytes(self.dropped)

    @property
    def swapped_bytes(self) -> int:
        """Bytes that are moved away until the backward pass."""
        return self.graph.num_bytes(self.swapped)

    @property
    def held_bytes_by_reason(self) -> Counter[str]:
        """`held_bytes`, split by the reason for holding them."""
        totals: Counter[str] = Counter()
        for storage, reason in self.held.items():
            totals[reason] += self.graph.storages[storage].num_bytes
        return totals


def resolve(
    graph: RegionGraph,
    action_of: Callable[[str], Action],
    *,
    min_swap_bytes: int = 0,
    communicates_again: Callable[[str], bool] = lambda path: False,
) -> Fates:
    """The fates in `graph` when the op at each path gets the action that `action_of` names.

    A storage follows the op that created it, and its views follow the storage. A swap of fewer than `min_swap_bytes` is
    not worth its copies, so such a storage is saved. What a collective made is saved unless the plan
    `communicates_again` at its path.
    """
    replayed: set[int] = set()
    held: dict[int, str] = {}
    dropped: set[int] = set()
    swapped: set[int] = set()
    pending = list(dict.fromkeys(graph.packed))
    packed = set(pending)
    while pending:
        index = pending.pop()
        value = graph.values[index]
        if graph.storages[value.storage].kind == "parameter":
            continue
        if _is_swapped(graph, value.storage, action_of, min_swap_bytes):
            swapped.add(value.storage)
            continue
        reason = _reason_to_hold(graph, value.storage, action_of, communicates_again)
        if reason is not None:
            held[value.storage] = reason
            continue
        if index in packed:
            dropped.add(value.storage)
        assert value.producer is not None, "a value from outside the region is always held"
        if value.producer not in replayed:
            replayed.add(value.producer)
            pending.extend(graph.ops[value.producer].inputs)
    return Fates(graph, frozenset(replayed), held, frozenset(dropped), frozenset(swapped))


def fates_under(graph: RegionGraph, rules: RuleSet, *, min_swap_bytes: int = 0) -> Fates:
    """The fates in `graph` under the rules of one layer."""
    return resolve(graph, rules.action_of, min_swap_bytes=min_swap_bytes, communicates_again=rules.communicates_again)


def path_of_storage(graph: RegionGraph, index: int) -> str:
    """The path whose rule decides about a storage: that of the op that created it."""
    return INPUT_PATH if graph.storages[index].kind == "input" else graph.ops[graph.creators[index]].path


def deciding_path(graph: RegionGraph, index: int, communicates_again: Callable[[str], bool]) -> str:
    """`path_of_storage`, but for what collectives that are issued again made, put in another order: that of the first
    of those."""
    if graph.storages[index].kind == "op" and _is_rearranged(graph, index, communicates_again):
        first = graph.ops[graph.creators[index]].inputs[0]
        return path_of_storage(graph, graph.values[first].storage)
    return path_of_storage(graph, index)


def _is_rearranged(graph: RegionGraph, index: int, communicates_again: Callable[[str], bool]) -> bool:
    """Whether a storage holds nothing but what collectives that are issued again have made, put in another order: what
    is gathered along a later dimension than the first comes in parts that are joined."""
    creator = graph.ops[graph.creators[index]]
    read = {graph.values[value].storage for value in creator.inputs}
    return creator.name in _REARRANGING and all(
        graph.storages[each].kept == COMMUNICATION and communicates_again(path_of_storage(graph, each)) for each in read
    )


def _is_swapped(graph: RegionGraph, index: int, action_of: Callable[[str], Action], min_bytes: int) -> bool:
    storage = graph.storages[index]
    if storage.kept is not None or storage.edited or storage.constant or storage.spread:
        return False
    if storage.num_bytes < max(min_bytes, 1):
        return False
    return action_of(path_of_storage(graph, index)) is Action.SWAP


def _reason_to_hold(
    graph: RegionGraph,
    index: int,
    action_of: Callable[[str], Action],
    communicates_again: Callable[[str], bool],
) -> str | None:
    storage = graph.storages[index]
    if storage.kind == "input":
        return INPUT
    if storage.kept is not None:
        again = storage.kept == COMMUNICATION and communicates_again(path_of_storage(graph, index))
        return None if again else storage.kept
    if storage.edited or _is_rearranged(graph, index, communicates_again):
        return None
    action = action_of(path_of_storage(graph, index))
    if action is Action.SWAP:
        return SPREAD if storage.spread else SMALL
    return SAVED if action is Action.SAVE else None
