"""A training step under a plan, played through op by op.

What each layer does alone, its course, and what stands around the layers are worked out once for all plans in which
they are the same; a `Player` then goes through the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

from actmem.graph import Constant, Escape, Graph, Step
from actmem.planning.course import Course, follow, own_held
from actmem.planning.fates import Fates
from actmem.planning.plan import Tier
from actmem.planning.player import Call, Player
from actmem.planning.sharing import Sharing, commons_of, sharing_of
from actmem.planning.simulation import Conditions, LayerPlan, Simulation
from actmem.planning.surroundings import Outlasting, Surroundings, stands_longer, survey
from actmem.planning.terrain import Moment


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
        player, call = Player(self.conditions), self.call(plans)
        player.forward(call)
        player.backward(call)
        assert self.graph.step is not None
        return Simulation(
            seconds=player.now,
            replay_seconds=call.replay_seconds,
            exposed_seconds=player.exposed,
            peak=player.peak.moment(self.graph.step.standing, self.conditions),
            held_bytes=call.held_bytes,
            swapped_bytes=call.swapped_bytes,
            timeline=tuple(player.timeline),
        )

    @property
    def spans(self) -> tuple[range, ...]:
        """One, of all layers."""
        return (range(len(self.layers)),)

    @property
    def repeats(self) -> int:
        """A step goes through the layers once."""
        return 1

    @property
    def gap_seconds(self) -> float:
        """What runs outside the layers."""
        return self.surroundings.seconds

    def moments(self, span: int, *, backward: bool) -> tuple[Moment, ...]:
        """Nothing else is under way."""
        return (Moment((0,), 0, self.surroundings, self.bare_surroundings),)

    def call(self, plans: Sequence[LayerPlan]) -> Call:
        """One batch on its way through all layers."""
        holders = self._holders_of(plans)
        return Call(self._surroundings_with(holders), self._courses_of(plans, holders), plans)

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
