"""`actmem plan`: the plan that a configuration runs with, as a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.planned import refuse_yardsticks, rules_of
from actmem.cli.screen import Screen, counted, print_json
from actmem.config.loading import load_config
from actmem.config.schema import RunConfig
from actmem.errors import PlanError
from actmem.planning import Plan
from actmem.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actmem.graph import Graph
    from actmem.planning.simulation import Simulation


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where the plan goes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings in place of the file's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the plan of CONFIG, be it a policy, sections or a plan file, to FILE; `plan: FILE` gives the same run.

    Nothing is trained and no weight is made or read. The plan fits this model, and batches of this shape, alone.
    """
    run = load_config(config, overrides or ())
    refuse_yardsticks(run)
    made = _made(run)
    try:
        made.plan.save(out)
    except OSError as error:
        raise PlanError(f"cannot write the plan to {out}: {error}; name a file in a folder that exists") from error
    if as_json:
        print_json({"written": out, **made.to_dict()})
    else:
        screen = Screen()
        screen.line(f"Written: {out}, plan {made.plan.name} with {counted(len(made.plan.rules), 'rule')}")
        screen.facts(made.facts())


@dataclass(frozen=True)
class _Made:
    """A plan, and what a step under it comes to on the hardware that the configuration names."""

    plan: Plan
    simulation: Simulation
    unplanned: Simulation
    hardware: str
    bound_seconds: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "name": self.plan.name,
            "num_rules": len(self.plan.rules),
            "prefetch": self.plan.prefetch,
            "hardware": self.hardware,
            "peak_bytes": self.simulation.peak_bytes,
            "peak": {"where": self.simulation.peak.where, "bytes_by_use": dict(self.simulation.peak.bytes_by_use)},
            "step_seconds": self.simulation.seconds,
            "unplanned_peak_bytes": self.unplanned.peak_bytes,
            "unplanned_step_seconds": self.unplanned.seconds,
            "bound_seconds": self.bound_seconds,
            "swapped_bytes": self.simulation.swapped_bytes,
        }

    def facts(self) -> dict[str, str]:
        """The same for a person to read."""
        peak = self.simulation.peak
        parts = sorted(peak.bytes_by_use.items(), key=lambda part: -part[1])
        added = self.simulation.seconds / self.unplanned.seconds - 1
        step = f"{self.simulation.seconds:.3g} s, {added:+.2%} over the unplanned {self.unplanned.seconds:.3g} s"
        if self.bound_seconds is not None:
            step += f"; no plan is below {self.bound_seconds / self.unplanned.seconds - 1:+.2%}"
        return {
            "peak": f"{format_bytes(peak.num_bytes)}, {peak.where}",
            "unplanned": f"{format_bytes(self.unplanned.peak_bytes)}, {self.unplanned.peak.where}",
            "made of": ", ".join(f"{name} {format_bytes(size)}" for name, size in parts),
            "swapped": format_bytes(self.simulation.swapped_bytes),
            "step": step,
            "on": self.hardware,
        }


def _made(run: RunConfig) -> _Made:
    from actmem.training.budget import hardware_of, plan_with, planner_of
    from actmem.training.traced import shapes_of, trace_step

    model = shapes_of(run)
    graph = trace_step(run, model)
    planner, hardware = planner_of(run, graph), hardware_of(run)
    named = f"{hardware.name}, {hardware.times} times of ops"
    if run.memory_budget is not None:
        found = plan_with(planner, run)
        return _Made(found.plan, found.simulation, found.unplanned, named, found.bound_seconds)
    plan = _given(run, model, graph)
    return _Made(plan, planner.simulate(plan), planner.unplanned, named)


def _given(run: RunConfig, model: PreTrainedModel, graph: Graph) -> Plan:
    from actmem.planning.chosen_rules import rules_of_policy
    from actmem.planning.clashes import refuse_clashes
    from actmem.planning.sections import plan_of

    refuse_clashes(run, graph)
    source, given = rules_of(run, model), plan_of(run)
    if isinstance(given, Path):
        given = Plan.load(given)
    if not isinstance(given, Plan):
        given = Plan(source.name, rules_of_policy(graph, source.rules))
    return replace(given, fingerprint=graph.made_for)
