"""What a rule between fields is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from actmem.config.schema import RunConfig


@dataclass(frozen=True)
class Complaint:
    """What a rule finds wrong, and at which dotted field; `inside` leads on to an entry of that field. `nearest` are
    names that may have been meant."""

    field: str
    problem: str
    value: object = None
    allowed: str | None = None
    inside: tuple[str | int, ...] = ()
    nearest: str | None = None

    @property
    def location(self) -> tuple[str | int, ...]:
        """Where it is, from the top of the configuration."""
        return (*self.field.split("."), *self.inside)


Check = Callable[[RunConfig], Iterator[Complaint]]


@dataclass(frozen=True)
class Rule:
    """A check of the dotted `fields`; it means something only where each of them is sound by itself."""

    fields: tuple[str, ...]
    check: Check
