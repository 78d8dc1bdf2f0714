"""Plans as Python asks for them: budgets that hold as they do for a configuration, and what is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_models import Block, Twice, features, regions_of, squares
from torch import Tensor, nn

import actmem
from actmem.config.schema import DataConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from actmem.errors import ActmemError
from actmem.graph import Graph
from actmem.measuring.bench import random_batch
from actmem.memory import measure_peak
from actmem.models.building import build_model
from actmem.training.loss import next_token_loss
from actmem.training.traced import trace_step


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.fixture
def graph() -> Graph:
    model = Stack(Block(), Block())
    return actmem.trace(model, features(), loss=squares, regions=regions_of(model))


BASE = {
    "vocab_size": 64,
    "hidden_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
}
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 1}
LANGUAGE_MODELS = {
    "batched experts under autocast": (
        ModelConfig(config=BASE | EXPERTS | {"num_hidden_layers": 1}, experts_implementation="batched_mm"),
        16,
        True,
    ),
    "eager attention in bfloat16": (
        ModelConfig(
            config=BASE
            | {
                "model_type": "qwen3",
                "hidden_size": 200,
                "num_hidden_layers": 2,
                "num_attention_heads": 12,
                "num_key_value_heads": 3,
                "vocab_size": 257,
                "intermediate_size": 64,
            },
            dtype="bfloat16",
            attn_implementation="eager",
            loss="chunked",
        ),
        16,
        False,
    ),
}


@pytest.mark.parametrize(("model_config", "length", "casts"), LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS.keys())
def test_budgets_of_the_three_line_way_hold_on_the_cpu(model_config: ModelConfig, length: int, casts: bool) -> None:
    run = RunConfig(
        model=model_config,
        data=DataConfig(path=["none"], sequence_length=length),
        train=TrainConfig(micro_batch_size=2, device="cpu", autocast="bfloat16" if casts else None),
        memory=MemoryConfig(verify="off"),
    )
    graph = trace_step(run)
    assert graph.step is not None
    model = build_model(model_config, seed=0)
    batch = random_batch(model, 2, length)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            loss = next_token_loss(model, batch, num_targets=batch.targets.numel(), kind=model_config.loss).total()
        loss.backward()

    over = []
    for share in ("100%", "99%"):
        planned = actmem.plan(graph, share, "cpu", gradients_stand=True)
        budget = planned.budget_bytes
        with actmem.apply(model, planned, memory={"verify": "off"}):
            step()
            step()
            measured = measure_peak(step, model.device).peak_bytes + graph.step.standing.total
        over += [(budget, measured, f"{measured / budget - 1:+.1%}")] if measured > budget else []
    assert not over


def test_a_saved_plan_for_a_budget_is_refused_by_another_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Stack(Block(), Block()), Stack(Twice())
    batch = features()
    graph = actmem.trace(model, batch, loss=squares, regions=regions_of(model))
    planned = actmem.plan(graph, "99%", "cpu")
    assert planned.plan.rules
    planned.plan.save(tmp_path / "plan.yaml")
    with pytest.raises(ActmemError), actmem.apply(other, tmp_path / "plan.yaml", regions=regions_of(other)):
        squares(other, batch).backward()


@pytest.mark.parametrize("budget", ["9" * 400, "9" * 400 + "GiB", 10**400], ids=["digits", "GiB", "int"])
def test_an_enormous_budget_is_answered(budget: str | int, graph: Graph) -> None:
    try:
        assert actmem.plan(graph, budget, "cpu").plan.rules == ()
    except ActmemError as error:
        assert "memory_budget" in str(error)


@pytest.mark.parametrize("arguments", [{"tiers": ("tape",)}, {"tiers": "disk"}, {"level": "huge"}, {"hardware": None}])
def test_arguments_of_plan_that_are_none_are_told(arguments: dict[str, object], graph: Graph) -> None:
    with pytest.raises(ActmemError):
        actmem.plan(graph, "99%", **{"hardware": "cpu", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "same"), [(np.int64(2**30), 2**30), (np.float32(0.9375), 0.9375)])
def test_numbers_of_numpy_are_numbers(number: Any, same: float, graph: Graph) -> None:
    assert actmem.plan(graph, number, "cpu").budget_bytes == actmem.plan(graph, same, "cpu").budget_bytes


@pytest.mark.parametrize(("text", "share"), [("0.9", 0.9), (" .95", 0.95), ("1.0", 1.0), ("90 %", 0.9)])
def test_a_share_may_be_written_as_text(text: str, share: float, graph: Graph) -> None:
    assert actmem.plan(graph, text, "cpu").budget_bytes == actmem.plan(graph, share, "cpu").budget_bytes
