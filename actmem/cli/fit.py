"""`actmem fit`: will a run fit into a device, and what would."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.check import step_setting
from actmem.cli.planned import HardwareOption, load_run, profile_of, refuse_layout
from actmem.cli.progress import progress
from actmem.cli.screen import Screen, print_json
from actmem.config.schema import ParallelConfig, RunConfig
from actmem.hardware import Hardware
from actmem.units import format_bytes

if TYPE_CHECKING:
    from actmem.planning.fit import Fit
    from actmem.planning.layout import Layout

_SHORT, _LONG = 64, 512
"""Lengths are rounded to multiples of the second where the sequence has four of them, and else of the first."""


def fit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    hardware: HardwareOption = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, sgd (with momentum) or none.")] = "adamw",
    train: Annotated[str, typer.Option("--train", help="full or lora.")] = "full",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of LoRA's adapters.")] = 16,
    shard: Annotated[
        int | None,
        typer.Option("--shard", min=1, metavar="N", help="Devices that share the state, FSDP; else as CONFIG says."),
    ] = None,
    swap: Annotated[bool, typer.Option("--swap/--no-swap", help="Whether plans may swap.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether CONFIG fits into the memory of a device, what it is made of, and how large a batch or sequence fits.

    Nothing is trained and no weight is made or read; all figures are predicted. What CONFIG says of a plan does not
    count. Exit code: 0 if it fits, be it with a plan; 1 if it does not.
    """
    from actmem.planning.layout import Layout

    run = load_run(config, overrides or ())
    refuse_layout(run, "fit", "tp_size", "ep_size", "pp_size")
    layout = Layout(optimizer, train, rank, shard or run.parallel.dp_shard_size)  # type: ignore[arg-type]  # it refuses what is not one of them
    found = _search(run, profile_of(run, hardware), layout, swap)
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found)
    if found.verdict == "does not fit":
        raise typer.Exit(1)


def _search(run: RunConfig, hardware: Hardware, layout: Layout, swaps: bool) -> Fit:
    from actmem.planning.fit import NUM_STAGES, Fit, FitSearch
    from actmem.planning.times import measured_share, times_in_words
    from actmem.training.budget import planner_of
    from actmem.training.shape_tracer import ShapeTracer

    shape = (run.train.micro_batch_size, run.data.sequence_length)
    step = _SHORT if shape[1] < 4 * _LONG else _LONG
    gc.freeze()  # what was imported is no garbage, and takes a fifth of the time to be looked at again and again
    with progress("fit", NUM_STAGES) as on_stage:
        tracer = ShapeTracer(run.model_copy(update={"parallel": ParallelConfig()}))  # `layout` says who shares
        search = FitSearch(
            lambda shape: tracer(*shape),
            lambda graph: planner_of(run, graph, hardware=hardware, swaps=swaps),
            layout,
            hardware.memory_bytes,
            sequence_step=step,
            on_stage=on_stage,
        )
        unplanned, planned, least = search.needs(shape)
        reaches = search.reaches(shape)
        return Fit(
            setting=step_setting(run),
            hardware=hardware.name,
            layout=layout.words,
            times=times_in_words(measured_share(search.planner(shape).graph, hardware)),
            memory_bytes=hardware.memory_bytes,
            unplanned=unplanned,
            planned=planned,
            least=least,
            reaches=reaches,
            remedies=() if planned else search.remedies(shape, reaches),
        )


def _show(found: Fit) -> None:
    from actmem.reporting.fit_tables import need_table, reach_table

    screen = Screen()
    screen.line(f"{found.setting}, {found.layout}, on {found.hardware}", style="bold")
    screen.line(_verdict(found), style="green" if found.verdict != "does not fit" else "red")
    screen.table(need_table(found))
    screen.table(reach_table(found))
    screen.line(f"Bytes are predicted from the trace. Times: {found.times}; a token of an unplanned batch of one is 1.")
    screen.line("added: by how much the step is longer than an unplanned one of that shape, whether that fits or not.")
    if "FSDP" in found.layout:
        screen.line("What the devices send to each other is not in the times.")


def _verdict(found: Fit) -> str:
    memory = format_bytes(found.memory_bytes)
    if found.verdict == "fits without a plan":
        return f"It fits without a plan: {format_bytes(found.unplanned.peak_bytes)} of {memory}."
    if found.planned is not None:
        longer = found.planned.seconds / found.unplanned.seconds - 1
        peak = format_bytes(found.planned.peak_bytes)
        return f"It fits with the plan {found.planned.plan}: {peak} of {memory}, a step {longer:.1%} longer."
    least, ways = format_bytes(found.least.peak_bytes), " or ".join(found.remedies)
    return f"It does not fit: the least possible peak is {least}, and there are {memory}." + (
        f" With the best plan it would with {ways}." if ways else " Take a device with more memory or a smaller model."
    )
