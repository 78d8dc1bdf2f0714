"""Layers, modules and ops that one setting recomputes and another swaps, as far as it can be told before there is a
model: on the layers as they are numbered, and on the paths that models are known to have. Those of the model itself are
compared once it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from actmem.config.known_paths import KNOWN_PATHS
from actmem.config.layers import to_ranges
from actmem.config.patterns import covers, hits_communication, pattern_problem
from actmem.config.schema import RunConfig
from actmem.config.settings import COMM, FULL, LAYER_SWAP, OP_SWAP, SELECT, Setting, settings_in_effect

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
    recomputed = list(filter(_is_sound, settings_in_effect(config, FULL, SELECT, COMM)))
    swapped = list(filter(_is_sound, settings_in_effect(config, LAYER_SWAP, OP_SWAP)))
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


def _is_sound(setting: Setting) -> bool:
    if setting.pattern is not None and pattern_problem(setting.pattern):
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
    if mine.pattern is None or theirs.pattern is None:
        return where
    if mine.pattern == theirs.pattern:
        return f"the same pattern in {where}"
    both = _covered(mine.pattern, mine.field == COMM) & _covered(theirs.pattern, False)
    path = next((path for path in KNOWN_PATHS if path in both), None)
    return None if path is None else f"{path} in {where}"


@lru_cache(maxsize=1024)
def _covered(pattern: str, communication_alone: bool) -> frozenset[str]:
    speaks_of = hits_communication if communication_alone else covers
    return frozenset(path for path in KNOWN_PATHS if speaks_of(pattern, path))
