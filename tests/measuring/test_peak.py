"""The peak of a step is exact, and what a step leaves behind is not passed over."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import Tensor

from actmem.errors import MeasurementError
from actmem.memory import ALLOWED_LEFT_BYTES, Peak, measure_peak

CPU = torch.device("cpu")
MIB = 2**20


def mebibytes(count: int) -> Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


def test_the_peak_is_the_highest_sum_not_the_total() -> None:
    def step() -> None:
        first = mebibytes(3)
        second = mebibytes(4)
        del first
        third = mebibytes(2)
        del second, third

    assert measure_peak(step, CPU) == Peak(peak_bytes=7 * MIB, left_bytes=0)


def test_memory_that_stood_before_counts_neither_standing_nor_given_back() -> None:
    standing = [mebibytes(8), mebibytes(8)]

    def step() -> None:
        standing.pop()
        mebibytes(3)

    assert measure_peak(step, CPU) == Peak(peak_bytes=3 * MIB, left_bytes=0)


def test_what_the_step_returns_is_dropped() -> None:
    assert measure_peak(lambda: mebibytes(1), CPU) == Peak(peak_bytes=MIB, left_bytes=0)


def test_autograd_saves_what_the_arithmetic_says() -> None:
    x = torch.ones(MIB // 4, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def step() -> None:
        x.exp().exp().sum().backward()

    # Both results of exp are saved; the backward pass adds one gradient before it lets go of the second of them.
    assert measure_peak(step, CPU).peak_bytes == pytest.approx(3 * MIB, abs=64)


def test_what_is_left_is_an_error() -> None:
    kept = []
    with pytest.raises(MeasurementError, match=r"2\.00 MiB are left .* of a peak of 5\.00 MiB; allowed: 64\.0 KiB"):
        measure_peak(lambda: (kept.append(mebibytes(2)), mebibytes(3)), CPU)


def test_a_little_may_be_left() -> None:
    kept = []
    peak = measure_peak(lambda: kept.append(torch.empty(ALLOWED_LEFT_BYTES, dtype=torch.uint8)), CPU)
    assert peak.left_bytes == ALLOWED_LEFT_BYTES


def test_a_cycle_is_not_collected_in_mid_step() -> None:
    def step() -> None:
        cycle: list[object] = [mebibytes(1)]
        cycle.append(cycle)
        for _ in range(5000):  # enough new containers to set the collector off
            _ = [[] for _ in range(3)]

    with pytest.raises(MeasurementError, match="cycle"):
        measure_peak(step, CPU)
    gc.collect()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was_even_after_an_error(was_on: bool) -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    gc.enable() if was_on else gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            measure_peak(fail, CPU)
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_the_profiler_is_silent_and_others_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    measure_peak(lambda: os.write(2, b"from the step\n"), CPU)
    assert capfd.readouterr().err == "from the step\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here")
def test_the_peak_on_an_accelerator() -> None:
    device = torch.device(torch.accelerator.current_accelerator())
    torch.empty(8 * MIB, dtype=torch.uint8, device=device)

    def step() -> None:
        first = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
        second = torch.empty(2 * MIB, dtype=torch.uint8, device=device)
        del first, second

    assert measure_peak(step, device) == Peak(peak_bytes=6 * MIB, left_bytes=0)
