"""The graph of the step that a run takes, without a weight in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actmem.config.schema import RunConfig
from actmem.graph import Graph
from actmem.models.shapes import build_shapes
from actmem.tracing.trace import Loss, trace, trace_layers
from actmem.training.loss import next_token_loss
from actmem.training.packing import Batch


def trace_run(config: RunConfig, model: PreTrainedModel | None = None) -> Graph:
    """What the layers that a run trains do in the forward pass of one micro-batch.

    No weight is made or read: `model` is on the meta device, as `build_shapes` gives it, which is what is taken without
    one. Raises `ModelError` and `ApplyError`.
    """
    with _casting(config):
        return trace_layers(model or shapes_of(config), _batch(config), loss=loss_of(config.model.loss))


def trace_step(config: RunConfig, model: PreTrainedModel | None = None) -> Graph:
    """As `trace_run`, with the backward passes and everything outside the layers."""
    with _casting(config):
        return trace(model or shapes_of(config), _batch(config), loss=loss_of(config.model.loss))


def shapes_of(config: RunConfig) -> PreTrainedModel:
    """The model of a run, with the vocabulary it will have, on the meta device. Raises `ModelError`."""
    return build_shapes(config.model, vocab_size=expected_vocab_size(config))


def expected_vocab_size(config: RunConfig) -> int | None:
    """The vocabulary that takes the place of the model's own: a preset's gives way to that of the tokenizer that
    training makes. ``None`` where the model keeps its own."""
    model, data = config.model, config.data
    keeps_own = model.name is None or data.tokenizer is not None or "vocab_size" in (model.config or {})
    return None if keeps_own else data.vocab_size


def loss_of(kind: Literal["standard", "chunked"]) -> Loss:
    """The trainer's loss on a mapping with `inputs` and `targets`."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        assert isinstance(model, PreTrainedModel)
        taken = Batch(batch["inputs"], batch["targets"])
        return next_token_loss(model, taken, num_targets=taken.targets.numel(), kind=kind).total()

    return loss


def _casting(config: RunConfig) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.train.autocast is not None)


def _batch(config: RunConfig) -> dict[str, object]:
    shape = (config.train.micro_batch_size, config.data.sequence_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return {"inputs": tokens, "targets": tokens}
