from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from actmem.config.schema import ModelConfig
from actmem.models.building import build_model
from actmem.training.loss import IGNORED, chunked_cross_entropy, next_token_loss
from actmem.training.packing import Batch

VOCABULARY = 320
MODELS: dict[str, dict[str, object]] = {
    "dense": {"model_type": "qwen3", "tie_word_embeddings": True},
    "untied": {"model_type": "qwen3"},
    "moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.5,
    },
}
SHAPE: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}


def model_and_batch(family: str) -> tuple[nn.Module, Batch]:
    model = build_model(ModelConfig(config=SHAPE | MODELS[family]), seed=0)
    ids = torch.randint(VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, :7] = IGNORED
    return model, Batch(ids[:, :-1].contiguous(), targets)


def head_inputs(dtype: torch.dtype, rows: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(50, 16, generator=generator) / 4).to(dtype).requires_grad_()
    targets = torch.randint(50, (rows,), generator=generator)
    targets[::5] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize("family", MODELS)
def test_standard_loss_is_hugging_faces_own(family: str) -> None:
    model, batch = model_and_batch(family)
    num_targets = int((batch.targets != IGNORED).sum())
    loss = next_token_loss(model, batch, num_targets=num_targets, kind="standard")  # type: ignore[arg-type]
    expected = model(input_ids=batch.inputs, labels=batch.inputs, shift_labels=batch.targets).loss
    torch.testing.assert_close(loss.total(), expected, rtol=1e-6, atol=0)
    assert (loss.router is not None) == (family == "moe")


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_chunked_loss_and_gradients_equal_the_standard_ones(family: str, autocast: bool) -> None:
    model, batch = model_and_batch(family)
    found: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for kind in ("standard", "chunked"):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total = next_token_loss(model, batch, num_targets=50, kind=kind).total()  # type: ignore[arg-type]
        total.backward()  # type: ignore[no-untyped-call]
        found[kind] = total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    (chunked_loss, chunked), (standard_loss, standard) = found["chunked"], found["standard"]
    tolerance = 1e-2 if autocast else 1e-5
    torch.testing.assert_close(chunked_loss, standard_loss, rtol=tolerance / 10, atol=0)
    assert len(standard) == len(list(model.parameters()))
    for ours, reference in zip(chunked, standard, strict=True):
        assert (ours - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
def test_chunked_cross_entropy_of_any_number_of_rows(rows: int) -> None:
    hidden, weight, targets = head_inputs(torch.float64, rows)
    expected = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), wanted, rtol=1e-5, atol=1e-6)


def test_bfloat16_states_still_give_a_float32_loss_and_good_gradients() -> None:
    hidden, weight, targets = head_inputs(torch.bfloat16)
    exact = functional.cross_entropy(hidden.float() @ weight.float().T, targets, reduction="sum")
    wanted = torch.autograd.grad(exact, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, exact, rtol=2e-3, atol=0)
    for found, expected in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    expected = chunked_cross_entropy(hidden, weight, targets)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)


def test_all_targets_ignored_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_costs_and_gets_nothing(frozen: str) -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    chunked_cross_entropy(hidden, weight, targets).backward()  # type: ignore[no-untyped-call]
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_a_second_backward_pass_is_an_error_not_a_wrong_gradient() -> None:
    hidden, weight, targets = head_inputs(torch.float32)
    loss = 2 * chunked_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def peak_bytes(rows: int, vocabulary: int, chunked: bool) -> int:
    """Most bytes allocated at once in a forward and backward pass of the head, from the profiler's events."""
    hidden = torch.randn(rows, 32, requires_grad=True)
    weight = torch.randn(vocabulary, 32, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        if chunked:
            loss = chunked_cross_entropy(hidden, weight, targets)
        else:
            loss = functional.cross_entropy(functional.linear(hidden, weight), targets, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_chunked_never_holds_whole_logits() -> None:
    rows, vocabulary = 2048, 1024
    logits_bytes = rows * vocabulary * 4
    assert peak_bytes(rows, vocabulary, chunked=False) > 2 * logits_bytes
    assert peak_bytes(rows, vocabulary, chunked=True) < logits_bytes / 4
