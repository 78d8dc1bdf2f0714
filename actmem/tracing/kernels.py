"""What kernels take for themselves while they run.

A trace knows what goes into an op and what comes out. What its kernel takes in between, such as copies of operands that
lie badly, sums in float32, or a buffer for each thread, only the device knows. So each call that a step makes, one of a
kind, is run by itself on operands that look like the step's own, and the allocator is watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actmem._compat import is_profiling, local_part, negated, storage_bytes, storage_id
from actmem.graph import COMMUNICATION
from actmem.memory import peaks_of_calls
from actmem.runtime.kinds import Kind
from actmem.runtime.learning import tensors_in

_UNLIMITED = 2**62
_MOST_FLOPS = {"cpu": 2**34}
_MOST_BYTES = {"cpu": 2**29}
"""Of a call that is run for this, its operands or its results: it takes less than a second. Accelerators have no such
limit."""
_MOST_OF_ALL = 16
"""So many times as much may all calls together take."""
_one_at_a_time = threading.Lock()
_CANNOT_RUN_ALONE = (RuntimeError, ValueError, IndexError, TypeError)
"""What a call raises that cannot do with operands of zeros, or with one rank's part of a tensor."""


class Kernels:
    """The calls of a step, one of a kind, to be run again on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: dict[Hashable, _Call] = {}
        self._flops_left = _MOST_OF_ALL * _MOST_FLOPS.get(device.type, _UNLIMITED)
        self._bytes_left = _MOST_OF_ALL * _MOST_BYTES.get(device.type, _UNLIMITED)

    def note(
        self, signature: str, func: Any, kind: Kind, args: Any, kwargs: Any, flops: int, results: Sequence[Tensor]
    ) -> None:
        """A call goes by. Two are of a kind that differ in nothing but numbers. Custom ops are left alone: what they do
        with operands of zeros is not known."""
        operands = [local_part(each) for each in tensors_in((*args, *kwargs.values()))]
        if kind.view or kind.custom or kind.kept == COMMUNICATION or not operands:
            return
        if any(each.layout is not torch.strided or each.is_nested for each in operands):
            return
        settings = str([each for each in (*args, *kwargs.items()) if not tensors_in((each,))])
        key = (func, signature, tuple([(each.stride(), each.is_conj(), each.is_neg()) for each in operands]), settings)
        if key not in self._calls and self._may_take(operands, results, flops):
            looks = [_look_of(each) for each in args], {name: _look_of(each) for name, each in kwargs.items()}
            self._calls[key] = _Call(signature, func, *looks)

    def scratch_bytes(self) -> dict[str, int]:
        """By signature, the most bytes that a call had allocated beside its results; those that cannot be made by
        themselves are missing."""
        found: dict[str, int] = {}
        if is_profiling():  # which another profile, of memory, would end
            return found
        with _one_at_a_time, torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            standing = {call: size for call in self._calls.values() if (size := call.try_out(self._device)) is not None}
            peaks = peaks_of_calls([partial(call.run, self._device) for call in standing], self._device)
        for (call, stands), peak in zip(standing.items(), peaks, strict=True):
            found[call.signature] = max(peak - stands, found.get(call.signature, 0))
        return found

    def _may_take(self, operands: Sequence[Tensor], results: Sequence[Tensor], flops: int) -> bool:
        """Whether a call is small enough, by itself and beside all others; if so it counts."""
        kind, num_bytes = self._device.type, max(sum(map(storage_bytes, each)) for each in (operands, results))
        is_small = flops <= _MOST_FLOPS.get(kind, _UNLIMITED) and num_bytes <= _MOST_BYTES.get(kind, _UNLIMITED)
        fits = is_small and flops <= self._flops_left and num_bytes <= self._bytes_left
        if fits:
            self._flops_left -= flops
            self._bytes_left -= num_bytes
        return fits


@dataclass(frozen=True, eq=False)
class _Call:
    """A call with the looks of its tensors in place of them."""

    signature: str
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Operands of zeros, and the results of the call on them."""
        args = [_made(each, device) for each in self.args]
        kwargs = {name: _made(each, device) for name, each in self.kwargs.items()}
        results = self.func(*args, **kwargs)
        return tensors_in((*args, *kwargs.values())), tensors_in((results,))

    def try_out(self, device: torch.device) -> int | None:
        """The bytes of operands and results; ``None`` where the call fails."""
        try:
            operands, results = self.run(device)
        except _CANNOT_RUN_ALONE:
            return None
        return sum({storage_id(each): storage_bytes(each) for each in (*operands, *results)}.values())


@dataclass(frozen=True)
class _Look:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def made(self, device: torch.device) -> Tensor:
        """One of zeros; a mask takes all there is, which is when what it selects takes the most."""
        last = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        make = torch.ones if self.dtype is torch.bool else torch.zeros
        made = make(last + 1 if all(self.shape) else 0, dtype=self.dtype, device=device)
        made = made.as_strided(self.shape, self.stride)
        made = negated(made) if self.is_neg else made
        return made.conj() if self.is_conj else made


def _look_of(item: Any) -> Any:
    """The same with looks in place of tensors."""
    if isinstance(item, (list, tuple)):
        return [_look_of(each) for each in item]
    if not isinstance(item, Tensor):
        return item
    tensor = local_part(item)
    return _Look(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _made(item: Any, device: torch.device) -> Any:
    """The same with tensors in place of looks."""
    if isinstance(item, list):
        return [_made(each, device) for each in item]
    return item.made(device) if isinstance(item, _Look) else item
