"""Equality of loss and gradients is told from nearness, and nearness from error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from actmem.measuring.agreement import Agreement, Reference, numbers_of


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model(torch.ones(4, 8)).sum().backward()
    return model


def step_of(model: nn.Module, change: Callable[[Tensor], Tensor] = lambda loss: loss) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = change(model(torch.ones(4, 8)).sum())
        loss.backward()
        return loss

    return step


def test_equal_bits_under_equal_random_state(model: nn.Module) -> None:
    reference = Reference(model, step_of(model))
    torch.rand(1)  # as a timed step between the two may
    agreement = reference.compare(step_of(model))
    assert agreement == Agreement(difference=0.0, allowed=0.0)
    assert agreement.is_bitwise and agreement.holds


def test_the_callers_random_state_is_left_alone(model: nn.Module) -> None:
    before = torch.random.get_rng_state()
    numbers_of(model, step_of(model))
    assert torch.equal(before, torch.random.get_rng_state())


def test_gradients_do_not_add_up_over_comparisons(model: nn.Module) -> None:
    first = numbers_of(model, step_of(model))
    second = numbers_of(model, step_of(model))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_bit_in_one_gradient_is_found(model: nn.Module) -> None:
    reference = Reference(model, step_of(model))

    def step() -> Tensor:
        loss = step_of(model)()
        bias = model[0].bias.grad
        bias[3] = torch.nextafter(bias[3], torch.tensor(torch.inf))
        return loss

    agreement = reference.compare(step)
    assert 0.0 < agreement.difference < 1e-6
    assert not agreement.holds


def test_the_loss_alone_may_differ(model: nn.Module) -> None:
    assert Reference(model, step_of(model)).compare(step_of(model, lambda loss: loss + 1)).difference > 0.0


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_disagree(model: nn.Module, factor: float) -> None:
    agreement = Reference(model, step_of(model)).compare(step_of(model, lambda loss: loss * factor))
    assert agreement.difference == float("inf") and not agreement.holds


def test_a_missing_gradient_disagrees(model: nn.Module) -> None:
    reference = Reference(model, step_of(model))

    def step() -> Tensor:
        loss = step_of(model)()
        model[2].bias.grad = None
        return loss

    assert not reference.compare(step).holds


def test_steps_that_do_not_repeat_are_compared_within_their_spread(model: nn.Module) -> None:
    shifts = iter([0.0, 1e-3, 2e-3, 0.0, 3e-3, 9e-3])  # the reference's own, three repeats, two compared

    def noisy() -> Tensor:
        return step_of(model, lambda loss: loss + next(shifts))()

    reference = Reference(model, noisy)
    near, far = reference.compare(noisy), reference.compare(noisy)
    assert not near.is_bitwise and near.holds
    assert not far.holds and far.allowed == near.allowed > 0.0
