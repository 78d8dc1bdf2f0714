"""A bench result made by hand, so that what is shown can be checked to the digit."""

from __future__ import annotations

import pytest

from actmem.measuring.agreement import Agreement
from actmem.measuring.interleave import Timing
from actmem.measuring.result import BenchResult, Holdings, PolicyResult

MIB = 2**20
EXACT = Agreement(difference=0.0, allowed=0.0)


def holdings(held: int, dropped: int, replayed: int) -> Holdings:
    reasons = {"saved": held - 3 * MIB, "input": 2 * MIB, "random": MIB}
    return Holdings(held, dropped, reasons, replayed)


@pytest.fixture
def result() -> BenchResult:
    return BenchResult(
        setting="a small model, 1 x 64 tokens",
        num_tokens=64,
        policies=(
            PolicyResult("none", 1200 * MIB, Timing((0.100, 0.110, 0.120)), EXACT, holdings(1000 * MIB, 0, 0)),
            PolicyResult(
                "selective", 600 * MIB, Timing((0.110, 0.121, 0.132)), EXACT, holdings(400 * MIB, 600 * MIB, 1234)
            ),
            PolicyResult("full", 300 * MIB, Timing((0.150, 0.165, 0.180)), EXACT, holdings(100 * MIB, 900 * MIB, 2345)),
            PolicyResult("torch-full", 305 * MIB, Timing((0.160, 0.176, 0.192)), EXACT, None),
        ),
        floor_bytes=500 * MIB,
    )
