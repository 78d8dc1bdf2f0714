"""`actmem plan`: the plan that a configuration runs with, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmem.cli.findings import findings_of
from actmem.cli.output import why_unwritable
from actmem.cli.planned import load_run, refuse_yardsticks, rules_of
from actmem.cli.screen import Screen, counted, print_json
from actmem.config.loading import read_config
from actmem.config.rules import idle_settings
from actmem.config.schema import RunConfig
from actmem.errors import ApplyError, ConfigError, Fault, PlanError
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
    run, warned = _sound(config, overrides or ())
    refuse_yardsticks(run)
    if out.exists() and out.samefile(config):
        raise PlanError(f"the plan would be written over {config} itself; give another file with -o")
    if reason := why_unwritable(out):  # before minutes of planning, not after
        raise _unwritable(out, reason)
    made = _made_or_written(run)
    plan = made.plan if isinstance(made, _Made) else made
    try:
        plan.save(out)
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error
    if as_json:
        told = made.to_dict() if isinstance(made, _Made) else _named(plan)
        print_json({"written": out, **told, "warnings": [asdict(each) for each in warned]})
    else:
        for each in warned:
            Screen(stderr=True).warning(str(each))
        screen = Screen()
        screen.line(f"Written: {out}, plan {plan.name} with {counted(len(plan.rules), 'rule')}")
        if isinstance(made, _Made):
            screen.facts(made.facts())


def _unwritable(out: Path, reason: str) -> PlanError:
    return PlanError(f"cannot write the plan to {out}: {reason}; name a file in a folder that exists")


def _sound(config: Path, overrides: Sequence[str]) -> tuple[RunConfig, Sequence[Fault]]:
    """The configuration, if nothing that `actmem check` looks at is at fault in it, and what it warns of. The plan for
    a budget is ours, and need not be looked at."""
    run = load_run(config, overrides)
    if run.memory_budget is not None:
        return run, idle_settings(run)
    found = findings_of(read_config(config, overrides))
    if found.faults:
        raise ConfigError(found.faults, str(config))
    # The figures of the plan are those on the hardware, with a budget or without.
    return run, [each for each in found.warnings if each.path != "hardware"]


@dataclass(frozen=True)
class _Made:
    """A plan, and what a step under it comes to on each rank that differs, on the hardware that the configuration
    names. `seconds` are those of the step, with and without the plan, and the least that any plan takes."""

    plan: Plan
    ranks: tuple[Simulation, ...]
    unplanned: tuple[Simulation, ...]
    seconds: float
    unplanned_seconds: float
    hardware: str
    bound_seconds: float | None = None
    bubble_share: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        peaks = [rank.peak for rank in self.ranks]
        peak = max(peaks, key=lambda peak: peak.num_bytes)
        return {
            **_named(self.plan),
            "hardware": self.hardware,
            "peak_bytes": peak.num_bytes,
            "peak": {"where": peak.where, "bytes_by_use": dict(peak.bytes_by_use)},
            "peak_bytes_by_rank": [each.num_bytes for each in peaks],
            "step_seconds": self.seconds,
            "unplanned_peak_bytes": max(rank.peak_bytes for rank in self.unplanned),
            "unplanned_step_seconds": self.unplanned_seconds,
            "bound_seconds": self.bound_seconds,
            "bubble_share": self.bubble_share,
            "swapped_bytes": sum(rank.swapped_bytes for rank in self.ranks),
        }

    def facts(self) -> dict[str, str]:
        """The same for a person to read."""
        facts = self._peaks()
        added = self.seconds / self.unplanned_seconds - 1
        step = f"{self.seconds:.3g} s, {added:+.2%} over the unplanned {self.unplanned_seconds:.3g} s"
        if self.bound_seconds is not None:
            step += f"; no plan is below {self.bound_seconds / self.unplanned_seconds - 1:+.2%}"
        facts["swapped"] = format_bytes(sum(rank.swapped_bytes for rank in self.ranks))
        facts["step"] = step
        if self.bubble_share is not None:
            facts["bubble"] = f"{self.bubble_share:.1%} of the ranks' time"
        return facts | {"on": self.hardware}

    def _peaks(self) -> dict[str, str]:
        """Of each rank, or of the only one, and what the highest is made of."""
        highest = max((rank.peak for rank in self.ranks), key=lambda peak: peak.num_bytes)
        parts = sorted(highest.bytes_by_use.items(), key=lambda part: -part[1])
        made_of = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        if len(self.ranks) == 1:
            before = self.unplanned[0].peak
            return {
                "peak": f"{format_bytes(highest.num_bytes)}, {highest.where}",
                "unplanned": f"{format_bytes(before.num_bytes)}, {before.where}",
                "made of": made_of,
            }
        facts = {
            f"peak, rank {rank}": f"{format_bytes(mine.peak_bytes)} ({format_bytes(before.peak_bytes)} unplanned), "
            f"{mine.peak.where}"
            for rank, (mine, before) in enumerate(zip(self.ranks, self.unplanned, strict=True))
        }
        return facts | {"the highest": made_of}


def _named(plan: Plan) -> dict[str, object]:
    return {"name": plan.name, "num_rules": len(plan.rules), "prefetch": plan.prefetch}


def _made_or_written(run: RunConfig) -> _Made | Plan:
    """The plan, and what it comes to; of a model that cannot be traced without its weights the plan alone, where the
    configuration has it without looking at the layers."""
    try:
        return _made(run)
    except ApplyError:
        if run.memory_budget is not None or run.parallel.pp_size > 1:
            raise
        plan = _as_written(run)
        if plan is None:
            raise
        return plan


def _as_written(run: RunConfig) -> Plan | None:
    from actmem.models.regions import find_regions
    from actmem.planning.sections import plan_of
    from actmem.runtime.apply import fingerprint
    from actmem.training.traced import laid_out_model, shapes_of

    given = plan_of(run)
    given = Plan.load(given) if isinstance(given, Path) else given
    if not isinstance(given, Plan):
        return None
    with laid_out_model(run, shapes_of(run)) as part:
        return replace(given, fingerprint=fingerprint(part, find_regions(part)))


def _made(run: RunConfig) -> _Made:
    from actmem.training.budget import hardware_of
    from actmem.training.traced import shapes_of

    model, hardware = shapes_of(run), hardware_of(run)
    named = f"{hardware.name}, {hardware.times} times of ops"
    make = _of_pipeline if run.parallel.pp_size > 1 else _of_step
    return make(run, model, named)


def _of_step(run: RunConfig, model: PreTrainedModel, hardware: str) -> _Made:
    from actmem.training.budget import plan_with, planner_of
    from actmem.training.device import device_at_hand
    from actmem.training.traced import trace_step

    graph = trace_step(run, model, kernels_on=device_at_hand(run))
    planner = planner_of(run, graph)
    bound = None
    if run.memory_budget is not None:
        found = plan_with(planner, run)
        plan, mine, bound = found.plan, found.simulation, found.bound_seconds
    else:
        plan = _given(run, model, graph)
        mine = planner.simulate(plan)
    before = planner.unplanned
    return _Made(plan, (mine,), (before,), mine.seconds, before.seconds, hardware, bound)


def _of_pipeline(run: RunConfig, model: PreTrainedModel, hardware: str) -> _Made:
    from actmem.training.budget import pipeline_planner_of, plan_with
    from actmem.training.device import device_at_hand
    from actmem.training.traced import trace_pipeline, trace_run

    pipeline = trace_pipeline(run, model, kernels_on=device_at_hand(run))
    planner = pipeline_planner_of(run, pipeline)
    bound = None
    if run.memory_budget is not None:
        found = plan_with(planner, run)
        plan, mine, bound = found.plan, found.simulation, found.bound_seconds
    else:
        plan = replace(_given(run, model, trace_run(run, model)), fingerprint=pipeline.made_for)
        mine = planner.simulate(plan)
    before = planner.unplanned
    return _Made(
        plan, mine.ranks, before.ranks, mine.seconds, before.seconds, hardware, bound, bubble_share=mine.bubble_share
    )


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
