"""Pydantic's findings in actmem's own words: what is wrong here, what the schema allows, which name was meant."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from actmem.config.document import Document, Location
from actmem.config.shown import shown
from actmem.config.wording import allowed_at, dotted, keys_at, kind_of, names_at, nearest, sections_with
from actmem.errors import Fault

_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_EMPTY = {"too_short", "string_too_short", "value_error"}


def field_fault(document: Document, kind: str, location: Location, value: object, said: str = "") -> Fault:
    """The fault for pydantic's error type `kind` at `location`, where `value` stood (or its section, if missing).
    `said` is what a validator of ours has against the value, as `said_of` finds it."""
    if kind == "extra_forbidden":
        return _unknown_key(document, location, value)
    if kind == "missing":
        return document.fault(location, "is missing", allowed=allowed_at(location))
    if kind == "invalid_key" or location[-1:] == ("[key]",):
        *section, key = location[:-1] if location[-1] == "[key]" else location
        problem = f"has the key {shown(key)}, which is not text"
        return document.fault(tuple(section), problem, value=key, allowed="keys of text")
    if kind == "string_unicode":  # of text, or of a key of the section at `location`
        return document.fault(location, f"{shown(value)} holds half of a surrogate pair", value=value)
    names = names_at(location)
    return document.fault(
        location,
        _problem(kind, value, said),
        value=value,
        allowed=allowed_at(location),
        nearest=nearest(value, names) if kind == "literal_error" else None,
    )


def said_of(detail: ErrorDetails) -> str:
    """What our own validator said, if it was one that complained."""
    return str(detail.get("ctx", {}).get("error", "")) if detail["type"] == "value_error" else ""


def _problem(kind: str, value: object, said: str) -> str:
    if kind == "literal_error" and isinstance(value, str):
        return f"{shown(value)} is not among the allowed names"
    if kind in _OUT_OF_RANGE:
        return f"{shown(value)} is out of range"
    if kind in _EMPTY and value in ("", [], ()):
        return f"{shown(value)} is empty"
    if said:
        return f"{shown(value)} {said}"
    if kind == "finite_number":
        return f"{shown(value)} is not finite"
    if value is None:
        return "is empty (null)"
    if kind in {"too_short", "too_long"} and isinstance(value, list | tuple):
        return f"{shown(value)} has {len(value)} entries"
    return f"{shown(value)} is {kind_of(value)}"


def _unknown_key(document: Document, location: Location, value: object) -> Fault:
    section, key = location[:-1], location[-1]
    keys = keys_at(section)
    elsewhere = sections_with(str(key))
    return document.fault(
        location,
        f"is not a key of {dotted(section) if section else 'the top level'}",
        value=value,
        allowed=", ".join(keys),
        nearest=elsewhere[0] if elsewhere else nearest(key, keys),
    )
