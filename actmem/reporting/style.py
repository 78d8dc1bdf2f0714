"""What all plots have in common: colours, sizes, a figure of its own, and how it is written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#6b7280", "#d1d5db"
OURS, TORCH = "#0b62a4", "#c2570c"
SERIES = ("#0b62a4", "#c2570c", "#2f7d4f", "#7b4fa3")
TITLE, TEXT, TICKS = 14, 12, 10.5
_SIZE_INCHES = (8.0, 4.8)
_DPI = 200


def new_figure(size_inches: tuple[float, float] = _SIZE_INCHES) -> tuple[Figure, Axes]:
    """An empty plot that owes nothing to matplotlib's global state."""
    figure = Figure(figsize=size_inches, dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(labelsize=TICKS, color=MUTED, labelcolor=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, paths: Sequence[str | Path]) -> None:
    """Write a figure to each path, in the format of its suffix."""
    for path in map(Path, paths):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def inline_svg(figure: Figure) -> str:
    """A figure as an ``<svg>`` element that can stand in a page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
