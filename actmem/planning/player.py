"""Plays forward and backward passes of layers through, op by op: when each begins, what stands, what waits for what.

One clock for the computing, one for each direction of each link. What is swapped leaves in the order in which it was
made, and its memory goes when the copy is there and the engine next looks: when a layer begins or ends, and when
something else is swapped. In the backward pass the first op of a layer starts the way back of what that layer, and
those ahead of it, have away, into memory that is taken at once. An op waits for what it reads.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from actmem.graph import Standing
from actmem.planning.course import Course, Slice, Swap
from actmem.planning.plan import Tier
from actmem.planning.simulation import HELD, Conditions, LayerPlan, Moment
from actmem.planning.surroundings import GapCourse, Surroundings

Part = Literal["whole", "inputs", "weights"]
"""Of a backward pass: some schedules part that to the inputs from that to the weights."""


@dataclass(slots=True, eq=False)
class _Away:
    """A swapped storage: on its way out until `out_done`, here or not, and on its way back until `arrives`."""

    swap: Swap
    tier: Tier
    out_done: float = math.inf
    is_here: bool = True
    arrives: float | None = None


class Call:
    """One batch on its way through the layers, forward and then backward. Without `swaps`, what its plan swaps
    stays."""

    def __init__(
        self,
        around: Surroundings,
        courses: Sequence[Course],
        plans: Sequence[LayerPlan],
        *,
        name: str = "",
        swaps: bool = True,
    ) -> None:
        self.around = around
        self.courses = courses
        self.plans = plans
        self.name = name
        self.swaps = swaps
        self.away: list[list[_Away]] = [[] for _ in courses]

    def again(self, name: str, *, swaps: bool) -> Call:
        """Another batch on the same way."""
        return Call(self.around, self.courses, self.plans, name=name, swaps=swaps)

    def go_on_as(self, other: Call, name: str) -> None:
        """Take from here on the way of `other`, under the same plans: parameters may have gradients by now."""
        self.around, self.courses, self.name = other.around, other.courses, name

    @cached_property
    def replay_seconds(self) -> float:
        """Spent on ops that are run again."""
        return sum(course.replay_seconds for course in self.courses)

    @cached_property
    def held_bytes(self) -> int:
        """What all layers hold between their passes."""
        return sum(course.held_bytes for course in self.courses)

    @cached_property
    def upstream_bytes(self) -> int:
        """Gradients that stand from one part of its backward pass to the other."""
        return self.around.upstream_bytes + sum(course.upstream_bytes for course in self.courses)

    @cached_property
    def swapped_bytes(self) -> int:
        """What all layers move away."""
        return sum(course.swapped_bytes for course in self.courses)


class Player:
    """A device that computes. Bytes: `held` by layers that are not running, `_moving` of swapped storages that are
    here, and `beside` whatever else stands there that the running call does not know of."""

    def __init__(self, conditions: Conditions) -> None:
        self.now = self.exposed = 0.0
        self.held = self.beside = 0
        self.peak = Peak(0, "", "", 0, 0, 0, 0)
        self.timeline: list[tuple[float, int]] = []
        self.conditions = conditions
        self._moving = 0
        self._links_free: dict[tuple[Tier, str], float] = defaultdict(float)
        self._leaving: deque[_Away] = deque()
        self._coming: list[_Away] = []
        self._wanted: deque[_Away] = deque()

    def forward(self, call: Call) -> None:
        """Run the forward pass of a call, what is outside the layers included."""
        last = len(call.courses)
        for layer in range(last):
            self._pass_gap(call, call.around.forward_gaps[layer], f"before layer {layer}, forward")
            self._forward(call, layer)
        self._pass_gap(call, call.around.forward_gaps[last], "behind the layers, forward")

    def backward(self, call: Call, part: Part = "whole") -> None:
        """Run its backward pass, or a part of it."""
        last = len(call.courses)
        if part != "whole":
            self.held += call.around.upstream_bytes if part == "inputs" else -call.around.upstream_bytes
        if part != "weights":
            self._pass_gap(call, call.around.backward_gaps[last], "behind the layers, backward")
        for layer in reversed(range(last)):
            self._backward(call, layer, part)
            if part != "weights":
                self._pass_gap(call, call.around.backward_gaps[layer], f"before layer {layer}, backward")

    def watched(self, run: Callable[[], None]) -> Passage:
        """Run something, and tell what it came to."""
        before, begun, held = self.peak, self.now, self.held
        self.peak = Peak(0, "", "", 0, 0, 0, 0)
        run()
        own = self.peak
        self.peak = max(before, own, key=lambda peak: peak.num_bytes)
        passed = self.now - begun
        return Passage(passed, own, own.num_bytes - self.beside - held, own.held - held, self.held - held)

    def repeat(self, known: Passage, name: str) -> None:
        """Let something pass that was watched before."""
        total = known.above_bytes + self.beside + self.held
        self.timeline += [(self.now, total)]
        if total > self.peak.num_bytes:
            held = self.held + known.held_above_bytes
            self.peak = known.peak._replace(num_bytes=total, call=name, held=held)
        self.now += known.seconds
        self.held += known.holds_bytes

    def expect(self, call: Call) -> None:
        """The backward pass of a call is near: start the way back of what its last layers have away."""
        self._let_leave()
        for away in list(reversed(call.away))[: self.conditions.prefetch + 1]:
            self._wanted.extend(reversed(away))
        self._start_reloads()

    def _pass_gap(self, call: Call, gap: GapCourse, where: str) -> None:
        where = f"{where}: {gap.peak_op}" if gap.peak_op else where
        self._note(call, gap.peak_bytes, 0, where, gradients=gap.gradient_bytes)
        self.now += gap.seconds

    def _forward(self, call: Call, layer: int) -> None:
        course, around = call.courses[layer], call.around.forward_bytes[layer]
        swaps = deque(course.swaps)
        sent = 0  # slices count them until the layer is done
        self._let_leave()
        for index, op in enumerate(course.forward):
            self._note(call, around, op.standing_bytes - sent, f"layer {layer}, forward: {op.name}")
            self.now += op.seconds
            while swaps and swaps[0].produced <= index:
                swap = swaps.popleft()
                sent += swap.num_bytes
                self._let_leave()
                self._send(call, layer, swap)
        self._let_leave()
        self.held += course.held_bytes

    def _backward(self, call: Call, layer: int, part: Part) -> None:
        course, around, made = call.courses[layer], call.around.backward_bytes[layer], call.around.gradient_bytes[layer]
        self._let_leave()
        self.held -= course.held_bytes
        self._want(call, layer)
        own = sorted(call.away[layer], key=lambda away: away.swap.needed)
        to_need, to_let_go = deque(own), sorted(own, key=lambda away: -away.swap.let_go)
        for index, op in enumerate(course.backward):
            while to_need and to_need[0].swap.needed <= index:
                self._wait_for(to_need.popleft())
            where = f"layer {layer}, {'again' if op.again else 'backward'}: {op.name}"
            self._note(call, around, op.standing_bytes, where, gradients=made)
            self.now += op.seconds if _runs(op, part) else 0.0
            while to_let_go and to_let_go[-1].swap.let_go <= index:
                self._moving -= to_let_go.pop().swap.num_bytes
        if part == "weights":
            self.held -= course.upstream_bytes
        if part == "inputs":  # the other part reads it all again
            self.held += course.held_bytes + course.upstream_bytes
            for away in own:
                away.is_here, away.arrives = False, None

    def _send(self, call: Call, layer: int, swap: Swap) -> None:
        away = _Away(swap, call.plans[layer].tiers[swap.storage])
        call.away[layer].append(away)
        self._moving += swap.num_bytes
        on_the_way = sum(each.swap.num_bytes for each in self._leaving)
        if call.swaps and on_the_way + swap.num_bytes <= self.conditions.in_flight_limit:
            away.out_done = self._copy(away, "out")
            self._leaving.append(away)

    def _copy(self, away: _Away, direction: Literal["out", "in"]) -> float:
        """When a copy that is asked for now will be done."""
        link = self.conditions.links[away.tier]
        rate = link.out_bytes_per_second if direction == "out" else link.in_bytes_per_second
        seconds = away.swap.num_bytes / rate
        begun = max(self.now, self._links_free[away.tier, direction])
        begun += link.start_seconds if direction == "out" else 0.0
        self._links_free[away.tier, direction] = begun + seconds
        self.now += seconds * link.slowdown
        self.exposed += seconds * link.slowdown
        return begun + seconds

    def _let_leave(self) -> None:
        while self._leaving and self._leaving[0].out_done <= self.now:
            away = self._leaving.popleft()
            away.is_here = False
            self._moving -= away.swap.num_bytes

    def _want(self, call: Call, layer: int) -> None:
        """The backward pass has reached a layer: start the way back of what it and those ahead of it have away."""
        self._wanted.clear()
        for ahead in range(layer, max(layer - self.conditions.prefetch, 0) - 1, -1):
            self._wanted.extend(reversed(call.away[ahead]))
        self._start_reloads()

    def _start_reloads(self) -> None:
        self._coming = [away for away in self._coming if away.arrives is not None and away.arrives > self.now]
        coming = sum(away.swap.num_bytes for away in self._coming)
        while self._wanted:
            away = self._wanted[0]
            if not away.is_here and away.arrives is None:
                if coming + away.swap.num_bytes > self.conditions.in_flight_limit:
                    return
                coming += away.swap.num_bytes
            self._bring(self._wanted.popleft())

    def _bring(self, away: _Away) -> None:
        """Start the way back, or keep here what has not left yet."""
        if away.is_here:
            if away in self._leaving:
                self._leaving.remove(away)
        elif away.arrives is None:
            self._moving += away.swap.num_bytes
            away.arrives = self._copy(away, "in")
            self._coming.append(away)

    def _wait_for(self, away: _Away) -> None:
        self._bring(away)
        if away.arrives is not None and away.arrives > self.now:
            self.exposed += away.arrives - self.now
            self.now = away.arrives
        self._start_reloads()

    def _note(self, call: Call, around: int, own: int, where: str, *, gradients: int = 0) -> None:
        total = around + self.beside + self.held + self._moving + own
        self.timeline.append((self.now, total))
        if total > self.peak.num_bytes:
            self.peak = Peak(total, call.name, where, self.held, self._moving, own, gradients)


class Passage(NamedTuple):
    """What a pass comes to: its seconds and its peak, how far that is above what stood beside and was held before, how
    far what was held then is, and what the pass adds to what is held."""

    seconds: float
    peak: Peak
    above_bytes: int
    held_above_bytes: int
    holds_bytes: int


def _runs(op: Slice, part: Part) -> bool:
    """Whether a part of a backward pass runs an op. What is made again is taken to be made again for each part."""
    return op.again or part == "whole" or op.for_weights == (part == "weights")


class Peak(NamedTuple):
    """The most that stood: in which call, and where in it; what of it layers held, what was being swapped, what
    belonged to what ran, and what were gradients that this step had made."""

    num_bytes: int
    call: str
    where: str
    held: int
    moving: int
    own: int
    gradients: int

    def moment(self, standing: Standing, conditions: Conditions, *, gradients: bool | None = None) -> Moment:
        """The peak with names for what stood. `gradients`: whether those of the parameters did."""
        stand = conditions.gradients_stand if gradients is None else gradients
        parts = {
            "parameters": standing.parameters,
            "buffers": standing.buffers,
            "optimizer": standing.optimizer,
            "gradients": self.gradients + (standing.gradients if stand else 0),
            "workspace of kernels": conditions.workspace_bytes,
            HELD: self.held,
            "swapped, on the way": self.moving,
            "this layer, or what is computed": self.own,
        }
        parts["outside the layers"] = self.num_bytes - sum(parts.values())
        return Moment(f"{self.call}{self.where}", {name: size for name, size in parts.items() if size})
