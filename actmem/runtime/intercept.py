"""Running a region's calls through a plan without touching the region.

The `forward` of the region's *class* is wrapped, and looks up whether this instance is planned. So instances keep
their attributes, hooks, pickles and copies (a deep copy is simply not planned), and the tape covers exactly what runs
inside all module hooks, those of FSDP2 included.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, SupportsIndex
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
        classes = {type(module) for module in runners if "forward" not in vars(module)}
        self._classes = classes.union(*(_wrapping_subclasses(cls, inspect.unwrap(cls.forward)) for cls in classes))
        _runners.update(runners)
        for cls in self._classes:
            _wrap_class(cls)
        for module in runners:
            if "forward" in vars(module):
                vars(module)["forward"] = PlannedForward(module, vars(module)["forward"])

    def remove(self) -> None:
        """Stop running the regions under a plan."""
        for module in list(self._modules):
            _runners.pop(module, None)
            forward = vars(module).get("forward")
            if isinstance(forward, PlannedForward):
                vars(module)["forward"] = forward.original
        for cls in self._classes:
            _unwrap_class(cls)
        self._modules.clear()
        self._classes = set()


_INHERITED = object()


def _wrapping_subclasses(cls: type[nn.Module], forward: Any) -> set[type[nn.Module]]:
    """Subclasses of `cls` whose own `forward` is `forward` with a wrapper around it. FSDP2 may yet turn a planned
    module into an instance of one: it makes one for the whole process, and Hugging Face wraps what that inherits then.
    """
    below = cls.__subclasses__()
    found = {each for each in below if inspect.unwrap(vars(each).get("forward", object)) is forward}
    return found.union(*(_wrapping_subclasses(each, forward) for each in below))


def _wrap_class(cls: type[nn.Module]) -> None:
    original, users = _wrapped.get(cls, (None, 0))
    if not users:
        original = vars(cls).get("forward", _INHERITED)
        cls.forward = _planned_forward(cls, cls.forward)
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
        runner = _runners.get(self)
        if runner is not None and id(self) not in _running:
            return _run(runner, self, functools.partial(original, self), args, kwargs)
        if runner is None and cls in _wrapped and getattr(self, "gradient_checkpointing", False):
            with _unwrapped(cls, forward):
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


_running: set[int] = set()
"""Planned modules inside a call: a subclass's forward that calls its parent's has its tape already."""


def _run(runner: Runner, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _running.add(id(module))
    try:
        return runner(module, forward, args, kwargs)
    finally:
        _running.discard(id(module))


@contextmanager
def _unwrapped(cls: type[nn.Module], wrapper: Any) -> Iterator[None]:
    """Hugging Face's layers recompute only while their class has the `forward` that it was defined with; a model of the
    same class that is under no plan must not notice ours."""
    original, _ = _wrapped[cls]
    if original is _INHERITED:
        del cls.forward
    else:
        cls.forward = original
    try:
        yield
    finally:
        cls.forward = wrapper


class PlannedForward:
    """Stands in for a `forward` that somebody set on the instance. Copies and pickles are those of the original."""

    def __init__(self, module: nn.Module, original: Any) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original, under a plan if its module has one."""
        module = self._module()
        runner = None if module is None else _runners.get(module)
        if runner is None or module is None or id(module) in _running:
            return self.original(*args, **kwargs)
        return _run(runner, module, self.original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.original.__reduce_ex__(protocol)
