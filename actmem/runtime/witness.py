"""Whether a tensor is still what it was: its version, its address, and a witness that outlives its memory."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem._compat import is_fake

Witness = Tensor | weakref.ref[Tensor]

LOST = -1
"""The version of a source that no longer holds what was read from it: somebody put other memory behind the tensor."""

FREED = -2
"""The version of a source whose memory its owner has freed for now: FSDP2, that of a parameter of a module inside the
region. It is back when the backward pass is in that module."""


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been edited; -1 for inference tensors, which do not count."""
    return -1 if tensor.is_inference() else tensor._version


def address_of(tensor: Tensor) -> int:
    """Where a plain tensor's numbers lie; 0 for tensors that do not say."""
    return tensor.data_ptr() if type(tensor) is Tensor and tensor.layout is torch.strided else 0


def witness_of(tensor: Tensor) -> Witness | None:
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
