"""`actmem explain`: every op of a layer, without a weight in memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actmem.cli import main

CONFIG = """
model: {name: qwen3-moe-tiny, config: {mlp_only_layers: [2]}}
data: {path: [nothing-is-read.txt], sequence_length: 16}
policy: selective
"""


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["explain", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.output


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["actmem", "explain", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_no_op_is_told_twice_where_tensors_are_spread(config: Path) -> None:
    config.write_text(CONFIG.replace("{name: qwen3-moe-tiny, config: {mlp_only_layers: [2]}}", "{name: qwen3-tiny}"))
    code, output = run(config, "parallel.tp_size=2", "--json")
    (layers,) = json.loads(output)
    paths = [row["path"] for row in layers["rows"] if row["path"] != "input"]
    assert code == 0
    assert "self_attn.q_proj._unsafe_view" in paths
    assert len(paths) == len(set(paths))
    held = [row["held_bytes"] for row in layers["rows"]]
    assert sum(held) == layers["total"]["held_bytes"] > 0


def test_one_table_for_each_kind_of_layer(config: Path) -> None:
    code, output = run(config)
    lines = [line.rstrip() for line in output.splitlines()]
    assert code == 0
    assert [line for line in lines if "plan selective" in line] == [
        "Qwen3MoeDecoderLayer, layers 0-1, 3, plan selective",
        "Qwen3MoeDecoderLayer#1, layer 2, plan selective",
    ]


def test_the_held_column_adds_up_as_printed(config: Path) -> None:
    _, output = run(config, "--layer", 0)
    shown = [line for line in output.splitlines() if {"save", "recompute", "total"} & set(line.split())]
    end = next(line for line in output.splitlines() if "bytes" in line).index("bytes") + len("bytes")
    held = [line[:end].split()[-1].replace(",", "") for line in shown]
    *parts, total = [int(text) for text in held if text.isdigit()]
    assert sum(parts) == total > 0


def test_one_layer_as_json(config: Path) -> None:
    code, output = run(config, "policy=full", "--layer", 2, "--json")
    (found,) = json.loads(output)
    assert (code, found["layers"], found["plan"]) == (0, [2], "full")
    assert found["total"]["held_bytes"] == sum(row["held_bytes"] for row in found["rows"])
    assert {row["action"] for row in found["rows"]} == {"save", "recompute", ""}


def test_without_policy_nothing_is_recomputed(config: Path) -> None:
    _, output = run(config, "policy=null", "--json")
    assert all(each["total"]["dropped_bytes"] == 0 for each in json.loads(output))


def test_a_full_size_model(config: Path) -> None:
    code, output = run(config, "model.name=qwen3-8b", "model.config=null", "data.sequence_length=4096", "--json")
    (found,) = json.loads(output)
    assert (code, len(found["layers"])) == (0, 36)
    assert found["total"]["flops"] > 10**12


def test_a_plan_file_and_its_idle_rule(config: Path) -> None:
    Path("mine.yaml").write_text(
        "actmem_plan: 1\nname: mine\nrules:\n"
        "- {layers: ['0-1'], ops: 'mlp\\..*', action: recompute}\n- {layers: all, ops: 'mpl.*', action: save}\n"
    )
    code, output = run(config, "policy=null", "plan=mine.yaml")
    assert code == 0
    assert "layers 0-1, plan mine" in output and "layer 3, plan mine" in output
    assert "1 rule for these layers without any op that matches: mpl.*" in output


def test_an_idle_setting_is_named_as_it_was_written(config: Path) -> None:
    sections = "recompute={mode: full, full_recompute_layer: [0-3], exclude_op: [AllGather]}"
    _, output = run(config, "policy=null", sections)
    assert "any op that matches: recompute.exclude_op 'AllGather'" in output


def test_a_plan_for_another_model_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("actmem_plan: 1\nrules: [{layers: ['90'], ops: '.*', action: recompute}]\n")
    assert "speaks of layer 90; the model has layers 0-3" in fails(
        monkeypatch, capsys, config, "policy=null", "plan=mine.yaml"
    )


def test_torchs_own_ways_cannot_be_explained(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "torch's own way" in fails(monkeypatch, capsys, config, "policy=torch-sac")


def test_a_layer_beyond_the_last(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "4 is no layer of this model; allowed: 0 to 3" in fails(monkeypatch, capsys, config, "--layer", 4)


def test_experts_one_by_one_are_refused_with_a_way_out(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(monkeypatch, capsys, config, "model.experts_implementation=eager")
    assert "experts_implementation: grouped_mm" in error


def test_prices_on_a_device(config: Path) -> None:
    code, output = run(config, "--layer", 0, "--hardware", "cpu", "--json", "memory.min_swap_bytes=1")
    (found,) = json.loads(output)
    assert code == 0
    rows = {row["path"]: row for row in found["rows"]}
    freed, saved = rows["self_attn.add"], rows["self_attn.q_proj.mm"]
    assert freed["action"] == "recompute" and freed["reason"].startswith("frees ")
    assert freed["price"]["freed_bytes"] == freed["dropped_bytes"]
    assert freed["rate"] == pytest.approx(freed["price"]["freed_bytes"] / freed["price"]["again_seconds"])
    assert freed["rate"] < freed["peak_rate"]
    assert saved["reason"].startswith("saved: making it again takes 1 op, ")
    assert saved["price"]["seconds"] > 0 and not saved["price"]["is_measured"]


def test_a_swapped_op_beside_what_the_link_can(config: Path) -> None:
    arguments = ("policy=attention-swap", "--layer", 0, "--hardware", "cpu", "memory.min_swap_bytes=1")
    _, output = run(config, *arguments, "--json")
    (found,) = json.loads(output)
    swapped = [row for row in found["rows"] if row["action"] == "swap" and row["path"] != "input"]
    assert swapped and all(row["rate"] <= row["peak_rate"] and "each way" in row["reason"] for row in swapped)
    _, output = run(config, *arguments)
    assert "modelled at nominal efficiency" in output and "at peaks" in output
