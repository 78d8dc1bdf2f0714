"""Contenders take turns, and their times are compared round by round."""

from __future__ import annotations

import time

import pytest
import torch

from actmem.measuring.interleave import Timing, interleave

CPU = torch.device("cpu")


def test_each_round_begins_with_another_contender() -> None:
    runs: list[str] = []
    heard: list[str] = []
    contenders = {name: (lambda name=name: runs.append(name)) for name in "abc"}
    timings = interleave(contenders, CPU, rounds=4, warm_up=1, on_run=heard.append)
    assert "".join(runs) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert heard == runs
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 4, "b": 4, "c": 4}


def test_warm_up_is_not_timed() -> None:
    runs = iter([0.2, 0.0, 0.0])
    timing = interleave({"a": lambda: time.sleep(next(runs))}, CPU, rounds=2, warm_up=1)["a"]
    assert max(timing.seconds) < 0.15


def test_a_slow_contender_is_found_slow() -> None:
    timings = interleave({"slow": lambda: time.sleep(0.02), "quick": lambda: None}, CPU, rounds=3, warm_up=0)
    assert timings["slow"].fastest >= 0.02 > timings["quick"].median


def test_median_and_spread() -> None:
    timing = Timing((5.0, 1.0, 2.0, 3.0, 100.0))
    assert (timing.median, timing.fastest, timing.quartiles) == (3.0, 1.0, (2.0, 5.0))
    assert Timing((4.0,)).quartiles == (4.0, 4.0)


def test_a_disturbed_round_does_not_change_the_ratio() -> None:
    base = Timing((1.0, 10.0, 1.0, 1.0))
    assert Timing((2.0, 20.0, 2.0, 2.0)).ratio_to(base) == 2.0


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        Timing((1.0,)).ratio_to(Timing((1.0, 2.0)))
