"""What one rank of a pipeline does, as a planner sees it: all layers of its stages, and how many micro-batches are
under way when each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from actmem.graph import Graph, RegionGraph, Step
from actmem.planning.course import Course
from actmem.planning.fates import Fates, fates_under
from actmem.planning.pipeline import PipelineSimulator, Stage
from actmem.planning.plan import RuleSet, Tier
from actmem.planning.sharing import Common, Sharing, sharing_of
from actmem.planning.simulation import LayerPlan, Simulation
from actmem.planning.terrain import Moment


class RankSimulator:
    """One rank alone: others never keep it waiting. Layers are numbered from the first of its first stage."""

    def __init__(self, pipeline: PipelineSimulator, rank: int) -> None:
        self._pipeline = pipeline
        self._rank = rank
        self._stages: list[Stage] = list(pipeline.stages_of(rank).values())
        self.numbers = [layer for stage in pipeline.stages_of(rank) for layer in pipeline.pipeline.layers_of(stage)]
        self.conditions = self._stages[0].later.conditions
        self.layers: list[RegionGraph] = [layer for stage in self._stages for layer in stage.later.layers]
        self.graph = self._merged()
        self.commons: tuple[Common, ...] = tuple(
            _shifted(common, stage, span.start)
            for stage, span in enumerate(self.spans)
            for common in self._stages[stage].later.commons
        )

    @cached_property
    def spans(self) -> tuple[range, ...]:
        """The layers of each stage."""
        spans, start = [], 0
        for stage in self._stages:
            spans.append(range(start, start + len(stage.later.layers)))
            start = spans[-1].stop
        return tuple(spans)

    @property
    def repeats(self) -> int:
        """Micro-batches of a step."""
        return self._pipeline.pipeline.num_microbatches

    @property
    def gap_seconds(self) -> float:
        """Of one micro-batch, what runs outside the layers."""
        return sum(stage.later.gap_seconds for stage in self._stages)

    def moments(self, span: int, *, backward: bool) -> Sequence[Moment]:
        """The circumstances in which a stage's passes run."""
        return self._moments.get((span, backward), ())

    def run(self, plans: Sequence[LayerPlan]) -> Simulation:
        """Play the rank's step through."""
        play = self._pipeline.rank_play(self._rank, dict(zip(self.numbers, plans, strict=True)))
        while play.action is not None:
            play.play()
        return play.simulation()

    def course_of(self, layer: int, fates: Fates, elsewhere: frozenset[int] = frozenset()) -> Course:
        """The course of one layer."""
        stage, own = self._find(layer)
        return stage.later.course_of(own, fates, elsewhere)

    def sharing(self, layer: int) -> Sharing:
        """What a layer may hold together with others."""
        return sharing_of(self.commons, layer)

    def leaving(self, layer: int) -> frozenset[int]:
        """Storages that a layer makes and others refer to when its call is over."""
        stage, own = self._find(layer)
        return stage.later.leaving(own)

    def op_seconds(self, layer: int, op: int) -> float:
        """Seconds to run one op of a layer's forward pass again."""
        stage, own = self._find(layer)
        return stage.later.op_seconds(own, op)

    def copy_seconds(self, tier: Tier, num_bytes: int) -> float:
        """By how much copying a storage to a tier and back holds computing up."""
        return self._stages[0].later.copy_seconds(tier, num_bytes)

    def _find(self, layer: int) -> tuple[Stage, int]:
        stage, span = next((stage, span) for stage, span in enumerate(self.spans) if layer in span)
        return self._stages[stage], layer - span.start

    @cached_property
    def _moments(self) -> dict[tuple[int, bool], tuple[Moment, ...]]:
        """Seen in a step without a plan: what is under way when does not depend on plans."""
        unplanned = {
            number: LayerPlan(fates_under(layer, RuleSet(()), min_swap_bytes=0))
            for number, layer in zip(self.numbers, self.layers, strict=True)
        }
        play = self._pipeline.rank_play(self._rank, unplanned)
        found: dict[tuple[int, bool], list[Moment]] = {}
        while play.action is not None:
            seen = play.circumstances()
            simulator = self._stages[seen.stage].later if seen.gradients else self._stages[seen.stage].fresh
            moment = Moment(seen.counts, seen.num_bytes, simulator.surroundings, simulator.bare_surroundings)
            known = found.setdefault((seen.stage, seen.backward), [])
            if not any(other.covers(moment) for other in known):
                known[:] = [*(other for other in known if not moment.covers(other)), moment]
            play.play()
        return {key: tuple(known) for key, known in found.items()}

    def _merged(self) -> Graph:
        """The layers of all stages in one graph, with what stands through the step."""
        graphs = [self._pipeline.pipeline.stages[stage] for stage in self._pipeline.pipeline.stages_of[self._rank]]
        layers: dict[str, str] = {}
        kinds: dict[str, RegionGraph] = {}
        for index, graph in enumerate(graphs):
            layers |= {f"{index}.{name}": f"{index}.{kind}" for name, kind in graph.layers.items()}
            kinds |= {f"{index}.{kind}": region for kind, region in graph.kinds.items()}
        stood = [stage.standing for stage in self._stages]
        last = graphs[-1].step
        assert last is not None
        standing = sum(stood[1:], start=stood[0])
        step = Step(calls=(), gaps=last.gaps, standing=standing, num_tokens=last.num_tokens)
        return Graph(layers, kinds, step, self._pipeline.pipeline.made_for)


def _shifted(common: Common, stage: int, start: int) -> Common:
    """The same with layers numbered from another one on."""
    escape, name = common.escape, common.name
    return replace(
        common,
        name=(-1 - stage, name) if isinstance(name, int) else (name[0] + start, name[1]),
        holders=tuple((layer + start, storage) for layer, storage in common.holders),
        escape=None if escape is None else replace(escape, gap=escape.gap + start),
        maker=common.maker + start,
    )
