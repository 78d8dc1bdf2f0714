"""Graphs are kept, shared, cut short and thrown away while copies are under way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import (
    Outcome,
    assert_same_steps,
    assert_same_tensors,
    gradients_of,
    stack_steps,
)
from seeded import KINDS
from swapped_runs import (
    EVERYTHING,
    HABIT,
    REGIONS,
    STACK_PLANS,
    SwapChecks,
    inputs_of,
    seeded_plan,
    small_stack,
)
from torch import Tensor, nn


def two_forwards_before_one_backward(model: nn.Module, number: int) -> Outcome:
    first, second = model(inputs_of(number)).square().mean(), model(inputs_of(number + 1)).sin().mean()
    (first + second).backward()
    return gradients_of(model)


def backward_in_the_order_of_the_forwards(model: nn.Module, number: int) -> Outcome:
    losses = [model(inputs_of(number + each)).square().mean() for each in range(3)]
    for loss in losses:
        loss.backward()
    return gradients_of(model)


def one_forward_one_backward(model: nn.Module, number: int) -> Outcome:
    """As a pipeline does it: the next forward before the last backward."""
    pending = [model(inputs_of(number)).square().mean()]
    for each in range(3):
        pending.append(model(inputs_of(number + each)).square().mean())
        pending.pop(0).backward()
    pending.pop().backward()
    return gradients_of(model)


def accumulated_gradients(model: nn.Module, number: int) -> Outcome:
    for each in range(3):
        model(inputs_of(number + each)).square().mean().backward()
    return gradients_of(model)


def retained_twice(model: nn.Module, number: int) -> Outcome:
    loss = model(inputs_of(number)).square().mean()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(model)


def gradient_of_a_part(model: nn.Module, number: int) -> Outcome:
    loss = model(inputs_of(number)).square().mean()
    weight = model.blocks[1].linear.weight
    (part,) = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    return gradients_of(model) | {"part": part}


def double_backward(model: nn.Module, number: int) -> Outcome:
    inputs = inputs_of(number)
    (gradient,) = torch.autograd.grad(model(inputs).square().mean(), inputs, create_graph=True)
    gradient.square().sum().backward()
    return gradients_of(model) | {"gradient": gradient.detach()}


def exception_in_the_forward(model: nn.Module, number: int) -> Outcome:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[1].linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(inputs_of(number))
    handle.remove()
    return accumulated_gradients(model, number)


def exception_between_forward_and_backward(model: nn.Module, number: int) -> Outcome:
    def interrupted() -> None:
        loss = model(inputs_of(number)).square().mean()
        raise ValueError(f"on purpose: {loss.item()}")

    with pytest.raises(ValueError, match="on purpose"):
        interrupted()
    return accumulated_gradients(model, number)


def exception_in_the_backward(model: nn.Module, number: int) -> Outcome:
    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    hidden = model.blocks[0](inputs_of(number))
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model.blocks[1](hidden).sum().backward()
    model.zero_grad(set_to_none=True)
    return accumulated_gradients(model, number)


def backward_that_never_comes(model: nn.Module, number: int) -> Outcome:
    model(inputs_of(number))
    loss = model(inputs_of(number)).sum()
    outcome = accumulated_gradients(model, number)
    del loss
    return outcome


def gradient_inside_the_forward(model: nn.Module, number: int) -> Outcome:
    """A region whose forward takes a gradient of its own, as force fields do."""
    inputs = inputs_of(number)
    hidden = model.blocks[0](inputs)
    (inner,) = torch.autograd.grad(hidden.square().sum(), inputs, create_graph=True)
    model.blocks[1](hidden + inner).square().mean().backward()
    return gradients_of(model)


LIVES = (
    two_forwards_before_one_backward,
    backward_in_the_order_of_the_forwards,
    one_forward_one_backward,
    accumulated_gradients,
    retained_twice,
    gradient_of_a_part,
    double_backward,
    exception_in_the_forward,
    exception_between_forward_and_backward,
    exception_in_the_backward,
    backward_that_never_comes,
    gradient_inside_the_forward,
)


def compare(run: SwapChecks, twin: nn.Module, life: Callable[[nn.Module, int], Outcome]) -> None:
    """Two rounds of a life with and without the plan, one that learns and one that follows."""
    for number in range(2):
        outcomes = []
        for each in (run.model, twin):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(number)
            outcomes.append(life(each, number))
        assert_same_tensors(*outcomes, f"round {number}: ")


@pytest.mark.parametrize("plan", STACK_PLANS)
@pytest.mark.parametrize("life", LIVES, ids=lambda each: each.__name__)
def test_invariant_05_state_belongs_to_the_call(
    life: Callable[[nn.Module, int], Outcome], plan: str, tmp_path: Path
) -> None:
    model = small_stack("passes_its_input_on" if life is double_backward else HABIT)
    num_out = 0
    for seed, kind in enumerate(KINDS if plan == "all" else ("disk", "host")):
        with seeded_plan(
            model,
            STACK_PLANS[plan],
            tmp_path,
            seed=seed,
            kinds=(kind,),
            regions=REGIONS,
            verify="always",
            prefetch=seed % 3,
        ) as run:
            compare(run, copy.deepcopy(model), life)
            num_out += run.applied.stats.swap.num_out
    assert num_out > 0


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_05_a_graph_dropped_while_copies_are_pending_frees_its_place(kind: str, tmp_path: Path) -> None:
    with seeded_plan(small_stack(HABIT), EVERYTHING, tmp_path, kinds=(kind,), laziness=1.0, regions=REGIONS) as run:
        tier = run.swapper._tiers["host" if kind == "host" else "disk"]
        for _ in range(5):
            loss = run.model(inputs_of(0)).sum()
            assert tier.usage().used_bytes > 0
            del loss
            run.schedule.run_all()
            if kind == "host":
                tier.pool.allocate(0)  # type: ignore[attr-defined]
            assert tier.usage().used_bytes == 0
        reserved = tier.usage().reserved_bytes
    assert reserved <= 2**21


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_11_a_plan_taken_off_between_forward_and_backward(kind: str, tmp_path: Path) -> None:
    model = small_stack(HABIT)
    twin = copy.deepcopy(model)
    with seeded_plan(model, EVERYTHING, tmp_path, kinds=(kind,), regions=REGIONS) as run:
        losses = [each(inputs_of(0)).square().mean() for each in (run.model, twin)]
        run.applied.remove()
        for loss in losses:
            loss.backward()
        assert_same_tensors(gradients_of(run.model), gradients_of(twin))
    assert_same_steps(stack_steps(run.model, num_steps=1), stack_steps(twin, num_steps=1))


def test_invariant_11_copies_of_a_model_have_no_plan(tmp_path: Path) -> None:
    model = small_stack(HABIT)
    with seeded_plan(model, EVERYTHING, tmp_path, regions=REGIONS) as run:
        stack_steps(run.model, num_steps=1)
        twin = copy.deepcopy(run.model)
        before = run.applied.stats.swap
        twin(inputs_of(0)).sum().backward()
        assert run.applied.stats.swap == before
