"""What the layers of a model do, found by running its forward pass once.

A model on the meta device has shapes but no numbers. Its pass runs on fake tensors that pretend to be on the CPU and
take no memory, so a model of any size is traced in seconds on any machine. A model that has numbers runs on them; that
is also the way for one whose ops depend on its data, such as experts run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from actmem._compat import DATA_DEPENDENT_ERRORS, FakeTensorMode, LifelikeFakes, likeness
from actmem.errors import ApplyError
from actmem.graph import Graph, RegionGraph
from actmem.models.packing import one_sequence_a_row
from actmem.runtime import apply
from actmem.tracing.assembly import assemble, with_standing_input
from actmem.tracing.kernels import Kernels
from actmem.tracing.recorder import StepRecorder
from actmem.tracing.refusals import (
    UnevenError,
    is_without_numbers,
    refuse_no_loss,
    refuse_odd_arguments,
    refuse_other_needs,
    refuse_uneven,
    refuse_unlike,
    refuse_what_is_no_step,
)
from actmem.tracing.sharding import WHOLE, Sharding
from actmem.tracing.structure import class_of, first_of_each, numbered, until_all_ran

Loss = Callable[[nn.Module, Mapping[str, object]], Tensor]
"""How a training step gets its loss from a model and a batch."""


def trace(
    model: nn.Module,
    batch: Mapping[str, object],
    *,
    loss: Loss | None = None,
    regions: Sequence[nn.Module | str] | None = None,
    sharding: Sharding = WHOLE,
    kernels_on: torch.device | str | None = None,
) -> Graph:
    """The graph of a training step of `model` on the keyword arguments `batch`.

    `loss` runs the model forward and returns a scalar; by default that is the ``loss`` of the model's output, as
    Hugging Face models give it for a batch with labels, and the sum of its first output where there is none. For a
    model on the meta device the tensors in `batch` give shapes and dtypes alone, and each row is taken for one
    sequence. `regions` are the layers, as `apply` takes them. `sharding` is how FSDP2 shares parameters out. On the
    device `kernels_on` the step's calls are run by themselves as well, one of a kind, to see what memory their kernels
    take beside operands and results. It is that of a model with numbers by default; for one on the meta device nobody
    looks unless it is named. Autocast is that of the caller, in the forward pass alone. The model's gradients and the
    random state stay as they are.
    Raises `ApplyError` for a model that cannot be planned, or a loss that is none, and what the model itself raises.
    """
    device = None if kernels_on is None else _usable(kernels_on)
    return _trace(model, batch, loss=loss, regions=regions, sharding=sharding, kernels_on=device)


def trace_stage(
    stage: nn.Module,
    batch: Mapping[str, object],
    *,
    forward: Loss,
    sharding: Sharding = WHOLE,
    kernels_on: torch.device | None = None,
) -> Graph:
    """As `trace`, of one stage of a pipeline: `forward` runs the stage on `batch`.

    In the last stage it gives a loss. Another's backward pass begins with the gradient of its states, which ``batch``
    then has by the name of ``gradient``. The states that a stage is given, ``states`` in `batch`, are one of the
    buffers that stand all the time, unless they are tokens.
    """
    gradient = "gradient" if "gradient" in batch else None
    graph = _trace(
        stage, batch, loss=forward, regions=None, sharding=sharding, kernels_on=kernels_on, gradient=gradient
    )
    given = batch["states"]
    return with_standing_input(graph) if isinstance(given, Tensor) and given.is_floating_point() else graph


def _trace(
    model: nn.Module,
    batch: Mapping[str, object],
    *,
    loss: Loss | None,
    regions: Sequence[nn.Module | str] | None,
    sharding: Sharding,
    kernels_on: torch.device | None,
    gradient: str | None = None,
) -> Graph:
    refuse_odd_arguments(model, batch, loss)
    step = partial(_trace_step, model, batch, loss=loss, sharding=sharding, kernels_on=kernels_on, gradient=gradient)
    try:
        return step(trace_layers(model, batch, loss=loss, regions=regions), alike=True)
    except UnevenError:  # layers that are built alike need not save alike: gradients may reach some of them alone
        return step(trace_layers(model, batch, loss=loss, regions=regions, each=True), alike=False)


def _trace_step(
    model: nn.Module,
    batch: Mapping[str, object],
    graph: Graph,
    *,
    loss: Loss | None,
    sharding: Sharding,
    kernels_on: torch.device | None,
    gradient: str | None,
    alike: bool,
) -> Graph:
    """`alike`: of layers that are built alike, one was traced for all."""
    names = list(graph.layers)
    device = _device_of(model)
    kernels = _kernels_of(model, kernels_on)
    with torch.enable_grad(), _random_state_kept(device), _at_hand(model, batch) as (run, leaves, buffers, arguments):
        layers = [model.get_submodule(name) for name in names]
        given = [each for each in arguments.values() if isinstance(each, Tensor)]
        recorder = StepRecorder(
            layers, (*leaves, *buffers, *given), copies=not is_without_numbers(model), kernels=kernels
        )
        num_ranks = map(sharding.num_ranks, model.parameters())
        with recorder.recording(
            {each: ranks for each, ranks in zip(leaves, num_ranks, strict=True) if each.requires_grad}
        ):
            lost = run(loss or default_loss, arguments)
            if gradient is None:
                refuse_no_loss(lost)
            recorder.begin_backward()
            with _out_of_autocast(device):
                lost.backward(None if gradient is None else arguments[gradient])
        del lost
    refuse_uneven(names, graph, recorder)
    refuse_what_is_no_step(names, recorder)
    if is_without_numbers(model):
        if alike:
            refuse_other_needs(graph, recorder)
        refuse_unlike(graph, recorder)
    tokens = next((each.numel() for each in batch.values() if isinstance(each, Tensor)), 0)
    with _random_state_kept(device):
        scratch = {} if kernels is None else kernels.scratch_bytes()
    return assemble(graph, recorder, sharding.standing(model, layers), tokens, scratch)


def trace_layers(
    model: nn.Module,
    batch: Mapping[str, object],
    *,
    loss: Loss | None = None,
    regions: Sequence[nn.Module | str] | None = None,
    each: bool = False,
) -> Graph:
    """The graph of the layers' forward passes alone, without the `step` around them. Of layers that are built alike,
    the first one runs for all, unless `each` is to run, or parameters are frozen, by which they may differ as well."""
    device = _device_of(model)
    with torch.enable_grad(), apply(model, "none", regions=regions, memory={"verify": "off"}) as applied:
        layers = {name: model.get_submodule(name) for name in applied.regions}
        alike = is_without_numbers(model) and not each and all(one.requires_grad for one in model.parameters())
        firsts = first_of_each(layers) if alike else {name: name for name in layers}
        with _random_state_kept(device), _at_hand(model, batch) as (run, _, _, arguments):
            with until_all_ran([layers[name] for name in dict.fromkeys(firsts.values())]):
                run(loss or default_loss, arguments)
            torch.clear_autocast_cache()
        graphs = {name: applied.graphs[first] for name, first in firsts.items() if first in applied.graphs}
        if not graphs:
            raise ApplyError(
                "the loss runs none of the layers; it has to run the model, and to give a tensor of one number"
            )
        if is_without_numbers(model):
            graphs = {name: _without_questions(graph) for name, graph in graphs.items()}
        return replace(_sort_by_kind(model, graphs), made_for=applied.plan.fingerprint)


def default_loss(model: nn.Module, batch: Mapping[str, object]) -> Tensor:
    """The model's own loss, or the sum of its first output."""
    output = model(**batch)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    first = output[0] if isinstance(output, tuple | list | ModelOutput) and output else output
    if not isinstance(first, Tensor):
        raise ApplyError(f"{type(model).__name__} gives a {type(first).__name__}; say in loss= how a loss comes of it")
    return first.sum()


def _device_of(model: nn.Module) -> torch.device:
    """Where the pass runs; fake tensors pretend to be on the CPU."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device


def _usable(device: torch.device | str) -> torch.device:
    """A device to run kernels on. Raises `ApplyError` for one that is not there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    known = {"cpu", *(() if accelerator is None else (accelerator.type,))}
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in known:
        raise ApplyError(f"kernels_on: {device} is no device that is here; allowed: {', '.join(sorted(known))}")
    return found


def _kernels_of(model: nn.Module, device: torch.device | None) -> Kernels | None:
    if device is None and is_without_numbers(model):
        return None
    return Kernels(device or _device_of(model))


def _random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Leave random numbers drawn inside to be drawn again."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


@contextmanager
def _out_of_autocast(device: torch.device) -> Iterator[None]:
    """What a backward pass runs in: autocast, and the weights that it has cast, end with the forward pass."""
    torch.clear_autocast_cache()
    with torch.autocast(device.type, enabled=False):
        yield


_Run = Callable[[Loss, Mapping[str, object]], Tensor]


class _LossOf(nn.Module):
    """What `functional_call` can call: a loss over a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Loss, batch: Mapping[str, object]) -> Tensor:
        return loss(self.model, batch)


@contextmanager
def _at_hand(
    model: nn.Module, batch: Mapping[str, object]
) -> Iterator[tuple[_Run, list[Tensor], list[Tensor], dict[str, object]]]:
    """A way to run losses of `model` with parameters of their own, those parameters, the buffers, and the batch: fake
    ones for a model without numbers, and else the model's own numbers. Gradients and edits of buffers stay out of the
    model."""
    wrapped = _LossOf(model)
    if is_without_numbers(model):
        products = LifelikeFakes()  # type: ignore[no-untyped-call]
        with _explaining(model), one_sequence_a_row(), FakeTensorMode(allow_non_fake_inputs=True), products:
            parameters = _in_place_of(_slots(wrapped, "_parameters"), _fake)
            buffers = _in_place_of(_slots(wrapped, "_buffers"), _fake)
            arguments = {name: _fake(each) if isinstance(each, Tensor) else each for name, each in batch.items()}
            yield _runner(wrapped, parameters, buffers), _each_once(parameters), _each_once(buffers), arguments
    else:
        parameters = _in_place_of(
            _slots(wrapped, "_parameters"), lambda each: each.detach().requires_grad_(each.requires_grad)
        )
        buffers = _in_place_of(_slots(wrapped, "_buffers"), Tensor.clone)
        yield _runner(wrapped, parameters, buffers), _each_once(parameters), _each_once(buffers), dict(batch)


def _runner(wrapped: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> _Run:
    slots = {**parameters, **buffers}
    return lambda loss, batch: torch.func.functional_call(wrapped, slots, (loss, batch), tie_weights=False)


def _slots(model: nn.Module, kind: Literal["_parameters", "_buffers"]) -> dict[str, Tensor]:
    """The parameters or buffers by name, one name for each place that holds one: a module that is used in two places is
    one, and a tensor that two modules hold has two. Torch puts back what it has replaced place by place."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def _in_place_of(slots: Mapping[str, Tensor], make: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What `make` makes of each tensor, once, in all places that hold it."""
    made = {id(each): make(each) for each in slots.values()}
    return {name: made[id(each)] for name, each in slots.items()}


def _each_once(slots: Mapping[str, Tensor]) -> list[Tensor]:
    return list({id(each): each for each in slots.values()}.values())


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
    return likeness(like)(torch.device("cpu")).requires_grad_(like.requires_grad)


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
        kind = next((kind for kind, other in kinds.items() if other == graph and class_of(kind) == class_name), None)
        if kind is None:
            kind = numbered(class_name, map(class_of, kinds))
            kinds[kind] = graph
        layers[name] = kind
    return Graph(layers, kinds)
