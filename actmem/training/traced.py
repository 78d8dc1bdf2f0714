"""The graph of the step that a run takes, without a weight in memory: on one rank, under the run's layout.

Collectives are in it, with the sizes of their groups; which tokens go to which experts nobody knows before the run, so
all experts are taken to get as many.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from actmem.config.schema import ParallelConfig, RunConfig
from actmem.config.stages import layers_of_stages
from actmem.graph import Graph
from actmem.models.shapes import build_shapes
from actmem.parallel import Mesh, shard_tensors
from actmem.parallel.orders import orders_of
from actmem.parallel.pipeline import cut
from actmem.parallel.pretence import pretended_mesh
from actmem.planning.pipeline import PipelineGraph
from actmem.runtime.kinds import num_bytes
from actmem.tracing import Sharding, trace, trace_layers, trace_stage
from actmem.tracing.trace import Loss
from actmem.training.loss import next_token_loss, plain, spread_logits, states_loss
from actmem.training.packing import Batch


def trace_run(config: RunConfig, model: PreTrainedModel | None = None, *, mesh: Mesh | None = None) -> Graph:
    """What the layers that a run trains do in the forward pass of one micro-batch, those of all stages of a pipeline.

    No weight is made or read: `model` is on the meta device, as `build_shapes` gives it, which is what is taken without
    one. `mesh` is that of the run, where this process is in it already. Raises `ModelError`, `ApplyError` and
    `LayoutError`.
    """
    with laid_out_model(config, model or shapes_of(config), mesh) as laid_out:
        return trace_layers(laid_out, _batch(config), loss=loss_of(config.model.loss))


def trace_step(
    config: RunConfig,
    model: PreTrainedModel | None = None,
    *,
    mesh: Mesh | None = None,
    kernels_on: torch.device | None = None,
) -> Graph:
    """As `trace_run`, with the backward passes and everything outside the layers; not for a pipeline. `mesh` is that of
    the run, where this process is in it already; `kernels_on` is for `trace`, and as a rule the `device_at_hand`."""
    assert config.parallel.pp_size == 1, "a pipeline has a graph for each stage"
    loss, sharding = loss_of(config.model.loss), sharding_of(config.parallel)
    with laid_out_model(config, model or shapes_of(config), mesh) as laid_out:
        return trace(laid_out, _batch(config), loss=loss, sharding=sharding, kernels_on=kernels_on)


def trace_pipeline(
    config: RunConfig,
    model: PreTrainedModel | None = None,
    *,
    mesh: Mesh | None = None,
    kernels_on: torch.device | None = None,
) -> PipelineGraph:
    """The graphs of a pipeline's stages, and what its ranks do in which order. Stages that do the same have the same
    graph. Raises what `trace_step` does."""
    whole, parallel = model or shapes_of(config), config.parallel
    cuts = layers_of_stages(parallel, whole.config.num_hidden_layers)
    known: dict[tuple[bool, bool, int], Graph] = {}
    stages, regions = [], list[str]()
    for first, end in cuts:
        place = (first == 0, end == whole.config.num_hidden_layers, end - first)
        if place not in known:
            known[place] = _trace_stage(config, whole, first, end, mesh, kernels_on)
        stages.append(known[place])
        made_for = known[place].made_for
        assert made_for is not None
        regions += made_for.regions
    sample = stages[0].made_for
    assert sample is not None
    states = _states(config, whole)
    return PipelineGraph(
        stages=tuple(stages),
        orders=orders_of(parallel),
        schedule=parallel.pp_schedule,
        states_bytes=num_bytes(states),
        made_for=replace(sample, model=type(whole).__name__, regions=tuple(regions)),
        ranks_between=parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size,
    )


def _trace_stage(
    config: RunConfig,
    whole: PreTrainedModel,
    first: int,
    end: int,
    mesh: Mesh | None,
    kernels_on: torch.device | None,
) -> Graph:
    is_last = end == whole.config.num_hidden_layers
    autocast = torch.bfloat16 if config.train.autocast is not None else None
    stage = cut(copy.deepcopy(whole), first, end, autocast=autocast)
    tokens = _batch(config)
    states = _states(config, whole)
    batch = {"targets": tokens["targets"], "states": tokens["inputs"] if first == 0 else states}
    batch |= {} if is_last else {"gradient": states.detach()}

    outputs: list[Tensor] = []  # torch's pipelining refers to them until the backward pass is over

    def forward(module: nn.Module, given: Mapping[str, Any]) -> Tensor:
        out: Tensor = module(given["states"])
        outputs[:] = [out]
        if not is_last:
            return out
        model, targets = module.model, given["targets"]
        assert isinstance(model, PreTrainedModel)
        summed = plain(states_loss(model, out, targets, kind=config.model.loss))
        return summed / int(targets.numel())

    with _spread(config, stage.model, mesh):
        sharding = sharding_of(config.parallel)
        return trace_stage(stage, batch, forward=forward, sharding=sharding, kernels_on=kernels_on)


def shapes_of(config: RunConfig) -> PreTrainedModel:
    """The model of a run, with the vocabulary it will have, on the meta device. Raises `ModelError`."""
    return build_shapes(config.model, vocab_size=expected_vocab_size(config))


def expected_vocab_size(config: RunConfig) -> int | None:
    """The vocabulary that takes the place of the model's own: one that nobody wrote down gives way to that of the
    tokenizer that training makes. ``None`` where the model keeps its own."""
    model, data = config.model, config.data
    keeps_own = model.path is not None or data.tokenizer is not None or "vocab_size" in (model.config or {})
    return None if keeps_own else data.vocab_size


def loss_of(kind: Literal["standard", "chunked"]) -> Loss:
    """The trainer's loss on a mapping with `inputs` and `targets`."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        assert isinstance(model, PreTrainedModel)
        taken = Batch(batch["inputs"], batch["targets"])
        found = next_token_loss(model, taken, num_targets=taken.targets.numel(), kind=kind)
        return replace(found, cross_entropy=plain(found.cross_entropy)).total()

    return loss


def sharding_of(parallel: ParallelConfig) -> Sharding:
    """How a run's parameters are shared out among the ranks with data of their own."""
    shards, experts = parallel.dp_shard_size, parallel.dp_shard_size // parallel.ep_size

    def num_ranks(parameter: nn.Parameter) -> int:
        is_spread = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
        return experts if is_spread else shards

    return Sharding(num_ranks, stays=parallel.pp_size > 1)


@contextmanager
def laid_out_model(config: RunConfig, model: PreTrainedModel, mesh: Mesh | None = None) -> Iterator[PreTrainedModel]:
    """A model on the meta device as one rank has it, in the contexts that its passes run in; `model` itself is left as
    it is. Of a pipeline it has the layers of all stages. Raises `LayoutError`."""
    parallel = config.parallel
    casting = torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.train.autocast is not None)
    if parallel.tp_size == parallel.ep_size == 1:
        with casting:
            yield model
    else:
        part = copy.deepcopy(model)
        with _spread(config, part, mesh), casting:
            yield part


@contextmanager
def _spread(config: RunConfig, model: PreTrainedModel, mesh: Mesh | None) -> Iterator[None]:
    """Spread a model's, or a stage's, tensors and experts over the ranks of a mesh, or of one that is made up."""
    parallel = config.parallel
    if mesh is None:
        with pretended_mesh(parallel) as made_up, _spread(config, model, made_up):
            yield
        return
    shard_tensors(model, mesh, sequence_parallel=parallel.sequence_parallel, loss_parallel=parallel.loss_parallel)
    with spread_logits(parallel):
        yield


def _batch(config: RunConfig) -> dict[str, Tensor]:
    pieces = config.parallel.pp_microbatches if config.parallel.pp_size > 1 else 1
    shape = (config.train.micro_batch_size // pieces, config.data.sequence_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return {"inputs": tokens, "targets": tokens}


def _states(config: RunConfig, model: PreTrainedModel) -> Tensor:
    """What one stage gives to the next."""
    shape = (*_batch(config)["inputs"].shape, model.config.hidden_size)
    return torch.empty(shape, dtype=model.dtype, device="meta", requires_grad=True)
