"""What a fault says: kinds of values, places as dotted paths, and what the schema allows at a place, in words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from actmem.config.schema import LAYERS_SCHEMA, RunConfig
from actmem.config.shown import quoted, shown

A_NUMBER_OF_BYTES = "a number of bytes such as 1048576 or '64GiB'"
_PLAIN_KEY = re.compile(r"[\w -]+")
_CLOSE_ENOUGH = 0.5  # 'fp32' for 'float32' is as far off as a slip still is


def dotted(location: Iterable[str | int]) -> str:
    """``("data", "path", 0)`` as ``data.path[0]``; a key that is a pattern goes into brackets too."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path and not _PLAIN_KEY.fullmatch(part):
            path += f"[{quoted(part)}]"
        else:
            name = part if part.isprintable() and part else shown(part)
            path += f".{name}" if path else name
    return path or "top level"


def kind_of(value: object) -> str:
    """The sort of thing a YAML value is, with its article."""
    kinds = {str: "text", bool: "a truth value", int: "a whole number", float: "a number", list: "a list"}
    kinds |= {dict: "a section", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def nearest(name: object, valid: Iterable[str], *, closeness: float = _CLOSE_ENOUGH) -> str | None:
    """The valid name most like `name`, if one is close; case and the `_`, `-` and blank between words do not count."""
    if not isinstance(name, str):
        return None
    plain = {_plain(option): option for option in valid}
    close = difflib.get_close_matches(_plain(name[:100]), plain, n=1, cutoff=closeness)
    return plain[close[0]] if close else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


@cache
def _root() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema a ``$ref`` stands for; for ``x | null`` the one of ``x``."""
    if "$ref" in schema:
        return _resolved(_root()["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return _resolved(schema["anyOf"][0])
    return schema


def _schema_at(location: Iterable[str | int]) -> dict[str, Any]:
    schema = _root()
    for part in location:
        inside = _resolved(schema)
        if isinstance(part, int):
            entries = inside.get("prefixItems", [])
            schema = entries[part] if part < len(entries) else inside.get("items", {})
        else:
            others = inside.get("additionalProperties")
            schema = inside.get("properties", {}).get(part, others if isinstance(others, dict) else {})
    return schema


def keys_at(location: Iterable[str | int]) -> tuple[str, ...]:
    """The keys that the section at `location` may have."""
    return tuple(_resolved(_schema_at(location)).get("properties", ()))


def names_at(location: Iterable[str | int]) -> tuple[str, ...]:
    """The names that may stand at `location`, where the schema lists them."""
    schema = _resolved(_schema_at(location))
    return tuple(schema.get("enum", (schema["const"],) if "const" in schema else ()))


def allowed_at(location: Iterable[str | int]) -> str | None:
    """What may stand at `location`, in words; `None` where the schema says nothing about it."""
    return _in_words(_schema_at(location)) or None


def sections_with(key: str) -> tuple[str, ...]:
    """The dotted paths, one section deep, at which `key` would be valid."""
    return tuple(f"{section}.{key}" for section in keys_at(()) if key in keys_at((section,)))


def _in_words(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _in_words(_resolved(schema))
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_in_words, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("format") == "bytes":
        return A_NUMBER_OF_BYTES
    if schema.get("format") == "budget":
        return "bytes such as '60GiB', a share of the activations such as 0.4 or '40%', or auto"
    kind = schema.get("type")
    if kind == "array":
        return _list_in_words(schema)
    if kind == "object":
        return _section_in_words(schema)
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
    words["layers"] = "layers, such as 3 or [0-15, 20]"
    words["string"] = "a path" if schema.get("format") == "path" else "text"
    return f"{words.get(str(kind), '')} {_bounds(schema)}".strip()


def _section_in_words(schema: dict[str, Any]) -> str:
    if keys := schema.get("properties"):
        return f"a section with the keys {', '.join(keys)}"
    if schema.get("additionalProperties") == LAYERS_SCHEMA:
        return "a section of patterns, each with its layers"
    return "a section of keys and values"


def _list_in_words(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        entries = [_in_words(entry) for entry in schema["prefixItems"]]
        return f"a list of {len(entries)}: {'; '.join(entries)}"
    return f"a list of {_in_words(schema['items'])}"


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "of at least {}", "exclusiveMinimum": "above {}", "maximum": "of at most {}"}
    words["exclusiveMaximum"] = "below {}"
    return " and ".join(words[key].format(f"{schema[key]:g}") for key in words if key in schema)
