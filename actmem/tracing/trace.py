"""What the layers of a model do, found by running its forward pass once.

A model on the meta device has shapes but no numbers. Its pass runs on fake tensors that pretend to be on the CPU and
take no memory, so a model of any size is traced in seconds on any machine. A model that has numbers runs on them; that
is also the way for one whose ops depend on its data, such as experts run one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actmem._compat import DATA_DEPENDENT_ERRORS, FakeGroupedProducts, FakeTensorMode
from actmem.config.schema import RunConfig
from actmem.errors import ApplyError
from actmem.graph import Graph, RegionGraph
from actmem.models.packing import one_sequence_a_row
from actmem.models.shapes import build_shapes
from actmem.planning import Fingerprint
from actmem.runtime import apply


def trace(model: nn.Module, batch: Mapping[str, object]) -> Graph:
    """The graph of `model`, called with the keyword arguments `batch`, as a training step calls it.

    For a model on the meta device the tensors in `batch` give shapes and dtypes alone, and each row is taken for one
    sequence. Autocast is that of the caller.
    Raises `ApplyError` for a model that cannot be planned, and what the model itself raises.
    """
    return trace_for_plan(model, batch)[0]


def trace_for_plan(model: nn.Module, batch: Mapping[str, object]) -> tuple[Graph, Fingerprint]:
    """What `trace` gives, and what a plan that fits this model and batch alone is made for."""
    with torch.enable_grad(), apply(model, "none", memory={"verify": "off"}) as applied:
        if any(parameter.is_meta for parameter in model.parameters()):
            _run_without_memory(model, batch)
            graphs = {name: _without_questions(graph) for name, graph in applied.graphs.items()}
        else:
            model(**batch)
            graphs = applied.graphs
        made_for = applied.plan.fingerprint
        assert made_for is not None, "an exported plan always says what it was made for"
        return _sort_by_kind(model, graphs), made_for


def trace_run(config: RunConfig, model: PreTrainedModel | None = None) -> tuple[Graph, Fingerprint]:
    """What the layers that a run trains do with one micro-batch, and what a plan for exactly that is made for.

    No weight is made or read: `model` is on the meta device, as `build_shapes` gives it, which is what is taken without
    one. Raises `ModelError` and `ApplyError`.
    """
    shape = (config.train.micro_batch_size, config.data.sequence_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.train.autocast is not None):
        return trace_for_plan(model or build_shapes(config.model), {"input_ids": tokens, "use_cache": False})


def _run_without_memory(model: nn.Module, batch: Mapping[str, object]) -> None:
    products = FakeGroupedProducts()  # type: ignore[no-untyped-call]
    with _explaining(model), one_sequence_a_row(), FakeTensorMode(), products:
        state = {name: _fake(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        arguments = {name: _fake(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
        torch.func.functional_call(model, state, kwargs=arguments)


@contextmanager
def _explaining(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except DATA_DEPENDENT_ERRORS as error:
        raise ApplyError(
            f"what {type(model).__name__} runs depends on its numbers ({error}), and on the meta device it has none; "
            "trace it with weights, or let all experts run in one product (experts_implementation: grouped_mm)"
        ) from error


def _fake(like: Tensor) -> Tensor:
    shape, stride = tuple(like.shape), like.stride()
    return torch.empty_strided(shape, stride, dtype=like.dtype, device="cpu", requires_grad=like.requires_grad)


def _without_questions(graph: RegionGraph) -> RegionGraph:
    """Fake tensors answer what device they are on by an op of its own, which real ones do not run."""
    kept = [index for index, op in enumerate(graph.ops) if op.name != "device"]
    position = {before: now for now, before in enumerate(kept)}
    values = [
        value if value.producer is None else replace(value, producer=position[value.producer]) for value in graph.values
    ]
    return replace(graph, ops=tuple(graph.ops[index] for index in kept), values=tuple(values))


def _sort_by_kind(model: nn.Module, graphs: Mapping[str, RegionGraph]) -> Graph:
    """A kind is called by its layers' class; where one class has several kinds, they are numbered from the second."""
    kinds: dict[str, RegionGraph] = {}
    layers: dict[str, str] = {}
    for name, graph in graphs.items():
        class_name = type(model.get_submodule(name)).__name__
        kind = next((kind for kind, other in kinds.items() if other == graph and _class_of(kind) == class_name), None)
        if kind is None:
            kind = _numbered(class_name, map(_class_of, kinds))
            kinds[kind] = graph
        layers[name] = kind
    return Graph(layers, kinds)


def _numbered(class_name: str, taken: Iterable[str]) -> str:
    count = sum(each == class_name for each in taken)
    return f"{class_name}#{count}" if count else class_name


def _class_of(kind: str) -> str:
    return kind.partition("#")[0]
