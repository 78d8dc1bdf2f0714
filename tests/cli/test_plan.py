"""`actmem plan`: any configuration as a plan file that gives the same run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from actmem.cli import main
from actmem.config.loading import load_config
from actmem.errors import ApplyError, ConfigError, PlanError, PlatformError
from actmem.models.building import build_model
from actmem.planning import Plan
from actmem.planning.sections import plan_of
from actmem.runtime import Applied, apply
from actmem.training.loss import next_token_loss
from actmem.training.packing import Batch

HEAD = """
model: {name: qwen3-moe-tiny, config: {mlp_only_layers: [2], vocab_size: 300}}
data: {path: [nothing-is-read.txt], sequence_length: 16}
train: {micro_batch_size: 2}
"""
SECTIONS = (
    "recompute: {mode: select, select_module: {'.*mlp': [0-1], '.*q_proj': [2]}, full_recompute_layer: [3], "
    "exclude_op: [sdpa]}"
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "run.yaml"


def written(config: Path, text: str, *arguments: str) -> Plan:
    config.write_text(HEAD + text)
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert "plan.yaml" in result.stdout
    return Plan.load("plan.yaml")


def step(config: Path, plan: str | Path | Plan) -> tuple[list[torch.Tensor], Applied]:
    """The gradients of a training step under `plan`, as the trainer takes it."""
    run = load_config(config)
    model = build_model(run.model, seed=0)
    tokens = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.train.autocast is not None),
        apply(model, plan) as applied,
    ):
        next_token_loss(model, batch, num_targets=32, kind="standard").total().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], applied


@pytest.mark.parametrize("text", [SECTIONS, "policy: selective", ""])
def test_the_file_gives_the_run_of_the_configuration(config: Path, text: str) -> None:
    made = written(config, text)
    mine, applied = step(config, plan_of(load_config(config)))
    theirs, again = step(config, Path("plan.yaml"))
    assert made.fingerprint == applied.plan.fingerprint
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    for one, other in zip(applied.stats.regions, again.stats.regions, strict=True):
        assert (one.held_bytes, one.dropped_bytes) == (other.held_bytes, other.dropped_bytes)


def test_a_policy_is_written_as_applied_would_export_it(config: Path) -> None:
    made = written(config, "policy: selective")
    _, applied = step(config, "selective")
    assert {*made.rules} == {*applied.plan.rules}
    assert (made.name, made.fingerprint) == (applied.plan.name, applied.plan.fingerprint)


def test_autocast_is_part_of_what_the_plan_is_made_for(config: Path) -> None:
    made = written(config, SECTIONS, "train.autocast=bfloat16")
    config.write_text((HEAD + SECTIONS).replace("micro_batch_size: 2", "micro_batch_size: 2, autocast: bfloat16"))
    _, applied = step(config, plan_of(load_config(config)))
    assert made.fingerprint == applied.plan.fingerprint


def test_sections_keep_their_rules_and_their_prefetch(config: Path) -> None:
    text = "swap: {enable: true, default_prefetch: 2, layer_swap: [{layers: [0-1]}]}"
    made = written(config, text)
    of_sections = plan_of(load_config(config))
    assert isinstance(of_sections, Plan)
    assert (made.rules, made.prefetch, made.name) == (of_sections.rules, 2, "swap 0-1")


def test_a_plan_file_gets_the_fingerprint_of_this_model(config: Path) -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nname: mine\nrules: [{ops: '.*', action: recompute}]\n")
    made = written(config, "plan: mine.yaml")
    assert made.name == "mine"
    assert made.fingerprint is not None and made.fingerprint.model == "Qwen3MoeForCausalLM"


def test_a_plan_as_json(config: Path) -> None:
    config.write_text(HEAD + "policy: full")
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml", "--json"])
    told = json.loads(result.stdout)
    assert (told["written"], told["name"], told["num_rules"], told["prefetch"]) == ("plan.yaml", "full", 1, 1)
    assert 0 < told["peak_bytes"] <= told["unplanned_peak_bytes"]  # the logits are most of so small a model
    assert told["peak_bytes"] == sum(told["peak"]["bytes_by_use"].values())
    assert told["step_seconds"] > told["unplanned_step_seconds"] and told["bound_seconds"] is None


@pytest.mark.parametrize(
    ("text", "out", "words"),
    [
        ("policy: torch-full", "plan.yaml", "torch's own way"),
        ("policy: ful", "plan.yaml", "nearest: full"),
        ("policy: full", "no/such/plan.yaml", "write the plan to no/such/plan.yaml: there is no folder no/such;"),
        ("policy: full", ".", "cannot write the plan to .: it is a directory;"),
    ],
)
def test_what_cannot_be_written_is_an_error_without_a_traceback(
    config: Path, text: str, out: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(HEAD + text)
    monkeypatch.setattr(sys, "argv", ["actmem", "plan", str(config), "-o", out])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("way", ["recompute: {mode: full, full_recompute_layer: [0]}", "memory_budget: 1GiB"])
@pytest.mark.parametrize("command", [["plan", "-o", "plan.yaml"], ["explain"]], ids=["plan", "explain"])
def test_there_is_no_plan_for_another_platform(config: Path, way: str, command: list[str]) -> None:
    config.write_text(f"{HEAD}platform: mindspore\n{way}\n")
    result = CliRunner().invoke(main.app, [*command, str(config)])
    assert isinstance(result.exception, PlatformError)
    assert not Path("plan.yaml").exists()


def test_a_plan_is_for_one_layout(config: Path) -> None:
    """What it was made under is found again by `check`, and another layout is refused with the difference."""
    dense = HEAD.replace("qwen3-moe-tiny, config: {mlp_only_layers: [2], vocab_size: 300}", "qwen3-tiny")
    config.write_text(dense + "parallel: {tp_size: 2}\npolicy: selective\n")
    assert CliRunner().invoke(main.app, ["plan", str(config), "-o", "tp.yaml"]).exit_code == 0
    assert Plan.load("tp.yaml").fingerprint.layout == "tp 2"  # type: ignore[union-attr]
    for size, code in ((2, 0), (1, 2)):
        config.write_text(dense + f"parallel: {{tp_size: {size}}}\nplan: tp.yaml\n")
        found = CliRunner().invoke(main.app, ["check", str(config)])
        assert found.exit_code == code, found.output
    assert "layout: plan tp 2, here whole layers in each process" in found.output


NOTHING = "recompute: {mode: select, select_module: {'.*mlp': [0-3], '.*nothing': [0-3]}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NOTHING + "memory: {strict_matching: true}", "matches no module and no op in layers 0-3"),
        (
            "swap: {enable: true, layer_swap: [{layers: [0-1]}]}\nmemory: {min_swap_bytes: 0, disk_limit: 1KiB}",
            "too few for what the plan swaps",
        ),
    ],
)
def test_what_check_refuses_is_not_written(config: Path, text: str, words: str) -> None:
    config.write_text(HEAD + text)
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml"])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
    assert not Path("plan.yaml").exists()


def test_what_check_warns_of_is_said(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config.write_text(HEAD + NOTHING)
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml", "--json"], catch_exceptions=False)
    (warning,) = json.loads(result.stdout)["warnings"]
    assert "matches no module and no op" in warning["problem"]
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml"], catch_exceptions=False)
    assert result.stderr.startswith("warning: line ")


def test_hardware_counts_without_a_budget(config: Path) -> None:
    config.write_text(HEAD + "policy: full\nhardware: h100-sxm\n")
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml", "--json"], catch_exceptions=False)
    told = json.loads(result.stdout)
    assert told["warnings"] == []
    assert told["hardware"].startswith("h100-sxm")


def test_a_plan_is_not_written_over_its_configuration(config: Path) -> None:
    config.write_text(HEAD + SECTIONS)
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "./run.yaml"])
    assert isinstance(result.exception, PlanError)
    assert config.read_text() == HEAD + SECTIONS


def test_sections_are_written_for_experts_that_only_a_run_can_follow(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    eager = HEAD.replace("{name: qwen3-moe-tiny,", "{name: qwen3-moe-tiny, experts_implementation: eager,")
    config.write_text(f"{eager}recompute: {{mode: full, full_recompute_layer: [0]}}\n")
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "plan.yaml"], catch_exceptions=False)
    assert result.exit_code == 0
    mine, by_sections = step(config, plan_of(load_config(config)))
    theirs, by_file = step(config, Path("plan.yaml"))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert by_sections.stats.dropped_bytes == by_file.stats.dropped_bytes > 0
    config.write_text(f"{eager}policy: selective\n")
    result = CliRunner().invoke(main.app, ["plan", str(config), "-o", "other.yaml"])
    assert isinstance(result.exception, ApplyError)
