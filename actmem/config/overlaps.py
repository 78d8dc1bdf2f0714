"""Layers, modules and ops that one setting recomputes and another swaps, as far as it can be told whatever the model:
from the layers as they are numbered, and from patterns of which one speaks of all that the other names. What overlaps
in one model and not in another is found once it is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from actmem.config.layers import to_ranges
from actmem.config.op_names import INPUT
from actmem.config.patterns import covers, literal_path, problems_of
from actmem.config.schema import RunConfig
from actmem.config.settings import COMM, FULL, LAYER_SWAP, OP_SWAP, SELECT, Setting, patterns_in, settings_in_effect

ATTENTION_PATTERN = r"(.*\.)?self_attn"
"""What `activation_swap: attention` swaps, with all below it."""

ALLOWED_FATES = "layers and modules that are either recomputed or swapped"
"""What two settings may speak of side by side."""


@dataclass(frozen=True)
class Overlap:
    """Two settings that give a tensor two fates, and in which layers, or at which module, they do."""

    recomputed: Setting
    swapped: Setting
    where: str


def overlaps(config: RunConfig) -> Iterator[Overlap]:
    """Each pair of settings that recompute and swap the same, among those in effect that are sound by themselves."""
    problems = problems_of(patterns_in(config))
    recomputed = [each for each in settings_in_effect(config, FULL, SELECT, COMM) if _is_sound(each, problems)]
    swapped = [each for each in settings_in_effect(config, LAYER_SWAP, OP_SWAP) if _is_sound(each, problems)]
    for mine in recomputed:
        for theirs in [*swapped, *_attention(config, mine)]:
            where = _shared(mine, theirs)
            if where is not None:
                yield Overlap(mine, theirs, where)


def _attention(config: RunConfig, beside: Setting) -> list[Setting]:
    """`activation_swap: attention` as a setting; it speaks of all layers, so of those of any other."""
    if config.activation_swap == "none":
        return []
    return [Setting("activation_swap", (), beside.entries, ATTENTION_PATTERN)]


def _is_sound(setting: Setting, problems: Mapping[str, str | None]) -> bool:
    if setting.pattern is not None and problems[setting.pattern]:
        return False
    try:
        return bool(setting.layers)
    except ValueError:
        return False


def _shared(mine: Setting, theirs: Setting) -> str | None:
    layers = sorted(set(mine.layers) & set(theirs.layers))
    if not layers:
        return None
    where = f"layer{'' if len(layers) == 1 else 's'} {', '.join(to_ranges(layers))}"
    if mine.pattern is None or theirs.pattern is None or _names_all(mine) or _names_all(theirs):
        return where
    if mine.pattern == theirs.pattern:
        return f"the same pattern in {where}"
    path = _covered(mine.pattern, theirs.pattern)
    if path is None and mine.field != COMM:  # what it names besides communication is not recomputed
        path = _covered(theirs.pattern, mine.pattern)
    return None if path is None else f"{path} in {where}"


def _names_all(setting: Setting) -> bool:
    """Whether the pattern of a setting speaks of all that layers do, whatever that is."""
    return setting.pattern == ".*" and setting.field != COMM


def _covered(pattern: str, other: str) -> str | None:
    """The one path that a pattern names, if the other speaks of it, and so of all below it; the input of a layer can be
    swapped alone."""
    path = literal_path(pattern)
    return path if path not in (None, INPUT) and covers(other, path) else None
