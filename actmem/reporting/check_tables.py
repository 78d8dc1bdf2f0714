"""What `actmem check` prints below a sound configuration: what each pattern matches, and what becomes of the bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from actmem.config.layers import to_ranges
from actmem.planning.matching import Match
from actmem.reporting.dotted_path import DottedPath
from actmem.reporting.effect import Effect
from actmem.reporting.tables import NOTHING, plain_table

_NUM_SHOWN = 3
_BYTES = ("unplanned_bytes", "saved_bytes", "recomputed_bytes", "swapped_bytes")
_HEADS = ("without a plan\nbytes a layer", "saved\nbytes", "recomputed\nbytes", "swapped\nbytes")


def match_table(matches: Sequence[Match]) -> Table:
    """One line a pattern and thing it names, with the layers; and the layers in which it names nothing."""
    table = plain_table("setting", (), ("pattern", "matches", "in\nlayers", "not in\nlayers"))
    for column in table.columns:  # where a terminal is narrow, nothing is cut off
        column.no_wrap, column.overflow, column.vertical = False, "fold", "top"
    table.columns[0].min_width = max((DottedPath(match.setting).widest_part for match in matches), default=0)
    for match in matches:
        setting, missed = DottedPath(match.setting), _layers(match.missed)
        if not match.hits:
            table.add_row(setting, Text(match.pattern), NOTHING, NOTHING, missed, style="yellow")
            continue
        for names, layers in _by_layers(match):
            shown = ", ".join(names[:_NUM_SHOWN]) + (f" and {len(names) - _NUM_SHOWN} more" if names[3:] else "")
            table.add_row(setting, Text(match.pattern), shown, _layers(layers), missed)
    return table


def effect_table(effect: Effect, *, is_pipeline: bool = False) -> Table:
    """One line for all layers that fare alike, and the total of all layers below, wherever they run."""
    table = plain_table("layers", _HEADS, ("kind",), footer=True)
    for group in effect.groups:
        table.add_row(_layers(group.layers), *(_bytes(getattr(group, name)) for name in _BYTES), group.kind)
    of_what = "all layers, those of all stages" if is_pipeline else "all layers together"
    totals = ("total", *(_bytes(effect.total(name)) for name in _BYTES), of_what)
    for column, text in zip(table.columns, totals, strict=True):
        column.footer = Text(text)
    return table


def _by_layers(match: Match) -> list[tuple[list[str], tuple[int, ...]]]:
    names: dict[tuple[int, ...], list[str]] = {}
    for name, layers in match.hits.items():
        names.setdefault(layers, []).append(name)
    return [(alike, layers) for layers, alike in names.items()]


def _layers(layers: tuple[int, ...]) -> str:
    return ", ".join(to_ranges(layers)) or NOTHING


def _bytes(number: int) -> str:
    return f"{number:,}" if number else NOTHING
