"""`actmem check`: every fault of a configuration, and nothing touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from actmem.cli.screen import Screen, counted, print_json
from actmem.config.loading import load_config
from actmem.config.rules import idle_settings
from actmem.config.schema import ModelConfig, RunConfig
from actmem.errors import ConfigError, Fault, PlanError
from actmem.planning import Plan


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every fault of CONFIG, or what it would run. Exit code: 0 clean, 1 warnings only, 2 faults."""
    faults: Sequence[Fault] = ()
    warnings: Sequence[Fault] = ()
    run = None
    try:
        run = load_config(config, overrides or ())
        warnings = idle_settings(run)
        if run.plan is not None:
            Plan.load(run.plan)
    except ConfigError as error:
        faults = error.faults
    except PlanError as error:
        run, faults = None, (Fault("plan", str(error)),)
    if as_json:
        _print_findings(config, run, faults, warnings)
    else:
        _show_findings(config, run, faults, warnings)
    raise typer.Exit(2 if faults else 1 if warnings else 0)


def _show_findings(config: Path, run: RunConfig | None, faults: Sequence[Fault], warnings: Sequence[Fault]) -> None:
    screen = Screen()
    if run is None:
        screen.error(ConfigError(faults, str(config)))
        return
    found = f", {counted(len(warnings), 'warning')}" if warnings else ""
    screen.line(f"{config}: no faults{found}", style="bold")
    screen.faults(warnings, style="yellow")
    screen.facts(summary(run))


def _print_findings(config: Path, run: RunConfig | None, faults: Sequence[Fault], warnings: Sequence[Fault]) -> None:
    print_json(
        {
            "config": config,
            "faults": [asdict(fault) for fault in faults],
            "warnings": [asdict(warning) for warning in warnings],
            "run": None if run is None else run.model_dump(mode="json"),
        }
    )


def summary(run: RunConfig) -> dict[str, str]:
    """A sound configuration in a few lines: name and value of each."""
    train, data = run.train, run.data
    sequences = train.micro_batch_size * train.grad_accumulation
    batch = f"{sequences} x {data.sequence_length} = {sequences * data.sequence_length} tokens"
    return {
        "model": f"{_model_name(run.model)}, {run.model.dtype}",
        "data": ", ".join(data.path),
        "steps": f"{train.steps} of {batch} a process",
        "plan": f"from {run.plan}" if run.plan else f"policy {run.policy or 'none'}",
        "output": str(train.output_dir),
    }


def _model_name(model: ModelConfig) -> str:
    if model.path is not None:
        return f"from {model.path}"
    if model.name is None:
        return "from model.config"
    return f"{model.name} with changes" if model.config else model.name
