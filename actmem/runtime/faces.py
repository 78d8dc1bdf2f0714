"""Two faces of one value: a tensor subclass of `torch.distributed`, and the plain tensor inside it.

A DTensor is made around a collective's result, or its local part handed out, by Python alone: no op tells of it. The
tape notices when it meets the other face of a value that it knows, and puts an op of ours between the two. So chains go
through them, and nothing is held only because it changed its face.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from actmem.runtime.kinds import distributed_types


def inner_of(tensor: Any) -> Tensor | None:
    """The one plain tensor inside a tensor subclass of `torch.distributed`; ``None`` for all others."""
    if type(tensor) not in distributed_types():
        return None
    (name, *others), _ = tensor.__tensor_flatten__()
    return None if others else getattr(tensor, name)


def wrapping(like: Any) -> Callable[[Tensor], Tensor]:
    """A function that puts another tensor inside a subclass, as one is inside `like`."""
    (name, *_), context = like.__tensor_flatten__()
    kind, size, stride = type(like), like.size(), like.stride()

    def wrap(inner: Tensor) -> Tensor:
        wrapped: Tensor = kind.__tensor_unflatten__({name: inner}, context, size, stride)
        return wrapped

    return wrap
