"""A dotted path in a table: on one line where there is room, and else broken after its dots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

_AFTER_DOT = re.compile(r"(?<=\w\.)(?=\w)")


@dataclass(frozen=True)
class DottedPath:
    """Such as ``recompute.select_module``. What is wider than its column between two dots is folded there."""

    text: str
    style: str = ""

    @property
    def widest_part(self) -> int:
        """Columns of the longest part between two dots."""
        return max(map(len, _AFTER_DOT.split(self.text)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.widest_part, len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text("\n".join(self._lines(options.max_width)), style=self.style, overflow="fold")

    def _lines(self, width: int) -> list[str]:
        lines = [""]
        for part in _AFTER_DOT.split(self.text):
            if lines[-1] and len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
        return lines
