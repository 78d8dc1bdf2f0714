"""A step of a pipeline, played through: every rank runs its own order of actions, and waits for what others send.

Each stage was traced for one micro-batch. A rank's memory is that of the passes it runs, of all micro-batches that have
gone forward and not yet back, and of the buffers that torch's pipelining keeps: one for what each micro-batch receives
in either direction, and the gradients that it has sent back in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from actmem.graph import Fingerprint, Graph, Standing
from actmem.planning.actions import Group, PipelineAction, gaps_of
from actmem.planning.player import Call, Part, Passage, Player
from actmem.planning.simulation import Conditions, LayerPlan, Simulation
from actmem.planning.simulator import Simulator

_PARTS: Mapping[str, Part] = {"backward": "whole", "input": "inputs", "weight": "weights"}
_LEAST_GAP = 1
"""Of a rank's other actions, between a group's two passes, below which the engine does not swap it."""


@dataclass(frozen=True)
class PipelineGraph:
    """`stages`: one micro-batch's step in each; `orders`: the actions of each rank in a step of `schedule`. From stage
    to stage go `states_bytes` for a micro-batch, and back; neighbours are `ranks_between` ranks apart."""

    stages: tuple[Graph, ...]
    orders: tuple[tuple[PipelineAction, ...], ...]
    schedule: str
    states_bytes: int
    made_for: Fingerprint
    ranks_between: int = 1

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return 1 + max(action.group.microbatch for action in self.orders[0])

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank has."""
        return tuple(tuple(sorted({action.group.stage for action in order})) for order in self.orders)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that each stage is on."""
        return {stage: rank for rank, stages in enumerate(self.stages_of) for stage in stages}

    def layers_of(self, stage: int) -> range:
        """The numbers that a stage's layers have in the whole model."""
        first = sum(len(each.layers) for each in self.stages[:stage])
        return range(first, first + len(self.stages[stage].layers))

    @property
    def num_layers(self) -> int:
        """Of all stages together."""
        return sum(len(each.layers) for each in self.stages)


@dataclass(frozen=True)
class PipelineSimulation:
    """What a step comes to: on each rank, and until the last one is done."""

    seconds: float
    ranks: tuple[Simulation, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that stands at once on any rank."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait for others."""
        return 1.0 - sum(rank.seconds for rank in self.ranks) / (len(self.ranks) * self.seconds)


class Stage:
    """One stage under one set of conditions, before its parameters have gradients and when they have them."""

    def __init__(self, graph: Graph, conditions: Conditions) -> None:
        assert graph.step is not None
        self.standing: Standing = graph.step.standing
        self.fresh = Simulator(graph, replace(conditions, gradients_stand=False))
        self.later = Simulator(graph, replace(conditions, gradients_stand=True))

    def standing_bytes(self, *, gradients: bool) -> int:
        """Parameters, buffers and optimizer state, and gradients where there are some."""
        return self.standing.total - (0 if gradients else self.standing.gradients)


class Circumstances(NamedTuple):
    """In which an action of a rank runs: `counts` of other calls that are between their passes, by stage, `num_bytes`
    beside them and the running stage's own, and whether its parameters have gradients."""

    stage: int
    backward: bool
    counts: tuple[int, ...]
    num_bytes: int
    gradients: bool


@dataclass
class _State:
    """Where a stage is in a step: the calls that have gone forward and not yet back, those of them that wait for the
    second part of their way back, how many have gone back, and whether its parameters have gradients."""

    calls: dict[int, Call] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    num_back: int = 0
    gradients: bool = False


class RankPlay:
    """A rank on its way through its order of actions. `plans` has those of each stage's layers."""

    def __init__(
        self, pipeline: PipelineGraph, rank: int, stages: Mapping[int, Stage], plans: Mapping[int, Sequence[LayerPlan]]
    ) -> None:
        self.order = pipeline.orders[rank]
        self.position = 0
        conditions = next(iter(stages.values())).later.conditions
        self.player = Player(conditions)
        self._pipeline = pipeline
        self._stages = stages
        self._plans = plans
        self._states = {stage: _State(gradients=conditions.gradients_stand) for stage in stages}
        self._gaps = gaps_of(self.order)
        self._templates: dict[tuple[int, bool], Call] = {}
        self._known: dict[tuple[int, str, bool], Passage] = {}
        self._busy = 0.0
        self._most_held = self._swapped = 0
        self._peak_gradients: dict[int, bool] = {}

    @property
    def action(self) -> PipelineAction | None:
        """The next one; ``None`` when all are done."""
        return self.order[self.position] if self.position < len(self.order) else None

    def play(self, not_before: float = 0.0) -> float:
        """Run the next action, which has to wait until then for what others send; returns when it is done."""
        action = self.order[self.position]
        self.player.now = max(self.player.now, not_before)
        begun = self.player.now
        self._expect(action)
        if self._has_work(action):
            self.player.beside = self._beside(action.group)
            before = self.player.peak
            self._run(action)
            if self.player.peak is not before:
                self._peak_gradients = {stage: state.gradients for stage, state in self._states.items()}
        self._busy += self.player.now - begun
        self._most_held = max(self._most_held, self.player.held)
        self.position += 1
        return self.player.now

    def circumstances(self) -> Circumstances:
        """Those of the next action."""
        action = self.order[self.position]
        numbers = list(self._stages)
        counts = tuple(
            sum((number, microbatch) != action.group for microbatch in state.calls)
            for number, state in self._states.items()
        )
        waiting = sum(
            len(state.waiting - ({action.group.microbatch} if number == action.group.stage else set()))
            * self._template(number, True).upstream_bytes
            for number, state in self._states.items()
        )
        own = self._states[action.group.stage]
        beside = self._beside(action.group) + waiting
        return Circumstances(numbers.index(action.group.stage), action.reads_saved, counts, beside, own.gradients)

    def simulation(self) -> Simulation:
        """What the rank's step came to; its `seconds` are those in which it ran."""
        stood = [
            replace(stage.standing, gradients=stage.standing.gradients if self._peak_gradients.get(number) else 0)
            for number, stage in self._stages.items()
        ]
        standing = sum(stood[1:], start=stood[0])
        calls = [self._template(stage, True) for stage in self._stages]
        count = self._pipeline.num_microbatches
        return Simulation(
            seconds=self._busy,
            replay_seconds=count * sum(call.replay_seconds for call in calls),
            exposed_seconds=self.player.exposed,
            peak=self.player.peak.moment(standing, self.player.conditions, gradients=True),
            held_bytes=self._most_held,
            swapped_bytes=self._swapped,
            timeline=tuple(self.player.timeline),
        )

    def _run(self, action: PipelineAction) -> None:
        state, microbatch = self._states[action.group.stage], action.group.microbatch
        if action.kind == "forward":
            swaps = self._gaps.get(action.group, _LEAST_GAP) >= _LEAST_GAP
            call = self._template(action.group.stage, state.gradients).again(self._name(action), swaps=swaps)
            self._swapped += call.swapped_bytes if swaps else 0
            self._pass(action, state, call, lambda: self.player.forward(call))
            state.calls[microbatch] = call
            return
        part = self._part(action)
        call = state.calls[microbatch]
        call.go_on_as(self._template(action.group.stage, state.gradients), self._name(action))
        self._pass(action, state, call, lambda: self.player.backward(call, part))
        if part == "inputs":
            state.waiting.add(microbatch)
        else:
            del state.calls[microbatch]
            state.waiting.discard(microbatch)
            state.gradients = True
        if part != "weights":
            state.num_back += 1

    def _pass(self, action: PipelineAction, state: _State, call: Call, run: Callable[[], None]) -> None:
        """Run a pass; where nothing is swapped, each further one like it takes as long and as much."""
        key = (action.group.stage, action.kind, state.gradients)
        if any(self._template(stage, True).swapped_bytes for stage in self._stages):
            run()
        elif key in self._known:
            self.player.repeat(self._known[key], call.name)
        else:
            self._known[key] = self.player.watched(run)

    def _name(self, action: PipelineAction) -> str:
        return f"stage {action.group.stage}, micro-batch {action.group.microbatch}, "

    def _has_work(self, action: PipelineAction) -> bool:
        """The first stage has no inputs to give gradients to: its backward pass waits for the weights."""
        return not (action.kind == "input" and action.group.stage == 0)

    def _part(self, action: PipelineAction) -> Part:
        return "whole" if action.group.stage == 0 else _PARTS[action.kind]

    def _expect(self, action: PipelineAction) -> None:
        """As the engine does, ask for what the next action will read."""
        following = self.order[self.position + 1] if self.position + 1 < len(self.order) else None
        if following is None or not following.reads_saved or following.group == action.group:
            return
        call = self._states[following.group.stage].calls.get(following.group.microbatch)
        if call is not None:
            self.player.expect(call)

    def _template(self, stage: int, gradients: bool) -> Call:
        key = (stage, gradients)
        if key not in self._templates:
            simulator = self._stages[stage].later if gradients else self._stages[stage].fresh
            self._templates[key] = simulator.call(self._plans[stage])
        return self._templates[key]

    def _beside(self, running: Group) -> int:
        """What stands besides the running stage's own standing bytes and its call's."""
        total = 0
        for number, state in self._states.items():
            if number != running.stage:
                total += self._stages[number].standing_bytes(gradients=state.gradients)
            total += self._buffers(number, state)
            total += sum(
                call.around.kept_bytes for microbatch, call in state.calls.items() if (number, microbatch) != running
            )
        return total

    def _buffers(self, stage: int, state: _State) -> int:
        """What torch's pipelining keeps: a buffer for what each micro-batch receives, in either direction, and what was
        sent until the schedule has waited for it, which most do at the end of the step."""
        is_first, is_last = stage == 0, stage == len(self._pipeline.stages) - 1
        count, back = self._pipeline.num_microbatches, state.num_back
        received = count * (2 - is_first - is_last)
        if self._pipeline.schedule == "1F1B":  # waits soon, but lets the first states go late
            sent = min(back, 1) * ((not is_first) + (not is_last))
        elif self._pipeline.schedule == "GPipe":  # keeps what the last stage puts out
            sent = back * ((not is_first) + is_last)
        else:
            sent = back * (self._crosses(stage, stage - 1) + self._crosses(stage, stage + 1))
        return self._pipeline.states_bytes * (received + sent)

    def _crosses(self, stage: int, other: int) -> bool:
        """Whether a stage sends to another one on another rank."""
        ranks = self._pipeline.rank_of
        return other in ranks and ranks[other] != ranks[stage]


class PipelineSimulator:
    """Steps of one pipeline under one set of conditions. `hop_seconds`: what one micro-batch's states take from rank to
    rank."""

    def __init__(self, pipeline: PipelineGraph, conditions: Conditions, *, hop_seconds: float = 0.0) -> None:
        self.pipeline = pipeline
        self._hop_seconds = hop_seconds
        made: dict[int, Stage] = {}
        self.stages = tuple(made.setdefault(id(graph), Stage(graph, conditions)) for graph in pipeline.stages)

    def stages_of(self, rank: int) -> dict[int, Stage]:
        """The stages that a rank has, by number."""
        return {stage: self.stages[stage] for stage in self.pipeline.stages_of[rank]}

    def run(self, plans: Sequence[LayerPlan]) -> PipelineSimulation:
        """Play one step through; `plans` has those of all layers of the model, in order."""
        numbered = dict(enumerate(plans))
        ranks = [self.rank_play(rank, numbered) for rank in range(len(self.pipeline.orders))]
        done: dict[tuple[bool, Group], float] = {}
        while any(rank.action is not None for rank in ranks):
            before = len(done), sum(rank.position for rank in ranks)
            for number, rank in enumerate(ranks):
                while (action := rank.action) is not None:
                    ready = self._ready(action, number, done)
                    if ready is None:
                        break
                    ended = rank.play(ready)
                    if action.kind != "weight":
                        done[action.reads_saved, action.group] = ended
            assert (len(done), sum(rank.position for rank in ranks)) != before, "the schedule waits for itself"
        return PipelineSimulation(max(rank.player.now for rank in ranks), tuple(rank.simulation() for rank in ranks))

    def rank_play(self, rank: int, plans: Mapping[int, LayerPlan]) -> RankPlay:
        """A rank at the beginning of its step; `plans` has those of its layers by number."""
        stages = self.stages_of(rank)
        own = {stage: [plans[layer] for layer in self.pipeline.layers_of(stage)] for stage in stages}
        return RankPlay(self.pipeline, rank, stages, own)

    def _ready(self, action: PipelineAction, rank: int, done: Mapping[tuple[bool, Group], float]) -> float | None:
        """When what an action needs from others is there; ``None`` while that is not known."""
        stage, microbatch = action.group
        if action.kind == "weight":
            return 0.0
        back = action.reads_saved
        source = stage + 1 if back else stage - 1
        if not 0 <= source < len(self.stages):
            return 0.0
        sent = done.get((back, Group(source, microbatch)))
        if sent is None:
            return None
        return sent + (0.0 if self.pipeline.rank_of[source] == rank else self._hop_seconds)
