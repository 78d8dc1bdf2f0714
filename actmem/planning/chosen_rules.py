"""From a choice for each layer to the rules of a whole plan: a block of rules for all layers that fare alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from actmem.graph import Graph, RegionGraph
from actmem.planning.options import Option
from actmem.planning.plan import Action, Rule, Tier
from actmem.planning.policies import patterns_of


def rules_of_options(options: Sequence[Option], graphs: Sequence[RegionGraph]) -> tuple[Rule, ...]:
    """The rules under which each layer, whose graph is given beside, fares as its option says."""
    groups: dict[tuple[Option, int], list[int]] = {}
    for layer, option in enumerate(options):
        groups.setdefault((option, id(graphs[layer])), []).append(layer)
    rules: list[Rule] = []
    for (option, _), layers in groups.items():
        where = None if len(layers) == len(options) else tuple(layers)
        rules += _rules_of(option, graphs[layers[0]], where)
    return tuple(rules)


def rules_of_policy(graph: Graph, rules_of_layer: Callable[[int, RegionGraph], tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """The rules that a policy makes of each kind of layer, for all layers of that kind."""
    kinds = list(graph.layers.values())
    layers_of = {kind: tuple(layer for layer, other in enumerate(kinds) if other == kind) for kind in graph.kinds}
    rules_of = {kind: rules_of_layer(layers_of[kind][0], region) for kind, region in graph.kinds.items()}
    if len(set(rules_of.values())) == 1:
        return next(iter(rules_of.values()))
    return tuple(replace(rule, layers=layers_of[kind]) for kind, rules in rules_of.items() for rule in rules)


def _rules_of(option: Option, graph: RegionGraph, layers: tuple[int, ...] | None) -> list[Rule]:
    paths = {op.path for op in graph.ops}
    named: dict[tuple[Action, Tier | None], set[str]] = {(Action.SAVE, None): set(option.saved)}
    for path, tier in option.swapped:
        named.setdefault((Action.SWAP, tier), set()).add(path)
    rules = [Rule(".*", Action.RECOMPUTE, layers)] if option.fates.replayed else []
    for (action, to), chosen in named.items():
        if rules or action is not Action.SAVE:
            rules += [Rule(pattern, action, layers, to) for pattern in patterns_of(chosen, paths - chosen)]
    return rules
