from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actmem.training.random_state import capture_random_state, restore_random_state, seed_everything

CPU = torch.device("cpu")


def draw() -> list[object]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
    ]


@pytest.mark.parametrize("draws_before", [0, 1, 2])
def test_every_generator_goes_on_where_it_was(tmp_path: Path, draws_before: int) -> None:
    seed_everything(2**40 + 1)
    for _ in range(draws_before):
        draw()  # an odd number of Gaussians leaves one in hand
    save_file(capture_random_state(CPU), tmp_path / "random.safetensors")
    expected = [draw(), draw()]
    seed_everything(5)
    restore_random_state(load_file(tmp_path / "random.safetensors"), CPU)
    assert [draw(), draw()] == expected


def test_seeding_decides_every_draw() -> None:
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(first, draw(), strict=True))
