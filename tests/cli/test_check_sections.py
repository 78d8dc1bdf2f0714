"""`actmem check` on the sections: what patterns match, what is saved, recomputed and swapped; the scenario files."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from actmem.cli import main
from actmem.config.loading import load_config
from actmem.models.building import build_model
from actmem.planning.sections import plan_of
from actmem.runtime import apply

REPOSITORY = Path(__file__).parents[2]
HEAD = """
model: {name: qwen3-moe-tiny, config: {mlp_only_layers: [2]}}
data: {path: [nothing-is-read.txt], sequence_length: 64}
memory: {min_swap_bytes: 0}
"""
LEVELS = sorted(path.name for path in (REPOSITORY / "configs").glob("level*.yaml"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "run.yaml"


def check(path: Path, text: str | None = None, *arguments: str) -> tuple[int, str]:
    if text is not None:
        path.write_text(HEAD + text)
    result = CliRunner().invoke(main.app, ["check", str(path), *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def found(path: Path, text: str | None = None, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, output = check(path, text, *arguments, "--json")
    return code, json.loads(output)


@pytest.mark.parametrize("width", [80, 100, 150])
def test_narrow_tables_break_paths_at_dots_and_cut_nothing_off(
    config: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, output = check(
        config,
        r"recompute: {mode: select, select_module: {'self_attn\.(q|k|v)_proj': [0-1]}}" + "\n"
        "swap: {enable: true, op_swap: [{op_name: 'input_layernorm', layers: [0, 2]}]}",
    )
    table = output[output.index("setting") :]
    assert all(len(line) <= width for line in table.splitlines())
    assert "…" not in table
    for whole in ("recompute.", "select_module", "swap.", "op_swap", "self_attn.k_proj", "input_layernorm", "0, 2"):
        assert whole in table


def test_each_pattern_is_told_with_what_it_names_where_and_what_it_misses(config: Path) -> None:
    code, output = check(
        config, r"recompute: {mode: select, select_module: {'.*\.up_proj': [1-2], mlp: [3]}, exclude_op: [sdpa]}"
    )
    output = output[output.index("setting") :]
    rows = [line.split() for line in output.splitlines() if line.strip().startswith("recompute.")]
    assert code == 1  # no layer whose attention is recomputed
    assert rows == [
        ["recompute.select_module", r".*\.up_proj", "mlp.up_proj", "2", "1"],
        ["recompute.select_module", "mlp", "mlp", "3", "-"],
        ["recompute.exclude_op", "sdpa", "self_attn.scaled_dot_product_attention", "1-3", "-"],
    ]


def test_bytes_add_up_by_layer_kind_and_in_total(config: Path) -> None:
    text = "recompute: {mode: full, full_recompute_layer: [0, 2]}\nswap: {enable: true, layer_swap: [{layers: [1]}]}"
    code, told = found(config, text)
    groups = told["effect"]["layers"]
    assert code == 0
    assert [(group["kind"], group["layers"]) for group in groups] == [
        ("Qwen3MoeDecoderLayer", [0]),
        ("Qwen3MoeDecoderLayer", [1]),
        ("Qwen3MoeDecoderLayer#1", [2]),
        ("Qwen3MoeDecoderLayer", [3]),
    ]
    recomputed, swapped, dense, untouched = groups
    assert recomputed["recomputed_bytes"] > 0 == recomputed["swapped_bytes"]
    assert swapped["swapped_bytes"] > 0 == swapped["recomputed_bytes"]
    assert dense["recomputed_bytes"] > 0
    assert untouched["saved_bytes"] == untouched["unplanned_bytes"] > recomputed["saved_bytes"]
    for name, total in told["effect"]["total"].items():
        assert total == sum(group[name] * len(group["layers"]) for group in groups)


def test_the_bytes_are_those_of_a_real_step(config: Path) -> None:
    text = "recompute: {mode: select, select_module: {'.*mlp': [0-1]}, full_recompute_layer: [3], exclude_op: [mm]}"
    _, told = found(config, text)
    run = load_config(config)
    model = build_model(run.model, seed=0)
    with apply(model, plan_of(run)) as applied:
        model.base_model(input_ids=torch.zeros((1, 64), dtype=torch.int64), use_cache=False)
        stats = applied.stats
    assert told["effect"]["total"]["saved_bytes"] == sum(region.held_bytes for region in stats.regions)
    assert told["effect"]["total"]["recomputed_bytes"] == sum(region.dropped_bytes for region in stats.regions)


def test_a_pattern_without_a_match_is_a_warning_that_names_the_nearest_paths(config: Path) -> None:
    text = "recompute: {mode: select, select_module: {'.*mpl': [0-1, 3], self_atn: 2}, exclude_op: [flash_atention]}"
    code, told = found(config, text)
    assert code == 1
    assert [(each["path"], each["problem"]) for each in told["warnings"]] == [
        ("recompute.select_module['.*mpl']", "matches no module and no op in layers 0-1, 3"),
        ("recompute.select_module['self_atn']", "matches no module and no op in layer 2"),
        ("recompute.exclude_op['flash_atention']", "matches no op in layers 0-3"),
    ]
    assert told["warnings"][0]["nearest"].startswith("mlp")
    assert told["warnings"][1]["nearest"].startswith("self_attn")
    assert told["matches"][0]["missed"] == [0, 1, 3]


def test_under_strict_matching_it_is_a_fault(config: Path) -> None:
    text = "recompute: {mode: select, select_module: {'.*mpl': [0-1]}}"
    code, output = check(config, text, "memory.strict_matching=true")
    assert code == 2
    assert "matches no module and no op in layers 0-1" in output and "nearest: mlp" in output


def test_a_pattern_that_matches_in_some_layers_is_no_warning(config: Path) -> None:
    code, told = found(config, r"recompute: {mode: select, select_module: {'mlp\.gate_proj': [0-3]}}")
    (match,) = told["matches"]
    assert (code, match["hits"], match["missed"]) == (0, {"mlp.gate_proj": [2]}, [0, 1, 3])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("mlp", "is expected to be operation but got cell: 'mlp'; this configuration will not be effective"),
        (r".*\.mm", "is expected to be operation of communication: 'self_attn.q_proj.mm'"),
        (r".*\.all_gather", "matches no module and no op in layers 0-3"),
    ],
)
def test_communication_recompute_without_communication_has_no_effect(config: Path, pattern: str, words: str) -> None:
    code, told = found(config, f"recompute_comm: {{enable: true, select_module: {{'{pattern}': [0-3]}}}}")
    assert code == 1
    assert words in told["warnings"][0]["problem"]


def test_a_swap_of_nothing_is_a_warning(config: Path) -> None:
    code, told = found(config, "activation_swap: attention", "memory.min_swap_bytes=1GiB")
    assert code == 1
    (warning,) = told["warnings"]
    assert warning["path"] == "activation_swap"
    assert warning["problem"].startswith("frees 0 bytes: what it matches is below memory.min_swap_bytes")
    assert found(config, "activation_swap: attention")[0] == 0


def test_another_platform_is_a_fault(config: Path) -> None:
    code, told = found(config, "platform: mindspore")
    assert code == 2
    assert told["faults"][0]["problem"] == "mindspore is not supported; only torch is"


@pytest.mark.parametrize("policy", ["torch-full", "torch-sac"])
def test_torchs_own_ways_are_checked_without_bytes(config: Path, policy: str) -> None:
    code, told = found(config, f"policy: {policy}")
    assert (code, told["effect"]) == (0, None)


def test_a_policy_and_a_plan_file_have_bytes_too(config: Path) -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nrules: [{layers: ['0'], ops: '.*', action: recompute}]\n")
    _, policy = found(config, "policy: full")
    _, file = found(config, "plan: mine.yaml")
    assert 0 < file["effect"]["total"]["recomputed_bytes"] < policy["effect"]["total"]["recomputed_bytes"]


def test_a_plan_for_another_model_is_a_fault(config: Path) -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nrules: [{layers: ['90'], ops: '.*', action: recompute}]\n")
    code, told = found(config, "plan: mine.yaml")
    assert code == 2
    assert "speaks of layer 90" in told["faults"][0]["problem"]


def test_experts_one_by_one_cannot_be_told_without_weights(config: Path) -> None:
    code, told = found(config, "policy: full", "model.experts_implementation=eager")
    assert (code, told["effect"]) == (1, None)
    assert "experts_implementation: grouped_mm" in told["warnings"][0]["problem"]


@pytest.mark.parametrize(
    "override",
    [
        "model.config.hidden_size=-1",
        "model.config.num_attention_heads=0",
        "model.config.rope_parameters={rope_type: odd}",
        "model.config.hidden_act=nothing",
        "model.config.num_hidden_layers=x",
        "model.config.num_experts=0",
        "model.config.head_dim=x",
        "model.config.layer_types=[a]",
        "model.config.nothing=3",
        "train.micro_batch_size=9000000000000000000",
    ],
)
def test_a_model_that_cannot_run_is_a_fault_and_no_traceback(config: Path, override: str) -> None:
    code, told = found(config, "policy: full", override)
    assert code == 2
    assert told["faults"][0]["path"] == "model"


@pytest.mark.parametrize("name", LEVELS)
def test_the_scenario_files_do_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    code, told = found(Path("configs") / name)
    total = told["effect"]["total"]
    assert code == 0, told["warnings"]
    assert total["saved_bytes"] < total["unplanned_bytes"]
    assert total["recomputed_bytes"] > 0
    assert (total["swapped_bytes"] > 0) == ("swap" in name)


def test_the_scenarios_save_more_from_level_to_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    saved = {name: found(Path("configs") / name)[1]["effect"]["total"]["saved_bytes"] for name in LEVELS}
    assert len(saved) == 4
    assert min(saved, key=saved.__getitem__) == "level3_full_all.yaml"


def test_a_full_size_mixture_is_checked_in_little_time_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name: qwen3-30b-a3b, dtype: bfloat16}\ndata: {path: [a], sequence_length: 4096}\n"
        "recompute: {mode: full, full_recompute_layer: [0-15]}\nswap: {enable: true, layer_swap: [{layers: [16-46]}]}\n"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "actmem.cli.main", "check", str(path)], check=True, capture_output=True)
    assert time.perf_counter() - started < 60  # 10 s on two free cores
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 2**20  # KiB


@pytest.mark.parametrize(
    ("memory", "field"),
    [("memory.tier=host", "memory.tier"), ("memory.disk_limit=1KiB", "memory.disk_limit")],
)
def test_what_training_would_refuse_is_a_fault(config: Path, memory: str, field: str) -> None:
    code, told = found(config, "activation_swap: attention", memory, "train.device=cpu")
    assert code == 2
    assert [fault["path"] for fault in told["faults"]] == [field]


def test_a_policy_that_swaps_nothing_is_a_warning(config: Path) -> None:
    code, told = found(config, "policy: attention-swap", "memory.min_swap_bytes=1GiB", "train.device=cpu")
    assert code == 1
    assert [warning["path"] for warning in told["warnings"]] == ["policy"]
