"""The least peak that a plan can reach which re-runs no compute-intensive op."""

from __future__ import annotations

from actmem.graph import Graph, RegionGraph
from actmem.planning import Action, Fates, resolve
from actmem.planning.min_cut import cheapest_to_hold


def unplanned_fates(graph: RegionGraph) -> Fates:
    """What becomes of a region whose every op is saved."""
    return resolve(graph, lambda path: Action.SAVE)


def peak_floor_bytes(graph: Graph, unplanned_peak_bytes: int) -> int:
    """The peak of the unplanned step less what a minimum cut of each layer saves.

    What stands outside the layers is thereby in it, as is a storage that both hold in several layers, once: the same
    bytes are in both sums, however often they are counted. The memory in which a layer is recomputed is left out, and
    the peak is taken to stay in the same place of the step, so that no plan may quite reach the floor.
    """
    saved = {kind: _bytes_saved_by_cut(each) for kind, each in graph.kinds.items()}
    return unplanned_peak_bytes - sum(saved[kind] for kind in graph.layers.values())


def _bytes_saved_by_cut(graph: RegionGraph) -> int:
    return unplanned_fates(graph).held_bytes - graph.num_bytes(cheapest_to_hold(graph))
