"""What kernels take for themselves while they run.

A trace knows what goes into an op and what comes out. What its kernel takes in between, such as copies of operands that
lie badly, sums in float32, or a buffer for each thread, only the device knows. So each call that a step makes, one of a
kind, is run by itself on operands that look like the step's own, and the allocator is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actmem._compat import local_part, storage_bytes, storage_id
from actmem.graph import COMMUNICATION
from actmem.memory import peaks_of_calls
from actmem.runtime.kinds import Kind
from actmem.runtime.learning import tensors_in

_MOST_FLOPS = {"cpu": 2**35}
_MOST_BYTES = {"cpu": 2**29}
"""Of a call that is run for this, operands alone: it takes about a second at most. Accelerators have no such limit."""
_CANNOT_RUN_ALONE = (RuntimeError, ValueError, IndexError, TypeError)
"""What a call raises that cannot do with operands of zeros, or with one rank's part of a tensor."""


class Kernels:
    """The calls of a step, one of a kind, to be run again on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: dict[Hashable, _Call] = {}

    def note(self, signature: str, func: Any, kind: Kind, args: Any, kwargs: Any, flops: int) -> None:
        """A call goes by. Two are of a kind that differ in nothing but numbers."""
        operands = [local_part(each) for each in tensors_in((*args, *kwargs.values()))]
        if kind.view or kind.kept == COMMUNICATION or not operands or self._is_too_large(operands, flops):
            return
        settings = str([each for each in (*args, *kwargs.items()) if not tensors_in((each,))])
        key = (func, signature, tuple([each.stride() for each in operands]), settings)
        if key not in self._calls:
            looks = [_look_of(each) for each in args], {name: _look_of(each) for name, each in kwargs.items()}
            self._calls[key] = _Call(signature, func, *looks)

    def scratch_bytes(self) -> dict[str, int]:
        """By signature, the most bytes that a call had allocated beside its results; those that cannot be made by
        themselves are missing."""
        found: dict[str, int] = {}
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            standing = {call: size for call in self._calls.values() if (size := call.try_out(self._device)) is not None}
            peaks = peaks_of_calls([partial(call.run, self._device) for call in standing], self._device)
        for (call, stands), peak in zip(standing.items(), peaks, strict=True):
            found[call.signature] = max(peak - stands, found.get(call.signature, 0))
        return found

    def _is_too_large(self, operands: Sequence[Tensor], flops: int) -> bool:
        kind, num_bytes = self._device.type, sum(map(storage_bytes, operands))
        return flops > _MOST_FLOPS.get(kind, flops) or num_bytes > _MOST_BYTES.get(kind, num_bytes)


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

    def zeros(self, device: torch.device) -> Tensor:
        last = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        memory = torch.zeros(last + 1 if all(self.shape) else 0, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.stride)


def _look_of(item: Any) -> Any:
    """The same with looks in place of tensors."""
    if isinstance(item, (list, tuple)):
        return [_look_of(each) for each in item]
    if not isinstance(item, Tensor):
        return item
    tensor = local_part(item)
    return _Look(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _made(item: Any, device: torch.device) -> Any:
    """The same with tensors in place of looks."""
    if isinstance(item, list):
        return [_made(each, device) for each in item]
    return item.zeros(device) if isinstance(item, _Look) else item
