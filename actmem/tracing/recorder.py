"""Watches a training step go by: every op, which memory comes and goes with it, and what autograd picks up when.

Autograd does not hold what it saves inside a layer: what it picks up later is a copy or, on fake tensors, any tensor of
that shape. So the recorder lets those tensors go, and what still stands is what Python, or an op outside the layers,
holds on to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem._compat import (
    DEVICE_QUESTION,
    DispatchMode,
    answer_device,
    is_caching_casts,
    likeness,
    local_part,
    local_storage,
    storage_bytes,
    storage_id,
)
from actmem.graph import signature_of
from actmem.runtime.intercept import Interception
from actmem.runtime.kinds import flops_of, group_size_of, hides_memory, kind_of, num_bytes
from actmem.runtime.learning import tensors_in
from actmem.tracing.kernels import Kernels

OWNED = -1
"""Number of whatever stood before the step: parameters, buffers, the batch."""


@dataclass(slots=True, eq=False)
class Seen:
    """One op as it went by, with the numbers of the memories that it read and made; without a name it is a moment
    at which autograd only picks up or lets go. `of_view`: its first operand is a view."""

    name: str = ""
    signature: str = ""
    flops: int = 0
    moved_bytes: int = 0
    compute_intensive: bool = False
    group_size: int = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    of_view: bool = False
    unpacks: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Place:
    """What ran in one layer, or in the gap before it, in one direction."""

    layer: int
    in_layer: bool
    backward: bool
    ops: list[Seen] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, bool, bool]:
        """What tells one place from all others."""
        return self.layer, self.in_layer, self.backward


@dataclass(slots=True, eq=False)
class Memory:
    """A storage: its size, the op that made it, and the op before which it was found to be gone. `let_go`: that before
    which the last op outside the layers whose autograd saved it let it go. `accumulated`: that before which it became a
    parameter's gradient, which is shared out over `num_ranks`."""

    num_bytes: int
    made: tuple[Place, int]
    gone: tuple[Place, int] | None = None
    let_go: tuple[Place, int] | None = None
    accumulated: tuple[Place, int] | None = None
    num_ranks: int = 1


class StepRecorder(DispatchMode):
    """Records one step of a model whose layers are `layers`, in order. `owned` are the tensors that stood before it;
    `copies` says whether tensors are real, so that of what autograd saves a copy is kept. `kernels` hears of each
    call. `order` is that in which layers ran, `needs` tells which of their inputs needed gradients, `went_back_early`
    is a layer in which a backward pass went before the forward pass was done, and `strangers` are types of tensors
    that hold others unseen."""

    def __init__(
        self, layers: Sequence[nn.Module], owned: Iterable[Tensor], *, copies: bool, kernels: Kernels | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories: list[Memory] = []
        self.places: dict[tuple[int, bool, bool], Place] = {}
        self.num_packed = [0] * len(layers)
        self.num_calls = [0] * len(layers)
        self.order: list[int] = []
        self.needs: dict[int, tuple[bool, ...]] = {}
        self.went_back_early: int | None = None
        self.strangers: set[str] = set()
        self._layers = layers
        self._owned = {storage_id(tensor) for tensor in owned}
        self._copies: WeakValueDictionary[tuple[int, int], UntypedStorage] | None = None
        if copies:
            self._copies = WeakValueDictionary()
        self._kernels = kernels
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._is_watching = True
        self._is_casting = False
        self._is_forward = True
        self._casts: list[int] = []
        self._here = self._place(0, in_layer=False, backward=False)

    @contextmanager
    def recording(self, parameters: Mapping[Tensor, int]) -> Iterator[None]:
        """Record what runs inside, and what becomes a gradient of `parameters`, shared out over so many ranks each;
        `begin_backward` tells where the backward pass begins."""
        runners = {layer: _Runner(self, index) for index, layer in enumerate(self._layers)}
        interception = Interception(dict(runners))
        hooks = [
            each.register_post_accumulate_grad_hook(partial(self._note_gradient, num_ranks=ranks))
            for each, ranks in parameters.items()
        ]
        try:
            with self, saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._is_watching = False
            interception.remove()
            for hook in hooks:
                hook.remove()

    def begin_backward(self) -> None:
        """The forward pass, the loss included, is done, and with it autocast and what it has kept."""
        self._is_forward = False
        self._here = self._place(len(self._layers), in_layer=False, backward=True)
        for number in self._casts:
            self.memories[number].let_go = (self._here, 0)

    def _note_gradient(self, parameter: Tensor, num_ranks: int) -> None:
        if parameter.grad is not None and (number := self._number_of(parameter.grad)) != OWNED:
            memory = self.memories[number]
            memory.accumulated, memory.num_ranks = (self._here, len(self._here.ops)), num_ranks

    def ops_of(self, layer: int) -> list[Seen]:
        """What a layer ran in its forward pass."""
        return self._place(layer, in_layer=True, backward=False).ops

    @contextmanager
    def in_layer(self, layer: int, given: Sequence[Tensor]) -> Iterator[None]:
        """A layer's forward runs inside, on what it is `given`."""
        self.num_calls[layer] += 1
        self.order.append(layer)
        self.needs[layer] = tuple([each.requires_grad for each in given])
        self._here = self._place(layer, in_layer=True, backward=False)
        self._is_casting = is_caching_casts()
        yield
        self._here = self._place(layer + 1, in_layer=False, backward=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUESTION:
            return answer_device(args[0])
        kwargs = kwargs or {}
        if not self._is_watching:
            return func(*args, **kwargs)
        self.strangers.update([each.__name__ for each in types if hides_memory(each)])
        kind = kind_of(func)
        unpacks = self._take_moment()
        operands = tensors_in((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        results = tensors_in(out if isinstance(out, (list, tuple)) else (out,))
        inputs = tuple([self._number_of(each) for each in operands])
        outputs = tuple([self._number_of(each) for each in results])
        if self._is_casting and kind.name == "_to_copy" and inputs == (OWNED,) and operands[0].requires_grad:
            self._casts += set(outputs) - {OWNED}
        moves = kind.edits or not outputs or not set(outputs) <= set(inputs)
        signature = signature_of(kind.name, [(tuple(local_part(each).shape), _dtype(each)) for each in operands])
        flops = flops_of(func, kind, args, kwargs, out)
        if self._kernels is not None:
            self._kernels.note(signature, func, kind, args, kwargs, flops, results)
        self._here.ops.append(
            Seen(
                name=kind.name,
                signature=signature,
                flops=flops,
                moved_bytes=sum(map(num_bytes, (*operands, *results))) if moves else 0,
                compute_intensive=kind.compute_intensive,
                group_size=group_size_of(kind, args),
                inputs=inputs,
                outputs=outputs,
                of_view=bool(operands) and operands[0]._is_view(),
                unpacks=unpacks,
            )
        )
        return out

    def _number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's memory, a new one where it was not seen before."""
        identity = storage_id(tensor)
        known = self._living.get(identity)
        if known is not None:
            return known[1]
        if identity in self._owned:
            return OWNED
        number = len(self.memories)
        self._follow(tensor, number)
        self.memories.append(Memory(storage_bytes(tensor), (self._here, len(self._here.ops))))
        return number

    def _follow(self, tensor: Tensor, number: int) -> None:
        """Know the tensor's memory by this number until it is gone."""
        identity = storage_id(tensor)

        def note_death(_: object) -> None:
            del self._living[identity]
            if number != OWNED and self._is_watching:
                self.memories[number].gone = (self._here, len(self._here.ops))

        is_plain = tensor.layout is torch.strided  # others have no storage of their own
        self._living[identity] = (weakref.ref(local_storage(tensor) if is_plain else tensor, note_death), number)

    def _place(self, layer: int, *, in_layer: bool, backward: bool) -> Place:
        place = Place(layer, in_layer, backward)
        return self.places.setdefault(place.key, place)

    def _pack(self, tensor: Tensor) -> _Saved:
        place = self._here
        if not place.in_layer:
            return _Saved(self, place, None, tensor, number=self._number_of(tensor))
        position = self.num_packed[place.layer]
        self.num_packed[place.layer] += 1
        if self._must_hold(tensor, place):
            return _Saved(self, place, position, tensor)
        return _Saved(self, place, position, None, self._stand_in(tensor))

    def _must_hold(self, tensor: Tensor, place: Place) -> bool:
        """Whether autograd must hold it whatever the plan: it is not the layer's own, and needs no gradient."""
        number = self._number_of(tensor)
        if number == OWNED or (self._copies is not None and not _is_plain(tensor)):
            return True
        return self.memories[number].made[0] is not place and not tensor.requires_grad

    def _stand_in(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What makes a tensor that stands in for this one in the backward pass."""
        if self._copies is None:
            return partial(likeness(tensor), None)
        key = self._number_of(tensor), tensor._version
        storage = self._copies.get(key)
        if storage is None:
            with self._not_watching():
                storage = self._copies[key] = tensor.untyped_storage().clone()
        return partial(_view_of, storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    @contextmanager
    def _not_watching(self) -> Iterator[None]:
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    def _unpack(self, saved: _Saved) -> Tensor:
        place = saved.place
        if self._is_forward and saved.position is not None:
            self.went_back_early = place.layer
        self._here = self._place(place.layer, in_layer=place.in_layer, backward=True)
        if saved.position is not None:
            self._moment().unpacks.append(saved.position)
        if saved.tensor is not None:
            return saved.tensor
        assert saved.stand_in is not None
        with self._not_watching():
            made = saved.stand_in()
        self._follow(made, OWNED)
        return made

    def _moment(self) -> Seen:
        """What is picked up belongs to the op that follows; until one does, it has a moment of its own."""
        ops = self._here.ops
        if not ops or ops[-1].name or ops[-1].releases:
            ops.append(Seen())
        return ops[-1]

    def _take_moment(self) -> list[int]:
        ops = self._here.ops
        return ops.pop().unpacks if ops and not ops[-1].name and not ops[-1].releases else []

    def release_outside(self, number: int) -> None:
        """Autograd has let a tensor go that it saved outside the layers."""
        if self._is_watching and number != OWNED:
            self.memories[number].let_go = (self._here, len(self._here.ops))

    def release(self, place: Place, position: int) -> None:
        """Autograd has let a tensor go that it saved in a layer."""
        if not self._is_watching:
            return
        ops = self._place(place.layer, in_layer=True, backward=True).ops
        if not ops:
            ops.append(Seen())
        ops[-1].releases.append(position)


class _Saved:
    """What autograd holds in place of a tensor: the tensor, or what makes one to stand in for it."""

    __slots__ = ("_recorder", "number", "place", "position", "stand_in", "tensor")

    def __init__(
        self,
        recorder: StepRecorder,
        place: Place,
        position: int | None,
        tensor: Tensor | None,
        stand_in: Callable[[], Tensor] | None = None,
        number: int = OWNED,
    ) -> None:
        self.number = number
        self._recorder = recorder
        self.place = place
        self.position = position
        self.tensor = tensor
        self.stand_in = stand_in

    def __del__(self) -> None:
        if self.position is None:
            self._recorder.release_outside(self.number)
        else:
            self._recorder.release(self.place, self.position)


class _Runner:
    def __init__(self, recorder: StepRecorder, layer: int) -> None:
        self._recorder = recorder
        self._layer = layer

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._recorder.in_layer(self._layer, tensors_in((*args, *kwargs.values()))):
            return forward(*args, **kwargs)


def _is_plain(tensor: Tensor) -> bool:
    """Whether nothing but its storage and where its numbers lie in it makes up a tensor."""
    odd = tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()
    return type(tensor) in (Tensor, nn.Parameter) and not odd


def _view_of(storage: UntypedStorage, dtype: torch.dtype, offset: int, *where: Sequence[int]) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, *where)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
