"""The frontier as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table

from actmem.files import replace_file
from actmem.hardware import Hardware
from actmem.planning.frontier import Frontier
from actmem.reporting.frontier_plots import frontier_figure, make_up_figure, memory_figure, unit_of
from actmem.reporting.frontier_tables import KNEE, frontier_notes, frontier_table
from actmem.reporting.hardware_tables import hardware_facts, hardware_table
from actmem.reporting.refused import SOURCE, RefusedFigure
from actmem.reporting.style import inline_svg


def write_page(frontier: Frontier, hardware: Hardware, refused: Sequence[RefusedFigure], path: str | Path) -> None:
    """Write the plot, the table, what the peaks are made of, memory over time, all assumptions, and published figures
    that are refused."""
    loader = PackageLoader("actmem.reporting", "templates")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = page.get_template("frontier.html.jinja").render(
        frontier=frontier,
        plot=inline_svg(frontier_figure(frontier)),
        make_up=inline_svg(make_up_figure(frontier)),
        memory=inline_svg(memory_figure(frontier)),
        table=_cells_of(frontier_table(frontier, unit_of(frontier))),
        knee=KNEE,
        notes=frontier_notes(frontier),
        rates=_cells_of(hardware_table(hardware)),
        facts=hardware_facts(hardware),
        refused=refused,
        source=SOURCE,
    )
    replace_file(path, text)


def _cells_of(table: Table) -> tuple[list[str], list[list[str]]]:
    """Heads and lines of a terminal's table."""
    heads = [str(column.header).replace("\n", " ") for column in table.columns]
    lines = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return heads, [list(line) for line in lines]
