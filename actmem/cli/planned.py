"""The plan of a configuration beside the graph of its model, without a weight in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.config.loading import load_config
from actmem.config.platforms import refuse_other_platforms
from actmem.config.schema import RunConfig
from actmem.errors import ConfigError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actmem.graph import Graph
    from actmem.hardware import Hardware
    from actmem.runtime.engine import RuleSource

HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="NAME|FILE", help="A device, or a file that calibrate wrote; else what CONFIG names."
    ),
]
YARDSTICKS = ("torch-full", "torch-sac")


def load_run(config: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that is to be looked at as if it ran. Raises `ConfigError`, and `PlatformError` for
    one on another platform than torch."""
    run = load_config(config, overrides)
    refuse_other_platforms(run)
    return run


def refuse_yardsticks(run: RunConfig) -> None:
    """`ConfigError` for torch's own ways of recomputing, which follow no plan of ours."""
    if run.policy in YARDSTICKS:
        ours = "a policy of actmem, a plan file, or the sections recompute and swap"
        raise ConfigError([Fault("policy", "is torch's own way, which tells nothing of single ops", run.policy, ours)])


def refuse_layout(run: RunConfig, command: str, *sizes: str) -> None:
    """`ConfigError` for a layout under which `command` would tell nothing true: one with any of these `sizes`."""
    cut = {size: getattr(run.parallel, size) for size in sizes if getattr(run.parallel, size) > 1}
    faults = [
        Fault(f"parallel.{size}", f"{command} looks at a model that one process has whole", value, f"parallel.{size}=1")
        for size, value in cut.items()
    ]
    if faults:
        raise ConfigError(faults)


def profile_of(run: RunConfig, named: str | None) -> Hardware:
    """The device that a command looks at: the one `named` to it, or else the run's own. Raises `HardwareError`."""
    from actmem.hardware import load_hardware
    from actmem.training.budget import hardware_of

    return hardware_of(run) if named is None else load_hardware(named)


def traced_rules(run: RunConfig, model: PreTrainedModel, *, whole: bool = False) -> tuple[RuleSource, Graph]:
    """The rules that `run` gives the layers of `model`, on the meta device, and the graph of those layers; of the step
    around them as well if it has to be `whole`, or if it was traced anyway to find the rules for a memory budget.

    Raises what `rules_of`, `refuse_clashes` and tracing raise, and `PlanError` for a budget that cannot be met.
    """
    from actmem.planning.clashes import refuse_clashes
    from actmem.training.traced import trace_step

    graph = trace_step(run, model) if whole else graph_for(run, model)
    refuse_clashes(run, graph)
    return rules_on(run, model, graph), graph


def graph_for(run: RunConfig, model: PreTrainedModel) -> Graph:
    """The graph of the layers; of the whole step where a plan for a memory budget is to be found with it."""
    from actmem.training.device import device_at_hand
    from actmem.training.traced import trace_run, trace_step

    if run.memory_budget is None or run.parallel.pp_size > 1:
        return trace_run(run, model)
    return trace_step(run, model, kernels_on=device_at_hand(run))


def rules_on(run: RunConfig, model: PreTrainedModel, graph: Graph | None) -> RuleSource:
    """The rules that `run` gives the layers of `model`, whose `graph` is what `graph_for` gives.

    Raises what `rules_of` raises, and `PlanError` for a budget that cannot be met.
    """
    from actmem.runtime.apply import rule_source
    from actmem.training.budget import plan_run, plan_with, planner_of

    if run.memory_budget is None or graph is None:
        return rules_of(run, model)
    if run.parallel.pp_size > 1:
        return rule_source(plan_run(run, model).plan)
    return rule_source(plan_with(planner_of(run, graph), run).plan)


def rules_of(run: RunConfig, model: PreTrainedModel) -> RuleSource:
    """The rules of the policy, plan file or sections of `run`. Raises `PlanError` for a plan that was made for another
    model than `model`, or for another layout."""
    from actmem.planning.sections import plan_of
    from actmem.runtime import apply
    from actmem.runtime.apply import rule_source
    from actmem.training.traced import laid_out_model

    plan = plan_of(run)
    if isinstance(plan, Path):
        with laid_out_model(run, model) as part:
            apply(part, plan).remove()  # refuses a plan that was made for another model
    return rule_source(plan)
