"""Settings that match or change nothing in a traced model: the same that a run would tell of, each with its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from actmem.config.complaint import Complaint
from actmem.config.layers import to_ranges
from actmem.config.schema import ParallelConfig, RunConfig
from actmem.config.settings import Setting
from actmem.config.shown import quoted
from actmem.config.stages import layers_of_stages, stages_of_rank
from actmem.graph import Graph
from actmem.planning.idle_rules import IdleRule, Source, idle_rules, predicted_deeds
from actmem.planning.matching import Match, settings_matched
from actmem.planning.sections import settings_of_rules, way_of

Told = tuple[str, Complaint]
"""The path by which a message names a setting, and what is wrong with it."""


def idle_complaints(config: RunConfig, matches: Iterable[Match], graph: Graph, source: Source) -> list[Told]:
    """Each setting, or rule of a plan file or policy, that has no effect in the layers of `graph`, with the reason.

    `matches` are what `match_patterns` finds there. Of a pipeline each rank is asked by itself, as in a
    run.
    """
    pairs = zip(settings_matched(config), matches, strict=True)
    found = {setting: _of_match(setting, match) for setting, match in pairs if match.problem is not None}
    others: dict[str, Told] = {}
    settings = settings_of_rules(config)
    for idle in _idle_on_ranks(config, graph, source):
        setting = None if idle.rule is None else settings.get((idle.rule, idle.rule.label))
        if setting is not None:
            found.setdefault(setting, _of_setting(setting, idle.problem))
        else:
            others.setdefault(str(idle), (way_of(config), Complaint(way_of(config), str(idle))))
    return [*found.values(), *others.values()]


def _idle_on_ranks(config: RunConfig, graph: Graph, source: Source) -> Iterator[IdleRule]:
    for layers in _layers_of_ranks(config.parallel, len(graph.layers)):
        where = f" on the rank with layers {', '.join(to_ranges(layers))}" if config.parallel.pp_size > 1 else ""
        deeds = predicted_deeds(graph, source, layers, min_swap_bytes=config.memory.min_swap_bytes)
        for idle in idle_rules(deeds, source):
            yield replace(idle, problem=idle.problem + where)


def _layers_of_ranks(parallel: ParallelConfig, num_layers: int) -> list[list[int]]:
    """The layers that each rank of a pipeline has."""
    cuts = layers_of_stages(parallel, num_layers)
    ranks = [stages_of_rank(parallel, rank) for rank in range(parallel.pp_size)]
    return [[layer for stage in stages for layer in range(*cuts[stage])] for stages in ranks]


def _of_match(setting: Setting, match: Match) -> Told:
    nearest = ", ".join(match.nearest) or None
    return _path(setting), Complaint(
        setting.field, str(match.problem), match.pattern, inside=setting.pattern_at, nearest=nearest
    )


def _of_setting(setting: Setting, problem: str) -> Told:
    value, inside = (setting.pattern, setting.pattern_at) if setting.pattern else (setting.entries, setting.inside)
    return _path(setting), Complaint(setting.field, problem, value, inside=inside)


def _path(setting: Setting) -> str:
    return setting.field if setting.pattern is None else f"{setting.field}[{quoted(setting.pattern)}]"
