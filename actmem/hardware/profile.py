"""The profile of one device: its rates, how much of them is reached, and what its memory and its host add.

A rate is FLOP or bytes (read plus written) in a second; bytes on a link are counted once, and each way by itself. All
times are in seconds. Bounds catch the usual slip, a figure in GB/s or microseconds where bytes and seconds belong.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from actmem.config.schema import Bytes, Positive, Section, Text

Level = Literal["low", "nominal", "high"]

PerSecond = Annotated[float, Field(ge=1e6, le=1e18)]
Seconds = Annotated[float, Field(ge=0.0)]
HostSeconds = Annotated[float, Field(ge=0.0, le=0.01)]
ShareOfPeak = Annotated[float, Field(gt=0.0, le=1.0)]


class Rate(Section):
    """What is done in a second: at most `peak`, which the maker states, or which is the best that a calibration saw;
    `reached` is what was seen in practice, where somebody has looked."""

    peak: PerSecond
    reached: PerSecond | None = None

    @field_validator("reached")
    @classmethod
    def _is_below_the_peak(cls, reached: float | None, info: ValidationInfo) -> float | None:
        peak = info.data.get("peak")
        if reached is not None and peak is not None and reached > peak:
            raise ValueError(f"at most the peak of {peak:g}")
        return reached


def _read_rate(value: object) -> object:
    return {"peak": value} if isinstance(value, int | float) else value


RateField = Annotated[Rate, BeforeValidator(_read_rate)]
"""A `Rate`; a number alone is its peak."""


class Shares(Section):
    """The share of a peak that ops reach: `low` for odd shapes and cold clocks, `nominal`, `high` for the best ones."""

    low: ShareOfPeak
    nominal: ShareOfPeak
    high: ShareOfPeak

    @field_validator("nominal", "high")
    @classmethod
    def _ascends(cls, share: float, info: ValidationInfo) -> float:
        lower = max(info.data.values(), default=share)
        if share < lower:
            raise ValueError(f"at least {lower:g}: low, nominal and high ascend")
        return share

    def at(self, level: Level) -> float:
        """The share at one level."""
        return {"low": self.low, "nominal": self.nominal, "high": self.high}[level]


class Efficiency(Section):
    """Shares of the peaks: of `matmul` FLOP/s by products and by `attention`, of `memory` and of `link` bytes/s."""

    matmul: Shares
    attention: Shares
    memory: Shares
    link: Shares


class Copying(Section):
    """Bytes/s to a place away from the device (`out`) and back (`in`). Both at once move the share `duplex` of the sum
    of the two rates."""

    out_bytes_per_second: RateField
    in_bytes_per_second: RateField
    duplex: ShareOfPeak


class Collectives(Section):
    """Bytes/s that a rank sends to others: within a node of `node_size` ranks, and beyond it."""

    scale_up_bytes_per_second: RateField
    scale_out_bytes_per_second: RateField
    node_size: Annotated[int, Field(ge=1)] = 8


class Hardware(Section):
    """A device.

    - `matmul_flops_per_second`: dense bfloat16 products. `float32_matmul_flops_per_second`: float32 ones; half as many
      where nothing is said, as in TF32, which torch uses after ``set_float32_matmul_precision("high")``.
    - `vector_flops_per_second`: pointwise ops, where a unit of its own runs them.
    - `memory_bytes_per_second`: reading and writing the device's memory, of which there are `memory_bytes`. The
      allocator gives it out in multiples of `allocation_bytes`.
    - `workspace_bytes`: what kernels take for themselves while they run, which no trace shows.
    - `packing_bytes_per_thread`: what each of `num_threads` takes on top where products of bfloat16 run, to pack their
      operands; ``None``: as many threads as the machine has that plans are made on.
      Neither this nor the next is added for ops whose own memory was seen when they were traced.
    - `bfloat16_scratch`: bytes that a product of bfloat16 takes while it runs for each byte of its result: 2 on a CPU
      without instructions for it, which sums up in a float32 copy.
    - `link`: to and from the host's memory; ``None`` where the device is the host. `disk`: to and from a scratch file.
    - `op_seconds`: the time of the smallest op.
    - `copy_slowdown`: seconds that computing loses for each second of copying, where copies take the same cores.
    - `replay_seconds`, `watch_seconds`: host time that the engine adds to each op that it runs again, and to each op
      that it watches in the forward pass; 0 where the host runs ahead of the device.
    - `measured_ops`: seconds of ops by signature (`actmem.graph.signature_of`), measured in place.
    - `measured`: whether a calibration on the device gave these figures.
    """

    name: Text
    note: str | None = None
    matmul_flops_per_second: RateField
    float32_matmul_flops_per_second: RateField | None = None
    vector_flops_per_second: RateField | None = None
    memory_bytes_per_second: RateField
    memory_bytes: Annotated[Bytes, Field(ge=2**20)]
    allocation_bytes: Annotated[int, Field(ge=1, le=2**21)]
    workspace_bytes: Bytes = 0
    packing_bytes_per_thread: Bytes = 0
    num_threads: Positive | None = None
    bfloat16_scratch: Annotated[float, Field(ge=0.0, le=16.0)] = 0.0
    link: Copying | None = None
    disk: Copying | None = None
    collectives: Collectives | None = None
    op_seconds: HostSeconds
    copy_slowdown: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    replay_seconds: HostSeconds = 0.0
    watch_seconds: HostSeconds = 0.0
    efficiency: Efficiency
    measured: bool = False
    measured_ops: dict[str, Seconds] = Field(default_factory=dict)

    @field_validator("link")
    @classmethod
    def _is_slower_than_memory(cls, link: Copying | None, info: ValidationInfo) -> Copying | None:
        memory = info.data.get("memory_bytes_per_second")
        if link is not None and memory is not None:
            fastest = max(link.out_bytes_per_second.peak, link.in_bytes_per_second.peak)
            if fastest > memory.peak:
                raise ValueError(f"{fastest:g} bytes/s at most {memory.peak:g}, the rate of the memory that it fills")
        return link

    @field_validator("workspace_bytes")
    @classmethod
    def _leaves_memory(cls, workspace_bytes: int, info: ValidationInfo) -> int:
        memory_bytes = info.data.get("memory_bytes")
        if memory_bytes is not None and workspace_bytes >= memory_bytes:
            raise PydanticKnownError("less_than", {"lt": memory_bytes})
        return workspace_bytes

    @property
    def times(self) -> Literal["measured", "modelled"]:
        """What to call times that come of this profile."""
        return "measured" if self.measured else "modelled"
