"""A plan that a policy made, written to a file, runs as the policy did, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import actmem
from actmem.config.schema import ModelConfig
from actmem.models.building import build_model

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def build(**changes: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(use_cache=False, **(SHAPE | changes))).train()


def step(model: Qwen3ForCausalLM, tokens: int = 16) -> list[torch.Tensor]:
    ids = torch.arange(tokens).view(1, -1) % 64
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of `selective` for the model of `SHAPE`, as a file."""
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    model = build()
    with actmem.apply(model, "selective") as applied:
        step(model)
        applied.plan.save(path)
    return path


def test_an_exported_plan_holds_and_runs_what_the_policy_did(exported: Path) -> None:
    model = build()
    unplanned = step(model)
    with actmem.apply(model, "selective") as by_policy:
        step(model)
    with actmem.apply(model, exported, memory={"strict_matching": True}) as by_plan:
        planned = step(model)
    assert by_plan.stats.held_bytes == by_policy.stats.held_bytes > 0
    assert by_plan.stats.num_replayed_ops == by_policy.stats.num_replayed_ops > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(planned, unplanned, strict=True))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"num_hidden_layers": 3}, "the plan has 2 layers, the model 3"),
        ({"intermediate_size": 96}, "2 layers differ"),
    ],
)
def test_another_model_is_refused_with_the_differences(
    exported: Path, changes: dict[str, int], difference: str
) -> None:
    with pytest.raises(actmem.PlanError, match=difference):
        actmem.apply(build(**changes), exported)


def test_another_dtype_is_refused(exported: Path) -> None:
    with pytest.raises(actmem.PlanError, match="dtypes: plan float32, here bfloat16"):
        actmem.apply(build().to(torch.bfloat16), exported)


def test_another_shape_is_refused_before_anything_runs(exported: Path) -> None:
    model = build()
    with actmem.apply(model, exported):
        with pytest.raises(actmem.PlanError, match=r"1x16x32.*1x8x32"):
            step(model, tokens=8)
        assert step(model)


def test_autocast_that_the_plan_was_not_made_for_is_refused(exported: Path) -> None:
    model = build()
    with (
        actmem.apply(model, exported),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(actmem.PlanError, match="autocast: plan off, here bfloat16"),
    ):
        step(model)


def test_torchs_own_ways_follow_no_plan_of_ours() -> None:
    with actmem.apply(build(), "torch-full") as applied, pytest.raises(actmem.PlanError, match="torch's own way"):
        _ = applied.plan


def test_there_is_nothing_to_export_before_the_first_step() -> None:
    with actmem.apply(build(), "selective") as applied, pytest.raises(actmem.PlanError, match="run one step first"):
        _ = applied.plan


@pytest.mark.parametrize("policy", ["torch-full", "torch-sac"])
def test_torchs_own_ways_refuse_a_key_value_cache(policy: str) -> None:
    model = build()
    model.config.use_cache = True
    with actmem.apply(model, policy), pytest.raises(actmem.ApplyError, match="use_cache = False"):
        step(model)


MIXTURE = ModelConfig(name="qwen3-moe-tiny", config={"mlp_only_layers": [0], "num_hidden_layers": 2, "vocab_size": 64})


@pytest.mark.parametrize("pattern", ["mlp", r"mlp\.gate_proj"])  # the second layer has no gate_proj
def test_the_plan_in_force_is_as_strict_as_the_sections_it_came_from(pattern: str, tmp_path: Path) -> None:
    model = build_model(MIXTURE, seed=0)
    select = {"mode": "select", "select_module": {pattern: ["0-1"]}, "full_recompute_layer": [1]}
    held = []
    for plan in ({"recompute": select}, tmp_path / "plan.yaml"):
        with actmem.apply(model, plan, memory={"strict_matching": True}) as applied:
            model(input_ids=torch.zeros((1, 16), dtype=torch.int64), use_cache=False).logits.sum().backward()
            applied.plan.save(tmp_path / "plan.yaml")
            held.append(applied.stats.held_bytes)
    assert held[0] == held[1]
