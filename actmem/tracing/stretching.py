"""A step of a deep stack of layers, told from the step of a short one.

Layers that are built alike do the same, so that to trace all of them again for another batch tells little that is new.
A model cut down to a few of its layers is traced in a fraction of the time. How the whole step follows from the short
one is learnt from one batch on which both were traced: the middle layers repeat, and so do ops outside the layers that
run once for each of them, such as a loss on what all routers gave. Where the whole step does not come out exactly,
nothing is learnt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from actmem.graph import Gap, Graph, StepOp

NUM_LAYERS = 4
"""Of a short stack: a first, a last, and two that have layers on either side."""


def shortened(model: PreTrainedModel, layers: Sequence[str]) -> PreTrainedModel | None:
    """A copy of `model` with a few of its `layers` only; ``None`` where they are not just what one list holds, or are
    few as it is."""
    parents = {name.rpartition(".")[0] for name in layers}
    if len(parents) != 1 or len(layers) <= NUM_LAYERS:
        return None
    short = copy.deepcopy(model)
    stack = short.get_submodule(parents.pop())
    if not isinstance(stack, nn.ModuleList) or len(stack) != len(layers):
        return None
    del stack[NUM_LAYERS:]
    short.config.num_hidden_layers = NUM_LAYERS
    return short


@dataclass(frozen=True)
class Stretching:
    """How the step of a short stack, `short`, becomes that of the `whole` one, on the batch of both and on others."""

    short: Graph
    whole: Graph
    first: _Repeats
    last: _Repeats

    @classmethod
    def learnt(cls, short: Graph, whole: Graph) -> Stretching | None:
        """The way from one to the other; ``None`` where that does not give the `whole` to the last byte."""
        assert short.step is not None and whole.step is not None
        more = len(whole.layers) - len(short.layers)
        ends = (_Repeats.between(short.step.gaps[end], whole.step.gaps[end], more) for end in (0, -1))
        found = cls(short, whole, *ends)
        return found if found.of(short) == whole else None

    def of(self, short: Graph) -> Graph | None:
        """The whole step on the batch of another short one; ``None`` where that one runs otherwise than `self.short`,
        has layers of several kinds, or has something between two of them that is not between all."""
        step, known, whole = short.step, self.short.step, self.whole.step
        assert step is not None and known is not None and whole is not None
        is_even = len(short.kinds) == 1 and len(set(step.gaps[1:-1])) == 1
        if not is_even or step.calls != known.calls or not self._fits(step.gaps, known.gaps):
            return None
        (kind,) = short.kinds
        between = step.gaps[1:2] * (len(self.whole.layers) - 1)
        gaps = (self.first.applied(step.gaps[0]), *between, self.last.applied(step.gaps[-1]))
        made_for = self.whole.made_for
        if made_for is not None and short.made_for is not None:
            made_for = replace(made_for, inputs=short.made_for.inputs)
        return Graph(
            layers=dict.fromkeys(self.whole.layers, kind),
            kinds=short.kinds,
            step=replace(whole, gaps=gaps, num_tokens=step.num_tokens, constants=step.constants),
            made_for=made_for,
        )

    def _fits(self, gaps: Sequence[Gap], known: Sequence[Gap]) -> bool:
        pairs = (self.first, gaps[0], known[0]), (self.last, gaps[-1], known[-1])
        return all(repeats.fits(gap, other) for repeats, gap, other in pairs)


@dataclass(frozen=True)
class _Repeat:
    """Ops that run once more for each of `times` more layers: those `length` ones that come before the `end`-th."""

    end: int = 0
    length: int = 0
    times: int = 0

    @classmethod
    def between(cls, few: Sequence[StepOp], many: Sequence[StepOp], times: int) -> _Repeat:
        """What makes `many` of `few`, if anything does."""
        end = next((index for index, pair in enumerate(zip(few, many, strict=False)) if pair[0] != pair[1]), len(few))
        return cls(end, (len(many) - len(few)) // times, times)

    def fits(self, ops: Sequence[StepOp], known: Sequence[StepOp]) -> bool:
        """Whether what holds for `known` ops holds for others."""
        return not self.length or [op.name for op in ops] == [op.name for op in known]

    def applied(self, ops: tuple[StepOp, ...]) -> tuple[StepOp, ...]:
        return (*ops[: self.end], *ops[self.end - self.length : self.end] * self.times, *ops[self.end :])


@dataclass(frozen=True)
class _Repeats:
    """The same for both parts of a gap."""

    forward: _Repeat
    backward: _Repeat

    @classmethod
    def between(cls, few: Gap, many: Gap, times: int) -> _Repeats:
        return cls(
            _Repeat.between(few.forward, many.forward, times), _Repeat.between(few.backward, many.backward, times)
        )

    def fits(self, gap: Gap, known: Gap) -> bool:
        return self.forward.fits(gap.forward, known.forward) and self.backward.fits(gap.backward, known.backward)

    def applied(self, gap: Gap) -> Gap:
        return Gap(self.forward.applied(gap.forward), self.backward.applied(gap.backward))
