"""Plan files: a plan as YAML, and back, with everything wrong told at once."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from actmem.config.document import Document, Location, in_order, read_document
from actmem.config.layers import from_ranges, to_ranges
from actmem.config.patterns import pattern_problem
from actmem.config.shown import quoted, shown
from actmem.config.wording import nearest
from actmem.errors import PlanError
from actmem.files import replace_file
from actmem.graph import Fingerprint
from actmem.planning.plan import REACHES, TIERS, Action, Plan, Reach, Rule, Tier

FORMAT_VERSION = 1
_OTHER_BREAKS = {"\x85", "\u2028", "\u2029"}


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as YAML, without rules for no layer; where that fails, with `OSError`, a plan that stood there
    stays."""
    stream = io.StringIO()
    _yaml().dump(_to_dict(plan), stream)
    replace_file(path, stream.getvalue())


def read_plan(path: Path) -> Plan:
    """Read a plan file; `PlanError` lists everything wrong with it, each with its line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the plan {path}: {error}; name a file written by Plan.save") from error
    return _PlanReader(str(path), read_document(text)).read()


def _to_dict(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = {"actmem_plan": FORMAT_VERSION, "name": plan.name}
    if plan.fingerprint is not None:
        mine = plan.fingerprint
        data["fingerprint"] = {
            "model": mine.model,
            "regions": [{"kind": kind, "layers": layers} for kind, layers in _ranges_by_kind(mine.regions)],
            "dtypes": list(mine.dtypes),
            "inputs": list(mine.inputs),
            "autocast": mine.autocast,
            "layout": mine.layout,
        }
    if any(rule.action is Action.SWAP for rule in plan.rules):
        data["prefetch"] = plan.prefetch
    data["rules"] = [_rule_to_dict(rule) for rule in plan.rules if rule.layers != ()]
    return data


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    data = {
        "layers": "all" if rule.layers is None else to_ranges(rule.layers),
        "ops": rule.pattern,
        "action": rule.action.value,
    }
    if rule.reach != "op":
        data["reach"] = rule.reach
    if rule.tier is not None:
        data["tier"] = rule.tier
    if rule.label is not None:
        data["from"] = rule.label
    return data


class _PlanReader:
    """Reads a plan's document and collects everything wrong with it before refusing."""

    def __init__(self, source: str, document: Document) -> None:
        self._source = source
        self._document = document
        self._faults = list(document.faults)

    def read(self) -> Plan:
        data = self._document.value
        if not isinstance(data, dict) or data.get("actmem_plan") != FORMAT_VERSION:
            self._refuse(f"{self._source} is not a plan: it must begin with 'actmem_plan: {FORMAT_VERSION}'")
        assert isinstance(data, dict)
        self._known(data, {"actmem_plan", "name", "fingerprint", "prefetch", "rules"}, ())
        rules = data.get("rules", [])
        if not isinstance(rules, list):
            self._note(("rules",), f"{shown(rules)} is not a list")
            rules = []
        read = [self._rule(item, ("rules", index)) for index, item in enumerate(rules)]
        name = data.get("name", Path(self._source).stem)
        if not isinstance(name, str):
            self._note(("name",), f"{shown(name)} is not a text")
        fingerprint = self._fingerprint(data["fingerprint"]) if data.get("fingerprint") is not None else None
        prefetch = self._prefetch(data.get("prefetch", 1))
        if self._faults:
            noun = "fault" if len(self._faults) == 1 else "faults"
            self._refuse(f"{len(self._faults)} {noun} in the plan {self._source}:")
        return Plan(str(name), tuple(rule for rule in read if rule is not None), fingerprint, prefetch)

    def _refuse(self, message: str) -> NoReturn:
        faults = in_order(self._faults)
        raise PlanError("\n  ".join([message, *map(str, faults)]), faults)

    def _note(self, location: Location, problem: str, allowed: object = None, like: str | None = None) -> None:
        words = None if allowed is None else str(allowed)
        self._faults.append(self._document.fault(location, problem, allowed=words, nearest=like))

    def _known(self, data: Mapping[str, object], allowed: set[str], location: Location) -> None:
        for key in data:
            if key not in allowed and (*location, key) not in self._document.odd_keys:
                self._note((*location, key), "is not a key of a plan", sorted(allowed), nearest(key, allowed))

    def _rule(self, item: object, at: Location) -> Rule | None:
        if not isinstance(item, dict):
            self._note(at, f"{shown(item)} is not a mapping of layers, ops and action")
            return None
        before = len(self._faults)
        self._known(item, {"layers", "ops", "action", "tier", "reach", "from"}, at)
        pattern = self._pattern(item.get("ops"), (*at, "ops"))
        layers = self._layers(item.get("layers", "all"), (*at, "layers"))
        action = self._action(item.get("action"), (*at, "action"))
        tier = self._tier(item.get("tier"), action, (*at, "tier"))
        reach = self._reach(item.get("reach", "op"), (*at, "reach"))
        label = self._label(item.get("from"), (*at, "from"))
        if len(self._faults) > before or action is None:
            return None
        return Rule(pattern, action, layers, tier, reach, label)

    def _action(self, action: object, at: Location) -> Action | None:
        known = {action.value: action for action in Action}
        if isinstance(action, str) and action in known:
            return known[action]
        self._note(at, shown(action), sorted(known), nearest(action, known))
        return None

    def _tier(self, tier: object, action: Action | None, at: Location) -> Tier | None:
        for known in TIERS:
            if tier == known and action is Action.SWAP:
                return known
        if tier in TIERS and action is not None:
            self._note(at, f"{tier!r} beside action {action.value}; only a swap has a tier")
        elif tier is not None:
            self._note(at, shown(tier), f"{sorted(TIERS)}, or none for that of the settings")
        return None

    def _reach(self, reach: object, at: Location) -> Reach:
        for known in REACHES:
            if reach == known:
                return known
        self._note(at, shown(reach), sorted(REACHES))
        return "op"

    def _label(self, label: object, at: Location) -> str | None:
        if label is None or isinstance(label, str):
            return label
        self._note(at, shown(label), "a text that names the setting behind the rule, or none")
        return None

    def _prefetch(self, prefetch: object) -> int:
        if isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0:
            return prefetch
        self._note(("prefetch",), shown(prefetch), "a whole number of regions, 0 or more")
        return 1

    def _pattern(self, pattern: object, at: Location) -> str:
        if not isinstance(pattern, str):
            self._note(at, f"{shown(pattern)} is not a regex in text form")
            return ""
        if problem := pattern_problem(pattern):
            self._note(at, f"{quoted(pattern)} {problem}")
        return pattern

    def _layers(self, layers: object, at: Location) -> tuple[int, ...] | None:
        if layers == "all":
            return None
        if layers == []:
            self._note(at, "names no layer", "all, or numbers and ranges such as [0-15, 20]")
        try:
            return from_ranges(layers if isinstance(layers, list) else [str(layers)])
        except ValueError as error:
            self._note(at, str(error))
            return None

    def _fingerprint(self, data: object) -> Fingerprint | None:
        keep = "leave it as Plan.save wrote it, or remove it whole"
        if not isinstance(data, dict):
            self._note(("fingerprint",), f"{shown(data)} is not a mapping; {keep}")
            return None
        missing = [key for key in ("model", "regions", "dtypes", "inputs", "autocast") if key not in data]
        if missing:
            self._note(("fingerprint",), f"has no {', '.join(missing)}; {keep}")
            return None
        try:
            self._known(data, {"model", "regions", "dtypes", "inputs", "autocast", "layout"}, ("fingerprint",))
            kinds = {layer: str(group["kind"]) for group in data["regions"] for layer in from_ranges(group["layers"])}
            return Fingerprint(
                model=str(data["model"]),
                regions=tuple(kinds[layer] for layer in range(len(kinds))),
                dtypes=tuple(map(str, data["dtypes"])),
                inputs=tuple(map(str, data["inputs"])),
                autocast=None if data["autocast"] is None else str(data["autocast"]),
                layout=None if data.get("layout") is None else str(data["layout"]),
            )
        except (KeyError, TypeError, ValueError):
            self._note(("fingerprint",), f"does not name the kind of every layer, and lists of texts; {keep}")
            return None


def _ranges_by_kind(kinds: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    return [(kind, to_ranges(i for i, other in enumerate(kinds) if other == kind)) for kind in dict.fromkeys(kinds)]


class _Representer(SafeRepresenter):
    """Quotes texts with line breaks that other readers of YAML see, and its own writer does not."""

    def represent_str(self, data: str) -> ScalarNode:
        style = '"' if _OTHER_BREAKS & set(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    return yaml
