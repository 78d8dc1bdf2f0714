"""What the regions of one applied plan share: the source of rules, scripts already learned, and the guard settings."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from torch import nn

from actmem._compat import storage_id
from actmem.errors import PlanError
from actmem.graph import RegionGraph
from actmem.planning import Fates, Plan, Policy, Rule
from actmem.planning.plan import RuleSet, to_ranges
from actmem.runtime.tape import Tape

Verify = Literal["first", "always", "off"]


class NoEffectWarning(UserWarning):
    """Something in a plan matched nothing or changed nothing."""


class RuleSource(Protocol):
    """Where a region's rules come from."""

    name: str

    def group(self, layer: int) -> Hashable:
        """Equal for layers that get equal rules for equal graphs."""

    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]:
        """The rules for one layer, whose last call did what `graph` says."""


class PlanRules:
    """Rules from a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name = plan.name

    def group(self, layer: int) -> Hashable:
        """The layer's rules themselves."""
        return self.plan.rules_for(layer)

    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]:
        """The plan's rules for this layer."""
        return self.plan.rules_for(layer)


class PolicyRules:
    """Rules made by a policy on each region's own graph."""

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self._policy = policy

    def group(self, layer: int) -> Hashable:
        """A policy treats all layers alike."""
        return self.name

    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]:
        """What the policy makes of this graph."""
        return self._policy(graph)


class Engine:
    """Shared by the regions of one model. It refers to the model weakly."""

    def __init__(self, model: nn.Module, source: RuleSource, num_layers: int, verify: Verify, strict: bool) -> None:
        self.source = source
        self.shared: dict[Hashable, Any] = {}
        self.volatile: set[int] = set()
        self._model = weakref.ref(model)
        self._verify = verify
        self._strict = strict
        self._rules: dict[int, RuleSet] = {}
        self._fates: dict[int, Fates] = {}
        self._matched: set[Rule] = set()
        self._asked: dict[int, tuple[Rule, ...]] = {}
        self._num_layers = num_layers

    def verifies(self, *, first: bool) -> bool:
        """Whether a call compares hashes; `first`: it is the region's first with these shapes."""
        return self._verify == "always" or (self._verify == "first" and first)

    def owned_storages(self) -> frozenset[int]:
        """Identities of the storages of the model's parameters and buffers, as they are now."""
        model = self._model()
        if model is None:
            return frozenset()
        return frozenset(storage_id(each) for each in (*model.parameters(), *model.buffers()))

    @contextmanager
    def activate(self, tape: Tape) -> Iterator[None]:
        """Make `tape` the one that registered autograd Functions report to."""
        previous, _active.tape = _active.tape, tape
        try:
            yield
        finally:
            _active.tape = previous

    def remember(self, fates: Fates, rules: RuleSet) -> None:
        """Keep the rules that led to these fates."""
        self._rules[id(fates)] = rules
        self._fates[id(fates)] = fates

    def rules_of(self, fates: Fates) -> RuleSet:
        """The rules that led to these fates."""
        return self._rules[id(fates)]

    def note_matches(self, layer: int, fates: Fates) -> None:
        """Note what a layer's rules matched; once all layers have run, report rules that matched nothing anywhere."""
        rules = self._rules[id(fates)]
        self._asked[layer] = rules.rules
        self._matched |= rules.matched
        if len(self._asked) == self._num_layers:
            self._report_unmatched()
            self._num_layers = -1

    def _report_unmatched(self) -> None:
        asked = dict.fromkeys(rule for rules in self._asked.values() for rule in rules)
        unmatched = [rule for rule in asked if rule not in self._matched]
        if not unmatched:
            return
        listed = "; ".join(f"{rule.pattern!r} in layers {_layers_text(rule)}" for rule in unmatched)
        message = f"{len(unmatched)} rules of {self.source.name} match no op: {listed}; `actmem explain` lists the paths"
        if self._strict:
            raise PlanError(message)
        warnings.warn(message, NoEffectWarning, stacklevel=2)


class _Active:
    tape: Tape | None = None


_active = _Active()


def active_tape() -> Tape | None:
    """The tape of the region that runs now."""
    return _active.tape


def _layers_text(rule: Rule) -> str:
    return "all" if rule.layers is None else ", ".join(to_ranges(rule.layers))
