"""Published figures that cannot be true, and why."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config.presets import PRESETS
from actmem.config.schema import RunConfig
from actmem.hardware import Hardware, dense_step_flops, flops_claim_problem

SOURCE = "a published Pareto curve of recomputing, Qwen3-8B on one H100, bf16, 4 x 4096 tokens"
_MODEL, _HARDWARE = "qwen3-8b", "h100-sxm"
_BATCH = (4, 4096)
_PUBLISHED = (
    ("no recomputing", 42, 0.612),
    ("whole layers", 14, 0.801),
    ("MLP only", 22, 0.708),
    ("selective, with flash attention", 18, 0.685),
    ("the same with fused kernels", 15, 0.555),
)


@dataclass(frozen=True)
class RefusedFigure:
    """A row of a published table: what it claims, and why no such card can do it."""

    name: str
    activation_gb: int
    step_seconds: float
    problem: str


def refused_figures(run: RunConfig, hardware: Hardware) -> list[RefusedFigure]:
    """The rows that are refused for the model and hardware of a run; none for other ones.

    The FLOPs are the least that the step needs, without any that is recomputed, so recomputing only adds to the claim.
    """
    if run.model.name != _MODEL or run.model.config or hardware.name != _HARDWARE:
        return []
    fields = {name: value for name, value in PRESETS[_MODEL].items() if isinstance(value, int)}
    flops = dense_step_flops(fields, *_BATCH)
    rows = [(*row, flops_claim_problem(flops, row[2], hardware)) for row in _PUBLISHED]
    return [RefusedFigure(name, size, seconds, why) for name, size, seconds, why in rows if why is not None]
