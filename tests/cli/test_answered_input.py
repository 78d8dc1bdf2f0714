"""Input to the planner's commands that must be answered, never with a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from actmem.cli import main
from actmem.cli.main import app
from actmem.errors import ActmemError
from actmem.hardware import load_hardware
from actmem.hardware.saving import save_hardware

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1]}


def config(folder: Path, **fields: object) -> Path:
    path = folder / "run.yaml"
    data = {
        "model": {"config": {"model_type": "qwen3"} | SMALL | fields},
        "data": {"path": ["none"], "sequence_length": 64},
        "train": {"micro_batch_size": 4, "device": "cpu"},
    }
    path.write_text(yaml.safe_dump(data))
    return path


def answered(*arguments: object) -> str:
    """What a command says; fails where it is neither done nor refused in words."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    error = result.exception
    assert error is None or isinstance(error, ActmemError | SystemExit), f"{type(error).__name__}: {error}"
    return str(error) if isinstance(error, ActmemError) else result.output


def test_an_enormous_budget_is_answered(tmp_path: Path) -> None:
    answered("plan", config(tmp_path), "-o", tmp_path / "plan.yaml", f"memory_budget='{'9' * 400}GiB'")


def test_hardware_with_enormous_memory_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    save_hardware(load_hardware("cpu"), path)
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(data | {"memory_bytes": "9" * 400}))
    assert "memory_bytes" in answered("fit", config(tmp_path), "--hardware", path)


def test_hardware_with_a_name_too_long_for_a_file_is_told(tmp_path: Path) -> None:
    assert "allowed" in answered("fit", config(tmp_path), "--hardware", "h" * 5000)


def test_a_workspace_beyond_the_memory_is_told(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    save_hardware(load_hardware("cpu").model_copy(update={"workspace_bytes": 2**62}), path)
    said = answered("plan", config(tmp_path), "-o", tmp_path / "plan.yaml", "memory_budget=90%", f"hardware={path}")
    assert "workspace_bytes" in said


@pytest.mark.parametrize("name", ["frontier.json", "frontier.csv", "frontier.svg", "frontier.html"])
def test_a_directory_in_place_of_a_frontier_file_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    run = config(tmp_path)
    said = answered("pareto", run, "--hardware", "cpu", "-o", tmp_path / "out", "--points", "2", "--seconds", "0.1")
    assert name in said


def test_experts_in_no_layer_are_answered(tmp_path: Path) -> None:
    run = config(tmp_path, model_type="qwen3_moe", **EXPERTS)
    answered("plan", run, "-o", tmp_path / "plan.yaml", "memory_budget=99%")


def test_what_would_lower_a_budget_does_lower_it(tmp_path: Path) -> None:
    """Where the embedding's gradient makes up the least peak, swapping does not help, and is not to be named."""
    path, out = tmp_path / "run.yaml", tmp_path / "plan.yaml"
    data = {"path": ["none"], "sequence_length": 64}
    train = {"micro_batch_size": 2, "device": "cpu"}
    path.write_text(yaml.safe_dump({"model": {"name": "qwen3-tiny"}, "data": data, "train": train}))
    said = answered("plan", path, "-o", out, "memory_budget=1")
    swapped = answered("plan", path, "-o", out, "memory_budget=1", "memory.tier=disk", "memory.min_swap_bytes=1")
    least, least_swapped = (each.split("least possible is ")[1].split(",")[0] for each in (said, swapped))
    assert "swapping" not in said or least != least_swapped, f"{least} either way"


@pytest.mark.parametrize("name", ["bench.json", "bench.svg"])
def test_a_directory_in_place_of_a_bench_file_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert name in answered("bench", config(tmp_path), "--out", tmp_path / "out", "--policies", "none", "--rounds", "1")


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert "Not a directory" in answered("bench", run, "--out", run / "out", "--policies", "none", "--rounds", "1")
    assert "Not a directory" in answered("pareto", run, "--hardware", "cpu", "-o", run / "out")


@pytest.mark.parametrize("command", ["plan", "explain", "train"])
def test_an_error_is_data_too_where_data_was_asked_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: qwen3-tiny}\ndata: {path: [a.txt]}\nrecompute: {mode: ful}\n")
    output = ["-o", str(tmp_path / "plan.yaml")] if command == "plan" else []
    monkeypatch.setattr("sys.argv", ["actmem", command, str(path), "--json", *output])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert (fault["path"], fault["line"]) == ("recompute.mode", 3)
