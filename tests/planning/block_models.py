"""Plain modules in a row, for traces of models that are not Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        down = self.down(torch.tanh(self.up(hidden)))
        assert isinstance(down, Tensor)
        return hidden + down


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(2):
            hidden = torch.tanh(hidden @ self.weight)
        return hidden


def squares(model: nn.Module, batch: Mapping[str, object]) -> Tensor:
    loss = model(batch["features"]).square().mean()
    assert isinstance(loss, Tensor)
    return loss


def features() -> dict[str, Tensor]:
    return {"features": torch.randn(256, WIDTH)}


def regions_of(model: Any) -> list[str]:
    return [f"blocks.{index}" for index in range(len(model.blocks))]
