"""Running a region's calls through a plan without touching the region.

The `forward` of the region's *class* is wrapped, and looks up whether this instance is planned. So instances keep
their attributes, hooks, pickles and copies (a deep copy is simply not planned), and the tape covers exactly what runs
inside all module hooks, those of FSDP2 included.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn


class Runner(Protocol):
    """Runs one call of a region."""

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward`, which is bound to `module`, and return its output."""


_runners: WeakKeyDictionary[nn.Module, Runner] = WeakKeyDictionary()
_wrapped: dict[type[nn.Module], tuple[Any, int]] = {}


def is_planned(module: nn.Module) -> bool:
    """Whether calls of this module run under a plan."""
    return module in _runners


class Interception:
    """The planned regions of one model; `remove` restores everything and may be called twice."""

    def __init__(self, runners: dict[nn.Module, Runner]) -> None:
        self._modules = WeakKeyDictionary(dict.fromkeys(runners))
        self._classes = {type(module) for module in runners if "forward" not in vars(module)}
        self._instances = WeakKeyDictionary({m: vars(m)["forward"] for m in runners if "forward" in vars(m)})
        _runners.update(runners)
        for cls in self._classes:
            _wrap_class(cls)
        for module, forward in self._instances.items():
            vars(module)["forward"] = _planned_instance_forward(module, forward)

    def remove(self) -> None:
        """Stop running the regions under a plan."""
        for module in list(self._modules):
            _runners.pop(module, None)
        for module, forward in self._instances.items():
            vars(module)["forward"] = forward
        for cls in self._classes:
            _unwrap_class(cls)
        self._modules.clear()
        self._instances.clear()
        self._classes = set()


_INHERITED = object()


def _wrap_class(cls: type[nn.Module]) -> None:
    original, users = _wrapped.get(cls, (None, 0))
    if not users:
        original = vars(cls).get("forward", _INHERITED)
        cls.forward = _planned_forward(cls, cls.forward)  # type: ignore[method-assign]
    _wrapped[cls] = (original, users + 1)


def _unwrap_class(cls: type[nn.Module]) -> None:
    original, users = _wrapped.pop(cls)
    if users > 1:
        _wrapped[cls] = (original, users - 1)
    elif original is _INHERITED:
        del cls.forward
    else:
        cls.forward = original


def _planned_forward(cls: type[nn.Module], original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A subclass's forward may call this one through super(): the call is its own already.
        runner = _runners.get(self) if type(self) is cls else None
        if runner is None:
            return original(self, *args, **kwargs)
        return runner(self, functools.partial(original, self), args, kwargs)

    return forward


def _planned_instance_forward(module: nn.Module, original: Any) -> Any:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        runner = _runners.get(module)
        return original(*args, **kwargs) if runner is None else runner(module, original, args, kwargs)

    return forward
