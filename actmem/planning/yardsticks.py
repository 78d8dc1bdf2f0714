"""Torch's own ways of recomputing, as our simulation can play them: modelled, not run.

``torch-full`` holds a layer's input and runs the whole layer again, like the policy ``full``. ``torch-sac`` holds the
output of every compute-intensive op, also of those whose output nobody asks for later (``down_proj`` before a residual
is added, for one), and runs the rest again. Torch makes all that it drops of a layer again at once, where ours is made
as it is needed, so the true peaks of both are no lower than these.
"""

from __future__ import annotations

from collections.abc import Callable

from actmem.graph import RegionGraph
from actmem.planning.fates import SAVED, Fates, resolve
from actmem.planning.plan import Action


def torch_full(graph: RegionGraph) -> Fates:
    """``torch-full``: `torch.utils.checkpoint` around each layer."""
    return resolve(graph, lambda path: Action.RECOMPUTE)


def torch_selective(graph: RegionGraph) -> Fates:
    """``torch-sac``: torch's selective checkpoint around each layer, with matmuls and attention saved."""
    intensive = {op.path for op in graph.ops if op.compute_intensive}
    fates = resolve(graph, lambda path: Action.SAVE if path in intensive else Action.RECOMPUTE)
    cached = {storage: SAVED for storage, op in graph.creators.items() if graph.ops[op].compute_intensive}
    return Fates(graph, fates.replayed, cached | fates.held, fates.dropped - cached.keys())


YARDSTICK_FATES: dict[str, Callable[[RegionGraph], Fates]] = {"torch-full": torch_full, "torch-sac": torch_selective}
