"""In which order each rank of a pipeline runs its actions: torch's own schedules tell, without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from actmem.config.schema import ParallelConfig
from actmem.config.stages import num_stages, stages_of_rank
from actmem.planning.actions import Group, PipelineAction

_KINDS: dict[str, Any] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}


def orders_of(parallel: ParallelConfig) -> tuple[tuple[PipelineAction, ...], ...]:
    """The actions of one step, for each rank of a pipeline."""
    kind, count = get_schedule_class(parallel.pp_schedule), parallel.pp_microbatches
    if not issubclass(kind, PipelineScheduleMulti):
        # Torch's own account of its schedules with one stage a rank is not to be had in all versions.
        waits = parallel.pp_schedule == "GPipe"
        ahead = [count if waits else min(count, parallel.pp_size - stage) for stage in range(parallel.pp_size)]
        return tuple(_single(stage, count, each) for stage, each in enumerate(ahead))
    stages: list[Any] = [_plain_stage(parallel, index) for index in stages_of_rank(parallel, 0)]
    order = kind(stages, count, loss_fn=lambda *_: torch.zeros(())).pipeline_order
    return tuple(tuple(_actions(order[rank])) for rank in range(parallel.pp_size))


def _single(stage: int, count: int, ahead: int) -> tuple[PipelineAction, ...]:
    """`ahead` forward passes, then a backward and a forward pass in turn."""
    order = [PipelineAction("forward", Group(stage, each)) for each in range(ahead)]
    for each in range(count):
        order.append(PipelineAction("backward", Group(stage, each)))
        if ahead + each < count:
            order.append(PipelineAction("forward", Group(stage, ahead + each)))
    return tuple(order)


def _plain_stage(parallel: ParallelConfig, index: int) -> SimpleNamespace:
    """All that a schedule asks of a stage when it makes its order."""
    last = num_stages(parallel) - 1
    return SimpleNamespace(
        stage_index=index,
        num_stages=last + 1,
        group_size=parallel.pp_size,
        group_rank=0,
        group=None,
        device=torch.device("cpu"),
        is_first=index == 0,
        is_last=index == last,
        has_backward=True,
        stage_index_to_group_rank={},
        submod=torch.nn.Identity(),
    )


def _actions(order: Iterable[Any]) -> Iterator[PipelineAction]:
    for action in order:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _actions(action.sub_actions)
        elif (kind := _KINDS.get(action.computation_type.name)) is not None:
            yield PipelineAction(kind, Group(action.stage_index, action.microbatch_index))
