"""What the patterns of a configuration's sections name in the layers of a model, and what they miss."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from actmem.config.layers import to_ranges
from actmem.config.op_names import is_communication, split_path
from actmem.config.patterns import SlowPatternError, hits, hits_communication, matches, modules_around
from actmem.config.schema import RunConfig
from actmem.config.settings import COMM, EXCLUDE, OP_SWAP, SELECT, Setting, settings_in_effect
from actmem.graph import Graph
from actmem.planning.plan import INPUT_PATH
from actmem.planning.sections import excluded_names, pattern_of_excluded

_NUM_NEAREST = 3
_CLOSE_ENOUGH = 0.6


@dataclass(frozen=True)
class Match:
    """What one pattern names: in `setting`, asked of `layers`.

    `hits` are the modules and ops that it names, without what lies below another hit, each with its layers. `missed`
    are the layers in which it names nothing. `problem` says why it has no effect at all, and `nearest` are paths that
    may have been meant.
    """

    setting: str
    pattern: str
    layers: tuple[int, ...]
    hits: dict[str, tuple[int, ...]]
    missed: tuple[int, ...]
    problem: str | None = None
    nearest: tuple[str, ...] = ()


Find = Callable[[str, Iterable[str]], list[str]]


def match_patterns(config: RunConfig, graph: Graph) -> list[Match]:
    """Every pattern of the sections that is in effect, on the layers of `graph`, in the order of `settings_matched`."""
    return [_match(setting, graph, find) for setting, find in _searches(config)]


def settings_matched(config: RunConfig) -> list[Setting]:
    """The settings in effect that have a pattern, or a part of op names."""
    return [setting for setting, _ in _searches(config)]


def _searches(config: RunConfig) -> Iterator[tuple[Setting, Find]]:
    for setting in settings_in_effect(config, SELECT, EXCLUDE, COMM, OP_SWAP):
        yield setting, _communication_ops if setting.field == COMM else hits
    for setting in excluded_names(config):
        yield setting, _excluded_ops


def _match(setting: Setting, graph: Graph, find: Find) -> Match:
    pattern, layers, kinds = setting.pattern or "", setting.layers, list(graph.layers.values())
    paths = {kind: [op.path for op in region.ops] for kind, region in graph.kinds.items()}
    try:
        of_kind = {kind: _named(setting, find, paths[kind]) for kind in {kinds[layer] for layer in layers}}
    except SlowPatternError as error:
        return Match(setting.field, pattern, layers, {}, layers, str(error))
    named = dict.fromkeys(name for kind in kinds if kind in of_kind for name in of_kind[kind])
    where = {name: tuple(layer for layer in layers if name in of_kind[kinds[layer]]) for name in named}
    missed = tuple(layer for layer in layers if not of_kind[kinds[layer]])
    if where:
        return Match(setting.field, pattern, layers, where, missed)
    all_paths = {path: None for kind in of_kind for path in paths[kind]}
    problem = _problem(setting, pattern, all_paths)
    return Match(setting.field, pattern, layers, {}, missed, problem, _nearest(setting, pattern, all_paths))


def _named(setting: Setting, find: Find, paths: Sequence[str]) -> list[str]:
    """What the pattern names of a layer, whose input can be swapped; to recompute it means nothing, so there it counts
    only where nothing else is named."""
    pattern = setting.pattern or ""
    if setting.field == OP_SWAP:
        return find(pattern, [*paths, INPUT_PATH])
    return find(pattern, paths) or find(pattern, [INPUT_PATH])


def _communication_ops(pattern: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if hits_communication(pattern, path)]


def _excluded_ops(text: str, paths: Iterable[str]) -> list[str]:
    pattern = pattern_of_excluded(text)
    return [path for path in paths if matches(pattern, path)]


def _problem(setting: Setting, pattern: str, paths: Iterable[str]) -> str:
    layers = f"layer{'' if len(setting.layers) == 1 else 's'} {', '.join(to_ranges(setting.layers))}"
    if setting.field == COMM and (others := hits(pattern, paths)):
        got = "but got cell" if any(path.startswith(f"{others[0]}.") for path in paths) else "of communication"
        return f"is expected to be operation {got}: {others[0]!r}; this configuration will not be effective"
    if setting.field != EXCLUDE:
        return f"matches no module and no op in {layers}"
    is_path = not setting.inside and not re.fullmatch(r"[\w:]+", setting.pattern or "")
    how = ": in a list stand parts of op names, such as mm; for paths, write PATTERN: LAYERS" if is_path else ""
    return f"matches no op in {layers}{how}"


def _nearest(setting: Setting, pattern: str, paths: Iterable[str]) -> tuple[str, ...]:
    """The paths most like the pattern's letters; of those that could have an effect here."""
    plain = re.sub(r"\\?\.?[*+?]|\(\?\w+\)|[\\^$()|\[\]]", "", pattern).strip(".").lower()
    names = {name.lower(): name for name in _candidates(setting, paths)}
    by_end = {name.rpartition(".")[2]: path for name, path in reversed(names.items())}
    close = difflib.get_close_matches(plain, list(names), n=_NUM_NEAREST, cutoff=_CLOSE_ENOUGH)
    ends = difflib.get_close_matches(plain.rpartition(".")[2], list(by_end), n=_NUM_NEAREST, cutoff=_CLOSE_ENOUGH)
    found = dict.fromkeys([*(names[name] for name in close), *(by_end[end] for end in ends)])
    return tuple(found)[:_NUM_NEAREST]


def _candidates(setting: Setting, paths: Iterable[str]) -> Sequence[str]:
    plain = dict.fromkeys("".join(split_path(path)) for path in paths)
    if setting.field == COMM:
        return [path for path in plain if is_communication(split_path(path)[1])]
    if setting.field == EXCLUDE:
        return list(dict.fromkeys(split_path(path)[1] for path in plain))
    return list(dict.fromkeys(name for path in plain for name in (*modules_around(path), path)))
