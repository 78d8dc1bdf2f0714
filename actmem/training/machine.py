"""What the devices of this machine are called, and how much memory they have."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")


def device_name(device: torch.device) -> str:
    """As its driver, or the kernel for a CPU, calls it."""
    if device.type == "cpu":
        return cpu_name()
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


def cpu_name() -> str:
    """The CPU's model, or else its architecture."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_memory_bytes(device: torch.device) -> int:
    """All memory of a device; on the CPU that of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.accelerator.get_memory_info(device)[1])


def free_memory_bytes(device: torch.device) -> int:
    """What a run that begins now can have: what is free and what torch has cached; on the CPU what the kernel deems
    available."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0]) + torch.accelerator.memory_reserved(device)
    for line in _MEMORY_INFO.read_text(encoding="utf-8").splitlines() if _MEMORY_INFO.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return device_memory_bytes(device)
