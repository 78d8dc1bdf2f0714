"""The graph of a whole model: what each of its layers does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actmem.files import check_format, read_json, replace_file
from actmem.graph.fingerprint import Fingerprint
from actmem.graph.region import RegionGraph
from actmem.graph.step import Step

FORMAT_VERSION = 1
_BFLOAT16 = " bfloat16"


@dataclass(frozen=True)
class Graph:
    """`layers`: module path of each layer -> its kind, in the order of the model; `kinds`: kind -> what a call of such
    a layer does. Layers are of one kind when they run the same ops on the same shapes. `step` is what else a training
    step does; ``None`` where only the layers' forward passes were traced. `made_for` is what it was traced from: plans
    for it fit that model and batch alone."""

    layers: Mapping[str, str]
    kinds: Mapping[str, RegionGraph]
    step: Step | None = None
    made_for: Fingerprint | None = None

    def of_layer(self, name: str) -> RegionGraph:
        """What one layer does."""
        return self.kinds[self.layers[name]]

    @property
    def multiplies_bfloat16_unseen(self) -> bool:
        """Whether any product, in a layer or around them, has operands of bfloat16, and nobody saw what memory its
        kernel takes for itself."""
        return any(_BFLOAT16 in signature for signature, scratch in self._products() if scratch is None)

    def _products(self) -> Iterator[tuple[str, int | None]]:
        """Signature and `scratch_bytes` of each."""
        gaps = () if self.step is None else self.step.gaps
        outside = [op for gap in gaps for op in (*gap.forward, *gap.backward)]
        for graph in self.kinds.values():
            products = (index for index, op in enumerate(graph.ops) if op.compute_intensive)
            yield from ((graph.signature(index), graph.ops[index].scratch_bytes) for index in products)
        for op in (*outside, *(op for graph in self.kinds.values() for op in graph.backward)):
            if op.compute_intensive:
                yield op.signature, op.scratch_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return {
            "actmem_graph": FORMAT_VERSION,
            "made_for": None if self.made_for is None else asdict(self.made_for),
            "layers": dict(self.layers),
            "kinds": {kind: graph.to_dict() for kind, graph in self.kinds.items()},
            "step": None if self.step is None else asdict(self.step),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Graph:
        """The graph that `to_dict` wrote. Raises `PlanError` for other data."""
        check_format(data, "graph", FORMAT_VERSION)
        kinds = {kind: RegionGraph.from_dict(graph) for kind, graph in data["kinds"].items()}
        step = None if data["step"] is None else Step.from_dict(data["step"])
        made_for = None if data["made_for"] is None else Fingerprint.from_dict(data["made_for"])
        return cls(dict(data["layers"]), kinds, step, made_for)

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON."""
        replace_file(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read the graph that `save` wrote. Raises `PlanError` for another file."""
        return read_json(path, "graph", cls.from_dict)
