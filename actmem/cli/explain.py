"""`actmem explain`: what a plan does with each op of a layer, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.planned import load_run, refuse_layout, refuse_yardsticks, traced_rules
from actmem.cli.screen import Screen, counted, print_json
from actmem.config.schema import RunConfig
from actmem.hardware import Hardware, load_hardware

if TYPE_CHECKING:
    from actmem.graph import Graph
    from actmem.planning.prices import Pricer
    from actmem.reporting.explanation import Explanation
    from actmem.runtime.engine import RuleSource

_NOTE = "FLOP are those of matmuls and attention; other ops count as none. Views read and write nothing."
_PRICE_NOTE = (
    "time: modelled at nominal efficiency, * if measured. frees: bytes for each second of added step, with this op "
    "alone saved or made again, or bytes/s of the link; at peaks: the same at the device's peak rates."
)


def explain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Only this layer; the first is 0.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="NAME|FILE", help="A device, or a file that calibrate wrote, for prices."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show bytes, FLOPs, action and reason for each op, for one layer of each kind; with --hardware, times and prices.

    Nothing is trained and no weight is made or read, so models of any size are explained in seconds.
    """
    run = load_run(config, overrides or ())
    refuse_layout(run, "explain", "pp_size")
    refuse_yardsticks(run)
    from actmem.reporting.explanation import explain_layers
    from actmem.training.traced import shapes_of

    model = shapes_of(run)
    device = None if hardware is None else load_hardware(hardware)
    source, graph = traced_rules(run, model, whole=device is not None)
    explanations = explain_layers(
        graph,
        source,
        _wanted(layer, len(graph.layers)),
        min_swap_bytes=run.memory.min_swap_bytes,
        pricer=None if device is None else _pricer(run, graph, device, source),
    )
    if as_json:
        print_json([each.to_dict() for each in explanations])
    else:
        _show(explanations, is_priced=device is not None)


def _pricer(run: RunConfig, graph: Graph, hardware: Hardware, source: RuleSource) -> Pricer:
    """Prices under the rules of `source`."""
    from actmem.planning.prices import Pricer
    from actmem.training.budget import planner_of

    planner = planner_of(run, graph, hardware=hardware)
    return Pricer(planner, hardware, planner.layer_plans_under(source.rules))


def _wanted(layer: int | None, num_layers: int) -> range:
    if layer is None:
        return range(num_layers)
    if layer >= num_layers:
        raise typer.BadParameter(f"{layer} is no layer of this model; allowed: 0 to {num_layers - 1}")
    return range(layer, layer + 1)


def _show(explanations: list[Explanation], *, is_priced: bool) -> None:
    from actmem.reporting.tables import explain_table, explain_title

    screen = Screen()
    for each in explanations:
        screen.line(explain_title(each), style="bold")
        screen.table(explain_table(each))
        if each.idle:
            rules = counted(len(each.idle), "rule")
            screen.line(f"{rules} for these layers without any op that matches: {', '.join(each.idle)}", style="yellow")
    screen.line(_NOTE, style="dim")
    if is_priced:
        screen.line(_PRICE_NOTE, style="dim")
