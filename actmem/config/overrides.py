"""Settings from the command line, ``train.steps=20``, laid over a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actmem.config.document import UNREADABLE, Document, Location, Place, read_document
from actmem.config.shown import shown
from actmem.config.wording import dotted, kind_of
from actmem.errors import Fault

_FORM = "key=value, such as train.steps=20"


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each ``dotted.key=value`` laid over it in order; the values are read as YAML.

    What an override sets has no line. A section that is not there yet is made. Overrides that cannot be read or
    that reach into something that is not a section add a fault each.
    """
    for override in overrides:
        document = _apply(document, override)
    return document


def _apply(document: Document, override: str) -> Document:
    name, equals, text = override.partition("=")
    location: Location = tuple(name.strip().split("."))
    if not equals or not all(location):
        fault = Fault(shown(override), "is not an override", override, allowed=_FORM)
        return replace(document, faults=[*document.faults, fault])
    if not text.strip():
        fault = Fault(dotted(location), "has no value after '='", allowed=f"{dotted(location)}=VALUE, such as null")
        return replace(document, faults=[*document.faults, fault])
    given = read_document(text)
    faults = [replace(fault, path=_inside(location, fault.path), line=None, column=None) for fault in given.faults]
    value, blocked = _with(document.value, location, given.value)
    if blocked is not None:
        faults.append(_blocked_fault(location, document, blocked))
    repeats = [(at, repeat) for at, repeat in document.repeats if at[: len(location)] != location]
    return Document(value, _places_after(document, location), [*document.faults, *faults], repeats)


def _places_after(document: Document, location: Location) -> dict[Location, Place | None]:
    """The places of what the override leaves; what it sets, or makes on the way there, has none."""
    kept = {known: place for known, place in document.places.items() if known[: len(location)] != location}
    made: dict[Location, Place | None] = {location[: end + 1]: None for end in range(len(location))}
    return made | kept


def _with(base: object, keys: Location, value: object) -> tuple[object, int | None]:
    """A copy of `base` with `value` under `keys`, and how many keys lead to what is in the way, if anything is."""
    if not keys:
        return value, None
    if base is UNREADABLE:
        return base, None
    if base is not None and not isinstance(base, dict):
        return base, 0
    inner, blocked = _with((base or {}).get(keys[0]), keys[1:], value)
    return {**(base or {}), keys[0]: inner}, None if blocked is None else blocked + 1


def _blocked_fault(location: Location, document: Document, depth: int) -> Fault:
    obstacle = document.value
    for key in location[:depth]:
        assert isinstance(obstacle, dict)
        obstacle = obstacle[key]
    problem = f"cannot be set, because {dotted(location[:depth])} is {kind_of(obstacle)}, not a section"
    return Fault(dotted(location), problem, allowed=f"{dotted(location[:depth])}=VALUE, the whole of it at once")


def _inside(location: Location, path: str) -> str:
    """The path of a fault within the value of an override, seen from the whole configuration."""
    if path in ("YAML", dotted(())):
        return dotted(location)
    return dotted(location) + (path if path.startswith("[") else f".{path}")
