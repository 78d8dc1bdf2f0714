"""What the layers of a model do, found by running its forward pass once.

A model on the meta device has shapes but no numbers. Its pass runs on fake tensors that pretend to be on the CPU and
take no memory, so a model of any size is traced in seconds on any machine. A model that has numbers runs on them; that
is also the way for one whose ops depend on its data, such as experts run one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from actmem._compat import FakeTensorMode
from actmem.graph import Graph, RegionGraph
from actmem.runtime import apply


def trace(model: nn.Module, batch: Mapping[str, object]) -> Graph:
    """The graph of `model`, called with the keyword arguments `batch`, as a training step calls it.

    For a model on the meta device the tensors in `batch` give shapes and dtypes alone. Autocast is that of the caller.
    Raises `ApplyError` for a model that cannot be planned, and what the model itself raises.
    """
    with torch.enable_grad(), apply(model, "none", verify="off") as applied:
        if any(parameter.is_meta for parameter in model.parameters()):
            _run_without_memory(model, batch)
        else:
            model(**batch)
        return _sort_by_kind(model, applied.graphs)


def _run_without_memory(model: nn.Module, batch: Mapping[str, object]) -> None:
    with FakeTensorMode():
        state = {name: _fake(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        arguments = {name: _fake(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
        torch.func.functional_call(model, state, kwargs=arguments)


def _fake(like: Tensor) -> Tensor:
    shape, stride = tuple(like.shape), like.stride()
    return torch.empty_strided(shape, stride, dtype=like.dtype, device="cpu", requires_grad=like.requires_grad)


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
