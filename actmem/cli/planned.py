"""The plan of a configuration beside the graph of its model, without a weight in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from actmem.config.schema import RunConfig
from actmem.errors import ConfigError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actmem.runtime.engine import RuleSource

YARDSTICKS = ("torch-full", "torch-sac")


def refuse_yardsticks(run: RunConfig) -> None:
    """`ConfigError` for torch's own ways of recomputing, which follow no plan of ours."""
    if run.policy in YARDSTICKS:
        ours = "a policy of actmem, a plan file, or the sections recompute and swap"
        raise ConfigError([Fault("policy", "is torch's own way, which tells nothing of single ops", run.policy, ours)])


def rules_of(run: RunConfig, model: PreTrainedModel) -> RuleSource:
    """The rules that `run` gives the layers of `model`, on the meta device. For a memory budget the planner looks for
    them. Raises `PlanError` for a plan that was made for another model, and for a budget that cannot be met."""
    from actmem.planning.sections import plan_of
    from actmem.runtime import apply
    from actmem.runtime.apply import rule_source
    from actmem.training.budget import plan_run

    if run.memory_budget is not None:
        return rule_source(plan_run(run, model).plan)
    plan = plan_of(run)
    if isinstance(plan, Path):
        apply(model, plan).remove()  # refuses a plan that was made for another model
    return rule_source(plan)
