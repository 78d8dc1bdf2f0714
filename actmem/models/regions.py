"""Finding a model's decoder layers, which are the regions that get a tape of their own.

Hugging Face marks them twice: every layer that may be checkpointed is a `GradientCheckpointingLayer`, and older models
list the classes that must stay whole in `_no_split_modules`. The first mark is the more exact, so it wins.
"""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from actmem.errors import ApplyError


def find_regions(model: nn.Module) -> dict[str, nn.Module]:
    """Each decoder layer of `model` by its module path, in the order the model holds them.

    Wrappers (PEFT, DDP, FSDP2) may stand around the model or the layers. A layer inside another layer belongs to the
    outer one; a layer that is used twice appears once. Raises `ApplyError` where nothing is marked as a layer.
    """
    regions = _outermost(_checkpointable_layers(model)) or _outermost(_unsplittable_layers(model))
    if not regions:
        raise ApplyError(
            f"no decoder layers found in {type(model).__name__}: it holds neither a Hugging Face "
            "GradientCheckpointingLayer nor a layer list of a class in _no_split_modules; "
            "name the modules that should be regions, for example regions=['blocks.0', 'blocks.1']"
        )
    return regions


def _checkpointable_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def _unsplittable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Members of module lists whose class some model of the tree lists; it may list embeddings too, but alone."""
    listed = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return {
        f"{list_name}.{index}" if list_name else str(index): layer
        for list_name, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList)
        for index, layer in enumerate(layers)
        if listed.intersection(base.__name__ for base in type(layer).__mro__)
    }


def _outermost(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        name: layer
        for name, layer in layers.items()
        if not any(name.startswith(f"{other}.") for other in layers if other != name)
    }
