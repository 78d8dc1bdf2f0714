"""Training steps of a few layers with a few ops each, small enough to try every plan there is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from actmem.graph import Call, Gap, Graph, Op, RegionGraph, Standing, Step, StepOp, Storage, Value
from actmem.planning.course import Costs
from actmem.planning.fates import path_of_storage, resolve
from actmem.planning.plan import Action, Tier
from actmem.planning.simulation import Conditions, LayerPlan, Link, Simulation
from actmem.planning.simulator import Simulator

MIB = 2**20
COSTS = Costs(
    op_seconds=lambda graph, op: float(graph.ops[op].flops),
    step_op_seconds=lambda op: float(op.flops),
    replay_seconds=0.01,
)
SIZES = st.integers(1, 12).map(lambda size: size * MIB)


def conditions(bytes_per_second: float | None = None) -> Conditions:
    """Without a link, or with one to the host."""
    links: dict[Tier, Link] = {}
    if bytes_per_second is not None:
        links["host"] = Link(bytes_per_second, bytes_per_second)
    return Conditions(COSTS, links, gradients_stand=False)


@st.composite
def layers(draw: st.DrawFn, most_ops: int) -> RegionGraph:
    """A layer: an input, a constant, a parameter, and ops that read what is there; some only look at it otherwise."""
    storages = [Storage(draw(SIZES), "input"), Storage(MIB, "input", constant=True), Storage(MIB, "parameter")]
    values = [Value(index, (1,), "float32", None) for index in range(3)]
    ops: list[Op] = []
    for index in range(draw(st.integers(1, most_ops))):
        read = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2, unique=True))
        is_view = draw(st.integers(0, 4)) == 0
        if not is_view:
            storages.append(Storage(draw(SIZES), "op", kept=draw(st.sampled_from((None, None, None, None, "random")))))
        values.append(Value(values[read[0]].storage if is_view else len(storages) - 1, (1,), "float32", index))
        seconds = 0 if is_view else draw(st.integers(1, 9))
        ops.append(Op(f"op{index}", "op", tuple(read), (len(values) - 1,), is_view, False, seconds, 0))
    packed = draw(st.lists(st.integers(0, len(values) - 1), max_size=len(values)))
    return RegionGraph(tuple(ops), tuple(values), tuple(storages), tuple(packed), "Layer", draw(_backward(len(packed))))


@st.composite
def _backward(draw: st.DrawFn, num_packed: int) -> tuple[StepOp, ...]:
    """A gradient a time, each with what it needs of what was packed, the last first."""
    positions = list(reversed(range(num_packed)))
    ops: list[StepOp] = []
    before = 0
    while positions or not ops:
        count = draw(st.integers(1, 2))
        mine, positions = tuple(positions[:count]), positions[count:]
        size = draw(SIZES)
        ops.append(StepOp("grad", "", draw(st.integers(1, 9)), 0, False, size, before, 0, 0, mine, mine))
        before = size
    return tuple(ops)


@st.composite
def steps(draw: st.DrawFn, most_layers: int, most_ops: int) -> Graph:
    """A step of up to so many layers, of one or two kinds, with something standing and a loss behind them."""
    kinds = draw(st.lists(layers(most_ops), min_size=1, max_size=2))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=2, max_size=most_layers))
    size = draw(SIZES)
    loss = Gap((StepOp("loss", "", 2, 0, False, size, 0),), (StepOp("loss", "", 2, 0, False, size, 2 * size),))
    return Graph(
        {f"layers.{layer}": str(kind) for layer, kind in enumerate(order)},
        {str(kind): graph for kind, graph in enumerate(kinds) if kind in order},
        Step((Call(),) * len(order), (Gap(),) * len(order) + (loss,), Standing(3 * MIB, 0, 0, 0), 1),
    )


def everything(simulator: Simulator, *, swaps: bool = False) -> Iterator[Simulation]:
    """What a step comes to, for all that can be done with each path of each layer."""
    for plans in product(*(_all_plans(graph, swaps) for graph in simulator.layers)):
        yield simulator.run(plans)


def _all_plans(graph: RegionGraph, swaps: bool) -> list[LayerPlan]:
    paths = sorted({path_of_storage(graph, each) for each, one in enumerate(graph.storages) if one.kind != "parameter"})
    found = {}
    for actions in product(Action if swaps else (Action.SAVE, Action.RECOMPUTE), repeat=len(paths)):
        fates = resolve(graph, dict(zip(paths, actions, strict=True)).__getitem__)
        found[fates.key] = LayerPlan(fates, dict.fromkeys(fates.swapped, "host"))
    return list(found.values())
