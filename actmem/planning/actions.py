"""What a rank of a pipeline does, in which order: forward and backward passes of micro-batches through its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Group(NamedTuple):
    """One micro-batch in one stage: what is swapped in its forward pass comes back for its backward pass."""

    stage: int
    microbatch: int


class PipelineAction(NamedTuple):
    """One thing that a schedule has a rank compute: a forward pass, a backward pass or, where a schedule parts them,
    the backward pass to the inputs and the one to the weights."""

    kind: Literal["forward", "backward", "input", "weight"]
    group: Group

    @property
    def reads_saved(self) -> bool:
        """Whether what the forward pass saved is picked up."""
        return self.kind != "forward"


def gaps_of(order: Sequence[PipelineAction]) -> dict[Group, int]:
    """How many actions of a rank lie between each group's forward pass and the first that reads what it saved."""
    forwards: dict[Group, int] = {}
    gaps: dict[Group, int] = {}
    for index, action in enumerate(order):
        if not action.reads_saved:
            forwards[action.group] = index
        elif action.group in forwards:
            gaps.setdefault(action.group, index - forwards[action.group] - 1)
    return gaps
