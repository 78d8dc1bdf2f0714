from __future__ import annotations

import gc

import torch

from actmem.training.peak_memory import PeakMemory


def test_on_the_cpu_it_is_the_resident_sets_high_water_mark() -> None:
    gc.collect()  # what would go in between makes room for the block
    peak = PeakMemory(torch.device("cpu"))
    before = peak.read_bytes()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = peak.read_bytes()
    del block
    assert after - before > 48 * 2**20
    assert peak.read_bytes() >= after
    assert peak.source.startswith("resident set high-water mark")
