"""What a training step does beside the ops of its layers: the backward passes, and whatever stands outside the layers.

Here the plan decides nothing, so an op is only what it costs: its time, and the memory that comes and goes with it.
Bytes are noted where they come and where they go, without saying which is which; a gradient that one layer hands to the
next comes with an op of the one and goes with an op of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


def signature_of(name: str, operands: Iterable[tuple[tuple[int, ...], str]]) -> str:
    """``mm(1024x512 float32, 512x512 float32)``."""
    return f"{name}({', '.join('x'.join(map(str, shape)) + ' ' + dtype for shape, dtype in operands)})"


@dataclass(frozen=True, slots=True)
class StepOp:
    """One ATen call, or, with an empty `name`, a moment at which autograd only picks up or lets go of saved tensors.

    `unpacks`: positions in the region's `packed` that autograd picks up just before; it lets go of `releases` just
    after. `allocated_bytes` come with its outputs and `freed_bytes` go before the next op begins; `gradient_bytes` of
    those that come are a parameter's gradient and stay. `accumulated_bytes` are those of gradients, this op's or
    earlier ones', that autograd adds, just after, to such as stand already. An op that makes a parameter's gradient
    reads `upstream_bytes` of other gradients. `signature` tells name, shapes and dtypes. `scratch_bytes` are what its
    kernel takes for itself while it runs, where the step was traced; ``None`` where nobody looked.
    """

    name: str
    signature: str
    flops: int
    moved_bytes: int
    compute_intensive: bool
    allocated_bytes: int
    freed_bytes: int
    gradient_bytes: int = 0
    accumulated_bytes: int = 0
    unpacks: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()
    group_size: int = 0
    upstream_bytes: int = 0
    scratch_bytes: int | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepOp:
        """The op whose `asdict` this is."""
        return cls(**{**data, "unpacks": tuple(data["unpacks"]), "releases": tuple(data["releases"])})


@dataclass(frozen=True, slots=True)
class Escape:
    """A storage that outlives the call that made it, for reasons that no plan changes: Python, or an op outside the
    layers, refers to it. It goes just before op number `op` of the forward (or backward) part of `gap`; see `Outside`.
    """

    storage: int
    gap: int
    backward: bool
    op: int


@dataclass(frozen=True, slots=True)
class Constant:
    """Memory made outside the layers that is an input to some of them and needs no gradient, such as a mask. It is let
    go just before op number `op` of the forward (or backward) part of `gap`, unless a layer holds it for longer."""

    number: int
    num_bytes: int
    gap: int
    backward: bool
    op: int


@dataclass(frozen=True)
class Standing:
    """Bytes that stand through the whole step: parameters, buffers, their gradients once all are made, and what the
    optimizer keeps."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    def __add__(self, other: Standing) -> Standing:
        """What stands of two parts of a model together."""
        return Standing(
            self.parameters + other.parameters,
            self.buffers + other.buffers,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


@dataclass(frozen=True)
class Gap:
    """What runs outside the layers at one place of the model: before the first layer, between two, or after the last,
    the loss included. `backward` runs after the backward pass of the layer behind it, or first of all."""

    forward: tuple[StepOp, ...] = ()
    backward: tuple[StepOp, ...] = ()


@dataclass(frozen=True)
class Call:
    """One layer's call in the step. `shared`: those of its storages that other calls refer to as well, each with a
    number that all of them have for it; `escapes`: those of its own that outlive it; `constants`: numbers of those
    inputs that are `Constant`."""

    shared: tuple[tuple[int, int], ...] = ()
    escapes: tuple[Escape, ...] = ()
    constants: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Step:
    """A whole training step around its layers: `calls` of the layers in order, and one more `gaps` than there are
    layers."""

    calls: tuple[Call, ...]
    gaps: tuple[Gap, ...]
    standing: Standing
    num_tokens: int
    constants: tuple[Constant, ...] = ()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Step:
        """The step whose `asdict` this is."""
        return cls(
            calls=tuple(
                Call(
                    tuple((a, b) for a, b in call["shared"]),
                    tuple(Escape(**each) for each in call["escapes"]),
                    tuple((a, b) for a, b in call["constants"]),
                )
                for call in data["calls"]
            ),
            gaps=tuple(
                Gap(tuple(map(StepOp.from_dict, gap["forward"])), tuple(map(StepOp.from_dict, gap["backward"])))
                for gap in data["gaps"]
            ),
            standing=Standing(**data["standing"]),
            num_tokens=data["num_tokens"],
            constants=tuple(Constant(**each) for each in data["constants"]),
        )
