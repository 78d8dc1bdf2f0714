"""`torch.autograd.Function`s inside a region.

A Function's Python `forward` may launch kernels that no dispatch mode sees (Triton, C extensions), so by default all
that is made inside one is *opaque*: saved, and reported. Two kinds are known better:

- *transparent*: every kernel is an ATen op, so its ops go on the tape one by one (torch's own DTensor functions);
- *replayable*: `register_replayable` promises that calling `forward` again with the same inputs gives the same
  outputs, so the whole call is one op on the tape.

Both are recognised by wrapping the class's `forward` while a plan is applied, since `apply` is often bound early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from actmem._compat import dtensor_functions
from actmem.runtime.tape import Tape

FunctionClass = TypeVar("FunctionClass", bound=type[Function])

_replayable: dict[type[Function], None] = {}
_transparent_depth = 0


def register_replayable(function: FunctionClass) -> FunctionClass:
    """Promise that a Function's `forward` depends on its arguments alone and edits none of them; usable as a decorator.

    Its outputs, and tensors that `forward` hands to ``ctx.save_for_backward``, can then be recomputed by calling
    `forward` again. Register it before a plan is applied.
    """
    _replayable[function] = None
    return function


def running_opaque() -> bool:
    """Whether ops now run inside a Function that may launch kernels unseen. Autograd turns gradients off in there."""
    return not torch.is_grad_enabled() and not _transparent_depth


class FunctionWrappers:
    """Wraps `forward` of the Functions known better, as long as any plan is applied."""

    def __init__(self) -> None:
        self._originals: dict[type[Function], Any] = {}
        self._users = 0

    def install(self, active_tape: Callable[[], Tape | None]) -> None:
        """Wrap each known Function; calls nest."""
        self._users += 1
        wrappers = dict.fromkeys(dtensor_functions(), _as_transparent) | dict.fromkeys(_replayable, _as_replayable)
        for function, wrapper in wrappers.items():
            if function not in self._originals:
                self._originals[function] = function.__dict__["forward"]
                setattr(function, "forward", staticmethod(wrapper(function, function.forward, active_tape)))

    def uninstall(self) -> None:
        """Undo one `install`; the last one restores every class."""
        self._users -= 1
        if self._users == 0:
            for function, original in self._originals.items():
                setattr(function, "forward", original)
            self._originals.clear()


def _as_transparent(function: type[Function], forward: Any, active_tape: Any) -> Any:
    @functools.wraps(forward)
    def transparent(*args: Any, **kwargs: Any) -> Any:
        with _transparent():
            return forward(*args, **kwargs)

    return transparent


@contextmanager
def _transparent() -> Iterator[None]:
    global _transparent_depth
    _transparent_depth += 1
    try:
        yield
    finally:
        _transparent_depth -= 1


def _as_replayable(function: type[Function], forward: Any, active_tape: Callable[[], Tape | None]) -> Any:
    takes_context = function.setup_context is Function.setup_context
    call = ForwardCall(forward, takes_context)

    @functools.wraps(forward)
    def replayable(*args: Any, **kwargs: Any) -> Any:
        tape = active_tape()
        if tape is None:
            return forward(*args, **kwargs)
        with tape.suspended():
            out = forward(*args, **kwargs)
        operands = args[1:] if takes_context else args
        saved = getattr(args[0], "to_save", None) if takes_context else None
        tape.observe_function(function.__name__, call, operands, kwargs, [*_as_list(out), *(saved or ())])
        return out

    return replayable


class ForwardCall:
    """Calls a Function's `forward` again. Returns its outputs, then what it saved for its backward pass."""

    def __init__(self, forward: Callable[..., Any], takes_context: bool) -> None:
        self._forward = forward
        self._takes_context = takes_context

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        if not self._takes_context:
            return _as_list(self._forward(*args, **kwargs))
        context = _Context(args)
        out = self._forward(context, *args, **kwargs)
        return [*_as_list(out), *context.saved]


class _Context:
    """Stands in for autograd's `ctx` in a replayed `forward`: takes whatever is stored on it, keeps what was saved."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(each, Tensor) for each in args)
        self.saved: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Only forward-mode differentiation reads these."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Known from the first call."""

    def mark_dirty(self, *tensors: Any) -> None:
        raise RuntimeError("a Function that edits its inputs cannot be replayed; do not register it as replayable")

    def set_materialize_grads(self, value: bool) -> None:
        """Concerns the backward pass only."""


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]
