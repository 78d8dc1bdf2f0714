"""What all tests of the engine share: a random state of their own, and nothing left applied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from planned_runs import tiny_qwen3
from torch import nn


@pytest.fixture(autouse=True)
def _random_state_of_its_own() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture
def qwen3() -> nn.Module:
    """A dense Qwen3 of two layers."""
    return tiny_qwen3()
