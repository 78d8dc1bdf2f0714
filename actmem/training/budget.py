"""From a configuration with a memory budget to the plan that its run follows."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import torch
from transformers import PreTrainedModel

from actmem._compat import bfloat16_scratch
from actmem.config.schema import MemoryConfig, RunConfig
from actmem.errors import Fault, HardwareError
from actmem.graph import Graph
from actmem.hardware import CostModel, Hardware, device_names, load_hardware, recognise_device
from actmem.parallel import Mesh
from actmem.planning.conditions import conditions_on
from actmem.planning.pipeline import PipelineGraph, PipelineSimulator
from actmem.planning.pipeline_planner import PipelinePlanner, PlannedPipeline
from actmem.planning.plan import Tier
from actmem.planning.planner import Planned, Planner, Settings, planner_for
from actmem.planning.simulation import Conditions
from actmem.runtime.swap.building import disk_limit, host_limit, usual_tiers
from actmem.training.device import choose_device, device_at_hand
from actmem.training.machine import device_name, free_memory_bytes
from actmem.training.traced import trace_pipeline, trace_step
from actmem.units import format_bytes

AnyPlanned = Planned | PlannedPipeline


def plan_run(config: RunConfig, model: PreTrainedModel | None = None, *, mesh: Mesh | None = None) -> AnyPlanned:
    """The best plan for a run within its `memory_budget`, which is that of each rank, on the hardware that it names.

    `model` is on the meta device; without one it is made. `mesh` is that of the run, where this process is in it
    already. Raises `PlanError` for a budget that no plan can meet, `HardwareError` for hardware that is not known,
    `ConfigError` for a device that is not there, and what tracing raises.
    """
    here = device_at_hand(config)
    if config.parallel.pp_size > 1:
        pipeline = trace_pipeline(config, model, mesh=mesh, kernels_on=here)
        return plan_with(pipeline_planner_of(config, pipeline), config)
    return plan_with(planner_of(config, trace_step(config, model, mesh=mesh, kernels_on=here)), config)


def peaks_of(planned: AnyPlanned) -> tuple[int, ...]:
    """The predicted peak of each rank of the pipeline, or of the only one."""
    simulations = planned.simulation.ranks if isinstance(planned, PlannedPipeline) else (planned.simulation,)
    return tuple(each.peak_bytes for each in simulations)


def describe(planned: AnyPlanned) -> str:
    """A plan for a budget in one line: its predicted peak and time, and how near the bound it is."""
    times = f"step {planned.added_share:+.2%} over the unplanned one (bound {planned.bound_share:+.2%}, modelled)"
    if isinstance(planned, PlannedPipeline):
        peaks = ", ".join(
            f"rank {rank} {format_bytes(each.peak_bytes)} of {format_bytes(alone.budget_bytes)}"
            for rank, (each, alone) in enumerate(zip(planned.simulation.ranks, planned.ranks, strict=True))
        )
        away = sum(rank.swapped_bytes for rank in planned.simulation.ranks)
        return f"plan {planned.plan.name}: peaks of the stages: {peaks}; {times}{_swapped(away)}"
    simulation = planned.simulation
    return (
        f"plan {planned.plan.name}: peak {format_bytes(simulation.peak_bytes)} of "
        f"{format_bytes(planned.budget_bytes)}, {times}{_swapped(simulation.swapped_bytes)}"
    )


def _swapped(num_bytes: int) -> str:
    return f", {format_bytes(num_bytes)} swapped" if num_bytes else ""


@overload
def plan_with(planner: Planner, config: RunConfig) -> Planned: ...
@overload
def plan_with(planner: PipelinePlanner, config: RunConfig) -> PlannedPipeline: ...
def plan_with(planner: Planner | PipelinePlanner, config: RunConfig) -> AnyPlanned:
    """What `plan_run` gives, from a planner that `planner_of` or `pipeline_planner_of` made for the run."""
    budget = config.memory_budget
    assert budget is not None, "only a budget needs a planner"
    return planner.within(budget, memory_bytes=_memory_of(config) if budget == "auto" else None)


def planner_of(
    config: RunConfig,
    graph: Graph,
    *,
    hardware: Hardware | None = None,
    swaps: bool = True,
    gradients_stand: bool | None = None,
) -> Planner:
    """A planner for a traced step under the settings of a configuration, on `hardware` in place of what it names.

    With `swaps`, values may go where ``memory.tier`` says. On the CPU the disk has to be asked for: nothing waits for
    its writes, so that on a busy machine a budget may not hold. `gradients_stand`: parameters have gradients when a
    step begins; by default that is so where the gradients of several micro-batches are added up. Raises `HardwareError`
    and `ConfigError`.
    """
    hardware, conditions, settings = _means_of(config, hardware, swaps=swaps)
    stand = _gradients_stand(config) if gradients_stand is None else gradients_stand
    return planner_for(graph, replace(conditions, gradients_stand=stand), **settings)


def pipeline_planner_of(
    config: RunConfig, pipeline: PipelineGraph, *, hardware: Hardware | None = None, swaps: bool = True
) -> PipelinePlanner:
    """The same for a pipeline."""
    hardware, conditions, settings = _means_of(config, hardware, swaps=swaps)
    hop = CostModel(hardware).transfer_seconds(pipeline.states_bytes, ranks_between=pipeline.ranks_between)
    conditions = replace(conditions, gradients_stand=_gradients_stand(config))
    return PipelinePlanner(PipelineSimulator(pipeline, conditions, hop_seconds=hop), **settings)


def _gradients_stand(config: RunConfig) -> bool:
    """Whether parameters have gradients when a step begins: those of several batches are added up, and DDP keeps the
    memory for them."""
    parallel = config.parallel
    is_ddp = parallel.dp_replicate_size > 1 and parallel.dp_shard_size == parallel.tp_size == 1
    return config.train.grad_accumulation > 1 or is_ddp


def _means_of(config: RunConfig, hardware: Hardware | None, *, swaps: bool) -> tuple[Hardware, Conditions, Settings]:
    """The device, the conditions on it, and what a search may use of it."""
    here = hardware is None and _is_here(config)
    hardware = hardware or hardware_of(config)
    device = _device(config, hardware, here)
    tiers = usual_tiers(config.memory, device) if swaps else ()
    conditions = conditions_on(
        hardware, tiers=tiers, prefetch=config.swap.default_prefetch, in_flight_limit=config.memory.in_flight_limit
    )
    settings: Settings = {
        "limits": _limits(config.memory, tiers, here),
        "min_swap_bytes": config.memory.min_swap_bytes,
        "swap_to": None if device.type != "cpu" or config.memory.tier == "disk" else (),
    }
    return hardware, conditions, settings


def hardware_of(config: RunConfig) -> Hardware:
    """The profile that a configuration names, or that of the device that its run will be on. Raises `HardwareError`."""
    if not _is_here(config):
        return load_hardware(config.hardware)
    device = choose_device(config.train.device)
    if device.type == "cpu":
        here = {"num_threads": torch.get_num_threads(), "bfloat16_scratch": bfloat16_scratch()}
        return load_hardware("cpu").model_copy(update=here)
    found = recognise_device(device_name(device))
    if found is None:
        problem = f"auto finds {device_name(device)}, of which no figures are known"
        allowed = f"{', '.join(device_names())}, or a file: actmem calibrate -o hardware.yaml measures this device"
        raise HardwareError([Fault("hardware", problem, config.hardware, allowed)])
    return found


def _is_here(config: RunConfig) -> bool:
    return config.hardware == "auto"


def _device(config: RunConfig, hardware: Hardware, here: bool) -> torch.device:
    """The device of the run, or one of the kind of `hardware`: one without a link to the host is a CPU."""
    if here:
        return choose_device(config.train.device)
    return torch.device("cpu" if hardware.link is None else "cuda")


def _limits(memory: MemoryConfig, tiers: tuple[Tier, ...], here: bool) -> dict[Tier, int]:
    """What the tiers may take: of this machine, what it has; of another one, what the settings say."""
    if here:
        return {tier: host_limit(memory) if tier == "host" else disk_limit(memory) for tier in tiers}
    given = {"host": memory.host_limit, "disk": memory.disk_limit}
    return {tier: limit for tier in tiers if (limit := given[tier]) is not None}


def _memory_of(config: RunConfig) -> int:
    """What a budget of ``auto`` comes to: what is free here, or all that a device elsewhere has."""
    if _is_here(config):
        return free_memory_bytes(choose_device(config.train.device))
    return hardware_of(config).memory_bytes
