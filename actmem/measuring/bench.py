"""Policies side by side on one model: peak memory, step time, what they hold, and that they give the same numbers.

A step is one forward and backward pass. Gradients stand from one step to the next, as they do under gradient
accumulation, so that a peak is that of activations and workspace alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actmem.config.schema import MemoryConfig
from actmem.errors import MeasurementError
from actmem.graph import Graph
from actmem.measuring.agreement import Reference
from actmem.measuring.floor import peak_floor_bytes, unplanned_fates
from actmem.measuring.interleave import Timing, interleave
from actmem.measuring.resident import measure_resident
from actmem.measuring.result import BASELINE, BenchResult, Holdings, PolicyResult
from actmem.memory import measure_peak
from actmem.planning import Plan
from actmem.runtime import Applied, Stats, apply
from actmem.runtime.swap.counters import SwapCounters
from actmem.tracing import trace_layers
from actmem.training.loss import next_token_loss
from actmem.training.packing import Batch

_WRITING_SECONDS = 10.0  # for what a step has left to be written
WARM_UP = 2  # a layer whose first call was an exception is learned again in the second
OnStep = Callable[[str], None]


def run_bench(
    model: PreTrainedModel,
    batch: Batch,
    policies: Sequence[str | Plan],
    *,
    setting: str = "",
    rounds: int = 5,
    loss: Literal["standard", "chunked"] = "standard",
    autocast: torch.dtype | None = None,
    memory: MemoryConfig | None = None,
    on_step: OnStep = lambda policy: None,
) -> BenchResult:
    """Measure `policies`, names, plan files or plans, on `model` and one `batch` on the model's device.

    ``none``, the model without any plan, is always measured, and first. The model keeps its weights; its gradients are
    overwritten. `memory` says where swapped values go. `on_step` hears of each of the `num_steps` steps that follow one
    another. Raises `MeasurementError` where a step leaves memory behind, `PlanError` for an unknown policy,
    `ApplyError` for a model that cannot be planned.
    """
    names = list(dict.fromkeys([BASELINE, *policies]))
    casting = torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None)

    def forward(model: PreTrainedModel) -> Tensor:
        with casting:
            return next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=loss).total()

    with casting:
        graph = trace_layers(model.base_model, {"input_ids": batch.inputs, "use_cache": False})
    with ExitStack() as stack:
        settings = (memory or MemoryConfig()).model_copy(update={"verify": "off"})
        contenders = [stack.enter_context(_Contender(model, name, forward, settings)) for name in names]
        steps = {each.policy: each.step for each in contenders}
        timings = interleave(steps, model.device, rounds=rounds, warm_up=WARM_UP, on_run=on_step)
        copied = {each.policy: each.copied(rounds) for each in contenders}
        reference = Reference(model, contenders[0].step)
        results = [
            _measure(each, reference, timings[each.policy], copied[each.policy], graph, on_step) for each in contenders
        ]
    floor = peak_floor_bytes(graph, results[0].peak_bytes)
    return BenchResult(setting, batch.inputs.numel(), tuple(results), floor)


def random_batch(model: PreTrainedModel, num_sequences: int, length: int, *, seed: int = 0) -> Batch:
    """`num_sequences` x `length` random tokens of the model's vocabulary, on its device, and their successors."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (num_sequences, length + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).to(model.device)


def with_own_modules(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules around the same parameters, gradients and buffers: it can have a plan of its own."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def num_steps(policies: Sequence[str | Plan], rounds: int) -> int:
    """How often `run_bench` calls `on_step`."""
    return len({BASELINE, *policies}) * (WARM_UP + rounds + 3)


class _Contender:
    """One policy, on modules of its own around the model's own parameters, so that all can be planned at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Plan,
        forward: Callable[[PreTrainedModel], Tensor],
        memory: MemoryConfig,
    ) -> None:
        self.policy = _label(policy)
        self._plan = policy
        self._forward = forward
        self._memory = memory
        self._counts: list[SwapCounters] = []
        self._model = with_own_modules(model)
        self._applied: Applied | None = None

    def __enter__(self) -> _Contender:
        if self.policy != BASELINE:
            self._applied = apply(self._model, self._plan, memory=self._memory)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._applied is not None:
            self._applied.remove()

    def forward(self) -> Tensor:
        """One forward pass; returns the loss with its graph."""
        return self._forward(self._model)

    def step(self) -> Tensor:
        """One forward and backward pass; returns the loss."""
        loss = self.forward()
        loss.backward()
        if self._applied is not None and self._applied.swaps:
            self._counts.append(self._applied.stats.swap)
        return loss.detach()

    def _whole_step(self) -> None:
        """A step, and what is left of its copies: one that nobody waits for may still be written when it is over."""
        self.step()
        if self._applied is not None and self._applied.swapper is not None:
            self._applied.swapper.wait_until_empty(_WRITING_SECONDS)

    def copied(self, rounds: int) -> SwapCounters | None:
        """What the last `rounds` steps copied, in the middle."""
        if not self._counts:
            return None
        steps = [after.since(before) for before, after in pairwise(self._counts[-rounds - 1 :])]
        return SwapCounters.middle(steps)

    def measure_memory(self, graph: Graph) -> tuple[int, Holdings | None]:
        """The peak of one step, and what its layers held."""
        before = self._num_replayed_ops()
        try:
            peak = measure_peak(self._whole_step, self._model.device)
        except MeasurementError as error:
            raise MeasurementError(f"policy {self.policy}: {error}") from error
        if self._applied is None:
            return peak.peak_bytes, _unplanned_holdings(graph)
        if not self._applied.stats.regions:
            return peak.peak_bytes, None
        return peak.peak_bytes, _holdings(self._applied.stats, self._num_replayed_ops() - before)

    def _num_replayed_ops(self) -> int:
        return 0 if self._applied is None else self._applied.stats.num_replayed_ops


def _label(policy: str | Plan) -> str:
    if isinstance(policy, Plan):
        return policy.name
    return Path(policy).stem if Path(policy).suffix else policy


def _measure(
    contender: _Contender,
    reference: Reference,
    timing: Timing,
    copied: SwapCounters | None,
    graph: Graph,
    on_step: OnStep,
) -> PolicyResult:
    agreement = reference.compare(contender.step)
    on_step(contender.policy)
    resident_bytes = measure_resident(contender.forward)
    on_step(contender.policy)
    peak_bytes, holdings = contender.measure_memory(graph)
    on_step(contender.policy)
    return PolicyResult(contender.policy, peak_bytes, timing, agreement, holdings, resident_bytes, copied)


def _unplanned_holdings(graph: Graph) -> Holdings:
    reasons: Counter[str] = Counter()
    for name in graph.layers:
        reasons.update(unplanned_fates(graph.of_layer(name)).held_bytes_by_reason)
    return Holdings(held_bytes=reasons.total(), dropped_bytes=0, held_bytes_by_reason=dict(reasons), num_replayed_ops=0)


def _holdings(stats: Stats, num_replayed_ops: int) -> Holdings:
    reasons: Counter[str] = Counter()
    for region in stats.regions:
        reasons.update(region.held_bytes_by_reason)
    return Holdings(stats.held_bytes, stats.dropped_bytes, dict(reasons), num_replayed_ops, stats.swapped_bytes)
