"""From the settings to a swapper: which tiers there are on a device, and what they may take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Set
from pathlib import Path

import torch

from actmem.config.schema import MemoryConfig
from actmem.errors import ApplyError
from actmem.planning.plan import TIERS, Tier
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.disk import DiskTier
from actmem.runtime.swap.host import HostTier, SlabPool
from actmem.runtime.swap.scratch_file import default_directory, warn_if_in_memory
from actmem.runtime.swap.staged import StagedTier
from actmem.runtime.swap.streams import StreamEngine
from actmem.runtime.swap.swapper import Swapper
from actmem.runtime.swap.tier import SwapTier

_SHARE_OF_HOST = 0.5
_SHARE_OF_DISK = 0.9


def build_swapper(memory: MemoryConfig, device: torch.device, named: Set[Tier], prefetch: int) -> Swapper:
    """A swapper for `device`; `named` are the tiers that rules ask for by name.

    Raises `ApplyError` for a tier that is not there, and for a directory that cannot be written.
    """
    usual = usual_tiers(memory, device)
    counters = SwapCounters()
    wanted = wanted_tiers(memory, device, named)
    tiers: list[SwapTier] = []
    engine = None if device.type == "cpu" else StreamEngine(device)
    if "host" in wanted and engine is not None:
        limit = host_limit(memory)
        tiers.append(HostTier(engine, SlabPool(limit), counters))
    if "disk" in wanted:
        disk = _open_disk(memory, counters)
        tiers.append(disk if engine is None else StagedTier(engine, disk))
    return Swapper(
        tiers,
        usual,
        counters,
        prefetch=prefetch,
        min_swap_bytes=memory.min_swap_bytes,
        in_flight_limit=memory.in_flight_limit,
        device=device,
    )


def wanted_tiers(memory: MemoryConfig, device: torch.device, named: Set[Tier]) -> list[Tier]:
    """The tiers that settings and rules may use. Raises `ApplyError` for one that the device does not have."""
    wanted = {*usual_tiers(memory, device), *named}
    if "host" in wanted and device.type == "cpu":
        raise ApplyError(
            "the tier 'host' swaps to the memory beside a device, but here the device is the CPU and that memory its "
            "own; allowed on the CPU: disk (memory.tier: disk or auto)"
        )
    return [name for name in TIERS if name in wanted]


def usual_tiers(memory: MemoryConfig, device: torch.device) -> tuple[Tier, ...]:
    """The tiers of a rule that names none, in the order in which they are filled."""
    if memory.tier == "disk" or (memory.tier == "auto" and device.type == "cpu"):
        return ("disk",)
    return ("host",) if memory.disk_path is None else ("host", "disk")


def host_limit(memory: MemoryConfig) -> int:
    """Bytes of pinned memory that may be taken: half of the machine's, where the settings say nothing."""
    if memory.host_limit is not None:
        return memory.host_limit
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE_OF_HOST)


def disk_limit(memory: MemoryConfig) -> int:
    """Bytes of disk that may be taken: nine tenths of what is free, where the settings say nothing."""
    if memory.disk_limit is not None:
        return memory.disk_limit
    return int(shutil.disk_usage(disk_directory(memory)).free * _SHARE_OF_DISK)


def disk_directory(memory: MemoryConfig) -> Path:
    """Where the scratch file goes."""
    return memory.disk_path or default_directory()


def _open_disk(memory: MemoryConfig, counters: SwapCounters) -> DiskTier:
    directory = disk_directory(memory)
    try:
        tier = DiskTier(directory, disk_limit(memory), counters)
    except OSError as error:
        raise ApplyError(
            f"memory.disk_path {str(directory)!r} cannot be used: {error.strerror or error}; name a directory that can "
            "be written, on a disk"
        ) from error
    warn_if_in_memory(directory)
    return tier
