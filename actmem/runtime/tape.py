"""The tape of one region call: the ops that its backward pass may have to run again.

The mental model. While a region runs, a dispatch mode sees every ATen op. Ops that the plan recomputes are put on the
tape as an `Op` with `Value`s for operands; all others leave no trace. Autograd's pack hook hands over each tensor it
saves: if an op on the tape made it, the tensor itself is let go and the handle refers to its `Value`; if not, the
handle holds it. Whatever an op on the tape reads and no other op on the tape made is held too: such *sources* end
every chain.

So always-saved things need no rule of their own: they are simply not put on the tape. And a call that takes another
path than the last one costs memory, never correctness, since every chain ends in something that was really there.

Ownership. handle -> Value -> Op -> operand Values: Python's own reference counts free a value with the last handle
that needs it. An Op refers to its outputs only weakly, and no held tensor carries a `grad_fn` once the tape is
closed, so there are no cycles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from actmem._compat import dispatch_off, is_fake, storage_id
from actmem.runtime.digest import Digest, digest_of
from actmem.runtime.kinds import Kind

Witness = Tensor | weakref.ref[Tensor]


class Value:
    """A tensor of the region call: made by `op` and to be made again, or held in `tensor`.

    `uses` counts the handles and the ops on the tape that read it, `done` those of them that have read it in this pass
    over the graph. `memo` keeps a recomputed tensor until all have.
    """

    __slots__ = ("__weakref__", "digest", "done", "memo", "op", "origin", "tensor", "uses", "version")

    def __init__(self, op: Op | None, origin: Tensor) -> None:
        self.op = op
        self.origin = weakref.ref(origin)
        self.tensor: Tensor | None = None
        self.version = 0
        self.memo: Tensor | None = None
        self.uses = 0
        self.done = 0
        self.digest: Digest | None = None


class Op:
    """A call that can be made again. `args` and `kwargs` have `Value`s where the call had tensors; `outputs` are weak."""

    __slots__ = ("args", "call", "func", "inputs", "kwargs", "outputs", "path")

    def __init__(self, func: Callable[..., Any], path: str, call: RegionCall) -> None:
        self.func = func
        self.path = path
        self.call = call
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] | None = None
        self.inputs: list[Value] = []
        self.outputs: weakref.ref[Value] | list[weakref.ref[Value] | None] | None = None


class RegionCall:
    """What all handles and ops of one region call share: the region's name and what happened in its backward pass."""

    __slots__ = ("counters", "device_type", "region")

    def __init__(self, region: str, device_type: str, counters: ReplayCounters) -> None:
        self.region = region
        self.device_type = device_type
        self.counters = counters


class ReplayCounters:
    """Counts of one region, over all its calls."""

    __slots__ = ("num_replayed_ops", "num_unpacks", "num_verified")

    def __init__(self) -> None:
        self.num_replayed_ops = 0
        self.num_unpacks = 0
        self.num_verified = 0


class Handle:
    """What autograd keeps in place of a tensor: its value, and its version when it was saved.

    `witness` tells the version of a tensor that was let go.
    """

    __slots__ = ("call", "value", "version", "witness")

    def __init__(self, value: Value, version: int, witness: Witness | None, call: RegionCall) -> None:
        self.value = value
        self.version = version
        self.witness = witness
        self.call = call


class Tape(TorchDispatchMode):
    """Records one region call. Subclasses decide which ops go on the tape; this class knows how."""

    def __init__(self, call: RegionCall, *, verify: bool) -> None:
        super().__init__()
        self.call = call
        self.verify = verify
        self.is_suspended = False
        self.num_packed = 0
        self._known: dict[int, Value] = {}
        self._raw: list[Value] = []

    def pack(self, tensor: Tensor) -> Handle:
        """Autograd's pack hook: let a recomputable tensor go, hold any other."""
        self.num_packed += 1
        value = self._known.get(id(tensor))
        if value is None or value.op is None or value.origin() is not tensor:
            return Handle(self._hold(tensor), tensor._version, None, self.call)
        value.uses += 1
        with dispatch_off():
            if self.verify and value.digest is None:
                value.digest = digest_of(tensor)
            return Handle(value, tensor._version, _witness(tensor), self.call)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let ops pass unseen."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    def observe_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A replayable `torch.autograd.Function` has run under `suspended`; `func` runs it again."""
        raise NotImplementedError

    def close(self) -> None:
        """End the recording: let go of everything that autograd's graph hangs on."""
        for value in self._raw:
            tensor = value.tensor
            if tensor is not None and not isinstance(tensor, Parameter):
                value.tensor = tensor.detach()
        self._known.clear()
        self._raw.clear()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.close()

    def record(self, func: Callable[..., Any], path: str, args: Any, kwargs: Any, out: Any) -> None:
        """Put a call on the tape. Outputs that must be saved all the same (integers) stay unknown to it."""
        op = Op(func, path, self.call)
        op.args = tuple([self._operand(arg, op) for arg in args])
        if kwargs:
            op.kwargs = {name: self._operand(arg, op) for name, arg in kwargs.items()}
        if isinstance(out, Tensor):
            op.outputs = self._output(op, out)
        elif isinstance(out, (tuple, list)):
            op.outputs = [self._output(op, each) if isinstance(each, Tensor) else None for each in out]

    def has_recorded(self, operand: Any) -> bool:
        """Whether an op on the tape made this tensor."""
        value = self._known.get(id(operand))
        return value is not None and value.op is not None and value.origin() is operand

    def before_edit(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to overwrite operands: keep their contents for the ops on the tape that have read them."""
        edited = set()
        for index, name in kind.edits:
            operand = args[index] if index < len(args) else kwargs.get(name)
            operands = operand if isinstance(operand, (list, tuple)) else [operand]
            edited.update(storage_id(each) for each in operands if isinstance(each, Tensor))
        for key, value in list(self._known.items()):
            origin = value.origin()
            if origin is None or storage_id(origin) in edited:
                del self._known[key]
                if origin is not None and value.op is None and value.uses and value.tensor is not None:
                    value.tensor = value.tensor.clone()
                    value.version = value.tensor._version

    def _operand(self, arg: Any, op: Op) -> Any:
        if isinstance(arg, Tensor):
            value = self._known.get(id(arg))
            if value is None or value.origin() is not arg:
                value = self._known[id(arg)] = self._hold(arg)
            value.uses += 1
            op.inputs.append(value)
            return value
        if isinstance(arg, (list, tuple)):
            return type(arg)([self._operand(each, op) for each in arg])
        return arg

    def _output(self, op: Op, tensor: Tensor) -> weakref.ref[Value] | None:
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return None
        value = self._known[id(tensor)] = Value(op, tensor)
        return weakref.ref(value)

    def _hold(self, tensor: Tensor) -> Value:
        value = Value(None, tensor)
        value.tensor = tensor
        value.version = tensor._version
        self._raw.append(value)
        return value


def _witness(tensor: Tensor) -> Witness | None:
    """Something without memory that tells of in-place edits after a tensor was let go: for a plain tensor, an empty one
    that shares its version counter; for a subclass, a weak reference."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return None if is_fake(type(tensor)) else weakref.ref(tensor)
    witness = tensor.detach()
    witness.data = _nothing(tensor.dtype, tensor.device)
    return witness


_empties: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    empty = _empties.get((dtype, device))
    if empty is None:
        empty = _empties[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return empty
