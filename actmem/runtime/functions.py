"""`torch.autograd.Function`s inside a region.

A Function's Python `forward` may launch kernels that no dispatch mode sees (Triton, C extensions), so by default all
that is made inside one is *opaque*: saved, and reported. Two kinds are known better:

- *transparent*: every kernel is an ATen op, so its ops go on the tape one by one (torch's own DTensor functions);
- *replayable*: `register_replayable` promises that calling `forward` again with the same inputs gives the same
  outputs, so the whole call is one op on the tape.

All are recognised by wrapping `forward` of every Function class while a plan is applied, since `apply` is often bound
early. A class that is defined later is still seen to be opaque, by autograd having turned gradients off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd import Function

from actmem._compat import dtensor_functions
from actmem.runtime.tape import Tape

FunctionClass = TypeVar("FunctionClass", bound=type[Function])

_replayable: dict[type[Function], None] = {}
_INHERITED = object()


class _Running:
    """How many opaque and transparent Functions ops now run inside of."""

    opaque = 0
    transparent = 0


_running = _Running()


def register_replayable(function: FunctionClass) -> FunctionClass:
    """Promise that a Function's `forward` depends on its arguments alone and edits none of them; usable as a decorator.

    Its outputs, and tensors that `forward` hands to ``ctx.save_for_backward``, can then be recomputed by calling
    `forward` again. Register it before a plan is applied.
    """
    _replayable[function] = None
    return function


def running_opaque() -> bool:
    """Whether ops now run inside a Function that may launch kernels unseen."""
    return _running.opaque > 0 or not (torch.is_grad_enabled() or _running.transparent)


class FunctionWrappers:
    """Wraps `forward` of all Functions, as long as any plan is applied."""

    def __init__(self) -> None:
        self._originals: dict[type[Function], Any] = {}
        self._users = 0

    def install(self, active_tape: Callable[[], Tape | None]) -> None:
        """Wrap each Function that is not wrapped yet; calls nest."""
        self._users += 1
        functions = {function: _as_opaque for function in _subclasses(Function) if "forward" in vars(function)}
        wrappers = functions | dict.fromkeys(dtensor_functions(), _as_transparent)
        wrappers |= dict.fromkeys(_replayable, _as_replayable)
        for function, wrapper in wrappers.items():
            if function not in self._originals:
                self._originals[function] = vars(function).get("forward", _INHERITED)
                wrapped = wrapper(function, self._unwrapped(function), active_tape)
                function.forward = staticmethod(wrapped)  # type: ignore[method-assign]

    def _unwrapped(self, function: type[Function]) -> Any:
        """`forward` as its author wrote it, although the class it is inherited from may be wrapped already."""
        owner = next(each for each in function.__mro__ if "forward" in vars(each))
        original = self._originals.get(owner)
        return function.forward if original in (None, _INHERITED) else original.__get__(None, function)

    def uninstall(self) -> None:
        """Undo one `install`; the last one restores every class."""
        self._users -= 1
        if self._users == 0:
            for function, original in self._originals.items():
                if original is _INHERITED:
                    delattr(function, "forward")
                else:
                    function.forward = original  # type: ignore[method-assign]
            self._originals.clear()


def _subclasses(function: type[Function]) -> Iterator[type[Function]]:
    for subclass in function.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _as_opaque(function: type[Function], forward: Any, active_tape: Any) -> Any:
    @functools.wraps(forward)
    def opaque(*args: Any, **kwargs: Any) -> Any:
        _running.opaque += 1
        try:
            return forward(*args, **kwargs)
        finally:
            _running.opaque -= 1

    return opaque


def _as_transparent(function: type[Function], forward: Any, active_tape: Any) -> Any:
    @functools.wraps(forward)
    def transparent(*args: Any, **kwargs: Any) -> Any:
        _running.transparent += 1
        try:
            return forward(*args, **kwargs)
        finally:
            _running.transparent -= 1

    return transparent


def _as_replayable(function: type[Function], forward: Any, active_tape: Callable[[], Tape | None]) -> Any:
    takes_context = function.setup_context is Function.setup_context
    call = ForwardCall(forward)

    @functools.wraps(forward)
    def replayable(*args: Any, **kwargs: Any) -> Any:
        tape = active_tape()
        if tape is None:
            return forward(*args, **kwargs)
        with tape.suspended():
            out = forward(*args, **kwargs)
        needs_input_grad, operands, saved = None, args, ()
        if takes_context:
            needs_input_grad, operands, saved = args[0].needs_input_grad, args[1:], args[0].to_save or ()
        given = {id(each) for each in operands}
        made = [None if id(each) in given else each for each in (*_as_list(out), *saved)]
        tape.observe_function(function.__name__, call, (needs_input_grad, *operands), kwargs, made)
        return out

    return replayable


class ForwardCall:
    """Calls a Function's `forward` again. Returns its outputs, then what it saved for its backward pass."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, needs_input_grad: tuple[bool, ...] | None, *args: Any, **kwargs: Any) -> list[Any]:
        if needs_input_grad is None:
            return _as_list(self._forward(*args, **kwargs))
        context = _Context(needs_input_grad)
        out = self._forward(context, *args, **kwargs)
        return [*_as_list(out), *context.saved]


class _Context:
    """Stands in for autograd's `ctx` in a replayed `forward`: takes whatever is stored on it, keeps what was saved."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
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
