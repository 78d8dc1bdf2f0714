"""Loss and gradients of whole models are the same to the last bit under every policy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from planned_runs import (
    FAMILIES,
    POLICIES,
    RECOMPUTING,
    assert_same_steps,
    language_loss,
    language_steps,
    planned_copy,
    tiny_qwen3,
    token_batch,
    training_step,
)
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

PRECISIONS = ("float32", "bfloat16", "autocast")


@contextmanager
def repeatable(family: str) -> Iterator[None]:
    """The batched experts add up their gradients in varying order unless torch is asked not to."""
    torch.use_deterministic_algorithms(family == "batched_mm")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def model_and_batches(
    family: str, precision: str, attention: str, dropout: float, padded: bool
) -> tuple[nn.Module, list[Any], torch.dtype | None]:
    model = tiny_qwen3(family, attention=attention, attention_dropout=dropout)
    if precision == "bfloat16":
        model.bfloat16()
    # Experts run one by one settle on a way to follow them only in the third step.
    batches = [token_batch(step, padded=padded) for step in range(3 if family == "eager" else 2)]
    return model, batches, torch.bfloat16 if precision == "autocast" else None


SETTINGS = list(itertools.product(FAMILIES, PRECISIONS, ("sdpa", "eager"), (0.0, 0.1)))


@pytest.mark.parametrize(("family", "precision", "attention", "dropout"), SETTINGS)
def test_invariant_01_same_numbers_under_every_policy(
    family: str, precision: str, attention: str, dropout: float
) -> None:
    padded = SETTINGS.index((family, precision, attention, dropout)) % 4 in (1, 2)
    model, batches, autocast = model_and_batches(family, precision, attention, dropout, padded)
    with repeatable(family):
        unplanned = language_steps(copy.deepcopy(model), batches, autocast)
        for policy in (*POLICIES, "layer-swap"):
            planned, applied = planned_copy(model, policy)
            with applied:
                assert_same_steps(language_steps(planned, batches, autocast), unplanned, policy)
            assert (applied.stats.dropped_bytes > 0) == (policy in RECOMPUTING), policy
            assert (applied.stats.num_replayed_ops > 0) == (policy in RECOMPUTING), policy
            assert (applied.stats.swap.num_begun > 0) == (policy == "layer-swap"), policy


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_invariant_01_same_numbers_with_outputs_of_every_layer(family: str, policy: str) -> None:
    """Router losses, attention weights and hidden states leave the regions as outputs beside the residual stream."""
    model = tiny_qwen3(family, attention="eager", **({} if family == "dense" else {"output_router_logits": True}))

    def loss(each: nn.Module) -> Tensor:
        out = each(**token_batch(), output_attentions=True, output_hidden_states=True)
        extras = [*out.attentions, *out.hidden_states]
        return out.loss + sum(extra.square().mean() for extra in extras)

    planned, applied = planned_copy(model, policy)
    with repeatable(family), applied:
        assert_same_steps(*[[training_step(each, loss) for _ in range(3)] for each in (planned, model)])


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_invariant_01_same_numbers_with_other_families(policy: str) -> None:
    """Layers with biases, tanh-like activations and dropout between modules."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    planned, applied = planned_copy(model, policy)
    batches = [token_batch(step) for step in range(3)]
    with applied:
        assert_same_steps(language_steps(planned, batches), language_steps(model, batches))


def test_invariant_01_same_numbers_when_the_sequence_length_varies() -> None:
    model = tiny_qwen3()
    batches = [token_batch(step, length=length) for step, length in enumerate((16, 12, 16, 24, 12, 16))]
    planned, applied = planned_copy(model, "full")
    with applied:
        assert_same_steps(language_steps(planned, batches), language_steps(model, batches))
    assert {region.num_learning_calls for region in applied.stats.regions} == {0, 3}, "each length is learned once"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("policy", RECOMPUTING)
def test_invariant_14_backward_on_another_stream_than_forward(policy: str) -> None:
    device = torch.accelerator.current_accelerator()
    model = tiny_qwen3().to(device)
    batch = {name: each.to(device) for name, each in token_batch().items()}

    def loss(each: nn.Module) -> Tensor:
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            out = language_loss(batch)(each)
        torch.accelerator.current_stream().wait_stream(stream)
        return out

    planned, applied = planned_copy(model, policy)
    with applied:
        assert_same_steps(*[[training_step(each, loss) for _ in range(3)] for each in (planned, model)])
