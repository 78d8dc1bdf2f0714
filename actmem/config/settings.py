"""The layers and patterns of the sections `recompute`, `recompute_comm` and `swap`, each with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from actmem.config.layers import from_ranges
from actmem.config.schema import RunConfig
from actmem.config.shown import quoted

Inside = tuple[str | int, ...]

FULL = "recompute.full_recompute_layer"
SELECT = "recompute.select_module"
EXCLUDE = "recompute.exclude_op"
COMM = "recompute_comm.select_module"
LAYER_SWAP = "swap.layer_swap"
OP_SWAP = "swap.op_swap"
LAYER_FIELDS = (FULL, SELECT, EXCLUDE, COMM, LAYER_SWAP, OP_SWAP)


@dataclass(frozen=True)
class Setting:
    """Layers as they were written in the dotted `field`, at `inside` within it, and the pattern that goes with them,
    which stands at `pattern_at`; ``None`` for whole layers."""

    field: str
    inside: Inside
    entries: tuple[object, ...]
    pattern: str | None = None
    pattern_at: Inside = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, of a setting whose entries are sound."""
        return from_ranges(self.entries)

    @property
    def name(self) -> str:
        """The setting as a message names it."""
        return self.field if self.pattern is None else f"{self.field} {quoted(self.pattern)}"


def settings_in(config: RunConfig, field: str) -> Iterator[Setting]:
    """The settings that stand in one of `LAYER_FIELDS`, in effect or not."""
    recompute, swap = config.recompute, config.swap
    if field == FULL and recompute.full_recompute_layer is not None:
        yield Setting(field, (), recompute.full_recompute_layer)
    elif field == SELECT:
        yield from _by_pattern(field, recompute.select_module)
    elif field == EXCLUDE and isinstance(recompute.exclude_op, dict):
        yield from _by_pattern(field, recompute.exclude_op)
    elif field == COMM:
        yield from _by_pattern(field, config.recompute_comm.select_module)
    elif field == LAYER_SWAP:
        for index, layers in enumerate(swap.layer_swap or ()):
            yield Setting(field, (index, "layers"), layers.layers)
    elif field == OP_SWAP:
        for index, ops in enumerate(swap.op_swap or ()):
            yield Setting(field, (index, "layers"), ops.layers, ops.op_name, (index, "op_name"))


def settings_in_effect(config: RunConfig, *fields: str) -> list[Setting]:
    """The settings of these fields whose section is switched on."""
    modes = {FULL: ("full", "select"), SELECT: ("select",), EXCLUDE: ("full", "select")}
    found: list[Setting] = []
    for field in fields:
        enabled = config.recompute_comm.enable if field == COMM else config.swap.enable
        if config.recompute.mode in modes[field] if field in modes else enabled:
            found += settings_in(config, field)
    return found


def _by_pattern(field: str, patterns: Mapping[str, tuple[object, ...]] | None) -> Iterator[Setting]:
    for pattern, entries in (patterns or {}).items():
        yield Setting(field, (pattern,), entries, pattern, (pattern,))


def patterns_in(config: RunConfig) -> tuple[str, ...]:
    """All patterns that settings have, whether in effect or not, each once."""
    found = (setting.pattern for field in LAYER_FIELDS for setting in settings_in(config, field))
    return tuple(dict.fromkeys(pattern for pattern in found if pattern is not None))
