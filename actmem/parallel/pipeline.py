"""Pipeline parallel: a Hugging Face model cut into stages by layer, and torch's schedules over them.

A stage is the model itself with only some of its layers; embedding, last norm and head are where they are needed. So
Hugging Face's own forward runs in every stage, and parameters keep the names that they have in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from transformers import PreTrainedModel

from actmem._compat import forget_micro_batches
from actmem.planning.actions import Group, PipelineAction
from actmem.runtime.pipeline import PipelineSwaps

LossOfStates = Callable[[Tensor, Tensor], Tensor]
"""From the last stage's hidden states and a micro-batch's targets to its loss, a scalar."""


@dataclass(frozen=True)
class StageShape:
    """What goes from stage to stage for one micro-batch: hidden states of (sequences, tokens, features)."""

    num_sequences: int
    num_tokens: int
    num_features: int
    dtype: torch.dtype


class StageModule(nn.Module):
    """One stage: token ids, or hidden states, to hidden states. `model` has the layers of this stage alone."""

    def __init__(self, model: PreTrainedModel, *, is_first: bool, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self._is_first = is_first
        self._autocast = autocast

    def forward(self, states: Tensor) -> Tensor:
        """Run the stage's layers."""
        given = {"input_ids" if self._is_first else "inputs_embeds": states}
        with torch.autocast(states.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            out: Tensor = self.model.base_model(**given, use_cache=False).last_hidden_state
        return out


def cut(model: PreTrainedModel, first: int, end: int, *, autocast: torch.dtype | None = None) -> StageModule:
    """The stage with layers `first` to `end` - 1 of `model`, around the model's own parameters.

    `model` itself is left as it is. The layers keep their numbers: the second stage's first one may be ``layers.4``.
    `autocast` is the dtype under which the stage runs, if it does.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    part: PreTrainedModel = copy.deepcopy(model, shared)
    base: Any = part.base_model
    num_layers = len(base.layers)
    layers = nn.ModuleList()
    for number in range(first, end):
        layers.add_module(str(number), base.layers[number])
    base.layers = layers
    if first > 0:
        base.embed_tokens = None
    if end < num_layers:
        base.norm = nn.Identity()
        part.lm_head = None
    return StageModule(part, is_first=first == 0, autocast=autocast)


class _WatchedStage(PipelineStage):
    """A stage that tells which of its actions runs."""

    swaps: PipelineSwaps

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._action("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self._action("backward" if full_backward else "input", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._action("weight", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _action(self, kind: Any, microbatch: int) -> AbstractContextManager[None]:
        if not self.has_backward:
            return nullcontext()
        return self.swaps.action(PipelineAction(kind, Group(self.stage_index, microbatch)))


class Pipeline:
    """The stages that one rank has, under one of torch's schedules.

    `modules` are its stages by number, `num_stages` counts those of all ranks. `loss` is asked in the last stage, for
    each micro-batch; the losses are summed, and gradients are those of the sum.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        num_stages: int,
        *,
        schedule: str,
        num_microbatches: int,
        shape: StageShape,
        loss: LossOfStates,
        group: ProcessGroup,
        device: torch.device,
        swaps: PipelineSwaps,
    ) -> None:
        self.swaps = swaps
        self.has_first, self.has_last = 0 in modules, num_stages - 1 in modules
        self._shape, self._loss, self._group, self._device = shape, loss, group, device
        self._rank = group.rank()
        self._stages = [
            _stage(module, index, num_stages, shape=shape, group=group, device=device, swaps=swaps)
            for index, module in modules.items()
        ]
        kind = get_schedule_class(schedule)
        settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        given: Any = self._stages if issubclass(kind, PipelineScheduleMulti) else self._stages[0]
        self._schedule = kind(given, num_microbatches, **settings)
        self._rank_of: dict[int, int] = self._stages[0].stage_index_to_group_rank

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward passes of a batch of (sequences, tokens) ids; its loss in the rank of the last stage.

        Nothing of the step is held when it is done, or has failed.
        """
        losses: list[Tensor] = []
        try:
            with self.swaps.step():
                self._schedule.step(
                    *([inputs] if self.has_first else []),
                    target=targets if self.has_last else None,
                    losses=losses if self.has_last else None,
                    return_outputs=False,
                )
        finally:
            forget_micro_batches(self._schedule, self._stages)
        return torch.stack(losses).sum() if self.has_last else None

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of a batch of any size without gradients, in the rank of the last stage.

        One stage after the other: some of torch's schedules cannot go without a backward pass.
        """
        states = inputs
        for stage in self._stages:
            before, after = (self._rank_of.get(stage.stage_index + step) for step in (-1, 1))
            if before not in (None, self._rank):
                states = torch.empty(
                    *inputs.shape, self._shape.num_features, dtype=self._shape.dtype, device=self._device
                )
                distributed.recv(states, group=self._group, group_src=before)
            states = stage.submod(states)
            if after not in (None, self._rank):
                distributed.send(states.contiguous(), group=self._group, group_dst=after)
        return self._loss(states, targets) if self.has_last else None


def _stage(
    module: nn.Module,
    index: int,
    num_stages: int,
    *,
    shape: StageShape,
    group: ProcessGroup,
    device: torch.device,
    swaps: PipelineSwaps,
) -> _WatchedStage:
    """Shapes are told rather than found out, for which torch would run each stage once more."""
    ids = torch.empty(shape.num_sequences, shape.num_tokens, dtype=torch.int64, device="meta")
    states = torch.empty(*ids.shape, shape.num_features, dtype=shape.dtype, device="meta", requires_grad=True)
    stage = _WatchedStage(
        module, index, num_stages, device, input_args=states if index else ids, output_args=states, group=group
    )
    stage.swaps = swaps
    return stage


def layers_here(stages: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers of the layers in stages that are given as (first, end)."""
    return [layer for first, end in stages for layer in range(first, end)]
