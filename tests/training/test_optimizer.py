from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from actmem.config.schema import TrainConfig
from actmem.parallel import MeshSizes, build_mesh, clip_gradients
from actmem.training.optimizer import build_optimizer, learning_rate, set_learning_rate


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    frozen = model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(nn.ModuleList([model, nn.Linear(3, 2)]).parameters(), TrainConfig(weight_decay=0.3))
    decay = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {2: 0.3, 1: 0.0}
    assert not any(p is frozen for group in optimizer.param_groups for p in group["params"])


def test_learning_rate_warms_up_and_falls_to_its_share() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, lr=1.0, min_lr_share=0.1)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(earlier > later for earlier, later in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 5), (5, 50)])
def test_short_runs_have_a_rate_too(steps: int, warmup: int) -> None:
    config = TrainConfig(steps=steps, warmup_steps=warmup, lr=1.0)
    assert all(0 < learning_rate(step, config) <= 1 for step in range(1, steps + 1))


def test_the_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2).parameters(), TrainConfig())
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(("limit", "after"), [(None, 5.0), (1.0, 1.0), (10.0, 5.0)])
def test_clipping_gives_the_norm_from_before_it(limit: float | None, after: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradients(model.parameters(), limit, build_mesh(MeshSizes(), "cpu")) == pytest.approx(5.0)
    assert float(model.weight.grad.norm()) == pytest.approx(after)
