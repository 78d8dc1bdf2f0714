"""`actmem check`: every fault of a configuration; what its patterns match and what it saves; and nothing touched."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from actmem.cli.findings import Findings, findings_of
from actmem.cli.screen import Screen, counted, print_json
from actmem.config.loading import read_config
from actmem.config.schema import ModelConfig, ParallelConfig, RunConfig
from actmem.config.shown import bounded
from actmem.errors import ConfigError, Fault
from actmem.planning import Plan
from actmem.planning.sections import name_of, plan_of
from actmem.units import shown_budget


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every fault of CONFIG, or what it would run: what each pattern matches, and how many bytes are saved,
    recomputed and swapped. Exit code: 0 clean, 1 warnings only, 2 faults.
    """
    found = findings_of(read_config(config, overrides or ()))
    if as_json:
        _print_findings(config, found)
    else:
        _show_findings(config, found)
    raise typer.Exit(2 if found.faults else 1 if found.warnings else 0)


def _show_findings(config: Path, found: Findings) -> None:
    screen = Screen()
    if found.run is None:
        screen.error(ConfigError(found.faults, str(config)))
        return
    warned = f", {counted(len(found.warnings), 'warning')}" if found.warnings else ""
    screen.line(f"{config}: no faults{warned}", style="bold")
    screen.faults(found.warnings, style="yellow")
    screen.facts(summary(found.run))
    if found.matches or found.effect is not None:
        from actmem.reporting.check_tables import effect_table, match_table

        if found.matches:
            screen.table(match_table(found.matches))
        if found.effect is not None:
            screen.table(effect_table(found.effect, is_pipeline=found.run.parallel.pp_size > 1))


def _print_findings(config: Path, found: Findings) -> None:
    print_json(
        {
            "config": config,
            "faults": [_plain(fault) for fault in found.faults],
            "warnings": [_plain(warning) for warning in found.warnings],
            "run": None if found.run is None else found.run.model_dump(mode="json"),
            "matches": [asdict(match) for match in found.matches],
            "effect": None if found.effect is None else found.effect.to_dict(),
        }
    )


def _plain(fault: Fault) -> dict[str, object]:
    return asdict(replace(fault, value=bounded(fault.value)))


def summary(run: RunConfig) -> dict[str, str]:
    """A sound configuration in a few lines: name and value of each."""
    train, data = run.train, run.data
    return {
        "model": f"{_model_name(run.model)}, {run.model.dtype}",
        "data": ", ".join(data.path),
        "steps": f"{train.steps} of {_step_tokens(run)}",
        **({"layout": _layout(run.parallel)} if run.parallel.world_size > 1 else {}),
        "plan": _plan_name(run),
        "output": str(train.output_dir),
    }


def _step_tokens(run: RunConfig) -> str:
    """Of all ranks together; those of a pipeline, and of tensor parallel, have the same tokens."""
    train, parallel, length = run.train, run.parallel, run.data.sequence_length
    own, readers = train.micro_batch_size * train.grad_accumulation, parallel.dp_replicate_size * parallel.dp_shard_size
    factors = [readers, own, length] if readers > 1 else [own, length]
    in_all = " in all" if parallel.world_size > 1 else ""
    return f"{' x '.join(map(str, factors))} = {readers * own * length} tokens{in_all}"


def step_setting(run: RunConfig) -> str:
    """A run's model and batch in words."""
    casting = ", autocast bfloat16" if run.train.autocast is not None else ""
    return f"{summary(run)['model']}{casting}, {run.train.micro_batch_size} x {run.data.sequence_length} tokens"


def _layout(parallel: ParallelConfig) -> str:
    """Such as ``4 ranks: 2 shards (FSDP2) x 2 tensor parallel``."""
    parts = {
        f"{parallel.pp_size} stages ({parallel.pp_schedule} of {parallel.pp_microbatches})": parallel.pp_size,
        f"{parallel.dp_replicate_size} copies": parallel.dp_replicate_size,
        f"{parallel.dp_shard_size} shards (FSDP2)": parallel.dp_shard_size,
        f"{parallel.tp_size} tensor parallel": parallel.tp_size,
    }
    sizes = " x ".join(words for words, size in parts.items() if size > 1)
    experts = f"; experts over {parallel.ep_size}" if parallel.ep_size > 1 else ""
    return f"{parallel.world_size} ranks: {sizes}{experts}; {_whose_bytes(parallel)}"


def _whose_bytes(parallel: ParallelConfig) -> str:
    if parallel.pp_size == 1:
        return "bytes are those of one rank"
    return f"bytes of a layer are those of a rank that runs it, for one of {parallel.pp_microbatches} micro-batches"


def _plan_name(run: RunConfig) -> str:
    if run.memory_budget is not None:
        return f"the best for memory_budget: {shown_budget(run.memory_budget)}"
    plan = plan_of(run)
    return name_of(plan) if isinstance(plan, Plan) else f"from {plan}" if run.plan else f"policy {plan}"


def _model_name(model: ModelConfig) -> str:
    if model.path is not None:
        return f"from {model.path}"
    if model.name is None:
        return "from model.config"
    return f"{model.name} with changes" if model.config else model.name
