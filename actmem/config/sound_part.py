"""The part of a faulty configuration that can be read all the same, so that its other faults are found beside it."""

from __future__ import annotations

from collections.abc import Iterable

from actmem.config.document import Location
from actmem.config.schema import RunConfig

STAND_INS: dict[str, dict[str, object]] = {"model": {}, "data": {"path": ["*"]}}
"""What takes the place of sections without which there is no configuration."""

_LISTS_OF_SECTIONS = {("swap", "layer_swap"), ("swap", "op_swap")}
_OP_NAMES, _NO_OP = (("swap", "op_swap"), "op_name"), "(?!)"
"""A field that every entry of a list has, and what takes its place: a pattern that matches nothing."""


class Dropped:
    """What is left out of a configuration so that pydantic's findings, each an error type and a location, are gone."""

    def __init__(self, value: dict[str, object], found: Iterable[tuple[str, Location]]) -> None:
        self._locations = {_droppable(value, kind, location) for kind, location in found}
        fields = {location[:2] for location in self._locations}
        self._locations |= {field for field in fields if self._is_emptied(value, field)}
        self._value = value

    @property
    def everything(self) -> bool:
        """Whether nothing is left."""
        return () in self._locations

    def holds(self, location: Location) -> bool:
        """Whether a field is left out, by itself or with its section."""
        return location in self._locations or location[:1] in self._locations

    def rest(self) -> RunConfig:
        """The configuration with defaults or stand-ins for what is left out, so that rules can read the others."""
        sections: dict[str, object] = {**STAND_INS}
        for name, section in self._value.items():
            if (name,) not in self._locations:
                kept = self._pruned(section, (name,))
                sections[name] = STAND_INS.get(name, {}) | kept if isinstance(kept, dict) else kept
        return RunConfig.model_validate(sections)

    def original(self, location: Location) -> Location:
        """Where what stands at `location` in the rest stands in the whole: entries of lists move up in the rest."""
        found: Location = ()
        for part in location:
            if isinstance(part, int):
                left_out = [_index_in(location, found) for location in self._locations]
                for index in sorted(index for index in left_out if index is not None):
                    part += index <= part
            found = (*found, part)
        return found

    def _is_emptied(self, value: dict[str, object], location: Location) -> bool:
        field = _at(value, location)
        keys = list(field) if isinstance(field, dict) else list(range(len(field))) if isinstance(field, list) else []
        return bool(keys) and all((*location, key) in self._locations for key in keys)

    def _pruned(self, value: object, location: Location) -> object:
        depth = len(location)
        if not any(len(at) > depth and at[:depth] == location for at in self._locations):
            return value
        if isinstance(value, dict):
            inner = {key: (*location, key) for key in value}
            kept = {key: self._pruned(value[key], at) for key, at in inner.items() if at not in self._locations}
            lacks_op = _is_op_name((*location, _OP_NAMES[1])) and (*location, _OP_NAMES[1]) in self._locations
            return kept | ({_OP_NAMES[1]: _NO_OP} if lacks_op else {})
        if isinstance(value, list):
            entries = [((*location, index), entry) for index, entry in enumerate(value)]
            return [self._pruned(entry, at) for at, entry in entries if at not in self._locations]
        return value


def _droppable(value: dict[str, object], kind: str, location: Location) -> Location:
    """An unknown key, an entry of a mapping by pattern or of a list of sections, or else a field or section."""
    if kind == "extra_forbidden":
        return location
    field = _at(value, location[:2])
    if location[:2] in _LISTS_OF_SECTIONS and isinstance(field, list):
        return location[:4] if _is_op_name(location[:4]) else location[:3]
    return location[:3] if isinstance(field, dict) and set(location[2:3]) & set(field) else location[:2]


def _is_op_name(location: Location) -> bool:
    return (location[:2], *location[3:]) == _OP_NAMES


def _at(value: object, location: Location) -> object:
    for part in location:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _index_in(location: Location, around: Location) -> int | None:
    """The index of a list entry at `location`, if it is an entry of the list `around`."""
    last = location[-1] if location[:-1] == around and location else None
    return last if isinstance(last, int) else None
