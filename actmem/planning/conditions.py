"""What a simulation needs to know of a device, from its profile."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import get_args

from actmem.config.shown import shown
from actmem.errors import PlanError
from actmem.graph import RegionGraph, StepOp
from actmem.hardware import CopyRates, CostModel, Hardware, Level, work_of
from actmem.planning.course import Costs
from actmem.planning.plan import TIERS, Tier
from actmem.planning.simulation import Conditions, Link

_SHARE_OF_DISK = 0.5
"""Of the rate at which a disk writes, on a thread beside the computing."""
_DISK_START_SECONDS = 1e-3
"""Until that thread has taken a write up."""


def conditions_on(
    hardware: Hardware,
    *,
    level: Level = "nominal",
    tiers: tuple[Tier, ...] = ("host",),
    prefetch: int = 1,
    in_flight_limit: int = 2**33,
    gradients_stand: bool = True,
) -> Conditions:
    """The conditions of a step on `hardware` at an efficiency. Of `tiers`, those stay to which its profile has a
    link. Raises `PlanError` for a level or a tier that is none."""
    _refuse_unknown("level", (level,), get_args(Level))
    _refuse_unknown("tiers", tiers, TIERS)
    model = CostModel(hardware, level)
    known = {"host": model.link, "disk": model.disk}
    links = {tier: _link(tier, rates, hardware.copy_slowdown) for tier in tiers if (rates := known[tier]) is not None}
    return Conditions(
        _costs(model),
        links,
        prefetch,
        in_flight_limit,
        gradients_stand,
        workspace_bytes=hardware.workspace_bytes,
        packing_bytes=hardware.packing_bytes_per_thread * (hardware.num_threads or os.cpu_count() or 1),
    )


def _refuse_unknown(name: str, given: object, known: tuple[str, ...]) -> None:
    entries = given if isinstance(given, tuple | list) else (given,)
    unknown = [each for each in entries if each not in known]
    if unknown or entries is not given:
        problem = f"{shown(unknown[0])} is not known" if unknown else f"{shown(given)} is no tuple"
        raise PlanError(f"{name}: {problem}; allowed: {', '.join(known)}")


def _link(tier: Tier, rates: CopyRates, slowdown: float) -> Link:
    """Nobody waits for a write to the disk, so a budget holds only if writes are as fast as was planned: they are taken
    to be slow ones."""
    out = rates.out_bytes_per_second
    if tier == "disk":
        return Link(_SHARE_OF_DISK * out, rates.in_bytes_per_second, slowdown, _DISK_START_SECONDS)
    return Link(out, rates.in_bytes_per_second, slowdown)


def _costs(model: CostModel) -> Costs:
    hardware = model.hardware
    seconds: dict[int, list[float]] = {}

    def op_seconds(graph: RegionGraph, index: int) -> float:
        if id(graph) not in seconds:
            seconds[id(graph)] = [model.op_seconds(graph, op) for op in range(len(graph.ops))]
        return seconds[id(graph)][index]

    op_scratch, step_op_scratch = scratch_of(model)
    return Costs(
        op_seconds=op_seconds,
        step_op_seconds=cache(model.seconds),
        replay_seconds=hardware.replay_seconds,
        watch_seconds=hardware.watch_seconds,
        accumulate_bytes_per_second=hardware.memory_bytes_per_second.peak * hardware.efficiency.memory.nominal / 3,
        granularity=hardware.allocation_bytes,
        op_scratch=op_scratch,
        step_op_scratch=step_op_scratch,
    )


def scratch_of(model: CostModel) -> tuple[Callable[[RegionGraph, int], int], Callable[[StepOp], int]]:
    """The bytes that ops of a layer's graph, and of a step around it, take for themselves while they run."""
    known: dict[int, list[int]] = {}

    def op_scratch(graph: RegionGraph, index: int) -> int:
        if id(graph) not in known:
            known[id(graph)] = [
                model.scratch_bytes(work_of(graph, op), _result_bytes(graph, op)) for op in range(len(graph.ops))
            ]
        return known[id(graph)][index]

    return op_scratch, cache(lambda op: model.scratch_bytes(op, op.allocated_bytes))


def _result_bytes(graph: RegionGraph, index: int) -> int:
    return graph.num_bytes({graph.values[value].storage for value in graph.ops[index].outputs})
