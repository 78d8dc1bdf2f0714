"""How far long work has come, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar while `total` steps are done, each told by its name when it is over; the bar is gone when all are. Where
    standard error is no terminal, a line now and then."""
    console = Console(stderr=True, markup=False, highlight=False)
    with _bar(console, label, total) if console.is_terminal else _lines(console, label, total) as on_step:
        yield on_step


@contextmanager
def _bar(console: Console, label: str, total: int) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), TextColumn(label), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


@contextmanager
def _lines(console: Console, label: str, total: int) -> Iterator[Callable[[str], None]]:
    """A line when a step is over and the last line is some time ago, and nothing for work that is done before that."""
    done, told = 0, time.monotonic()

    def on_step(name: str) -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            console.print(f"{label}: {done} of {total}, {name}", soft_wrap=True)

    yield on_step
