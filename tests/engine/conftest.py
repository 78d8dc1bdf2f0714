"""What all tests of the engine share: one thread, a random state of their own, and nothing left applied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from planned_runs import tiny_qwen3
from torch import nn


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products only lose by threads, and most of all where tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def qwen3() -> nn.Module:
    """A dense Qwen3 of two layers."""
    return tiny_qwen3()
