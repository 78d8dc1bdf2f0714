"""The tape of one region call: the ops that its backward pass may have to run again.

The mental model. While a region runs, a dispatch mode sees every ATen op. Ops that the plan recomputes are put on the
tape as an `Op` with `Value`s for operands; all others leave no trace. Autograd's pack hook hands over each tensor it
saves: if an op on the tape made it, the tensor itself is let go and the handle refers to its `Value`; if not, the
handle holds it, or the swapper does. Whatever an op on the tape reads and no other op on the tape made is held too:
such *sources* end every chain.

So always-saved things need no rule of their own: they are simply not put on the tape. And a call that takes another
path than the last one costs memory, never correctness, since every chain ends in something that was really there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem._compat import (
    DispatchMode,
    dispatch_off,
    is_fake,
    storage_bytes,
    storage_id,
    storage_reference,
    wrapping,
)
from actmem.runtime.digest import digest_of
from actmem.runtime.faces import inner_of, without_face
from actmem.runtime.kinds import Kind
from actmem.runtime.swap.storage import SwapOrder
from actmem.runtime.values import Handle, Op, RegionCall, Value
from actmem.runtime.witness import FREED, LOST, address_of, version_of, witness_of


class Tape(DispatchMode):
    """Records one region call. Subclasses decide which ops go on the tape; this class knows how."""

    def __init__(self, call: RegionCall, *, verify: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call
        self.verify = verify
        self.is_suspended = False
        self.num_packed = 0
        self.orders: dict[int, SwapOrder] = {}
        self._ordered: list[object] = []  # keeps the ids in `orders` from going to other storages
        self._known: dict[int, Value] = {}
        self._inside: dict[int, Value] = {}
        self._raw: list[Value | Handle] = []
        self._swapped: list[Value] = []

    def pack(self, tensor: Tensor) -> Handle:
        """Autograd's pack hook: let a recomputable tensor go, send a swapped one away, hold any other."""
        index, self.num_packed = self.num_packed, self.num_packed + 1
        value = self._value_of(tensor) or self._other_face(tensor)
        if value is None or value.op is None:
            if (value is None or value.swapped is None) and (order := self.order_of(index, tensor)) is not None:
                value = self._swap(tensor, value, order)
            if value is None or value.swapped is None:
                handle = Handle(self.call, tensor._version, tensor)
                self._raw.append(handle)
                return handle
        handle = Handle(self.call, tensor._version)
        handle.value = value
        value.uses += 1
        if value.swapped is not None:
            handle.witness = value.witness
            return handle
        with dispatch_off():
            if self.verify and value.digest is None:
                value.digest = digest_of(tensor)
            handle.witness = witness_of(tensor)
        return handle

    def order_of(self, index: int, tensor: Tensor) -> SwapOrder | None:
        """Whether the `index`-th tensor to be packed is to be swapped. `orders` has storages to swap by their id."""
        return self.orders.get(storage_id(tensor)) if self.orders else None

    def order_outputs(self, out: Any, order: SwapOrder) -> None:
        """The storages that an op has just made are to be swapped, should anybody ask for them later."""
        if self.call.swaps is None:
            return
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                continue
            if storage_bytes(tensor) >= self.call.swaps.swapper.min_swap_bytes:
                self.orders[storage_id(tensor)] = order
                self._ordered.append(storage_reference(tensor))

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
        for holder in self._raw:
            tensor = holder.tensor
            if tensor is None:
                continue
            if isinstance(holder, Handle):
                known = self._known.get(id(tensor))  # or that of a tensor that is gone, whose id was given again
                holder.is_source = known is not None and known.origin() is tensor
            elif holder.address != address_of(tensor):
                holder.version = LOST if storage_bytes(tensor) else FREED
            if type(tensor) is not Parameter and not self._swap_held(holder, tensor):
                holder.tensor = tensor.detach()
        for value in self._swapped:
            if value.swapped is not None:
                value.swapped.storage.uses += value.uses
        self._known.clear()
        self._inside.clear()
        self._raw.clear()
        self._swapped.clear()

    def _swap_held(self, holder: Value | Handle, tensor: Tensor) -> bool:
        """Swap what a source or a handle holds, if its storage is to be swapped or has been already."""
        if self.call.swaps is None or holder.version != tensor._version:
            return False
        if isinstance(holder, Value) and not holder.uses:
            return False
        order = self.orders.get(storage_id(tensor)) if self.orders else None
        if order is None and (not self._swapped or self.call.swaps.swapper.find(tensor) is None):
            return False
        value = self._swap(tensor, holder if isinstance(holder, Value) else None, order or SwapOrder("", None))
        if value is None or value.swapped is None:
            return False
        if isinstance(holder, Handle):
            value.uses += 1
            holder.tensor, holder.value, holder.witness = None, value, value.witness
        return True

    def _swap(self, tensor: Tensor, value: Value | None, order: SwapOrder) -> Value | None:
        """Let a tensor's storage leave; returns the tensor's value, unchanged where the storage has to stay."""
        assert self.call.swaps is not None
        view = self.call.swaps.swapper.swap(tensor, order, self.call.swaps, verify=self.verify)
        if view is None:
            return value
        if value is None:
            value = self._known[id(tensor)] = Value(None, tensor, tensor._version)
        with dispatch_off():
            value.witness = witness_of(tensor)
        value.swapped = view
        value.tensor = None
        self._swapped.append(value)
        return value

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.close()

    def record(
        self, func: Callable[..., Any], path: str, args: Any, kwargs: Any, out: Any, *, shares_version: bool = False
    ) -> None:
        """Put a call on the tape. Outputs that must be saved all the same (integers) stay unknown to it.

        `shares_version`: the outputs will count their versions with the first operand."""
        op = Op(func, path, self.call)
        frozen, inputs = op.args, op.inputs
        for arg in args:  # as _operand does, without a call for each: this is the hottest loop there is
            if isinstance(arg, Tensor):
                value = self._value_of(arg) or self._other_face(arg) or self._source(arg)
                value.uses += 1
                inputs.append(value)
                frozen.append(value)
            else:
                frozen.append(self._operand(arg, op) if type(arg) in _CONTAINERS else arg)
        if kwargs:
            op.kwargs = {name: self._operand(arg, op) for name, arg in kwargs.items()}
        version = version_of(args[0]) if shares_version else 0
        if isinstance(out, Tensor):
            op.outputs = self._output(op, out, version)
        elif isinstance(out, (tuple, list)):
            op.outputs = [self._output(op, each, version) if isinstance(each, Tensor) else None for each in out]

    def has_recorded(self, operand: Any) -> bool:
        """Whether an op on the tape made this tensor."""
        value = self._value_of(operand) or self._other_face(operand)
        return value is not None and value.op is not None

    def run_edit(self, func: Callable[..., Any], kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that overwrites operands."""
        operands = kind.edited(args, kwargs)
        self._before_edit({storage_id(each) for each in operands})
        out = func(*args, **kwargs)
        if not kind.counts_edits:
            torch.autograd.graph.increment_version(operands)
        return out

    def _before_edit(self, edited: set[int]) -> None:
        """Storages are about to be overwritten: keep their contents for the ops on the tape that have read them."""
        for key, value in list(self._known.items()):
            origin = value.origin()
            if origin is None or storage_id(origin) in edited:
                del self._known[key]
                if origin is not None and value.op is None and value.uses and value.tensor is not None:
                    value.tensor = value.tensor.clone()
                    value.version = value.tensor._version
                    value.address = address_of(value.tensor)

        for value in self._swapped:
            if value.swapped is not None and value.swapped.storage.identity in edited and self.call.swaps is not None:
                self.call.swaps.swapper.keep_contents(value.swapped.storage)
                value.witness = None

    def _operand(self, arg: Any, op: Op) -> Any:
        if isinstance(arg, Tensor):
            value = self._value_of(arg) or self._other_face(arg) or self._source(arg)
            value.uses += 1
            op.inputs.append(value)
            return value
        if isinstance(arg, (list, tuple)):
            return type(arg)([self._operand(each, op) for each in arg])
        return arg

    def _output(self, op: Op, tensor: Tensor, version: int) -> weakref.ref[Value] | None:
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or tensor.layout is not torch.strided:
            return None
        value = self._known[id(tensor)] = Value(op, tensor, version)
        if type(tensor) is not Tensor and (inner := inner_of(tensor)) is not None:
            self._inside[id(inner)] = value
        return weakref.ref(value)

    def _other_face(self, tensor: Tensor) -> Value | None:
        """The value of a tensor that is around, or inside, one that the tape can make: made by an op of ours."""
        if type(tensor) is Tensor or is_fake(type(tensor)):
            around = self._inside.get(id(tensor)) if self._inside else None
            wrapper = None if around is None else around.origin()
            if around is None or wrapper is None or inner_of(wrapper) is not tensor:
                return None
            return self._record_face(without_face, around, tensor)
        inner = inner_of(tensor)
        inside = None if inner is None else self._value_of(inner) or self._other_face(inner)
        return None if inside is None else self._record_face(wrapping(tensor), inside, tensor)

    def _record_face(self, call: Callable[..., Any], known: Value, tensor: Tensor) -> Value | None:
        if known.op is None:
            return None
        op = Op(call, known.op.path, self.call)
        op.args, op.inputs = [known], [known]
        known.uses += 1
        output = self._output(op, tensor, tensor._version)
        value = None if output is None else output()
        op.outputs = output
        return value

    def _value_of(self, tensor: Tensor) -> Value | None:
        """The value that a tensor still is: nobody has edited it since unseen, or put other memory behind it."""
        value = self._known.get(id(tensor))
        if (
            value is None
            or value.origin() is not tensor
            or value.version != tensor._version
            or (value.address and value.address != tensor.data_ptr())
        ):
            return None
        return value

    def _source(self, tensor: Tensor) -> Value:
        """Hold a tensor that no op on the tape made, to replay from."""
        # Inference tensors do not count their versions; a copy of one does.
        held = tensor.clone() if tensor.is_inference() else tensor
        value = self._known[id(tensor)] = Value(None, held, held._version)
        value.tensor = held
        self._raw.append(value)
        return value


_CONTAINERS = (list, tuple)
