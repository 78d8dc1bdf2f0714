"""Where the times of a step come from: how much of it was measured op by op, and how much is modelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from actmem.graph import Graph, StepOp
from actmem.hardware import CostModel, Hardware, work_of

Times = Literal["modelled", "measured"]
_ALL = 0.999


def measured_share(graph: Graph, hardware: Hardware) -> float:
    """The share of an unplanned step's seconds that ops take whose own time was measured on the device."""
    model = CostModel(hardware)
    total = known = 0.0
    for op in _ops_of(graph):
        seconds = model.seconds(op)
        total += seconds
        known += seconds if model.is_measured(op) else 0.0
    return known / total if total else 0.0


def times_of(share: float) -> Times:
    """What to call the times of a step of which `share` was measured."""
    return "measured" if share >= _ALL else "modelled"


def times_in_words(share: float) -> str:
    """Such as ``modelled`` or ``modelled, but for 40 % of the step, whose ops were measured``."""
    if share >= _ALL:
        return "simulated from measured times of ops"
    if share > 0:
        return f"modelled, but for {share:.0%} of the step, whose ops were measured"
    return "modelled"


def _ops_of(graph: Graph) -> Iterator[StepOp]:
    assert graph.step is not None, "only the layers' forward passes were traced"
    for name in graph.layers:
        layer = graph.of_layer(name)
        yield from (work_of(layer, index) for index, op in enumerate(layer.ops) if not op.view)
        yield from layer.backward
    for gap in graph.step.gaps:
        yield from (*gap.forward, *gap.backward)
