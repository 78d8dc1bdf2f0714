"""Swapping under a pipeline: what leaves, and when it comes back, follows the order in which a rank runs its actions.

Between the forward pass of a micro-batch and its backward pass a rank runs other micro-batches, so the way back cannot
go by the order of layers alone. The rank's order is the same in every step: it is seen in the first one. From then on
the reloads for the next backward pass start before the last action ahead of it, and what would come back at once does
not leave. The schedule itself is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actmem.planning.actions import Group, PipelineAction, gaps_of
from actmem.runtime.swap.swapper import Swapper


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
