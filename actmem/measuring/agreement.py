"""Whether a planned step gives the numbers of the unplanned one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Numbers = dict[str, Tensor]
_NUM_REPEATS = 3
_SPREADS_ALLOWED = 2.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How loss and gradients differ from those of the unplanned step on the same weights, batch and random state.

    `difference` is the largest over the loss and all gradients, as a share of the largest number in that tensor: 0.0
    for equal bits. `allowed` is 0.0 where unplanned steps repeat bit by bit, else twice their own largest difference.
    """

    difference: float
    allowed: float

    @property
    def is_bitwise(self) -> bool:
        """Equal to the last bit."""
        return self.difference == 0.0

    @property
    def holds(self) -> bool:
        """No further from the unplanned step than such steps are from each other."""
        return self.difference <= self.allowed


class Reference:
    """The numbers of the unplanned step, and how far apart such steps are. Holds one copy of all gradients."""

    def __init__(self, model: nn.Module, step: Callable[[], Tensor]) -> None:
        self._model = model
        self._numbers = numbers_of(model, step)
        self.allowed = self._spread(step)

    def compare(self, step: Callable[[], Tensor]) -> Agreement:
        """Run `step`, which must fill the gradients of the model's own parameters, and compare."""
        return Agreement(_difference(self._numbers, numbers_of(self._model, step)), self.allowed)

    def _spread(self, step: Callable[[], Tensor]) -> float:
        first = _difference(self._numbers, numbers_of(self._model, step))
        if first == 0.0:
            return 0.0
        more = [_difference(self._numbers, numbers_of(self._model, step)) for _ in range(_NUM_REPEATS - 1)]
        return _SPREADS_ALLOWED * max(first, *more)


def numbers_of(model: nn.Module, step: Callable[[], Tensor]) -> Numbers:
    """The loss that `step` returns and the gradients that it leaves, from zeroed gradients and a fixed random state."""
    model.zero_grad(set_to_none=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = step()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"": loss.detach().clone(), **gradients}


def _difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    if expected.keys() != found.keys():
        return float("inf")
    return max(_tensor_difference(tensor, found[name]) for name, tensor in expected.items())


def _tensor_difference(expected: Tensor, found: Tensor) -> float:
    if torch.equal(expected, found):
        return 0.0
    largest = float(expected.abs().max())
    difference = float((expected - found).abs().max())
    return difference / largest if largest and difference == difference else float("inf")
