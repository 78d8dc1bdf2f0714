"""What each op's storages cost and bring under a plan: a price that a reader can check.

For one op alone, with all else as the plan has it: what a recomputed storage frees, against its being saved, and which
ops run again for that; for a saved one the same the other way round. Their quotient, bytes freed for each second of
added step, is the rate at which memory is bought. What swapping a storage instead would add is found by playing the
whole step through with that one change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actmem.hardware import CostModel, Hardware, work_of
from actmem.planning.fates import Fates, path_of_storage, resolve
from actmem.planning.plan import Action, Tier
from actmem.planning.planner import Planner
from actmem.planning.simulation import LayerPlan


@dataclass(frozen=True, slots=True)
class Price:
    """One op. `seconds` it takes, `is_measured` if on the device; `freed_bytes` are freed, or would be, by making its
    storages again, for which `num_again` ops run again in `again_seconds`; at peak rates they would take
    `peak_again_seconds`. `copy_bytes_per_second` is the slower way of a swap, `copy_peak` what the link can at most.
    `swap_adds_seconds` is what swapping it instead would add to the step, in one layer."""

    seconds: float
    is_measured: bool
    freed_bytes: int = 0
    num_again: int = 0
    again_seconds: float = 0.0
    peak_again_seconds: float = 0.0
    copy_bytes_per_second: float | None = None
    copy_peak: float | None = None
    swap_adds_seconds: float | None = None

    @property
    def rate(self) -> float | None:
        """Bytes freed per second of added step, or copied per second; ``None`` where nothing is freed."""
        if self.copy_bytes_per_second is not None:
            return self.copy_bytes_per_second
        return self.freed_bytes / self.again_seconds if self.freed_bytes > 0 and self.again_seconds > 0 else None

    @property
    def peak_rate(self) -> float | None:
        """The rate if everything ran at the peaks of the device."""
        if self.copy_bytes_per_second is not None:
            return self.copy_peak
        return self.freed_bytes / self.peak_again_seconds if self.rate and self.peak_again_seconds > 0 else None


class Pricer:
    """Prices under one plan: `layers` are what it does with each layer of the planner's step."""

    def __init__(self, planner: Planner, hardware: Hardware, layers: Sequence[LayerPlan]) -> None:
        self._simulator = planner.simulator
        self._costs = CostModel(hardware)
        self._layers = list(layers)
        self._seconds = self._simulator.run(self._layers).seconds

    def price(self, layer: int, op: int) -> Price:
        """What the storages of op number `op` cost in a layer."""
        graph, fates = self._simulator.layers[layer], self._layers[layer].fates
        work = work_of(graph, op)
        price = Price(self._costs.seconds(work), self._costs.is_measured(work))
        made = [storage for storage, creator in graph.creators.items() if creator == op]
        swapped = [storage for storage in made if storage in fates.swapped]
        if swapped:
            return self._swap_price(price, self._layers[layer].tiers[swapped[0]])
        wanted = [storage for storage in made if storage in fates.dropped or storage in fates.held]
        if not wanted or all(graph.storages[storage].kept for storage in wanted):
            return price
        return replace(self._again_price(price, layer, op), swap_adds_seconds=self._swap_adds(layer, wanted))

    def _swap_price(self, price: Price, tier: Tier) -> Price:
        link, copying = self._simulator.conditions.links[tier], getattr(self._costs.hardware, _COPYING[tier])
        return replace(
            price,
            copy_bytes_per_second=min(link.out_bytes_per_second, link.in_bytes_per_second),
            copy_peak=min(copying.out_bytes_per_second.peak, copying.in_bytes_per_second.peak),
        )

    def _again_price(self, price: Price, layer: int, op: int) -> Price:
        graph, fates = self._simulator.layers[layer], self._layers[layer].fates
        saved, remade = (_with_action(fates, graph.ops[op].path, each) for each in (Action.SAVE, Action.RECOMPUTE))
        again = remade.replayed - saved.replayed
        return replace(
            price,
            freed_bytes=saved.held_bytes - remade.held_bytes,
            num_again=sum(not graph.ops[each].view for each in again),
            again_seconds=sum(self._simulator.op_seconds(layer, each) for each in again),
            peak_again_seconds=sum(self._costs.lower_bound_seconds(work_of(graph, each)) for each in again),
        )

    def _swap_adds(self, layer: int, wanted: Sequence[int]) -> float | None:
        """The seconds by which the step is longer if these storages of one layer are swapped; ``None`` without a tier,
        and where the plan does not hold them."""
        mine = self._layers[layer]
        tier = next(iter(self._simulator.conditions.links), None)
        moved = frozenset(wanted) & mine.fates.held.keys()
        if tier is None or not moved:
            return None
        held = {storage: reason for storage, reason in mine.fates.held.items() if storage not in moved}
        fates = replace(mine.fates, held=held, swapped=mine.fates.swapped | moved)
        changed = [*self._layers]
        changed[layer] = LayerPlan(fates, {**mine.tiers, **dict.fromkeys(moved, tier)})
        return self._simulator.run(changed).seconds - self._seconds


_COPYING: dict[Tier, str] = {"host": "link", "disk": "disk"}


def _with_action(fates: Fates, path: str, action: Action) -> Fates:
    """The same fates but for the op at `path`: what is here stays here, and what is not is made again."""
    graph = fates.graph
    here = {path_of_storage(graph, storage): Action.SAVE for storage in fates.held}
    here |= {path_of_storage(graph, storage): Action.SWAP for storage in fates.swapped}
    again = {graph.ops[op].path for op in fates.replayed}
    return resolve(
        graph,
        lambda each: action if each == path else here.get(each, Action.RECOMPUTE),
        communicates_again=again.__contains__,
    )
