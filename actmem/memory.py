"""The peak of device memory within a step, or within single calls, above what stood before.

On an accelerator the allocator counts it. On the CPU nobody does, so the profiler notes each allocation, and the
highest running sum is the peak, exact to the byte. Neither counts what a library allocates past torch's allocators.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.profiler import profile, record_function

from actmem._compat import allocations, spans_of
from actmem.errors import MeasurementError
from actmem.units import format_bytes

ALLOWED_LEFT_BYTES = 64 * 1024
"""What may be left when a step is over: scalars, and the small constants that libraries keep."""
_MARK = "actmem call "


@dataclass(frozen=True, slots=True)
class Peak:
    """`peak_bytes`: the most of its own that a step had allocated at once; `left_bytes`: what of it was left over.

    A step is expected to leave alone what stood before it: the CPU's profiler does not see that given back.
    """

    peak_bytes: int
    left_bytes: int


def measure_peak(step: Callable[[], object], device: torch.device) -> Peak:
    """Run `step` once and measure it. What it returns is dropped before the end.

    Run it before, so that gradients stand and caches are filled. The garbage collector is off meanwhile: cycles that it
    happens to free in mid-step would flatter the peak. Raises `MeasurementError` if more than `ALLOWED_LEFT_BYTES` are
    left when the step is over.
    """
    with _collector_off():
        peak = _measure_on_cpu(step) if device.type == "cpu" else _measure_on_accelerator(step, device)
    if peak.left_bytes > ALLOWED_LEFT_BYTES:
        raise MeasurementError(
            f"{format_bytes(peak.left_bytes)} are left when the step is over, of a peak of "
            f"{format_bytes(peak.peak_bytes)}; allowed: {format_bytes(ALLOWED_LEFT_BYTES)}; run the step once before "
            "it is measured, and look for a reference cycle or a cache that holds on to activations"
        )
    return peak


@contextmanager
def _collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def peaks_of_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> list[int]:
    """The most bytes that each call had allocated at once, above what stood before it; run in order, once each. What
    they return is dropped."""
    if device.type != "cpu":
        return [_measure_on_accelerator(call, device).peak_bytes for call in calls]
    with _profiling() as profiled:
        for index, call in enumerate(calls):
            with record_function(f"{_MARK}{index}"):
                call()
    spans, seen = spans_of(profiled, _MARK), allocations(profiled)
    inside = ([size for moment, size in seen if first <= moment <= last] for first, last in spans)
    return [max(accumulate(sizes, initial=0)) for sizes in inside]


def _measure_on_cpu(step: Callable[[], object]) -> Peak:
    with _profiling() as profiled:
        step()
    standing = list(accumulate((size for _, size in allocations(profiled)), initial=0))
    return Peak(max(standing), standing[-1])


@contextmanager
def _profiling() -> Iterator[profile]:
    """A profile of memory, which can be read when it is over."""
    profiled = profile(profile_memory=True)
    with _without_chatter():
        profiled.__enter__()
    try:
        yield profiled
    finally:
        with _without_chatter():
            profiled.__exit__(None, None, None)


def _measure_on_accelerator(step: Callable[[], object], device: torch.device) -> Peak:
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    step()
    torch.accelerator.synchronize(device)
    peak = torch.accelerator.max_memory_allocated(device) - before
    return Peak(peak, torch.accelerator.memory_allocated(device) - before)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Drop the lines that the profiler writes to the process's standard error when it starts and stops.

    It writes from C++ past `sys.stderr`, and no setting of it keeps it from that; any other line is passed on.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            caught.seek(0)
            os.write(stderr, b"".join(line for line in caught if not line.startswith(b"USDT:")))
            os.close(stderr)
