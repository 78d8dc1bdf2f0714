"""Unpack: give autograd the tensor that a handle stands for, by running again just the ops that lead to it.

Replay is lazy. A value is made when the backward pass first asks for it or for something made from it, kept while a
handle or an op on the tape still has to read it, and let go after the last of them; so no op runs twice in one pass.
When the count of uses has run out it is armed again, for a second pass over a retained graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from actmem._compat import asked_by_python_function, below_autograd, storage_bytes
from actmem.errors import InPlaceEditError, ReplayMismatchError
from actmem.runtime.digest import digest_of
from actmem.runtime.values import Handle, Op, Value
from actmem.runtime.witness import FREED


def unpack(handle: Handle) -> Tensor:
    """Autograd's unpack hook."""
    value = handle.value
    call = handle.call
    call.counters.num_unpacks += 1
    if call.swaps is not None:
        call.swaps.swapper.reach(call.swaps)
    watched: Any = handle.tensor if value is None else handle.witness
    if type(watched) is weakref.ref:
        watched = watched()
    if watched is not None and watched._version != handle.version:
        _refuse_edited(handle, watched._version)
    if value is None:
        assert handle.tensor is not None
        return _guarded(handle.tensor, handle) if handle.is_source else handle.tensor
    if value.op is None:
        return _held(value, handle)
    tensor = value.memo
    if tensor is None:
        tensor = _produce_as_recorded(value, handle.call.device_type)
    _count_use(value)
    if value.digest is not None:
        _verify(value, tensor, value.op)
    return tensor if value.memo is None else _guarded(tensor, handle)


def _held(value: Value, handle: Handle) -> Tensor:
    """A tensor that was not let go, or only for a while."""
    if value.swapped is None:
        assert value.tensor is not None
        return _guarded(value.tensor, handle)
    assert handle.call.swaps is not None
    tensor = handle.call.swaps.swapper.take(value.swapped)
    return tensor if value.swapped.storage.data is None else _guarded(tensor, handle)


def _guarded(tensor: Tensor, handle: Handle) -> Tensor:
    """A tensor from which others may have yet to be recomputed. Autograd's own formulas only read it; the backward of a
    Python Function may write to what it saved (fused kernels do), so it gets a copy with the same layout."""
    if type(tensor) is not Tensor or not asked_by_python_function() or handle.call.owns(tensor):
        return tensor
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _produce_as_recorded(wanted: Value, device_type: str) -> Tensor:
    """Make a value under the dispatch state in which the tape saw its ops: below autograd and autocast."""
    with below_autograd():
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return _produce(wanted)
        return _produce(wanted)


def _produce(wanted: Value) -> Tensor:
    """Run the ops that `wanted` hangs on, none that has its result at hand, in an order that their inputs allow.

    A stack instead of recursion: chains may be longer than Python's stack is deep.
    """
    pending = [wanted]
    while pending:
        value = pending[-1]
        if value.memo is not None or value.op is None:
            pending.pop()
            continue
        missing = [each for each in value.op.inputs if each.op is not None and each.memo is None]
        if missing:
            pending.extend(missing)
        else:
            pending.pop()
            _run(value.op, value)
    assert wanted.memo is not None
    return wanted.memo


def _run(op: Op, wanted: Value) -> None:
    args = [_current(arg, op) if type(arg) in _TO_LOOK_UP else arg for arg in op.args]
    kwargs = {name: _current(arg, op) for name, arg in op.kwargs.items()} if op.kwargs else {}
    out = op.func(*args, **kwargs)
    op.call.counters.num_replayed_ops += 1
    if isinstance(out, Tensor):
        wanted.memo = out
    else:
        assert isinstance(op.outputs, list)
        for reference, tensor in zip(op.outputs, out, strict=True):
            output = reference() if reference is not None else None
            if output is not None:
                output.memo = tensor
    for value in op.inputs:
        if value.op is not None:
            _count_use(value)


_TO_LOOK_UP = (Value, list, tuple)


def _current(arg: Any, op: Op) -> Any:
    if type(arg) is Value:
        if arg.op is not None:
            return arg.memo
        if arg.swapped is not None:
            return _taken(arg, op)
        assert arg.tensor is not None
        if arg.tensor._version != arg.version and not _is_back(arg):
            _refuse_edited_source(op, arg.tensor._version, arg.version, _describe(arg.tensor))
        return arg.tensor
    if isinstance(arg, (list, tuple)):
        return type(arg)([_current(each, op) for each in arg])
    return arg


def _is_back(source: Value) -> bool:
    """Whether a source is one that its owner had freed, and is there again."""
    return source.version == FREED and source.tensor is not None and storage_bytes(source.tensor) > 0


def _taken(source: Value, op: Op) -> Tensor:
    watched = source.witness() if type(source.witness) is weakref.ref else source.witness
    if isinstance(watched, Tensor) and watched._version != source.version:
        assert source.swapped is not None
        _refuse_edited_source(op, watched._version, source.version, source.swapped.storage.path)
    assert op.call.swaps is not None and source.swapped is not None
    return op.call.swaps.swapper.take(source.swapped)


def _count_use(value: Value) -> None:
    value.done += 1
    if value.done >= value.uses:
        value.memo = None
        value.done = 0


def _verify(value: Value, tensor: Tensor, op: Op) -> None:
    op.call.counters.num_verified += 1
    if _differs(value, tensor):
        op = _first_to_differ(op)
        raise ReplayMismatchError(
            f"recomputing {op.path} in {op.call.region} gave other numbers than the forward pass had (found in a value "
            f"of shape {tuple(tensor.shape)}, {tensor.dtype}): a kernel that torch cannot see wrote to this value or "
            f"to one it is made from (in the forward pass, or in a custom backward), or an op on the way is not "
            f"deterministic; save it with the rule {{ops: '{op.path}', action: save}}, or the whole module, and report "
            f"the op"
        )


def _differs(value: Value, tensor: Tensor) -> bool:
    return value.digest is not None and not value.digest.matches(digest_of(tensor))


def _first_to_differ(op: Op) -> Op:
    """The op farthest back on the way to a wrong value whose own result is known to be wrong."""
    for value in op.inputs:
        if value.op is not None and _differs(value, _produce_as_recorded(value, op.call.device_type)):
            return _first_to_differ(value.op)
    return op


def _refuse_edited(handle: Handle, found: int) -> None:
    op = handle.value.op if handle.value is not None else None
    what = f"the output of {op.path}" if op is not None else f"a saved tensor {_describe(handle.tensor)}"
    raise InPlaceEditError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} in "
        f"{handle.call.region} is at version {found}; expected version {handle.version} instead. Edit a clone, or use "
        f"the out-of-place op"
    )


def _refuse_edited_source(op: Op, found: int, expected: int, what: str) -> None:
    raise InPlaceEditError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, from "
        f"which {op.path} in {op.call.region} is recomputed, is at version {found}; expected version {expected} "
        f"instead. Edit a clone, or save {op.path} in the plan"
    )


def _describe(tensor: Tensor | None) -> str:
    return "" if tensor is None else f"[{tensor.type()} {list(tensor.shape)}]"
