"""Layers as the YAML names them: numbers and ranges, strictly ascending and not overlapping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from actmem.config.shown import shown

MAX_LAYER = 9999
_ENTRY = re.compile(r"\s*(-?[0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*")


class BadEntry(NamedTuple):
    """The entry at `position` of a list of layers, and what is wrong with it."""

    position: int
    problem: str


def to_ranges(layers: Iterable[int]) -> list[str]:
    """``[0, 1, 2, 5]`` as ``['0-2', '5']``."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def from_ranges(ranges: Sequence[object]) -> tuple[int, ...]:
    """``['0-2', 5]`` as ``(0, 1, 2, 5)``; `ValueError` unless strictly ascending and not overlapping."""
    for _, problem in bad_entries(ranges):
        raise ValueError(problem)
    spans = [span_of(entry) for entry in ranges]
    return tuple(layer for first, last in spans for layer in range(first, last + 1))


def split_layers(value: object) -> object:
    """The entries of what may stand for layers: a list, one number, or a text such as ``"0-3, 8"``; else `value`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def bad_entries(entries: Sequence[object]) -> Iterator[BadEntry]:
    """Every entry that is no range of layers, or that does not come after all those before it."""
    reached, before = -1, ""
    for index, entry in enumerate(entries):
        try:
            first, last = span_of(entry)
        except ValueError as error:
            yield BadEntry(index, str(error))
            continue
        if first <= reached:
            reason = f"it does not come after {before}; layers must be strictly ascending and must not overlap"
            problem = f"{shown(entry)} is out of order: {reason}"
            yield BadEntry(index, problem)
        if last > reached:
            reached, before = last, shown(entry)


def span_of(entry: object) -> tuple[int, int]:
    """First and last layer of ``3`` or ``"0-15"``; blanks around the numbers do not matter. Raises `ValueError`."""
    first, last = _numbers_in(entry)
    if first < 0:
        raise ValueError(f"{shown(entry)} is negative; layers count from 0")
    if max(first, last) > MAX_LAYER:
        raise ValueError(f"{shown(entry)} is beyond layer {MAX_LAYER}; no model has that many")
    if last < first:
        raise ValueError(f"{shown(entry)} is out of order: it runs backwards; write '{last}-{first}'")
    return first, last


def _numbers_in(entry: object) -> tuple[int, int]:
    if isinstance(entry, int) and not isinstance(entry, bool):
        return entry, entry
    match = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        raise ValueError(f"{shown(entry)} is not a layer or a range of layers; write for example 3 or '0-15'")
    first, last = match.groups(default=match[1])
    return int(first), int(last)
