"""`actmem fit`: a verdict, what the peak is made of, and an exit code to script with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actmem.cli import main
from actmem.hardware import load_hardware, save_hardware

CONFIG = """
model: {name: qwen3-tiny, config: {num_hidden_layers: 1}}
data: {path: [nothing-is-read.txt], sequence_length: 64}
train: {micro_batch_size: 8}
"""


def device_of(mebibytes: int) -> str:
    save_hardware(load_hardware("cpu").model_copy(update={"memory_bytes": mebibytes * 2**20}), "device.yaml")
    return "device.yaml"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["fit", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_it_fits_without_a_plan(config: Path) -> None:
    code, output = run(config, "--hardware", device_of(70), "--no-swap")
    assert code == 0
    assert "It fits without a plan" in output and "optimizer adamw" in output
    assert output.count("best plan") == 2 and output.count("selective") == 2
    assert "Times: modelled" in output


def test_it_does_not_fit_and_what_would(config: Path) -> None:
    code, output = run(config, "--hardware", device_of(40), "--no-swap", "--json")
    data = json.loads(output)
    assert (code, data["verdict"], data["planned"]) == (1, "does not fit", None)
    assert data["least"]["peak_bytes"] > 40 * 2**20
    assert "--train lora" in data["remedies"]


def test_what_leaves_the_device_is_told(config: Path) -> None:
    sizes = ("model.config={num_hidden_layers: 4}", "model.loss=chunked", "data.sequence_length=1024")
    save_hardware(load_hardware("h100").model_copy(update={"memory_bytes": 300 * 2**20}), "card.yaml")
    code, output = run(config, *sizes, "--hardware", "card.yaml")
    assert code == 0 and "It fits with the plan" in output, output
    (row,) = (line.split() for line in output.splitlines() if "swapped, elsewhere" in line)
    assert row[2] == "-" and float(row[3]) > 1.0


def test_a_layout_that_is_none(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["actmem", "fit", str(config), "--hardware", "cpu", "--optimizer", "lion"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert "allowed: adamw, sgd, none" in capsys.readouterr().err
