"""What the regions of one applied plan share: the source of rules, scripts already learned, and the guard settings."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from actmem._compat import storage_id
from actmem.config.schema import MemoryConfig
from actmem.errors import PlanError
from actmem.graph import RegionGraph
from actmem.graph.fingerprint import joined_variants
from actmem.planning import Action, Fingerprint, Plan, Policy, Rule
from actmem.planning.clashes import refuse_clashes_in
from actmem.planning.idle_rules import Deeds, idle_rules
from actmem.planning.plan import INPUT_PATH, RuleSet, Tier
from actmem.planning.policies import SWAPPING
from actmem.runtime.learning import Script
from actmem.runtime.swap.swapper import Swapper
from actmem.runtime.tape import Tape

_MAX_SCRIPTS = 256


class NoEffectWarning(UserWarning):
    """Something in a plan matched nothing or changed nothing."""


class RuleSource(Protocol):
    """Where a region's rules come from. `must_free`: somebody wrote each rule, so one that frees nothing is news.
    `one_fate`: no op may be both recomputed and swapped by the rules."""

    name: str
    must_free: bool
    made_for: Fingerprint | None
    prefetch: int
    may_swap: bool
    one_fate: bool

    @property
    def tiers(self) -> Set[Tier]:
        """The tiers that rules name."""

    def group(self, layer: int) -> Hashable:
        """Equal for layers that get equal rules for equal graphs."""

    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]:
        """The rules for one layer, whose last call did what `graph` says."""

    def joined(self, asked: Mapping[int, tuple[Rule, ...]]) -> tuple[Rule, ...]:
        """The rules of several layers, as `rules` gave them, in one plan."""


class PlanRules:
    """Rules from a plan."""

    must_free = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name = plan.name
        self.made_for = plan.fingerprint
        self.prefetch = plan.prefetch
        self.may_swap = any(rule.action is Action.SWAP for rule in plan.rules)
        self.one_fate = plan.one_fate

    @property
    def tiers(self) -> Set[Tier]:
        """The tiers that rules name."""
        return {rule.tier for rule in self.plan.rules if rule.tier is not None}

    def group(self, layer: int) -> Hashable:
        """The layer's rules themselves."""
        return self.plan.rules_for(layer)

    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]:
        """The plan's rules for this layer."""
        return self.plan.rules_for(layer)

    def joined(self, asked: Mapping[int, tuple[Rule, ...]]) -> tuple[Rule, ...]:
        """The plan's own rules, as they stand there, that speak of any of these layers."""
        return tuple(rule for rule in self.plan.rules if any(map(rule.applies_to, asked)))


class PolicyRules:
    """Rules made by a policy on each region's own graph."""

    must_free = False
    made_for: Fingerprint | None = None
    prefetch = 1
    one_fate = False
    tiers: frozenset[Tier] = frozenset()

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.may_swap = name in SWAPPING
        self._policy = policy

    def group(self, layer: int) -> Hashable:
        """A policy treats all layers alike."""
        return self.name

    def rules(self, layer: int, graph: RegionGraph) -> tuple[Rule, ...]:
        """What the policy makes of this graph."""
        return self._policy(graph)

    def joined(self, asked: Mapping[int, tuple[Rule, ...]]) -> tuple[Rule, ...]:
        """The rules of each group of layers that have equal ones."""
        layers_of: dict[tuple[Rule, ...], list[int]] = {}
        for layer, rules in sorted(asked.items()):
            layers_of.setdefault(rules, []).append(layer)
        if len(layers_of) == 1:
            return next(iter(layers_of))
        return tuple(replace(rule, layers=tuple(layers)) for rules, layers in layers_of.items() for rule in rules)


class Engine:
    """Shared by the regions of one model. It refers to the model weakly."""

    def __init__(
        self, model: nn.Module, source: RuleSource, num_layers: int, memory: MemoryConfig, swapper: Swapper | None
    ) -> None:
        self.source = source
        self.swapper = swapper
        self.min_swap_bytes = memory.min_swap_bytes
        self.shared: dict[Hashable, Script] = {}
        self.volatile: set[int] = set()
        self._inputs: dict[tuple[str, ...], None] = {}
        self.autocast: str | None = None
        self._model = weakref.ref(model)
        self._verify = memory.verify
        self._strict = memory.strict_matching
        self.refusal: str | None = None
        self._has_reported = False
        self._deeds = Deeds()
        self._asked: dict[int, tuple[Rule, ...]] = {}
        self._num_layers = num_layers

    @property
    def has_run(self) -> bool:
        """Whether any layer has been called."""
        return bool(self._inputs)

    def check_inputs(self, inputs: tuple[str, ...], autocast: str | None, *, first: bool) -> None:
        """Refuse inputs that the plan was not made for; note those of each layer's `first` call."""
        if first:
            self._inputs[inputs] = None
        self.autocast = autocast
        if self.source.made_for is not None:
            self.source.made_for.refuse_other_inputs(self.source.name, inputs, autocast)

    def plan(self, made_for: Fingerprint) -> Plan:
        """The rules of all layers called so far as one plan."""
        fingerprint = replace(made_for, inputs=joined_variants(self._inputs), autocast=self.autocast)
        return Plan(self.source.name, self.source.joined(self._asked), fingerprint, self.source.prefetch)

    def verifies(self, *, first: bool) -> bool:
        """Whether a call compares hashes; `first`: it is the region's first with these shapes."""
        return self._verify == "always" or (self._verify == "first" and first)

    def owned_storages(self) -> frozenset[int]:
        """Identities of the storages of the model's parameters and buffers, as they are now."""
        model = self._model()
        if model is None:
            return frozenset()
        return frozenset(storage_id(each) for each in (*model.parameters(), *model.buffers()))

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of the model's parameters or buffers."""
        return storage_id(tensor) in self.owned_storages()

    @contextmanager
    def activate(self, tape: Tape) -> Iterator[None]:
        """Make `tape` the one that registered autograd Functions report to."""
        previous, _active.tape = _active.tape, tape
        try:
            yield
        finally:
            _active.tape = previous

    def share(self, key: Hashable, script: Script) -> None:
        """Keep a script for all regions with this key, and drop the oldest where shapes vary without end."""
        self.shared[key] = script
        if len(self.shared) > _MAX_SCRIPTS:
            del self.shared[next(iter(self.shared))]

    def rules_of(self, layer: int, graph: RegionGraph) -> RuleSet:
        """The rules of a layer, which have met all that its last call did. Raises `ConfigError` where the sections of a
        configuration recompute and swap one op."""
        rules = RuleSet(self.source.rules(layer, graph))
        paths = [op.path for op in graph.ops]
        rules.meet([*paths, INPUT_PATH])
        if self.source.one_fate:
            refuse_clashes_in(rules, paths, layer)
        return rules

    def note_matches(self, layer: int, script: Script) -> None:
        """Note what a layer's rules matched and freed; once all layers have run, report rules that did nothing."""
        self._asked[layer] = script.rules.rules
        if not self._has_reported:
            self._deeds.note(script.rules, script.fates)
        if len(self._asked) == self._num_layers:
            self.report_no_effect()

    def report_no_effect(self) -> None:
        """Report, once, the rules that match no op or free no byte in any layer called so far."""
        if self._has_reported or not self._asked:
            return
        self._has_reported = True
        idle = idle_rules(self._deeds, self.source)
        self._deeds = Deeds()
        if not idle:
            return
        told = "; ".join(map(str, idle))
        message = f"rules of {self.source.name} without effect: {told}; `actmem explain` lists the paths"
        if self._strict:
            self.refusal = message
            raise PlanError(message)
        warnings.warn(message, NoEffectWarning, stacklevel=2)


class _Active:
    tape: Tape | None = None


_active = _Active()


def active_tape() -> Tape | None:
    """The tape of the region that runs now."""
    return _active.tape
