"""`actmem check`: every fault of a configuration; what its patterns match and what it saves; and nothing touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.planned import YARDSTICKS
from actmem.cli.screen import Screen, counted, print_json
from actmem.config.loading import load_config
from actmem.config.rules import idle_settings
from actmem.config.schema import ModelConfig, RunConfig
from actmem.config.shown import quoted
from actmem.errors import ApplyError, ConfigError, Fault, ModelError, PlanError
from actmem.planning import Plan
from actmem.planning.sections import name_of, plan_of

if TYPE_CHECKING:
    from actmem.graph import Graph
    from actmem.planning.matching import Match
    from actmem.reporting.effect import Effect
    from actmem.runtime.engine import RuleSource

# What a forward pass says of sizes and fields that do not fit together.
_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


@dataclass
class Findings:
    """All that was found out about a configuration: it runs where there are no `faults`."""

    run: RunConfig | None = None
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    effect: Effect | None = None


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
    found = _find(config, overrides or ())
    if as_json:
        _print_findings(config, found)
    else:
        _show_findings(config, found)
    raise typer.Exit(2 if found.faults else 1 if found.warnings else 0)


def _find(config: Path, overrides: Sequence[str]) -> Findings:
    found = Findings()
    try:
        run = load_config(config, overrides)
        if run.plan is not None:
            Plan.load(run.plan)
    except ConfigError as error:
        found.faults = list(error.faults)
    except PlanError as error:
        found.faults = [Fault("plan", str(error))]
    else:
        found.warnings = list(idle_settings(run))
        if run.platform != "torch":
            found.faults = [Fault("platform", f"{run.platform} is not supported; only torch is", run.platform, "torch")]
        else:
            _look_at_layers(run, found)
        found.run = None if found.faults else run
    return found


def _look_at_layers(run: RunConfig, found: Findings) -> None:
    """Add what the layers of the model say to a sound configuration."""
    from actmem.cli.planned import traced_rules
    from actmem.planning.matching import match_patterns
    from actmem.reporting.effect import effect_of
    from actmem.training.traced import shapes_of

    try:
        model = shapes_of(run)
        if run.policy in YARDSTICKS:
            return
        source, graph = traced_rules(run, model)
        found.matches = match_patterns(run, graph)
        found.effect = effect_of(graph, source, min_swap_bytes=run.memory.min_swap_bytes)
        _look_at_tiers(run, source, graph, found)
    except ApplyError as error:
        found.warnings.append(Fault("model", f"patterns and bytes cannot be told: {error}"))
    except PlanError as error:
        found.faults.append(Fault(_planning_setting(run), str(error)))
    except ConfigError as error:
        found.faults += error.faults
    except (ModelError, *_FORWARD_ERRORS) as error:
        found.faults.append(Fault("model", str(error)))
    _judge_matches(run, found)


def _look_at_tiers(run: RunConfig, source: RuleSource, graph: Graph, found: Findings) -> None:
    """Add what is wrong with the places to swap to, where this machine has the device that the run is for."""
    from actmem.runtime.swap.building import wanted_tiers
    from actmem.training.capacity import too_small_tiers
    from actmem.training.device import choose_device

    if not source.may_swap:
        return
    try:
        device = choose_device(run.train.device)
    except ConfigError:
        device = None
    if device is not None:
        try:
            wanted_tiers(run.memory, device, source.tiers)
            found.faults += too_small_tiers(graph, source, run.memory, device)
        except ApplyError as error:
            found.faults.append(Fault("memory.tier", str(error), run.memory.tier))
    if found.effect is not None and not found.effect.total("swapped_bytes"):
        problem = "moves nothing: all that could be swapped is smaller than memory.min_swap_bytes"
        found.warnings.append(Fault(_swapping_setting(run), problem, run.memory.min_swap_bytes))


def _swapping_setting(run: RunConfig) -> str:
    if run.memory_budget is not None:
        return "memory_budget"
    if run.plan is not None or run.policy is not None:
        return "plan" if run.plan is not None else "policy"
    return "swap" if run.swap.enable else "activation_swap"


def _planning_setting(run: RunConfig) -> str:
    if run.memory_budget is not None:
        return "memory_budget"
    return "plan" if run.plan is not None else "layers of the sections"


def _judge_matches(run: RunConfig, found: Findings) -> None:
    wanting = [match for match in found.matches if match.problem is not None]
    notes = [
        Fault(
            f"{match.setting}[{quoted(match.pattern)}]",
            str(match.problem),
            match.pattern,
            nearest=_listed(match.nearest),
        )
        for match in wanting
    ]
    (found.faults if run.memory.strict_matching else found.warnings).extend(notes)


def _listed(names: tuple[str, ...]) -> str | None:
    return ", ".join(names) or None


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
            screen.table(effect_table(found.effect))


def _print_findings(config: Path, found: Findings) -> None:
    print_json(
        {
            "config": config,
            "faults": [asdict(fault) for fault in found.faults],
            "warnings": [asdict(warning) for warning in found.warnings],
            "run": None if found.run is None else found.run.model_dump(mode="json"),
            "matches": [asdict(match) for match in found.matches],
            "effect": None if found.effect is None else found.effect.to_dict(),
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
        "plan": _plan_name(run),
        "output": str(train.output_dir),
    }


def step_setting(run: RunConfig) -> str:
    """A run's model and batch in words."""
    casting = ", autocast bfloat16" if run.train.autocast is not None else ""
    return f"{summary(run)['model']}{casting}, {run.train.micro_batch_size} x {run.data.sequence_length} tokens"


def _plan_name(run: RunConfig) -> str:
    if run.memory_budget is not None:
        return f"the best for memory_budget: {run.memory_budget}"
    plan = plan_of(run)
    return name_of(plan) if isinstance(plan, Plan) else f"from {plan}" if run.plan else f"policy {plan}"


def _model_name(model: ModelConfig) -> str:
    if model.path is not None:
        return f"from {model.path}"
    if model.name is None:
        return "from model.config"
    return f"{model.name} with changes" if model.config else model.name
