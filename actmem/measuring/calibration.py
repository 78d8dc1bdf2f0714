"""The profile of the device at hand, measured: what it does in a second, and how long the ops of a model's step take.

A peak is the maker's where the device is a known one, else the best rate that was seen; shares of it are the lowest,
the middle and the highest rate of several sizes. What other ranks can be told in a second is not measured, and taken
from the known device, or from the guess for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from actmem._compat import bfloat16_scratch
from actmem.errors import MeasurementError
from actmem.hardware import Copying, Efficiency, Hardware, Rate, Shares, load_hardware, recognise_device
from actmem.measuring.engine_time import EngineTime, measure_engine
from actmem.measuring.op_times import OpTimes, measure_op_times
from actmem.measuring.rates import (
    ACCELERATOR_PRODUCTS,
    CPU_PRODUCTS,
    CopySpeeds,
    attention_rates,
    copy_slowdown,
    disk_speeds,
    link_speeds,
    memory_rates,
    product_rates,
    smallest_op_seconds,
)
from actmem.runtime.swap.streams import StreamEngine
from actmem.training.machine import device_memory_bytes, device_name

STAGES = ("memory", "products", "attention", "small ops", "link", "disk", "engine", "ops of a step")
_ALLOCATION_BYTES = 512  # to which torch's caching allocator rounds
_MOST_ROWS = 4096  # of a product of the model's shapes

OnStage = Callable[[str], None]


@dataclass(frozen=True)
class TrainingStep:
    """A model's forward and backward pass, to time its ops. `description` says whose; `products` are shapes (rows,
    inner, columns) of its products, `dtype` is theirs."""

    run: Callable[[], object]
    description: str
    products: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype


def calibrate(
    device: torch.device,
    directory: Path,
    step: TrainingStep | None = None,
    on_stage: OnStage = lambda stage: None,
    on_doubt: Callable[[str], None] = lambda doubt: None,
) -> Hardware:
    """Measure `device`, the disk at `directory` and, if given, the ops of `step`.

    `on_stage` hears each of `STAGES` before it begins, `on_doubt` why figures are doubtful, if they are. Raises
    `MeasurementError` where the disk cannot be written.
    """
    dtype = step.dtype if step is not None else _usual_dtype(device)
    found = _measure(device, directory, step, dtype, on_stage)
    if found.op_times is not None and found.op_times.doubt is not None:
        on_doubt(found.op_times.doubt)
    return _profile(device, found, dtype, _note(device, step, found.op_times))


@dataclass(frozen=True)
class _Findings:
    """What was measured, as it was measured; rates in FLOP/s and bytes/s."""

    memory: Sequence[float]
    products: Mapping[torch.dtype, Sequence[float]]
    attention: Sequence[float]
    op_seconds: float
    link: CopySpeeds | None
    disk: CopySpeeds
    copy_slowdown: float
    engine: EngineTime
    op_times: OpTimes | None


def _measure(
    device: torch.device, directory: Path, step: TrainingStep | None, dtype: torch.dtype, on_stage: OnStage
) -> _Findings:
    on_stage("memory")
    memory = memory_rates(device)
    on_stage("products")
    products = _products(device, step)
    on_stage("attention")
    attention = attention_rates(dtype, device)
    on_stage("small ops")
    op_seconds = smallest_op_seconds(device)
    on_stage("link")
    link = None if device.type == "cpu" else link_speeds(StreamEngine(device), device)
    on_stage("disk")
    disk, slowdown = _measure_disk(directory, device)
    on_stage("engine")
    engine = measure_engine() if device.type == "cpu" else EngineTime(0.0, 0.0)
    on_stage("ops of a step")
    op_times = None if step is None else measure_op_times(step.run, device)
    return _Findings(memory, products, attention, op_seconds, link, disk, slowdown, engine, op_times)


def _profile(device: torch.device, found: _Findings, dtype: torch.dtype, note: str) -> Hardware:
    """The profile that says what was found; the shares of products and attention are those of `dtype`."""
    known = None if device.type == "cpu" else recognise_device(device_name(device))
    peaks = {each: _rate(rates, _known_peak(known, each)) for each, rates in found.products.items()}
    memory = _rate(found.memory, None if known is None else known.memory_bytes_per_second.peak)
    link = None if found.link is None else _copying(found.link, None if known is None else known.link)
    times = {} if found.op_times is None else found.op_times.seconds
    return Hardware(
        name=device_name(device),
        note=note,
        matmul_flops_per_second=peaks[torch.bfloat16],
        float32_matmul_flops_per_second=peaks[torch.float32],
        memory_bytes_per_second=memory,
        memory_bytes=device_memory_bytes(device),
        allocation_bytes=1 if device.type == "cpu" else _ALLOCATION_BYTES,
        workspace_bytes=0 if known is None else known.workspace_bytes,
        packing_bytes_per_thread=load_hardware("cpu").packing_bytes_per_thread if device.type == "cpu" else 0,
        bfloat16_scratch=bfloat16_scratch() if device.type == "cpu" else 0.0,
        num_threads=torch.get_num_threads() if device.type == "cpu" else None,
        link=link,
        disk=_copying(found.disk, None),
        collectives=(known or load_hardware("cpu")).collectives,
        op_seconds=_rounded(found.op_seconds),
        copy_slowdown=_rounded(found.copy_slowdown),
        replay_seconds=_rounded(found.engine.replay_seconds),
        watch_seconds=_rounded(found.engine.watch_seconds),
        efficiency=Efficiency(
            matmul=_shares(found.products[dtype], peaks[dtype].peak),
            attention=_shares(found.attention, peaks[dtype].peak),
            memory=_shares(found.memory, memory.peak),
            link=_link_shares(link),
        ),
        measured=True,
        measured_ops={signature: _rounded(seconds) for signature, seconds in times.items()},
    )


def _products(device: torch.device, step: TrainingStep | None) -> dict[torch.dtype, list[float]]:
    """FLOP/s by dtype: of squares, and of the model's shapes in its own dtype."""
    squares = CPU_PRODUCTS if device.type == "cpu" else ACCELERATOR_PRODUCTS
    rates = {dtype: product_rates(squares, dtype, device) for dtype in (torch.bfloat16, torch.float32)}
    if step is not None:
        shapes = [(min(rows, _MOST_ROWS), inner, columns) for rows, inner, columns in step.products]
        rates[step.dtype] += product_rates(shapes, step.dtype, device)
    return rates


def _measure_disk(directory: Path, device: torch.device) -> tuple[CopySpeeds, float]:
    try:
        return disk_speeds(directory), copy_slowdown(directory) if device.type == "cpu" else 0.0
    except OSError as error:
        raise MeasurementError(
            f"the disk at {str(directory)!r} cannot be measured: {error.strerror or error}; name a directory on a disk "
            "that can be written and has 1 GiB free (memory.disk_path)"
        ) from error


def _known_peak(known: Hardware | None, dtype: torch.dtype) -> float | None:
    return known.matmul_flops_per_second.peak if known is not None and dtype is torch.bfloat16 else None


def _rate(rates: Sequence[float], known_peak: float | None) -> Rate:
    best = _rounded(max(rates))
    return Rate(peak=max(best, known_peak or 0.0), reached=best)


def _shares(rates: Sequence[float], peak: float) -> Shares:
    low, nominal, high = (_rounded(min(1.0, each / peak)) for each in (min(rates), median(rates), max(rates)))
    return Shares(low=low, nominal=nominal, high=high)


def _copying(speeds: CopySpeeds, known: Copying | None) -> Copying:
    out_peak = None if known is None else known.out_bytes_per_second.peak
    in_peak = None if known is None else known.in_bytes_per_second.peak
    return Copying(
        out_bytes_per_second=_rate([speeds.out_bytes_per_second], out_peak),
        in_bytes_per_second=_rate([speeds.in_bytes_per_second], in_peak),
        duplex=_rounded(speeds.duplex),
    )


def _link_shares(link: Copying | None) -> Shares:
    """One figure was measured, so low, nominal and high are the same."""
    if link is None:
        return Shares(low=1.0, nominal=1.0, high=1.0)
    rates = (link.out_bytes_per_second, link.in_bytes_per_second)
    share = _rounded(min((rate.reached or rate.peak) / rate.peak for rate in rates))
    return Shares(low=share, nominal=share, high=share)


def _usual_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _note(device: torch.device, step: TrainingStep | None, times: OpTimes | None) -> str:
    note = f"measured on {datetime.now(UTC).date()} with torch {version('torch')}"
    if device.type == "cpu":
        note += f", threads: {torch.get_num_threads()}"
    note += "; collectives are not measured"
    if step is None or times is None:
        return note
    return (
        f"{note}; ops of {step.description}: {len(times.seconds)} signatures, their times multiplied by "
        f"{times.factor:.3f} so that they add up to the step of {times.step_seconds * 1e3:.1f} ms"
    )


def _rounded(value: float) -> float:
    """Six figures."""
    return float(f"{value:.6g}")
