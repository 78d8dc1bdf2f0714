"""Ops that one setting recomputes and another swaps, found on the layers of a model as they are traced or run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from actmem.config.complaint import Complaint
from actmem.config.layers import to_ranges
from actmem.config.overlaps import ALLOWED_FATES
from actmem.config.schema import RunConfig
from actmem.config.ways import used_sections
from actmem.config.wording import dotted
from actmem.errors import ConfigError, Fault
from actmem.graph import Graph
from actmem.planning.plan import Action, Plan, Rule, RuleSet
from actmem.planning.sections import plan_of_sections, settings_of_rules


@dataclass(frozen=True)
class Clash:
    """Two rules that give the op at `path` two fates, and the layers in which they do."""

    recomputed: Rule
    swapped: Rule
    path: str
    layers: tuple[int, ...]

    @property
    def problem(self) -> str:
        """What is wrong with the rule that swaps."""
        layers = f"layer{'' if len(self.layers) == 1 else 's'} {', '.join(to_ranges(self.layers))}"
        return f"is also recomputed, by {self.recomputed.name}: {self.path} in {layers}"


def clashes_in(rules: RuleSet, paths: Iterable[str], layer: int) -> list[Clash]:
    """Each pair of rules that clash at any of these paths of a layer, with the first path at which they do."""
    found: dict[tuple[Rule, Rule], Clash] = {}
    if rules.actions >= {Action.RECOMPUTE, Action.SWAP}:
        for path in paths:
            for pair in _pairs(rules.matching(path)):
                found.setdefault(pair, Clash(*pair, path, (layer,)))
    return list(found.values())


def refuse_clashes_in(rules: RuleSet, paths: Iterable[str], layer: int) -> None:
    """Raise `ConfigError` for rules that clash at any of these paths of a layer."""
    clashes = clashes_in(rules, paths, layer)
    if clashes:
        raise ConfigError([Fault(each.swapped.name, each.problem, allowed=ALLOWED_FATES) for each in clashes])


def may_clash(config: RunConfig) -> bool:
    """Whether the sections of a configuration both recompute and swap, be it in different layers."""
    return {Action.RECOMPUTE, Action.SWAP} <= {rule.action for rule in _plan(config).rules}


def complaints_of_clashes(config: RunConfig, graph: Graph) -> Iterator[Complaint]:
    """A complaint for each pair of settings of the sections that clash in the layers of `graph`, at the one that
    swaps."""
    settings = settings_of_rules(config)
    for clash in _clashes_of(_plan(config), graph):
        setting = settings[clash.swapped, clash.swapped.label]
        value = setting.pattern or setting.entries
        yield Complaint(setting.field, clash.problem, value, ALLOWED_FATES, setting.inside)


def refuse_clashes(config: RunConfig, graph: Graph) -> None:
    """Raise `ConfigError` for settings of the sections that clash in the layers of `graph`."""
    faults = [
        Fault(dotted(each.location), each.problem, each.value, each.allowed)
        for each in complaints_of_clashes(config, graph)
    ]
    if faults:
        raise ConfigError(faults)


def _plan(config: RunConfig) -> Plan:
    return plan_of_sections(config) if used_sections(config) else Plan("none")


def _clashes_of(plan: Plan, graph: Graph) -> list[Clash]:
    found: dict[tuple[Rule, Rule], Clash] = {}
    known: dict[tuple[str, tuple[Rule, ...]], list[Clash]] = {}
    for layer, kind in enumerate(graph.layers.values()):
        key = (kind, plan.rules_for(layer))
        if key not in known:
            known[key] = clashes_in(RuleSet(key[1]), [op.path for op in graph.kinds[kind].ops], layer)
        for clash in known[key]:
            pair = (clash.recomputed, clash.swapped)
            before = found.setdefault(pair, replace(clash, layers=()))
            found[pair] = replace(before, layers=(*before.layers, layer))
    return list(found.values())


def _pairs(rules: tuple[Rule, ...]) -> Iterator[tuple[Rule, Rule]]:
    recomputing = [rule for rule in rules if rule.action is Action.RECOMPUTE]
    return ((mine, theirs) for mine in recomputing for theirs in rules if theirs.action is Action.SWAP)
