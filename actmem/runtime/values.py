"""What a tape is made of: the values of one region call, the ops that make them, and the handles that autograd keeps.

Ownership. handle -> Value -> Op -> operand Values: Python's own reference counts free a value with the last handle
that needs it. An Op refers to its outputs only weakly, and no held tensor carries a `grad_fn` once the tape is
closed, so there are no cycles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from actmem.runtime.digest import Digest
from actmem.runtime.swap.storage import SwappedView
from actmem.runtime.swap.swapper import CallSwaps
from actmem.runtime.witness import Witness, address_of


class Value:
    """A tensor of the region call: made by `op` and to be made again, held in `tensor`, or `swapped` (then `witness`
    tells its version).

    `uses` counts the handles and the ops on the tape that read it, `done` those of them that have read it in this pass
    over the graph. `memo` keeps a recomputed tensor until all have. `origin`, `version` and `address` tell whether a
    tensor met later is still this value.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "digest",
        "done",
        "memo",
        "op",
        "origin",
        "swapped",
        "tensor",
        "uses",
        "version",
        "witness",
    )

    def __init__(self, op: Op | None, origin: Tensor, version: int) -> None:
        self.op = op
        self.origin = weakref.ref(origin)
        self.version = version
        self.address = address_of(origin)
        self.tensor: Tensor | None = None
        self.swapped: SwappedView | None = None
        self.witness: Witness | None = None
        self.memo: Tensor | None = None
        self.uses = 0
        self.done = 0
        self.digest: Digest | None = None


class Op:
    """A call that can be made again. `args` and `kwargs` have `Value`s where it had tensors; `outputs` are weak."""

    __slots__ = ("args", "call", "func", "inputs", "kwargs", "outputs", "path")

    def __init__(self, func: Callable[..., Any], path: str, call: RegionCall) -> None:
        self.func = func
        self.path = path
        self.call = call
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] | None = None
        self.inputs: list[Value] = []
        self.outputs: weakref.ref[Value] | list[weakref.ref[Value] | None] | None = None


class RegionCall:
    """What all handles and ops of one region call share: the region's name, what happened in its backward pass, whether
    a tensor lies in the model's own parameters and buffers (`owns`), and what was swapped (``None``: nothing may)."""

    __slots__ = ("counters", "device_type", "owns", "region", "swaps")

    def __init__(
        self,
        region: str,
        device_type: str,
        counters: ReplayCounters,
        owns: Callable[[Tensor], bool],
        swaps: CallSwaps | None = None,
    ) -> None:
        self.owns = owns
        self.swaps = swaps
        self.region = region
        self.device_type = device_type
        self.counters = counters


class ReplayCounters:
    """Counts of one region, over all its calls."""

    __slots__ = ("num_replayed_ops", "num_unpacks", "num_verified")

    def __init__(self) -> None:
        self.num_replayed_ops = 0
        self.num_unpacks = 0
        self.num_verified = 0


class Handle:
    """What autograd keeps in place of a tensor: the tensor itself, or the `value` to make it from; and its version when
    it was saved. `witness` tells the version of a tensor that was let go. `is_source` says that ops on the tape read
    the held tensor too."""

    __slots__ = ("call", "is_source", "tensor", "value", "version", "witness")

    def __init__(self, call: RegionCall, version: int, tensor: Tensor | None = None) -> None:
        self.call = call
        self.version = version
        self.tensor = tensor
        self.value: Value | None = None
        self.witness: Witness | None = None
        self.is_source = False
