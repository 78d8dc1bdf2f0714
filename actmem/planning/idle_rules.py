"""Rules that do nothing in the layers they speak of: they match no op, free no byte, or keep nothing from being made
again. A run tells of them once its layers have run, `actmem check` as soon as they are traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from actmem.config.layers import to_ranges
from actmem.graph import Graph, RegionGraph
from actmem.planning.fates import SMALL, Fates, deciding_path, fates_under, path_of_storage
from actmem.planning.plan import INPUT_PATH, Action, Rule, RuleSet, Tier

_THE_INPUT = "is the layer's input, which nothing in the layer can make again"
_OVERRULED = "is decided by a later rule"
_VIEW = "is a view, which has no memory of its own"
_NOT_RECOMPUTED = "is not recomputed anyway"
_NOT_SAVED = "is not saved"
_TOO_SMALL = "is below memory.min_swap_bytes"


class Source(Protocol):
    """Where rules come from. Each one that somebody wrote `must_free` something; those of a policy, where it
    `may_swap`, have to swap something among them."""

    @property
    def must_free(self) -> bool: ...
    @property
    def may_swap(self) -> bool: ...
    def group(self, layer: int) -> Hashable: ...
    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]: ...


@dataclass(frozen=True)
class IdleRule:
    """A rule without effect, or all rules of a policy together (``None``), and the reason."""

    rule: Rule | None
    problem: str

    def __str__(self) -> str:
        if self.rule is None:
            return self.problem
        layers = "all" if self.rule.layers is None else ", ".join(to_ranges(self.rule.layers))
        return f"{self.rule.name} in layers {layers} {self.problem}"


class Deeds:
    """What rules did in the layers noted so far."""

    def __init__(self) -> None:
        self._noted: list[tuple[RuleSet, Fates]] = []

    def note(self, rules: RuleSet, fates: Fates) -> None:
        """Add a layer: its rules, which have met all its paths and `INPUT_PATH`, and the fates under them."""
        if not any(rules is known and fates is others for known, others in self._noted):
            self._noted.append((rules, fates))

    @property
    def asked(self) -> tuple[Rule, ...]:
        """All rules that speak of these layers, in order."""
        return tuple({(rule, rule.label): rule for rules, _ in self._noted for rule in rules.rules}.values())

    @property
    def matched(self) -> set[Rule]:
        """The rules that match anything."""
        return {rule for rules, _ in self._noted for rule in rules.matched}

    @property
    def swaps(self) -> bool:
        """Whether anything is swapped."""
        return any(fates.swapped for _, fates in self._noted)

    @property
    def useful(self) -> set[Rule]:
        """The rules that free something, or keep it from being recomputed."""
        return {rule for rules, fates in self._noted for rule in (*_freeing(rules, fates), *_keeping(rules, fates))}

    def why_idle(self, rule: Rule) -> str:
        """What stands between a rule and all that it matches."""
        met = [(rules, fates) for rules, fates in self._noted if rule in rules.matched]
        reasons = dict.fromkeys(reason for rules, fates in met for reason in _obstacles(rule, rules, fates))
        if not reasons:  # it matches no op, but the input
            reasons = dict.fromkeys(_obstacle_of_input(rule, fates) for _, fates in met)
        telling = sorted(reasons, key=lambda reason: reason in (_NOT_SAVED, _VIEW))
        return f"what it matches {', or '.join(telling)}"


def idle_rules(deeds: Deeds, source: Source) -> list[IdleRule]:
    """The rules of `source` that had no effect in any of the layers that `deeds` have noted.

    Of rules that save, those are judged that a setting of its own asked for.
    """
    if source.may_swap and not source.must_free and not deeds.swaps:
        what = "what the policy names is not saved, or is below memory.min_swap_bytes"
        return [IdleRule(None, f"nothing is swapped: {what}")]
    matched, useful = deeds.matched, deeds.useful
    found = [IdleRule(rule, "matches no op") for rule in deeds.asked if rule not in matched]
    if source.must_free:
        for rule in deeds.asked:
            if rule in matched - useful and (rule.action is not Action.SAVE or rule.label is not None):
                verb = "keeps nothing" if rule.action is Action.SAVE else "frees 0 bytes"
                found.append(IdleRule(rule, f"{verb}: {deeds.why_idle(rule)}"))
    return found


def predicted_deeds(graph: Graph, source: Source, layers: Iterable[int], *, min_swap_bytes: int) -> Deeds:
    """What the rules of `source` will do in some layers (indices from 0) of a traced model."""
    deeds, kinds = Deeds(), list(graph.layers.values())
    for layer in {(kinds[layer], source.group(layer)): layer for layer in layers}.values():
        region = graph.kinds[kinds[layer]]
        rules = RuleSet(source.rules(layer, region))
        rules.meet([*(op.path for op in region.ops), INPUT_PATH])
        deeds.note(rules, fates_under(region, rules, min_swap_bytes=min_swap_bytes))
    return deeds


def _freeing(rules: RuleSet, fates: Fates) -> Iterator[Rule]:
    """Rules that recompute or swap what is let go of; several may ask for one op, as for a module and its parent. What
    a collective made is let go of wherever it is issued again: else it is saved for what is recomputed from it."""
    storages = fates.graph.storages
    again = {each for each, op in fates.graph.creators.items() if op in fates.replayed and storages[each].kept}
    for storage in fates.dropped | fates.swapped | again:
        matching = rules.matching(deciding_path(fates.graph, storage, rules.communicates_again))
        yield from next((last for _, last in groupby(reversed(matching), _asks_for)), ())


def _asks_for(rule: Rule) -> tuple[Action, Tier | None, bool]:
    return rule.action, rule.tier, rule.reach == "communication"


def _keeping(rules: RuleSet, fates: Fates) -> Iterator[Rule]:
    """Rules that save what is held, where those before them would have it recomputed; several may ask for one op."""
    for storage in fates.held:
        path = path_of_storage(fates.graph, storage)
        matching = list(rules.matching(path)) if path != INPUT_PATH else []
        saving = []
        while matching and matching[-1].action is Action.SAVE:
            saving.append(matching.pop())
        if matching and matching[-1].action is Action.RECOMPUTE:
            yield from saving


def _obstacles(rule: Rule, rules: RuleSet, fates: Fates) -> Iterator[str]:
    """Why nothing comes of a rule at each op that it matches."""
    graph = fates.graph
    made: dict[int, list[int]] = {}
    for storage, creator in graph.creators.items():
        made.setdefault(creator, []).append(storage)
    for index, op in enumerate(graph.ops):
        if rule not in rules.matching(op.path):
            continue
        if rules.winner_of(op.path) != rule:
            yield _OVERRULED
        elif index not in made:
            yield _VIEW
        else:
            yield from (_obstacle(rule, fates.held.get(storage)) for storage in made[index])


def _obstacle(rule: Rule, held_because: str | None) -> str:
    """Why nothing comes of a rule for a storage that it decides about."""
    if held_because is None:
        return _NOT_SAVED
    if rule.action is Action.SAVE:
        return _NOT_RECOMPUTED
    return _TOO_SMALL if held_because == SMALL else f"must always be saved ({held_because})"


def _obstacle_of_input(rule: Rule, fates: Fates) -> str:
    if rule.action is not Action.SWAP:
        return _THE_INPUT
    storages = fates.graph.storages
    may_go = any(storages[each].kind == "input" and not storages[each].constant for each in fates.held)
    return _TOO_SMALL if may_go else _NOT_SAVED
