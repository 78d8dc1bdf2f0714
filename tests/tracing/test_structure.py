"""Layers that are built alike are traced once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actmem.tracing.structure import first_of_each, structure_of, until_all_ran


class Block(nn.Module):
    """A layer with a place in its stack and a plain attribute."""

    def __init__(self, layer_idx: int, width: int = 4, window: int | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.window = window
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


def test_the_place_in_the_stack_makes_no_difference() -> None:
    assert structure_of(Block(0)) == structure_of(Block(7))


@pytest.mark.parametrize("other", [Block(0, width=5), Block(0, window=8), nn.Linear(4, 4), Block(0).double()])
def test_sizes_attributes_classes_and_dtypes_do(other: nn.Module) -> None:
    assert structure_of(Block(0)) != structure_of(other)


def test_each_layer_has_the_first_one_that_is_built_like_it() -> None:
    layers = {"0": Block(0), "1": Block(1, window=8), "2": Block(2), "3": Block(3, window=8)}
    assert first_of_each(layers) == {"0": "0", "1": "1", "2": "0", "3": "1"}


def test_a_pass_ends_as_soon_as_all_have_run() -> None:
    blocks = [Block(index) for index in range(4)]
    ran = []
    with until_all_ran(blocks[:2]):
        for index, block in enumerate(blocks):
            block(torch.zeros(1, 4))
            ran.append(index)
    assert ran == [0]  # the second one ended it
    assert not any(block._forward_hooks for block in blocks)


def test_what_else_goes_wrong_is_told() -> None:
    with pytest.raises(RuntimeError, match="shapes"), until_all_ran([Block(0)]):
        Block(1)(torch.zeros(1, 5))
