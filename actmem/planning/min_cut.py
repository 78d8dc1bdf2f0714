"""The cheapest storages to hold, of one layer, for given prices of holding a storage and of running an op again.

Two yes-or-no questions: is op v run again, and does somebody ask for storage o? The backward pass asks for what
autograd packed; an op that is run again asks for its inputs. A storage that is asked for costs its price unless the op
that made it is run again; inputs and always-saved ones cost theirs in any case. Every term says "yes here and no there
costs so much", so the cheapest answers are a minimum cut with the yes's on the source's side. Among equal cuts, the one
with the fewest yes's runs the fewest ops.

The idea is the min-cut rematerialisation of Horace He and Shangdi Yu, "Transcending Runtime-Memory Tradeoffs in
Checkpointing by being Fusion Aware" (MLSys 2023), here over ops and storages instead of tensors, which counts views and
ops with several outputs exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
from networkx.algorithms.flow import preflow_push

from actmem.graph import RegionGraph

_SOURCE, _SINK = "source", "sink"


def cheapest_to_hold(graph: RegionGraph) -> frozenset[int]:
    """The fewest bytes that let the backward pass run without running any compute-intensive op again.

    Inputs of the region and always-saved storages that are needed are among them, parameters are not.
    """
    return cheapest(
        graph,
        hold_price=lambda storage: graph.storages[storage].num_bytes,
        run_price=lambda op: None if graph.ops[op].compute_intensive else 0,
    )


def cheapest(
    graph: RegionGraph,
    *,
    hold_price: Callable[[int], int],
    run_price: Callable[[int], int | None],
    is_free: Callable[[int], bool] | None = None,
) -> frozenset[int]:
    """The storages to hold so that their prices, and those of the ops that are run again, add up to the least.

    Prices are whole numbers; ``None`` forbids to run an op again. `is_free` says which storages may be made again;
    those that no reason keeps, if it is not given.
    """
    free = is_free or (lambda storage: graph.storages[storage].kept is None)
    bound = [storage.kind == "input" or not free(index) for index, storage in enumerate(graph.storages)]
    yes = _source_side(preflow_push(_network(graph, bound, hold_price, run_price), _SOURCE, _SINK))
    return frozenset(
        index
        for index in range(len(graph.storages))
        if ("asked", index) in yes and (bound[index] or ("again", graph.creators[index]) not in yes)
    )


def _network(
    graph: RegionGraph,
    bound: list[bool],
    hold_price: Callable[[int], int],
    run_price: Callable[[int], int | None],
) -> nx.DiGraph[Any]:
    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from([_SOURCE, _SINK])
    for index, storage in enumerate(graph.storages):
        if bound[index] and storage.kind != "parameter":
            network.add_edge(("asked", index), _SINK, capacity=hold_price(index))
        elif storage.kind == "op":
            limit = {} if storage.edited else {"capacity": hold_price(index)}
            network.add_edge(("asked", index), ("again", graph.creators[index]), **limit)
    for index in graph.packed_storages:
        network.add_edge(_SOURCE, ("asked", index))
    for index, op in enumerate(graph.ops):
        made = {graph.values[value].storage for value in op.outputs}
        price = 0 if any(graph.storages[each].edited for each in made) else run_price(index)
        if price != 0:
            network.add_edge(("again", index), _SINK, **({} if price is None else {"capacity": price}))
        for read in {graph.values[value].storage for value in op.inputs} - made:
            if graph.storages[read].kind != "parameter":
                network.add_edge(("again", index), ("asked", read))
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
