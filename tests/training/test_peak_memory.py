from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from actmem.training.peak_memory import PeakMemory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set from /proc")
def test_on_the_cpu_it_is_the_resident_sets_high_water_mark() -> None:
    peak = PeakMemory(torch.device("cpu"))
    before = peak.read_bytes()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    block = torch.ones(before - resident + 64 * 2**20, dtype=torch.uint8)
    after = peak.read_bytes()
    del block
    assert after - before > 48 * 2**20
    assert peak.read_bytes() >= after
    assert peak.source.startswith("resident set high-water mark")
