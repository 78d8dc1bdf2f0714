"""The graph of one region call.

An op reads and writes *values*; each value lies in a *storage*, and views share theirs. Bytes belong to storages, so a
fate is decided for a storage: whoever holds it holds every view of it. `packed` lists what autograd saved for the
backward pass, once for each time it did.

An in-place edit starts a new storage in the graph: the contents before and after are different things, though the
memory is the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from actmem.graph.step import StepOp, signature_of

StorageKind = Literal["op", "input", "parameter"]

COMMUNICATION = "communication"
"""Why what a collective made is saved, unless a plan asks for that collective to be issued again."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory behind one or more values, `num_bytes` long.

    `kept` is the reason why it is always saved (``None``: it may be recomputed). `edited` says that its memory was
    overwritten later in the region, so that these contents can be recomputed but not held. `constant` marks an input
    that needs no gradient (masks, rotary tables): all layers share it, so nobody gains by moving it away. `spread` says
    that it is asked for as a DTensor, which is not swapped. `named_until` is the op of the forward pass through which
    Python's names stand for it, where that was traced and is later than the last op that reads it.
    """

    num_bytes: int
    kind: StorageKind
    kept: str | None = None
    edited: bool = False
    constant: bool = False
    spread: bool = False
    named_until: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: where it lies, what shape and dtype it has, which op made it (``None``: it came from outside)."""

    storage: int
    shape: tuple[int, ...]
    dtype: str
    producer: int | None


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen call. `inputs` and `outputs` are indices of values; `moved_bytes` counts bytes read plus written.

    `compute_intensive` marks what policies such as `selective` never re-run: matmuls, attention, convolutions and
    custom ops. `view` ops move nothing: their outputs share an input's storage. `group_size` is the number of ranks in
    a collective, 0 for other ops. `scratch_bytes` are what its kernel takes for itself while it runs, where it was
    traced; ``None`` where nobody looked.
    """

    path: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    view: bool
    compute_intensive: bool
    flops: int
    moved_bytes: int
    group_size: int = 0
    scratch_bytes: int | None = None


@dataclass(frozen=True)
class RegionGraph:
    """All that one call of a region did, in order. `backward`: its backward pass where nothing is recomputed; empty
    where only the forward pass was traced."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    packed: tuple[int, ...]
    module: str = field(default="")
    backward: tuple[StepOp, ...] = ()

    @cached_property
    def packed_counts(self) -> Counter[int]:
        """How often autograd saved each value."""
        return Counter(self.packed)

    @cached_property
    def packed_storages(self) -> frozenset[int]:
        """Storages that the unplanned backward pass holds, parameters left out."""
        storages = {self.values[index].storage for index in self.packed}
        return frozenset(index for index in storages if self.storages[index].kind != "parameter")

    @cached_property
    def creators(self) -> dict[int, int]:
        """The op that made each storage (inputs and parameters have none)."""
        creators: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for output in op.outputs:
                storage = self.values[output].storage
                if self.storages[storage].kind == "op":
                    creators.setdefault(storage, index)
        return creators

    def signature(self, index: int) -> str:
        """Name, shapes and dtypes of an op: two that have it in common take the same time."""
        op = self.ops[index]
        return signature_of(op.name, [(self.values[each].shape, self.values[each].dtype) for each in op.inputs])

    def num_bytes(self, storages: frozenset[int] | set[int]) -> int:
        """Bytes of some storages together."""
        return sum(self.storages[index].num_bytes for index in storages)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RegionGraph:
        """The graph that `to_dict` wrote."""
        return cls(
            ops=tuple(
                Op(**{**op, "inputs": tuple(op["inputs"]), "outputs": tuple(op["outputs"])}) for op in data["ops"]
            ),
            values=tuple(Value(**{**value, "shape": tuple(value["shape"])}) for value in data["values"]),
            storages=tuple(Storage(**storage) for storage in data["storages"]),
            packed=tuple(data["packed"]),
            module=data["module"],
            backward=tuple(map(StepOp.from_dict, data["backward"])),
        )
