"""Which layers do the same, as far as their modules tell: then one of them is enough to be traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

_POSITION = "layer_idx"
_PLAIN = (bool, int, float, str, type(None))


class AllSeenError(Exception):
    """Every structure has run; the rest of the pass would tell nothing new."""


def structure_of(layer: nn.Module) -> Hashable:
    """Equal for layers whose modules have equal classes, parameters of equal shapes and equal plain attributes, their
    place in the stack apart."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, tuple(each.shape), each.dtype, each.requires_grad)
                for key, each in module.named_parameters(recurse=False)
            ),
            tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, _PLAIN) and k != _POSITION)),
        )
        for name, module in layer.named_modules()
    )


def first_of_each(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """For each layer the first one that is built like it, by name."""
    firsts: dict[Hashable, str] = {}
    return {name: firsts.setdefault(structure_of(layer), name) for name, layer in layers.items()}


def numbered(class_name: str, taken: Iterable[str]) -> str:
    """The name of another kind of layers of a class, where those that are `taken` are the classes of all kinds."""
    count = sum(each == class_name for each in taken)
    return f"{class_name}#{count}" if count else class_name


def class_of(kind: str) -> str:
    """The class of the layers of a kind."""
    return kind.partition("#")[0]


@contextmanager
def until_all_ran(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Leave the block as soon as all of these layers have run once."""
    waiting = set(layers)

    def note(layer: nn.Module, *_: Any) -> None:
        waiting.discard(layer)
        if not waiting:
            raise AllSeenError

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(note).remove)
        try:
            yield
        except AllSeenError:
            return
