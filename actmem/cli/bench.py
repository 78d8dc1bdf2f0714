"""`actmem bench`: policies side by side on one model, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.check import step_setting
from actmem.cli.output import make_directory, told_if_unwritable
from actmem.cli.planned import load_run, refuse_layout
from actmem.cli.progress import progress
from actmem.cli.screen import Screen, print_json
from actmem.config.schema import RunConfig
from actmem.planning import Plan
from actmem.planning.sections import plan_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from actmem.measuring import BenchResult
    from actmem.training.packing import Batch

_AUTO = "auto@"
_FILES = ("bench.json", "bench.png", "bench.svg")
_POLICIES = "none,selective,mlp,full,torch-sac,torch-full"


def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="A,B,…",
            help=f"Policies, plan files or budgets such as auto@40%; default: {_POLICIES}.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed steps of each policy.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where files go; by default train.output_dir/bench.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure peak memory and step time of policies, and that their gradients are those of the unplanned model.

    The unplanned model, none, is always measured: all else is compared to it. Without --policies, what CONFIG itself
    says, by a policy, a budget, a plan file or its sections, is measured as well. The model is a fresh one, or that of
    model.path; the tokens are random, so no corpus is needed; a step is one forward and backward pass of one
    micro-batch. Writes bench.json, bench.png and bench.svg. Exit code: 0, or 1 if a policy gave other numbers.
    """
    run = load_run(config, overrides or ())
    refuse_layout(run, "bench", "tp_size", "ep_size", "pp_size")
    names = _asked_for(policies) if policies is not None else _with_own_plan(run, _asked_for(_POLICIES))
    directory = out or run.train.output_dir / "bench"
    make_directory(directory, _FILES)
    result = _measure(run, _with_budgets(run, names), rounds)
    write_result(result, directory)
    if as_json:
        print_json(result.to_dict())
    else:
        screen = Screen()
        show_result(screen, result)
        screen.line(f"Written: {directory}/{', '.join(_FILES)}", style="dim")
    if result.disagreeing:
        raise typer.Exit(1)


def _asked_for(policies: str) -> list[str | Plan]:
    return [name.strip() for name in policies.split(",") if name.strip()]


def _with_own_plan(run: RunConfig, names: list[str | Plan]) -> list[str | Plan]:
    """The policies, and what the configuration itself says if it is something else."""
    own = f"auto@{run.memory_budget}" if run.memory_budget is not None else plan_of(run)
    return list(dict.fromkeys([*names, str(own) if isinstance(own, Path) else own]))


def _with_budgets(run: RunConfig, policies: list[str | Plan]) -> list[str | Plan]:
    """The policies, with the best plan for a budget in place of each name like ``auto@40%``."""
    if not any(isinstance(each, str) and each.startswith(_AUTO) for each in policies):
        return policies
    from actmem.training.budget import planner_of
    from actmem.training.device import device_at_hand
    from actmem.training.traced import trace_step

    found: list[str | Plan] = []
    with progress("plan", len(policies)) as on_policy:
        planner = planner_of(run, trace_step(run, kernels_on=device_at_hand(run)), gradients_stand=True)
        for each in policies:
            is_budget = isinstance(each, str) and each.startswith(_AUTO)
            found.append(planner.within(str(each).removeprefix(_AUTO)).plan if is_budget else each)
            on_policy(str(each))
    return found


def _measure(run: RunConfig, policies: list[str | Plan], rounds: int) -> BenchResult:
    import torch

    from actmem.measuring.bench import num_steps, run_bench

    model, batch = model_and_batch(run)
    with progress("bench", num_steps(policies, rounds)) as on_step:
        return run_bench(
            model,
            batch,
            policies,
            setting=setting_of(run, model.device),
            rounds=rounds,
            loss=run.model.loss,
            memory=run.memory,
            autocast=torch.bfloat16 if run.train.autocast is not None else None,
            on_step=on_step,
        )


def model_and_batch(run: RunConfig) -> tuple[PreTrainedModel, Batch]:
    """The model of a run, on its device, and a micro-batch of random tokens."""
    from actmem.measuring.bench import random_batch
    from actmem.models.building import build_model
    from actmem.training.device import choose_device
    from actmem.training.traced import expected_vocab_size

    device = choose_device(run.train.device)
    model = build_model(run.model, vocab_size=expected_vocab_size(run), seed=run.train.seed)
    model.to(device)  # type: ignore[arg-type]  # its annotations are lost in a wrapper
    return model, random_batch(model, run.train.micro_batch_size, run.data.sequence_length, seed=run.train.seed)


def setting_of(run: RunConfig, device: torch.device) -> str:
    """A run's model and batch, and where they are, in words."""
    return f"{step_setting(run)}, {device.type}"


def write_result(result: BenchResult, directory: Path) -> None:
    """Write bench.json, bench.png and bench.svg."""
    from actmem.reporting.plots import plot_bench

    with told_if_unwritable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        result.save(directory / "bench.json")
        plot_bench(result, directory / "bench.png", directory / "bench.svg")


def show_result(screen: Screen, result: BenchResult) -> None:
    """The setting, a table of all policies, and what it cannot say."""
    from actmem.reporting.tables import bench_notes, bench_table, swap_table

    screen.line(result.setting, style="bold")
    screen.table(bench_table(result))
    if any(each.swap is not None for each in result.policies):
        screen.table(swap_table(result))
    for note in bench_notes(result):
        screen.line(note, style="bold red" if note.startswith("WRONG") else "")
