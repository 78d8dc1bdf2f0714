"""A planner for the step of a configuration on hardware that the command line names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actmem.config.schema import RunConfig
from actmem.hardware import Hardware

if TYPE_CHECKING:
    from actmem.graph import Graph
    from actmem.planning import Fingerprint
    from actmem.planning.plan import Tier
    from actmem.planning.planner import Planner


def planner_on(
    run: RunConfig, graph: Graph, hardware: Hardware, made_for: Fingerprint | None = None, *, swaps: bool = True
) -> Planner:
    """A planner for a traced step of `run` on `hardware`; with `swaps`, values may go where ``memory.tier`` says."""
    from actmem.planning.conditions import conditions_on
    from actmem.planning.planner import Planner

    tiers = tiers_on(run, hardware) if swaps else ()
    given = {"host": run.memory.host_limit, "disk": run.memory.disk_limit}
    return Planner(
        graph,
        conditions_on(
            hardware,
            tiers=tiers,
            prefetch=run.swap.default_prefetch,
            in_flight_limit=run.memory.in_flight_limit,
            gradients_stand=run.train.grad_accumulation > 1,
        ),
        limits={tier: limit for tier in tiers if (limit := given[tier]) is not None},
        min_swap_bytes=run.memory.min_swap_bytes,
        fingerprint=made_for,
    )


def tiers_on(run: RunConfig, hardware: Hardware) -> tuple[Tier, ...]:
    """Where values may be swapped to: to the host where the device has a link to it, else to the disk."""
    if run.memory.tier == "auto":
        return ("host",) if hardware.link is not None else ("disk",)
    return (run.memory.tier,)


def step_setting(run: RunConfig) -> str:
    """A run's model and batch in words."""
    from actmem.cli.check import summary

    casting = ", autocast bfloat16" if run.train.autocast is not None else ""
    return f"{summary(run)['model']}{casting}, {run.train.micro_batch_size} x {run.data.sequence_length} tokens"
