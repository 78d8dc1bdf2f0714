"""Models, plans and checks that the tests of swapping share."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import (
    FunctionBlock,
    Stack,
    Step,
    block_names,
    features,
    gradients_of,
    language_steps,
    stack_steps,
    tiny_qwen3,
    token_batch,
    two_blocks,
)
from seeded import Schedule, let_apply_use, seeded_swapper
from torch import Tensor, nn

from actmem.planning import Action, Plan, Rule
from actmem.runtime import Applied, apply
from actmem.runtime.swap.storage import SwappedStorage
from actmem.runtime.swap.swapper import Swapper

SAVE, RECOMPUTE, SWAP = Action.SAVE, Action.RECOMPUTE, Action.SWAP
EVERYTHING = Plan("everything", (Rule(".*", SWAP),))
INPUTS = Plan("inputs swapped", (Rule(".*", RECOMPUTE), Rule("input", SWAP)))
PLANS: dict[str, Plan | str] = {
    "attention-swap": "attention-swap",
    "layer-swap": "layer-swap",
    "mixed": Plan("mixed", (Rule(r"self_attn\..*", SWAP), Rule(r"mlp\..*", RECOMPUTE))),
    "full, inputs swapped": INPUTS,
}


class SwapChecks:
    """A model under a plan with a seeded swapper, to be run and looked into."""

    def __init__(self, model: nn.Module, applied: Applied, swapper: Swapper, schedule: Schedule) -> None:
        self.model = model
        self.applied = applied
        self.swapper = swapper
        self.schedule = schedule


@contextmanager
def seeded_plan(
    model: nn.Module,
    plan: Plan | str,
    directory: Path,
    *,
    seed: int = 0,
    kinds: tuple[str, ...] = ("disk",),
    laziness: float = 0.6,
    regions: Any = None,
    verify: str = "first",
    **options: Any,
) -> Iterator[SwapChecks]:
    """A deep copy of a model under a plan whose copies run as `seed` says; no copy may find its memory gone."""
    schedule = Schedule(seed, laziness)
    swapper = seeded_swapper(kinds, schedule, directory, **options)
    twin = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        let_apply_use(swapper, patch)
        min_bytes = options.get("min_swap_bytes", 0)
        applied = apply(twin, plan, regions=regions, memory={"verify": verify, "min_swap_bytes": min_bytes})
    with applied:
        yield SwapChecks(twin, applied, swapper, schedule)
    schedule.run_all()
    assert schedule.faults == []


def selective_swapped(model: nn.Module, regions: Any, step: Callable[[nn.Module], Any]) -> Plan:
    """What the policy ``selective`` does, but what it saves is swapped."""
    twin = copy.deepcopy(model)
    with apply(twin, "selective", regions=regions) as applied:
        step(twin)
        plan = applied.plan
    rules = [Rule(each.pattern, SWAP if each.action is SAVE else each.action) for each in plan.rules]
    return Plan("selective, swapped", (*dict.fromkeys(rules), Rule("input", SWAP)))


def random_plan(paths: list[str], source: random.Random) -> Plan:
    """An action for each path at random."""
    rules = [Rule(path.replace(".", r"\."), source.choice([SAVE, RECOMPUTE, SWAP, SWAP])) for path in paths]
    return Plan("random", (*rules, Rule("input", source.choice([SAVE, SWAP, SWAP]))))


# Small stacks, each with a habit that swapping might trip over.


def views(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden)
    left, right = inner[:, :4], inner[:, 4:]
    return torch.cat([left.sin() * right.t().cos().t(), right * left.exp()], -1)


def one_storage_many_readers(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).sin()
    return inner * inner.cos() + inner.exp() * inner + (inner @ block.linear.weight) * inner


def parts_of_one_storage(block: Any, hidden: Tensor) -> Tensor:
    first, second, third = torch.cat([block.linear(hidden), hidden, hidden * 2], -1).chunk(3, -1)
    return (first * second).tanh() * third.contiguous()


def source_edited_after_use(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) * 2
    shifted = inner + 1
    inner.mul_(0.5)
    second = inner - 1
    inner.add_(hidden)
    return shifted.sin() * second.cos() * inner.sigmoid()


def view_of_source_edited(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden) + 1
    shifted = (inner - 1).sin()
    inner[1:3, ::2].mul_(3)
    return shifted * inner.sin()


def output_saved_and_returned(block: Any, hidden: Tensor) -> Tensor:
    return torch.softmax(block.linear(hidden).exp().sigmoid(), -1).tanh()


def odd_dtypes(block: Any, hidden: Tensor) -> Tensor:
    wide = block.linear(hidden).double().sin()
    narrow = hidden.bfloat16().cos()
    return (wide * narrow.double()).float().exp()


def dropout_inside(block: Any, hidden: Tensor) -> Tensor:
    return nn.functional.dropout(block.linear(hidden).sin(), 0.4).exp() * 0.1


class WritesToSaved(torch.autograd.Function):
    """As some fused kernels do, its backward computes in the memory that it saved."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        inputs = inputs.detach()
        return inputs.cos_().mul_(gradient)


def custom_function(block: Any, hidden: Tensor) -> Tensor:
    inner = block.linear(hidden).tanh()
    return WritesToSaved.apply(inner.clone()) * inner


def passes_its_input_on(block: Any, hidden: Tensor) -> Tensor:
    return hidden + block.linear(hidden.sin()) * hidden


def input_edited_after_use(block: Any, hidden: Tensor) -> Tensor:
    """What autograd saved here belongs to a result that the loss does not need, so the edit is allowed."""
    aside = hidden.sin()
    shifted = hidden + 1
    hidden.mul_(0.5)
    assert aside.requires_grad
    return shifted.sin() + block.linear(hidden)


HABITS = (
    views,
    one_storage_many_readers,
    parts_of_one_storage,
    source_edited_after_use,
    view_of_source_edited,
    output_saved_and_returned,
    odd_dtypes,
    dropout_inside,
    custom_function,
    passes_its_input_on,
)


class SharedInput(Stack):
    """Two regions read the same input, which needs a gradient."""

    def forward(self, hidden: Tensor) -> Tensor:
        first, second, third = self.blocks
        shared = hidden * 2
        return third(first(shared) * second(shared) + shared)


@cache
def small_stack(habit: str) -> nn.Module:
    """Two or three regions of this habit."""
    if habit == "shared_input":
        return SharedInput(*[FunctionBlock(passes_its_input_on, seed=seed) for seed in (1, 2, 3)])
    if habit == "input_edited":
        blocks = [passes_its_input_on, input_edited_after_use, input_edited_after_use]
        return Stack(*[FunctionBlock(each, seed=seed) for seed, each in enumerate(blocks)])
    return two_blocks(next(each for each in HABITS if each.__name__ == habit))


STACKS = (*[each.__name__ for each in HABITS], "shared_input", "input_edited")


@cache
def stack_without_plan(habit: str, num_steps: int = 3) -> list[Step]:
    """Steps to compare with."""
    return stack_steps(copy.deepcopy(small_stack(habit)), num_steps=num_steps)


@cache
def stack_paths(habit: str) -> list[str]:
    """The paths of all ops of a stack's regions."""
    twin = copy.deepcopy(small_stack(habit))
    with apply(twin, "none", regions=block_names(twin)) as applied:
        twin(features(4, 8).requires_grad_())
        graphs = list(applied.graphs.values())
    return list(dict.fromkeys(op.path for graph in graphs for op in graph.ops))


@cache
def tiny(family: str) -> nn.Module:
    """A tiny model, not to be trained: take a copy. Experts run one by one are many, so that not all are met."""
    experts = {"num_experts": 8} if family == "eager" else {}
    return tiny_qwen3(family, hidden_size=16, intermediate_size=16, head_dim=4, **experts)


@cache
def tiny_without_plan(family: str) -> list[Step]:
    """Steps to compare with."""
    return tiny_steps(copy.deepcopy(tiny(family)), family)


def tiny_steps(model: nn.Module, family: str) -> list[Step]:
    """Training steps on a few short batches; experts run one by one settle on a way to follow them in the fourth."""
    num_steps = 5 if family == "eager" else 2
    return language_steps(model, [token_batch(step, length=4) for step in range(num_steps)])


@cache
def tiny_plan(family: str, name: str) -> Plan | str:
    """A plan by name."""
    if name != "selective, swapped":
        return PLANS[name]
    return selective_swapped(tiny(family), None, lambda each: each(**token_batch(0, length=4)).loss.backward())


def gradients_after(model: nn.Module, step: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """The gradients that a step leaves behind."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    step(model)
    return gradients_of(model)


HABIT = "one_storage_many_readers"
REGIONS = ["blocks.0", "blocks.1"]
SHAPE = (4, 8)
STACK_PLANS = {
    "all": EVERYTHING,
    "inputs": INPUTS,
    "mixed": Plan("mixed", (Rule(".*", RECOMPUTE), Rule(r"linear\..*|input", SWAP))),
}


def inputs_of(number: int) -> Tensor:
    """Inputs of a small stack."""
    return features(*SHAPE, seed=number).requires_grad_()


def alive_storages(run: SwapChecks) -> list[SwappedStorage]:
    """What is swapped now."""
    found = [storage() for call in run.swapper._calls.values() for storage in call.storages]
    return [each for each in found if each is not None]
