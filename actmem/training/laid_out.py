"""A model as a run has it: under its plan, and over as many ranks as the section `parallel` says.

The layers are cut into stages; then, in the order of `actmem.parallel`, tensors and experts are spread, the plan is
applied, and last the parameters are shared out among those that read data of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from actmem.config.schema import RunConfig
from actmem.config.stages import layers_of_stages, num_stages, stages_of_rank
from actmem.parallel import shard_data, shard_tensors
from actmem.parallel.pipeline import Pipeline, StageShape, cut, layers_here
from actmem.parallel.world import World
from actmem.planning import Plan
from actmem.runtime import Applied, apply
from actmem.runtime.pipeline import PipelineSwaps
from actmem.training.loss import Loss, next_token_loss, plain, spread_logits, states_loss
from actmem.training.packing import Batch


class Steps(Protocol):
    """How gradients come about. Losses are shares of the mean over `num_targets` targets, those of all ranks."""

    def gradients(self, batches: Sequence[Batch], num_targets: int) -> Loss:
        """Add up the gradients of batches on this rank's device; their loss, as far as it is this rank's."""

    def evaluate(self, batch: Batch, num_targets: int) -> Tensor:
        """The cross-entropy of a batch without gradients, as far as it is this rank's."""


@dataclass(frozen=True)
class LaidOut:
    """`models` are the whole model, or this rank's stages of it, by the names that parameters have in the whole."""

    models: tuple[PreTrainedModel, ...]
    steps: Steps
    applied: Applied

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters."""
        return {name: each for model in self.models for name, each in model.named_parameters()}


def lay_out(model: PreTrainedModel, config: RunConfig, plan: Plan | None, world: World) -> LaidOut:
    """Put a model on this rank's device, over the ranks and under a plan: `plan`, or what the configuration says.

    Raises `LayoutError`, `ApplyError` and `PlanError`.
    """
    planned = config if plan is None else plan
    if config.parallel.pp_size > 1:
        return _pipeline(model, config, planned, world)
    _shard_tensors(model, config, world)
    model.to(world.device)  # type: ignore[arg-type]  # its annotations are lost in a wrapper
    applied = apply(model, planned, memory=config.memory)
    # FSDP2 warns of in-place ops on what a layer returns where that is a view, as a sequence put together from shards
    # is; Hugging Face's models have none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    module = shard_data(_LossModule(model, config), world.mesh)
    return LaidOut((model,), _WholeSteps(module, config), applied)


def _shard_tensors(model: PreTrainedModel, config: RunConfig, world: World) -> None:
    parallel = config.parallel
    shard_tensors(model, world.mesh, sequence_parallel=parallel.sequence_parallel, loss_parallel=parallel.loss_parallel)


class _LossModule(nn.Module):
    """A model with its loss, for FSDP2 and DDP, under which only whole calls of one module run."""

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        super().__init__()
        self.model = model
        self._kind = config.model.loss
        self._autocast = config.train.autocast is not None

    def forward(self, inputs: Tensor, targets: Tensor, num_targets: int) -> tuple[Tensor, Tensor | None]:
        """The cross-entropy, and the router's loss where there is one."""
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            loss = next_token_loss(self.model, Batch(inputs, targets), num_targets=num_targets, kind=self._kind)
        return plain(loss.cross_entropy), loss.router


class _WholeSteps:
    """Steps of a model that this rank has whole, or shards of."""

    def __init__(self, module: nn.Module, config: RunConfig) -> None:
        self._module = module
        self._config = config

    def gradients(self, batches: Sequence[Batch], num_targets: int) -> Loss:
        losses = []
        for index, batch in enumerate(batches):
            with self._told(is_last=index == len(batches) - 1), spread_logits(self._config.parallel):
                loss = Loss(*self._module(batch.inputs, batch.targets, num_targets))
                loss.total().backward()
            losses.append(loss.detached())
        router = [loss.router for loss in losses if loss.router is not None]
        cross_entropy = torch.stack([loss.cross_entropy for loss in losses]).sum()
        return Loss(cross_entropy, torch.stack(router).sum() if router else None)

    def evaluate(self, batch: Batch, num_targets: int) -> Tensor:
        with spread_logits(self._config.parallel):
            cross_entropy: Tensor = self._module(batch.inputs, batch.targets, num_targets)[0]
        return cross_entropy

    def _told(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Copies of the model add their gradients up once, after the last of several batches."""
        if isinstance(self._module, DistributedDataParallel) and not is_last:
            return self._module.no_sync()
        return nullcontext()


def _pipeline(model: PreTrainedModel, config: RunConfig, plan: Plan | RunConfig, world: World) -> LaidOut:
    parallel, mesh = config.parallel, world.mesh
    cuts = layers_of_stages(parallel, model.config.num_hidden_layers)
    mine = {index: cuts[index] for index in stages_of_rank(parallel, mesh.rank_of("pp"))}
    autocast = torch.bfloat16 if config.train.autocast is not None else None
    modules = {index: cut(model, *ends, autocast=autocast) for index, ends in mine.items()}
    for module in modules.values():
        _shard_tensors(module.model, config, world)  # each stage by itself: what goes between them is whole
    stages = nn.ModuleList(modules.values()).to(world.device)
    applied = apply(stages, plan, memory=config.memory, layers=layers_here(list(mine.values())))
    steps = _PipelineSteps(
        {index: shard_data(module, mesh, reshard_after_forward=False) for index, module in modules.items()},
        stages,
        config,
        world,
        StageShape(
            config.train.micro_batch_size // parallel.pp_microbatches,
            config.data.sequence_length,
            model.config.hidden_size,
            model.dtype,
        ),
        applied,
    )
    return LaidOut(tuple(module.model for module in modules.values()), steps, applied)


class _PipelineSteps:
    """Steps of a model whose stages are on several ranks. `stages` is what the plan was applied to."""

    def __init__(
        self,
        modules: dict[int, nn.Module],
        stages: nn.Module,
        config: RunConfig,
        world: World,
        shape: StageShape,
        applied: Applied,
    ) -> None:
        self._stages = stages
        self._num_targets = 1
        self._config = config
        self._kind = config.model.loss
        self._device = world.device
        self._autocast = config.train.autocast is not None
        last: Any = modules.get(num_stages(config.parallel) - 1)
        self._model: PreTrainedModel | None = None if last is None else last.model
        group = world.mesh.group("pp")
        assert group is not None
        self._pipeline = Pipeline(
            modules,
            num_stages(config.parallel),
            schedule=config.parallel.pp_schedule,
            num_microbatches=config.parallel.pp_microbatches,
            shape=shape,
            loss=self._loss,
            group=group,
            device=world.device,
            swaps=PipelineSwaps(applied.swapper),
        )

    def gradients(self, batches: Sequence[Batch], num_targets: int) -> Loss:
        self._num_targets = num_targets
        with spread_logits(self._config.parallel):
            losses = [self._pipeline.step(batch.inputs, batch.targets) for batch in batches]
        return Loss(self._own(losses), None)

    def evaluate(self, batch: Batch, num_targets: int) -> Tensor:
        self._num_targets = num_targets
        with spread_logits(self._config.parallel):
            return self._own([self._pipeline.evaluate(batch.inputs, batch.targets)])

    def _own(self, losses: Sequence[Tensor | None]) -> Tensor:
        own = [each.detach() for each in losses if each is not None]
        return torch.stack(own).sum() if own else torch.zeros((), device=self._device)

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        assert self._model is not None, "only the last stage is asked"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return plain(states_loss(self._model, states, targets, kind=self._kind)) / self._num_targets
