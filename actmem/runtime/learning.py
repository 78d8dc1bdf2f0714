"""The tape of a region's first call: it holds everything until the region has ended, then decides.

What ops a layer runs is known only once it has run. The first call of each structure and shape therefore keeps every
tensor to its end (one layer's worth, before any other layer has saved anything), turns what it saw into a
`RegionGraph`, asks for the plan's rules, and settles every fate. Later calls follow the `Script` that comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from actmem._compat import OpOverload, local_part, raw_call, storage_bytes, storage_id
from actmem.graph import COMMUNICATION, Op, RegionGraph, Storage, Value
from actmem.graph.region import StorageKind
from actmem.planning import Fates
from actmem.planning.fates import path_of_storage
from actmem.planning.plan import RuleSet
from actmem.runtime.faces import inner_of
from actmem.runtime.functions import running_opaque
from actmem.runtime.kinds import (
    EDITED,
    INTEGER,
    LEAVES_SHARD,
    OPAQUE,
    RANDOM,
    SPARSE,
    SUBCLASS,
    UNSEEN,
    VOLATILE,
    Kind,
    are_replayable_types,
    flops_of,
    group_size_of,
    kind_of,
    num_bytes,
    replay_call,
    replayable_function,
)
from actmem.runtime.scope import Scope
from actmem.runtime.swap.storage import SwapOrder
from actmem.runtime.tape import Tape
from actmem.runtime.values import Handle, RegionCall
from actmem.runtime.values import Value as TapeValue
from actmem.runtime.witness import address_of, version_of


@dataclass(frozen=True)
class Script:
    """What later calls of the same structure follow: the funcs in order with a ``None`` behind the last, and for each
    how to call it, what to do at it, and its path. `pack_orders`: which of the tensors that autograd saves are swapped.
    `source_orders` and `input_order`: which storages are swapped that only replays read, by the position of the op that
    makes them, and whether inputs are."""

    funcs: tuple[Callable[..., Any] | None, ...]
    calls: tuple[Callable[..., Any], ...]
    steps: bytes
    paths: tuple[str, ...]
    num_packed: int
    fates: Fates
    rules: RuleSet
    pack_orders: tuple[SwapOrder | None, ...]
    source_orders: dict[int, SwapOrder]
    input_order: SwapOrder | None

    @cached_property
    def watches_ops(self) -> bool:
        """Whether any op has to be seen; to swap tensors that autograd saves, their order is enough."""
        return any(step not in (SKIP, EDIT) for step in self.steps)


SKIP, RECORD, RECORD_VIEW, RECORD_UNLESS_RANDOM, RECORD_COLLECTIVE, EDIT, SWAP_SOURCE = range(7)

DETACH = torch.ops.aten.detach.default
"""Torch detaches some results when somebody else refers to them, as a learning tape does. So detaches have no place in
a script: they go on the tape exactly when what they detach is there."""


def between_faces(tensor: Tensor) -> Tensor:
    """Stands for an op that no dispatch mode sees, between two faces of a value; it has no place in a script either."""
    return tensor


class LearningTape(Tape):
    """Records every op, holds every tensor, and settles fates when asked to."""

    def __init__(self, call: RegionCall, region: nn.Module, volatile: set[int], *, verify: bool) -> None:
        super().__init__(call, verify=verify)
        self.scope = Scope(region)
        self._volatile = volatile
        self._tensors: list[Tensor] = []
        self._made: dict[int, TapeValue] = {}
        self._indices: dict[int, int] = {}
        self._values: list[Value] = []
        self._seen_as: list[tuple[int, int] | None] = []
        self._storages: list[Storage] = []
        self._storage_ids: list[int] = []
        self._storage_indices: dict[int, int] = {}
        self._ops: list[Op] = []
        self._funcs: list[Callable[..., Any]] = []
        self._steps = bytearray()
        self._packed: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_suspended:
            return func(*args, **kwargs)
        kind = kind_of(func)
        inputs = [self._index_of(each) for each in tensors_in((*args, *kwargs.values()))]
        if kind.edits:
            for each in kind.edited(args, kwargs):
                self._mark_edited(each)
            out = self.run_edit(func, kind, args, kwargs)
        else:
            out = func(*args, **kwargs)
        kept = reason_to_keep(kind, types, args, kwargs)
        self._observe(func, kind, kept, inputs, args, kwargs, out)
        return out

    def observe_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A replayable Function has run: one op on the tape, and a compute-intensive one."""
        inputs = [self._index_of(each) for each in tensors_in((*args, *kwargs.values()))]
        self._observe(func, replayable_function(name), None, inputs, args, kwargs, out)

    def _observe(
        self, func: Any, kind: Kind, kept: str | None, inputs: list[int], args: Any, kwargs: Any, out: Any
    ) -> None:
        """Note a call that has just run: in the graph always, on the tape if it may be replayed."""
        path = self.scope.path_of(kind.name)
        tensors = tensors_in(out if isinstance(out, (list, tuple)) else (out,))
        if kept in (None, COMMUNICATION) and tensors:
            self.record(replay_call(func, kind), path, args, kwargs, out, shares_version=kind.shares_version)
        version = version_of(args[0]) if kind.shares_version else 0
        outputs = [self._add_output(each, kept, version) for each in tensors]
        flops, group_size = flops_of(func, kind, args, kwargs, out), group_size_of(kind, args)
        self._add_op(kind, path, inputs, outputs, flops, group_size)
        self._funcs.append(func)
        self._steps.append(EDIT if kind.edits else SKIP)
        self._keep_made(tensors, outputs)

    def pack(self, tensor: Tensor) -> Handle:
        """Autograd's pack hook; the handle may still become either held or recomputed."""
        self._packed.append(self._index_of(tensor))
        return super().pack(tensor)

    def graph(self) -> RegionGraph:
        """What the region did."""
        self._keep_what_volatile_buffers_make()
        self._note_what_is_spread()
        return RegionGraph(tuple(self._ops), tuple(self._values), tuple(self._storages), tuple(self._packed))

    def _keep_what_volatile_buffers_make(self) -> None:
        """A buffer that calls of the region edit holds other numbers by the time of a replay."""
        volatile = {index for index, identity in enumerate(self._storage_ids) if identity in self._volatile}
        for op in self._ops:
            if volatile.isdisjoint(self._values[index].storage for index in op.inputs):
                continue
            for made in {self._values[index].storage for index in op.outputs} - volatile:
                if self._storages[made].kept is None:
                    self._storages[made] = replace(self._storages[made], kept=VOLATILE)

    def _note_what_is_spread(self) -> None:
        """What autograd saved as a DTensor, or what it did not save and an op made as one."""
        packed = {self._values[index].storage for index in self._packed}
        others = [index for index, each in enumerate(self._values) if each.producer is not None]
        for index in (*self._packed, *(each for each in others if self._values[each].storage not in packed)):
            if inner_of(self._tensors[index]) is not None:
                storage = self._values[index].storage
                self._storages[storage] = replace(self._storages[storage], spread=True)

    def keep_what_leaves_a_shard(self, output: Any) -> None:
        """A module that FSDP2 shards by itself has given this: no replay outside of it can begin before it."""
        for tensor in tensors_in((output,)):
            index = self._values[self._index_of(tensor)].storage
            storage = self._storages[index]
            if storage.kind == "op" and storage.kept is None:
                self._storages[index] = replace(storage, kept=LEAVES_SHARD)
        # What was gathered for the module is known to be its parameters only now, and not for long.
        for value, tensor in zip(self._values, self._tensors, strict=True):
            storage = self._storages[value.storage]
            if storage.kind == "input" and self.call.owns(tensor):
                self._storages[value.storage] = replace(storage, kind="parameter", constant=False)

    def settle(self, fates: Fates, rules: RuleSet) -> Script:
        """Let every tensor go that is to be recomputed, hold the others; returns the script for the calls to come."""
        graph = fates.graph
        orders = {index: swap_order(graph, index, rules) for index in fates.swapped}
        self._count_uses(fates)
        for index, value in self._made.items():
            storage = graph.values[index].storage
            if storage in orders or storage in fates.held or graph.storages[storage].kind == "parameter":
                value.op = None
                value.tensor = self._tensors[index]
                value.version = value.tensor._version
                self._raw.append(value)
        self.orders = {self._storage_ids[index]: order for index, order in orders.items()}
        script = self._script(fates, rules, orders)
        self.forget()
        return script

    def _script(self, fates: Fates, rules: RuleSet, orders: dict[int, SwapOrder]) -> Script:
        graph = fates.graph
        steps = bytearray(self._steps)
        for position in fates.replayed:
            steps[position] = _recording_step(self._funcs[position])
        sources = {graph.creators[index]: index for index in self._never_packed(orders) if index in graph.creators}
        for position in sources:
            steps[position] = SWAP_SOURCE
        kept = [position for position, func in enumerate(self._funcs) if func not in (DETACH, between_faces)]
        return Script(
            funcs=(*(self._funcs[position] for position in kept), None),
            calls=tuple(raw_call(self._funcs[position]) for position in kept),
            steps=bytes(steps[position] for position in kept),
            paths=tuple(self._ops[position].path for position in kept),
            num_packed=self.num_packed,
            fates=fates,
            rules=rules,
            pack_orders=tuple(orders.get(graph.values[index].storage) for index in graph.packed) if orders else (),
            source_orders={kept.index(position): orders[index] for position, index in sources.items()},
            input_order=next((orders[each] for each in self._never_packed(orders) if each not in graph.creators), None),
        )

    def _never_packed(self, storages: Iterable[int]) -> list[int]:
        packed = {self._values[index].storage for index in self._packed}
        return [index for index in storages if index not in packed]

    def forget(self) -> None:
        """Let go of all tensors that are not held through a handle."""
        self._tensors.clear()
        self._made.clear()
        self._indices.clear()
        super().close()

    def close(self) -> None:
        """Nothing yet: `settle` or `forget` ends this tape, after the region's output has been returned to it."""

    def _count_uses(self, fates: Fates) -> None:
        sources = [each for each in self._raw if isinstance(each, TapeValue) and each.tensor is not None]
        values = {self._indices[id(each.tensor)]: each for each in sources if id(each.tensor) in self._indices}
        values |= self._made
        for value in values.values():
            value.uses = 0
        for index, count in fates.graph.packed_counts.items():
            if index in self._made:
                self._made[index].uses += count
        for position in fates.replayed:
            for index in fates.graph.ops[position].inputs:
                if index in values:
                    values[index].uses += 1

    def _keep_made(self, tensors: list[Tensor], outputs: list[int]) -> None:
        for tensor, index in zip(tensors, outputs, strict=True):
            value = self._known.get(id(tensor))
            if value is not None and value.op is not None and value.origin() is tensor:
                self._made[index] = value

    def _add_op(
        self, kind: Kind, path: str, inputs: list[int], outputs: list[int], flops: int, group_size: int
    ) -> None:
        before = {self._values[index].storage for index in inputs}
        view = not kind.edits and bool(outputs) and all(self._values[index].storage in before for index in outputs)
        moved = 0 if view else sum(num_bytes(self._tensors[index]) for index in (*inputs, *outputs))
        made = (tuple(inputs), tuple(outputs), view, kind.compute_intensive, flops, moved, group_size)
        self._ops.append(Op(path, kind.name, *made))

    def _add_output(self, tensor: Tensor, kept: str | None, version: int) -> int:
        known = self._indices.get(id(tensor))
        if known is not None and kept != EDITED:
            return known  # an op that returns its operand as it is
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            kept = kept or INTEGER
        if tensor.layout is not torch.strided:
            kept = kept or SPARSE
        index = self._add_value(tensor, "op", kept, producer=len(self._ops))
        # Torch counts an edit only when this call has returned.
        self._seen_as[index] = None if kept == EDITED else (version, address_of(tensor))
        return index

    def _index_of(self, tensor: Tensor) -> int:
        index = self._indices.get(id(tensor))
        if index is not None and self._seen_as[index] is None:
            self._seen_as[index] = _state_of(tensor)
        elif index is not None and self._seen_as[index] != _state_of(tensor):
            self._note_unseen_edit(index)
            index = None
        if index is None and self._other_face(tensor) is not None:
            return self._indices[id(tensor)]
        if index is None:
            owned = isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter) or self.call.owns(tensor)
            index = self._add_value(tensor, "parameter" if owned else "input", None, producer=None)
        return index

    def _record_face(self, call: Callable[..., Any], known: TapeValue, tensor: Tensor) -> TapeValue | None:
        """Note it in the graph as well, as a view of what is known."""
        origin = known.origin()
        value = super()._record_face(call, known, tensor)
        if value is not None and origin is not None:
            before = self._index_of(origin)
            index = self._add_value(tensor, "op", None, producer=len(self._ops))
            self._ops.append(Op(known.op.path if known.op else "", "face", (before,), (index,), True, False, 0, 0))
            self._funcs.append(between_faces)
            self._steps.append(SKIP)
            self._made[index] = value
        return value

    def _new_storage(self, tensor: Tensor, kind: StorageKind, kept: str | None) -> Storage:
        constant = kind == "input" and not tensor.requires_grad
        return Storage(storage_bytes(tensor), kind, kept, constant=constant)

    def _add_value(self, tensor: Tensor, origin: StorageKind, kept: str | None, producer: int | None) -> int:
        identity = storage_id(tensor)
        storage = self._storage_indices.get(identity)
        if storage is not None and producer is None and self._storages[storage].kind == "op":
            self._storages[storage] = replace(self._storages[storage], kept=self._storages[storage].kept or UNSEEN)
        if storage is None:
            storage = self._storage_indices[identity] = len(self._storages)
            self._storages.append(self._new_storage(tensor, origin, kept))
            self._storage_ids.append(identity)
        index = self._indices[id(tensor)] = len(self._values)
        shape, dtype = tuple(local_part(tensor).shape), str(tensor.dtype).removeprefix("torch.")
        self._values.append(Value(storage, shape, dtype, producer))
        self._tensors.append(tensor)
        self._seen_as.append(_state_of(tensor))
        return index

    def _mark_edited(self, tensor: Tensor) -> None:
        """The operand's contents before the edit can be recomputed but not held; its memory is a new storage now."""
        identity = storage_id(tensor)
        if self.call.owns(tensor):
            self._volatile.add(identity)
        before = self._storage_indices.get(identity)
        if before is not None:
            self._end_storage(before)

    def _note_unseen_edit(self, index: int) -> None:
        """Only a tensor's version or address tells that its contents are others now: no op that was seen did it."""
        self._end_storage(self._values[index].storage)

    def _end_storage(self, index: int) -> None:
        storage = self._storages[index]
        if storage.kind == "op" and storage.kept is None:
            self._storages[index] = replace(storage, edited=True)
        self._storage_indices.pop(self._storage_ids[index], None)
        self._forget_views_of(index)

    def _forget_views_of(self, storage: int) -> None:
        for key, index in list(self._indices.items()):
            if self._values[index].storage == storage:
                del self._indices[key]


def swap_order(graph: RegionGraph, storage: int, rules: RuleSet) -> SwapOrder:
    """How a storage that is to be swapped is."""
    path = path_of_storage(graph, storage)
    return SwapOrder(path, rules.tier_of(path))


def _recording_step(func: Any) -> int:
    if not isinstance(func, OpOverload):
        return RECORD
    kind = kind_of(func)
    if kind.dropout is not None:
        return RECORD_UNLESS_RANDOM
    if kind.kept == COMMUNICATION:
        return RECORD_COLLECTIVE
    return RECORD_VIEW if kind.shares_version else RECORD


def reason_to_keep(kind: Kind, types: Any, args: Any, kwargs: Any) -> str | None:
    """Why the outputs of this call must be saved whatever the plan says; ``None`` if they may be recomputed."""
    if types and not are_replayable_types(types):
        return SUBCLASS
    if kind.is_random(args, kwargs):
        return RANDOM
    if kind.kept is None and not (kind.view or kind.custom) and running_opaque():
        return OPAQUE
    return kind.kept


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return version_of(tensor), address_of(tensor)


def tensors_in(items: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples, in order."""
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(tensors_in(item))
    return found
