"""What is no step to plan: odd arguments, a loss without a gradient, and layers that do not run once, in their order,
and like those that are built alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from actmem.errors import ApplyError
from actmem.graph import Graph
from actmem.tracing.recorder import StepRecorder


class UnevenError(ApplyError):
    """A layer saved another number of tensors than the one that was traced for it, or was given others."""


def is_without_numbers(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def refuse_odd_arguments(model: object, batch: object, loss: object) -> None:
    """Raise `ApplyError` for a model, batch or loss that is none."""
    if not isinstance(model, nn.Module):
        raise ApplyError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
        raise ApplyError(
            f"batch is a {type(batch).__name__}; allowed: a mapping of the model's keyword arguments, such as "
            '{"input_ids": tokens, "labels": tokens}'
        )
    if loss is not None and not callable(loss):
        raise ApplyError(f"loss is a {type(loss).__name__}; allowed: a function of the model and the batch")
    given = [each for each in batch.values() if isinstance(each, Tensor)]
    if any(each.is_meta for each in given) and not is_without_numbers(model):
        raise ApplyError(
            "the batch is on the meta device, and the model has numbers; give it real tensors, or trace the model on "
            "the meta device as well"
        )


def refuse_no_loss(lost: object) -> None:
    """Raise `ApplyError` for what no backward pass can begin from."""
    if not isinstance(lost, Tensor):
        problem = f"is a {type(lost).__name__}"
    elif lost.numel() != 1:
        problem = f"has the shape {'x'.join(map(str, lost.shape))}"
    elif lost.is_complex():
        problem = "is complex"
    elif not lost.requires_grad:
        problem = "has no gradient: nothing that it comes from is trained"
    else:
        return
    raise ApplyError(
        f"the loss {problem}; allowed: a tensor of one real number that parameters of the model have a part in"
    )


def refuse_uneven(names: Sequence[str], graph: Graph, recorder: StepRecorder) -> None:
    """Each layer runs once, and saves as many tensors as where it was traced alone; else `UnevenError`."""
    uneven = [name for name, count in zip(names, recorder.num_calls, strict=True) if count != 1]
    if uneven:
        raise ApplyError(
            f"{uneven[0]} ran {recorder.num_calls[names.index(uneven[0])]} times in one step; a step is planned for "
            "layers that run once each: name others in regions=, or choose a policy by name"
        )
    for name, count in zip(names, recorder.num_packed, strict=True):
        if count != len(graph.of_layer(name).packed):
            raise UnevenError(
                f"{name} saved {len(graph.of_layer(name).packed)} tensors in one pass and {count} in the next; a step "
                "is planned for layers that do the same each time"
            )


def refuse_what_is_no_step(names: Sequence[str], recorder: StepRecorder) -> None:
    """A step is a forward pass through the layers in their order, then a backward pass, of tensors that are seen."""
    order = [names[layer] for layer in recorder.order]
    if order != list(names):
        listed, runs = next((one, other) for one, other in zip(names, order, strict=True) if one != other)
        problem = f"{runs} runs where {listed} is listed: name the layers in the order in which they run, in regions="
    elif recorder.went_back_early is not None:
        name = names[recorder.went_back_early]
        problem = f"{name} takes part in a backward pass before the forward pass is done: choose a policy by name"
    elif recorder.strangers:
        kinds = ", ".join(sorted(recorder.strangers))
        problem = f"what a {kinds} holds is not seen by a trace: choose a policy by name"
    else:
        return
    raise ApplyError(f"no step can be planned: {problem}")


def refuse_other_needs(graph: Graph, recorder: StepRecorder) -> None:
    """What needs no gradient is no layer's own: layers that are given such as others are not are of another kind."""
    needs: dict[str, tuple[bool, ...]] = {}
    for layer, (name, kind) in enumerate(graph.layers.items()):
        if recorder.needs[layer] != needs.setdefault(kind, recorder.needs[layer]):
            raise UnevenError(f"{name} is built like the others of its kind, but other inputs of it need gradients")


def refuse_unlike(graph: Graph, recorder: StepRecorder) -> None:
    """Layers that are built alike were traced once; they must have run the same ops."""
    run_by_kind: dict[str, tuple[str, list[str]]] = {}
    for layer, (name, kind) in enumerate(graph.layers.items()):
        ops = [op.signature for op in recorder.ops_of(layer)]
        first, expected = run_by_kind.setdefault(kind, (name, ops))
        if ops != expected:
            raise ApplyError(
                f"{name} is built like {first} but runs other ops; a step is planned for layers that do what their "
                "modules tell: choose a policy by name"
            )
