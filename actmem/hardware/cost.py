"""How long an op takes on a device.

A time that was measured for the op's signature goes before everything. Else an op takes as long as the slowest of its
parts, the roofline: FLOPs at the rate of products, bytes at that of memory, and never less than the smallest op does.
Rates are peaks times an efficiency; at the peaks themselves nothing can be faster, and that is the lower bound.

- *Attention* is causal here, and its kernels skip what the mask hides, forward and backward. Torch's formulas count the
  whole square, so half of the FLOPs is taken; the efficiency of attention is by the same count.
- *Float32 products* run at a rate of their own; see `Hardware`.
- *Pointwise ops* do one FLOP for each two bytes that they move, where a vector unit runs them.
- *Collectives* are rings: of the whole size S, each of n ranks sends (n-1)/n S for an all-gather, a reduce-scatter or
  an all-to-all, twice that for an all-reduce, and S for a broadcast; at the slower rate as soon as a node is too small.
- *Copies* to and from the host or the disk nominally run as fast as somebody saw them run, or else at the peak times
  the nominal efficiency of links.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Protocol

from actmem.errors import Fault, HardwareError
from actmem.graph import RegionGraph, StepOp
from actmem.hardware.profile import Copying, Hardware, Level, Rate

CAUSAL_SHARE = 0.5
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
_BYTES_PER_VECTOR_FLOP = 2


class Work(Protocol):
    """What an op costs, apart from the device. A `StepOp` is that, and `work_of` gives it for an op of a region."""

    @property
    def name(self) -> str:
        """Of the ATen call."""

    @property
    def signature(self) -> str:
        """Name, shapes and dtypes."""

    @property
    def flops(self) -> int:
        """By torch's formulas; 0 for all but products and attention."""

    @property
    def moved_bytes(self) -> int:
        """Read plus written; 0 for views."""

    @property
    def compute_intensive(self) -> bool:
        """Whether it is a product, attention, a convolution or a custom op."""

    @property
    def group_size(self) -> int:
        """Ranks of a collective; 0 for other ops."""

    @property
    def scratch_bytes(self) -> int | None:
        """What its kernel was seen to take for itself while it runs; ``None`` where nobody looked."""


def work_of(graph: RegionGraph, index: int) -> StepOp:
    """What op number `index` of a region costs."""
    op = graph.ops[index]
    return StepOp(
        name=op.name,
        signature=graph.signature(index),
        flops=op.flops,
        moved_bytes=op.moved_bytes,
        compute_intensive=op.compute_intensive,
        allocated_bytes=0,
        freed_bytes=0,
        group_size=op.group_size,
        scratch_bytes=op.scratch_bytes,
    )


@dataclass(frozen=True)
class CopyRates:
    """Bytes/s away from the device and back, one direction at a time; both at once move the share `duplex` of their
    sum."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    duplex: float


@dataclass(frozen=True)
class _Shares:
    """Of the peaks."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0


_PEAK = _Shares()


@dataclass(frozen=True)
class CostModel:
    """Times on `hardware`, with one of three efficiencies."""

    hardware: Hardware
    efficiency: Level = "nominal"

    def seconds(self, work: Work) -> float:
        """The time of an op: as measured, or 0 for a view, or by the roofline."""
        measured = self.hardware.measured_ops.get(work.signature)
        if measured is not None:
            return measured
        if not (work.flops or work.moved_bytes or work.group_size):
            return 0.0
        return max(self._roofline(work, self._shares), self.hardware.op_seconds)

    def lower_bound_seconds(self, work: Work) -> float:
        """What the op takes at peak rates; nothing measured enters, and no overhead."""
        return self._roofline(work, _PEAK)

    def op_seconds(self, graph: RegionGraph, index: int) -> float:
        """The time of op number `index` of a region."""
        return self.seconds(work_of(graph, index))

    def transfer_seconds(self, num_bytes: int, *, ranks_between: int = 1) -> float:
        """From one rank to another, so many ranks on; where nothing is known of other ranks, as fast as through memory,
        which is how those on one machine meet."""
        network = self.hardware.collectives
        if network is None:
            return num_bytes / (self.hardware.memory_bytes_per_second.peak * self._shares.memory)
        within = ranks_between < network.node_size
        rate = network.scale_up_bytes_per_second if within else network.scale_out_bytes_per_second
        return num_bytes / (rate.peak * self._shares.link)

    def scratch_bytes(self, work: Work, result_bytes: int) -> int:
        """Bytes that an op takes for itself while it runs: what was seen, or else by `Hardware.bfloat16_scratch`."""
        if work.scratch_bytes is not None:
            return work.scratch_bytes
        share = self.hardware.bfloat16_scratch
        if not share or not work.compute_intensive or " bfloat16" not in work.signature or _attends(work):
            return 0
        return math.ceil(share * result_bytes * self._share_at_once(work))

    def is_measured(self, work: Work) -> bool:
        """Whether the time of this very op was measured."""
        return work.signature in self.hardware.measured_ops

    @property
    def link(self) -> CopyRates | None:
        """To and from the host's memory; ``None`` where the device is the host."""
        return self._copy_rates(self.hardware.link)

    @property
    def disk(self) -> CopyRates | None:
        """To and from the disk; ``None`` where the profile says nothing of it."""
        return self._copy_rates(self.hardware.disk)

    @property
    def _shares(self) -> _Shares:
        table, level = self.hardware.efficiency, self.efficiency
        return _Shares(table.matmul.at(level), table.attention.at(level), table.memory.at(level), table.link.at(level))

    def _roofline(self, work: Work, shares: _Shares) -> float:
        return max(
            self._product_seconds(work, shares),
            work.moved_bytes / (self.hardware.memory_bytes_per_second.peak * shares.memory),
            self._vector_seconds(work, shares),
            self._wire_seconds(work, shares),
        )

    def _product_seconds(self, work: Work, shares: _Shares) -> float:
        rate = self._product_rate(work.signature)
        if _attends(work):
            return work.flops * CAUSAL_SHARE / (rate * shares.attention)
        return work.flops / (rate * shares.matmul)

    def _share_at_once(self, work: Work) -> float:
        """Of several products in one op, the share of those that run at once: one a thread of a batch, and one of a
        group, which is taken to be of the mean size."""
        operands = work.signature.partition("(")[2].rstrip(")").split(", ")
        if work.name == "bmm":
            return min(1.0, (self.hardware.num_threads or os.cpu_count() or 1) / int(operands[0].partition("x")[0]))
        if work.name == "_grouped_mm" and operands[-1].endswith(" int32"):
            return min(1.0, 1 / int(operands[-1].removesuffix(" int32")))
        return 1.0

    def _product_rate(self, signature: str) -> float:
        rate = self.hardware.matmul_flops_per_second.peak
        if " float32" not in signature:
            return rate
        float32 = self.hardware.float32_matmul_flops_per_second
        return rate / 2 if float32 is None else float32.peak

    def _vector_seconds(self, work: Work, shares: _Shares) -> float:
        vector = self.hardware.vector_flops_per_second
        if vector is None or work.compute_intensive:
            return 0.0
        return work.moved_bytes / _BYTES_PER_VECTOR_FLOP / (vector.peak * shares.memory)

    def _wire_seconds(self, work: Work, shares: _Shares) -> float:
        if work.group_size < 2:
            return 0.0
        network = self.hardware.collectives
        if network is None:
            problem = f"says nothing of other ranks, and {work.name} talks to {work.group_size}"
            allowed = "scale_up_bytes_per_second and scale_out_bytes_per_second"
            raise HardwareError([Fault("collectives", problem, allowed=allowed)], self.hardware.name)
        within = work.group_size <= network.node_size
        rate = network.scale_up_bytes_per_second if within else network.scale_out_bytes_per_second
        return wire_bytes(work) / (rate.peak * shares.link)

    def _copy_rates(self, copying: Copying | None) -> CopyRates | None:
        if copying is None:
            return None
        out, back = self._copy_rate(copying.out_bytes_per_second), self._copy_rate(copying.in_bytes_per_second)
        return CopyRates(out, back, copying.duplex)

    def _copy_rate(self, rate: Rate) -> float:
        """What was reached is the nominal rate, and the others are as far from it as the table says."""
        share = self.hardware.efficiency.link
        if rate.reached is None:
            return rate.peak * share.at(self.efficiency)
        return min(rate.peak, rate.reached * share.at(self.efficiency) / share.nominal)


def _attends(work: Work) -> bool:
    return any(part in work.name for part in _ATTENTION)


def wire_bytes(work: Work) -> float:
    """What each rank of a ring sends for a collective, found from the bytes that the op reads and writes on a rank."""
    ranks = work.group_size
    name = work.name.replace("_", "")
    passed_on = (ranks - 1) / ranks
    if "allgather" in name or "reducescatter" in name:
        return work.moved_bytes * ranks / (ranks + 1) * passed_on
    whole = work.moved_bytes / 2
    if "allreduce" in name:
        return 2 * whole * passed_on
    return whole * passed_on if "alltoall" in name else whole
