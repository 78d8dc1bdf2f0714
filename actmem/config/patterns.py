"""Regexes over the paths of a layer: when one is sound, and what one speaks of.

A regex can take time without end on a path of 40 letters (``(a|a)*b``), and `re` can then not be interrupted. The
`regex` package reads the same language, gives up after a time limit, and so needs no process of its own to be stopped
from outside; the limit holds wherever a pattern is matched, on the paths of a run too, not only in the check of a
configuration. It writes repeats of repeats out when it compiles, though, so their size is bounded first.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import regex

from actmem.config.known_paths import KNOWN_PATHS
from actmem.config.op_names import is_communication, names_of, split_path
from actmem.config.shown import quoted

TIME_LIMIT = 0.25
"""Seconds of one match, and of all that are tried when a pattern is checked."""

_PATIENCE_S = 4.0
"""After which no further pattern of a configuration is looked at."""

_ESCAPED = re.compile(r"\\N\{[^}]*\}|\\.", re.DOTALL)
_SET = re.compile(r"\[\^?\]?[^\]]*\]")
_NAMED_SET = re.compile(r"\[:\^?\w+:\]")
_LITERAL = re.compile(r"(\w|#|\\\.)+", re.ASCII)
_STRAY_BRACE = re.compile(r"\{(?!\d*,?\d*\})[^}]*\}?|\{\}")
_MAX_LENGTH = 1000
_MAX_SIZE = 100_000
_MAX_NESTING = 50


class SlowPatternError(ValueError):
    """A pattern that takes longer than `TIME_LIMIT` on one path."""

    def __init__(self, pattern: str, path: str) -> None:
        super().__init__(f"the pattern {quoted(pattern)} takes over {TIME_LIMIT} s on {path!r}; nest fewer repeats")


@lru_cache(maxsize=4096)
def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a pattern, or ``None``: no regex, too large, or too slow on paths that layers have."""
    if problem := _size_problem(pattern):
        return problem
    if any("\ud800" <= character <= "\udfff" for character in pattern):
        return "holds half of a surrogate pair"
    if problem := _other_reading(pattern):
        return problem
    try:
        _compiled(pattern)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        return f"is not a valid regex: {error}"
    return _time_problem(pattern)


@lru_cache(maxsize=64)
def problems_of(patterns: tuple[str, ...]) -> Mapping[str, str | None]:
    """`pattern_problem` of each; once they have taken long enough together, those that are left are not looked at."""
    started, found = time.perf_counter(), dict[str, str | None]()
    for pattern in patterns:
        is_late = time.perf_counter() - started > _PATIENCE_S
        found[pattern] = (
            f"comes behind others that took over {_PATIENCE_S:g} s" if is_late else pattern_problem(pattern)
        )
    return found


def matches(pattern: str, path: str) -> bool:
    """Whether a sound pattern matches the whole path. Raises `SlowPatternError`."""
    try:
        return _compiled(pattern).fullmatch(path, timeout=TIME_LIMIT) is not None
    except TimeoutError:
        raise SlowPatternError(pattern, path) from None


def covers(pattern: str, path: str) -> bool:
    """Whether a pattern, as the sections of a configuration have it, speaks of the op at `path`: it matches one of the
    modules around the op, or the op with or without its number, by its own name or a familiar one."""
    return any(matches(pattern, name) for name in (*modules_around(path), *_ways_to_write(path)))


def hits_communication(pattern: str, path: str) -> bool:
    """Whether a pattern names the op at `path` itself, and that is a communication op."""
    return is_communication(split_path(path)[1]) and any(matches(pattern, name) for name in _ways_to_write(path))


def literal_path(pattern: str) -> str | None:
    """The only path that a sound pattern matches, where it is written out: ``mlp.up_proj`` for ``mlp\\.up_proj``."""
    return pattern.replace("\\.", ".") if _LITERAL.fullmatch(pattern) else None


def hits(pattern: str, paths: Iterable[str]) -> list[str]:
    """The modules and ops that a pattern names among all those of a layer, without what lies below another hit."""
    found = dict.fromkeys(hit for path in paths for hit in [_outermost_hit(pattern, path)] if hit is not None)
    return list(found)


def modules_around(path: str) -> Iterator[str]:
    """Every module that an op lies in, from the outermost: ``mlp`` and ``mlp.act_fn`` for ``mlp.act_fn.silu``."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _outermost_hit(pattern: str, path: str) -> str | None:
    module = next((module for module in modules_around(path) if matches(pattern, module)), None)
    if module is not None:
        return module
    return path if any(matches(pattern, name) for name in _ways_to_write(path)) else None


@lru_cache(maxsize=4096)
def _ways_to_write(path: str) -> tuple[str, ...]:
    module, name = split_path(path)
    return tuple(dict.fromkeys([path, *(module + known for known in names_of(name))]))


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> regex.Pattern[str]:
    """Compiled by both packages: what they do not both read is refused."""
    with warnings.catch_warnings(action="ignore"):  # of what later versions may read otherwise
        re.compile(pattern)
        return regex.compile(pattern)


def _size_problem(pattern: str) -> str | None:
    if len(pattern) > _MAX_LENGTH:
        return f"has {len(pattern)} characters, which is more than {_MAX_LENGTH}"
    if pattern.count("(") > _MAX_NESTING:
        return f"has {pattern.count('(')} groups, which is more than {_MAX_NESTING}"
    size = len(pattern)
    for low, high in re.findall(r"\{(\d*),?(\d*)\}", pattern):
        size *= max(int(low[:9] or 1), int(high[:9] or 1))
    return f"repeats too much: it may stand for {size} characters" if size > _MAX_SIZE else None


def _other_reading(pattern: str) -> str | None:
    """What `regex` would read otherwise than `re`: sets within sets, and braces that count errors, not repeats."""
    plain = _ESCAPED.sub("", pattern)
    if named := _NAMED_SET.search(plain):
        return f"has {quoted(named[0])}, a name for characters in some dialects alone; write such as a-z in its place"
    if braces := _STRAY_BRACE.search(_SET.sub("", plain)):
        return f"has the brace {quoted(braces[0])}, which is no repeat such as {{2}} or {{1,3}}; write \\{{ for a brace"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(pattern)
    except FutureWarning as warning:
        what = str(warning).partition(" at position")[0].lower()
        return f"may be read in two ways: {what}; write a backslash before [, -, &, ~ and | inside of [...]"
    except (re.error, ValueError, OverflowError, RecursionError):
        return None  # it is told as what it is when it is compiled for good
    return None


def _time_problem(pattern: str) -> str | None:
    started = time.perf_counter()
    for path in (*KNOWN_PATHS, *_runs_of_one_letter(pattern)):
        try:
            matches(pattern, path)
        except SlowPatternError as error:
            return f"blows up: {error}"
        if time.perf_counter() - started > TIME_LIMIT * 4:
            return f"blows up: it takes over {TIME_LIMIT * 4:g} s on the paths of one layer; nest fewer repeats"
    return None


def _runs_of_one_letter(pattern: str) -> list[str]:
    """What repeats of repeats are slowest on; of a pattern's first letters, which are as good as all."""
    letters = dict.fromkeys(character for character in pattern if character.isalnum())
    return [f"{letter * 40}!" for letter in list(letters)[:8]]
