"""The fewest bytes that let a region's backward pass run without re-running any compute-intensive op.

Each storage is a node that can be held at the price of its bytes; an op carries availability from its inputs to its
outputs unless it is compute-intensive; what cannot be made again is tied to the source, what the backward pass reads
to the sink. The cheapest set of storages to hold is then a minimum vertex cut (the min-cut rematerialisation of
Horace He and Shangdi Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023;
here over storages instead of tensors). Among cuts of equal bytes the one nearest to the sink re-runs the fewest ops.
"""

from __future__ import annotations

import networkx as nx
from networkx.algorithms.flow import preflow_push

from actmem.graph import RegionGraph

_SOURCE, _SINK = "source", "sink"


def cheapest_to_hold(graph: RegionGraph) -> frozenset[int]:
    """Storages to hold, inputs of the region included and parameters left out."""
    residual = preflow_push(_network(graph), _SOURCE, _SINK)
    sink_side = _reaching_sink(residual)
    return frozenset(
        index for index in range(len(graph.storages)) if ("out", index) in sink_side and ("in", index) not in sink_side
    )


def _network(graph: RegionGraph) -> nx.DiGraph:
    network = nx.DiGraph()
    network.add_nodes_from([_SOURCE, _SINK])
    for index, storage in enumerate(graph.storages):
        if storage.kind == "parameter":
            continue
        capacity = {} if storage.edited else {"capacity": storage.num_bytes}
        network.add_edge(("in", index), ("out", index), **capacity)
        if storage.kind == "input" or storage.kept is not None:
            network.add_edge(_SOURCE, ("in", index))
    for op in graph.ops:
        _add_op(network, graph, op.inputs, op.outputs, compute_intensive=op.compute_intensive)
    for index in graph.packed_storages:
        network.add_edge(("out", index), _SINK)
    return network


def _add_op(
    network: nx.DiGraph, graph: RegionGraph, inputs: tuple[int, ...], outputs: tuple[int, ...], *, compute_intensive: bool
) -> None:
    sources = {graph.values[index].storage for index in inputs}
    made = {graph.values[index].storage for index in outputs} - sources
    for target in made:
        if graph.storages[target].kind != "op":
            continue
        if compute_intensive and not graph.storages[target].edited:
            network.add_edge(_SOURCE, ("in", target))
        for source in sources:
            if graph.storages[source].kind != "parameter":
                network.add_edge(("out", source), ("in", target))


def _reaching_sink(residual: nx.DiGraph) -> set[object]:
    reaching: set[object] = {_SINK}
    pending: list[object] = [_SINK]
    while pending:
        node = pending.pop()
        for before in residual.predecessors(node):
            edge = residual[before][node]
            if before not in reaching and edge["flow"] < edge["capacity"]:
                reaching.add(before)
                pending.append(before)
    return reaching
