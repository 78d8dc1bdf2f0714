"""Tiny real models, and training steps run with and without a plan so that the two can be compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actmem.runtime import Applied, apply

POLICIES = ("none", "full", "mlp", "selective")
RECOMPUTING = ("full", "mlp", "selective")
EXPERTS = ("grouped_mm", "batched_mm", "eager")
FAMILIES = ("dense", *EXPERTS)

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
_ROUTING: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def tiny_qwen3(family: str = "dense", *, attention: str = "sdpa", **fields: Any) -> nn.Module:
    """A Qwen3 (``dense``) or Qwen3-MoE (named by its experts implementation) of two layers, always the same weights."""
    torch.manual_seed(7)
    if family == "dense":
        dense = Qwen3Config(**(_SHAPE | fields))
        dense._attn_implementation = attention
        return Qwen3ForCausalLM(dense).train()
    mixture = Qwen3MoeConfig(**(_SHAPE | _ROUTING | fields))
    mixture._attn_implementation = attention
    mixture._experts_implementation = family
    return Qwen3MoeForCausalLM(mixture).train()


@cache
def token_batch(step: int = 0, *, length: int = 16, padded: bool = False) -> dict[str, Tensor]:
    """Two sequences of tokens as the model's keyword arguments; `padded` masks the end of one and the start of none."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, _SHAPE["vocab_size"], (2, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if padded:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 5 :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = tokens.masked_fill(mask == 0, -100)
    return batch


@dataclass(frozen=True)
class Step:
    """What one training step gave: its loss, and the gradient of each parameter by name (absent: none)."""

    loss: Tensor
    gradients: dict[str, Tensor]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each gradient there is."""
    return {name: each.grad.detach().clone() for name, each in model.named_parameters() if each.grad is not None}


def training_step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, seed: int = 0) -> Step:
    """Forward and backward, the random state reset before; then the gradients move the parameters in place."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)
    loss.backward()
    step = Step(loss.detach().clone(), gradients_of(model))
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each.sub_(each.grad, alpha=1e-2)
    return step


def language_loss(batch: dict[str, Tensor], autocast: torch.dtype | None = None) -> Callable[[nn.Module], Tensor]:
    """The model's own loss on a batch, under autocast if a dtype is given."""

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return model(**batch).loss

    return loss


def language_steps(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], autocast: torch.dtype | None = None
) -> list[Step]:
    """One training step on each batch."""
    return [training_step(model, language_loss(batch, autocast), seed=number) for number, batch in enumerate(batches)]


def assert_same_steps(planned: Sequence[Step], unplanned: Sequence[Step], what: str = "the plan") -> None:
    """Losses and gradients are equal to the last bit, and worth comparing: finite and not all zero."""
    assert len(planned) == len(unplanned)
    for number, (mine, theirs) in enumerate(zip(planned, unplanned, strict=True)):
        assert_same_bits(mine.loss, theirs.loss, f"{what}: loss of step {number}")
        assert_same_tensors(mine.gradients, theirs.gradients, f"{what}: step {number}, gradient of ")


def assert_same_tensors(mine: dict[str, Tensor], theirs: dict[str, Tensor], what: str = "") -> None:
    """Two dicts have the same keys and bitwise the same tensors, not all of them zero."""
    assert mine.keys() == theirs.keys()
    assert theirs
    assert any(bool(each.ne(0).any()) for each in theirs.values()), "nothing to compare: all is zero"
    for name, expected in theirs.items():
        assert_same_bits(mine[name], expected, f"{what}{name}")


def assert_same_bits(mine: Tensor, theirs: Tensor, what: str = "tensor") -> None:
    """Shape, dtype and every bit are equal, and all numbers are finite."""
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, what
    assert bool(torch.isfinite(torch.view_as_real(theirs) if theirs.is_complex() else theirs).all()), (
        f"{what}: not finite"
    )
    if not torch.equal(mine, theirs):
        difference = (mine - theirs).abs().max().item() if mine.numel() else 0.0
        raise AssertionError(f"{what} differs by up to {difference}")


def planned_copy(model: nn.Module, plan: Any, *, regions: Any = None, **memory: Any) -> tuple[nn.Module, Applied]:
    """A deep copy of a model, under a plan with every recomputed or reloaded value verified; even small ones swap."""
    twin = copy.deepcopy(model)
    return twin, apply(twin, plan, regions=regions, memory={"verify": "always", "min_swap_bytes": 0} | memory)


class Stack(nn.Module):
    """Blocks called one after the other; each is a region of its own under `apply_to_stack`."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def block_names(stack: nn.Module) -> list[str]:
    """The regions of a `Stack`."""
    return [f"blocks.{index}" for index in range(len(stack.blocks))]


def features(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stack_steps(
    model: nn.Module,
    *,
    num_steps: int = 3,
    shape: tuple[int, ...] = (4, 8),
    loss: Callable[[Any], Tensor] | None = None,
) -> list[Step]:
    """Training steps on reproducible features that require a gradient themselves (listed as ``input``)."""
    steps = []
    for number in range(num_steps):
        inputs = features(*shape, seed=number).requires_grad_()

        def run(each: nn.Module, inputs: Tensor = inputs) -> Tensor:
            out = each(inputs)
            return out.square().mean() if loss is None else loss(out)

        step = training_step(model, run, seed=number)
        if inputs.grad is not None:
            step.gradients["input"] = inputs.grad
        steps.append(step)
    return steps


def assert_stack_unchanged(stack: nn.Module, policy: str, **run: Any) -> Applied:
    """Three steps of a stack of regions give the same bits with a policy as without; returns the plan for its stats."""
    planned, applied = planned_copy(stack, policy, regions=block_names(stack))
    unplanned = copy.deepcopy(stack)
    try:
        assert_same_steps(stack_steps(planned, **run), stack_steps(unplanned, **run))
    finally:
        applied.remove()
    assert_same_buffers(planned, unplanned)
    return applied


def assert_same_buffers(planned: nn.Module, unplanned: nn.Module) -> None:
    """State that a forward pass leaves behind is the same: written once, with the same numbers."""
    mine, theirs = dict(planned.named_buffers()), dict(unplanned.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(mine[name], expected), f"buffer {name}"


Outcome = dict[str, Tensor]


def assert_same_outcome(
    model: nn.Module,
    policy: str,
    scenario: Callable[[nn.Module, int], Outcome],
    *,
    num_rounds: int = 3,
    **options: Any,
) -> Applied:
    """A scenario, run on a planned and an unplanned copy of a model, gives the same tensors in each of some rounds.

    The first round learns and the later ones follow what was learned. The scenario gets the model and the round's
    number; gradients are cleared and the random state is reset before it.
    """
    planned, applied = planned_copy(model, policy, **options)
    unplanned = copy.deepcopy(model)
    with applied:
        for number in range(num_rounds):
            outcomes = []
            for each in (planned, unplanned):
                each.zero_grad(set_to_none=True)
                torch.manual_seed(number)
                outcomes.append(scenario(each, number))
            assert_same_tensors(*outcomes, f"{policy}, round {number}: ")
    assert_same_buffers(planned, unplanned)
    return applied


class FunctionBlock(nn.Module):
    """A region whose forward is a function of the block and its input; it has a linear layer, and the parts given."""

    def __init__(self, function: Callable[[Any, Tensor], Any], *, seed: int = 0, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, hidden: Tensor) -> Any:
        return self.function(self, hidden)


def two_blocks(function: Callable[[Any, Tensor], Any], **parts: Any) -> Stack:
    """A stack of two regions that run the same function with weights of their own."""
    return Stack(*[FunctionBlock(function, seed=seed, **copy.deepcopy(parts)) for seed in (1, 2)])
