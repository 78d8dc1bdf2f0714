"""`actmem pareto`: the frontier of a small model, in all its files."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from actmem.cli import main
from actmem.planning.frontier import Frontier

CONFIG = """
model: {name: qwen3-tiny, config: {num_hidden_layers: 1}}
data: {path: [nothing-is-read.txt], sequence_length: 64}
train: {micro_batch_size: 8}
"""


def run(*arguments: object) -> tuple[int, str]:
    command = ["pareto", *map(str, arguments), "--points", "4", "--seconds", "0.5"]
    result = CliRunner().invoke(main.app, command, catch_exceptions=False)
    return result.exit_code, result.stdout


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["actmem", "pareto", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_all_files_and_a_table(config: Path, tmp_path: Path) -> None:
    code, output = run(config, "--hardware", "cpu", "-o", "out")
    assert code == 0
    assert "qwen3-tiny with changes, float32, 8 x 64 tokens on cpu, modelled" in output
    assert output.count("auto@") == 4 and "torch-sac" in output and "Times: modelled" in output
    found = Frontier.load("out/frontier.json")
    assert (found.knee is not None) == ("<- knee" in output)
    with Path("out/frontier.csv").open(encoding="utf-8") as stream:
        assert len(list(csv.reader(stream))) == 1 + len(found.points) + len(found.beside)
    assert imread("out/frontier.png").shape[1] > 1000
    ElementTree.parse("out/frontier.svg")
    page = Path("out/frontier.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3 and "Assumptions" in page and "a guess at a few cores" in page
    assert "Refused figures" not in page
    assert not any(outside in page for outside in ('src="', 'href="http', "@import"))


def test_the_device_is_the_configuration_s_where_none_is_named(config: Path) -> None:
    code, output = run(config, "hardware=h100-sxm", "-o", "out", "--json")
    assert (code, json.loads(output)["hardware"]) == (0, "h100-sxm")


def test_json_without_swapping(config: Path) -> None:
    code, output = run(config, "model.loss=chunked", "--hardware", "cpu", "-o", "out", "--json", "--no-swap")
    data = json.loads(output)
    assert (code, data["times"], data["tiers"], data["efficiency"]) == (0, "modelled", [], "nominal")
    assert all(point["swapped_bytes"] == 0 for point in data["points"])
    assert not any("swap" in point["label"] for point in data["beside"])


def test_hardware_that_is_not_known(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "h100-sxm" in fails(monkeypatch, capsys, config, "--hardware", "h1000", "-o", "out")


def test_a_folder_that_cannot_be_made(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(monkeypatch, capsys, config, "--hardware", "cpu", "-o", config / "out")
    assert "cannot write to" in error and "name a folder" in error
