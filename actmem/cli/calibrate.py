"""`actmem calibrate`: measure the device at hand, for plans whose times are its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.bench import model_and_batch, setting_of
from actmem.cli.output import why_unwritable
from actmem.cli.planned import load_run
from actmem.cli.progress import progress
from actmem.cli.screen import Screen, print_json
from actmem.config.schema import MemoryConfig, RunConfig
from actmem.errors import HardwareError

if TYPE_CHECKING:
    from actmem.hardware import Hardware
    from actmem.measuring.calibration import TrainingStep


def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the profile goes.")],
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A run's YAML file, to time the ops of its model too.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure what this machine's device does in a second, and how long each op of CONFIG's training step takes there.

    The device is that of CONFIG, or the accelerator if there is one. Takes up to a minute, and wants the machine to
    itself. A plan that is made with FILE for the same model, batch and number of threads knows every op's time.
    """
    run = None if config is None else load_run(config, overrides or ())
    _refuse_unwritable(out)
    hardware = calibrated(run)
    from actmem.hardware import save_hardware

    save_hardware(hardware, out)
    if as_json:
        print_json(hardware.model_dump(mode="json"))
    else:
        _show(hardware, out)


def _refuse_unwritable(out: Path) -> None:
    """Before a minute of measuring, not after."""
    from actmem.hardware.saving import write_fault

    if reason := why_unwritable(out):
        raise HardwareError([write_fault(out, reason)], str(out))


def calibrated(run: RunConfig | None) -> Hardware:
    """The profile of the device of `run`, with the ops of its model, or of the device at hand."""
    from actmem.measuring.calibration import STAGES, calibrate
    from actmem.runtime.swap.building import disk_directory
    from actmem.training.device import choose_device

    device = choose_device("auto" if run is None else run.train.device)
    step = None if run is None else training_step(run)
    directory = disk_directory(MemoryConfig() if run is None else run.memory)
    with progress("calibrate", len(STAGES)) as on_stage:
        doubts: list[str] = []
        hardware = calibrate(device, directory, step, on_stage, doubts.append)
    for doubt in doubts:
        Screen(stderr=True).warning(doubt)
    return hardware


def training_step(run: RunConfig) -> TrainingStep:
    """One forward and backward pass of the run's model on random tokens, to be timed."""
    import torch

    from actmem.measuring.calibration import TrainingStep
    from actmem.training.loss import next_token_loss

    model, batch = model_and_batch(run)
    casts = run.train.autocast is not None

    def step() -> None:
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=casts):
            loss = next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=run.model.loss).total()
        loss.backward()

    rows, hidden = batch.inputs.numel(), model.config.hidden_size
    inner = getattr(model.config, "moe_intermediate_size", model.config.intermediate_size)
    dtype = torch.bfloat16 if casts else model.dtype
    products = ((rows, hidden, hidden), (rows, hidden, inner), (rows, inner, hidden))
    return TrainingStep(step, f"a step of {setting_of(run, model.device)}", products, dtype)


def _show(hardware: Hardware, out: Path) -> None:
    from actmem.reporting.hardware_tables import hardware_facts, hardware_table

    screen = Screen()
    screen.line(hardware.name, style="bold")
    screen.table(hardware_table(hardware))
    screen.facts(hardware_facts(hardware))
    screen.line(f"Written: {out}", style="dim")
