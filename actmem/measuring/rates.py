"""What a device does in a second: products, attention, memory, copies; and the time of its smallest op.

Ops run in batches that are long enough for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from actmem.measuring.interleave import finish
from actmem.runtime.swap.counters import SwapCounters
from actmem.runtime.swap.disk import DiskCopy, DiskTier
from actmem.runtime.swap.tier import CopyEngine

_LEAST_BATCH_SECONDS = 0.005
_SAMPLING_SECONDS = 0.1
_LEAST_BATCHES = 3
_POLL_SECONDS = 1e-4

CPU_PRODUCTS = tuple((size, size, size) for size in (256, 512, 1024))
ACCELERATOR_PRODUCTS = tuple((size, size, size) for size in (2048, 4096, 8192))


@dataclass(frozen=True)
class CopySpeeds:
    """Bytes/s of copies out, in, and of both directions at once, together."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    both_bytes_per_second: float

    @property
    def duplex(self) -> float:
        """The share of the sum of the two rates that both at once reach."""
        return min(1.0, self.both_bytes_per_second / (self.out_bytes_per_second + self.in_bytes_per_second))


def seconds_of(
    call: Callable[[], object], device: torch.device, *, sampling_seconds: float = _SAMPLING_SECONDS
) -> float:
    """The time of one call: the median over batches of calls, which go on for `sampling_seconds`."""
    call()
    num_calls, first = 1, _batch_seconds(call, 1, device)
    while first < _LEAST_BATCH_SECONDS:
        num_calls *= 2
        first = _batch_seconds(call, num_calls, device)
    batches = [first]
    while len(batches) < _LEAST_BATCHES or sum(batches) < _SAMPLING_SECONDS:
        batches.append(_batch_seconds(call, num_calls, device))
    return min(batches) / num_calls


def product_rates(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> list[float]:
    """FLOP/s of a product of a (rows, inner) and a (inner, columns) matrix for each shape (rows, inner, columns)."""
    rates = []
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, device=device, dtype=dtype)
        right = torch.randn(columns, inner, device=device, dtype=dtype).t()  # as a linear layer has it
        rates.append(2 * rows * inner * columns / seconds_of(lambda a=left, b=right: a @ b, device))  # type: ignore[misc]
    return rates


def attention_rates(dtype: torch.dtype, device: torch.device) -> list[float]:
    """FLOP/s of causal attention, of which half of the square counts: forward, and forward with backward."""
    lengths, heads = ((256, 512, 1024), 8) if device.type == "cpu" else ((1024, 2048, 4096), 32)
    rates = []
    for length in lengths:
        query, key, value = torch.randn(3, 1, heads, length, 64, device=device, dtype=dtype, requires_grad=True)
        flops = 2 * heads * length**2 * 64

        def forward(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        def both(attend: Callable[[], Tensor] = forward, operands: tuple[Tensor, ...] = (query, key, value)) -> object:
            return torch.autograd.grad(attend().sum(), operands)

        with torch.no_grad():
            rates.append(flops / seconds_of(forward, device))
        rates.append(flops * 3.5 / seconds_of(both, device))
    return rates


def memory_rates(device: torch.device) -> list[float]:
    """Bytes/s, read plus written, of copies and sums of tensors as large as activations, and larger than caches."""
    sizes = (2**20, 2**23, 2**26) if device.type == "cpu" else (2**26, 2**28, 2**30)
    rates = []
    for size in sizes:
        one, other, sum_of_both = torch.ones(3, size // 4, device=device)
        copying = seconds_of(lambda a=one, b=other: a.copy_(b), device)  # type: ignore[misc]
        adding = seconds_of(lambda a=one, b=other, c=sum_of_both: torch.add(a, b, out=c), device)  # type: ignore[misc]
        rates += [2 * size / copying, 3 * size / adding]
    return rates


def smallest_op_seconds(device: torch.device) -> float:
    """The time of an op on a few numbers."""
    numbers = torch.ones(8, device=device)
    return seconds_of(lambda: numbers + numbers, device)


def link_speeds(engine: CopyEngine, device: torch.device, num_bytes: int = 2**28, rounds: int = 5) -> CopySpeeds:
    """The link between a device and the host's pinned memory, by the engine that swaps."""
    pinned = device.type != "cpu"
    host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    here = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def out_and_in(out: bool, back: bool) -> float:
        began = time.perf_counter()
        marks = [engine.offload([(host[0], here[0])], [engine.now()])] if out else []
        marks += [engine.reload([(here[1], host[1])], [engine.now()])] if back else []
        for mark in marks:
            mark.synchronize()
        return time.perf_counter() - began

    out_and_in(True, True)
    return CopySpeeds(
        num_bytes / median(out_and_in(True, False) for _ in range(rounds)),
        num_bytes / median(out_and_in(False, True) for _ in range(rounds)),
        2 * num_bytes / median(out_and_in(True, True) for _ in range(rounds)),
    )


def disk_speeds(directory: Path, num_bytes: int = 2**24, num_copies: int = 8, rounds: int = 3) -> CopySpeeds:
    """A scratch file in `directory`, by the tier that swaps, `num_copies` storages at a time. Raises `OSError`."""
    tier = DiskTier(directory, None, SwapCounters())
    data = torch.ones(num_bytes, dtype=torch.uint8)
    total = num_bytes * num_copies
    speeds = []
    for _ in range(rounds):
        began = time.perf_counter()
        copies = _offload(tier, data, num_copies)
        _wait(copies)
        written = time.perf_counter()
        _read(copies)
        read = time.perf_counter()
        more = _offload(tier, data, num_copies)
        _read(copies)
        _wait(more)
        speeds.append((total / (written - began), total / (read - written), 2 * total / (time.perf_counter() - read)))
    out, back, both = (median(each) for each in zip(*speeds, strict=True))
    return CopySpeeds(out, back, both)


def copy_slowdown(directory: Path, num_bytes: int = 2**24, num_copies: int = 12, rounds: int = 3) -> float:
    """Seconds that computing on the CPU loses for each second in which the disk tier copies. Raises `OSError`."""
    tier = DiskTier(directory, None, SwapCounters())
    data = torch.ones(num_bytes, dtype=torch.uint8)
    work = _Computing()
    return max(0.0, median(_lost_share(tier, data, num_copies, work) for _ in range(rounds)))


class _Computing:
    """A product, and a sum of two tensors that do not fit a small cache: what a layer does by turns."""

    def __init__(self) -> None:
        self._matrix = torch.randn(384, 384)
        self._one, self._other = torch.randn(2, 2**19)

    def __call__(self) -> None:
        _ = self._matrix @ self._matrix
        _ = self._one + self._other


def _lost_share(tier: DiskTier, data: Tensor, num_copies: int, work: Callable[[], object]) -> float:
    alone = seconds_of(work, data.device)
    busy = tier.writing.seconds + tier.reading.seconds
    began = time.perf_counter()
    copies = _offload(tier, data, num_copies)
    num_done = _work_until(lambda: all(copy.has_left(0) for copy in copies), work)
    reloads = [copy.begin_reload() for copy in copies]
    num_done += _work_until(lambda: all(reload.is_there() for reload in reloads), work)
    elapsed = time.perf_counter() - began
    return (elapsed - num_done * alone) / (tier.writing.seconds + tier.reading.seconds - busy)


def _work_until(is_over: Callable[[], bool], work: Callable[[], object]) -> int:
    num_done = 0
    while not is_over():
        work()
        num_done += 1
    return num_done


def _offload(tier: DiskTier, data: Tensor, num_copies: int) -> list[DiskCopy]:
    copies = (tier.offload(data) for _ in range(num_copies))
    return [copy for copy in copies if copy is not None]  # a tier without a limit raises rather than refuse


def _wait(copies: Sequence[DiskCopy]) -> None:
    while not all(copy.has_left(0) for copy in copies):
        time.sleep(_POLL_SECONDS)


def _read(copies: Sequence[DiskCopy]) -> None:
    for reload in [copy.begin_reload() for copy in copies]:
        reload.finish()


def _batch_seconds(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    finish(device)
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    finish(device)
    return time.perf_counter() - began
