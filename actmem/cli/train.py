"""`actmem train`: one run from a configuration, resumable at any moment."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.lifeline import end_with_launcher
from actmem.cli.screen import Screen, print_json
from actmem.cli.told_once import is_first_rank
from actmem.config.loading import load_config
from actmem.units import format_bytes

if TYPE_CHECKING:
    from actmem.training.trainer import TrainResult


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    num_processes: Annotated[
        int, typer.Option("--nproc", min=1, help="Start this many processes here, as torchrun does.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress on standard error.")] = False,
) -> None:
    """Train as CONFIG says, or go on where its output directory stands.

    Ctrl-C or SIGTERM finishes the step in hand, saves a checkpoint and stops; a second one stops at once. Exit code: 0
    when all steps are done, 128 and the signal's number when one of those ended the run early, 2 for an error. Several
    processes, one for each rank of the section `parallel`, are started by --nproc on one machine, or by torchrun
    -m actmem train CONFIG on many.
    """
    run = load_config(config, overrides or ())
    if num_processes > 1:
        from actmem.cli.launch import launch
        from actmem.parallel.world import refuse_other_number
        from actmem.training.run_directory import RunDirectory

        refuse_other_number(run, num_processes)
        raise typer.Exit(launch(num_processes, sys.argv[1:], RunDirectory(run.train.output_dir)))
    from transformers.utils import logging

    from actmem.training.trainer import train as run_training

    end_with_launcher()

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would break into ours
    result = run_training(run, progress=not no_progress)
    if is_first_rank():
        if as_json:
            print_json(asdict(result))
        else:
            Screen().facts(_summary(result))
    if result.stopped_by is not None:
        raise typer.Exit(128 + result.stopped_by)


def _summary(result: TrainResult) -> dict[str, str]:
    """What came out, in a few lines: name and value of each."""
    resumed = f", resumed after {result.resumed_from}" if result.resumed_from else ""
    facts = {
        "steps": f"{result.steps}{resumed}",
        "loss": None if result.loss is None else f"{result.loss:.4f}",
        "held-out loss": None if result.eval_loss is None else f"{result.eval_loss:.4f}",
        "peak": f"{format_bytes(result.peak_bytes)} ({result.peak_source})",
        "model": result.model_dir,
        "checkpoint": result.checkpoint,
        "metrics": result.metrics,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}
