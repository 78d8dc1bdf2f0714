"""A plan: ordered rules that give each op of each layer an action. The last rule that matches wins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from actmem.errors import PlanError

FORMAT_VERSION = 1
MAX_LAYER = 9999


class Action(Enum):
    """What becomes of the storage that an op creates."""

    SAVE = "save"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Rule:
    """Gives `action` to the ops whose whole path inside the layer matches the regex `pattern`, in `layers` (``None``:
    all). `layers` are sorted indices of regions, from 0."""

    pattern: str
    action: Action
    layers: tuple[int, ...] | None = None

    def applies_to(self, layer: int) -> bool:
        """Whether the rule speaks of this layer."""
        return self.layers is None or layer in self.layers

    def matches(self, path: str) -> bool:
        """Whether the rule speaks of an op at this path inside the layer."""
        return re.fullmatch(self.pattern, path) is not None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was made for. `regions`: kind of each layer (its class and a digest of its parameters' shapes);
    `inputs`: shape of each region input by name; `dtypes` of the parameters; `autocast` dtype or ``None``."""

    model: str
    regions: tuple[str, ...]
    dtypes: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    autocast: str | None = None

    def differences(self, other: Fingerprint) -> list[str]:
        """Each field in which `other` differs, in words; empty for an equal fingerprint."""
        found = []
        if len(self.regions) != len(other.regions):
            found.append(f"the plan has {len(self.regions)} layers, the model {len(other.regions)}")
        else:
            pairs = enumerate(zip(self.regions, other.regions, strict=True))
            unequal = [(layer, mine, theirs) for layer, (mine, theirs) in pairs if mine != theirs]
            if unequal:
                layer, mine, theirs = unequal[0]
                found.append(f"{len(unequal)} layers differ, first layer {layer}: plan {mine}, model {theirs}")
        for name in ("model", "dtypes", "inputs", "autocast"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name}: plan {_plain(mine)}, model {_plain(theirs)}")
        return found


@dataclass(frozen=True)
class Plan:
    """Ordered rules under a `name`; ops that no rule matches are saved. With a `fingerprint` it fits one model only."""

    name: str
    rules: tuple[Rule, ...] = ()
    fingerprint: Fingerprint | None = None

    def rules_for(self, layer: int) -> tuple[Rule, ...]:
        """The rules that speak of one layer, in order."""
        return tuple(rule for rule in self.rules if rule.applies_to(layer))

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML."""
        with Path(path).open("w", encoding="utf-8") as stream:
            _yaml().dump(self._to_dict(), stream)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the plan that `save` wrote; `PlanError` lists everything wrong with the file."""
        source = Path(path)
        try:
            data = _yaml().load(source.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, YAMLError) as error:
            raise PlanError(f"cannot read the plan {source}: {error}; name a file written by Plan.save") from error
        return _PlanReader(str(source)).read(data)

    def _to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"actmem_plan": FORMAT_VERSION, "name": self.name}
        if self.fingerprint is not None:
            mine = self.fingerprint
            data["fingerprint"] = {
                "model": mine.model,
                "regions": [{"kind": kind, "layers": layers} for kind, layers in _ranges_by_kind(mine.regions)],
                "dtypes": list(mine.dtypes),
                "inputs": list(mine.inputs),
                "autocast": mine.autocast,
            }
        data["rules"] = [
            {"layers": "all" if rule.layers is None else to_ranges(rule.layers), "ops": rule.pattern, "action": rule.action.value}
            for rule in self.rules
        ]
        return data


class RuleSet:
    """The rules of one layer, with the actions of paths met so far, and which rules have matched anything."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.matched: set[Rule] = set()
        self._winners: dict[str, Rule | None] = {}

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
        if path not in self._winners:
            matching = [rule for rule in self.rules if rule.matches(path)]
            self.matched.update(matching)
            self._winners[path] = matching[-1] if matching else None
        return self._winners[path]

    @cached_property
    def recomputes(self) -> bool:
        """Whether any rule can drop anything."""
        return any(rule.action is not Action.SAVE for rule in self.rules)


def to_ranges(layers: Iterable[int]) -> list[str]:
    """``[0, 1, 2, 5]`` as ``['0-2', '5']``."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def from_ranges(ranges: Iterable[str | int]) -> tuple[int, ...]:
    """``['0-2', 5]`` as ``(0, 1, 2, 5)``; `ValueError` unless strictly ascending and not overlapping."""
    layers: list[int] = []
    for item in ranges:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(item).strip())
        if match is None:
            raise ValueError(f"{item!r} is not a layer or a range of layers; write for example 3 or '0-15'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_LAYER:
            raise ValueError(f"{item!r} is beyond layer {MAX_LAYER}; no model has that many")
        if last < first or (layers and first <= layers[-1]):
            raise ValueError(f"{item!r} is out of order; layers must be strictly ascending and must not overlap")
        layers.extend(range(first, last + 1))
    return tuple(layers)


class _PlanReader:
    """Reads a plan's data and collects everything wrong with it before refusing."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._faults: list[str] = []

    def read(self, data: object) -> Plan:
        if not isinstance(data, Mapping) or data.get("actmem_plan") != FORMAT_VERSION:
            raise PlanError(f"{self._source} is not a plan: it must begin with 'actmem_plan: {FORMAT_VERSION}'")
        self._known(data, {"actmem_plan", "name", "fingerprint", "rules"}, "the plan")
        rules = data.get("rules", [])
        if not isinstance(rules, list):
            self._faults.append(f"rules: {rules!r} is not a list")
            rules = []
        read = [self._rule(item, f"rules[{index}]") for index, item in enumerate(rules)]
        name = data.get("name", Path(self._source).stem)
        if not isinstance(name, str):
            self._faults.append(f"name: {name!r} is not a text")
        fingerprint = self._fingerprint(data["fingerprint"]) if data.get("fingerprint") is not None else None
        if self._faults:
            noun = "fault" if len(self._faults) == 1 else "faults"
            raise PlanError("\n  ".join([f"{len(self._faults)} {noun} in the plan {self._source}:", *self._faults]))
        return Plan(str(name), tuple(rule for rule in read if rule is not None), fingerprint)

    def _known(self, data: Mapping[str, object], allowed: set[str], where: str) -> None:
        unknown = sorted(str(key) for key in data if key not in allowed)
        if unknown:
            self._faults.append(f"{where}: unknown keys {unknown}; allowed: {sorted(allowed)}")

    def _rule(self, item: object, where: str) -> Rule | None:
        if not isinstance(item, Mapping):
            self._faults.append(f"{where}: {item!r} is not a mapping of layers, ops and action")
            return None
        before = len(self._faults)
        self._known(item, {"layers", "ops", "action"}, where)
        pattern = self._pattern(item.get("ops"), where)
        layers = self._layers(item.get("layers", "all"), where)
        actions = {action.value: action for action in Action}
        action = actions.get(str(item.get("action")))
        if action is None:
            self._faults.append(f"{where}.action: {item.get('action')!r}; allowed: {sorted(actions)}")
        if len(self._faults) > before or action is None:
            return None
        return Rule(pattern, action, layers)

    def _pattern(self, pattern: object, where: str) -> str:
        try:
            if isinstance(pattern, str):
                re.compile(pattern)
                return pattern
            self._faults.append(f"{where}.ops: {pattern!r} is not a regex in text form")
        except re.error as error:
            self._faults.append(f"{where}.ops: {pattern!r} is not a valid regex: {error}")
        return ""

    def _layers(self, layers: object, where: str) -> tuple[int, ...] | None:
        if layers == "all":
            return None
        try:
            return from_ranges(layers if isinstance(layers, list) else [str(layers)])
        except ValueError as error:
            self._faults.append(f"{where}.layers: {error}")
            return None

    def _fingerprint(self, data: object) -> Fingerprint | None:
        try:
            if not isinstance(data, Mapping):
                raise TypeError(f"{data!r} is not a mapping")
            self._known(data, {"model", "regions", "dtypes", "inputs", "autocast"}, "fingerprint")
            kinds = {layer: str(group["kind"]) for group in data["regions"] for layer in from_ranges(group["layers"])}
            return Fingerprint(
                model=str(data["model"]),
                regions=tuple(kinds[layer] for layer in range(len(kinds))),
                dtypes=tuple(map(str, data["dtypes"])),
                inputs=tuple(map(str, data["inputs"])),
                autocast=None if data["autocast"] is None else str(data["autocast"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            self._faults.append(f"fingerprint: {error!r}; leave it as Plan.save wrote it, or remove it whole")
            return None


def _ranges_by_kind(kinds: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    return [(kind, to_ranges(i for i, other in enumerate(kinds) if other == kind)) for kind in dict.fromkeys(kinds)]


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[attr-defined]
    yaml.width = 120
    return yaml


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
