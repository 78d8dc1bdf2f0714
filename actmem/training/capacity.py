"""Whether what a plan swaps in one step fits where it goes: found out before training, on fake tensors."""

from __future__ import annotations

import shutil

import torch

from actmem.config.schema import MemoryConfig, RunConfig
from actmem.errors import ApplyError, ConfigError, Fault
from actmem.graph import Graph
from actmem.parallel import Mesh
from actmem.planning.fates import fates_under, path_of_storage
from actmem.planning.plan import RuleSet, Tier
from actmem.runtime.engine import RuleSource
from actmem.runtime.swap.building import disk_directory, disk_limit, host_limit, usual_tiers
from actmem.runtime.swap.scratch_file import BLOCK
from actmem.training.traced import trace_run
from actmem.units import format_bytes

Need = dict[tuple[Tier, ...], int]
"""Bytes by the tiers that may take them, the first one first."""


def refuse_too_small_tiers(config: RunConfig, source: RuleSource, device: torch.device, mesh: Mesh) -> None:
    """Raise `ConfigError` if one micro-batch swaps more than its tiers may take. `mesh` is that of the run.

    Nothing is said of a model whose ops depend on its numbers, such as experts run one by one.
    """
    if not source.may_swap:
        return
    try:
        graph = trace_run(config, mesh=mesh)
    except ApplyError:
        return
    faults = too_small_tiers(graph, source, config.memory, device)
    if faults:
        raise ConfigError(faults)


def too_small_tiers(graph: Graph, source: RuleSource, memory: MemoryConfig, device: torch.device) -> list[Fault]:
    """A fault for each tier that may take less than the layers swap in one forward pass, with the number needed."""
    return [
        _fault(tiers[-1], needed, room, memory)
        for tiers, needed in swapped_bytes(graph, source, memory, device).items()
        if needed > (room := sum(_room(tier, memory) for tier in tiers))
    ]


def swapped_bytes(graph: Graph, source: RuleSource, memory: MemoryConfig, device: torch.device) -> Need:
    """What all layers together swap, whole blocks of the file included."""
    need: Need = {}
    usual = usual_tiers(memory, device)
    for layer, name in enumerate(graph.layers):
        region = graph.of_layer(name)
        rules = RuleSet(source.rules(layer, region))
        for storage in fates_under(region, rules, min_swap_bytes=memory.min_swap_bytes).swapped:
            tier = rules.tier_of(path_of_storage(region, storage))
            tiers = usual if tier is None else (tier,)
            need[tiers] = need.get(tiers, 0) + region.storages[storage].num_bytes + 2 * BLOCK
    return need


def _room(tier: Tier, memory: MemoryConfig) -> int:
    return host_limit(memory) if tier == "host" else disk_limit(memory)


def _fault(tier: Tier, needed: int, room: int, memory: MemoryConfig) -> Fault:
    field = f"memory.{tier}_limit"
    limit = memory.host_limit if tier == "host" else memory.disk_limit
    allowed = f"at least {needed} ({format_bytes(needed)}), or a plan that swaps less"
    if limit is not None:
        return Fault(field, f"{format_bytes(room)} are too few for what the plan swaps in one step", limit, allowed)
    if tier == "host":
        return Fault(field, f"half of this machine's memory, {format_bytes(room)}, is too little", None, allowed)
    directory = disk_directory(memory)
    free = format_bytes(shutil.disk_usage(directory).free)
    return Fault("memory.disk_path", f"has too little room: {free} free", str(directory), allowed)
