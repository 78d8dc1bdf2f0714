"""What a device can do, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from actmem.hardware import Hardware, Rate
from actmem.reporting.tables import NOTHING, plain_table
from actmem.units import format_bytes

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def hardware_table(hardware: Hardware) -> Table:
    """One line a rate: its peak and what was reached."""
    table = plain_table("rate", ("peak", "reached"), ("unit",))
    for name, rate, unit in _rates(hardware):
        factor, prefix = next((scale for scale in _SCALES if rate.peak >= scale[0]), _SCALES[-1])
        reached = NOTHING if rate.reached is None else f"{rate.reached / factor:.4g}"
        table.add_row(name, f"{rate.peak / factor:.4g}", reached, f"{prefix}{unit}")
    return table


def hardware_facts(hardware: Hardware) -> dict[str, str]:
    """What is no rate, each with its unit."""
    facts = {
        f"share of the peak, {name}": f"{shares.low:.2f} low, {shares.nominal:.2f} nominal, {shares.high:.2f} high"
        for name, shares in hardware.efficiency
    }
    facts["memory"] = f"{format_bytes(hardware.memory_bytes)}, given out in multiples of {hardware.allocation_bytes} B"
    facts["smallest op"] = _microseconds(hardware.op_seconds)
    facts["engine, an op that is watched"] = _microseconds(hardware.watch_seconds)
    facts["engine, an op that is run again"] = _microseconds(hardware.replay_seconds)
    facts["computing, by a second of copying"] = f"{hardware.copy_slowdown:.2f} s longer"
    for name, copying in (("link", hardware.link), ("disk", hardware.disk)):
        if copying is not None:
            facts[f"{name}, both ways at once"] = f"{copying.duplex:.2f} of the sum of the two rates"
    facts["ops with a time of their own"] = str(len(hardware.measured_ops))
    return facts if hardware.note is None else facts | {"note": hardware.note}


def _rates(hardware: Hardware) -> Iterator[tuple[str, Rate, str]]:
    yield "products, bfloat16", hardware.matmul_flops_per_second, "FLOP/s"
    if hardware.float32_matmul_flops_per_second is not None:
        yield "products, float32", hardware.float32_matmul_flops_per_second, "FLOP/s"
    yield "memory, read plus written", hardware.memory_bytes_per_second, "B/s"
    for name, copying in (("link", hardware.link), ("disk", hardware.disk)):
        if copying is not None:
            yield f"{name}, out", copying.out_bytes_per_second, "B/s"
            yield f"{name}, in", copying.in_bytes_per_second, "B/s"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
