"""A frontier as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from actmem.planning.frontier import Frontier, FrontierPoint
from actmem.reporting.tables import NOTHING, plain_table

_HEADS = (
    "peak\n{unit}",
    "of none",
    "step\nms",
    "added\n%",
    "low - high\n%",
    "bound\n%",
    "swapped\n{unit}",
    "waited\nms",
)


_MEASURED_HEADS = ("measured\npeak\n{unit}", "measured\nstep\nms", "measured\nadded\n%")
KNEE = "<- knee"


def frontier_table(frontier: Frontier, unit: tuple[int, str]) -> Table:
    """One line a point, the frontier first, the knee marked."""
    heads = (*_HEADS, *_MEASURED_HEADS) if frontier.has_measured else _HEADS
    table = plain_table("plan", tuple(head.format(unit=unit[1]) for head in heads), ("what",))
    for number, point in enumerate((*frontier.points, *frontier.beside)):
        if number == len(frontier.points):
            table.add_section()
        style = "bold" if point is frontier.knee else ""
        table.add_row(point.label, *_cells(frontier, point, unit[0]), _mark_of(frontier, point), style=style)
    return table


def frontier_notes(frontier: Frontier) -> list[str]:
    """What the table cannot say, a sentence a line."""
    gradients = "stand already, as from the second micro-batch on" if frontier.gradients_stand else "do not stand yet"
    notes = [
        f"Times: {frontier.times_in_words}. Bytes are those of the trace. When the step begins, gradients {gradients}.",
        "low - high: what the same plans add at other efficiencies. bound: what no plan for that budget undercuts.",
    ]
    if frontier.knee is not None:
        notes.append("knee: the point farthest below the chord of the frontier, both axes from 0 to 1 (Kneedle, 2011).")
    notes.append("torch-full and torch-sac are modelled: torch runs a layer again whole, so their peaks are no lower.")
    return notes


def _cells(frontier: Frontier, point: FrontierPoint, unit: int) -> Iterator[str]:
    band = sorted(frontier.ratio(point, level) for level in ("low", "nominal", "high"))
    yield f"{point.predicted_peak_bytes / unit:,.1f}"
    yield f"{point.predicted_peak_bytes / frontier.unplanned.predicted_peak_bytes:.2f}"
    yield f"{point.predicted_seconds * 1e3:,.1f}"
    yield _added(frontier.ratio(point))
    yield f"{_added(band[0])} - {_added(band[-1])}"
    yield NOTHING if point.bound_seconds is None else _added(frontier.bound_ratio(point))
    yield f"{point.swapped_bytes / unit:,.1f}" if point.swapped_bytes else NOTHING
    yield f"{point.exposed_seconds * 1e3:,.1f}" if point.swapped_bytes else NOTHING
    if frontier.has_measured:
        yield from _measured_cells(frontier, point, unit)


def _measured_cells(frontier: Frontier, point: FrontierPoint, unit: int) -> Iterator[str]:
    size, seconds, ratio = point.measured_peak_bytes, point.measured_seconds, frontier.measured_ratio(point)
    yield NOTHING if size is None else f"{size / unit:,.1f}"
    yield NOTHING if seconds is None else f"{seconds * 1e3:,.1f}"
    yield NOTHING if ratio is None else _added(ratio)


def _added(ratio: float) -> str:
    return f"{100 * (ratio - 1) + 0.0:.2f}"


def _mark_of(frontier: Frontier, point: FrontierPoint) -> str:
    """What is special about a point."""
    if point is frontier.knee:
        return KNEE
    return {"policy": "policy", "yardstick": "torch, modelled"}.get(point.kind, "")
