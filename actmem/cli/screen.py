"""What the commands print: aligned lines in plain words. Nothing a user typed is taken for markup."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actmem.errors import ActmemError, ConfigError, Fault
from actmem.reporting.dotted_path import DottedPath

_PLAIN_WIDTH = 160  # columns when no terminal says how many it has, as in a log
_ANY_WIDTH = 10_000  # for a table there, which is to be searched and cut and not to be looked at alone


class Screen:
    """Standard output, or standard error, of a command."""

    def __init__(self, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
        self._is_bound = self._console.is_terminal or "COLUMNS" in os.environ
        if not self._is_bound:
            self._console.width = _PLAIN_WIDTH

    def line(self, text: str, style: str = "") -> None:
        """One line of text; where it is too long for the terminal, the terminal breaks it."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def warning(self, text: str) -> None:
        """What does not stop a command."""
        self.line(f"warning: {text}", style="yellow")

    def facts(self, facts: Mapping[str, str]) -> None:
        """Names and values in two columns."""
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
        self._console.print(table)

    def table(self, table: Table) -> None:
        """A table as it is; where no terminal says how wide it may be, as wide as it is."""
        with self._wide():
            self._console.print(table)

    @contextmanager
    def _wide(self) -> Iterator[None]:
        width = self._console.width
        self._console.width = width if self._is_bound else _ANY_WIDTH
        try:
            yield
        finally:
            self._console.width = width

    def faults(self, faults: Iterable[Fault], style: str = "red") -> None:
        """Line, path and problem in columns; below the problem what is allowed and the nearest valid name."""
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        for fault in faults:
            where = "" if fault.line is None else f"line {fault.line}"
            table.add_row(where, DottedPath(fault.path, style="bold"), _explained(fault, style))
        self._console.print(table)

    def error(self, error: ActmemError) -> None:
        """An error, with all faults of a `ConfigError`."""
        if isinstance(error, ConfigError):
            self.line(f"{error.source or 'the configuration'}: {counted(len(error.faults), 'fault')}", style="bold")
            self.faults(error.faults)
        else:
            self.line(f"error: {error}", style="red")


def _explained(fault: Fault, style: str) -> Text:
    text = Text(fault.problem, style=style, overflow="fold")
    if fault.allowed is not None:
        text.append(f"\nallowed: {fault.allowed}", style="default")
    if fault.nearest is not None:
        text.append(f"\nnearest: {fault.nearest}", style="green")
    return text


def counted(number: int, noun: str) -> str:
    """``1 fault``, ``2 faults``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_json(value: object) -> None:
    """`value` as JSON on standard output; what JSON cannot hold, such as a path or infinity, as text."""
    print(json.dumps(_jsonable(value), indent=2))


def _jsonable(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
