"""A training step under a plan, played through op by op: when each begins, what stands in memory, what waits for what.

One clock for the computing, one for each direction of each link. What is swapped leaves in the order in which it was
made, and its memory goes when the copy is there and the engine next looks: when a layer begins or ends, and when
something else is swapped. In the backward pass the first op of a layer starts the way back of what that layer, and
those ahead of it, have away, into memory that is taken at once. An op waits for what it reads.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from actmem.graph import Constant, Escape, Graph, Step
from actmem.planning.course import Costs, Course, Swap, follow, own_held
from actmem.planning.fates import Fates
from actmem.planning.plan import Tier
from actmem.planning.sharing import Sharing, commons_of, sharing_of
from actmem.planning.surroundings import GapCourse, Outlasting, Surroundings, stands_longer, survey

HELD = "held by other layers"


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second to a tier and back, by how many seconds computing is held up for each second of copying, and the
    seconds that go by before a copy out begins."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    slowdown: float = 0.0
    start_seconds: float = 0.0


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer's call; `tiers` says where its swapped storages go."""

    fates: Fates
    tiers: Mapping[int, Tier] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Equal for plans of one graph that do the same."""
        return self.fates.key, frozenset(self.tiers.items())


@dataclass(frozen=True)
class Conditions:
    """What a step runs under: costs of ops, links to the tiers, how many layers ahead reloads start, how many bytes may
    be on their way out or in, whether parameters have gradients when it begins, and the bytes that kernels may take for
    themselves at any moment: `workspace_bytes`, and `packing_bytes` on top in a step with products of bfloat16."""

    costs: Costs
    links: Mapping[Tier, Link]
    prefetch: int = 1
    in_flight_limit: int = 2**33
    gradients_stand: bool = True
    workspace_bytes: int = 0
    packing_bytes: int = 0

    def for_step(self, graph: Graph) -> Conditions:
        """The same for the step of `graph`, with all that its kernels take as `workspace_bytes`."""
        packing_bytes = self.packing_bytes if graph.multiplies_bfloat16 else 0
        return replace(self, workspace_bytes=self.workspace_bytes + packing_bytes, packing_bytes=0)


@dataclass(frozen=True)
class Moment:
    """A moment of a step: where it is, and the bytes that stand, by what they are."""

    where: str
    bytes_by_use: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """All that stands."""
        return sum(self.bytes_by_use.values())


@dataclass(frozen=True)
class Simulation:
    """What a step comes to. `replay_seconds` are spent on ops that are run again, `exposed_seconds` on waiting for
    copies and on what copying takes from the computing. `timeline`: seconds and bytes at each op."""

    seconds: float
    replay_seconds: float
    exposed_seconds: float
    peak: Moment
    held_bytes: int
    swapped_bytes: int
    timeline: tuple[tuple[float, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that stands at once."""
        return self.peak.num_bytes


def simulate(graph: Graph, plans: Sequence[LayerPlan], conditions: Conditions) -> Simulation:
    """Play the step of `graph` through with one plan a layer."""
    return Simulator(graph, conditions).run(plans)


class Simulator:
    """Steps of one graph under one set of conditions; courses of layers are worked out once."""

    def __init__(self, graph: Graph, conditions: Conditions) -> None:
        assert graph.step is not None, "only the layers' forward passes were traced"
        self.graph = graph
        self.conditions = conditions.for_step(graph)
        self.surroundings: Surroundings = self._survey({})
        self._surroundings: dict[Hashable, Surroundings] = {}
        self.commons = commons_of(graph)
        self._calls = graph.step.calls
        self._outlasting = _outlasting(graph.step)
        self._kinds = list(graph.layers.values())
        self.layers = [graph.kinds[kind] for kind in self._kinds]
        self._courses: dict[object, Course] = {}

    def run(self, plans: Sequence[LayerPlan]) -> Simulation:
        """Play one step through."""
        holders = self._holders_of(plans)
        return _Step(self, self._surroundings_with(holders), self._courses_of(plans, holders), plans).run()

    def course_of(self, layer: int, fates: Fates, elsewhere: frozenset[int] = frozenset()) -> Course:
        """The course of one layer."""
        leaving = self.leaving(layer)
        key = (self._kinds[layer], leaving, elsewhere, fates.key)
        if key not in self._courses:
            self._courses[key] = follow(
                fates,
                self.conditions.costs,
                leaving=leaving,
                elsewhere=elsewhere,
                gradients_stand=self.conditions.gradients_stand,
            )
        return self._courses[key]

    def sharing(self, layer: int) -> Sharing:
        """What a layer may hold together with others."""
        return sharing_of(self.commons, layer)

    @cached_property
    def bare_surroundings(self) -> Surroundings:
        """The surroundings where each layer holds what others may hold of that which escapes from it."""
        return self._survey({each.name: each.maker for each in self.commons if each.escape is not None})

    def op_seconds(self, layer: int, op: int) -> float:
        """Seconds to run one op of a layer's forward pass again; views take only what the engine does."""
        costs, graph = self.conditions.costs, self.layers[layer]
        return costs.replay_seconds + (0.0 if graph.ops[op].view else costs.op_seconds(graph, op))

    def copy_seconds(self, tier: Tier, num_bytes: int) -> float:
        """By how much copying a storage to a tier and back holds computing up, however well it is hidden."""
        link = self.conditions.links[tier]
        return link.slowdown * num_bytes * (1 / link.out_bytes_per_second + 1 / link.in_bytes_per_second)

    def leaving(self, layer: int) -> frozenset[int]:
        """Storages that a layer makes and others refer to when its call is over."""
        call, storages = self._calls[layer], self.layers[layer].storages
        made = {storage for storage, _ in call.shared if storages[storage].kind == "op"}
        return frozenset(made | {escape.storage for escape in call.escapes})

    def _holders_of(self, plans: Sequence[LayerPlan]) -> dict[Outlasting, int]:
        """Escapes and constants that layers hold as well, and the first layer that does."""
        holders: dict[Outlasting, int] = {}
        for layer, plan in reversed(list(enumerate(plans))):
            holders.update(
                (name, layer) for storage, (name, _) in self._outlasting[layer].items() if storage in plan.fates.held
            )
        return holders

    def _surroundings_with(self, holders: Mapping[Outlasting, int]) -> Surroundings:
        key = frozenset(holders.items())
        if key not in self._surroundings:
            self._surroundings[key] = self._survey(holders)
        return self._surroundings[key]

    def _survey(self, holders: Mapping[Outlasting, int]) -> Surroundings:
        return survey(
            self.graph,
            self.conditions.costs,
            gradients_stand=self.conditions.gradients_stand,
            workspace_bytes=self.conditions.workspace_bytes,
            holders=holders,
        )

    def _courses_of(self, plans: Sequence[LayerPlan], holders: Mapping[Outlasting, int]) -> list[Course]:
        held: set[int] = set()
        courses = []
        for layer, plan in enumerate(plans):
            shared = dict(self._calls[layer].shared)
            own = own_held(plan.fates)
            kept = {storage for storage in own if storage in shared}
            outside = {
                storage
                for storage, (name, outlasting) in self._outlasting[layer].items()
                if name in holders and stands_longer(outlasting, holders[name])
            }
            elsewhere = frozenset((own & outside) | {storage for storage in kept if shared[storage] in held})
            held |= {shared[storage] for storage in kept}
            courses.append(self.course_of(layer, plan.fates, elsewhere))
        return courses


def _outlasting(step: Step) -> list[dict[int, tuple[Outlasting, Escape | Constant]]]:
    """Of each call, the storages that are constants or escapes, its own or another's: their name, and how they end."""
    constants = {constant.number: constant for constant in step.constants}
    numbers = [dict(call.shared) for call in step.calls]
    found: list[dict[int, tuple[Outlasting, Escape | Constant]]] = [{} for _ in step.calls]
    escaped: dict[int, Escape] = {}
    for layer, call in enumerate(step.calls):
        for escape in call.escapes:
            found[layer][escape.storage] = ((layer, escape.storage), escape)
            if escape.storage in numbers[layer]:
                escaped[numbers[layer][escape.storage]] = escape
    for layer, call in enumerate(step.calls):
        known: dict[int, Escape | Constant] = {**constants, **escaped}
        named = (*call.shared, *call.constants)
        found[layer].update((storage, (number, known[number])) for storage, number in named if number in known)
    return found


@dataclass(slots=True, eq=False)
class _Away:
    """A swapped storage: on its way out until `out_done`, here or not, and on its way back until `arrives`."""

    swap: Swap
    tier: Tier
    out_done: float = math.inf
    is_here: bool = True
    arrives: float | None = None


class _Step:
    """One step as it runs. Bytes: `_held` by layers that are not running, `_moving` of swapped storages that are
    here."""

    def __init__(
        self, simulator: Simulator, around: Surroundings, courses: Sequence[Course], plans: Sequence[LayerPlan]
    ) -> None:
        self._graph = simulator.graph
        self._conditions = simulator.conditions
        self._around = around
        self._courses = courses
        self._plans = plans
        self._now = self._exposed = 0.0
        self._held = self._moving = 0
        self._links_free: dict[tuple[Tier, str], float] = defaultdict(float)
        self._swapped: list[list[_Away]] = [[] for _ in courses]
        self._leaving: deque[_Away] = deque()
        self._coming: list[_Away] = []
        self._wanted: deque[_Away] = deque()
        self._peak = _Peak(0, "", 0, 0, 0, 0)
        self._timeline: list[tuple[float, int]] = []

    def run(self) -> Simulation:
        last = len(self._courses)
        for layer in range(last):
            self._pass_gap(self._around.forward_gaps[layer], f"before layer {layer}, forward")
            self._forward(layer)
        self._pass_gap(self._around.forward_gaps[last], "behind the layers, forward")
        self._pass_gap(self._around.backward_gaps[last], "behind the layers, backward")
        for layer in reversed(range(last)):
            self._backward(layer)
            self._pass_gap(self._around.backward_gaps[layer], f"before layer {layer}, backward")
        return Simulation(
            seconds=self._now,
            replay_seconds=sum(course.replay_seconds for course in self._courses),
            exposed_seconds=self._exposed,
            peak=self._peak.moment(self._graph, self._conditions),
            held_bytes=sum(course.held_bytes for course in self._courses),
            swapped_bytes=sum(course.swapped_bytes for course in self._courses),
            timeline=tuple(self._timeline),
        )

    def _pass_gap(self, gap: GapCourse, where: str) -> None:
        self._note(gap.peak_bytes, 0, f"{where}: {gap.peak_op}" if gap.peak_op else where)
        self._now += gap.seconds

    def _forward(self, layer: int) -> None:
        course, around = self._courses[layer], self._around.forward_bytes[layer]
        swaps = deque(course.swaps)
        sent = 0  # slices count them until the layer is done
        self._let_leave()
        for index, op in enumerate(course.forward):
            self._note(around, op.standing_bytes - sent, f"layer {layer}, forward: {op.name}")
            self._now += op.seconds
            while swaps and swaps[0].produced <= index:
                swap = swaps.popleft()
                sent += swap.num_bytes
                self._let_leave()
                self._send(layer, swap)
        self._let_leave()
        self._held += course.held_bytes

    def _backward(self, layer: int) -> None:
        course, around = self._courses[layer], self._around.backward_bytes[layer]
        self._let_leave()
        self._held -= course.held_bytes
        self._want(layer)
        own = sorted(self._swapped[layer], key=lambda away: away.swap.needed)
        to_need, to_let_go = deque(own), sorted(own, key=lambda away: -away.swap.let_go)
        for index, op in enumerate(course.backward):
            while to_need and to_need[0].swap.needed <= index:
                self._wait_for(to_need.popleft())
            self._note(around, op.standing_bytes, f"layer {layer}, {'again' if op.again else 'backward'}: {op.name}")
            self._now += op.seconds
            while to_let_go and to_let_go[-1].swap.let_go <= index:
                self._moving -= to_let_go.pop().swap.num_bytes

    def _send(self, layer: int, swap: Swap) -> None:
        away = _Away(swap, self._plans[layer].tiers[swap.storage])
        self._swapped[layer].append(away)
        self._moving += swap.num_bytes
        on_the_way = sum(each.swap.num_bytes for each in self._leaving)
        if on_the_way + swap.num_bytes <= self._conditions.in_flight_limit:
            away.out_done = self._copy(away, "out")
            self._leaving.append(away)

    def _copy(self, away: _Away, direction: Literal["out", "in"]) -> float:
        """When a copy that is asked for now will be done."""
        link = self._conditions.links[away.tier]
        rate = link.out_bytes_per_second if direction == "out" else link.in_bytes_per_second
        seconds = away.swap.num_bytes / rate
        begun = max(self._now, self._links_free[away.tier, direction])
        begun += link.start_seconds if direction == "out" else 0.0
        self._links_free[away.tier, direction] = begun + seconds
        self._now += seconds * link.slowdown
        self._exposed += seconds * link.slowdown
        return begun + seconds

    def _let_leave(self) -> None:
        while self._leaving and self._leaving[0].out_done <= self._now:
            away = self._leaving.popleft()
            away.is_here = False
            self._moving -= away.swap.num_bytes

    def _want(self, layer: int) -> None:
        """The backward pass has reached a layer: start the way back of what it and those ahead of it have away."""
        self._wanted.clear()
        for ahead in range(layer, max(layer - self._conditions.prefetch, 0) - 1, -1):
            self._wanted.extend(reversed(self._swapped[ahead]))
        self._start_reloads()

    def _start_reloads(self) -> None:
        self._coming = [away for away in self._coming if away.arrives is not None and away.arrives > self._now]
        coming = sum(away.swap.num_bytes for away in self._coming)
        while self._wanted:
            away = self._wanted[0]
            if not away.is_here and away.arrives is None:
                if coming + away.swap.num_bytes > self._conditions.in_flight_limit:
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
        if away.arrives is not None and away.arrives > self._now:
            self._exposed += away.arrives - self._now
            self._now = away.arrives
        self._start_reloads()

    def _note(self, around: int, own: int, where: str) -> None:
        total = around + self._held + self._moving + own
        self._timeline.append((self._now, total))
        if total > self._peak.num_bytes:
            self._peak = _Peak(total, where, around, self._held, self._moving, own)


class _Peak(NamedTuple):
    num_bytes: int
    where: str
    around: int
    held: int
    moving: int
    own: int

    def moment(self, graph: Graph, conditions: Conditions) -> Moment:
        """The peak with names for what stood."""
        assert graph.step is not None
        standing = graph.step.standing
        parts = {
            "parameters": standing.parameters,
            "buffers": standing.buffers,
            "optimizer": standing.optimizer,
            "gradients": standing.gradients if conditions.gradients_stand else 0,
            "workspace of kernels": conditions.workspace_bytes,
            HELD: self.held,
            "swapped, on the way": self.moving,
            "this layer, or what is computed": self.own,
        }
        parts["outside the layers"] = self.num_bytes - sum(parts.values())
        return Moment(self.where, {name: size for name, size in parts.items() if size})
