"""What stands around the layers while each of them runs, and how long the gaps between them take: all of a step that no
plan changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actmem.graph import Constant, Escape, Graph, RegionGraph, StepOp
from actmem.planning.course import Costs


@dataclass(frozen=True, slots=True)
class GapCourse:
    """One gap in one direction: its seconds, the most that stands in it, and at which op; `gradient_bytes` of that are
    gradients that this step has made. Bytes without the layers'."""

    seconds: float
    peak_bytes: int
    peak_op: str
    gradient_bytes: int


@dataclass(frozen=True)
class Surroundings:
    """Bytes that stand outside the layers' own memory when each layer's forward or backward pass begins, gradients that
    layers behind it have made included, which are `gradient_bytes`, and the gaps. `kept_bytes` of them come with the
    forward pass and stand when it is over. `upstream_bytes` of gradients have to stay where those of the weights are
    made later."""

    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    forward_gaps: tuple[GapCourse, ...]
    backward_gaps: tuple[GapCourse, ...]
    kept_bytes: int
    upstream_bytes: int

    @property
    def seconds(self) -> float:
        """Of all gaps together."""
        return sum(gap.seconds for gap in (*self.forward_gaps, *self.backward_gaps))


Outlasting = int | tuple[int, int]
"""What names a storage that outlives its call: the number that all calls have for it, or its call and its own index."""


def stands_longer(outlasting: Escape | Constant, holder: int) -> bool:
    """Whether somebody else still refers to it when the backward pass of `holder`, which holds it as well, begins."""
    return outlasting.backward and outlasting.gap <= holder


def survey(
    graph: Graph,
    costs: Costs,
    *,
    gradients_stand: bool,
    workspace_bytes: int = 0,
    holders: Mapping[Outlasting, int] | None = None,
) -> Surroundings:
    """The surroundings of the layers in a traced step. `gradients_stand`: parameters have gradients when it begins.
    `workspace_bytes`: what kernels take for themselves. `holders`: escapes and constants that layers hold as well, with
    the first layer that does."""
    assert graph.step is not None, "only the layers' forward passes were traced"
    return _Survey(graph, costs, gradients_stand, workspace_bytes, holders or {}).run()


_LAST = 2**62


class _Survey:
    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        gradients_stand: bool,
        workspace_bytes: int,
        holders: Mapping[Outlasting, int],
    ) -> None:
        assert graph.step is not None
        self._step = graph.step
        self._layers = [graph.of_layer(name) for name in graph.layers]
        self._costs = costs
        self._gradients_stand = gradients_stand
        standing = graph.step.standing
        self._standing = standing.parameters + standing.buffers + standing.optimizer + workspace_bytes
        self._standing += standing.gradients if gradients_stand else 0
        self._holders = holders
        self._made_gradients = 0
        self._ends: dict[tuple[int, bool, int], int] = defaultdict(int)
        for constant in graph.step.constants:
            self._ends[self._end_of_constant(constant)] += constant.num_bytes
        self._escaping = [self._note_escapes(layer) for layer in range(len(self._layers))]

    def run(self) -> Surroundings:
        forward_bytes, backward_bytes, gradient_bytes, forward_gaps, backward_gaps = [], [], [], [], []
        before = self._standing
        for layer in range(len(self._layers)):
            forward_gaps.append(self._pass_gap(layer, False))
            forward_bytes.append(self._standing)
            self._standing += self._escaping[layer]
        forward_gaps.append(self._pass_gap(len(self._layers), False))
        kept_bytes = self._standing - before
        backward_gaps.append(self._pass_gap(len(self._layers), True))
        for layer in reversed(range(len(self._layers))):
            backward_bytes.append(self._standing)
            gradient_bytes.append(self._made_gradients)
            self._standing += self._left_by(self._layers[layer])
            self._made_gradients += sum(map(self._gradient_of, self._layers[layer].backward))
            backward_gaps.append(self._pass_gap(layer, True))
        return Surroundings(
            tuple(forward_bytes),
            tuple(reversed(backward_bytes)),
            tuple(reversed(gradient_bytes)),
            tuple(forward_gaps),
            tuple(reversed(backward_gaps)),
            kept_bytes,
            sum(op.upstream_bytes for gap in self._step.gaps for op in gap.backward),
        )

    def _note_escapes(self, layer: int) -> int:
        total, numbers = 0, dict(self._step.calls[layer].shared)
        for escape in self._step.calls[layer].escapes:
            name = numbers.get(escape.storage, (layer, escape.storage))
            holder = self._holders.get(name)
            end = (escape.gap, escape.backward, escape.op)
            if holder is not None and not stands_longer(escape, holder):
                if holder == layer:
                    continue
                is_constant = name in dict(self._step.calls[holder].constants).values()
                end = (holder, True, 0) if is_constant else (holder, False, _LAST)  # the layer counts its input itself
            size = self._costs.rounded(self._layers[layer].storages[escape.storage].num_bytes)
            self._ends[end] += size
            total += size
        return total

    def _end_of_constant(self, constant: Constant) -> tuple[int, bool, int]:
        """A constant counts outside the layers as long as any of them holds it."""
        holder = self._holders.get(constant.number)
        if holder is not None and not stands_longer(constant, holder):
            return holder, True, 0
        return constant.gap, constant.backward, constant.op

    def _pass_gap(self, gap: int, backward: bool) -> GapCourse:
        ops: Sequence[StepOp] = getattr(self._step.gaps[gap], "backward" if backward else "forward")
        seconds, peak, peak_op, gradients = 0.0, self._standing, "", self._made_gradients
        for index, op in enumerate(ops):
            self._standing += op.allocated_bytes - self._ends.pop((gap, backward, index), 0)
            seconds += self._costs.step_op_seconds(op)
            self._made_gradients += self._gradient_of(op)
            stands = self._standing + self._costs.step_op_scratch(op)
            if stands > peak:
                peak, peak_op, gradients = stands, op.name, self._made_gradients
            self._standing -= self._freed_by(op)
        late = [key for key in self._ends if key[:2] == (gap, backward)]
        self._standing -= sum(self._ends.pop(key) for key in late)
        return GapCourse(seconds, peak, peak_op, gradients)

    def _freed_by(self, op: StepOp) -> int:
        return op.freed_bytes + (op.accumulated_bytes if self._gradients_stand else 0)

    def _gradient_of(self, op: StepOp) -> int:
        """Bytes of gradients that come with an op, and are no part of what stands."""
        return 0 if self._gradients_stand else op.gradient_bytes

    def _left_by(self, layer: RegionGraph) -> int:
        return sum(op.allocated_bytes - self._freed_by(op) for op in layer.backward)
