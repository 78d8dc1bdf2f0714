"""A digest of a tensor's bits, taken on its device: equal tensors have equal digests, and a change anywhere shows.

The bits are read as 64-bit integers in a matrix; row sums and column sums, each weighted by position, are added modulo
2^64. Two elements that trade places change the weights under which they count. No copy of the tensor is made unless it
is not contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROW = 4096


class Digest(NamedTuple):
    """`bits` stays on the tensor's device, so that taking a digest waits for nothing."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: Tensor | None

    def matches(self, other: Digest) -> bool:
        """Whether both stand for the same numbers; waits for the device."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        return self.bits is None or other.bits is None or bool(torch.equal(self.bits, other.bits))


@torch.no_grad()
def digest_of(tensor: Tensor) -> Digest:
    """The digest of a tensor; of the local part for a distributed one. Fake tensors have only shape and dtype."""
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local) not in (Tensor, torch.nn.Parameter):
        return Digest(tuple(tensor.shape), tensor.dtype, None)
    flat = local.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64) if _is_aligned(flat) else flat[:whole].clone().view(torch.int64)
    rows = words.numel() // _ROW * _ROW
    matrix = words[:rows].view(-1, _ROW)
    parts = (matrix.sum(0), matrix.sum(1), words[rows:], flat[whole:].to(torch.int64))
    return Digest(tuple(tensor.shape), tensor.dtype, torch.stack([_weighted(part) for part in parts]))


def _weighted(words: Tensor) -> Tensor:
    weights = torch.arange(words.numel(), device=words.device) * 2 + 1
    return (words * weights).sum()


def _is_aligned(flat: Tensor) -> bool:
    return flat.storage_offset() % 8 == 0
