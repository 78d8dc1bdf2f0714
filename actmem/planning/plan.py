"""A plan: ordered rules that give each op of each layer an action. The last rule that matches wins.

A region's inputs have a path of their own, `INPUT_PATH`: nothing in the region can make them again, so a rule that
says recompute leaves them saved, but they can be swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from actmem.config import op_names, patterns
from actmem.errors import PlanError
from actmem.graph import Fingerprint

INPUT_PATH = op_names.INPUT

Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)

Reach = Literal["op", "below", "communication"]
REACHES: tuple[Reach, ...] = get_args(Reach)


class Action(Enum):
    """What becomes of the storage that an op creates."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Rule:
    """Gives `action` to the ops whose whole path inside the layer matches the regex `pattern`, in `layers` (``None``:
    all). `layers` are sorted indices of regions, from 0. A swap may name its `tier`; without one the settings do.

    `reach` says how the pattern is read. ``op``: as just said. ``below``: it may match a module too, and then speaks of
    all that lies below; and an op without its number, or by a familiar name. ``communication``: it speaks of
    communication ops alone, each likewise without its number or by a familiar name. Matching once over the path and
    once over each module around it, rather than with one longer regex, leaves the pattern's anchors, lookaheads,
    alternatives and inline flags to mean what they mean.

    `label` is the setting that the rule was made from, as its user wrote it: ``recompute.exclude_op 'mm'``. It is for
    people to read, and makes no two rules differ.
    """

    pattern: str
    action: Action
    layers: tuple[int, ...] | None = None
    tier: Tier | None = None
    reach: Reach = "op"
    label: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The rule as a message names it: by its setting, or else by its pattern."""
        return self.label or repr(self.pattern)

    def applies_to(self, layer: int) -> bool:
        """Whether the rule speaks of this layer."""
        return self.layers is None or layer in self.layers

    def matches(self, path: str) -> bool:
        """Whether the rule speaks of an op at this path inside the layer. Raises `PlanError` for a pattern that takes
        too long to say so."""
        try:
            return _READINGS[self.reach](self.pattern, path)
        except patterns.SlowPatternError as error:
            raise PlanError(str(error)) from None


_READINGS: dict[Reach, Callable[[str, str], bool]] = {
    "op": patterns.matches,
    "below": patterns.covers,
    "communication": patterns.hits_communication,
}


@dataclass(frozen=True)
class Plan:
    """Ordered rules under a `name`; ops that no rule matches are saved. With a `fingerprint` it fits one model only.

    `prefetch` is how many regions ahead of the backward pass swapped values start on their way back. With `one_fate` no
    op may be both recomputed and swapped by its rules, as is promised for the sections of a configuration.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    fingerprint: Fingerprint | None = None
    prefetch: int = 1
    one_fate: bool = field(default=False, compare=False)

    def rules_for(self, layer: int) -> tuple[Rule, ...]:
        """The rules that speak of one layer, in order."""
        return tuple(rule for rule in self.rules if rule.applies_to(layer))

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML; `load` reads it back."""
        from actmem.planning.plan_file import write_plan

        write_plan(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; `PlanError` lists everything wrong with it."""
        from actmem.planning.plan_file import read_plan

        return read_plan(Path(path))


class RuleSet:
    """The rules of one layer, with the actions of paths met so far, and which rules have matched anything."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.matched: set[Rule] = set()
        self._matching: dict[str, tuple[Rule, ...]] = {}

    def meet(self, paths: Iterable[str]) -> None:
        """Note which rules match any of these paths."""
        for path in paths:
            self.winner_of(path)

    def action_of(self, path: str) -> Action:
        """The action of the op at `path`: that of the last rule that matches, else save."""
        winner = self.winner_of(path)
        return Action.SAVE if winner is None else winner.action

    def winner_of(self, path: str) -> Rule | None:
        """The rule that decides about the op at `path`."""
        matching = self.matching(path)
        return matching[-1] if matching else None

    def matching(self, path: str) -> tuple[Rule, ...]:
        """All rules that speak of the op at `path`, in order."""
        if path not in self._matching:
            self._matching[path] = tuple(rule for rule in self.rules if rule.matches(path))
            self.matched.update(self._matching[path])
        return self._matching[path]

    def tier_of(self, path: str) -> Tier | None:
        """The tier that the deciding rule names for the op at `path`, if any."""
        winner = self.winner_of(path)
        return None if winner is None else winner.tier

    def communicates_again(self, path: str) -> bool:
        """Whether the deciding rule asks for the collective at `path` to be issued again in the backward pass."""
        winner = self.winner_of(path)
        return winner is not None and winner.reach == "communication" and winner.action is Action.RECOMPUTE

    @cached_property
    def actions(self) -> frozenset[Action]:
        """What the rules can do."""
        return frozenset(rule.action for rule in self.rules)
