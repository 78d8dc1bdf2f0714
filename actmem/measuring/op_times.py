"""How long each op of a training step takes, measured in place, with the caches, threads and memory it finds there.

A clock around every op sees the kernels and not what Python and autograd do in between, and it slows the step down. So
the times are scaled by one factor, after which those of a whole step add up to the time of a step without clocks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from actmem._compat import TorchDispatchMode
from actmem.graph import signature_of
from actmem.measuring.interleave import finish, interleave
from actmem.runtime.kinds import kind_of
from actmem.runtime.learning import tensors_in

WARM_UP = 2
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_ENOUGH_SECONDS = 10.0

_LEAST_FACTOR = 0.5
"""That the times of ops may be multiplied by, or divided, and still tell which of them takes how long."""

StepTimes = Mapping[str, Sequence[float]]
"""Signature -> seconds of each of its ops in one step."""


@dataclass(frozen=True)
class OpTimes:
    """`seconds` by signature, already times `factor`, so that the ops of a step add up to `step_seconds`."""

    seconds: Mapping[str, float]
    factor: float
    step_seconds: float

    @property
    def doubt(self) -> str | None:
        """Why the times of single ops are not to be trusted much, where they had to be scaled far."""
        if _LEAST_FACTOR <= self.factor <= 1.0 / _LEAST_FACTOR:
            return None
        if self.factor < 1.0:
            why = (
                f"one by one the ops take {1.0 / self.factor:.1f} times as long as in a step: most of that is the clock"
            )
        else:
            why = f"the step takes {self.factor:.1f} times as long as its ops: most of it goes by between them"
        return f"the times of single ops are doubtful: {why}; take a larger batch, or a machine with nothing else to do"


def measure_op_times(step: Callable[[], object], device: torch.device) -> OpTimes:
    """Run `step` with and without clocks in turns, and time its ops by signature."""
    clocks = OpClocks(device)

    def timed() -> None:
        with clocks:
            step()

    timings = interleave({"plain": step, "timed": timed}, device, rounds=_num_rounds(step, device), warm_up=WARM_UP)
    return scaled(clocks.steps[WARM_UP:], timings["plain"].median)


def scaled(steps: Sequence[StepTimes], step_seconds: float) -> OpTimes:
    """The median time of each signature over all steps, times the factor that makes a step of them `step_seconds` long.

    How often a signature occurs is a mean over steps: experts that run one by one differ from step to step.
    """
    gathered: defaultdict[str, list[float]] = defaultdict(list)
    for times in steps:
        for signature, seconds in times.items():
            gathered[signature].extend(seconds)
    medians = {signature: median(seconds) for signature, seconds in gathered.items()}
    total = sum(medians[signature] * len(gathered[signature]) for signature in medians) / len(steps)
    factor = step_seconds / total
    return OpTimes({signature: seconds * factor for signature, seconds in medians.items()}, factor, step_seconds)


class OpClocks(TorchDispatchMode):
    """Times every op that runs under it; `steps` has the times of each time that it was entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[defaultdict[str, list[float]]] = []
        self._device = device

    def __enter__(self) -> Any:
        self.steps.append(defaultdict(list))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = signature_of_call(func, args, kwargs)
        finish(self._device)
        began = time.perf_counter()
        out = func(*args, **kwargs)
        finish(self._device)
        self.steps[-1][signature].append(time.perf_counter() - began)
        return out


def signature_of_call(func: Any, args: Any, kwargs: Mapping[str, Any]) -> str:
    """The signature that the graph has for a call."""
    operands = tensors_in((*args, *kwargs.values()))
    described = [(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in operands]
    return signature_of(kind_of(func).name, described)


def _num_rounds(step: Callable[[], object], device: torch.device) -> int:
    """As many as fit a fixed time; of a clocked step and a plain one, the first takes about twice as long."""
    step()
    finish(device)
    began = time.perf_counter()
    step()
    finish(device)
    return max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(_ENOUGH_SECONDS / (3 * (time.perf_counter() - began)))))
