"""The most memory a run has used: from the allocator on an accelerator, from the kernel on the CPU."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_name(device: torch.device) -> str:
    """What a peak on a device is called where there is little room."""
    return "peak RSS" if device.type == "cpu" else "peak"


class PeakMemory:
    """Peak bytes since construction. `source` says of what: it belongs beside every figure.

    On an accelerator it is what its allocator has handed out. On the CPU it is the resident set of the whole process,
    which counts files mapped into memory and libraries too; where the kernel cannot start the mark anew, it reaches
    back to the start of the process, and `source` says so.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":
            self.source = f"{device.type} allocator"
            torch.accelerator.reset_peak_memory_stats(device)
        elif restart_high_water_mark():
            self.source = "resident set high-water mark"
        else:
            self.source = "resident set high-water mark since the process began"
        self._highest = 0

    def read_bytes(self) -> int:
        on_cpu = self._device.type == "cpu"
        found = high_water_mark_bytes() if on_cpu else torch.accelerator.max_memory_allocated(self._device)
        # The kernel's mark is summed from counters of several CPUs and may fall by a few pages.
        self._highest = max(self._highest, found)
        return self._highest


def restart_high_water_mark() -> bool:
    """Let the mark of the resident set begin anew; whether the kernel can."""
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return False
    return True


def resident_bytes() -> int | None:
    """The resident set of this process now; ``None`` where the kernel does not tell."""
    return _status_bytes("VmRSS") if _STATUS.exists() else None


def high_water_mark_bytes() -> int:
    """The most the resident set has been since its mark began."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
