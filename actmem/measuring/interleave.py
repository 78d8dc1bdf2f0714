"""Step times of several contenders, measured in turns, so that whatever else the machine does falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch


@dataclass(frozen=True)
class Timing:
    """The seconds of each round, in order. Round i of one contender ran next to round i of every other."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    @property
    def fastest(self) -> float:
        """The least disturbed one."""
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of all rounds lie between these."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    def ratio_to(self, other: Timing) -> float:
        """The median over rounds of this contender's time by the other's in the same round."""
        return median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warm_up: int = 2,
    on_run: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Run each contender `warm_up` times, then `rounds` rounds of all of them, each round begun by another one.

    The device has finished all work before a clock is started and before it is stopped. `on_run` hears the name of
    each contender that has run, warm-up included.
    """
    names = list(contenders)
    for name in (name for name in names for _ in range(warm_up)):
        contenders[name]()
        on_run(name)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in _rotated(names, index):
            seconds[name].append(_time(contenders[name], device))
            on_run(name)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def _rotated(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names)
    return [*names[start:], *names[:start]]


def _time(step: Callable[[], object], device: torch.device) -> float:
    finish(device)
    started = time.perf_counter()
    step()
    finish(device)
    return time.perf_counter() - started


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
