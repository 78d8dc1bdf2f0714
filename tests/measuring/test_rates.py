"""Rates of this machine, on small tensors: that they are figures of the right things, not how high they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actmem.measuring import rates
from actmem.measuring.engine_time import measure_engine
from actmem.measuring.rates import CopySpeeds, copy_slowdown, disk_speeds, link_speeds, seconds_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SAMPLING_SECONDS", 0.01)


def test_a_call_takes_as_long_as_it_takes() -> None:
    assert 0.01 <= seconds_of(lambda: time.sleep(0.01), CPU) < 0.05
    assert 0.0002 <= seconds_of(lambda: time.sleep(0.0002), CPU) < 0.005


@pytest.mark.parametrize(("both", "duplex"), [(15.0, 0.5), (30.0, 1.0), (40.0, 1.0)])
def test_duplex_is_a_share_of_both_rates_together(both: float, duplex: float) -> None:
    assert CopySpeeds(10.0, 20.0, both).duplex == duplex


class PacedEngine:
    """Copies that take the time that they would at 1 GB/s out and 2 GB/s in, one after the other."""

    class Mark:
        def __init__(self, until: float) -> None:
            self._until = until

        def synchronize(self) -> None:
            time.sleep(max(0.0, self._until - time.perf_counter()))

    def __init__(self) -> None:
        self._busy_until = 0.0

    def now(self) -> PacedEngine.Mark:
        return self.Mark(0.0)

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: object) -> PacedEngine.Mark:
        return self._take(sum(source.numel() for _, source in pairs) / 1e9)

    def reload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: object) -> PacedEngine.Mark:
        return self._take(sum(source.numel() for _, source in pairs) / 2e9)

    def _take(self, seconds: float) -> PacedEngine.Mark:
        self._busy_until = max(self._busy_until, time.perf_counter()) + seconds
        return self.Mark(self._busy_until)


def test_a_link_of_known_rates() -> None:
    speeds = link_speeds(PacedEngine(), CPU, num_bytes=2 * 10**7, rounds=3)  # type: ignore[arg-type]
    assert 0.5e9 < speeds.out_bytes_per_second <= 1e9
    assert 1e9 < speeds.in_bytes_per_second <= 2e9
    assert speeds.duplex == pytest.approx(4 / 9, abs=0.15)


def test_disks(tmp_path: Path) -> None:
    speeds = disk_speeds(tmp_path, num_bytes=2**18, num_copies=3, rounds=2)
    assert min(speeds.out_bytes_per_second, speeds.in_bytes_per_second, speeds.both_bytes_per_second) > 1e6
    assert copy_slowdown(tmp_path, num_bytes=2**18, num_copies=2, rounds=1) >= 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        disk_speeds(tmp_path / "none")


def test_the_engine_takes_time_for_each_op() -> None:
    engine = measure_engine(rounds=5)
    assert 0.0 < engine.watch_seconds < 1e-3
    assert 0.0 <= engine.replay_seconds < 1e-3
