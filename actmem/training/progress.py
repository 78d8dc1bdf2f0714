"""What a run shows while it trains: a bar on a terminal, a line now and then in a log, nothing when switched off."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from actmem.training.metrics import StepRecord
from actmem.units import format_bytes

_SECONDS_BETWEEN_LINES = 5.0


class TrainingProgress:
    """A context manager around the steps of a run, on standard error; `peak_name` says of what the peak is."""

    def __init__(self, num_steps: int, *, enabled: bool, peak_name: str) -> None:
        self._num_steps = num_steps
        self._peak_name = peak_name
        self._console = Console(stderr=True, quiet=not enabled, highlight=False, markup=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._last_line = 0.0

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, soft_wrap=True)

    def show(self, record: StepRecord) -> None:
        """The step that has just ended."""
        peak = f"{self._peak_name} {format_bytes(record.peak_bytes)}"
        text = f"loss {record.loss:.4f}  {record.tokens_per_second:,.0f} tokens/s  {peak}"
        self._bar.update(self._task, completed=record.step, description=text)
        if not self._console.is_terminal and self._is_due(record.step):
            self._console.print(f"step {record.step}/{self._num_steps}  {text}")

    def _is_due(self, step: int) -> bool:
        now = time.monotonic()
        if step < self._num_steps and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True
