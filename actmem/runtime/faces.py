"""Two faces of one value: a tensor subclass of `torch.distributed`, and the tensor inside it.

A DTensor is made around a collective's result, or its local part handed out, by Python alone: no op tells of it. The
tape notices when it meets the other face of a value that it knows, and puts an op of ours between the two. So chains go
through them, and nothing is held only because it changed its face.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from actmem._compat import inside
from actmem.runtime.kinds import distributed_types


def without_face(tensor: Tensor) -> Tensor:
    """The tensor inside, or the tensor itself: what was one of those subclasses when it was recorded may be plain when
    it is made again, since a replayed op is called below them."""
    inner = inner_of(tensor)
    return tensor if inner is None else inner


def inner_of(tensor: Any) -> Tensor | None:
    """The tensor inside a subclass of `torch.distributed`; ``None`` for all others."""
    return inside(tensor) if type(tensor) in distributed_types() else None
