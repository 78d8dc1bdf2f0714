"""What the engine itself costs: a plan that saves all, and recording an op."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from actmem._compat import TorchDispatchMode
from actmem.measuring.bench import with_own_modules
from actmem.measuring.interleave import Timing, interleave
from actmem.runtime import apply
from actmem.training.loss import next_token_loss
from actmem.training.packing import Batch


@dataclass(frozen=True)
class Overhead:
    """Times of whole steps with no plan and with one that saves all, and of forward passes alone: with no plan, with
    every op of every layer recorded, and under a dispatch mode that does nothing, which sees the whole model."""

    unplanned_step: Timing
    all_saved_step: Timing
    unplanned_forward: Timing
    recorded_forward: Timing
    bare_mode_forward: Timing
    num_recorded_ops: int
    num_bare_mode_ops: int

    @property
    def recording_microseconds(self) -> float:
        """Of each op that is recorded."""
        return _per_op(self.recorded_forward, self.unplanned_forward, self.num_recorded_ops)

    @property
    def bare_mode_microseconds(self) -> float:
        """Of each op that a dispatch mode passes on: the least that any such engine costs."""
        return _per_op(self.bare_mode_forward, self.unplanned_forward, self.num_bare_mode_ops)

    def lines(self) -> list[str]:
        """The figures in words."""
        ratio = self.all_saved_step.ratio_to(self.unplanned_step)
        return [
            f"A plan that saves all takes {ratio:.3f} of the unplanned step.",
            f"Recording costs {self.recording_microseconds:.1f} us an op ({self.num_recorded_ops} ops a forward pass); "
            f"a bare dispatch mode costs {self.bare_mode_microseconds:.1f} us an op.",
        ]


def measure_overhead(model: PreTrainedModel, batch: Batch, rounds: int) -> Overhead:
    """Measure on `model`, in one process, with all variants interleaved."""
    saving, recording = with_own_modules(model), with_own_modules(model)
    counter = _BareMode()  # type: ignore[no-untyped-call]
    unguarded = {"verify": "off"}
    with apply(saving, "none", memory=unguarded), apply(recording, "full", memory=unguarded) as recorded:
        steps = interleave(
            {"unplanned": lambda: _step(model, batch), "all saved": lambda: _step(saving, batch)},
            model.device,
            rounds=rounds,
        )
        forwards = interleave(
            {
                "unplanned": lambda: _forward(model, batch),
                "recorded": lambda: _forward(recording, batch),
                "bare mode": lambda: _forward_under(counter, model, batch),
            },
            model.device,
            rounds=rounds,
        )
        num_recorded_ops = sum(len(graph.ops) for graph in recorded.graphs.values())
    return Overhead(
        unplanned_step=steps["unplanned"],
        all_saved_step=steps["all saved"],
        unplanned_forward=forwards["unplanned"],
        recorded_forward=forwards["recorded"],
        bare_mode_forward=forwards["bare mode"],
        num_recorded_ops=num_recorded_ops,
        num_bare_mode_ops=counter.num_ops,
    )


class _BareMode(TorchDispatchMode):
    """Passes every op on; `num_ops` is that of the last time it was entered."""

    num_ops = 0

    def __enter__(self) -> Any:
        self.num_ops = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def _forward(model: PreTrainedModel, batch: Batch) -> object:
    return next_token_loss(model, batch, num_targets=batch.targets.numel(), kind="standard").total()


def _forward_under(mode: _BareMode, model: PreTrainedModel, batch: Batch) -> object:
    with mode:
        return _forward(model, batch)


def _step(model: PreTrainedModel, batch: Batch) -> None:
    loss = next_token_loss(model, batch, num_targets=batch.targets.numel(), kind="standard").total()
    loss.backward()


def _per_op(measured: Timing, unplanned: Timing, num_ops: int) -> float:
    """The median over rounds, in microseconds, so that a disturbance of the machine falls out."""
    pairs = zip(measured.seconds, unplanned.seconds, strict=True)
    return median(mine - theirs for mine, theirs in pairs) / num_ops * 1e6
