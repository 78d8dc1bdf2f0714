"""What the engine's own Python costs on the CPU: for each op that it watches, and for each that it runs again.

A chain of ops on a few numbers has next to no other time in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actmem.measuring.rates import seconds_of
from actmem.runtime import apply

_NUM_LAYERS = 4
_NUM_OPS = 64
_WARM_UP = 3


@dataclass(frozen=True)
class EngineTime:
    """Seconds that come on top of the op itself."""

    watch_seconds: float
    replay_seconds: float


class _Chain(nn.Module):
    """A layer whose every op saves its input, and in which nothing takes time."""

    def forward(self, numbers: Tensor) -> Tensor:
        for _ in range(_NUM_OPS):
            numbers = numbers.sin()
        return numbers


def measure_engine(rounds: int = 30) -> EngineTime:
    """Time forward and backward passes of chains without a plan, and with one that recomputes all, in turns; of each
    the fastest counts, the one that the rest of the machine disturbed least."""
    plain, planned = (nn.Sequential(*(_Chain() for _ in range(_NUM_LAYERS))) for _ in range(2))
    numbers = torch.ones(8, requires_grad=True)
    with torch.no_grad():
        op_seconds = seconds_of(numbers.sin, numbers.device)
    with apply(planned, "full", regions=list(planned), memory={"verify": "off"}) as applied:
        for _ in range(_WARM_UP):
            _pass_seconds(planned, numbers)
        before = applied.stats.num_replayed_ops
        passes = [(*_pass_seconds(plain, numbers), *_pass_seconds(planned, numbers)) for _ in range(rounds)]
        num_replayed = (applied.stats.num_replayed_ops - before) / rounds
    forward, backward, planned_forward, planned_backward = map(min, zip(*passes, strict=True))
    return EngineTime(
        watch_seconds=max(0.0, (planned_forward - forward) / (_NUM_LAYERS * _NUM_OPS)),
        replay_seconds=max(0.0, (planned_backward - backward) / num_replayed - op_seconds),
    )


def _pass_seconds(model: Callable[[Tensor], Tensor], numbers: Tensor) -> tuple[float, float]:
    """Of the forward and the backward pass."""
    began = time.perf_counter()
    out = model(numbers).sum()
    middle = time.perf_counter()
    torch.autograd.grad(out, numbers)
    return middle - began, time.perf_counter() - middle
