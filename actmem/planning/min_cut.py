"""The fewest bytes that let a region's backward pass run without re-running any compute-intensive op.

Two yes-or-no questions: is op v re-run, and does somebody ask for storage o? The backward pass asks for what autograd
packed; an op that is re-run asks for its inputs. A storage that is asked for costs its bytes unless the op that made it
is re-run; inputs and always-saved ones cost theirs in any case; a compute-intensive op is never re-run. Every term says
"yes here and no there costs so much", so the cheapest answers are a minimum cut with the yes's on the source's
side. Among equal cuts, the one with the fewest yes's re-runs the fewest ops.

The idea is the min-cut rematerialisation of Horace He and Shangdi Yu, "Transcending Runtime-Memory Tradeoffs in
Checkpointing by being Fusion Aware" (MLSys 2023), here over ops and storages instead of tensors, which counts views and
ops with several outputs exactly.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
from networkx.algorithms.flow import preflow_push

from actmem.graph import RegionGraph

_SOURCE, _SINK = "source", "sink"


def cheapest_to_hold(graph: RegionGraph) -> frozenset[int]:
    """Storages to hold: inputs of the region and always-saved ones that are needed included, parameters left out."""
    yes = _source_side(preflow_push(_network(graph), _SOURCE, _SINK))
    held = set()
    for index, storage in enumerate(graph.storages):
        bound = storage.kind == "input" or storage.kept is not None
        if ("asked", index) in yes and (bound or ("re-run", graph.creators[index]) not in yes):
            held.add(index)
    return frozenset(held)


def _network(graph: RegionGraph) -> nx.DiGraph[Any]:
    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from([_SOURCE, _SINK])
    for index, storage in enumerate(graph.storages):
        price = {"capacity": storage.num_bytes}
        if storage.kind == "input" or storage.kept is not None:
            network.add_edge(("asked", index), _SINK, **price)
        elif storage.kind == "op":
            network.add_edge(("asked", index), ("re-run", graph.creators[index]), **({} if storage.edited else price))
    for index in graph.packed_storages:
        network.add_edge(_SOURCE, ("asked", index))
    for index, op in enumerate(graph.ops):
        made = {graph.values[value].storage for value in op.outputs}
        if op.compute_intensive and not any(graph.storages[each].edited for each in made):
            network.add_edge(("re-run", index), _SINK)
        for read in {graph.values[value].storage for value in op.inputs} - made:
            if graph.storages[read].kind != "parameter":
                network.add_edge(("re-run", index), ("asked", read))
    return network


def _source_side(residual: nx.DiGraph[Any]) -> set[object]:
    """The smallest source side of all minimum cuts."""
    reached: set[object] = {_SOURCE}
    pending: list[object] = [_SOURCE]
    while pending:
        node = pending.pop()
        for after, edge in residual[node].items():
            if after not in reached and edge["flow"] < edge["capacity"]:
                reached.add(after)
                pending.append(after)
    return reached
