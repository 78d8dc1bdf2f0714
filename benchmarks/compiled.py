"""torch.compile's own memory budget, against a plan for the peak that it reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch._functorch.config
from torch._inductor.compile_fx import compile_fx
from transformers import PreTrainedModel

from actmem.measuring.bench import with_own_modules
from actmem.measuring.interleave import Timing, interleave
from actmem.memory import measure_peak
from actmem.planning import Plan
from actmem.runtime import apply
from actmem.training.loss import next_token_loss
from actmem.training.packing import Batch

SHARE = 0.5
"""Of the activations that the compiled model would save with no budget."""


@dataclass(frozen=True)
class CompiledDuel:
    """Peaks, and step times each by that of its own kind without a budget: compiled, and as it is."""

    peak_bytes: int
    auto_peak_bytes: int
    slowdown: float
    auto_slowdown: float

    def __str__(self) -> str:
        return (
            f"torch.compile, activation_memory_budget={SHARE}: {self.peak_bytes / 2**20:.1f} MiB at "
            f"{self.slowdown:.3f} of the compiled step without a budget\n"
            f"auto at that peak: {self.auto_peak_bytes / 2**20:.1f} MiB at {self.auto_slowdown:.3f} of the unplanned "
            f"step"
        )


def measure_compiled(
    model: PreTrainedModel, batch: Batch, plan_for: Callable[[int], Plan], rounds: int
) -> CompiledDuel:
    """Compile `model` twice, and run the plan that `plan_for` gives for the peak in bytes beside both, in turns."""

    def step_of(model: PreTrainedModel) -> Callable[[], None]:
        return lambda: _step(model, batch)

    budgeted = step_of(_compiled(model, SHARE))
    for _ in range(2):
        budgeted()
    peak = measure_peak(budgeted, model.device).peak_bytes
    planned = with_own_modules(model)
    with apply(planned, plan_for(peak), memory={"verify": "off"}):
        steps = {
            "unplanned": step_of(model),
            "auto": step_of(planned),
            "compiled": step_of(_compiled(model, 1.0)),
            "budgeted": budgeted,
        }
        times: dict[str, Timing] = interleave(steps, model.device, rounds=rounds)
        auto_peak = measure_peak(steps["auto"], model.device).peak_bytes
    return CompiledDuel(
        peak, auto_peak, times["budgeted"].ratio_to(times["compiled"]), times["auto"].ratio_to(times["unplanned"])
    )


def _step(model: PreTrainedModel, batch: Batch) -> None:
    next_token_loss(model, batch, num_targets=batch.targets.numel(), kind="standard").total().backward()


def _compiled(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """The backend is a function of its own each time: dynamo keeps what it compiled for each backend."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compile_fx(module, inputs)

    compiled = with_own_modules(model)
    compiled.base_model.compile(backend=backend)
    return compiled
