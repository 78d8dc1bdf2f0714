"""One storage's life away from the device, and the tensors that look into it.

    here --offload--> leaving --copy confirmed--> away --reload--> coming --first use--> here --last use--> away

A storage that is asked for while it is leaving simply stays. The place in the tier is kept until nobody refers to the
storage any more, so a second pass over a retained graph finds it there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem._compat import storage_id, storage_reference
from actmem.planning.plan import Tier
from actmem.runtime.digest import Digest
from actmem.runtime.swap.tier import Copy, Reload
from actmem.runtime.witness import witness_of

_ALIGNMENT = 16  # of any dtype's element; memory that somebody else allocated may begin anywhere


class SwapOrder(NamedTuple):
    """That a storage is to be swapped: the path that its rule matched, and the tier if the rule names one."""

    path: str
    tier: Tier | None


class SwappedStorage:
    """All bytes of a storage: in `data` while they are here, in `copy` once that is confirmed.

    `identity` is the storage's id, which no other storage gets while `reference` is here.
    `uses` counts those who will ask for them in one pass over the graph, `done` those who have.
    """

    __slots__ = (
        "__weakref__",
        "copy",
        "data",
        "digest",
        "done",
        "has_copy",
        "identity",
        "is_wanted",
        "num_bytes",
        "path",
        "reference",
        "region",
        "reload",
        "uses",
        "version",
        "witness",
    )

    def __init__(self, tensor: Tensor, data: Tensor, copy: Copy, region: str, path: str) -> None:
        self.identity = storage_id(tensor)
        self.reference = storage_reference(tensor)
        self.version = tensor._version
        self.witness = witness_of(tensor)
        self.num_bytes = data.numel()
        self.data: Tensor | None = data
        self.copy: Copy | None = copy
        self.has_copy = False
        self.is_wanted = False
        self.reload: Reload | None = None
        self.digest: Digest | None = None
        self.region = region
        self.path = path
        self.uses = 0
        self.done = 0


class SwappedView(NamedTuple):
    """A tensor in a swapped storage."""

    storage: SwappedStorage
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, storage: SwappedStorage) -> SwappedView:
        """How `tensor` looks into its storage."""
        return cls(storage, int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype)

    def look_into(self, data: Tensor) -> Tensor:
        """The tensor again, in the bytes `data`, which need not begin where their own storage does."""
        view = torch.empty(0, dtype=self.dtype, device=data.device)
        begin = int(data.storage_offset()) // view.element_size()
        return view.set_(data.untyped_storage(), begin + self.offset, self.size, self.stride)


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, as `uint8`."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def can_be_swapped(tensor: Tensor) -> bool:
    """Whether bytes, offset, size and stride say all there is to say about a tensor, and it is no part of a parameter,
    nor one of those integers that are always saved."""
    return (
        type(tensor) is Tensor
        and not isinstance(tensor._base, Parameter)
        and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.untyped_storage().nbytes() > 0
        and tensor.untyped_storage().data_ptr() % _ALIGNMENT == 0
    )
