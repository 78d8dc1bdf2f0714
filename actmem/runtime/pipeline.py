"""Swapping under a pipeline: what leaves, and when it comes back, follows the order in which a rank runs its actions.

Between the forward pass of a micro-batch and its backward pass a rank runs other micro-batches, so the way back cannot
go by the order of layers alone. The rank's order is the same in every step: it is seen in the first one. From then on
the reloads for the next backward pass start before the last action ahead of it, and what would come back at once does
not leave. The schedule itself is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from actmem.runtime.swap.swapper import Swapper


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


class PipelineSwaps:
    """Tells a swapper which group runs, and which one will.

    What is picked up again after fewer than `least_gap` other actions of the rank stays where it is.
    """

    def __init__(self, swapper: Swapper | None, *, least_gap: int = 1) -> None:
        self.order: tuple[PipelineAction, ...] = ()
        self._swapper = swapper
        self._least_gap = least_gap
        self._seen: list[PipelineAction] = []
        self._gaps: dict[Group, int] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step runs inside."""
        self._seen = []
        try:
            yield
        finally:
            if self._swapper is not None:
                self._swapper.enter_group(None)
        if self.order != tuple(self._seen):
            self.order = tuple(self._seen)
            self._gaps = gaps_of(self.order)

    @contextmanager
    def action(self, action: PipelineAction) -> Iterator[None]:
        """One action runs inside."""
        index = len(self._seen)
        self._seen.append(action)
        if self._swapper is not None:
            stays = self._gaps.get(action.group, self._least_gap) < self._least_gap
            self._swapper.enter_group(action.group, swaps=not stays)
            following = self.order[index + 1] if len(self.order) > index + 1 else None
            if following is not None and following.reads_saved and following.group != action.group:
                self._swapper.expect(following.group)
        yield


def gaps_of(order: tuple[PipelineAction, ...]) -> dict[Group, int]:
    """How many actions of a rank lie between each group's forward pass and the first that reads what it saved."""
    forwards: dict[Group, int] = {}
    gaps: dict[Group, int] = {}
    for index, action in enumerate(order):
        if not action.reads_saved:
            forwards[action.group] = index
        elif action.group in forwards:
            gaps.setdefault(action.group, index - forwards[action.group] - 1)
    return gaps
