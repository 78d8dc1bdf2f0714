"""YAML text as plain values, with the line and column at which every key and list entry stands.

The text is read as YAML 1.2 with the core types only: mappings, lists, text, numbers, truth values and null. Anchors
and aliases work; tags, merge keys and sets do not. Whatever is wrong with one entry is noted and the reading goes on,
so that one pass finds every fault; only broken syntax ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from actmem.config.complaint import Complaint
from actmem.config.schema import Section
from actmem.config.shown import shown
from actmem.config.wording import dotted
from actmem.errors import Fault

Location = tuple[str | int, ...]
Place = tuple[int, int]

_CORE = "tag:yaml.org,2002:"
_TEXT_TAGS = {"str", "timestamp", "value"}  # YAML 1.2 has no dates, and no meaning for a lone '='
_PLAIN_KINDS = {"null", "bool", "int", "float"}

MAX_NODES = 100_000
"""Keys and values of one text, aliases counted as often as they stand there."""

_KEYS = "keys of text, quoted if need be"
_TOO_LARGE = "is a number of more than 64 bits"

UNREADABLE = object()
"""Stands where a value could not be read and a fault says so; nothing more can be said about it."""


@dataclass
class Document:
    """What a configuration says, where it says it, and what could not be read.

    `places` maps a location to its line and column, both from 1, or to `None` for what did not come from the file.
    `repeats` are the values that keys have where they are given again, each with its location; the first one counts.
    `odd_keys` are where keys stand that do not read as text; they are at fault, and what stands there is read as ever.
    """

    value: object = None
    places: dict[Location, Place | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    repeats: list[tuple[Location, Document]] = field(default_factory=list)
    odd_keys: set[Location] = field(default_factory=set)

    def with_repeat(self, location: Location, repeat: Document) -> Document:
        """The document as it would be if of a key that is given twice the other value counted."""
        places = {at: place for at, place in self.places.items() if at[: len(location)] != location}
        return Document(_replaced(self.value, location, repeat.value), places | repeat.places)

    def place(self, location: Location) -> Place | None:
        """Line and column of `location`, or of the nearest section around it."""
        for end in range(len(location), -1, -1):
            if location[:end] in self.places:
                return self.places[location[:end]]
        return None

    def placed(self, fault: Fault) -> Fault:
        """A fault that has no place yet, with that of its path, or of the nearest section around it that is written."""
        if fault.line is not None:
            return fault
        known = {dotted(location): place for location, place in self.places.items() if location}
        around = [path for path in known if fault.path == path or fault.path.startswith((f"{path}.", f"{path}["))]
        line, column = (known[max(around, key=len)] if around else None) or (None, None)
        return replace(fault, line=line, column=column)

    def complained(self, complaint: Complaint, location: Location | None = None) -> Fault:
        """What a rule or a look at the layers finds wrong, as a fault with its place; at `location` if that differs."""
        found = {"value": complaint.value, "allowed": complaint.allowed, "nearest": complaint.nearest}
        return self.fault(location or complaint.location, complaint.problem, **found)

    def fault(self, location: Location, problem: str, **details: Any) -> Fault:
        """A fault at `location`, with its line and column filled in."""
        line, column = self.place(location) or (None, None)
        return Fault(dotted(location), problem, line=line, column=column, **details)


def read_document(text: str) -> Document:
    """Read YAML `text`, which never raises; after broken syntax the whole value is `UNREADABLE`."""
    document = Document(UNREADABLE, {(): (1, 1)})
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML allows an anchor to be set anew
    try:
        node = yaml.compose(text)
        if node is not None and _num_nodes(node) > MAX_NODES:
            problem = f"stands for more than {MAX_NODES} values, with what its aliases mean written out"
            document.faults = [Fault("YAML", problem, line=1, column=1)]
        else:
            document.value = None if node is None else _Reading(document, yaml.constructor).value(node, ())
    except ReaderError as error:
        document.faults = [_unreadable_character(text, error)]
    except MarkedYAMLError as error:
        document.faults = [_syntax_fault(error)]
    except RecursionError:
        document.faults = [Fault("YAML", "is nested too deeply", line=1, column=1)]
    except (YAMLError, ValueError, OverflowError) as error:  # an escape such as \UFFFFFFFF breaks ruamel itself
        document.faults = [Fault("YAML", f"cannot be read: {error}", line=1, column=1)]
    return document


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    """Faults by their place; what has none, such as an override, comes last and keeps its order."""
    return sorted(faults, key=lambda fault: (fault.line or float("inf"), fault.column or 0))


def from_mapping(mapping: Mapping[str, object]) -> Document:
    """A document without lines, of a mapping made in Python, whose sections may be `Section` objects."""
    document = Document()
    document.value = _plain(mapping, (), document)
    return document


_DEEPEST = 6
"""Levels of a mapping below which no section has any."""


def _plain(value: object, location: Location, document: Document) -> object:
    """A Python value as the text of a file would give it; what no file can say is noted."""
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, int) and not isinstance(value, bool) and not _fits(value):
        document.faults.append(Fault(dotted(location), _TOO_LARGE))
        return UNREADABLE
    if len(location) >= _DEEPEST:
        return value
    if isinstance(value, list | tuple):
        return type(value)(_plain(each, (*location, index), document) for index, each in enumerate(value))
    if not isinstance(value, Mapping):
        return value
    found: dict[str, object] = {}
    for key, each in value.items():
        name = key if isinstance(key, str) else shown(key)
        if not isinstance(key, str):
            document.faults.append(Fault(dotted(location), _odd_key(f"the key {name}"), allowed=_KEYS))
            document.odd_keys.add((*location, name))
        found.setdefault(name, _plain(each, (*location, name), document))
    return found


class _Reading:
    """Turns the nodes of one text into values, noting places and faults in the document."""

    def __init__(self, document: Document, scalars: Any) -> None:
        self._document = document
        self._scalars = scalars
        # An aliased node is built once and shared: expanding it each time lets a short text grow without bound.
        self._built: dict[int, object] = {}
        self._open: set[int] = set()

    def value(self, node: Node, location: Location) -> object:
        if id(node) in self._open:
            return self._spoil(location, "contains itself")
        if id(node) not in self._built:
            self._open.add(id(node))
            self._built[id(node)] = self._build(node, location)
            self._open.remove(id(node))
        return self._built[id(node)]

    def _build(self, node: Node, location: Location) -> object:
        kind = str(node.tag).removeprefix(_CORE)
        if isinstance(node, ScalarNode):
            return self._scalar(node, kind, location)
        if kind == "seq" and isinstance(node, SequenceNode):
            return self._list(node, location)
        if kind == "map" and isinstance(node, MappingNode):
            return self._mapping(node, location)
        return self._refuse_tag(kind, location)

    def _list(self, node: SequenceNode, location: Location) -> list[object]:
        for index, entry in enumerate(node.value):
            self._document.places[(*location, index)] = _place_of(entry)
        return [self.value(entry, (*location, index)) for index, entry in enumerate(node.value)]

    def _mapping(self, node: MappingNode, location: Location) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, location)
            if key is None:
                continue
            inner = (*location, key)
            if key in values:
                self._note_twice(key_node, value_node, inner)
                continue
            self._document.places[inner] = _place_of(key_node)
            values[key] = self.value(value_node, inner)
        return values

    def _note_twice(self, node: Node, value_node: Node, location: Location) -> None:
        line, column = _place_of(node)
        first = self._document.place(location)
        allowed = f"each key once; the first stands on line {first[0]}" if first else "each key once"
        self._document.faults.append(
            Fault(dotted(location), "is given twice", allowed=allowed, line=line, column=column)
        )
        repeat = Document(UNREADABLE, {location: (line, column)})
        repeat.value = _Reading(repeat, self._scalars).value(value_node, location)
        self._document.faults += repeat.faults
        self._document.repeats.append((location, repeat))

    def _key(self, node: Node, location: Location) -> str | None:
        """The key, or `None` for what cannot be taken for one; what is wrong with it is noted."""
        kind = str(node.tag).removeprefix(_CORE)
        if isinstance(node, ScalarNode) and kind in _TEXT_TAGS and _is_clean(node.value):
            return str(node.value)
        name = f"the key {shown(node.value)}" if isinstance(node, ScalarNode) else "a section or list for a key"
        problem, allowed = _odd_key(name), _KEYS
        if kind == "merge":
            problem, allowed = "has a merge key '<<', which YAML 1.2 does not have", "the merged keys written out"
        line, column = _place_of(node)
        self._document.faults.append(Fault(dotted(location), problem, allowed=allowed, line=line, column=column))
        if not isinstance(node, ScalarNode) or kind not in _PLAIN_KINDS:
            return None
        self._document.odd_keys.add((*location, node.value))
        return str(node.value)

    def _scalar(self, node: ScalarNode, kind: str, location: Location) -> object:
        if kind in _TEXT_TAGS or (kind in {"int", "float"} and "_" in node.value):  # YAML 1.2 has no 1_000
            return node.value if _is_clean(node.value) else self._spoil(location, "holds half of a surrogate pair")
        if kind not in _PLAIN_KINDS:
            return self._refuse_tag(kind, location)
        try:
            value = getattr(self._scalars, f"construct_yaml_{kind}")(node)
        except (ValueError, LookupError):  # `!!int x`, `!!bool x`, `!!int`, and a few odd ones such as `-_`
            return self._spoil(location, f"{shown(node.value)} cannot be read as a number or truth value")
        if isinstance(value, int) and not _fits(value):
            return self._spoil(location, _TOO_LARGE)
        return value

    def _refuse_tag(self, kind: str, location: Location) -> object:
        name = kind if kind.startswith("!") else f"!!{kind}"
        return self._spoil(location, f"has the tag {shown(name)}", allowed="plain YAML without tags")

    def _spoil(self, location: Location, problem: str, **details: str) -> object:
        self._document.faults.append(self._document.fault(location, problem, **details))
        return UNREADABLE


def _odd_key(name: str) -> str:
    return f"has {name}, which does not read as text"


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def _num_nodes(node: Node, known: dict[int, int] | None = None) -> int:
    """Nodes in and below one, those of an alias each time; one that contains itself counts once more."""
    known = {} if known is None else known
    if id(node) not in known:
        known[id(node)] = 1
        inside = node.value if isinstance(node, (MappingNode, SequenceNode)) else []
        below = [part for each in inside for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] += sum(_num_nodes(each, known) for each in below)
    return known[id(node)]


def _replaced(value: object, location: Location, new: object) -> object:
    """A copy of `value` with `new` at `location`."""
    if not location:
        return new
    key, *inside = location
    if isinstance(value, dict):
        return {**value, key: _replaced(value.get(key), tuple(inside), new)}
    if isinstance(value, list) and isinstance(key, int):
        return [_replaced(each, tuple(inside), new) if index == key else each for index, each in enumerate(value)]
    return value


def _place_of(node: Node) -> Place:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _is_clean(text: str) -> bool:
    """No half surrogate, which no file name, terminal or JSON can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _unreadable_character(text: str, error: ReaderError) -> Fault:
    before = text[: error.position]
    character = f"U+{ord(text[error.position]):04X}" if error.position < len(text) else "at the end"
    column = error.position - (before.rfind("\n") + 1) + 1
    return Fault("YAML", f"the character {character} may not stand here", line=before.count("\n") + 1, column=column)


def _syntax_fault(error: MarkedYAMLError) -> Fault:
    mark = error.problem_mark or error.context_mark
    place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    words = ", ".join(part for part in (error.context, error.problem) if part)
    words = words.replace("'<stream end>'", "the end").replace("'\\x00'", "the end")
    return Fault("YAML", f"broken syntax: {words}", line=place[0], column=place[1])
