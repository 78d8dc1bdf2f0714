"""`actmem pareto`: what memory costs in time, from the least possible peak to that of no plan at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.check import step_setting
from actmem.cli.output import make_directory, told_if_unwritable
from actmem.cli.planned import HardwareOption, load_run, profile_of, refuse_layout
from actmem.cli.progress import progress
from actmem.cli.screen import Screen, print_json
from actmem.config.schema import RunConfig
from actmem.hardware import Hardware

if TYPE_CHECKING:
    from actmem.planning.frontier import Frontier

_FILES = ("frontier.csv", "frontier.json", "frontier.svg", "frontier.png", "frontier.html")


def pareto(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where the files go.")],
    hardware: HardwareOption = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    points: Annotated[int, typer.Option("--points", min=2, help="Budgets, evenly spaced.")] = 20,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Of search for each budget, about.")] = 2.0,
    swap: Annotated[bool, typer.Option("--swap/--no-swap", help="Whether plans may swap.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the frontier as JSON.")] = False,
) -> None:
    """Find the fastest plan for each of several budgets, and show them beside the fixed policies and torch's own ways.

    Nothing is trained and no weight is made or read. What CONFIG says of a plan does not count. Writes frontier.csv,
    frontier.json, frontier.svg, frontier.png and frontier.html.
    """
    run = load_run(config, overrides or ())
    refuse_layout(run, "pareto", "pp_size")
    device = profile_of(run, hardware)
    make_directory(out, _FILES)
    found = _solve(run, device, points, seconds, swap)
    write_frontier(found, run, device, out)
    if as_json:
        print_json(found.to_dict())
    else:
        screen = Screen()
        show_frontier(screen, found)
        screen.line(f"Written: {out}/{', '.join(_FILES)}", style="dim")


def _solve(run: RunConfig, hardware: Hardware, num_points: int, seconds: float, swaps: bool) -> Frontier:
    from actmem.planning.frontier import frontier
    from actmem.training.budget import planner_of
    from actmem.training.device import device_at_hand
    from actmem.training.traced import trace_step

    with progress("pareto", num_points + 2) as on_step:
        on_step("trace")
        graph = trace_step(run, kernels_on=device_at_hand(run, hardware))
        planner = planner_of(run, graph, hardware=hardware, swaps=swaps)
        setting = step_setting(run)
        return frontier(planner, hardware, setting=setting, num_points=num_points, seconds=seconds, on_point=on_step)


def write_frontier(frontier: Frontier, run: RunConfig, hardware: Hardware, out: Path) -> None:
    """Write the frontier in all its forms."""
    from actmem.reporting.frontier_page import write_page
    from actmem.reporting.frontier_plots import plot_frontier
    from actmem.reporting.refused import refused_figures

    with told_if_unwritable(out):
        frontier.save(out / "frontier.json")
        frontier.save_csv(out / "frontier.csv")
        plot_frontier(frontier, out / "frontier.svg", out / "frontier.png")
        write_page(frontier, hardware, refused_figures(run, hardware), out / "frontier.html")


def show_frontier(screen: Screen, frontier: Frontier) -> None:
    """The table, and what it cannot say."""
    from actmem.reporting.frontier_plots import unit_of
    from actmem.reporting.frontier_tables import frontier_notes, frontier_table

    screen.line(f"{frontier.setting} on {frontier.hardware}, {frontier.times_in_words}", style="bold")
    screen.table(frontier_table(frontier, unit_of(frontier)))
    for note in frontier_notes(frontier):
        screen.line(note)
