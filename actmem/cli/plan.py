"""`actmem plan`: the plan that a configuration runs with, as a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from actmem.cli.planned import refuse_yardsticks, rules_of
from actmem.cli.screen import Screen, counted, print_json
from actmem.config.loading import load_config
from actmem.config.schema import RunConfig
from actmem.errors import PlanError
from actmem.planning import Plan


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
        made.save(out)
    except OSError as error:
        raise PlanError(f"cannot write the plan to {out}: {error}; name a file in a folder that exists") from error
    if as_json:
        print_json({"written": out, "name": made.name, "num_rules": len(made.rules), "prefetch": made.prefetch})
    else:
        Screen().line(f"Written: {out}, plan {made.name} with {counted(len(made.rules), 'rule')}")


def _made(run: RunConfig) -> Plan:
    from actmem.models.shapes import build_shapes
    from actmem.planning.chosen_rules import rules_of_policy
    from actmem.planning.sections import plan_of
    from actmem.training.traced import trace_run

    model = build_shapes(run.model)
    source = rules_of(run, model)
    graph, made_for = trace_run(run, model)
    given = plan_of(run)
    if isinstance(given, Path):
        given = Plan.load(given)
    return replace(
        given if isinstance(given, Plan) else Plan(source.name, rules_of_policy(graph, source.rules)),
        fingerprint=made_for,
    )
